"""The precision of float32 matrix multiplications during a training."""

from typing import Literal, TypeAlias

import torch

from trainwright.config.errors import ConfigError
from trainwright.hooks.base import HookBase

MatmulPrecision: TypeAlias = Literal["highest", "high", "medium"]


class Float32MatmulPrecision(HookBase):
    """Sets ``torch.set_float32_matmul_precision`` during the training.

    "highest": float32. "high": inputs rounded to 10 bits (TensorFloat-32) if the device supports it. "medium": to 7
    bits (bfloat16), which CPUs support too. Sums, weights, gradients and the optimizer stay in float32: no autocast, no
    scaler.

    Raises:
        ConfigError: the program uses torch's newer ``fp32_precision``, which excludes this setting.
    """

    def __init__(self, precision: MatmulPrecision) -> None:
        self._precision = precision
        self._before: str | None = None

    def before_train(self) -> None:
        try:
            self._before = torch.get_float32_matmul_precision()
        except RuntimeError as error:
            raise ConfigError(
                f"float32_matmul_precision: got {self._precision!r}, but this program has set torch.backends' "
                "fp32_precision. Use one of the two."
            ) from error
        torch.set_float32_matmul_precision(self._precision)

    def after_train(self) -> None:
        if self._before is not None:
            torch.set_float32_matmul_precision(self._before)
            self._before = None
