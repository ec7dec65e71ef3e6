"""Gradient synchronization: wraps the model of one of several processes, so that gradients are averaged."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainwright.base import dist as ranks
from trainwright.base.dist import (
    gather_over_data,
    get_averaging_size,
    get_data_parallel_group,
    get_world_size,
    is_any,
    reduce_over_data,
)
from trainwright.base.errors import ConfigError
from trainwright.checkpoint.weights import group_names
from trainwright.engine.accumulation import AllGroups
from trainwright.events.storage import get_event_storage, has_event_storage
from trainwright.parallel.data_parallel import unwrap_model, watch_wrapped, wrap_data_parallel
from trainwright.parallel.faults import meet
from trainwright.parallel.mesh import current_mesh
from trainwright.parallel.parallelize import share_tensors
from trainwright.parallel.pipeline import Pipeline, pipeline_of
from trainwright.parallel.sharding import ShardedGradients, explain_parts, fsdp_modules, is_sharded

_REQUIRES_GRAD = attrgetter("requires_grad")
BUCKET_BYTES = 25 * 2**20  # as those of torch's DistributedDataParallel


class Replica:
    """The model of this process among several: its gradients are averaged over all of them.

    They are averaged during the last backward pass of each update, by torch's DistributedDataParallel. The first update
    averages them after it: only then is it known whether some parameters are unused, which DistributedDataParallel
    needs to know. So does a step that has called the unwrapped model or reads its batches elsewhere, and the first
    update after parameters were frozen or unfrozen.

    Args:
        on_wrap: called with the wrapped model whenever it changes.
        prepared: the wrapped model, if it is already wrapped.
        wraps: False: the model is not wrapped, and each update is averaged after its backward passes.
        find_unused_parameters: some updates leave parameters out that others use. Found in the first update if one of
            its batches does.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        on_wrap: Callable[[Any], None],
        *,
        prepared: Any = None,
        find_unused_parameters: bool = False,
        wraps: bool = True,
    ) -> None:
        self._wraps = wraps
        self._plain = unwrap_model(model)
        self._device = device
        self._on_wrap = on_wrap
        self._finds_unused = find_unused_parameters
        self.optimizer: AllGroups | None = None  # see _trainable_now
        self._parameters: list[Tensor] = []
        self._size = -1  # the number of the optimizer's parameters
        self._trainable: list[bool] | None = None
        self._wrapped: Any = None
        self._is_first = True  # the first update of these trainable parameters
        self._num_batches, self._uses = 0, set[tuple[int, int]]()  # of it: batches, and the parameters of each
        self._watches: list[RemovableHandle] = []
        self._is_averaged = False  # by the backward pass of this batch
        self._shares_buffers = False  # before the next batch, if the model is not wrapped
        if prepared is not None:
            prepared.require_backward_grad_sync = wraps
            watch_wrapped(prepared)
            self._trainable = self._trainable_now()
            self._watch_uses()
            self._use_wrapped(prepared)

    def before_batch(self, *, is_last: bool) -> None:
        """Call this before each forward pass; ``is_last``: it is the last one of the update."""
        if not self._wraps:
            if self._shares_buffers and self._wrapped is None:
                self._shares_buffers = False
                share_tensors(self._plain.buffers())
            return
        trainable = self._trainable_now()
        if trainable != self._trainable:
            self._trainable, self._is_first = trainable, True
            self._watch_uses()
            self._wrap()
        self._num_batches += 1
        averages = is_last and not self._is_first
        if self._wrapped.require_backward_grad_sync is not averages:
            self._wrapped.require_backward_grad_sync = averages
        self._is_averaged = False

    def finish(self) -> None:
        """Call this when all gradients of an update are computed, before they are used."""
        if self._is_averaged:
            self._is_averaged = False
            return
        all_take_part = average_gradients(self._plain.parameters())
        self.share_buffers_next()
        if self._is_first and self._wrapped is not None:
            self._is_first = False
            self._wrapped.require_backward_grad_sync = self._wraps  # for batches without a before_batch call
            # The last batch of an update averages: it may leave out parameters that an earlier one uses.
            all_take_part &= not is_any(not self._is_each_used())
            if not all_take_part or self._wrapped.find_unused_parameters:
                # Wrapped again: DistributedDataParallel remembers which parameters this update has used, although it
                # has not averaged them, and would expect their gradients in the next update.
                self._finds_unused = True
                self._wrap()

    def share_buffers_next(self) -> None:
        """As a backward pass that averages does: the next forward pass sends the first rank's buffers to all."""
        self._shares_buffers = True
        if self._wrapped is not None:
            self._wrapped.require_forward_param_sync = True

    def average_after_backward(self) -> None:
        """Average each update after its backward passes from now on: the gradients of this one are not complete."""
        self._is_averaged = False
        if self._wraps:
            self._wraps = False
            if self._wrapped is not None:  # in an Accelerator's, or in the first update
                self._wrapped.require_backward_grad_sync = False

    def _watch_uses(self) -> None:
        """Record which parameters the backward pass of each batch reaches, until the end of the update."""
        self._num_batches = 0
        self._uses.clear()
        self._is_each_used()
        for parameter in self._plain.parameters():
            if parameter.requires_grad:
                see = lambda tensor: self._uses.add((self._num_batches, id(tensor)))  # noqa: E731
                self._watches.append(parameter.register_post_accumulate_grad_hook(see))  # type: ignore[no-untyped-call]

    def _is_each_used(self) -> bool:
        """Whether each batch used all parameters. Ends ``_watch_uses``."""
        expected = self._num_batches * len(self._watches)
        while self._watches:
            self._watches.pop().remove()
        return len(self._uses) >= expected

    def _wrap(self) -> None:
        meet("its first step, or the first one after parameters were frozen or unfrozen")
        self._use_wrapped(wrap_data_parallel(self._plain, self._device, find_unused_parameters=self._finds_unused))

    def _trainable_now(self) -> list[bool]:
        # Walking through the modules takes longer than anything else here, so it is done when the optimizer changes.
        size = 0
        for group in () if self.optimizer is None else self.optimizer.param_groups:
            size += len(group["params"])
        if size != self._size:
            self._size, self._parameters = size, list(self._plain.parameters())
        return [*map(_REQUIRES_GRAD, self._parameters)]

    def _use_wrapped(self, wrapped: Any) -> None:
        self._wrapped = wrapped

        def record_call(*_: Any) -> None:
            if torch.is_grad_enabled():
                self._is_averaged = bool(self._wrapped.require_backward_grad_sync)

        wrapped.register_forward_pre_hook(record_call)
        self._on_wrap(wrapped)


class StageSync:
    """Gradient synchronization of stages. Data ranks are averaged by what shards the stages."""

    def __init__(self, pipeline: Pipeline, before_use: Callable[[], object]) -> None:
        self._sum_tied, self._before_use = pipeline.tied.sum_gradients, before_use

    def finish(self) -> None:
        self._before_use()
        self._sum_tied()

    def before_batch(self, *, is_last: bool) -> None:
        """Nothing: all batches of an update are read before the first forward pass."""

    def average_after_backward(self) -> None:
        raise ConfigError(
            "A model that is cut into pipeline stages trains with the trainer's own step: forward and backward passes"
            " of all micro-batches run at once."
        )


GradientSync = Replica | ShardedGradients | StageSync


def gradient_sync(
    model: nn.Module,
    device: torch.device,
    on_wrap: Callable[[Any], None],
    *,
    prepared: Any = None,
    find_unused_parameters: bool = False,
    wraps: bool = True,
) -> GradientSync | None:
    """What averages the gradients of ``model`` over the data ranks of the current layout; None: one process.

    The arguments are those of :class:`Replica`.
    """
    mesh = current_mesh()
    if mesh is not None:
        pipeline = pipeline_of(model)
        parts = [model] if pipeline is None else [stage.model for stage in pipeline.stages]
        check_used: Callable[[], object] = bool
        before_use: Callable[[], object] = bool
        if mesh.layout.averaging > 1 and find_unused_parameters:
            before_use = UnusedParameters(fsdp_modules(model)).drop
        elif mesh.layout.averaging > 1:
            check_used = before_use = UsedParameters(parts).check
        if pipeline is not None:
            return StageSync(pipeline, before_use)
        return ShardedGradients(model, mesh, is_each_averaged=not wraps, check_used=check_used, before_use=before_use)
    if get_world_size() == 1:
        return None
    return Replica(
        model, device, on_wrap, prepared=prepared, find_unused_parameters=find_unused_parameters, wraps=wraps
    )


def explained(
    explain: Callable[[Exception, Any], None], model: nn.Module, setting: str
) -> Callable[[Exception, Any], None]:
    """``explain``, a step's, which also explains errors of models on several processes.

    ``setting``: the name of ``find_unused_parameters``.
    """
    if get_world_size() == 1:
        return explain

    def explain_all(error: Exception, batch: Any) -> None:
        if current_mesh() is not None:
            explain_parts(error, model)
        _explain_unused(error, model, setting)
        explain(error, batch)

    return explain_all


def _explain_unused(error: Exception, model: nn.Module, setting: str) -> None:
    """Raise an error that names the parameters if ``error`` is that of a model whose updates leave some out."""
    if not (isinstance(error, RuntimeError) and "Expected to have finished reduction in the prior" in str(error)):
        return
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    left_out = [] if indices is None else [names[int(index)] for index in indices[1].split() if int(index) < len(names)]
    shown = f": {', '.join(group_names(left_out))}" if left_out else ""
    raise ConfigError(
        f"The update before this one left out parameters that earlier ones used{shown}. With several processes, set"
        f" {setting}=True if this is intended (a walk through the graph in each step); otherwise let each loss depend"
        " on all parameters, or freeze them with requires_grad_(False)."
    ) from error


def average_before_own_steps(
    optimizer: Optimizer,
    is_ours: Callable[[], bool],
    finish_window: Callable[[], None],
    sync: Callable[[], GradientSync | None],
) -> RemovableHandle:
    """Average the gradients before each step of ``optimizer`` that a user's code makes itself.

    ``finish_window`` completes the weights of the window's micro-batches. ``sync`` returns what averages the gradients
    of other steps.
    """

    def average(optimizer: Optimizer, *_: Any) -> None:
        if not is_ours():
            finish_window()
            average_gradients([parameter for group in optimizer.param_groups for parameter in group["params"]])
            share_buffers_next(sync())

    return optimizer.register_step_pre_hook(average)


def share_buffers_next(sync: GradientSync | None) -> None:
    """The next forward pass sends the first rank's buffers to all, as after a backward pass that averages."""
    if isinstance(sync, Replica):
        sync.share_buffers_next()


def average_gradients(parameters: Iterable[Tensor]) -> bool:
    """Average each gradient over the data ranks; a missing one counts as 0. Returns whether none was missing.

    Those of sharded parameters are averages already.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if current_mesh() is not None:
        parameters = [parameter for parameter in parameters if not is_sharded(parameter)]
    missing = [parameter.grad is None for parameter in parameters]
    found = ranks.largest(*missing, *(not one for one in missing), group=get_data_parallel_group())
    gradients = list[Tensor]()
    for parameter, is_anywhere in zip(parameters, found[len(missing) :], strict=True):
        if is_anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    if get_averaging_size() > 1:
        _average(gradients)
    return not any(found[: len(missing)])


@torch.no_grad()
def _average(gradients: Iterable[Tensor]) -> None:
    """Average tensors over the data ranks in place, many of them in one exchange.

    While one bucket is exchanged, the next one is put together.
    """
    sent: tuple[list[Tensor], Tensor, Any] | None = None
    for bucket in _buckets(gradients):
        if not _may_be_joined(bucket[0]):
            bucket[0] /= get_averaging_size()
            reduce_over_data(bucket[0])
            continue
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]) / get_averaging_size()
        following = bucket, flat, ranks.start_sum_over_data(flat)
        if sent is not None:
            _receive(*sent)
        sent = following
    if sent is not None:
        _receive(*sent)


def _receive(bucket: Sequence[Tensor], flat: Tensor, work: Any) -> None:
    work.wait()
    parts = torch.split(flat, [gradient.numel() for gradient in bucket])
    for gradient, part in zip(bucket, parts, strict=True):
        gradient.copy_(part.view(gradient.shape))


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of tensors of one type and device, of 25 MiB or of one tensor that is larger."""
    open_ones: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        if not _may_be_joined(gradient):
            yield [gradient]
            continue
        bucket = open_ones.setdefault((gradient.dtype, gradient.device), [])
        if bucket and sum(one.nbytes for one in bucket) + gradient.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = open_ones[gradient.dtype, gradient.device] = []
        bucket.append(gradient)
    yield from open_ones.values()


def _may_be_joined(gradient: Tensor) -> bool:
    return type(gradient) in (Tensor, nn.Parameter) and gradient.layout is torch.strided


class UsedParameters:
    """Compares the parameters that the data ranks have used, after the backward passes of an update.

    The first update compares at once. Later, a rank records each change of its own, and the records are compared with
    the next log line (``EventStorage.alike``): no update waits for an exchange.

    ``parts``: the modules of this process whose gradients are averaged in groups.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        named = [pair for part in parts for pair in part.named_parameters()]
        self._names, self._parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self._key = f"used parameters from {next(iter(self._names), None)}"
        self._used: list[bool] | None = None  # by the latest update
        self._num_checks = self._record = 0

    def check(self) -> None:
        """Call this when gradients are there, before they are set to None."""
        if self._parameters and has_event_storage():  # each training has one
            get_event_storage().alike.setdefault(self._key, self._alike)
        used = [parameter.grad is not None for parameter in self._parameters]
        self._num_checks += 1
        if used == self._used or not any(used):
            return
        if self._used is None:
            self._compare(used)
        else:
            self._record = crc32(repr((self._record, self._num_checks, used)).encode())
        self._used = used

    def _compare(self, used: list[bool]) -> None:
        first, *others = gather_over_data(used)
        for rank, other in enumerate(others, start=1):
            if other != first:
                differ = [name for name, *pair in zip(self._names, first, other, strict=True) if pair[0] != pair[1]]
                raise ConfigError(
                    f"Data ranks 0 and {rank} have used different parameters in an update, whose gradients would be"
                    f" averaged with those of others: {', '.join(group_names(differ))}. Set find_unused_parameters=True"
                    " (train.dist.find_unused_parameters in config files) if this is intended; otherwise let each loss"
                    " depend on all parameters, or freeze them with requires_grad_(False)."
                )

    def _alike(self) -> dict[str, float]:
        # Other stages have other parameters, so another name. Of so few numbers, any two are compared as different.
        name = f"the parameters that updates have used, from {self._names[0]} on (find_unused_parameters=True allows"
        return {f"{name} different ones), as a checksum": float(self._record % 10_000)}


class UnusedParameters:
    """Removes the gradients of parameters that no data rank has used in an update, of which torch averages zeros.

    Their weights and the states of their optimizer then stay as they are, as with plain data parallelism.

    ``roots``: the modules whose parameters are gathered before their forward passes, all of them together.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._parameters: list[nn.Parameter] = [parameter for root in roots for parameter in root.parameters()]
        self._used = [False] * len(self._parameters)
        self._watched: dict[int, Any] = {}  # the gathered parameters, by place
        first = 0
        for root in roots:
            root.register_forward_pre_hook(partial(self._watch, first))
            first += len([*root.parameters()])

    def _watch(self, first: int, root: nn.Module, _: Any) -> None:
        for place, parameter in enumerate(root.parameters(), start=first):
            if parameter.requires_grad and self._watched.get(place) is not parameter:
                self._watched[place] = parameter
                hook = partial(self._use, place)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _use(self, place: int, _: Any) -> None:
        self._used[place] = True

    def drop(self) -> None:
        """Call this when the gradients of an update are averaged."""
        used = ranks.largest(*self._used, group=get_data_parallel_group())
        for parameter, is_used in zip(self._parameters, used, strict=True):
            if not is_used:
                parameter.grad = None
        self._used = [False] * len(self._parameters)
