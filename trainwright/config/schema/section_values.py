"""Allowed values of a run's sections: a mapping, or an existing object where the run can use one."""

import inspect
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig

from trainwright.config.lazy.dotted_path import short_name
from trainwright.config.lazy.lazy_call import LazyCall

# The names of the sections, with an example of each.
SECTIONS = {
    "model": "LazyCall(Net)(width=64)",
    "dataloader": "dict(train=LazyCall(...)(...), test=[LazyCall(...)(...)])",
    "train": "dict(train_iter=100)",
    "optim": "LazyCall(torch.optim.SGD)(lr=0.1)",
    "graph": "dict(enabled=True)",
    "tokenization": "dict(tokenizer=LazyCall(...)(...))",
}
_ONLY_SETTINGS = ("train", "graph")


def section_fault(name: str, value: Any) -> str | None:
    """Why ``value`` cannot be the section ``name``, with a suggestion; None if it can."""
    if value is None or isinstance(value, Mapping | DictConfig):
        return None
    if isinstance(value, LazyCall):
        target = short_name(value._target)
        return f"LazyCall({target}) was not called. Did you forget the second call? Write LazyCall({target})(...)."
    example = f"for example {name} = {SECTIONS[name]}"
    if inspect.isclass(value) or inspect.isroutine(value):
        called = short_name(value)
        what = "class" if inspect.isclass(value) else "function"
        return f"got the {what} {called}. Describe the call of it: LazyCall({called})(...)."
    if inspect.ismodule(value):
        return (
            f"got the module {value.__name__}; it must be a section, {example}. If it is only an import, "
            "give it another name."
        )
    is_plain = isinstance(value, bool | int | float | complex | str | bytes)
    if is_plain or name in _ONLY_SETTINGS or (name != "dataloader" and isinstance(value, list | tuple | ListConfig)):
        return f"got {value!r} ({type(value).__name__}); it must be a section, {example}."
    return None
