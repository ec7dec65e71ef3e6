"""From samples to a batch, and from a batch to the arguments of the model's ``forward`` on its device."""

import re
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from trainwright.data.errors import DataError, difference
from trainwright.data.instance import DistTensorData, Instance

# Losses need class labels as int64. uint8 stays: torch's losses accept it.
_PROMOTED = frozenset({torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64})
_LABELS = frozenset({"y", "class", "classes", "class_id", "class_ids", "tags"})

_NOTE = "The batch of this step: "
_MAX_PARTS = 8  # longer lists are described by their length

# What to change for errors of torch about data, by a pattern of their messages (torch 2.11 to 2.14).
_FIXES = {
    r"Target (-?\d+) is out of bounds": (
        r"A label is \1. Labels of C classes are 0 to C - 1, where C is the number of scores that the model returns for"
        r" a sample: change the labels, the number of the model's outputs, or the ignore_index of the loss."
    ),
    r"index out of range in self": (
        "An embedding has no row for an id of this batch: ids are 0 to num_embeddings - 1. Tokens that were added to a"
        " tokenizer need a larger embedding (resize_token_embeddings in transformers)."
    ),
    r"expected (?:target dtype to be Long or Byte, but got|scalar type Long but found) (\w+)": (
        r"Class labels are whole numbers, and these are \1: convert them with labels.long(). For numbers to predict,"
        r" use a loss such as MSELoss."
    ),
    r"0D or 1D target tensor expected": (
        "Class labels have the shape (B,), one for each sample: use labels.squeeze(1) for (B, 1), and"
        " labels.argmax(1) for one column per class."
    ),
    r"Expected floating point type for target with class probabilities": (
        "The labels have one column per class: use their class indices, labels.argmax(1), or probabilities,"
        " labels.float()."
    ),
    r"mat1 and mat2 must have the same dtype, but got (\w+) and (\w+)": (
        r"The inputs are \1 and the model's weights are \2: convert the inputs, for example with inputs.float()."
    ),
    r"Input type \((?:torch\.)?(\w+)\) and (?:bias|weight) type \((?:torch\.)?(\w+)\) should be the same": (
        r"The inputs are \1 and the model's weights are \2: convert the inputs, for example with inputs.float()."
    ),
    r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)": (
        r"A layer expects \3 features and receives \2: change the layer's in_features, or the shape of its input."
    ),
    r"grad can be implicitly created only for scalar outputs": (
        "The loss has several numbers: it must be one, such as loss.mean()."
    ),
    r"Expected all tensors to be on the same device": (
        "The model and its batches are moved to the device of the run (trainer.device); what your own code makes or"
        " keeps is not. Make tensors on the batch's device (device=x.device), keep constants in the model"
        " (register_buffer), and let an own prepare_input_batch move its batch."
    ),
    r"device-side assert triggered": (
        "Most often a class label or a token id is out of range, which a GPU does not name. One step on the CPU does:"
        " device_str='cpu', or train.dist.device_type=cpu."
    ),
}


def collate(samples: Sequence[Any]) -> Any:
    """Collate samples: `Instance` samples become an `Instance`, others the result of torch's ``default_collate``.

    Fields that are lists of numbers become tensors (B, ...); torch would transpose them.

    Raises:
        DataError: the samples do not match; the message names the sample, the field and both shapes.
    """
    if isinstance(samples[0], Instance):
        return Instance.stack(samples)
    try:
        return _stacked(samples)
    except Exception:  # fall back to torch, which may succeed or raises the error
        return _as_torch_does(samples)


def add_batch_note(error: BaseException, batch: Any) -> None:
    """Add a note with the names, shapes, types and devices of the batch to an error of a step, once; and a fix."""
    if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        error.add_note(_NOTE + _describe(batch))
        if (fix := _fix_of(str(error))) is not None:
            error.add_note(fix)


def _fix_of(message: str) -> str | None:
    """What to change in the data or the loss for a known error of torch; None: it is not known."""
    for pattern, fix in _FIXES.items():
        if (match := re.search(pattern, message)) is not None:
            return match.expand(fix)
    return None


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}"
    if isinstance(value, Instance):
        value = value.get_fields()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_describe(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple | list) and len(value) <= _MAX_PARTS:
        return "(" + ", ".join(map(_describe, value)) + ")"
    size = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"{type(value).__name__}{size}"


def _as_torch_does(samples: Sequence[Any]) -> Any:
    try:
        return default_collate(samples)  # type: ignore[arg-type]  # it asks for a list and takes any sequence
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise DataError(f"data: {difference(samples) or f'the samples cannot be batched: {error}'}") from error


def _stacked(values: Sequence[Any], *, is_field: bool = False) -> Any:
    """``default_collate``, but fields that are lists of numbers become tensors."""
    kind = type(values[0])
    if kind is list and is_field and _holds_numbers(values[0]):
        return torch.tensor(values, device="cpu")
    if kind is tuple or kind is list:
        return [_stacked(parts, is_field=True) for parts in zip(*values, strict=True)]
    if kind is dict or isinstance(values[0], UserDict):  # the second: the outputs of tokenizers of transformers
        return {name: _stacked([value[name] for value in values], is_field=True) for name in values[0]}
    return default_collate(values)  # type: ignore[arg-type]  # it asks for a list and takes any sequence


def _holds_numbers(value: Any) -> bool:
    while type(value) is list and value:
        value = value[0]
    return isinstance(value, int | float)


def count_samples(batch: Any, unknown: int = 0) -> int:
    """The number of samples of a batch; ``unknown`` if it does not show.

    It is the first dimension that all tensors share, else that of the labels among named fields; without tensors the
    length that all lists share. A list of dicts has a sample in each; graphs of PyTorch Geometric and a PackedSequence
    know their number.
    """
    if isinstance(batch, Mapping):
        values: Any = batch.values()
    elif isinstance(batch, tuple | list) and not isinstance(batch, PackedSequence):
        values = batch
    else:
        values = (batch,)
    sizes = {len(value) for value in values if isinstance(value, torch.Tensor) and value.dim()}
    if len(sizes) > 1 and isinstance(batch, Mapping):
        sizes = {len(v) for name, v in batch.items() if is_label(name) and isinstance(v, torch.Tensor) and v.dim()}
    elif not sizes:
        sizes = {len(batch)} if _is_list_of_dicts(batch) else {*map(_num_parts, values)} - {None}
    return sizes.pop() if len(sizes) == 1 else unknown


def _num_parts(value: Any) -> Any:
    """The number of samples in a value that is no tensor; None: unknown."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])  # on the host
    if isinstance(value, tuple | list):
        return len(value)
    if isinstance(value, Mapping):
        return count_samples(value) or None
    return getattr(value, "num_graphs", None)


def _is_list_of_dicts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def is_label(name: Any) -> bool:
    """Whether a field of this name holds labels."""
    return isinstance(name, str) and ("label" in name or "target" in name or name in _LABELS)


def to_batch(data: Any, device: torch.device | str = "cpu") -> Any:
    """The batch with its tensors on ``device``: a dictionary for an `Instance`, otherwise the same type of container.

    Labels of integer types that torch's losses do not accept (int8, int16, int32, uint16, uint32, uint64) become int64:
    fields whose name contains "label" or "target", or is "y", "class" or "tags", and all but the first item of a tuple
    or list. Other tensors keep their type. Numpy arrays become tensors; objects with ``to(device)``, such as graphs of
    PyTorch Geometric and packed sequences, are moved; text, numbers and None stay unchanged. Tensors that already match
    are not copied. Copies from pinned memory to an accelerator are asynchronous.

    >>> to_batch(Instance(labels=torch.tensor([3, 4], dtype=torch.int32)))
    {'labels': tensor([3, 4])}
    """
    device = torch.device(device)
    kind = type(data)
    if kind is dict or kind is list or kind is tuple:  # most batches: tensors side by side, and all there already
        for value in data.values() if kind is dict else data:
            if type(value) is not torch.Tensor or value.device != device or value.dtype in _PROMOTED:
                return _moved(data, device, is_batch=True)
        return data if kind is tuple else data.copy()
    return _moved(data, device, is_batch=True)


def _moved(value: Any, device: torch.device, *, is_labels: bool = False, is_batch: bool = False) -> Any:
    if isinstance(value, torch.Tensor):
        return _moved_tensor(value, device, is_labels)
    if isinstance(value, DistTensorData):
        return _moved_tensor(value.tensor, device, is_labels)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return _moved_tensor(torch.as_tensor(value, device="cpu"), device, is_labels)
    if isinstance(value, Instance):
        value = value.get_fields()
    if isinstance(value, Mapping):
        return {n: _moved(item, device, is_labels=is_labels or is_label(n)) for n, item in value.items()}
    if isinstance(value, tuple | list) and not isinstance(value, PackedSequence):
        fields = getattr(value, "_fields", None)  # of a named tuple
        if fields is not None:
            return type(value)(
                *(_moved(v, device, is_labels=is_labels or is_label(n)) for n, v in zip(fields, value, strict=True))
            )
        items = [_moved(item, device, is_labels=is_labels or (is_batch and n > 0)) for n, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return moved_object(value, device) if hasattr(value, "to") else value


def mixed(mixup_func: Callable[[Any, Any], tuple[Any, Any]], batch: Any) -> Any:
    """A batch of which ``mixup_func(images, labels)`` has replaced both: a pair, or named fields.

    The labels are the field ``labels``, else the only one with a name of labels; the images are ``images``, else the
    only other field of floating point with at least three dimensions.

    Raises:
        DataError: there are no such fields, or several.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        pair = mixup_func(*batch)
        return [*pair] if isinstance(batch, list) else pair
    fields = {name: v for name, v in batch.items() if isinstance(v, torch.Tensor)} if isinstance(batch, Mapping) else {}
    labels = ["labels"] if "labels" in fields else [name for name in fields if is_label(name)]
    images = ["images"] if "images" in fields else []
    if not images:
        images = [name for name, v in fields.items() if name not in labels and v.is_floating_point() and v.dim() > 2]
    if len(images) != 1 or len(labels) != 1:
        raise DataError(
            f"mixup_func: the batch {_describe(batch)} has {len(images)} fields of images and {len(labels)} of labels."
            " Name them 'images' and 'labels', or mix in a get_batch or prepare_input_batch of your own."
        )
    new_images, new_labels = mixup_func(fields[images[0]], fields[labels[0]])
    return {**batch, images[0]: new_images, labels[0]: new_labels}


def moved_object(value: Any, device: torch.device) -> Any:
    """The result of an object's own ``to``."""
    if device.type != "cpu":
        try:
            return value.to(device, non_blocking=True)
        except TypeError:  # it takes the device only
            pass
    return value.to(device)


def _moved_tensor(tensor: torch.Tensor, device: torch.device, is_labels: bool) -> torch.Tensor:
    dtype = torch.int64 if is_labels and tensor.dtype in _PROMOTED else tensor.dtype
    if device.type == "cpu":
        return tensor.to(device=device, dtype=dtype)  # from an accelerator: waits, for an unfinished copy could be read
    return tensor.to(device=device, dtype=dtype, non_blocking=tensor.is_pinned())
