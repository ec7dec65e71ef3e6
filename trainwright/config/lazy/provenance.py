"""The origin of a config node: the file and line that wrote it, and whether that was code or data.

Both are stored in omegaconf's metadata of the node: copies keep them, saved files do not contain them. A node written
by code is trusted; one from YAML, a checkpoint or the command line is not, and neither are its children. Values without
a mark, such as plain dicts, come from code, except during the instantiation of data: a function may have returned them.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

from omegaconf import AnyNode, DictConfig, ListConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainwright.base.files import relative_path

TARGET = "_target_"
OWN_FILES = Path(__file__).parents[1]  # with the packaged defaults, and the table of settings that they are made from
# The names of the sections, with an example of each.
SECTIONS = {
    "model": "LazyCall(Net)(width=64)",
    "dataloader": "dict(train=LazyCall(...)(...), test=[LazyCall(...)(...)])",
    "train": "dict(train_iter=100)",
    "optim": "LazyCall(torch.optim.SGD)(lr=0.1)",
    "graph": "dict(enabled=True)",
    "tokenization": "dict(tokenizer=LazyCall(...)(...))",
}
_UNTRUSTED = "untrusted"
_ORIGIN = "origin"
_OVERRIDES = "overrides"
_building_data: ContextVar[bool] = ContextVar("trainwright_building_data", default=False)  # one for each thread
_LINE_NUMBER = re.compile(r":\d+$")


def set_origin(node: DictConfig | ListConfig, origin: str) -> None:
    """Record ``file`` or ``file:line`` as the origin of ``node``."""
    vars(node._metadata)[_ORIGIN] = origin


def origin_of(node: Any) -> str | None:
    """The origin of ``node`` or of its nearest parent with a known one; None if unknown."""
    while isinstance(node, DictConfig | ListConfig):
        origin = vars(node._metadata).get(_ORIGIN)
        if origin is not None:
            return str(origin)
        node = node._get_parent()
    return None


def set_override(node: DictConfig | ListConfig, key: Any, text: str) -> None:
    """Record that the override ``text`` set ``key`` of ``node``."""
    vars(node._metadata)[_OVERRIDES] = {**vars(node._metadata).get(_OVERRIDES, {}), key: text}


def overrides_of(node: Any) -> list[str]:
    """The overrides that set values of ``node``, the node itself, or one of its parents."""
    found = list(vars(node._metadata).get(_OVERRIDES, {}).values()) if isinstance(node, DictConfig | ListConfig) else []
    while isinstance(node, DictConfig | ListConfig) and (above := node._get_parent()) is not None:
        text = vars(above._metadata).get(_OVERRIDES, {}).get(node._key())
        found += [] if text is None else [text]
        node = above
    return list(dict.fromkeys(found))  # one that made a section is at its key too


def override_at(cfg: Any, path: str) -> str | None:
    """The override that set the value at a dotted path of ``cfg``, or a container above it."""
    for key in path.split("."):
        if not isinstance(cfg, DictConfig | ListConfig):
            return None
        index = int(key) if isinstance(cfg, ListConfig) and key.isdigit() else key
        text = vars(cfg._metadata).get(_OVERRIDES, {}).get(index)
        if text is not None:
            return str(text)
        cfg = raw_children(cfg).get(index)
    return None


def origin_file(node: Any) -> Path | None:
    """The file of :func:`origin_of`."""
    origin = origin_of(node)
    return None if origin is None else Path(_LINE_NUMBER.sub("", origin))


def shown(origin: str) -> str:
    """``origin`` relative to the working folder if it is inside."""
    if origin.startswith("<"):  # an interactive session
        return origin
    relative = relative_path(origin)
    return origin if relative.startswith(os.pardir) else relative


class DefaultNode(AnyNode):
    """A packaged default, or a value that follows from others. After any assignment it is the user's, also if equal."""

    def __init__(self, value: Any, *, is_derived: bool = False) -> None:
        super().__init__(value)
        self.__dict__.update({"is_default": True, "is_derived": is_derived})

    def _set_value(self, value: Any, flags: dict[str, bool] | None = None) -> None:
        super()._set_value(value, flags)
        self.__dict__["is_default"] = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self)(self._value(), is_derived=self.__dict__["is_derived"])
        self._deepcopy_impl(copied, memo)
        copied.__dict__["is_default"] = self.__dict__["is_default"]
        return copied


def mark_default(section: DictConfig, key: str, *, is_derived: bool = False) -> None:
    """Record that the value of ``key`` is a packaged default; or ``is_derived``: it follows from other settings."""
    put(section, key, DefaultNode(section[key], is_derived=is_derived))


def put(section: DictConfig, key: Any, node: Node) -> None:
    """Set the child ``node`` itself: an assignment would only copy its value."""
    node._set_parent(section)
    node._set_key(key)
    section.__dict__["_content"][key] = node


def is_set(section: DictConfig, key: str) -> bool:
    """Whether ``key`` has a value other than an unchanged packaged default."""
    node = raw_children(section).get(key)
    return node is not None and not is_default(node)


def is_default(node: Any) -> bool:
    """Whether a node is an unchanged packaged default."""
    return isinstance(node, DefaultNode) and bool(node.__dict__["is_default"])


def mark(node: DictConfig, *, is_data: bool) -> None:
    """Mark one node as data or as written by code, but not the nodes in it that have their own mark."""
    node._set_flag(_UNTRUSTED, is_data)


def distrust(node: Any) -> None:
    """Mark ``node`` and every container in it as data, so that a part that is moved elsewhere stays marked."""
    if isinstance(node, DictConfig | ListConfig):
        node._set_flag(_UNTRUSTED, True)
        for child in raw_children(node).values():
            distrust(child)


def is_trusted(node: Any) -> bool:
    """Whether code wrote ``node``: by its mark, or, without one, if no data is being instantiated."""
    mark = node._get_flag(_UNTRUSTED) if isinstance(node, DictConfig | ListConfig) else None
    return not (_building_data.get() if mark is None else mark)


def holds_data(value: Any) -> bool:
    """Whether ``value`` is or contains a node (a mapping with a target) that is data."""
    if isinstance(value, DictConfig | ListConfig):
        children = raw_children(value)
        if TARGET in children and not is_trusted(value):
            return True
        return any(holds_data(child._maybe_dereference_node(False)) for child in children.values())
    if isinstance(value, dict):
        return any(holds_data(child) for child in value.values())
    return isinstance(value, list | tuple) and any(holds_data(child) for child in value)


@contextmanager
def building_data(active: bool = True) -> Iterator[None]:
    """In this context, values without a mark are data. ``active=False`` changes nothing."""
    token = _building_data.set(active or _building_data.get())
    try:
        yield
    finally:
        _building_data.reset(token)


def value_at(section: Any, path: str) -> Any:
    """The value at a dotted path of a section; None where there is none, or it cannot be resolved."""
    if not isinstance(section, DictConfig):
        return None
    try:
        return OmegaConf.select(section, path, throw_on_missing=False)
    except OmegaConfBaseException:  # reported by the check of this key
        return None


def values_at(cfg: DictConfig, paths: Iterable[str]) -> dict[str, Any]:
    """:func:`value_at` of several paths, each section read once."""
    found, sections = dict[str, Any](), dict[str, Any]()
    for path in paths:
        above, _, key = path.rpartition(".")
        section = sections[above] if above in sections else sections.setdefault(above, value_at(cfg, above))
        found[path] = None
        if isinstance(section, DictConfig):
            with suppress(OmegaConfBaseException):  # reported by the check of this key
                found[path] = section.get(key)
    return found


def raw_children(node: DictConfig | ListConfig) -> dict[Any, Any]:
    """The child nodes by key or index; interpolations are not resolved. Empty for None, ``???`` and interpolations."""
    content = node._value()
    if isinstance(content, dict):
        return dict(content)
    if isinstance(content, list):
        return dict(enumerate(content))
    return {}


def are_several(node: Any) -> bool:
    """Whether a section contains lazy calls (or objects with a ``step``) by name, in place of one lazy call."""
    if isinstance(node, DictConfig) and not isinstance(node._value(), dict):
        return False
    if not isinstance(node, Mapping) or TARGET in node or not node or "params" in node:
        return False
    try:
        values = [node[key] for key in node]
    except OmegaConfBaseException:  # reported by the check of this key
        return False
    return any(TARGET in value if isinstance(value, Mapping) else hasattr(value, "step") for value in values)
