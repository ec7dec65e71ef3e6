"""What a step needs: bytes of tensors at its peak, and bytes that the processes exchange.

The operations of the step are run on tensors without data (``simulated_process``), each of which is counted as long as
it exists.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainwright.inspect.simulation.pipeline import SimulatedPipeline
from trainwright.inspect.simulation.process import SimulatedReplica, replaced
from trainwright.parallel.simulated import Simulation, simulated


@dataclass(frozen=True)
class StepCost:
    """The memory and the traffic of one update on one process, in bytes.

    Attributes:
        parameters: with the buffers of the model, and with what ZeRO has gathered of other processes' parameters.
        trainable: this process's part of the parameters that are trained.
        gradients: those that exist at the peak.
        optimizer: the state of the optimizers.
        activations: everything else that exists at the peak: activations, the batch, buffers of data parallelism,
            averaged weights.
        traffic: by kind of collective, the size of the exchanged tensors (of an all-gather its result).
        start: the most bytes that exist at once before the first step, while the model is built and divided.
    """

    parameters: int
    trainable: int
    gradients: int
    optimizer: int
    activations: int
    traffic: dict[str, int] = field(default_factory=dict)
    start: int = 0

    @property
    def peak(self) -> int:
        """The most bytes of tensors that exist at once."""
        return self.parameters + self.gradients + self.optimizer + self.activations


@contextmanager
def counting() -> Iterator["TensorBytes"]:
    """A context, within that of a simulated process, in which tensors are counted."""
    with (
        ExitStack() as stack,
        simulated(Simulation(SimulatedReplica, partial(SimulatedPipeline, stack))),
        TensorBytes() as counted,
        counted.watching_sizes(),
    ):
        yield counted


def measure(
    step: Callable[[], object],
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    counted: "TensorBytes",
    *,
    offloads: bool = False,
) -> StepCost:
    """What ``step()``, one update, needs, however the model was sharded.

    ``offloads``: parameters, gradients and states of the optimizers are in host memory, and not counted.
    The first step creates the state of the optimizer. The second one is counted; its peak is divided into its parts
    if it is not below that of the first, else in a third one.
    """

    trained = [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]

    def divided() -> dict[str, int]:
        parameters = [*model.parameters(), *model.buffers(), *trained]  # with ZeRO, the last are the shards
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        sizes = [counted.size_of(tensors) for tensors in (parameters, gradients, _states(optimizers))]
        return dict(zip(("parameters", "gradients", "optimizer"), sizes, strict=True))

    def on_host() -> Iterator[Any]:
        yield from trained
        yield from (parameter.grad for parameter in trained)
        yield from _states(optimizers)

    counted.on_host = on_host if offloads else tuple
    counted.start()
    step()
    gc.collect()  # what was needed to begin may be in reference cycles
    parts: dict[str, int] = {}
    while not parts:
        parts = counted.parts_at_peak(step, divided, at_least=counted.peak)
    trainable = size_of(parameter for parameter in trained if parameter.requires_grad)
    activations = counted.peak - sum(parts.values())
    return StepCost(**parts, activations=activations, trainable=trainable, traffic=dict(counted.traffic))


def _states(optimizers: Sequence[Optimizer]) -> list[Any]:
    return [value for one in optimizers for state in one.state.values() for value in state.values()]


def size_of(tensors: Iterable[Any]) -> int:
    """The bytes of the tensors' storages on this process; of a distributed tensor, of its part here."""
    return sum(_sizes_of(tensors).values())


def _sizes_of(tensors: Iterable[Any]) -> dict[int, int]:
    return {id(storage): storage.nbytes() for tensor in tensors for storage in _storages(tensor)}


def _storages(tensor: Any) -> Iterator[torch.UntypedStorage]:
    if not isinstance(tensor, Tensor):
        return
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that holds tensors, as DTensor
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    else:
        yield tensor.untyped_storage()


class TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that operations return, until they are freed, and of what is exchanged.

    Attributes:
        now, peak: the bytes that exist, and the most since ``start``.
        traffic: since ``start``, the bytes of exchanged tensors by kind.
        on_host: returns tensors that are not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.traffic: Counter[str] = Counter()
        self._sizes: dict[int, int] = {}  # by the storage's identity
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._grown: Callable[[], object] | None = None
        self.on_host: Callable[[], Iterable[Any]] = tuple

    def start(self) -> None:
        """Start the peak and the traffic again."""
        self._leave_out()
        self.peak = self.now
        self.traffic.clear()

    def parts_at_peak(
        self, step: Callable[[], object], divided: Callable[[], dict[str, int]], *, at_least: int
    ) -> dict[str, int]:
        """``divided()`` at the peak of ``step()``; empty if it stays below ``at_least`` bytes."""
        self.start()
        parts: dict[str, int] = {}
        highest = at_least - 1

        def grow() -> None:
            nonlocal highest
            if self.now > highest:
                highest = self.now
                parts.update(divided())

        self._grown = grow
        grow()
        try:
            step()
        finally:
            self._grown = None
        return parts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # its own operations on the tensors in it come here
        result = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace:
            self._count_traffic(func, args, result)
        for leaf in [result] if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._sizes:
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._set_size(key, storage.nbytes())

    def _forget(self, key: int) -> None:
        del self._references[key]
        self.now -= self._sizes.pop(key)

    def size_of(self, tensors: Iterable[Any]) -> int:
        """As the function of this name, of the tensors that are counted."""
        left_out = {id(storage) for tensor in self.on_host() for storage in _storages(tensor)}
        return sum(size for key, size in _sizes_of(tensors).items() if key not in left_out)

    def _leave_out(self) -> None:
        for storage in (storage for tensor in self.on_host() for storage in _storages(tensor)):
            if self._sizes.get(id(storage)):
                self._set_size(id(storage), 0)

    def _set_size(self, key: int, num_bytes: int) -> None:
        more = num_bytes - self._sizes.get(key, 0)
        self.now += more
        self._sizes[key] = num_bytes
        if more > 0:
            self._leave_out()
            self.peak = max(self.peak, self.now)
            if self._grown is not None:
                self._grown()

    @contextmanager
    def watching_sizes(self) -> Iterator[None]:
        """A context in which storages that change their size, as those of ``fully_shard``, are counted too."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = resize(storage, num_bytes)
            if id(storage) in self._sizes:
                self._set_size(id(storage), num_bytes)
            return result

        with replaced(torch.UntypedStorage, "resize_", resized):
            yield

    def _count_traffic(self, func: Any, args: Any, result: Any) -> None:
        name = func._schema.name.partition("::")[2].strip("_")
        kind = next((kind for prefix, kind in _COLLECTIVES.items() if name.startswith(prefix)), None)
        if kind is not None:
            self.traffic[kind] += max(_num_bytes(argument) for argument in (*args, result))


# Names of torch's operations, as they begin.
_COLLECTIVES = {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}


def _num_bytes(argument: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(argument) if isinstance(leaf, Tensor))
