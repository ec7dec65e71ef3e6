"""Warnings of values in a configuration that no training reads: under names of other libraries, or in other places."""

import ast
import difflib
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig

from trainwright.base.errors import UserError
from trainwright.config import foreign_names
from trainwright.config.lazy.instantiation import find_target
from trainwright.config.lazy.provenance import OWN_FILES, SECTIONS, TARGET, origin_file, raw_children, value_at
from trainwright.config.lazy.serialization import is_referenced, to_plain
from trainwright.config.lazy.targets import signature_of
from trainwright.config.yaml_file import Loader, is_saved

logger = logging.getLogger("trainwright.config")

OWN_CODE = ("train.callbacks", "train.hooks")  # lists of lazy calls
_OF_LOADERS = ("train.train_micro_batch_size", "train.test_micro_batch_size", "dataloader.train.num_workers")
_OFF = ("None", "False")


def warn_of_lists(found: Mapping[str, Any] | DictConfig) -> None:
    """Log lists of callbacks and hooks beside the section ``train``, which a training reads, and MMEngine's imports."""
    if "_base_" in found:
        logger.warning(
            "_base_ is not read: it is of MMEngine. A config file in Python imports another: from .base import model,"
            " dataloader, optim, train; then optim.lr = 0.001 changes a value."
        )
    for name, key in foreign_names.KEYS.items():
        section, _, lists = key.partition(".")
        if key not in OWN_CODE or value_at(_global(found, section), lists):
            continue
        in_loaders = value_at(_global(found, "dataloader"), name)
        for path, listed in (name, _global(found, name)), (f"dataloader.{name}", in_loaders):
            calls = listed if isinstance(listed, list | ListConfig) else ()
            if any(isinstance(one, DictConfig) and TARGET in one for one in calls):
                more = foreign_names.BESIDE.get(key, "")
                logger.warning("%s: a training does not read this list. Write %s = [...].%s", path, key, more)


def _global(found: Mapping[str, Any] | DictConfig, name: str) -> Any:
    return value_at(found, name) if isinstance(found, DictConfig) else found.get(name)


def warn_of_names(cfg: DictConfig, file: str) -> None:
    """Log names at the top of a file that nothing reads: of YAML all, else those of settings, and lazy calls."""
    from trainwright.config.key_hints import keys_by_name  # here: loads pydantic

    has_own_code = any(value_at(cfg, key) for key in OWN_CODE)  # which may read any section
    is_yaml, of_model = not file.endswith(".py"), parameters_of(value_at(cfg, "model"))
    if is_yaml:
        _warn_of_tuples(file)
    for name, line in (keys_of_yaml(file) if is_yaml else unread_names(Path(file))).items():
        key, value, there = keys_by_name().get(name, ""), value_at(cfg, name), name in cfg
        is_call = isinstance(value, DictConfig) and TARGET in value
        is_path = key == "dataloader.train.dataset" and not there  # or a name: no lazy call
        is_known = name in foreign_names.CALLS and (is_call or not is_yaml)  # warn_of_calls, warn_of_lists
        is_known |= key in OWN_CODE and (isinstance(value, ListConfig) or not is_yaml)
        if name in (*SECTIONS, "_base_") or is_known or is_path or (there and has_own_code):
            continue
        # Also by a file that this one imports.
        if (is_yaml or key or is_call) and not is_referenced(cfg, name):
            hint = _of_yaml(name, key, of_model) if is_yaml else _of_key(key)
            logger.warning("%s, line %d: nothing reads %s. %s", file, line, name, hint)
    _warn_of_sections(cfg, file)


def _warn_of_sections(cfg: DictConfig, file: str) -> None:
    """Log keys that a Python file sets in sections of its variables, in place of its own."""
    if not file.endswith(".py") or any(value_at(cfg, key) for key in OWN_CODE):  # which may read any section
        return
    for path, line in _set_elsewhere(Path(file)).items():
        name, section, key = path.split(".", 2)
        is_same = str(value_at(cfg, path)) == str(value_at(cfg, f"{section}.{key}"))
        if name in cfg and not is_same and not is_referenced(cfg, name):
            hint = f"Write {section}.{key} = ..., after {section} = {name}.{section}."
            logger.warning("%s, line %d: nothing reads %s. %s", file, line, path, hint)


def _set_elsewhere(file: Path) -> dict[str, int]:
    """The keys that a config file sets in sections of its variables, such as cfg.train.seed, and never reads."""
    nodes = list(ast.walk(ast.parse(file.read_bytes())))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    inside = {id(node.value) for node in attributes}
    read = {f"{ast.unparse(node)}." for node in nodes if _is_read(node) and id(node) not in inside}
    found = dict[str, int]()
    for node in attributes:
        name, section, *keys = (path := ast.unparse(node)).split(".")
        is_set = isinstance(node.ctx, ast.Store) and name not in SECTIONS and section in SECTIONS and keys
        if is_set and not any(one.startswith(f"{path}.") or f"{path}.".startswith(one) for one in read):
            found[path] = node.lineno
    return found


def _is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)


def _of_key(key: str) -> str:
    if key.startswith("--"):
        return f"Start with {key}."
    return f"A training reads {key or ', '.join(SECTIONS)}."


def _of_yaml(name: str, key: str, of_model: Collection[str]) -> str:
    """What a key at the top of YAML may mean, as a sentence; ``key``: that of a setting with this name."""
    from trainwright.config.key_hints import key_hint, keys_by_name  # here: loads pydantic

    if name == "defaults":
        others = "A file in Python imports another: from .base import model, dataloader, optim, train."
        return f"It is of Hydra: the settings of these files are not read. {others}"
    if key:
        return _of_key(key)
    if name in of_model:
        return f"Did you mean 'model.{name}'?"
    places = {one: f"model.{one}" for one in of_model} | keys_by_name() | {one: one for one in SECTIONS}
    near = difflib.get_close_matches(name, places, n=1, cutoff=0.8)
    return key_hint(name) or (f"Did you mean {places[near[0]]!r}?" if near else _of_key(""))


def parameters_of(call: Any) -> Collection[str]:
    """The names of the arguments that the target of a lazy call takes."""
    if not (isinstance(call, DictConfig) and TARGET in call):
        return ()
    try:
        signature = signature_of(find_target(call))
    except UserError:  # reported by the check of this key
        return ()
    return () if signature is None else signature.parameters.keys()


def keys_of_yaml(file: str) -> dict[str, int]:
    """The keys at the top of a YAML file that its text refers to nowhere, with their lines."""
    (text, root), found = _yaml(file), dict[str, int]()
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        anchors = re.findall(r"&(\w+)", text[key.start_mark.index : value.end_mark.index])
        is_used = any(re.search(rf"\*{anchor}\b", text) for anchor in anchors)
        is_used |= re.search(rf"\$\{{[^}}]*\b{re.escape(key.value)}\b", text) is not None
        if not is_used and key.value not in ("<<", "project_root"):
            found[key.value] = key.start_mark.line + 1
    return found


def _yaml(file: str) -> tuple[str, yaml.Node | None]:
    """The text of a file, and its nodes; None for a saved one, which has all that its configuration had."""
    text = Path(file).read_text(encoding="utf-8-sig")
    return text, None if is_saved(text) else yaml.compose(text, Loader=Loader)


def _warn_of_tuples(file: str) -> None:
    """Log tuples as Python writes them, which are texts in YAML; not those in quotes."""
    for name, scalar in _scalars(_yaml(file)[1], ""):
        if scalar.style is None and re.fullmatch(r"\([-+.\de, ]*\d,[-+.\de, ]*\)", scalar.value):
            values = [one.strip() for one in scalar.value.strip("(), ").split(",")]
            logger.warning(
                "%s, line %d: %s: %s is a text, because YAML has no tuples. Write [%s].",
                file, scalar.start_mark.line + 1, name, scalar.value, ", ".join(values),
            )  # fmt: skip


def _scalars(node: yaml.Node | None, path: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    if isinstance(node, yaml.ScalarNode):
        yield path, node
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(value, f"{path}.{key.value}".lstrip("."))
    elif isinstance(node, yaml.SequenceNode):
        for place, value in enumerate(node.value):
            yield from _scalars(value, f"{path}.{place}")


def warn_of_calls(cfg: DictConfig) -> None:
    """Log lazy calls, named as in other libraries, in place of which a training uses the packaged default."""
    for name, key in foreign_names.CALLS.items():
        call, default = value_at(cfg, name), value_at(cfg, key)
        is_default = (file := origin_file(default)) is not None and file.is_relative_to(OWN_FILES)
        if not (isinstance(call, DictConfig) and "_target_" in call and is_default):
            continue
        others = {other: node for other, node in raw_children(cfg).items() if other != name}
        text = str(to_plain(others)[0]).replace(str(to_plain(default)[0]), "")
        if str(to_plain(call)[0]["_target_"]) not in text and not is_referenced(others, name):
            logger.warning("%s: a training does not read this lazy call. Write %s = LazyCall(...)(...).", name, key)


def warn_of_loader_keys(cfg: DictConfig) -> None:
    """Log batch sizes and numbers of workers of the section dataloader that belong elsewhere, where others are."""
    from trainwright.config.key_hints import keys_by_name  # here: loads pydantic

    loaders = value_at(cfg, "dataloader")
    own = {str(key) for key in loaders} - {"train", "test"} if isinstance(loaders, DictConfig) else set[str]()
    for name in sorted(own & keys_by_name().keys()):
        value, key = value_at(loaders, name), keys_by_name()[name]
        is_other = key in _OF_LOADERS and type(value) is int and value_at(cfg, key) != value
        if is_other and not is_referenced(cfg, name):
            logger.warning("dataloader.%s: a training does not read it. Write %s=%r.", name, key, value)


def unread_names(file: Path) -> dict[str, int]:
    """The names that the top level of a config file sets to more than None or False and never reads, with their lines.

    Nothing if it may read them by their text, as with ``globals()``.
    """
    module = ast.parse(file.read_bytes())
    names = [node for node in ast.walk(module) if isinstance(node, ast.Name)]
    read = {node.id for node in names if not isinstance(node.ctx, ast.Store)}
    if not read.isdisjoint(("globals", "locals", "vars", "exec", "eval")):
        return {}
    texts = [n.value for n in ast.walk(module) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    read |= {name for text in texts if "${" in text for name in re.findall(r"\w+", text)}
    if any(node.id == "__all__" for node in names):
        read.update(texts)
    given = (line for line in module.body if isinstance(line, ast.Assign) and ast.unparse(line.value) not in _OFF)
    lines = [target for line in given for target in line.targets]
    return {one.id: one.lineno for one in lines if isinstance(one, ast.Name) and one.id not in read}
