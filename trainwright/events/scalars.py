"""Values of metrics: tensors are copied on their device when they are put, and become numbers all together."""

from itertools import chain
from typing import SupportsFloat

import torch
from torch import Tensor

from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.events.media import wide_dtype


def copied_scalar(name: str, value: Tensor) -> Tensor:
    """A detached copy of shape (): the step may write into ``value`` later."""
    if value.numel() != 1:
        raise ConfigError(
            f"put_scalar({name!r}): got a tensor of shape {tuple(value.shape)}; a scalar has exactly one element. "
            "Put its mean, value.mean(), or all values with put_histogram."
        )
    if value.is_complex():
        raise ConfigTypeError(f"put_scalar({name!r}): got a complex tensor; put value.abs() or value.real.")
    if type(value) is not Tensor and hasattr(value, "full_tensor"):
        value = value.full_tensor()  # a DTensor: every rank puts, so every rank takes part
    copy = value.detach().clone()
    return copy if copy.dim() == 0 else copy.reshape(())


def as_number(name: str, value: SupportsFloat) -> float:
    """A value that is not a tensor, as a float: a Python or numpy number, or another object with ``__float__``."""
    if not isinstance(value, str | bytes | bytearray):  # float("3") would be 3.0
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):  # also an array of several elements
            pass
    raise ConfigTypeError(
        f"put_scalar({name!r}): got {value!r:.80} ({type(value).__name__}); "
        "it must be a number or a tensor of one element."
    )


def to_numbers(values: list[float | Tensor]) -> list[float]:
    """The values as floats, in order.

    One device-to-host copy per device: a copy per tensor would stop the device's queue each time.
    """
    numbers = [value if isinstance(value, float) else 0.0 for value in values]
    columns: dict[torch.device, dict[torch.dtype, list[Tensor]]] = {}
    places: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            columns.setdefault(value.device, {}).setdefault(value.dtype, []).append(value)
            places.setdefault(value.device, {}).setdefault(value.dtype, []).append(place)
    for device, by_dtype in columns.items():
        with torch.no_grad():
            wide = [torch.stack(column).to(wide_dtype(device)) for column in by_dtype.values()]
            on_host: list[float] = torch.cat(wide).tolist()
        for place, number in zip(chain.from_iterable(places[device].values()), on_host, strict=True):
            numbers[place] = number
    return numbers
