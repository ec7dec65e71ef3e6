"""What a batch is. Everything that asks for the fields, the labels, the size or the tensors of a batch asks here.

A batch is what a loader yields, and a sample has the same forms:

* named fields: a mapping, or an `Instance`, which has ``get_fields``;
* a pair of inputs and target: a tuple or list of two;
* another tuple or list: a list of samples, or the parts of a batch;
* a single value: a tensor, or an object with ``to(device)``, such as a graph of PyTorch Geometric.

Inside of these, values may be nested in mappings, tuples and lists. A `DistTensorData` stands for its ``tensor``.
"""

import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainwright.base.errors import ConfigTypeError, did_you_mean
from trainwright.base.signatures import read_signature

logger = logging.getLogger("trainwright.engine")

IGNORED = -100  # the label that torch's losses, models of transformers, and metrics leave out
# Losses need class labels as int64. uint8 stays: torch's losses accept it.
_PROMOTED = frozenset({torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64})
_LABELS = frozenset({"y", "class", "classes", "class_id", "class_ids", "tags"})
_WRAPPER = "placement_idx"  # an attribute of the class DistTensorData
LABEL_NAMES = ("labels", "label", "targets", "target")  # of the fields of a batch
WRONG_FIELDS_HELP = "A sample's field names must be the parameter names of the model's forward."
_MAX_PARTS = 8  # longer lists are described by their length


def fields(batch: Any) -> Mapping[Any, Any] | None:
    """The named fields of a batch or sample; None if it has no names."""
    if isinstance(batch, Mapping):
        return batch
    named: dict[str, Any] | None = batch.get_fields() if hasattr(batch, "get_fields") else None
    return named


def pair(batch: Any) -> tuple[Any, Any] | None:
    """Inputs and target of a batch that is a pair; None for any other."""
    if isinstance(batch, tuple | list) and len(batch) == 2 and not isinstance(batch, PackedSequence):
        return batch[0], batch[1]
    return None


def parts(batch: Any) -> list[Any]:
    """The values of a batch or sample: those of its fields, the items of a tuple or list, or the batch alone."""
    inside = _inside(batch)
    return [_plain(value) for value in ([batch] if inside is None else inside)]


def leaves(value: Any) -> Iterator[Any]:
    """All values of a batch, in order, however nested.

    >>> list(leaves({"ids": [1, 2], "labels": (3,)}))
    [1, 2, 3]
    """
    inside = _inside(value)
    if inside is None:
        yield _plain(value)
        return
    for part in inside:
        yield from leaves(part)


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of a batch, in order, however nested."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a batch with their places: by field, or as the inputs and the target of a pair.

    >>> [name for name, _ in named_tensors(({"ids": torch.ones(1), "boxes": [torch.ones(1)]}, torch.ones(1)))]
    ['inputs.ids', 'inputs.boxes[0]', 'target']
    """
    inside, named = _inside(value), fields(value)
    if inside is None:
        if isinstance(plain := _plain(value), Tensor):
            yield name or "inputs", plain
        return
    if named is not None:
        places = [f"{name}.{key}" if name else str(key) for key in named]
    elif not name and pair(value) is not None:
        places = ["inputs", "target"]
    else:
        places = [f"{name or 'batch'}[{number}]" for number in range(len(inside))]
    for place, part in zip(places, inside, strict=True):
        yield from named_tensors(part, place)


def arguments(batch: Any, names: Collection[str] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model's ``forward`` is called with: fields by name, or the inputs of a pair.

    ``names``: the parameters of ``forward``; None: it takes any name.
    """
    named = fields(batch)
    if named is None:
        return (batch[0] if isinstance(batch, tuple | list) else batch,), {}
    return (), {name: value for name, value in named.items() if names is None or name in names}


def parameter_names(function: Callable[..., Any]) -> Collection[str] | None:
    """The names of the arguments that a function takes; None: any name.

    Of the forward of a peft model, which passes on what it gets, those of its base model.
    """
    parameters = read_signature(function).parameters
    kinds = {one.kind for one in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        return parameters
    base = getattr(getattr(function, "__self__", None), "get_base_model", None)
    is_passed_on = kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return parameter_names(base().forward) if base is not None and is_passed_on else None


_LABEL_NAME = re.compile(r"y|(y_)?(true|targets?|labels?|gt|ground_truth|references?)|label_ids")
_PREDICTION_NAME = re.compile(r"(y_)?(preds?|predictions?|predicted|hat|outputs?|logits|scores?|probs?)")
# Of functions in which the order matters; it does not in a mean squared error.
_ORDERED = re.compile(r"entropy|bce|nll|kl_|focal|logit|score|prob|precision|recall|accuracy")


def warn_of_order(where: str, function: Callable[..., Any], order: str) -> None:
    """Log a function whose parameters are named as in Keras and scikit-learn: the labels before the predictions."""
    try:
        names = [*read_signature(getattr(function, "forward", function)).parameters][:2]
    except (TypeError, ValueError):  # not a function, or one written in C
        return
    if len(names) == 2 and _LABEL_NAME.fullmatch(names[0]) and _PREDICTION_NAME.fullmatch(names[1]):
        name = getattr(function, "__name__", type(function).__name__)
        level = logging.WARNING if _ORDERED.search(f"{name} {names[1]}".lower()) else logging.INFO
        logger.log(
            level, "%s: %s(%s) is called with (%s), in this order; if the order matters, exchange its parameters.",
            where, name, ", ".join(names), order,
        )  # fmt: skip


def _forward_of(fields: Iterable[str], parameters: Collection[str]) -> str:
    """The line that takes the fields of a batch, if its labels are not taken: without a loss beside the model, the
    model computes it."""
    if set(LABEL_NAMES).isdisjoint(set(fields).difference(parameters)) or not all(map(str.isidentifier, fields)):
        return ""
    return (
        f' Write def forward(self, {", ".join(fields)}), which returns {{"loss": loss, "prediction_scores": scores}}.'
    )


def write_forward_help(error: TypeError, model: Any, batch: Any, shown: list[str] | None = None) -> None:
    """Raise a clear error in place of ``error`` if it comes from calling ``model`` with a batch that does not fit.

    ``shown``: the fields to list in the message, if ``batch`` is a part of them.
    """
    signature = read_signature(model.forward)
    if not isinstance(batch, Mapping):
        plain = [one.name for one in signature.parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
        write = f" Return {{{', '.join(f'{name!r}: ...' for name in plain)}}} from its __getitem__."
        if not plain or isinstance(batch, int | str):  # a dict, a list, a range or a text is the loader
            write = ""
        raise ConfigTypeError(
            f"The loader yields {type(batch).__name__}; DefaultTrainer needs named fields: an Instance or a dict"
            f" for each sample. {WRONG_FIELDS_HELP}{write}"
        ) from error
    try:
        signature.bind(**batch)
    except TypeError as mismatch:
        fields, parameters = shown or list(batch), list(signature.parameters)
        near = " ".join(
            f"{name!r} is no parameter. {did_you_mean(name, parameters)}" for name in fields if name not in parameters
        )
        raise ConfigTypeError(
            f"{type(model).__name__}.forward{signature} does not take the batch with the fields {fields}: {mismatch}."
            f" {WRONG_FIELDS_HELP}{' ' + near if near else ''}{_forward_of(list(batch), parameters)}"
        ) from error


def write_pair_help(error: TypeError, model: Any) -> None:
    """The same for a pair, of which ``forward`` gets the first item alone."""
    signature = read_signature(model.forward)
    try:
        signature.bind(None)
    except TypeError as mismatch:
        names = ", ".join(f"{name!r}: …" for name in signature.parameters)
        raise ConfigTypeError(
            f"{type(model).__name__}.forward{signature} does not take the inputs of a pair alone: {mismatch}. Of a pair"
            f" (inputs, target) the model gets the first item. Give samples with named fields, {{{names}}}, for example"
            " a trainwright.data.ColumnDataset."
        ) from error


def is_label(name: Any) -> bool:
    """Whether a field of this name holds labels."""
    return isinstance(name, str) and ("label" in name or "target" in name or name in _LABELS)


def label_tensors(batch: Any) -> dict[Any, Tensor]:
    """The tensors of labels with a value for each sample, by name: fields, or the second item of a pair (name 1)."""
    named, both = fields(batch), pair(batch)
    items: Any = named.items() if named is not None else [(1, both[1])] if both is not None else ()
    return {n: v for n, v in items if (n == 1 or is_label(n)) and isinstance(v, Tensor) and v.dim()}


def first_labels(batch: Any) -> Tensor | None:
    """The first of `label_tensors`; None without any."""
    return next(iter(label_tensors(batch).values()), None)


class ReadFields(dict[str, Any]):
    """A batch with the ``names`` of its fields that are read one by one."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        super().__init__(batch)
        self.names = set[str]()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def num_rows(batch: Any) -> int | None:
    """The number of rows of the first value of a batch that has rows; None: no value has.

    Values with rows are tensors, lists of tensors, arrays or mappings, graphs of PyTorch Geometric and a
    PackedSequence. Without any of them, other lists. A list of mappings has a sample in each.

    >>> num_rows({"pixel_values": torch.zeros(4, 3), "boxes": torch.zeros(9, 4)})
    4
    """
    inside = _inside(batch)
    if inside is None:
        return _rows(batch)
    if isinstance(batch, list) and batch and all(isinstance(item, Mapping) for item in batch):
        return len(batch)
    for value in inside:
        if (number := _rows(value)) is not None:
            return number
    return next((len(value) for value in inside if isinstance(value, tuple | list)), None)


def _rows(value: Any) -> int | None:
    value = _plain(value)
    if isinstance(value, Tensor | np.ndarray):
        return len(value) if value.ndim else None
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])  # on the host
    if isinstance(value, tuple | list):
        return len(value) if any(isinstance(item, Tensor | np.ndarray | Mapping) for item in value) else None
    if isinstance(value, Mapping):
        return num_rows(value)
    number: int | None = getattr(value, "num_graphs", None)
    return number


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same batch with ``function`` of each of its values. Named fields become a dict.

    >>> mapped(str, {"ids": [1, 2], "labels": (3,)})
    {'ids': ['1', '2'], 'labels': ('3',)}
    """
    named = fields(value)
    if named is not None:
        return {name: mapped(function, item) for name, item in named.items()}
    if _inside(value) is not None:
        return like(value, [mapped(function, item) for item in value])
    return function(_plain(value))


def rebuilt(function: Callable[[Any], Any], value: Any) -> Any:
    """As `mapped`, but an `Instance` and a `DistTensorData` keep their class."""
    if isinstance(value, Mapping):
        return {name: rebuilt(function, item) for name, item in value.items()}
    if hasattr(value, "get_fields"):
        return type(value)(**{name: rebuilt(function, item) for name, item in value.get_fields().items()})
    if _is_wrapped(value):
        return type(value)(function(value.tensor), value.sbp_list, value.placement_idx)
    if _inside(value) is not None:
        return like(value, [rebuilt(function, item) for item in value])
    return function(value)


def like(value: Any, items: list[Any]) -> Any:
    """A tuple, named tuple or list, as ``value`` is, of ``items``."""
    if isinstance(value, list):
        return items
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def joined(batches: Sequence[Any]) -> Any:
    """Batches of one form as one: tensors and arrays are concatenated, lists chained, fields and tuples joined.

    Tensors whose types or further dimensions differ become a list with one tensor for each sample; other values a list
    with one for each batch.

    >>> joined([{"ids": torch.zeros(2, 3), "text": ["a", "b"]}, {"ids": torch.zeros(1, 3), "text": ["c"]}])["text"]
    ['a', 'b', 'c']
    """
    first = batches[0]
    for kind, join in ((Tensor, torch.cat), (np.ndarray, np.concatenate)):
        if all(isinstance(batch, kind) and batch.ndim for batch in batches):
            is_even = len({(batch.shape[1:], batch.dtype) for batch in batches}) == 1
            return join(list(batches)) if is_even else [row for batch in batches for row in batch]
    if all(isinstance(batch, list) for batch in batches):
        return [item for batch in batches for item in batch]
    if all(isinstance(batch, Mapping) for batch in batches):
        return {name: joined([batch[name] for batch in batches]) for name in first}
    if all(isinstance(batch, tuple) and len(batch) == len(first) for batch in batches):
        return like(first, [joined(items) for items in zip(*batches, strict=True)])
    return list(batches)


def to_batch(data: Any, device: torch.device | str = "cpu") -> Any:
    """The batch with its tensors on ``device``: a dictionary for an `Instance`, otherwise the same type of container.

    Labels of integer types that torch's losses do not accept (int8, int16, int32, uint16, uint32, uint64) become int64:
    fields whose name contains "label" or "target", or is "y", "class" or "tags", and all but the first item of a tuple
    or list. Other tensors keep their type. Numpy arrays become tensors; objects with ``to(device)``, such as graphs of
    PyTorch Geometric and packed sequences, are moved; text, numbers and None stay unchanged. Tensors that already match
    are not copied. Copies from pinned memory to an accelerator are asynchronous.

    >>> to_batch({"labels": torch.tensor([3, 4], dtype=torch.int32)})
    {'labels': tensor([3, 4])}
    """
    device = torch.device(device)
    kind = type(data)
    if kind is dict or kind is list or kind is tuple:  # most batches: tensors side by side, and all there already
        for value in data.values() if kind is dict else data:
            if type(value) is not Tensor or value.device != device or value.dtype in _PROMOTED:
                return _moved(data, device, is_batch=True)
        return data if kind is tuple else data.copy()
    if hasattr(kind, "get_fields") and not isinstance(data, Mapping):
        found = dict[str, Any]()
        for name, value in data.get_fields().items():
            tensor = value.tensor if hasattr(type(value), _WRAPPER) else value
            if type(tensor) is not Tensor or tensor.device != device or tensor.dtype in _PROMOTED:
                return _moved(data, device, is_batch=True)
            found[name] = tensor
        return found
    return _moved(data, device, is_batch=True)


def _moved(value: Any, device: torch.device, *, is_labels: bool = False, is_batch: bool = False) -> Any:
    if isinstance(value, Tensor):
        return _moved_tensor(value, device, is_labels)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return _moved_tensor(torch.as_tensor(value, device="cpu"), device, is_labels)
    if hasattr(type(value), _WRAPPER):
        return _moved_tensor(value.tensor, device, is_labels)
    named = fields(value)
    if named is not None:
        return {n: _moved(item, device, is_labels=is_labels or is_label(n)) for n, item in named.items()}
    if isinstance(value, tuple | list) and not isinstance(value, PackedSequence):
        names = getattr(value, "_fields", range(len(value)))  # of a named tuple
        items = [
            _moved(item, device, is_labels=is_labels or (is_batch and n > 0 if type(n) is int else is_label(n)))
            for n, item in zip(names, value, strict=True)
        ]
        return like(value, items)
    return moved_object(value, device) if hasattr(value, "to") else value


def moved_object(value: Any, device: torch.device) -> Any:
    """The result of an object's own ``to``."""
    if device.type != "cpu":
        try:
            return value.to(device, non_blocking=True)
        except TypeError:  # it takes the device only
            pass
    return value.to(device)


def _moved_tensor(tensor: Tensor, device: torch.device, is_labels: bool) -> Tensor:
    dtype = torch.int64 if is_labels and tensor.dtype in _PROMOTED else tensor.dtype
    if device.type == "cpu":
        return tensor.to(device=device, dtype=dtype)  # from an accelerator: waits, for an unfinished copy could be read
    return tensor.to(device=device, dtype=dtype, non_blocking=tensor.is_pinned())


def described(value: Any) -> str:
    """A batch as a text: the names, types, shapes and devices of its values."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}"
    named = fields(value)
    if named is not None:
        return "{" + ", ".join(f"{name}: {described(item)}" for name, item in named.items()) + "}"
    if isinstance(value, tuple | list) and len(value) <= _MAX_PARTS:
        return "(" + ", ".join(map(described, value)) + ")"
    try:
        return f"{type(value).__name__} of {len(value)}"
    except TypeError:  # it has no length, perhaps despite its class
        return type(value).__name__


def _inside(value: Any) -> Collection[Any] | None:
    """The values in a container; None: it is a single value."""
    named = fields(value)
    if named is not None:
        return named.values()
    return value if isinstance(value, tuple | list) and not isinstance(value, PackedSequence) else None


def _is_wrapped(value: Any) -> bool:
    return hasattr(type(value), _WRAPPER)


def _plain(value: Any) -> Any:
    return value.tensor if _is_wrapped(value) else value
