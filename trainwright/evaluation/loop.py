"""The evaluation loop: a model over a data set, every sample once, on any number of ranks.

Each round every rank runs one batch, and rank 0 hands the batches of all ranks to the evaluator, by rank. With loaders
that give rank r the r-th batch of each round this is the order of the data set. A rank that runs out early takes part
with nothing, so no sample is repeated to fill up.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.data.collate import add_batch_note
from trainwright.evaluation.evaluator import DatasetEvaluator, DatasetEvaluators, EvaluationError, described
from trainwright.evaluation.preserve_rng import evaluation_mode, kept_randomness
from trainwright.evaluation.report import print_csv_format
from trainwright.parallel.data_parallel import unwrap_model
from trainwright.parallel.dist import (
    all_gather_object,
    broadcast_object,
    gather_object,
    get_world_size,
    is_main_process,
)


def evaluate_loaders(
    model: nn.Module,
    loaders: Sequence[Any],
    evaluator: DatasetEvaluator,
    *,
    batch_size: int,
    eval_iter: float,
    get_batch: Callable[[Any, Any], Mapping[str, Any]],
) -> dict[str, Any]:
    """The evaluator's results on the only loader; on several, the results of each by the name of its data set's class.

    ``batch_size`` is that of all ranks together; at most ``eval_iter`` batches of each loader are evaluated.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    results: dict[str, Any] = {}
    for loader in loaders:
        name = _free_name(type(getattr(loader, "dataset", loader)).__name__, results)
        results[name] = inference_on_dataset(model, loader, batch_size, eval_iter, get_batch, device, evaluator)
        if is_main_process():
            print_csv_format(results[name])
    return next(iter(results.values())) if len(results) == 1 else results


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    """``name``, numbered where it is taken: two data sets of one class."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


logger = logging.getLogger("trainwright.evaluation")

LOG_PERIOD_S = 5.0

Share = tuple[Mapping[str, Any], Any]  # one batch: the model's inputs and outputs


def inference_on_dataset(
    model: nn.Module,
    data_loader: Iterable[Any],
    batch_size: int,
    eval_iter: float,
    get_batch: Callable[[Any, Any], Mapping[str, Any]],
    input_placement_device: str | torch.device,
    evaluator: DatasetEvaluator | Iterable[DatasetEvaluator] | None,
) -> dict[str, Any]:
    """Run ``model`` over ``data_loader`` in evaluation mode and return the evaluator's metrics, on every rank.

    At most ``eval_iter`` batches per rank are taken. ``get_batch(data, input_placement_device)`` turns what the loader
    gives into the keyword arguments of the model, which are also the evaluator's ``inputs``. ``batch_size`` is the
    number of samples of a round over all ranks, for the rate in the log. The evaluator is used on rank 0 only; None
    just runs the model.

    Module modes, gradient mode and all random generators are afterwards as they were. An error on one rank is an error
    on all of them.

    Raises:
        ConfigError: the loader is empty, or ``eval_iter`` leaves nothing of it.
        EvaluationError: model, batch and evaluator do not fit together.
    """
    model = unwrap_model(model)  # its forward may wait for the other ranks, of which one may have run out
    device = torch.device(input_placement_device)
    with _failing_together():
        evaluators = _as_one(evaluator)
        limit = _num_batches(data_loader, eval_iter)
    num_rounds = max(all_gather_object(limit))
    if num_rounds == 0:
        raise ConfigError("evaluation: the data loader is empty. Give it samples, or turn the evaluation off.")
    _share_buffers(model)
    progress = _Progress(num_rounds, batch_size)

    with evaluation_mode(model), kept_randomness(device):
        with _failing_together():
            batches = islice(data_loader, limit)
            if is_main_process():
                evaluators.reset()
        for _ in range(num_rounds):
            with _failing_together():
                share = _forward(next(batches, None), model, get_batch, device)
                share = share if get_world_size() == 1 else _on_host(share)
            shares = gather_object(share)
            with _failing_together():
                for inputs, outputs in filter(None, shares or ()):
                    evaluators.process(inputs, outputs)
            progress.one_more()
        with _failing_together():
            results = evaluators.evaluate() if is_main_process() else {}
    progress.close()
    return broadcast_object(results)


def _share_buffers(model: nn.Module) -> None:
    """Evaluate with rank 0's buffers on every rank: checkpoints hold these, and training continues with them.

    Batch norms count different batches on each rank; data parallelism takes rank 0's at its next forward, too.
    """
    if get_world_size() > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer.detach(), src=0)


def _as_one(evaluator: DatasetEvaluator | Iterable[DatasetEvaluator] | None) -> DatasetEvaluators:
    given = [evaluator] if isinstance(evaluator, DatasetEvaluator) else evaluator
    if given is None:
        return DatasetEvaluators([])
    # A lazy call that was not instantiated is a dictionary.
    listed: list[Any] = [given] if isinstance(given, Mapping) or not isinstance(given, Iterable) else list(given)
    for one in listed:
        if not isinstance(one, DatasetEvaluator):
            raise ConfigTypeError(
                f"evaluator: got {type(one).__name__}; it must be a DatasetEvaluator, a list of them, or None. "
                "A lazy call has to go through instantiate() first."
            )
    return DatasetEvaluators(listed)


def _num_batches(data_loader: Iterable[Any], eval_iter: float) -> int:
    if not isinstance(data_loader, Sized):
        raise ConfigTypeError(
            f"evaluation: the data loader ({type(data_loader).__name__}) has no length; "
            "give it a __len__ that counts batches."
        )
    try:
        length = len(data_loader)
    except TypeError as error:  # torch's DataLoader over an iterable data set
        raise ConfigTypeError(
            f"evaluation: the data loader has no length ({error}); give its data set a __len__ that counts samples."
        ) from error
    if eval_iter < 1:
        raise ConfigError(f"evaluation.eval_iter: got {eval_iter}; it must be a whole number >= 1.")
    return int(min(length, eval_iter))


def _forward(
    data: Any, model: nn.Module, get_batch: Callable[[Any, Any], Mapping[str, Any]], device: torch.device
) -> Share | None:
    if data is None:
        return None
    inputs = get_batch(data, device)
    if not isinstance(inputs, Mapping):
        raise EvaluationError(
            f"get_batch gave {described(inputs)}; "
            f"it must give a dictionary of {type(model).__name__}.forward's arguments."
        )
    try:
        return inputs, model(**inputs)
    except Exception as error:
        add_batch_note(error, inputs)
        raise


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {key: _on_host(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(_on_host, value)) if type(value) in (tuple, list) else tuple(map(_on_host, value))
    return value


@contextmanager
def _failing_together() -> Iterator[None]:
    """An exception inside, on any rank, is raised on all: the others would otherwise wait for that rank."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    said = all_gather_object(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, message in enumerate(said):
        if message is not None:
            raise EvaluationError(f"Evaluation failed on rank {rank}: {message}")


class _Progress:
    """How far the evaluation is, said at most every few seconds and at its end, by rank 0."""

    def __init__(self, num_rounds: int, batch_size: int) -> None:
        self._num_rounds, self._batch_size = num_rounds, batch_size
        self._done = 0
        self._start = self._last = time.perf_counter()

    def one_more(self) -> None:
        self._done += 1
        now = time.perf_counter()
        if now - self._last < LOG_PERIOD_S or not is_main_process():
            return
        self._last = now
        left_s = (now - self._start) / self._done * (self._num_rounds - self._done)
        logger.info("Evaluation: %d/%d batches, %.1f samples/s, %.0f s left", *self._so_far(now), left_s)

    def close(self) -> None:
        if is_main_process():
            now = time.perf_counter()
            level = logging.INFO if now - self._start >= LOG_PERIOD_S else logging.DEBUG  # a short one needs no line
            logger.log(
                level, "Evaluation: %d/%d batches, %.1f samples/s, took %.1f s", *self._so_far(now), now - self._start
            )

    def _so_far(self, now: float) -> tuple[int, int, float]:
        rate = self._done * self._batch_size / max(now - self._start, 1e-9)
        return self._done, self._num_rounds, rate
