"""The files of a checkpoint: a run's objects as named writers, and states read from files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.files import Writer, read_regular
from trainwright.checkpoint.folder import WEIGHTS_NAME
from trainwright.checkpoint.manifest import MANIFEST_NAME, Manifest
from trainwright.checkpoint.state import decode_state, encode_state
from trainwright.checkpoint.tensors import TensorFile, read_tensors
from trainwright.checkpoint.weights import read_weights, split_model_state

EXTRA = "extra"  # the keyword arguments of Checkpointer.save
_MODEL_EXTRA = "model_extra"  # what modules return from get_extra_state, unless it is a tensor
MODEL_FILES = (WEIGHTS_NAME, f"{_MODEL_EXTRA}.json", f"{_MODEL_EXTRA}.safetensors")
NOT_OURS = ("config.json",)  # of transformers, which reads it next to the weights
RESERVED_NAMES = ("model", Path(MANIFEST_NAME).stem, EXTRA, _MODEL_EXTRA, *(Path(name).stem for name in NOT_OURS))


class Stateful(Protocol):
    """An object with a state that a checkpoint can hold."""

    def state_dict(self) -> Any: ...  # Any: each class has its own state

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def serialize(
    model: nn.Module,
    checkpointables: Mapping[str, Stateful],
    extra: Mapping[str, Any],
    attached: Mapping[str, bytes] | None = None,
) -> dict[str, Writer]:
    """The files of a checkpoint, by name. Does not copy tensors: a `TensorFile` reads them when it is called.

    ``attached``: additional files for people and other programs, without state.

    Raises:
        CheckpointTypeError: a state holds a value that a checkpoint cannot store.
    """
    weights, metadata, model_extra = split_model_state(model)
    states: dict[str, Any] = {EXTRA: dict(extra), **({_MODEL_EXTRA: model_extra} if model_extra else {})}
    with without_compiler():
        states |= {name: checkpointable.state_dict() for name, checkpointable in checkpointables.items()}
    files: dict[str, Writer] = {WEIGHTS_NAME: TensorFile(weights, metadata)}
    for name, state in states.items():
        text, tensors = encode_state(state, name)
        files[f"{name}.json"] = _bytes_writer(text)
        if tensors:
            files[f"{name}.safetensors"] = TensorFile(tensors)
    return files | {name: _bytes_writer(content) for name, content in (attached or {}).items()}


def check_state(state: object, target: Stateful, source: str) -> None:
    """Check the state of an optimizer, a scheduler or a trainer, before anything is loaded.

    Raises:
        CheckpointError: it is empty, or lacks keys that every such state has. The message names ``source``.
    """
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


def read_state(folder: Path, manifest: Manifest, name: str) -> Any:  # Any: what was saved
    """The state saved as ``name``; its tensors are copies."""
    tensors_name = f"{name}.safetensors"
    tensors = read_tensors(folder / tensors_name)[0] if tensors_name in manifest.files else {}
    return decode_state(read_regular(folder / f"{name}.json"), tensors, str(folder / f"{name}.json"))


def read_model_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The weights, and the modules' ``get_extra_state`` values. Tensors may be memory-mapped."""
    extra = read_state(folder, manifest, _MODEL_EXTRA) if f"{_MODEL_EXTRA}.json" in manifest.files else {}
    return {**read_weights(folder / WEIGHTS_NAME), **extra}


def _bytes_writer(content: bytes) -> Writer:
    def write(file: BinaryIO) -> None:
        file.write(content)

    return write


def lay_out_as_parameters(optimizer: Optimizer) -> None:
    """Give an optimizer's loaded states the memory layout of their parameters.

    A checkpoint has numbers in order of their indices. torch's fused kernels read parameter and state side by side in
    memory, without a look at strides: with one in ``channels_last`` and the other not they would pair wrong numbers.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.shape == parameter.shape
                    and value.stride() != parameter.stride()
                ):
                    laid_out = torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
                    state[name] = laid_out.copy_(value)
