"""Overrides of the command line, in hydra's grammar: ``optim.lr=1e-3``, ``model.layers=[1,2]``, ``~train.scheduler``.

hydra-core parses them, and is imported for the first override. Nothing is evaluated as code.
"""

import copy
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from trainwright.base.deprecation import warn_of_setting
from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError, did_you_mean
from trainwright.config import foreign_names
from trainwright.config.lazy.provenance import SECTIONS, TARGET, distrust, mark, raw_children, set_override
from trainwright.config.yaml_file import check_interpolations

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# Aliases of train settings, and the canonical key of each.
CANONICAL = {
    "eval_period": "evaluation.eval_period",
    "topk": "evaluation.evaluator.topk",
    "recompute_grad": "activation_checkpoint",
}


def apply_overrides(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Apply ``overrides`` to ``cfg`` in place, in order, and return it.

    ``a.b=1`` sets a value (``+a.b`` and ``++a.b``, too), a dict is merged into an existing one, ``~a.b`` deletes,
    ``a=`` sets the empty string, ``a.0.b=1`` changes an element of a list. Missing parents are created. All are parsed
    before the first is applied. An alias (``train.eval_period``) is replaced by the canonical key if the config has
    that. Keys that no override names stay where they are: a config of another program has keys of its own.

    Raises:
        ConfigError: not an override, or several values (a sweep).
        ConfigKeyError: the parent is not a section, the index is outside the list, or the key to delete does not exist.
        ConfigTypeError: a value does not have the declared type of the key.
    """
    parsed = [(text, _parse(text)) for text in overrides]
    for text, override in parsed:
        key = _resolved(cfg, override.key_or_group)
        keys = key.split(".")
        try:
            if override.is_delete():
                _delete(cfg, keys, override, text)
            else:
                # Python's None is hydra's null; the text needs quotes.
                value: Any = None if override.get_value_string() == "None" else override.value()
                for alias in CANONICAL if key == "train" and isinstance(value, dict) else ():
                    if alias in value:
                        _set(cfg, _resolved(cfg, f"train.{alias}").split("."), value.pop(alias), text)
                _set(cfg, keys, value, text)
        except ConfigError as error:
            raise type(error)(f"override {text!r}: {error}") from None
        except (OmegaConfBaseException, RecursionError) as error:
            raise ConfigTypeError(f"override {text[:200]!r}: {str(error).splitlines()[0]}") from error
    return cfg


def resolve_aliases(train: DictConfig, aliases: Iterable[str] = CANONICAL) -> None:
    """Move the values of aliases in ``train`` to their canonical keys."""
    from trainwright.config.settings import SECTIONS  # here: loads pydantic

    for alias in aliases:
        if alias not in train:
            continue
        canonical = CANONICAL[alias]
        warn_of_setting(f"train.{alias}", f"train.{canonical}")
        value = train[alias]
        there = _plain(OmegaConf.select(train, canonical))
        default = _plain(OmegaConf.select(OmegaConf.create(SECTIONS["train"].value(lambda _: dict)), canonical))
        if there is not None and there not in (_plain(value), default):
            raise ConfigError(
                f"train.{alias} is {value!r} and train.{canonical} is {there!r}: these are two names of one setting. "
                f"Give one of them; the canonical name is train.{canonical}."
            )
        del train[alias]
        OmegaConf.update(train, canonical, copy.deepcopy(value), merge=True, force_add=True)


def _resolved(cfg: DictConfig, key: str) -> str:
    """The key that an override sets: the canonical one of an alias, if ``cfg`` has that.

    A value under the other name of the setting moves there: one setting has one value.
    """
    section, _, rest = key.partition(".")
    train = raw_children(cfg).get(section)
    if section != "train" or not rest or not isinstance(train, DictConfig) or not raw_children(train):
        return key
    for alias, canonical in CANONICAL.items():
        if _is_at(rest, alias):
            above, _, last = canonical.rpartition(".")
            parent = OmegaConf.select(train, above) if above else train
            warn_of_setting(f"train.{alias}", f"train.{canonical}")
            if not isinstance(parent, DictConfig) or last not in raw_children(parent):
                return key
            key = f"train.{canonical}{rest.removeprefix(alias)}"
        elif not (_is_at(rest, canonical) or _is_at(canonical, rest)):
            continue
        with open_dict(train):
            resolve_aliases(train, [alias])
    return key


def _is_at(key: str, above: str) -> bool:
    return f"{key}.".startswith(f"{above}.")


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


# Of a search: ``log(1e-4,1e-1)``. Hydra knows ``int`` of one value; its ``interval`` is another name of ``uniform``.
RANGE = re.compile(r"(uniform|log|int|logint)\(\s*([^\s,()]+)\s*,\s*([^\s,()]+)\s*\)")


def _parse(text: str) -> "Override":
    if isinstance(text, str) and RANGE.fullmatch(text.partition("=")[2]):
        raise ConfigError(
            f"override {text!r}: gives a range, and one run takes one value. `trainwright train CONFIG ... --trials N"
            " --metric NAME` draws values from it (docs/sweeps.md)."
        )
    override = parse_override(text)
    if override.is_sweep_override():
        key, value = override.get_key_element(), override.get_value_string()
        raise ConfigError(
            f"override {text!r}: gives several values, and one run takes one. `trainwright train CONFIG ... --sweep`"
            f" trains a run for each (docs/sweeps.md). A list is written {key}=[{value}], and a text that contains"
            f" commas \"{key}='{value}'\"."
        )
    if not override.is_delete():
        check_interpolations(override.value(), f"override {text!r}")
    return override


def _written(key: str, value: str) -> str | None:
    """An override in the grammar of hydra, for a value as Python or a shell writes it; None: it is not known."""
    value = value.strip()
    if (inner := re.fullmatch(r"\(([^()]*)\)", value)) is not None:
        return f"'{key}=[{inner[1].rstrip(', ')}]'"
    if (pairs := re.fullmatch(r"dict\(([^()]*)\)", value)) is not None:
        return f"'{key}={{{pairs[1].replace('=', ': ')}}}'"
    if re.fullmatch(r"[^,]+,", value):
        return f"{key}={value[:-1]}"
    is_plain = re.fullmatch(r"[\w.]+", key) and value and not re.search(r"[][{}()'\"\\$,]", value)
    return f"\"{key}='{value}'\"" if is_plain else None


def parse_override(text: str) -> "Override":
    """An override as hydra reads it, also one with several values."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if not isinstance(text, str):
        raise ConfigTypeError(
            f"override {text!r}: got {type(text).__name__}; an override is text, such as 'train.seed=1'."
        )
    try:
        override = OverridesParser.create().parse_overrides([text])[0]
    except (HydraException, ValueError, AssertionError, RecursionError) as error:
        key, _, value = text.partition("=")
        if "[" in key and (dotted := re.sub(r"\[(\d+)\]", r".\1", key)) != key:
            raise ConfigError(f"override {text!r}: an index of a list has a dot. Write {dotted}={value}") from error
        drawn = re.match(r"(\w+)\((.*)\)$", value.strip())
        if drawn is not None and (ours := foreign_names.drawn_hint(drawn[1], drawn[2])) is not None:
            line = f"{key}={ours}"
            line = f'"{line}"' if "'" in line else f"'{line}'"  # a shell reads brackets itself
            raise ConfigError(
                f"override {text!r}: there is no function {drawn[1]!r}. Write {line}, with --trials N."
            ) from error
        if (right := _written(key, value)) is not None:
            raise ConfigError(f"override {text!r}: cannot be read. Write {right}") from error
        reason = str(error).partition("\nSee https")[0]
        raise ConfigError(
            f"override {text!r}: cannot be read. It is written key=value, as in 'optim.lr=1e-3'; values with special "
            f"characters go in quotes, as in \"name='a b: c'\". ({reason})"
        ) from error
    if override.package is not None or "/" in override.key_or_group or not override.key_or_group:
        raise ConfigError(
            f"override {text!r}: {override.get_key_element()!r} is not a key. Keys are joined by dots: train.seed=1."
        )
    return override


def _set(cfg: DictConfig, keys: list[str], value: Any, text: str) -> None:
    _put(*_place(cfg, keys, text, make=True), value, text)


def _put(parent: Any, key: Any, value: Any, text: str) -> None:
    """Set a value as data, or merge a dict into the section that is there, whose other values stay trusted."""
    there = raw_children(parent).get(key)
    if isinstance(value, dict) and isinstance(there, DictConfig) and isinstance(there._value(), dict):
        for name, child in value.items():
            _put(there, name, child, text)
        return
    before = there._value() if isinstance(there, AnyNode) else None
    if isinstance(before, bool) and isinstance(value, str) and _means_a_bool(value):
        name = parent._get_full_key(key)
        raise ConfigTypeError(f"got {value!r} (str), and {name} is {before}. Write true or false.")
    if value == "" and isinstance(before, int | float):
        raise ConfigTypeError(f"got '', and {parent._get_full_key(key)} is {before!r}. Write a value.")
    with open_dict(parent):
        parent[key] = value
    set_override(parent, key, text)
    if key == TARGET:
        mark(parent, is_data=True)
    distrust(raw_children(parent)[key])


def _means_a_bool(value: str) -> bool:
    """Whether a text, which counts as true in Python, stands for true or false, even if it is misspelt."""
    word = value.lower()
    return word in ("yes", "no", "on", "off") or bool(get_close_matches(word, ("true", "false"), cutoff=0.75))


def _delete(cfg: DictConfig, keys: list[str], override: "Override", text: str) -> None:
    parent, key = _place(cfg, keys, text, make=False)
    if key not in raw_children(parent):
        raise ConfigKeyError(f"there is no {'.'.join(keys)!r} to delete. {_nearest(key, parent)}")
    if override.value_type is not None and parent[key] != override.value():
        raise ConfigError(f"{'.'.join(keys)} is {parent[key]!r}, so it is not deleted.")
    with open_dict(parent):
        del parent[key]


def _place(cfg: DictConfig, keys: list[str], text: str, *, make: bool) -> tuple[Any, Any]:
    """The section that holds the last of ``keys``, and this key."""
    node: Any = cfg
    for depth in range(len(keys) - 1):
        key, above = _own_key(node, keys[: depth + 1]), ".".join(keys[: depth + 1])
        if raw_children(node).get(key) is None or OmegaConf.is_missing(node, key) or node[key] is None:
            if not make:
                raise ConfigKeyError(f"there is no {above!r}. {_nearest(key, node)}")
            with open_dict(node):
                node[key] = {}
            if depth or key not in SECTIONS:  # whose other keys are defaults
                set_override(node, key, text)
        child = node[key]
        if not isinstance(child, DictConfig | ListConfig):
            kind = type(child).__name__
            is_object = child is not None and not isinstance(child, str | bytes | bool | int | float | complex)
            raise ConfigKeyError(
                f"Trying to update key {'.'.join(keys)!r}, but {above!r} is not a section: it is "
                + (
                    f"an object of {kind}, which is built already. Write {above} = LazyCall({kind})(...) in the file."
                    if is_object
                    else f"{child!r} ({kind})."
                )
            )
        node = child
    return node, _own_key(node, keys)


def _own_key(node: Any, keys: list[str]) -> Any:
    """The last of ``keys`` in the type of the keys of ``node``: an index of a list, a number if keys are numbers."""
    last = keys[-1]
    if isinstance(node, ListConfig):
        if not last.isdigit() or int(last) >= len(node):
            if not last.isdigit() and len(node) == 1:
                raise ConfigKeyError(
                    f"{'.'.join(keys[:-1])!r} is a list. Write {'.'.join([*keys[:-1], '0', last])}=..."
                )
            raise ConfigKeyError(
                f"{'.'.join(keys[:-1])!r} is a list of {len(node)}; {last!r} is not an index of it (0 to"
                f" {len(node) - 1}). To change the list write {'.'.join(keys[:-1])}=[...]."
            )
        return int(last)
    if last.isdigit() and last not in raw_children(node) and int(last) in raw_children(node):
        return int(last)
    return last


def _nearest(key: Any, node: Any) -> str:
    return did_you_mean(str(key), map(str, raw_children(node)))
