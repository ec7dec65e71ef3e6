"""What a resumed run has changed: the settings that differ from those of its checkpoint, and which value trains now."""

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainwright.base.dist import is_main_process
from trainwright.config.secrets import MISSING
from trainwright.optim.muon import IS_HIDDEN
from trainwright.optim.named import CLIPPING

logger = logging.getLogger("trainwright.engine")

Settings = Mapping[str, Any]  # by name, in the types of JSON

KEPT, TAKEN = "kept from the checkpoint", "taken now"
ABSENT: Any = object()  # the value of a setting that there is not
_OF_ORDER = ("seed", "train.seed", "num_samples")
_OF_UPDATE = ("train.global_batch_size", "train.num_accumulation_steps.")  # the latter are entries of a schedule
_SAMPLES = f"{TAKEN}: an update has another number of samples, and the learning rate is not scaled with it"
_ORDER = f"{TAKEN}: the order of samples differs, and some of this epoch may repeat or be missing"
_ONLY_WEIGHTS = (
    "A new run from the weights only (init_weights_from, train.load_weight; another folder) uses the new value of what"
    " is kept."
)
_MAX_SHOWN = 80  # characters of a value

# Of a group: the parameters and their names, the current rate, and what has no effect on the result of a step.
_NOT_OPTIONS = {"params", "param_names", "initial_lr", "fused", "foreach", "capturable", "differentiable", IS_HIDDEN}
_POSITION = {"base_lrs", "last_epoch", "lr_lambdas", "best", "num_bad_epochs", "cooldown_counter"}  # of a schedule
_ADDRESS = re.compile(r" at 0x[0-9a-f]+|(?<=_trainwright_config_)[0-9a-f]+(?=\.)")  # of an object, of a load of a file


def options_of(name: str, part: Any) -> dict[str, Any]:
    """The options of an optimizer, or those in the state of a schedule: a resume keeps the checkpoint's.

    An option that differs between the groups of the optimizer is a list of its values.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5, momentum=0.9)
    >>> options = options_of("optimizer", optimizer)
    >>> options["optimizer.lr"], options["optimizer.momentum"]
    (0.5, 0.9)
    """
    groups = getattr(part, "param_groups", None)
    if groups and all(IS_HIDDEN in group for group in groups):  # of Muon and of AdamW, with rates of their own
        kinds = (("muon", True), ("adamw", False))
        each = [(f"{name}.{kind}", [one for one in groups if one[IS_HIDDEN] is hidden]) for kind, hidden in kinds]
        return {option: value for kind, some in each for option, value in _of_groups(kind, some).items()}
    if groups:
        return _of_groups(name, groups)
    state = part.state_dict() if hasattr(part, "step") else {}
    kept = {key: value for key, value in state.items() if key not in _POSITION and not key.startswith("_")}
    return {f"{name}.{option}": plain(value) for option, value in kept.items() if _is_plain(value)}


def _of_groups(name: str, groups: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for option in dict.fromkeys(option for group in groups for option in group if _is_option(option)):
        read = "initial_lr" if option == "lr" and all("initial_lr" in group for group in groups) else option
        values = [plain(group.get(read)) for group in groups]
        distinct = sorted((one for place, one in enumerate(values) if one not in values[:place]), key=repr)
        found[f"{name}.{option}"] = distinct[0] if len(distinct) == 1 else distinct
    return found


def plain(value: Any) -> Any:
    """A value in the types of JSON; what JSON cannot represent is text."""
    return json.loads(json.dumps(value, default=_text))


def _text(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return _ADDRESS.sub("", str(value))


def _is_option(name: str) -> bool:
    return name not in _NOT_OPTIONS and not name.startswith(CLIPPING)  # which a resume takes from the new settings


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def flat(settings: Any, path: str = "") -> dict[str, Any]:
    """The values of nested mappings by their dotted keys, in the types of JSON."""
    if isinstance(settings, str):
        return {path: _ADDRESS.sub("", settings)}  # of an object that is written as text
    if not isinstance(settings, Mapping) or not settings:
        return {path: plain(settings)}
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{path}.{key}" if path else str(key))
    return found


def differences(before: Settings, now: Settings) -> list[str]:
    """The names of the settings that differ; of secrets the values are unknown."""
    pairs = {name: (before.get(name, ABSENT), now.get(name, ABSENT)) for name in [*before, *now]}
    return [name for name, pair in pairs.items() if pair[0] != pair[1] and MISSING not in pair]


def log_changes(before: Settings, now: Settings, effects: Mapping[str, str]) -> None:
    """Log the settings that have an effect as one table."""
    if not effects or not is_main_process():
        return
    rows = [("setting", "before", "now", "effect")]
    for name, effect in effects.items():
        one, other = (shown(settings.get(name, ABSENT)) for settings in (before, now))
        text = _ORDER if name in _OF_ORDER else _SAMPLES if name.startswith(_OF_UPDATE) else effect
        rows.append((name, one, other, text))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*(row[place].ljust(width) for place, width in enumerate(widths)), row[3]]) for row in rows]
    more = [_ONLY_WEIGHTS] if KEPT in effects.values() else []
    logger.warning("%s", "\n  ".join(["Resumed with other settings than before", *lines, *more]))


def shown(value: Any) -> str:
    """A value as the text of a message."""
    text = "not set" if value is ABSENT else str(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
