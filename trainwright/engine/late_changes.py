"""Settings that a user changes after the trainer was built: each is used by the next ``train()``, or refused by it."""

from collections.abc import Callable, Mapping
from typing import Any

from trainwright.base.errors import ConfigError
from trainwright.config.secrets import without_secrets
from trainwright.engine.resumed_settings import ABSENT, differences, shown


def late_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], changed_of: Callable[[str], Any], *, kind: str, where: str
) -> set[str]:
    """The names of the settings that differ from those that the trainer has read.

    Args:
        before, now: the settings by name.
        changed_of: the column ``changed`` of a name in the table of settings.
        kind: of the trainer.
        where: what a message writes before a name.

    Raises:
        ConfigError: some of them are fixed once the trainer is built; the message lists them.
    """
    names = differences(before, now)
    late = [name for name in names if _is_fixed(changed_of(name), before.get(name), now.get(name))]
    if late:
        old, new = (
            without_secrets({name: values[name] for name in late if name in values})[0] for values in (before, now)
        )
        changes = {name: [shown(values.get(name, ABSENT)) for values in (old, new)] for name in late}
        raise ConfigError(
            "\n".join(
                f"{where}{name}: was changed from {one} to {other} after the {kind} was built, without effect on it."
                f" Build another {kind}, or change the setting back."
                for name, (one, other) in changes.items()
            )
        )
    return set(names)


def _is_fixed(changed: Any, before: Any, now: Any) -> bool:
    if callable(changed):
        return bool(changed(before) != changed(now))
    return bool(changed == "build")
