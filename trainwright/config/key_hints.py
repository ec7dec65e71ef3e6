"""What an unknown key of a config file, or flag of the command line, is called here."""

import difflib
import functools
import re
from collections.abc import Iterable

from trainwright.base.errors import nearest_name
from trainwright.config import foreign_names
from trainwright.config.lazy.provenance import SECTIONS
from trainwright.config.settings import KEYS, TrainingConfig


@functools.cache
def keys_by_name() -> dict[str, str]:
    """Keys of config files, and flags of the command line, by the names of the Python API and of other libraries.

    >>> [keys_by_name()[name] for name in ("max_epochs", "fp16", "work_dir")]
    ['train.train_epoch', 'train.amp.enabled', 'train.output_dir']
    """
    rows = TrainingConfig.rows
    fields = {name: re.split(r"\W", here)[0] for name, here in foreign_names.SETTINGS.items()}
    fields |= {name: TrainingConfig.field_of(name) for name in (*rows, *TrainingConfig.aliases) if name != "graph"}
    places = {name: rows[field].place for name, field in fields.items() if field in rows}
    return {name: place for name, place in places.items() if place} | foreign_names.KEYS


def own_code_hint(name: str) -> str:
    """The key of a list of callbacks or hooks, as a sentence, for a name that ends so; "" for others."""
    kind = re.search(r"(callback|hook)s?$", name)
    if kind is None:
        return ""
    key = f"train.{kind[1]}s"
    return f"Did you mean {key!r}?{foreign_names.BESIDE.get(key, '')}"


def key_hint(name: str) -> str:
    """What an unknown key or flag is called in config files, as a sentence; "" if it is not known."""
    parts, keys = name.lstrip("-").replace("-", "_").split("."), keys_by_name()
    for number, part in enumerate(parts):
        if part in keys:
            rest = parts[number + 1 :] if keys[part] == "optim" else []
            beside = foreign_names.BESIDE.get(keys[part], "")
            return f"Did you mean {'.'.join([keys[part], *rest])!r}?{beside}"
    if name.startswith("-") and foreign_names.SETTINGS.get(parts[0], "").startswith("torchrun"):
        return f"Here: {foreign_names.SETTINGS[parts[0]]}, or trainwright launch -n N."
    if hint := own_code_hint(parts[-1]):
        return hint
    is_of_train = any(key.split(".")[:2] == ["train", parts[0]] for key in KEYS)
    return f"Did you mean {'.'.join(['train', *parts])!r}?" if is_of_train else ""


def train_key_hint(name: str, keys: Iterable[str]) -> str:
    """What an unknown key of ``train`` is called: by others, in the Python API, or misspelled. Never empty."""
    if hint := key_hint(name):
        return hint
    if name in SECTIONS:
        return f"{name} is a section of its own: write {name} in place of train.{name}."
    if name in TrainingConfig.rows:
        return f"It is a setting of the Python API, TrainingConfig({name}=...), and no key of train."
    near = nearest_name(name, keys).lstrip()
    near = near or next(map(key_hint, difflib.get_close_matches(name, keys_by_name(), n=1, cutoff=0.8)), "")
    return near or f"Keys of your own go into a section of their own, for example own = dict({name}=...)."
