"""Global settings of torch during a training: the precision of matrix products, deterministic algorithms."""

import os
from typing import Literal, TypeAlias

import torch

from trainwright.base.errors import ConfigError
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

    slot = "prepare"
    changes_process = True

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


class DeterministicAlgorithms(HookBase):
    """Sets ``torch.use_deterministic_algorithms`` during the training, and cuDNN to deterministic algorithms.

    An operation that has no deterministic algorithm raises, or warns with ``warn_only``. cuBLAS reads the environment
    variable ``CUBLAS_WORKSPACE_CONFIG`` at its first use; it is set here if it is not set, and stays.
    """

    slot = "prepare"
    changes_process = True

    def __init__(self, *, warn_only: bool = False) -> None:
        self._warn_only = warn_only
        self._before: tuple[bool, bool, bool, bool] | None = None

    def before_train(self) -> None:
        cudnn = torch.backends.cudnn
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn.deterministic,
            cudnn.benchmark,
        )
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=self._warn_only)
        cudnn.deterministic, cudnn.benchmark = True, False

    def after_train(self) -> None:
        if self._before is not None:
            is_on, warns, *of_cudnn = self._before
            torch.use_deterministic_algorithms(is_on, warn_only=warns)
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = of_cudnn
            self._before = None


def deterministic_hook(setting: bool | str) -> DeterministicAlgorithms | None:
    """The hook of a setting: True, "warn", or False for none."""
    return DeterministicAlgorithms(warn_only=setting == "warn") if setting else None
