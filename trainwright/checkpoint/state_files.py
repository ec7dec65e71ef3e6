"""The files of a checkpoint: a run's objects as JSON and tensors, and back with the same types.

No pickle: reading a state runs no code. Native JSON values are stored unchanged. Other values are an object with one
key that starts with ``$``: ``{"$tuple": [...]}``, ``{"$float": "nan"}``, ``{"$bytes": "<base64>"}``,
``{"$dict": [[key, value], ...]}`` (keys that are not plain strings), ``{"$tensor": "<name in the safetensors file>"}``,
``{"$array": {...}}`` for NumPy. A tensor that is not contiguous is ``{"$tensor": ["<name>", [<its dimensions, the one
with the largest stride first>]]}``: sums over another layout round differently. Saving raises for values that would
load as another type: a masked array, a matrix, a named tuple.
"""

import base64
import io
import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Protocol, runtime_checkable  # Any: a state is the user's; each value is checked

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright._torch_compat.tensor_chunks import local_of
from trainwright.base.files import Writer, read_regular
from trainwright.checkpoint.errors import CheckpointError, CheckpointTypeError
from trainwright.checkpoint.folder import WEIGHTS_NAME
from trainwright.checkpoint.manifest import MANIFEST_NAME, Manifest
from trainwright.checkpoint.safetensors_file import TensorFile, check_tensor, tensor_key
from trainwright.checkpoint.shards import ShardReader, StoredTensor, with_memory_order

MODEL = "model"  # the state of the module itself
TRAINING_WEIGHTS = "training_weights"  # state: beside an average of them
EXTRA = "extra"  # the keyword arguments of Checkpointer.save
OF_RANKS = "_ranks"  # end of the name of a state with a row for each process
MODEL_EXTRA = "model_extra"  # what modules return from get_extra_state, unless it is a tensor
MODEL_FILES = (WEIGHTS_NAME, f"{MODEL_EXTRA}.json", f"{MODEL_EXTRA}.safetensors")
NOT_OURS = ("config.json", "generation_config.json", "adapter_config.json")  # transformers and peft read them there
RESERVED_NAMES = (MODEL, Path(MANIFEST_NAME).stem, EXTRA, MODEL_EXTRA, *(Path(name).stem for name in NOT_OURS))
ALLOWED = (
    "dict, OrderedDict, Counter, list, tuple, None, bool, int, float, str, bytes, NumPy scalars and arrays, "
    "and dense torch tensors"
)
_ALLOWED_KEYS = "str, int, float, bool, None, bytes, and tuples of these"
_DICT_TAGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered_dict", Counter: "$counter"}
_ARRAY_DTYPE = re.compile(r"[<>|=][biufcSUmM][1-9]\d*(\[\d*[A-Za-z]+\])?")  # no objects, no nested formats


@runtime_checkable
class Stateful(Protocol):
    """An object with a state that a checkpoint can hold."""

    def state_dict(self) -> Any: ...  # Any: each class has its own state

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def check_state(state: object, target: Stateful, source: str) -> None:
    """Check the state of an optimizer, a scheduler or a trainer, before anything is loaded."""
    module = type(target).__module__
    is_known = isinstance(target, Optimizer | LRScheduler) or module.startswith("trainwright.engine.")
    is_of_torch = isinstance(target, Optimizer) and module.startswith("torch.")
    needed = {"state", "param_groups"} if is_of_torch else set[str]()
    if is_known and not (isinstance(state, Mapping) and state and needed <= state.keys()):
        kind = type(target).__name__
        raise CheckpointError(f"{source}: is damaged, it does not hold the state of a {kind} (got {str(state)[:60]}).")


def state_names(manifest: Manifest) -> list[str]:
    """The checkpointables that have a state in a checkpoint."""
    names = [name.removesuffix(".json") for name in manifest.files if name.endswith(".json") and "/" not in name]
    return [name for name in names if name not in RESERVED_NAMES]


def read_state(folder: Path, manifest: Manifest, name: str, *, reads_tensors: bool = True) -> Any:  # what was saved
    """The state saved as ``name``; its tensors are copies, or each a `StoredTensor`, to read only a part of them."""
    stored, path = ShardReader(folder, name, manifest.files).stored(), folder / f"{name}.json"
    return decode_state(read_regular(path), stored, str(path), copies_tensors=reads_tensors)


def encode_row(state: object, name: str) -> bytes:
    """A small state that one process has, as bytes."""
    text, tensors = encode_state(state, name)
    file = io.BytesIO()
    TensorFile({**tensors, "": torch.frombuffer(bytearray(text), dtype=torch.uint8)})(file)
    return len(file.getvalue()).to_bytes(8) + file.getvalue()


def read_states_of_ranks(
    folder: Path, manifest: Manifest, name: str, ranks: Callable[[int], Iterable[int]]
) -> dict[int, Any]:
    """What single processes have saved of the state ``name``, by rank; ``ranks``: which, of how many."""
    stored = ShardReader(folder, f"{name}{OF_RANKS}", manifest.files).stored().get("rows")
    if stored is None:
        raise CheckpointError(f"{folder}: has nothing of single processes for {name!r} (an unreleased version?).")
    found = {}
    for rank in ranks(stored.shape[0]):
        row = stored.block((rank, 0), (1, stored.shape[1])).numpy().tobytes()
        tensors = load(row[8 : 8 + int.from_bytes(row[:8])])
        found[rank] = decode_state(tensors.pop("").numpy().tobytes(), tensors, str(folder / f"{name}{OF_RANKS}"))
    return found


def completed(state: Any) -> Any:
    """``state`` with the values of each `StoredTensor`."""
    if isinstance(state, StoredTensor):
        return state.whole()
    if isinstance(state, dict):
        return type(state)({key: completed(value) for key, value in state.items()})
    return type(state)(completed(item) for item in state) if isinstance(state, list | tuple) else state


def read_model_state(folder: Path, manifest: Manifest, own: Mapping[str, Any]) -> dict[str, Any]:
    """The weights, each a `StoredTensor`, and the modules' ``get_extra_state`` values.

    ``own``: the state of the module that loads them. Files with its values may be deleted afterwards.
    """
    extra = read_state(folder, manifest, MODEL_EXTRA) if f"{MODEL_EXTRA}.json" in manifest.files else {}
    stored = ShardReader(folder, MODEL, manifest.files).stored()
    for name in stored.keys() & own.keys():
        stored[name].open(own[name])
    return {**stored, **extra}


def bytes_writer(content: bytes) -> Writer:
    return lambda file: file.write(content)


def encode_state(
    state: object, name: str, *, is_sharded: bool = False, without_layout: Collection[int] = ()
) -> tuple[bytes, dict[str, Tensor]]:
    """``state`` as JSON text, and the tensors that the text refers to.

    The tensors are those of the state itself, not copies; one that occurs twice is listed once. ``is_sharded``: there
    may be DTensors. ``without_layout``: ids of tensors whose layout in memory the loading object knows.
    """
    encoder = _Encoder(is_sharded=is_sharded, without_layout=without_layout)
    try:
        tree = encoder.encode(state, (name,))
        text = json.dumps(tree, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise CheckpointTypeError(f"{name}: is nested too deeply for a checkpoint.") from None
    return text.encode(), encoder.tensors


def decode_state(
    text: bytes, tensors: Mapping[str, Any], source: str, *, copies_tensors: bool = True
) -> Any:  # the type is the saved state's
    """The inverse of `encode_state`. Tensors are copies on the CPU, without gradient."""
    try:
        return _Decoder(tensors, copies_tensors).decode(json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{source}: not a state of this library ({type(error).__name__}: {error}).") from error


def _are_json(values: Iterable[Any]) -> bool:
    """Whether all are values that JSON has, and none is a container."""
    kinds = set(map(type, values))
    return kinds <= {float, int, bool, str, NoneType} and (
        float not in kinds or all(math.isfinite(value) for value in values if type(value) is float)
    )


class _Encoder:
    def __init__(self, *, is_sharded: bool = False, without_layout: Collection[int] = ()) -> None:
        self._is_sharded, self._without_layout = is_sharded, without_layout
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[object, ...], str] = {}  # tensor_key -> name, so that shared memory is written once
        self._open: set[int] = set()  # ids of the containers around the current value

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, Tensor):
            return self._encode_tensor(value, path)
        if kind is np.str_ or kind is np.bytes_:  # an array drops zeros at the end, and has no empty text
            return {"$numpy_text": self.encode(value[:], path)}
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._encode_array(value, path)
        if kind not in (dict, OrderedDict, Counter, list, tuple):
            raise CheckpointTypeError(f"{_shown(path)}: got {kind}; a checkpoint holds {ALLOWED}.")
        if id(value) in self._open:
            raise CheckpointTypeError(f"{_shown(path)}: got a {kind.__name__} that contains itself.")
        self._open.add(id(value))
        try:
            return self._encode_container(value, path)
        finally:
            self._open.remove(id(value))

    def _encode_container(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, (list, tuple)):
            if _are_json(value):  # the values of metrics, thousands of them
                items = list(value)
            else:
                items = [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            if _are_json(value.values()):
                return value
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        tag = _DICT_TAGS[type(value)]
        return {tag: [[_encode_key(key, path), self.encode(item, (*path, str(key)))] for key, item in value.items()]}

    def _encode_tensor(self, tensor: Tensor, path: tuple[str, ...]) -> dict[str, object]:
        local = local_of(tensor) if self._is_sharded else tensor
        check_tensor(local, _shown(path))
        if type(local) not in (Tensor, Parameter):
            raise CheckpointTypeError(
                f"{_shown(path)}: got a {type(local).__name__}, which would load as a plain Tensor; "
                "use value.as_subclass(torch.Tensor)."
            )
        stored = self._store(tensor, path)
        has_order = local is tensor and id(tensor) not in self._without_layout and not tensor.is_contiguous()
        return {"$tensor": [stored, order_of_dims(tensor)] if has_order else stored}

    def _encode_array(self, array: Any, path: tuple[str, ...]) -> dict[str, object]:
        scalar = isinstance(array, np.generic)
        is_plain = not scalar or type(array) is array.dtype.type
        if not _ARRAY_DTYPE.fullmatch(array.dtype.str) or array.dtype.names or not is_plain:
            raise CheckpointTypeError(
                f"{_shown(path)}: got a {type(array).__name__} of dtype {array.dtype}; "
                "allowed: numbers, bool, dates, text."
            )
        data = torch.from_numpy(np.frombuffer(array.tobytes(), dtype=np.uint8).copy())
        entry = {"dtype": array.dtype.str, "shape": list(array.shape), "scalar": scalar}
        if array.flags.f_contiguous and not array.flags.c_contiguous:
            entry["order"] = "F"
        return {"$array": {"data": self._store(data, path), **entry}}

    def _store(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        key = tensor_key(tensor)
        if key not in self._names:
            name = unique = _shown(path[1:]) or "value"
            number = 2
            while unique in self.tensors or unique == "__metadata__":  # the keys 1 and "1" look alike in a path
                unique, number = f"{name}#{number}", number + 1
            self.tensors[unique] = tensor  # keeps it alive: a key is valid only while its tensor lives
            self._names[key] = unique
        return self._names[key]


def order_of_dims(tensor: Tensor) -> list[int]:
    """The dimensions of a tensor by their strides, the largest first; those of length 1 have no place of their own."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (tensor.shape[dim] == 1, -strides[dim]))


def _laid_out(tensor: Any, order: list[int]) -> Any:
    """A tensor with its dimensions in this order in memory; a `StoredTensor` is laid out when it is read."""
    if sorted(order) != [*range(len(tensor.shape))]:
        raise ValueError(f"the dimensions {order} of a tensor of shape {tuple(tensor.shape)}")
    if isinstance(tensor, StoredTensor):
        return tensor.with_memory_order(order)
    return with_memory_order(tensor, order)


def _shown(path: tuple[str, ...]) -> str:
    """A value's path as text. A lone surrogate, which a file's names cannot hold, is escaped."""
    return ".".join(path).encode(errors="backslashreplace").decode()


def _encode_key(key: Any, path: tuple[str, ...]) -> Any:
    if key is None or type(key) in (str, int, float, bool, bytes):
        return _Encoder().encode(key, path)
    if type(key) is tuple:
        return {"$tuple": [_encode_key(item, path) for item in key]}
    raise CheckpointTypeError(f"{_shown(path)}: got a key of {type(key)}; allowed keys are {_ALLOWED_KEYS}.")


class _Decoder:
    def __init__(self, tensors: Mapping[str, Any], copies_tensors: bool) -> None:
        self._tensors = tensors
        self._copies_tensors, self._copies = copies_tensors, dict[str, Any]()
        self._tags: dict[str, Callable[[Any], Any]] = {
            "$tuple": lambda items: tuple(self.decode(item) for item in items),
            "$float": float,
            "$bytes": partial(base64.b64decode, validate=True),
            "$dict": lambda pairs: dict(self._pairs(pairs)),
            "$ordered_dict": lambda pairs: OrderedDict(self._pairs(pairs)),
            "$counter": lambda pairs: Counter(dict(self._pairs(pairs))),
            "$tensor": self._decode_tensor,
            "$array": self._decode_array,
            "$numpy_text": lambda tree: (np.str_ if isinstance(tree, str) else np.bytes_)(self.decode(tree)),
        }

    def decode(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.decode(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        tags = [key for key in tree if key.startswith("$")]
        if not tags:
            return {key: self.decode(item) for key, item in tree.items()}
        if len(tree) > 1 or tags[0] not in self._tags:
            raise ValueError(f"unknown tag {tags[0]!r}")
        return self._tags[tags[0]](tree[tags[0]])

    def _pairs(self, pairs: list[list[Any]]) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(item)) for key, item in pairs]

    def _decode_tensor(self, stored: str | list[Any]) -> Any:
        name, order = (stored, None) if isinstance(stored, str) else stored
        if name not in self._copies:  # references to one tensor stay references to one tensor
            tensor = self._tensors[name]
            self._copies[name] = tensor.clone() if self._copies_tensors else tensor
            if order is not None:
                self._copies[name] = _laid_out(self._copies[name], order)
        return self._copies[name]

    def _decode_array(self, entry: dict[str, Any]) -> Any:
        if not _ARRAY_DTYPE.fullmatch(entry["dtype"]):
            raise ValueError(f"unknown array dtype {entry['dtype']!r}")
        data = self._tensors[entry["data"]].numpy().tobytes()
        array = np.frombuffer(data, dtype=np.dtype(entry["dtype"])).reshape(entry["shape"])
        array = array.copy("F" if entry.get("order") == "F" else "C")
        return array[()] if entry["scalar"] else array
