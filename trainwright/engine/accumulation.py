"""The loss of an update is one mean: over the samples of its micro-batches, or over their tokens.

A micro-batch gives the mean over itself. Where all are of one size, the mean of those means is the mean over all, and
each is divided by their number. What this file is about are the others: a shorter batch at an epoch's end, and models
that say over how many tokens their loss is a mean.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright._torch_compat.run_backward import plain_backward
from trainwright.config.errors import ConfigError
from trainwright.engine.loss_fn import sum_losses
from trainwright.events.media import wide_dtype
from trainwright.parallel.dist import get_world_size

TOKENS = "num_tokens"  # the entry of a model's training outputs that tells how many tokens its losses are means over


class HasGroups(Protocol):
    """What has groups of parameters, as optimizers do."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class AllGroups:
    """The groups of several optimizers that step in one update."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizers = [optimizer]

    def add(self, optimizer: Optimizer) -> None:
        """Count in one more, if it is not there."""
        if not any(optimizer is other for other in self._optimizers):
            self._optimizers.append(optimizer)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


class WindowMean:
    """Weighs the micro-batches of a window, so that their gradients add up to that of one batch.

    For each window: ``begin``, for each micro-batch ``share`` and the backward pass of what it gives, then ``finish``.
    With tokens the mean is over those of all ranks; without, each rank's own mean counts the same.
    """

    def __init__(
        self,
        optimizer: HasGroups,
        count: Callable[[Any], int] | None = None,
        differentiate: Callable[..., None] = plain_backward,
    ) -> None:
        """``count`` tells the samples of a batch, 0 if unknown; by default :func:`count_samples`."""
        self._optimizer = optimizer
        self._differentiate = differentiate
        self._count = count or count_samples
        self._length = 1
        self._is_by_tokens = False
        self._noted: Any = None
        self.weights: list[Any] = []  # of this window's micro-batches so far: samples, or tokens on the device

    def begin(self, length: int) -> None:
        """The next ``length`` micro-batches make one update."""
        self._length = length
        self._is_by_tokens = False
        self.weights = []

    def loss_share(self, outputs: Any, batch: Any) -> Tensor:
        """The share of a micro-batch whose model returned ``outputs``."""
        loss = sum_losses(outputs)
        return self.share(loss, batch, outputs.get(TOKENS))

    def record(self, outputs: Any) -> None:
        """What the model returned for the micro-batch whose ``backward`` comes next."""
        self._noted = outputs.get(TOKENS) if isinstance(outputs, Mapping) else None

    def backward(self, loss: Tensor, batch: Any) -> None:
        """The backward pass of a micro-batch's share; after the window's last one its gradients are complete."""
        tokens, self._noted = self._noted, None
        self._differentiate(self.share(loss, batch, tokens))
        if len(self.weights) == self._length:
            self.finish()

    def share(self, loss: Tensor, batch: Any, num_tokens: Any = None) -> Tensor:
        """What to differentiate of the mean loss of a micro-batch."""
        if num_tokens is not None:
            return self._share_by_tokens(loss, num_tokens)
        if self._length == 1:
            return loss
        weights = self.weights
        # A size that is not known is taken to be that of the first.
        weights.append(self._count(batch) or (weights[0] if weights else 1))
        weight, expected = weights[-1], self._length * weights[0]
        if len(weights) < self._length:
            share: Tensor = loss / (expected / weight)
            return share
        total = sum(weights)
        if total != expected:  # at an epoch's end; before the last backward, with which the gradients travel
            scale_gradients(self._optimizer, expected / total)
        share = loss / (total / weight)
        return share

    def share_again(self, loss: Tensor) -> Tensor:
        """The share of another loss of the micro-batch that was weighed last."""
        if not self.weights:
            return loss
        if self._is_by_tokens:
            return _times_tokens(loss, self.weights[-1])
        weights = self.weights
        total = self._length * weights[0] if len(weights) < self._length else sum(weights)
        share: Tensor = loss / (total / weights[-1])
        return share

    def differentiate(self, share: Tensor, retain_graph: bool = False) -> None:
        """Add the gradients of a share."""
        if retain_graph:
            self._differentiate(share, retain_graph=True)
        else:
            self._differentiate(share)

    def factor(self) -> Tensor | None:
        """What gradients are to be multiplied by at the window's end, a tensor on the device; None: they are right."""
        if not self._is_by_tokens:
            return None
        total = torch.stack(self.weights).sum()
        world_size = get_world_size()
        if world_size > 1:
            torch.distributed.all_reduce(total)
        # Data parallelism has divided the sum over the ranks by their number.
        return world_size / total.clamp(min=1)

    def finish(self) -> None:
        """With the gradients of the last micro-batch there: divide by the number of tokens, of all ranks together."""
        factor = self.factor()
        if factor is not None:
            scale_gradients(self._optimizer, factor)
            self._is_by_tokens = False  # they are right now

    def _share_by_tokens(self, loss: Tensor, num_tokens: Any) -> Tensor:
        tokens = _as_count(num_tokens, loss.device)
        self._is_by_tokens = True
        self.weights.append(tokens)
        return _times_tokens(loss, tokens)


class AnnouncedWindow:
    """The micro-steps of an update; ``begin`` is called before the first of them."""

    def __init__(self, steps: Iterable[int], begin: Callable[[], None]) -> None:
        self._steps = steps
        self._begin = begin

    def __iter__(self) -> Iterator[int]:
        self._begin()
        return iter(self._steps)


def count_samples(batch: Any) -> int:
    """How many samples a batch has: the first dimension of its tensors; 0 where they do not agree on one."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else (batch,)
    sizes = {len(value) for value in values if isinstance(value, Tensor) and value.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else 0


def weighted_mean(values: Sequence[Any], weights: Sequence[Any] = ()) -> Any:
    """The mean of the micro-batches' values; without a weight for each, all count the same."""
    is_by_tokens = len(weights) == len(values) and isinstance(weights[0], Tensor)
    if is_by_tokens:
        tokens = torch.stack([*weights])
        return _times_tokens(torch.stack([*values]), tokens).sum() / tokens.sum().clamp(min=1)
    if len(weights) != len(values) or len(set(weights)) == 1:
        return values[0] if len(values) == 1 else sum(values) / len(values)
    total = sum(weights)
    return sum(value / (total / weight) for value, weight in zip(values, weights, strict=True))


def mean_outputs(outputs: list[Mapping[str, Any]], weights: Sequence[Any] = ()) -> dict[str, Any]:
    """What the micro-batches of one update returned, as the mean of each scalar; tokens are counted together."""
    if len(outputs) == 1:
        return dict(outputs[0])
    first = outputs[0]
    scalars = [name for name, value in first.items() if isinstance(value, Tensor) and value.numel() == 1]
    columns = {name: [out[name].detach().reshape(()) for out in outputs] for name in scalars if name != TOKENS}
    means = {name: weighted_mean(column, weights) for name, column in columns.items()}
    return means | ({TOKENS: sum(out[TOKENS] for out in outputs)} if TOKENS in first else {})


def average_over_ranks(scalars: dict[str, Any]) -> dict[str, Any]:
    """The means over the ranks, in one exchange: over the tokens of all of them where these are told.

    The order of the names is the model's, the same on every rank.
    """
    names = [name for name, value in scalars.items() if isinstance(value, Tensor) and name != TOKENS]
    if not names:
        return scalars
    together = torch.stack([scalars[name].detach().reshape(()).float() for name in names])
    tokens = scalars.get(TOKENS)
    if tokens is None:
        torch.distributed.all_reduce(together)
        return scalars | dict(zip(names, (together / get_world_size()).unbind(), strict=True))
    count = _as_count(tokens, together.device)
    together = torch.cat([_times_tokens(together, count), count.reshape(1).to(together)])
    torch.distributed.all_reduce(together)
    means = together[:-1] / together[-1].clamp(min=1)
    return scalars | dict(zip(names, means.unbind(), strict=True)) | {TOKENS: together[-1]}


def scale_gradients(optimizer: HasGroups, factor: float | Tensor) -> None:
    """Multiply every gradient that ``optimizer`` will use; nothing is read from the device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradient = parameter.grad
                gradient.mul_(factor.to(gradient.device) if isinstance(factor, Tensor) else factor)


def _times_tokens(loss: Tensor, tokens: Tensor) -> Tensor:
    # A mean over no token at all is NaN, and no part of the mean over all.
    return torch.where(tokens > 0, loss * tokens, torch.zeros_like(loss))


def _as_count(num_tokens: Any, device: torch.device) -> Tensor:
    if isinstance(num_tokens, Tensor):
        fault = f"has shape {tuple(num_tokens.shape)}" if num_tokens.numel() != 1 else ""
    else:
        is_count = isinstance(num_tokens, int | float) and num_tokens >= 0
        fault = "" if is_count else f"is {num_tokens!r} ({type(num_tokens).__name__})"
    if fault:
        raise ConfigError(
            f"The model's {TOKENS!r} {fault}; it must be one number >= 0: over how many tokens the losses are means."
        )
    count = torch.as_tensor(num_tokens, device=device).detach().reshape(())
    return count.to(wide_dtype(device))
