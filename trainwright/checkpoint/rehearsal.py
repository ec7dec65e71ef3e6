"""The rehearsal of a resume: the first checkpoint of a run is loaded into copies, and what does not come back is named.

A state that an object keeps in its attributes, or that its ``load_state_dict`` does not restore, is otherwise lost
without a word, hours later. At the start of a training the optimizers and schedules are copied to host memory, with
placeholders for the parameters. After the first save a background thread reads the checkpoint back, compares the
checksum of every file, loads the states into the copies, and compares each tensor (values, dtype, layout), setting and
attribute with those of the originals at the save. Weights are compared by their checksum, name, shape, dtype and
layout: a second model is nowhere. Nothing draws random numbers, and no original is changed.

The states of a sharded run are in parts: only the attributes of their optimizers are compared.
"""

import logging
import re
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any  # Any: a Checkpointer, whose module imports this one

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright._torch_compat.self_loading import self_loading_modules
from trainwright._torch_compat.tensor_chunks import local_of
from trainwright.checkpoint.manifest import read_manifest
from trainwright.checkpoint.optimizer_state import NAMES, TIED
from trainwright.checkpoint.safetensors_file import bytes_of
from trainwright.checkpoint.shards import StoredTensor
from trainwright.checkpoint.state_files import completed, read_state
from trainwright.checkpoint.verify import file_faults
from trainwright.optim.named import own_attributes, parameters_of
from trainwright.parallel.wrappers import model_state, plain_name, unwrap

logger = logging.getLogger("trainwright.checkpoint")

_NAMED = 5  # differences of an object in the message
_DEPTH = 8  # of values in values
_SHARED = (nn.Module, Dataset, DataLoader, type, types.ModuleType)
# Optimizers whose attributes are no state. Those of bitsandbytes set `initialized` at the first step of each process.
_WITHOUT_OWN = ("torch.", "accelerate.", "bitsandbytes.")
_LAYOUT, VALUES, _BOTH = "layout", "values", "layout and values"  # of tensors, what is compared


class Rehearsal:
    """Of one training. Create it before the first step, on the rank that saves.

    Attributes:
        differences: what does not come back, a line for each object, after a rehearsal.
    """

    def __init__(self, checkpointer: Any) -> None:
        self.differences: list[str] = []
        self._model = checkpointer.model
        self._weights = _layouts(self._model)
        kinds = Optimizer | LRScheduler
        self._originals = {n: one for n, one in checkpointer.checkpointables.items() if isinstance(one, kinds)}
        self._groups = self._groups_now()
        self._rehearsed: Any = None  # the groups at the last rehearsal
        self._copies: dict[str, Any] = {}
        memo: dict[int, Any] = {}
        for name, one in self._originals.items():
            try:
                self._copies[name] = _on_host(one, memo)
            except Exception as error:  # of the user's classes: a rehearsal ends no training
                logger.debug("%s is not rehearsed, it cannot be copied (%s: %s).", name, type(error).__name__, error)

    def begin(self, checkpointer: Any, *, is_sharded: bool) -> Callable[[Path], None] | None:
        """Record what is compared, at the time of a save; returns the rehearsal of its folder. None: none is due."""
        groups = self._groups_now()
        if groups == self._rehearsed:
            return None
        self._rehearsed = groups
        for one in checkpointer.checkpointables.values():
            if hasattr(one, "rehearse"):  # the position in the data, which may be read in this thread only
                one.rehearse()
        found = {**self._changes_of_model(), **self._changes_of_groups(groups)}
        copies, self._copies = self._copies, {}
        kept = {name: self._originals[name] for name in copies if name not in found}
        kept = {name: one for name, one in kept.items() if checkpointer.checkpointables.get(name) is one}
        attributes = {name: described(one) for name, one in kept.items()}
        if is_sharded:
            kept = {n: one for n, one in kept.items() if type(one).state_dict is Optimizer.state_dict}
            found |= {name: _missing(described(copies[name]), attributes[name]) for name in kept}
            return lambda folder: self._warn(found, folder)
        with without_compiler():
            states = {name: described(one.state_dict(), _LAYOUT) for name, one in kept.items()}

        of_copies = type(checkpointer)(nn.Module(), **dict[str, Any](copies))

        def rehearse(folder: Path) -> None:
            try:
                faults = file_faults(folder, read_manifest(folder))[0]
                found.update({"files": faults} if faults else _loaded(of_copies, copies, folder, states, attributes))
            except Exception as error:  # of any class: it is what a resume would raise
                found["files"] = [f"reading them has raised {type(error).__name__}: {error}"]
            self._warn(found, folder)

        return rehearse

    def _warn(self, found: Mapping[str, list[str]], folder: Path) -> None:
        lines = []
        for name, differences in found.items():
            kind = f" ({type(self._originals[name]).__name__})" if name in self._originals else ""
            more = f"; and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
            if differences:
                lines.append(f"{name}{kind}: {'; '.join(differences[:_NAMED])}{more}")
        self.differences += lines
        if lines:
            logger.warning(
                "%s: a run that is resumed from it differs from the uninterrupted one. What does not come back (see"
                " docs/reliability.md):\n  %s",
                folder, "\n  ".join(lines),
            )  # fmt: skip

    def _groups_now(self) -> dict[str, list[list[int]]]:
        optimizers = {name: one for name, one in self._originals.items() if isinstance(one, Optimizer)}
        return {n: [[*map(id, group["params"])] for group in one.param_groups] for n, one in optimizers.items()}

    def _changes_of_model(self) -> dict[str, list[str]]:
        """Weights that a new model cannot load."""
        modules = {plain_name(name) for name in self_loading_modules(unwrap(self._model))}
        now = {name: one for name, one in _layouts(self._model).items() if name.rpartition(".")[0] not in modules}
        before = {name: one for name, one in self._weights.items() if name.rpartition(".")[0] not in modules}
        texts = [
            f"{name} was {before.get(name, 'not there')} at the start and is {now.get(name, 'gone')}"
            for name in dict.fromkeys([*now, *before])
            if before.get(name) != now.get(name)
        ]
        return {"model": texts} if texts else {}

    def _changes_of_groups(self, groups: dict[str, list[list[int]]]) -> dict[str, list[str]]:
        return {
            name: [
                f"it had {len(self._groups[name])} parameter groups with {sum(map(len, self._groups[name]))} parameters"
                f" at the start, and has {len(now)} with {sum(map(len, now))}; a resume starts with the first ones, and"
                " is refused"
            ]
            for name, now in groups.items()
            if now != self._groups[name]
        }


def _loaded(
    checkpointer: Any,
    copies: Mapping[str, Any],
    folder: Path,
    states: Mapping[str, Any],
    attributes: Mapping[str, Any],
) -> dict[str, list[str]]:
    """Load the states by a checkpointer of the copies; returns the differences from what was recorded, by name."""
    manifest, found, read = read_manifest(folder), dict[str, list[str]](), dict[str, Any]()
    for name in states:
        state = _mapped(read_state(folder, manifest, name, reads_tensors=False))
        if isinstance(state, dict):  # the placeholders have no names
            state = {key: value for key, value in state.items() if key not in (NAMES, TIED)}
        read[name] = described(state, VALUES)  # before: the copy may change its tensors
        try:
            checkpointer._load_state(folder, name, state)
        except Exception as error:
            found[name] = [f"loading its state into a copy has raised {type(error).__name__}: {error}"]
    for name in (name for name in states if name not in found):
        with without_compiler():
            again = copies[name].state_dict()
        differences = _different(described(again, _LAYOUT), states[name])
        differences += _different(described(again, VALUES), read[name])
        differences += _missing(described(copies[name]), attributes[name])
        if differences:
            found[name] = list(dict.fromkeys(differences))
    return found


def _mapped(state: Any) -> Any:
    """``state`` with the values of each `StoredTensor` in the memory of its file."""
    if isinstance(state, StoredTensor):
        return state.whole(is_mapped=True)
    if isinstance(state, dict):
        return type(state)({key: _mapped(value) for key, value in state.items()})
    return type(state)(map(_mapped, state)) if isinstance(state, list | tuple) else completed(state)


# Copies on the host, and what is compared.


def _on_host(value: Any, memo: dict[int, Any], depth: int = 0) -> Any:
    """A copy of an object with its tensors on the host. Parameters are placeholders without values."""
    if id(value) in memo:
        return memo[id(value)]
    copied: Any = value
    if isinstance(value, Optimizer):
        for parameter in parameters_of(value):
            memo.setdefault(id(parameter), _placeholder(parameter))
        if isinstance(vars(value).get("state"), dict):  # a load replaces it
            memo.setdefault(id(value.state), defaultdict(dict))
    if isinstance(value, Tensor):
        is_parameter = isinstance(value, nn.Parameter)
        copied = _placeholder(value) if is_parameter else local_of(value).detach().to("cpu", copy=True)
    elif depth > _DEPTH:
        pass
    elif isinstance(value, dict):
        memo[id(value)] = copied = value.copy()
        copied.clear()
        copied.update({_on_host(key, memo, depth + 1): _on_host(item, memo, depth + 1) for key, item in value.items()})
    elif type(value) in (list, tuple, set, deque):
        copied = type(value)(_on_host(item, memo, depth + 1) for item in value)
    elif isinstance(value, np.ndarray):
        copied = value.copy("K")
    elif _has_parts(value):
        memo[id(value)] = copied = object.__new__(type(value))
        vars(copied).update({name: _on_host(item, memo, depth + 1) for name, item in vars(value).items()})
    return memo.setdefault(id(value), copied)


def _has_parts(value: Any) -> bool:
    """Whether it is an optimizer, a schedule, or an object of the user's own."""
    is_foreign = isinstance(value, _SHARED) or type(value).__module__.startswith(("torch.", "trainwright."))
    is_plain = getattr(type(value), "__new__", None) is object.__new__ and hasattr(value, "__dict__")
    return isinstance(value, Optimizer | LRScheduler) or (is_plain and not is_foreign and not callable(value))


def _placeholder(parameter: Tensor) -> Tensor:
    local = local_of(parameter)
    empty = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="cpu")
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _layouts(model: nn.Module) -> dict[str, str]:
    return {name: _layout(value) for name, value in model_state(model).items() if isinstance(value, Tensor)}


def _layout(tensor: Tensor) -> str:
    local = local_of(tensor)
    strides = [stride for stride, size in zip(local.stride(), local.shape, strict=True) if size > 1]
    place = "" if local.is_contiguous() else f" with strides {strides}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{place}"


def described(value: Any, what: str = _BOTH) -> dict[str, str]:
    """The parts of an object that a resume must restore: {path: text}. Parameters and modules are not its parts."""
    return dict(_parts(value, "", what, ()))


def _parts(value: Any, path: str, what: str, above: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    inner: Any = ()
    if isinstance(value, nn.Parameter) or len(above) > _DEPTH or any(one is value for one in above):
        return
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not (value.is_meta or value.is_quantized):
            yield path, _text(value, what)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        yield path, repr(value)
    elif isinstance(value, np.ndarray | np.generic):
        yield path, f"{value.dtype} {value.shape} {xxhash.xxh3_64_hexdigest(value.tobytes())}"
    elif isinstance(value, dict):
        inner = [(f"{path}.{n if isinstance(key, Tensor) else key}", value[key]) for n, key in enumerate(value)]
    elif isinstance(value, list | tuple | deque):
        inner = [(f"{path}[{number}]", item) for number, item in enumerate(value)]
    elif _has_parts(value):
        inner = [(f"{path}.{name}", item) for name, item in _attributes(value).items()]
    for name, item in inner:
        yield from _parts(item, name, what, (*above, value))


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object that are its own: not the state and groups of an optimizer, nor a schedule's one."""
    found = dict(vars(value))
    if isinstance(value, LRScheduler):
        return {name: item for name, item in found.items() if not isinstance(item, Optimizer)}
    if not isinstance(value, Optimizer):
        return found
    found = own_attributes(value)
    is_foreign = type(value).__module__.startswith(_WITHOUT_OWN)
    return {name: item for name, item in found.items() if not is_foreign or isinstance(item, Optimizer)}


def _text(tensor: Tensor, what: str) -> str:
    texts = [str(tensor.dtype), str(tuple(tensor.shape))] if what == VALUES else [_layout(tensor)]
    if what != _LAYOUT and tensor.numel():
        texts.append(xxhash.xxh3_64_hexdigest(bytes_of(local_of(tensor))))
    return " ".join(texts)


def _paths(restored: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
    return [path for path in dict.fromkeys([*live, *restored]) if restored.get(path) != live.get(path)]


def _different(restored: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
    texts = []
    for path in _paths(restored, live):
        is_now, was = (one.get(path, "absent") for one in (live, restored))
        is_alike = is_now.startswith("torch.") and is_now.rpartition(" ")[0] == was.rpartition(" ")[0]
        text = "has other values after a load" if is_alike else f"is {is_now:.60}, restored {was:.60}"
        texts.append(f"{path.lstrip('.')} {text}")
    return texts


def _missing(restored: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
    names = dict.fromkeys(re.split(r"[.\[]", path.lstrip("."))[0] for path in _paths(restored, live))
    return [f"its state_dict() does not hold what has changed in: {', '.join(names)}"] if names else []
