"""Errors about the data: damaged, samples of unequal shapes, a batch that a step could not use."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trainwright.base.batch import described
from trainwright.base.errors import UserError


class DataError(UserError, ValueError):
    """Data that cannot be trained on."""


_SUGGESTION = (
    "Samples of one batch need equal shapes: pad, crop or reshape them in the data set (for example image.unsqueeze(0) "
    "for a missing channel), or give the loader a collate_fn that pads."
)
_PAD = (
    "Lists of numbers become a tensor if they have one length. Pad them in a collator (data_collator=, or a loader's "
    "collate_fn=), for example transformers.DataCollatorWithPadding(tokenizer), or with torch's pad_sequence."
)

_MAX_COLUMNS = 4  # a longer list of arrays is one of samples


def data_fault(data: Any) -> str | None:
    """Why ``data`` is no data set, with what to pass instead; None if it may be one."""
    kind = type(data).__name__
    if isinstance(data, str | os.PathLike):
        return f"got the path {os.fspath(data)!r}; pass the data set: Dataset.load(path), or one of your own."
    if type(data).__module__.partition(".")[0] in ("pandas", "polars") and hasattr(data, "columns"):
        return (
            f"got a {kind}, which has columns by index; pass ColumnDataset(**{{n: data[n].to_numpy() for n in data}})."
        )
    if isinstance(data, type):
        return f"got the class {data.__name__}; pass an object of it, {data.__name__}(...)."
    if isinstance(data, Mapping) and (fault := columns_fault(data)) is not None:
        return fault
    if isinstance(data, Mapping) and "train" in data:
        return f"got a {kind} of data sets; pass one of them: data['train']."
    if isinstance(data, tuple | list) and len(data) > 1 and all(map(_is_array, data)) and _are_columns(data):
        shapes = " and ".join(str(tuple(column.shape)) for column in data)
        return (
            f"got a {kind} of arrays of the shapes {shapes}, whose items would be read as samples; pass"
            " torch.utils.data.TensorDataset(inputs, labels)."
        )
    if data is not None and not is_read(data):
        part = " For a part of the training data: torch.utils.data.random_split." if isinstance(data, float) else ""
        return f"got {data!r:.80} ({kind}); a data set has __getitem__ and __len__, or __iter__.{part}"
    return None


def _are_columns(arrays: Sequence[Any]) -> bool:
    """Whether arrays are the columns of samples, such as inputs and labels, and not samples themselves."""
    are_unlike = len({(array.ndim, array.dtype, *array.shape[1:]) for array in arrays}) > 1
    has_one_length = len({tuple(array.shape[:1]) for array in arrays}) == 1
    return isinstance(arrays, tuple) or (are_unlike and has_one_length and len(arrays) < _MAX_COLUMNS)


def is_read(data: Any) -> bool:
    """Whether samples or batches may be read by index or iteration."""
    names = ("__getitem__", "__iter__", "__len__")
    return not isinstance(data, torch.nn.Module) and any(hasattr(data, name) for name in names)


def columns_fault(data: Mapping[Any, Any]) -> str | None:
    """Why a mapping has no data sets by name but the columns of one; None if it may have data sets."""
    if data and all(map(_is_array, data.values())):
        return f"got a {type(data).__name__} of arrays; pass ColumnDataset(**data)."
    are_numbers = all(isinstance(column, list) and column and _is_number(column[0]) for column in data.values())
    if data and are_numbers and len({len(column) for column in data.values()}) == 1:
        return (
            f"got a {type(data).__name__} of lists of numbers; pass"
            " ColumnDataset(**{name: torch.tensor(values) for name, values in data.items()})."
        )
    return None


def are_inputs_and_labels(first: Any, second: Any) -> bool:
    """Whether two data sets are arrays of one length whose samples have other shapes or types."""
    if not (_is_array(first) and _is_array(second)) or 0 in (first.ndim, second.ndim) or len(first) != len(second):
        return False
    return bool(first.shape[1:] != second.shape[1:] or first.dtype != second.dtype)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, list) and bool(value) and _is_number(value[0]))


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def unsupported(value: Any, name: str = "") -> str | None:
    """Describe the first part of a sample that torch cannot collate; None if there is none."""
    if isinstance(value, Mapping | tuple | list):
        return next(filter(None, (unsupported(part(value), path) for path, part in _parts(value, name))), None)
    if _is_array(_tensor(value)) or isinstance(value, int | float | complex | str | bytes | np.generic):
        return None
    kind = type(value)
    return (
        f"sample 0{f', {name},' if name else ''} is a {kind.__module__}.{kind.__qualname__}, which cannot be part of a"
        " batch: convert it in the data set (an image, for example, by transforms.ToTensor() of trainwright.data)."
    )


def difference(values: Sequence[Any], name: str = "") -> str | None:
    """Describe the first of ``values`` that does not match ``values[0]``, with a suggestion; None if all match.

    ``name`` is the path of the field; it grows by ``.key`` and ``[index]`` inside dictionaries and tuples.
    """
    first = values[0]
    if (place := next((place for place, value in enumerate(values) if value is None), None)) is not None:
        return f"sample {place} of the batch is None{f' at {name!r}' if name else ''}. Return a value in every case."
    its = f"{name!r} of " if name else ""
    for index, value in enumerate(values):
        who = f"sample {index} of the batch has"
        if _kind(value) != _kind(first):
            return f"{who} {its}type {_kind(value)}; sample 0 has {_kind(first)}. Give all samples one type."
        if _shape(value) != _shape(first):
            return f"{who} {its}shape {_shape(value)}; sample 0 has {_shape(first)}. {_SUGGESTION}"
        if isinstance(first, Mapping) and value.keys() != first.keys():
            keys, others = sorted(map(str, value)), sorted(map(str, first))
            return f"{who} {its}keys {keys}; sample 0 has {others}. Give all samples the same keys."
        if isinstance(first, tuple | list) and len(value) != len(first):
            is_of_numbers = all(isinstance(item, int | float) for item in (*value, *first))
            suggestion = _PAD if is_of_numbers else _SUGGESTION
            return f"{who} {its}length {len(value)}; sample 0 has {len(first)}. {suggestion}"
    for path, part in _parts(first, name):
        found = difference([part(value) for value in values], path)
        if found:
            return found
    return None


def _parts(first: Any, name: str) -> list[tuple[str, Any]]:
    """The paths of the elements of a value, with functions that return them."""
    if isinstance(first, Mapping):
        return [(f"{name}.{key}" if name else str(key), lambda value, key=key: value[key]) for key in first]
    if isinstance(first, tuple | list):
        return [(f"{name}[{index}]", lambda value, index=index: value[index]) for index in range(len(first))]
    return []


def _tensor(value: Any) -> Any:
    return getattr(value, "tensor", value)  # DistTensorData


def _shape(value: Any) -> tuple[int, ...] | None:
    array = _tensor(value)
    return tuple(array.shape) if isinstance(array, torch.Tensor | np.ndarray) else None


def _kind(value: Any) -> str:
    array = _tensor(value)
    return str(array.dtype) if isinstance(array, torch.Tensor | np.ndarray) else type(value).__name__


_NOTE = "The batch of this step: "

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
    r"only batches of spatial targets supported \(3D tensors\) but got targets of dimension: (\d)": (
        r"The labels of pixels have the shape (B, H, W), these have \1 dimensions: labels.squeeze(1) of (B, 1, H, W),"
        r" labels.argmax(1) of one plane per class."
    ),
    r'missing the required "forward" function': (
        "The run calls the model, and so its forward(...): define it, or rename the method that computes the outputs."
        " A module that only holds others, such as nn.ModuleDict, needs a step of your own."
    ),
    r"weight tensor should be defined either for all (\d+) classes .*got weight tensor of shape: \[(.*?)\]": (
        r"The loss has weights of the shape [\2], and the model returns scores for \1 classes: give one weight for each"
        r" class, or change the number of the model's outputs."
    ),
    r"expected (?:target dtype to be Long or Byte, but got|scalar type Long but found) (\w+)": (
        r"Class labels are whole numbers, and these are \1: convert them with labels.long(). For numbers to predict,"
        r" use a loss such as MSELoss."
    ),
    r"argument 'target' \(position 2\) must be Tensor, not ([\w.]+)": (
        r"The labels of the batch are a \1: labels are tensors. For numbers, return torch.tensor(labels) from the"
        r" collate function; for texts, give numbers in the data set, for example the place of each text in the list of"
        r" all classes."
    ),
    r"argument 'input' \(position 1\) must be Tensor, not ([\w.]+)": (
        r"A layer receives a \1 in place of a tensor: take the tensor from it (an LSTM or GRU returns a tuple of its"
        r" outputs and its state), or let the collate function return tensors, with torch.stack(...) or"
        r" torch.tensor(...)."
    ),
    r"Expected tensor for argument #1 'indices' to have .* but got (?:torch\.)?([\w.]+)": (
        r"An embedding takes ids, whole numbers, and receives a \1: convert them with ids.long(), or exchange the"
        r" fields of the sample, if these are not the ids."
    ),
    r"Expected more than 1 value per channel when training": (
        "Batch normalization needs more than one sample in a training batch: leave out a last batch of one sample"
        " (dataloader_drop_last=True), or set a larger batch_size."
    ),
    r"Expected input batch_size \((\d+)\) to match target batch_size \((\d+)\)": (
        r"The model returns scores for \1 samples, the batch has \2 labels: keep the first dimension of a batch in the"
        r" model, with x.flatten(1) in place of a view or reshape that mixes samples."
    ),
    r"Expected target size \[(.*?)\], got \[(.*?)\]": (
        r"The labels have the shape [\2], and the classes are dimension 1 of scores: scores.movedim(-1, 1) of the shape"
        r" (B, L, C), scores.squeeze(1) of (B, 1, C)."
    ),
    r"all elements of (?:input|target) should be between 0 and 1": (
        "BCELoss takes probabilities and labels between 0 and 1: use BCEWithLogitsLoss for scores, or end the model"
        " with a sigmoid."
    ),
    r"backward through the graph a second time": (
        "A tensor of an earlier step is part of this loss: detach() what is kept from one step to the next, and inputs"
        " of the data set that were computed with gradients. Or your own code calls backward(), too: return the loss"
        " alone, which the trainer differentiates; after super().train_step(...) leave backward() out."
    ),
    r"0D or 1D target tensor expected": (
        "Class labels have the shape (B,), one for each sample: use labels.squeeze(1) for (B, 1), and"
        " labels.argmax(1) for one column per class."
    ),
    r"Expected floating point type for target with class probabilities": (
        "The labels have one column per class: use their class indices, labels.argmax(1), or probabilities,"
        " labels.float()."
    ),
    r"(?:same dtype, but got Float and |Input type .*[Ff]loat.* and (?:bias|weight) type .*)(Half|BFloat16)": (
        r"The model's weights are \1. Keep them in float32 (without model.half() and the like), and set"
        r" mixed_precision='fp16' or 'bf16' (train.amp.enabled=true in config files)."
    ),
    r"mat1 and mat2 must have the same dtype, but got (\w+) and (\w+)": (
        r"The inputs are \1 and the model's weights are \2: give both one type, for example with inputs.float() and"
        r" model.float(), or exchange inputs and labels, if these are the labels."
    ),
    r"Input type \((?:torch\.)?([\w. ]+)\) and (?:bias|weight) type \((?:torch\.)?([\w. ]+)\) should be the same": (
        r"The inputs are \1 and the model's weights are \2: give both one type, for example with inputs.float() and"
        r" model.float()."
    ),
    r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)": (
        r"A layer expects \3 features and receives \2: change the layer's in_features, or the shape of its input."
        r" nn.Flatten() before the layer makes one row of each image."
    ),
    r"weight of size \[[\d, ]+\], expected input\[([\d, ]+)\] to have (\d+) channels, but got": (
        r"A convolution expects the shape (samples, \2 channels, ...) and receives [\1]: add a missing dimension of"
        r" channels with x.unsqueeze(1), put a last one in its place with x.movedim(-1, 1), or change the layer's"
        r" in_channels."
    ),
    r"input to (conv\dd), but got input of size: \[([\d, ]+)\]": (
        r"\1 expects the shape (samples, channels, ...) and receives [\2]: make images of rows with"
        r" x.view(-1, channels, height, width), or add a missing dimension of channels with x.unsqueeze(1)."
    ),
    r"must be the same as input size \(torch\.Size\(\[\]\)\)": (
        "The scores of a batch of one sample have no dimension: squeeze() removes it. Use squeeze(-1), or drop the last"
        " batch."
    ),
    r"[Tt]arget size \(torch\.Size\((.*?)\)\) (?:must be the same as|that is different to the) input size"
    r" \(torch\.Size\((.*?)\)\)": (
        r"The scores have the shape \2 and the labels \1: this loss compares each score with a label, a float. For"
        r" example labels.float().unsqueeze(1) for scores of the shape (B, 1)."
    ),
    r"result type Float can't be cast to the desired output type (Long|Int)|Found dtype (Long|Bool) but expected Float"
    r"|(?:Subtraction|Negation), the `-` operator,.* bool tensor": (
        r"This loss compares each score with a label, a float: convert the labels with labels.float()."
    ),
    r"kl_div: Integral inputs not supported": (
        "KLDivLoss compares log-probabilities with probabilities, of each class: labels that are True and False are"
        " probabilities as labels.float(). For classes use CrossEntropyLoss and labels.long()."
    ),
    r"element 0 of tensors does not require grad": (
        r"The loss cannot be differentiated: it depends on no trainable parameter. Remove torch.no_grad() and detach()"
        r" from the forward pass, or unfreeze a layer."
    ),
    r"grad can be implicitly created only for scalar outputs": (
        "The loss has several numbers: it must be one, such as loss.mean()."
    ),
    r"Expected all tensors to be on the same device": (
        "The model and its batches are moved to the device of the run (trainer.device); what your own code makes or"
        " keeps is not. Make tensors on the batch's device (device=x.device), keep constants in the model"
        " (register_buffer), and let an own prepare_input_batch move its batch."
    ),
    r"DataLoader worker .* (exit code \d+|killed by signal: \w[\w ]*)": (
        r"A worker of the data loader ended (\1) while it read samples, perhaps for lack of memory. With num_workers=0"
        r" (dataloader_num_workers=0) the samples are read in this process, which shows their errors."
    ),
    r"(?:tuple|list) indices must be integers|'str' object cannot be inter|'(?:tuple|list)' object has no attribute": (
        "Perhaps the batch is used as a dict and is a pair (inputs, target): unpack it, or let the samples be dicts."
    ),
    r"device-side assert triggered": (
        "Most often a class label or a token id is out of range, which a GPU does not name. One step on the CPU does:"
        " device_str='cpu', or train.dist.device_type=cpu."
    ),
}


GRADIENTS_OFF = (
    "Gradients are switched off, for the complete training: by torch.no_grad() around it, or by"
    " torch.set_grad_enabled(False) in a callback or earlier in the program. Undo it: torch.set_grad_enabled(True)."
)


def add_batch_note(error: BaseException, batch: Any) -> None:
    """Add a note with the names, shapes, types and devices of the batch to an error of a step, once; and a fix."""
    if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        error.add_note(_NOTE + described(batch))
        add_fix(error)


@contextmanager
def batch_in_errors(batch: Any, more: Callable[[Exception], str | None] = lambda error: None) -> Iterator[None]:
    """Errors inside get a note with the batch, and the one that ``more`` returns."""
    try:
        yield
    except Exception as error:
        add_batch_note(error, batch)
        if note := more(error):
            error.add_note(note)
        raise


def add_fix(error: BaseException) -> None:
    """Add a note with what to change in the data or the loss, for a known error of torch."""
    matches = ((re.search(pattern, str(error)), fix) for pattern, fix in _FIXES.items())
    fix = next((match.expand(fix) for match, fix in matches if match is not None), None)
    if fix is not None and "no trainable parameter" in fix and not torch.is_grad_enabled():
        fix = GRADIENTS_OFF
    if fix is not None and fix not in getattr(error, "__notes__", ()):
        error.add_note(fix)
