"""What the ranks of an evaluation exchange: errors, the state of evaluators, and batches."""

import io
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache, partial
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as torch_dist

from trainwright.base import dist
from trainwright.base.batch import LABEL_NAMES, described
from trainwright.base.dist import (
    all_gather_object,
    broadcast_object,
    get_data_parallel_group,
    get_rank,
    get_tensor_parallel_rank,
    get_world_size,
    is_main_process,
)
from trainwright.base.errors import UserError
from trainwright.checkpoint.safetensors_file import bytes_of
from trainwright.evaluation.evaluator import (
    METHODS,
    DatasetEvaluator,
    EvaluatedBatch,
    EvaluationError,
    own_names,
    single_evaluators,
)
from trainwright.evaluation.stop import StopChecks
from trainwright.models.outputs import named_outputs
from trainwright.parallel.sharding import fsdp_modules

logger = logging.getLogger("trainwright.evaluation")

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def raised_on_all_ranks(numbers: list[int] | None = None) -> Iterator[None]:
    """An exception inside, on any rank, is raised on all: the others would otherwise wait for that rank.

    Every rank enters the block; the ranks synchronize at its end. ``numbers``: as of ``raised_together``.
    """
    numbers = [] if numbers is None else numbers
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
        if get_world_size() > 1:  # before the others, which finish their batches first
            logger.error("Evaluation failed on rank %d: %s: %s", get_rank(), type(error).__name__, error)
    is_failed, *numbers[:] = dist.largest(failure is not None, *numbers)
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    own = text, getattr(failure, "__notes__", ())
    for rank, (message, notes) in enumerate(all_gather_object(own) if is_failed else ()):
        if failure is None and message is not None:
            failure = EvaluationError(f"Evaluation failed on rank {rank}: {message}")
            failure.raised_on_rank = rank  # type: ignore[attr-defined]  # see parallel/faults.py
            for note in notes:
                failure.add_note(note)
    if failure is not None:
        raise failure


def even_rounds(batches: Iterable[T], model: nn.Module) -> Iterator[tuple[T, bool]]:
    """The batches of this rank and whether each counts, equally many on every rank.

    For models whose ranks compute each forward pass together: a rank without further batches gets a padding batch, the
    one of another rank in this round, which does not count. An error in reading them is raised on all ranks.

    Raises:
        EvaluationError: in a round, data ranks have called different parts of ``model`` whose weights they gather
            together. Raised on all of these ranks.
    """
    reader, calls, units = iter(batches), list[int](), list[Any](fsdp_modules(model))

    def record(place: int, *_: Any) -> None:
        calls.append(place)

    handles = [
        unit.register_forward_pre_hook(partial(record, place))
        for place, unit in enumerate(units if len(units) > 1 else ())
    ]
    try:
        while True:
            numbers = [0, 0]
            with raised_on_all_ranks(numbers):
                batch = next(reader, None)
                numbers[:] = (0, 1) if batch is None else (get_world_size() - get_rank(), 0)
            from_last, is_missing = numbers
            if not from_last:
                return
            padding: Any = _value_of(get_world_size() - from_last, batch) if is_missing else None
            yield (batch, True) if batch is not None else (padding, False)
            if handles and not dist.is_same(repr(calls).encode(), get_data_parallel_group()):
                raise EvaluationError(
                    f"Data ranks have called different parts of {type(model).__name__.removeprefix('FSDP')} for their"
                    " batches, whose weights they gather together. Set find_unused_parameters=True"
                    " (train.dist.find_unused_parameters in config files), which gathers all weights at once."
                )
            calls.clear()
    finally:
        for handle in handles:
            handle.remove()


def in_data_order(ranks: Sequence[Sequence[T]]) -> list[T]:
    """The batches of all ranks in the order of the data set: rank r has the r-th batch of each round."""
    absent: Any = object()
    rounds = zip_longest(*ranks, fillvalue=absent)
    return [batch for batches in rounds for batch in batches if batch is not absent]


def computed_over_ranks(value: T, compute: Callable[[Sequence[T]], R], *, note: str = "") -> R:
    """``compute`` of the values of all ranks, by rank, which rank 0 calls; its result on every rank.

    Values are pickled; an error in it gets the ``note``. Every rank must call this; an error on one rank is raised on
    all.
    """
    try:
        reads: Any = gather_values(value)
    except Exception as error:
        if note:
            error.add_note(note)
        raise
    with raised_on_all_ranks():
        result: Any = compute([read() for read in reads]) if is_main_process() else None
    found: R = broadcast_object(result)
    return found


class EvaluatorOnRanks:
    """An evaluator, or several, whose batches are spread over the ranks.

    Evaluators with ``merge_state`` process the batches of their rank. For each of the others, rank 0 processes the
    batches of all ranks in the order of the data set: they are exchanged in rounds, in which a rank without further
    batches takes part with nothing (``end``), and a rank that fails with its error. Of several ranks with the parts of
    the same layers, the first one counts.

    Args:
        is_joint: the ranks compute each forward pass together, so one that fails cannot reach the others.

    Attributes:
        exchanges_batches: the ranks come together in each batch, and end the evaluation there, if at all.
    """

    def __init__(self, evaluator: DatasetEvaluator, *, is_joint: bool = False) -> None:
        self._evaluator, self._is_joint = evaluator, is_joint
        self._local: list[DatasetEvaluator] = []  # process the batches of their rank
        self._on_rank_0: list[DatasetEvaluator] = []  # process the batches of all ranks
        for one in single_evaluators(evaluator):
            is_local = get_world_size() == 1 or _merges_state(one)
            (self._local if is_local else self._on_rank_0).append(one)
        # Where ranks compute together, they end together between two batches.
        self.exchanges_batches = bool(self._on_rank_0) and not is_joint
        self._is_over = True
        self._stop, self._num_exchanges = StopChecks(is_active=False), 0

    def __repr__(self) -> str:
        return " and ".join(type(one).__name__ for one in (*self._local, *self._on_rank_0))

    def reset(self) -> None:
        for evaluator in (*self._local, *(self._on_rank_0 if is_main_process() else ())):
            evaluator.reset()
        for evaluator in self._on_rank_0:
            _log_slow_exchange(type(evaluator).__name__)
        self._is_over = not self._on_rank_0
        self._stop, self._num_exchanges = StopChecks(is_active=self.exchanges_batches), 0

    def update(self, batch: EvaluatedBatch) -> None:
        """Add a batch of this rank."""
        if get_tensor_parallel_rank() > 0:
            self.skip()
            return
        for evaluator in self._local:
            evaluator.batch_samples = batch.num_samples
            _process(evaluator, batch.inputs, batch.outputs)
        if self._on_rank_0:
            self._exchange((batch.inputs, batch.outputs))

    def skip(self) -> None:
        """A batch of this rank whose outputs another rank adds."""
        if self._on_rank_0:
            self._exchange(None)

    def end(self, error: BaseException | None) -> None:
        """This rank has no further batches, or has failed."""
        if error is not None and (self._is_joint or not isinstance(error, Exception)):
            return
        while not self._is_over:
            self._exchange(None, error)

    def _exchange(self, batch: tuple[Any, Any] | None, error: Exception | None = None) -> None:
        self._is_over = True  # after an error
        if self._num_exchanges >= self._stop.next:  # every rank makes as many exchanges, also one that fails
            self._stop.check(self._num_exchanges)
        self._num_exchanges += 1
        batches = gather_values(batch, error)
        self._is_over = batches is None
        for read in batches or ():
            if (values := read()) is not None:
                for evaluator in self._on_rank_0:
                    _process(evaluator, *values)

    def states(self) -> list[dict[str, Any]]:
        """The states of the evaluators that process the batches of this rank."""
        return [_state_of(evaluator) for evaluator in self._local]

    def computed(self, ranks: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
        """The results over the batches of all ranks, on rank 0, from the ``states`` of each."""
        for evaluator, _, *states in zip(self._local, *ranks, strict=True) if get_world_size() > 1 else ():
            evaluator.merge_state([_with_state(evaluator, state) for state in states])
        return self._evaluator.evaluate()


def _process(evaluator: DatasetEvaluator, inputs: Any, outputs: Any) -> None:
    """Add a batch. An error shows what ``process`` was called with, and how to read it."""
    try:
        evaluator.process(inputs, outputs)
    except UserError:  # which says what is missing
        raise
    except Exception as error:
        usual = {"outputs": (outputs, ("prediction_scores", "logits")), "inputs": (inputs, LABEL_NAMES)}
        reads = [
            f"{what}[{next(name for name in (*names, *values) if name in values)!r}]"
            for what, (values, names) in usual.items()
            if isinstance(values, Mapping) and values
        ]
        is_misread = isinstance(error, AttributeError | LookupError | TypeError)
        hint = f" Each holds a batch by name: read {' and '.join(reads)}." if reads and is_misread else ""
        shown = f"inputs {described(inputs)} and outputs {described(named_outputs(outputs) or outputs)}"
        error.add_note(f"{type(evaluator).__name__}.process was called with {shown}.{hint}")
        raise


def _merges_state(evaluator: DatasetEvaluator) -> bool:
    """Whether ``merge_state`` is of the same class as the methods that make the state, or of a class below it."""
    owner = next(kind for kind in type(evaluator).__mro__ if "merge_state" in vars(kind))
    return owner is not DatasetEvaluator and not METHODS & own_names(evaluator, owner)


def _with_state(evaluator: DatasetEvaluator, state: dict[str, Any]) -> DatasetEvaluator:
    other = copy(evaluator)
    for name, value in state.items():
        setattr(other, name, value)
    return other


def _state_of(evaluator: DatasetEvaluator) -> dict[str, Any]:
    """The attributes of an evaluator, including those in slots."""
    slots = [getattr(kind, "__slots__", ()) for kind in type(evaluator).__mro__]
    names = {name for some in slots for name in ([some] if isinstance(some, str) else some)}
    names -= {"__dict__", "__weakref__"}
    return {name: getattr(evaluator, name) for name in sorted(names) if hasattr(evaluator, name)} | vars(evaluator)


@cache
def _log_slow_exchange(name: str) -> None:
    if is_main_process():
        logger.info(
            "Evaluation: %s processes the batches of all ranks on rank 0. To process them where they are, which is"
            " faster, define %s.merge_state(others).",
            name,
            name,
        )


def gather_values(
    value: T | None, error: Exception | None = None, *, to_all: bool = False
) -> list[Callable[[], T | None]] | None:
    """Functions that return the value of each rank, by rank, on rank 0; none elsewhere. None if every rank has None.

    ``to_all``: on every rank.

    Values are pickled. Every rank must call this; if one passes an error, or its value cannot be pickled, it is raised
    on all.
    """
    sent, numbers = torch.empty(0), [0, 0]
    with raised_on_all_ranks(numbers):
        if error is not None:
            raise error
        if get_world_size() > 1:
            sent = _packed(value)
        numbers[:] = (value is not None, len(sent))
    is_any, size = numbers
    if not is_any:
        return None
    return [
        (lambda: value) if rank == get_rank() else partial(_unpacked, buffer)
        for rank, buffer in enumerate(dist.gather_bytes(sent, size, to_all=to_all))
    ]


def _value_of(rank: int, value: Any) -> Any:
    """The value of one rank, on every rank."""
    sent, numbers = torch.empty(0), [0]
    with raised_on_all_ranks(numbers):
        if rank == get_rank():
            sent = _packed(value)
            numbers[0] = len(sent)
    if rank != get_rank():
        sent = torch.empty(numbers[0], dtype=torch.uint8, device=dist.device_of_collectives())
    torch_dist.broadcast(sent, rank)
    return value if rank == get_rank() else _unpacked(sent)


class _Pickler(pickle.Pickler):
    """Pickles of tensors their own values, not those of the memory that they are a view of."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in (Tensor, nn.Parameter) or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        content = bytes(bytes_of(obj)) if obj.numel() else b""
        return _tensor_of, (content, obj.dtype, obj.shape, obj.device.type)


def _tensor_of(content: bytes, dtype: torch.dtype, shape: torch.Size, device: str) -> Tensor:
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype, device="cpu")
    return flat.reshape(shape).to(device)


def _packed(value: Any) -> Tensor:
    """A value as bytes, on the device of collectives."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(dist.device_of_collectives())


def _unpacked(buffer: Tensor) -> Any:
    return pickle.loads(buffer.cpu().numpy().tobytes())
