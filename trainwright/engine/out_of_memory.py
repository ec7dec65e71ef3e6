"""What an out-of-memory error says: the largest tensors, what the memory holds, and settings that need less."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainwright.config.spec import RunSpec
from trainwright.optim.named import each_optimizer

_SHOWN = 5  # tensors
_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "failed to allocate")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be allocated, on an accelerator or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _TEXTS)


def add_memory_note(error: BaseException, trainer: Any) -> None:
    """Add to the error what the memory of a training holds, and what needs less of it."""
    model, optimizer = getattr(trainer, "model", None), getattr(trainer, "optimizer", None)
    if model is None or optimizer is None:
        return
    kinds = dict(_parts(model, optimizer))
    sizes = {name: sum(one.nbytes for one, _ in tensors) for name, tensors in kinds.items()}
    names = {id(one): f"{text}" for tensors in kinds.values() for one, text in tensors}
    lines = ["Memory: " + ", ".join(f"{byte_size(size)} {name}" for name, size in sizes.items()) + "."]
    lines.append("The largest tensors:")
    device = getattr(trainer, "device", None)
    for one in _largest(device, (tensor for tensors in kinds.values() for tensor, _ in tensors)):
        name = names.get(id(one), "activation, batch or other")
        lines.append(
            f"  {byte_size(one.nbytes):>10}  {tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}  {name}"
        )
    run = getattr(trainer, "run", None)
    lines += ["Settings that need less memory:", *(f"  {text}" for text in _less(None if run is None else run.spec))]
    error.add_note("\n".join(lines))


def _parts(model: Any, optimizer: Any) -> Iterator[tuple[str, list[tuple[Tensor, str]]]]:
    named = [(one, name) for name, one in (*model.named_parameters(), *model.named_buffers())]
    yield "parameters and buffers", named
    yield "gradients", [(one.grad, f"gradient of {name}") for one, name in named if one.grad is not None]
    name_of = {id(one): name for one, name in named}
    states: list[tuple[Tensor, str]] = []
    for each in each_optimizer(optimizer):
        for parameter, state in each.state.items():
            name = name_of.get(id(parameter), "a parameter")
            states += [(one, f"{key} of {name}") for key, one in state.items() if isinstance(one, Tensor)]
    yield "states of the optimizer", states


def _largest(device: Any, known: Iterable[Tensor]) -> list[Tensor]:
    """The largest tensors on the device, one of each storage."""
    kind = None if device is None else torch.device(device).type
    by_storage: dict[int, Tensor] = {}
    for one in (*known, *(value for value in gc.get_objects() if type(value) is Tensor)):
        if (kind is None or one.device.type == kind) and one.layout is torch.strided and one.nbytes:
            by_storage.setdefault(one.untyped_storage().data_ptr(), one)
    return sorted(by_storage.values(), key=lambda one: -one.nbytes)[:_SHOWN]


def _less(spec: RunSpec | None) -> Iterator[str]:
    """Settings by their names in the API: the batch is halved, the samples of an update stay."""
    if spec is not None:
        by_file = spec.api == "config file"
        if (size := spec.batch_size) > 1:
            settings = spec.batch_settings((size + 1) // 2, spec.windows.scaled(lambda length: 2 * length))
            text = (" " if by_file else ", ").join(f"{name}={value}" for name, value in settings.items())
            yield f"{text}  (half the activations; as many samples per update)"
        if not spec.gradient_checkpointing:
            yield f"{spec.name_of('gradient_checkpointing')}=True  (activations are computed twice)"
        if spec.mixed_precision is None:
            precision = "True" if by_file else "'bf16'"
            yield f"{spec.name_of('mixed_precision')}={precision}  (activations in bfloat16)"
        find = "trainwright find batch-size CONFIG" if by_file else "trainer.find_batch_size()"
        yield f"{find}  (the largest batch that fits)"
    yield "zero_stage=1, 2 or 3 on several processes  (docs/parallel.md)"


def byte_size(number: float) -> str:
    """
    >>> byte_size(0), byte_size(1536), byte_size(85899345920)
    ('0 B', '1.5 KiB', '80.0 GiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = next((power for power in range(4) if number < 1024 ** (power + 1)), 4)
    return f"{number / 1024**power:,.{1 if power else 0}f} {units[power]}"
