"""Write a configuration as YAML that loads to an equal one and builds the same run."""

import dataclasses
import enum
import logging
import os
from pathlib import Path, PurePath
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig

from trainwright.config.dotted import dotted_path
from trainwright.config.provenance import raw_children
from trainwright.config.yaml_file import Dumper

logger = logging.getLogger("trainwright.config")

_MAX_SHOWN = 200  # characters of the text that stands for an object


def save(cfg: Any, filename: str | os.PathLike[str], *, project_root: str | os.PathLike[str] | None = None) -> None:
    """Write ``cfg`` to a YAML file, whole or not at all; a file that is there is replaced.

    Interpolations stay as they are. A target is written as its shortest dotted path, another class or function as a
    node that builds to it. Objects that have no such path are written as text, which one warning names: a run with them
    is started from its Python configuration. ``project_root`` is written as a top-level key, relative to the file's
    folder.
    """
    plain, left_out = to_plain(cfg)
    path = Path(filename)
    if project_root is not None:
        relative = os.path.relpath(Path(project_root).resolve(), path.resolve().parent)
        plain = {**plain, "project_root": relative.replace(os.sep, "/")}
    text = yaml.dump(plain, Dumper=Dumper, default_flow_style=None, allow_unicode=True, width=9999, sort_keys=False)
    # A rename is atomic only within one filesystem, so the temporary file lies beside the target.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if left_out:
        logger.warning(
            "%s: written as text, since no dotted path leads to it: %s. To start from this file, move functions and "
            "classes into an importable module, and describe objects by LazyCall.",
            filename,
            "; ".join(left_out),
        )


def to_plain(cfg: Any) -> tuple[Any, list[str]]:
    """``cfg`` in the types of YAML, and the places where text had to stand for an object."""
    left_out: list[str] = []
    return _plain(cfg, "", left_out), left_out


def _plain(value: Any, path: str, left_out: list[str]) -> Any:
    if isinstance(value, DictConfig):
        return _plain_mapping(value, path, left_out)
    if isinstance(value, ListConfig):
        children = raw_children(value)
        return (
            [_plain(child, f"{path}[{index}]", left_out) for index, child in children.items()]
            if isinstance(value._value(), list)
            else value._value()
        )
    if hasattr(value, "_is_interpolation"):  # a leaf of a config
        value = value._value()
    if isinstance(value, dict):
        return {_key(key): _plain(child, f"{path}.{key}", left_out) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child, f"{path}[{index}]", left_out) for index, child in enumerate(value)]
    return _plain_leaf(value, path, left_out)


def _plain_mapping(cfg: DictConfig, path: str, left_out: list[str]) -> Any:
    if not isinstance(cfg._value(), dict):
        return cfg._value()
    plain: dict[Any, Any] = {}
    object_type = cfg._metadata.object_type
    if dataclasses.is_dataclass(object_type) and "_target_" not in cfg and (name := dotted_path(object_type)):
        plain["_target_"] = name  # fields of a dataclass: building the node gives the dataclass again
    for key, child in raw_children(cfg).items():
        where = f"{path}.{key}" if path else str(key)
        raw = child._value() if not isinstance(child, DictConfig | ListConfig) else child
        if key == "_target_" and callable(raw) and dotted_path(raw):
            plain[key] = dotted_path(raw)
        else:
            plain[_key(key)] = _plain(child, where, left_out)
    return plain


def _plain_leaf(value: Any, path: str, left_out: list[str]) -> Any:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, PurePath):
        return str(value)
    for plain_type in (int, float, str):  # subclasses, such as numpy.float64
        if isinstance(value, plain_type):
            return plain_type(value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return _plain_leaf(value.item(), path, left_out)
    if callable(value) and (name := dotted_path(value)):
        return {"_target_": name, "_partial_": True}
    return _text(value, path, left_out)


def _text(value: Any, path: str, left_out: list[str]) -> str:
    try:
        text = repr(value)
    except Exception as error:  # a repr is the object's own code and may fail
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    text = text[:_MAX_SHOWN]
    left_out.append(f"{path or 'the configuration'} = {text}")
    return text.replace("${", "$ {")  # it must not be taken for an interpolation


def _key(key: Any) -> Any:
    return key.name if isinstance(key, enum.Enum) else key
