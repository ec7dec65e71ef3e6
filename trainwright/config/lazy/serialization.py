"""Write a configuration as YAML that loads to an equal one and builds the same run, or as Python code for reading."""

import dataclasses
import enum
import functools
import logging
import os
import re
from pathlib import Path, PurePath
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from trainwright.base.files import atomic_write, relative_path
from trainwright.config.lazy.allowlist import PLAIN_CONTAINERS, is_never_named
from trainwright.config.lazy.provenance import DefaultNode, is_default, raw_children
from trainwright.config.lazy.targets import dotted_path, short_name
from trainwright.config.secrets import redact, warn_of_hidden, without_secrets
from trainwright.config.yaml_file import to_text, with_format

logger = logging.getLogger("trainwright.config")

_PLAIN = (bool, int, float, str, bytes)
_MAX_SHOWN = 200  # characters of the text that stands for an object
_LINE_LENGTH = 88  # of to_py
# The first line of a file: the keys that were not set by the user, where that matters; of derived ones with the value.
DEFAULTS = "# Defaults:"


def save(cfg: Any, filename: str | os.PathLike[str], *, project_root: str | os.PathLike[str] | None = None) -> None:
    """Write ``cfg`` to a YAML file, replacing an existing file atomically.

    Interpolations are not resolved. A target is written as its shortest dotted path; other classes and functions, and
    the enum members, dtypes and devices among the arguments of a call, as a node that builds them. One warning lists
    the values that cannot be restored from the file: objects without a path, which are written as text, and targets
    that data may not name. Start such a run from its Python file. ``project_root`` is written as a top-level key,
    relative to the file's folder. Secrets are written as ``???``, with one warning that names the keys (see
    :mod:`trainwright.config.secrets`).
    """
    atomic_write(filename, to_yaml(cfg, filename, project_root=project_root))


def to_yaml(cfg: Any, filename: str | os.PathLike[str], *, project_root: str | os.PathLike[str] | None = None) -> bytes:
    """The content that :func:`save` writes to ``filename``; its warnings name that file."""
    writer = _Writer()
    plain, hidden = without_secrets(writer.plain(cfg, ""))
    if project_root is not None:
        plain = {**plain, "project_root": relative_path(Path(project_root).resolve(), Path(filename).resolve().parent)}
    warn_of_hidden(hidden, filename)
    if writer.left_out:
        _warn_of_left_out(os.path.abspath(filename), "; ".join(writer.left_out))
    defaults = f"{DEFAULTS} {', '.join(writer.defaults)}\n" if writer.defaults else ""
    return with_format(defaults + to_text(plain, flow=None)).encode()


@functools.cache  # a run writes its configuration twice, before and after it is completed
def _warn_of_left_out(filename: str, values: str) -> None:
    logger.warning(
        "%s: not restored when a run starts from this file: %s. Move functions and classes into an importable "
        "module, describe objects with LazyCall; or start from the Python file.",
        filename,
        values,
    )


def to_plain(cfg: Any) -> tuple[Any, list[str]]:
    """``cfg`` in the types of YAML, and the values that cannot be restored from it."""
    writer = _Writer()
    return writer.plain(cfg, ""), writer.left_out


def is_referenced(cfg: Any, name: str) -> bool:
    """Whether a value of ``cfg`` refers to a key of this name: ``${name}``, ``${section.name}``."""
    return re.search(rf"\$\{{[^}}]*\b{re.escape(name)}\b", str(to_plain(cfg)[0])) is not None


class _Writer:
    """Converts a configuration; collects the values that YAML cannot represent, and the keys of packaged defaults."""

    def __init__(self) -> None:
        self.left_out: list[str] = []
        self.defaults: list[str] = []

    def plain(self, value: Any, path: str, *, in_call: bool = False) -> Any:
        """``in_call``: it is an argument of a call, or in one."""
        if hasattr(value, "_is_interpolation"):  # of a config
            if isinstance(value, DictConfig) and isinstance(value._value(), dict):
                return self._mapping(value, path, in_call)
            value = value._value()
        if value is None or type(value) in _PLAIN:
            return value
        if isinstance(value, dict | list | tuple) and type(value) not in (dict, list, tuple):
            form = "dict" if isinstance(value, dict) else "list"
            self.left_out.append(f"{path} = {_short_repr(value)}, written as a plain {form}")
        if isinstance(value, dict):
            return {_key(key): self.plain(child, f"{path}.{key}", in_call=in_call) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(child, f"{path}[{index}]", in_call=in_call) for index, child in enumerate(value)]
        return self._leaf(value, path, in_call)

    def _mapping(self, cfg: DictConfig, path: str, in_call: bool) -> Any:
        plain: dict[Any, Any] = {}
        children = raw_children(cfg)
        is_call = "_target_" in children
        object_type = cfg._metadata.object_type
        if dataclasses.is_dataclass(object_type) and not is_call and (name := dotted_path(object_type)):
            plain["_target_"] = name  # fields of a dataclass: instantiating the node restores it
            is_call = True
        for key, child in children.items():
            where = f"{path}.{key}" if path else str(key)
            if key == "_target_":
                plain[key] = self._target(child, where)
            else:
                plain[key if type(key) is str else _key(key)] = self.plain(child, where, in_call=in_call or is_call)
                if isinstance(child, DefaultNode) and isinstance(key, str) and is_default(child):
                    self.defaults.append(f"{where}={plain[key]}" if child.__dict__["is_derived"] else where)
        if plain.get("_target_") in PLAIN_CONTAINERS and plain.get("_partial_"):
            self._refused(plain["_target_"], path)
        return plain

    def _target(self, child: Any, where: str) -> Any:
        raw = child._value() if not isinstance(child, DictConfig | ListConfig) else child
        if callable(raw) and (name := dotted_path(raw)):
            raw = name
        if not isinstance(raw, str):
            return self.plain(child, where)
        if "${" not in raw and is_never_named(raw):
            self._refused(raw, where)
        return raw

    def _leaf(self, value: Any, path: str, in_call: bool) -> Any:
        if isinstance(value, enum.Enum):
            return self._member(value, path) if in_call else value.name
        if isinstance(value, PurePath):
            return str(value)
        for plain_type in (int, float, str):  # subclasses, such as numpy.float64
            if isinstance(value, plain_type):
                return plain_type(value)
        if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
            return self.plain(value.item(), path)
        if in_call and (node := _torch_node(value)):
            return node
        if callable(value) and (name := dotted_path(value)):
            if is_never_named(name):
                self._refused(name, path)
            return {"_target_": name, "_partial_": True}
        text = _short_repr(value)
        self.left_out.append(f"{path or 'the configuration'} = {text}, written as text")
        return text.replace("${", "$ {")  # otherwise it would be an interpolation

    def _member(self, member: enum.Enum, path: str) -> Any:
        """A call of the enum with the value of the member."""
        name = dotted_path(type(member))
        if name is None or is_never_named(name) or type(member.value) not in (bool, int, float, str):
            self.left_out.append(f"{path} = {member!r}, written as its name")
            return member.name
        return {"_target_": name, "value": member.value}

    def _refused(self, name: str, path: str) -> None:
        self.left_out.append(f"{path} = {name}, which a YAML file may not name")


def _short_repr(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # a repr is user code and may fail
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return redact(text)[:_MAX_SHOWN]


def _torch_node(value: Any) -> dict[str, Any] | None:
    """The call that returns this dtype or device."""
    kind = f"{type(value).__module__}.{type(value).__name__}"
    if kind == "torch.dtype":
        return {"_target_": "trainwright.config.torch_names.torch_dtype", "name": str(value).removeprefix("torch.")}
    if kind == "torch.device":
        index = {} if value.index is None else {"index": value.index}
        return {"_target_": kind, "type": value.type, **index}
    return None


def _key(key: Any) -> Any:
    return key.name if isinstance(key, enum.Enum) else key


def to_py(cfg: DictConfig, prefix: str = "cfg.") -> str:
    """``cfg`` as sorted lines like ``cfg.optim = torch.optim.AdamW(lr=0.1)``, with interpolations resolved.

    For reading and diffs.
    """
    plain = OmegaConf.to_container(cfg, resolve=True)
    lines: list[str] = []
    _write(plain, prefix.rstrip("."), lines)
    return "".join(line + "\n" for line in lines)


def _write(value: Any, name: str, lines: list[str]) -> None:
    if isinstance(value, dict) and value and "_target_" not in value and all(_is_name(key) for key in value):
        for key in sorted(value):
            _write(value[key], f"{name}.{key}" if name else key, lines)
        return
    lines.append(f"{name} = {_expression(value, len(name) + 3, 0)}")


def _expression(value: Any, used: int, indent: int) -> str:
    """``value`` on one line if it fits after ``used`` characters, else with one item per line."""
    if isinstance(value, dict) and "_target_" in value:
        arguments = {key: value[key] for key in value if key != "_target_"}
        if all(_is_name(key) for key in arguments):
            opening, closing = f"{short_name(value['_target_'])}(", ")"
            items = [(f"{key}=", arguments[key]) for key in sorted(arguments)]
        else:
            opening, closing = f"{short_name(value['_target_'])}(**{{", "})"
            items = [(f"{_literal(key)}: ", arguments[key]) for key in arguments]
    elif isinstance(value, dict):
        opening, closing = "{", "}"
        items = [(f"{_literal(key)}: ", value[key]) for key in sorted(value, key=str)]
    elif isinstance(value, list | tuple | ListConfig):
        opening, closing = "[", "]"
        items = [("", child) for child in value]
    else:
        return _literal(value)
    one_line = opening + ", ".join(name + _expression(child, 0, -1) for name, child in items) + closing
    if indent < 0 or not items or used + len(one_line) <= _LINE_LENGTH:
        return one_line
    inner = " " * (indent + 4)
    parts = [f"{inner}{name}{_expression(child, indent + 4 + len(name) + 1, indent + 4)}," for name, child in items]
    return "\n".join([opening, *parts, " " * indent + closing])


def _literal(value: Any) -> str:
    if isinstance(value, str):
        text = repr(value)
        return text if text.startswith('"') or '"' in text else f'"{text[1:-1]}"'
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return short_name(value) if callable(value) else repr(value)


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and key.isidentifier()
