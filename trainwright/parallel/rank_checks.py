"""What every process must have alike, compared before they work together: settings, and the form of the model.

Processes with other settings would wait for each other forever, or train models that differ without a message.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader, Subset

from trainwright.base.dist import all_gather_object, get_world_size, is_same
from trainwright.base.errors import ConfigError
from trainwright.parallel.faults import meet

# A process may have others: they change nothing of the result, or only the first process uses them.
_OWN = {
    *("device", "device_str", "device_type", "input_placement_device", "pin_memory", "dataloader_pin_memory"),
    *("num_workers", "num_dataloader_workers", "dataloader_num_workers", "persistent_workers", "prefetch_factor"),
    *("trackers", "tensorboard", "progress_bar", "profile", "rank", "local_rank", "node_rank"),
}
_NOT_SET = "no value"


def check_same_settings(settings: Mapping[Any, Any]) -> None:
    """Raise on every process if one has another setting. Every process must call this.

    Compares numbers, texts, booleans and None, also those in nested mappings and lists. Devices, workers of loaders,
    trackers and the progress bar may differ.

    Raises:
        ConfigError: a setting differs. It names the setting, both values and the process.
    """
    if get_world_size() == 1:
        return
    meet("the start of a trainer")
    own = dict(_leaves(settings))
    if is_same(repr(sorted(own.items())).encode("utf-8", "surrogatepass")):
        return
    first, *others = all_gather_object(own)
    for rank, other in enumerate(others, start=1):
        for key in {**first, **other}:
            one, another = first.get(key, _NOT_SET), other.get(key, _NOT_SET)
            if one != another:
                raise ConfigError(
                    f"{key}: {one} on rank 0, but {another} on rank {rank}. All processes need the same settings,"
                    " because they make each step together."
                )


def data_size(data: Any, *, is_whole: bool = False) -> Any:
    """What :func:`check_same_settings` compares of data: the samples, by name where there are several data sets.

    ``is_whole``: every process has a loader of all batches, of which it takes its share.
    """
    if isinstance(data, Mapping):
        return {name: data_size(part, is_whole=is_whole) for name, part in data.items()}
    if data is None:
        return None
    try:
        if isinstance(data, DataLoader):  # a process may have a loader of its share
            return f"{len(data)} batches" if is_whole else "given"
        indices = np.asarray(data.indices) if isinstance(data, Subset) and get_world_size() > 1 else None
        if indices is not None and indices.dtype.kind in "iu":  # a split that each process draws by itself
            checksum = hashlib.sha256(indices.tobytes()).hexdigest()[:8]
            return f"{len(data)} samples, whose indices have the checksum {checksum}"
        return f"{len(data)} samples"
    except (TypeError, NotImplementedError):  # a stream
        return "given"


def check_same_model(model: nn.Module) -> None:
    """Raise on every process if one has other parameters or buffers. Every process must call this.

    Raises:
        ConfigError: a name, a shape, a type or whether a parameter is trained differs.
    """
    if get_world_size() == 1:
        return
    form = [*_form(model)]
    if is_same("\n".join(form).encode("utf-8", "surrogatepass")):
        return
    forms = all_gather_object(form)
    rank = next(rank for rank, other in enumerate(forms) if other != forms[0])
    one, other = set(forms[0]), set(forms[rank])
    texts = [next((line for line in lines if line not in known), None) for lines, known in
             ((forms[0], other), (forms[rank], one))]  # fmt: skip
    here, there = [text or "nothing that the other does not have" for text in texts]
    raise ConfigError(
        f"The model differs between processes: rank 0 has {here}; rank {rank} has {there}. All"
        " processes must build the same model; its weights become those of rank 0."
    )


def _form(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        trained = "" if parameter.requires_grad else ", frozen"
        yield f"{name} ({_shape(parameter)} {_type(parameter)}{trained})"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"the buffer {name} ({_shape(buffer)} {_type(buffer)})"


def _shape(tensor: Any) -> str:
    try:
        return " x ".join(map(str, tensor.shape)) or "scalar"
    except RuntimeError:  # a lazy parameter
        return "no shape yet"


def _type(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if key in _OWN:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif _is_plain(value):
            yield f"{prefix}{key}", repr(value)


def _is_plain(value: Any) -> bool:
    """Whether two processes show equal values alike: other objects show their address."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
