"""Averages of the weights over a training: exponential (EMA) or equal (SWA), by torch's ``AveragedModel``;
or of a schedule-free optimizer, which averages by itself.

The average is evaluated and saved; training continues with the weights of the latest update. So there are two sets of
weights, and the model holds one of them: in steps the weights of the training, in evaluations and after the training
the averaged ones.

Weights in bfloat16 and float16 are averaged in float32: in their own type, a thousandth of a difference is less than
half a unit in the last place, and the average would not move. The model gets the average in the type of its weights.
"""

import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

from trainwright._torch_compat.norm_layers import BATCH_NORMS
from trainwright.base.dist import mesh_in_use
from trainwright.base.errors import ConfigError
from trainwright.optim.named import each_optimizer
from trainwright.parallel.wrappers import load_model_state, model_state, plain_name, unwrap


class WeightAverage:
    """The averaged weights of ``model``.

    ``model.safetensors`` of a checkpoint holds the averaged weights (:meth:`saved_model`), and the state of this object
    holds the weights of the training. Both are exchanged in place, so optimizers and compiled steps are not affected.

    Args:
        average: "exponential" (EMA, by ``decay``) or "equal" (SWA).
        warmup: how the decay rises to ``decay``, with ``gamma`` and ``power``: see :func:`decay_of_update`. None: it is
            the same from the first update on.
        buffers: average buffers as well; by default they are those of the training.
        only: the names of the weights in the state; by default all.

    Raises:
        ConfigError: the model cannot be copied.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = WeightAverage(model, average="equal")
    >>> for value in (1.0, 2.0):
    ...     nn.init.constant_(model.weight, value).item()
    ...     average.update()
    1.0
    2.0
    >>> with average.applied():
    ...     model.weight.item()
    1.5
    """

    model_tensors = ("weights", "float32")  # the keys of the state whose tensors have the names of the model's weights

    def __init__(
        self,
        model: nn.Module,
        *,
        average: str = "exponential",
        decay: float = 0.999,
        warmup: int | str | None = None,
        gamma: float = 1.0,
        power: float = 2 / 3,
        buffers: bool = False,
        only: Collection[str] | None = None,
    ) -> None:
        equal: Any = get_swa_multi_avg_fn  # torch has no annotations for these
        exponential: Any = get_ema_multi_avg_fn
        if average == "equal":
            function = equal()
        elif warmup is None:
            function = exponential(decay)
        else:
            function = _rising(partial(decay_of_update, decay=decay, warmup=warmup, gamma=gamma, power=power))
        try:
            copied = model if mesh_in_use() is None else _weights_of(model, {})
            self._averaged = AveragedModel(copied, multi_avg_fn=function, use_buffers=buffers)
        except Exception as error:
            raise ConfigError(
                f"ema: {type(model).__name__} cannot be copied, which an average of its weights needs"
                f" ({type(error).__name__}: {error}). Give it a __deepcopy__, or remove ema."
            ) from error
        self._averaged.requires_grad_(False)
        self._model, self._only, self._add = model, only, function
        self._float32: dict[str, Tensor] = {}  # the averages of weights in bfloat16 and float16, by name
        self.is_applied = False  # whether the model holds the averaged weights
        self.name = "SWA weights" if average == "equal" else "EMA weights"  # for lines and reports

    @property
    def num_averaged(self) -> int:
        """The number of updates in the average; 0: averaging has not started."""
        return int(self._averaged.n_averaged)

    @torch.no_grad()
    def update(self) -> None:
        """Add the model's weights to the average.

        As ``AveragedModel.update_parameters``, which copies its counter to the device and so waits for it, and averages
        each weight in its own type.
        """
        average, groups = self._averaged, defaultdict[Any, list[tuple[Tensor, Tensor]]](list)
        averages, is_first = _by_name(average.module), not self.num_averaged
        for (name, one), other in zip(averages.items(), _by_name(self._model).values(), strict=True):
            is_buffer = not isinstance(other, nn.Parameter)
            is_short = other.dtype in (torch.bfloat16, torch.float16) and (is_buffer or other.requires_grad)
            if is_first or (is_buffer and not average.use_buffers):
                one.copy_(other)
            elif is_short or name in self._float32:
                # One by one: a float32 copy of all weights at once would need too much memory.
                groups[name] = [(self._float32.setdefault(name, one.float()), other.float())]
            else:
                groups[one.device, one.dtype, getattr(one, "device_mesh", None)].append((one, other))
        for group in groups.values():
            self._add(*map(list, zip(*group, strict=True)), average.n_averaged)
        for name, exact in self._float32.items():
            averages[name].copy_(exact)
        average.n_averaged += 1

    def apply(self) -> None:
        """Give the model the averaged weights, if there are any."""
        if not self.is_applied and self.num_averaged:
            self._exchange()

    def restore(self) -> None:
        """Give the model the weights of the training."""
        if self.is_applied:
            self._exchange()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model holds the averaged weights inside of the context."""
        was_applied = self.is_applied
        self.apply()
        try:
            yield
        finally:
            if not was_applied:
                self.restore()

    def saved_model(self) -> nn.Module:
        """The module whose weights a checkpoint stores as the model's: the averaged ones as soon as there are any."""
        if self.is_applied or not self.num_averaged:
            return self._model
        for one, other in zip(self._model.modules(), self._averaged.module.modules(), strict=True):
            if type(one).get_extra_state is not nn.Module.get_extra_state and type(other) is type(one):
                other.set_extra_state(one.get_extra_state())  # as the training has it: it cannot be averaged
        return self._averaged.module

    def update_statistics(self, batches: Callable[[], Iterable[Any]], forward: Callable[[Any], object]) -> None:
        """Compute the statistics of the averaged model's batch norms: ``forward(batch)`` with each of ``batches()``.

        Frozen batch norms keep their statistics.
        """
        layers = [m for m in self._model.modules() if isinstance(m, BATCH_NORMS) and m.track_running_stats]
        if not layers or not self.num_averaged:
            return
        with self.applied():
            frozen = {layer: [value.clone() for value in layer.buffers()] for layer in layers if not layer.training}
            # update_bn calls its model with the first item of each batch.
            update_bn(((batch,) for batch in batches()), _Called(self._model, forward))
            for layer, values in frozen.items():
                for buffer, value in zip(layer.buffers(), values, strict=True):
                    buffer.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        training = self._averaged.module if self.is_applied else self._model
        weights = model_state(training) if self.num_averaged else {}  # else the model's file has the same
        if self._only is not None:
            weights = {name: value for name, value in weights.items() if name in self._only}
        float32 = {name: value for name, value in self._float32.items() if name in weights}
        return {"num_averaged": self.num_averaged, "weights": weights, "float32": float32}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state, after the model has loaded its own, which are the averaged weights."""
        self.is_applied = bool(state["num_averaged"])
        self._averaged.n_averaged.fill_(state["num_averaged"])
        if self.is_applied:
            load_model_state(self._averaged.module, state["weights"], strict=self._only is None)
        own = _by_name(self._averaged.module)
        self._float32 = {
            name: torch.empty_like(own[name], dtype=torch.float32, requires_grad=False).copy_(value)
            for name, value in state.get("float32", {}).items()
        }

    @torch.no_grad()
    def _exchange(self) -> None:
        for one, other in zip(_tensors(self._model), _tensors(self._averaged.module), strict=True):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
        self.is_applied = not self.is_applied


def decay_of_update(number: int, *, decay: float, warmup: int | str, gamma: float = 1.0, power: float = 2 / 3) -> float:
    """The decay of an average's update ``number``, from 1 on, which rises to ``decay``.

    Args:
        warmup: the formula, with ``n = number - 1``, the updates before this one.

            * A number ``tau``, or "yolo", which is 2000: ``decay * (1 - exp(-number / tau))``, as ``ModelEMA`` of YOLO
              (ultralytics/utils/torch_utils.py).
            * "timm": ``min(decay, 1 - (1 + n / gamma) ** -power)``, as ``ModelEmaV3(use_warmup=True)`` of timm
              (timm/utils/model_ema.py) and ``EMAModel(use_ema_warmup=True)`` of diffusers, whose ``inv_gamma`` is
              ``gamma`` (src/diffusers/training_utils.py).
            * "diffusers": ``min(decay, (1 + n) / (10 + n))``, as ``EMAModel`` of diffusers without that argument.

    >>> [round(decay_of_update(number, decay=0.999, warmup="diffusers"), 3) for number in (2, 10, 100, 10000)]
    [0.182, 0.526, 0.917, 0.999]
    """
    before = number - 1
    if warmup == "diffusers":
        return min(decay, (1 + before) / (10 + before))
    if warmup == "timm":
        return min(decay, 1 - math.pow(1 + before / gamma, -power))
    return decay * (1 - math.exp(-number / (2000 if isinstance(warmup, str) else warmup)))


def _rising(decay_of: Callable[[int], float]) -> Callable[..., None]:
    """The function of an exponential average whose decay depends on the number of the update."""

    def add(averages: list[Tensor], weights: list[Tensor], num_averaged: Tensor) -> None:
        exponential: Any = get_ema_multi_avg_fn
        exponential(decay_of(int(num_averaged) + 1))(averages, weights, num_averaged)

    return add


class OptimizerAverage(WeightAverage):
    """The weights for evaluations that ``optimizers`` exchange with those of the training: schedule-free ones.

    Their ``eval()`` and ``train()`` do so in place, with rounding: the weights of the training are kept.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], *, only: Collection[str] | None = None) -> None:
        super().__init__(model, only=only)
        self.name = "averaged weights"
        self._averaged.n_averaged.fill_(1)
        self._optimizers = optimizers

    def update(self) -> None:
        """A step of the optimizer is an update."""

    def apply(self) -> None:
        if not self.is_applied:
            _copy(_tensors(self._model), _tensors(self._averaged.module))
            for optimizer in self._optimizers:
                optimizer.eval()
            self.is_applied = True

    def restore(self) -> None:
        for optimizer in self._optimizers:
            optimizer.train()
        super().restore()

    def saved_model(self) -> nn.Module:
        if self.is_applied:
            return self._model
        self.apply()
        averaged = [tensor.clone() for tensor in _tensors(self._model)]
        self.restore()
        _copy(averaged, _tensors(self._averaged.module))
        return super().saved_model()


def build_average(
    model: nn.Module, optimizer: Optimizer, ema: Mapping[str, Any] | None, only: Collection[str] | None = None
) -> WeightAverage | None:
    """The average that the settings ``ema`` describe, or that the optimizer computes; None without one.

    ``only``: the names of the weights in its state.

    Raises:
        ConfigError: there are both.
    """
    exchanging = exchanging_optimizers(optimizer)
    if ema is None:
        return OptimizerAverage(model, exchanging, only=only) if exchanging else None
    if exchanging:
        raise ConfigError(f"ema: {type(exchanging[0]).__name__} averages the weights itself. Remove ema.")
    settings: dict[str, Any] = {name: value for name, value in ema.items() if name not in ("start", "every")}
    return WeightAverage(model, only=only, **settings)


def exchanging_optimizers(optimizer: Optimizer) -> list[Any]:
    """Those that have other weights for evaluations: they have methods ``train`` and ``eval``."""

    # accelerate's wrapper has the methods in any case.
    wrapper: Any = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", ())

    def exchanges(one: Any) -> bool:
        inner = one.optimizer if isinstance(one, wrapper) else one
        return all(callable(getattr(inner, name, None)) for name in ("train", "eval"))

    return [one for one in each_optimizer(optimizer) if exchanges(one)]


class _Called(nn.Module):
    """A module whose call is a function's."""

    def __init__(self, model: nn.Module, forward: Callable[[Any], object]) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, batch: Any) -> object:
        return self._forward(batch)


def _weights_of(module: nn.Module, copies: dict[int, Any]) -> nn.Module:
    """A module that has copies of the weights, under the same names, and computes nothing: sharded ones have no copy.

    ``copies``: what is copied already, by id.
    """
    if id(module) in copies:
        copied: nn.Module = copies[id(module)]
        return copied
    copied, saved = nn.Module(), module.state_dict(keep_vars=True)
    copies[id(module)] = copied
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if id(parameter) not in copies:
            copies[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
        copied.register_parameter(name, copies[id(parameter)])
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        copied.register_buffer(name, buffer.clone(), persistent=name in saved)
    for name, child in module.named_children():
        copied.add_module(name, _weights_of(child, copies))
    return copied


@torch.no_grad()
def _copy(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one)


def _by_name(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, shared ones once."""
    module = unwrap(model)
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    return {plain_name(name): tensor for name, tensor in named}


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return (tensor.detach() for tensor in _by_name(model).values())
