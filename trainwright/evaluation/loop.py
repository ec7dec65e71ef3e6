"""The evaluation loop: a model over a data set, every sample once, on any number of ranks.

Each rank evaluates its batches on its own; the ranks synchronize after their last batches, where results are combined
and an error on one rank is raised on all.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import islice, repeat
from typing import Any, TypeVar

import torch
from torch import nn

from trainwright.base import dist
from trainwright.base.batch import described, write_forward_help
from trainwright.base.dist import broadcast_over_data, is_any, is_main_process
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data.batch_loader import opened
from trainwright.data.errors import batch_in_errors
from trainwright.data.sample_count import SampleCounter
from trainwright.data.sampler import limited
from trainwright.data.seeding import kept_generators
from trainwright.evaluation.adapters import evaluator_of
from trainwright.evaluation.comparison import Comparisons
from trainwright.evaluation.evaluator import DatasetEvaluator, EvaluationError, results_table
from trainwright.evaluation.hardest_samples.search import watched_evaluation
from trainwright.evaluation.rank_exchange import even_rounds, raised_on_all_ranks
from trainwright.evaluation.results import EvaluationResults, loss_of_outputs
from trainwright.evaluation.stop import StopChecks
from trainwright.evaluation.wrong_label import wrong_sample
from trainwright.events.phases import Activity, activity
from trainwright.events.storage import EvaluationStorage
from trainwright.models.eval_mode import evaluation_mode
from trainwright.models.packed_texts import check_packed_texts
from trainwright.models.targets import LossIgnores
from trainwright.parallel.data_parallel import unwrap_model
from trainwright.parallel.faults import meet
from trainwright.parallel.mesh import computing_device
from trainwright.parallel.pipeline import pipeline_of
from trainwright.parallel.sharding import computes_together, gathered, reshard

logger = logging.getLogger("trainwright.evaluation")

LOG_PERIOD_S = 5.0
_logs_table = ContextVar("_logs_table", default=True)
_Watch = Callable[[Iterable[Any]], Iterable[Any]]
_watch = ContextVar[_Watch | None]("_watch", default=None)

T = TypeVar("T")


def run_evaluation(
    model: nn.Module,
    read_batches: Callable[[], Iterable[Any]],
    step: Callable[[Any], object],
    results: Callable[[], T],
    *,
    num_samples: Callable[[Any], int],
    num_batches: int | None,
    without_batches: str,
    loader: Any = None,
    name: str = "",
    around_batches: AbstractContextManager[object] | None = None,
    checks_stop: bool = True,
    skip: Callable[[], object] = bool,
    pad: Callable[[Any], object] | None = None,
    log: Callable[[Mapping[str, Any]], None] | None = None,
) -> T:
    """Call ``step`` with each batch of this rank, then return ``results()``, which combines the ranks.

    The model is in evaluation mode, with the buffers of rank 0 on every rank. Module modes, gradient mode and all
    random generators are restored afterwards. An error on one rank is an error on all of them: the others raise it
    after their own batches, so ``step`` must not synchronize with other ranks, unless ``around_batches`` ends the
    exchange when this rank has no more batches or fails.

    Within :func:`~trainwright.evaluation.stop.stopped_by`, all ranks end the evaluation before the same batch.

    Args:
        read_batches: returns the batches of this rank.
        num_samples: the number of samples of a round over all ranks, from the batch of this rank. For the log.
        num_batches: the number of rounds, if known. For the log.
        without_batches: the error message if no rank has a batch.
        loader, name: the source of the batches and the name of its data set.
        checks_stop: whether to end before the next batch is asked here. False: ``step`` does so, where the ranks
            exchange each batch.
        skip: called instead of ``step`` on the stages of a pipeline without the model's outputs.
        pad: where ranks compute forward passes together: called instead of ``step`` with a padding batch, for a
            forward pass that counts nothing. None: there may be any number of forward passes in a step, so each rank
            gets all parameters for the time of the evaluation.
        log: gets the values that the user's code logs.
    """
    check_packed_texts(model, loader)
    watched = None if loader is None else watched_evaluation(model, loader, name)
    if watched is not None:
        step = watched.around(step)
    step, pad = _on_stages(model, step, pad, skip)
    # Checkpoints hold the buffers of rank 0, and training continues with them: batch norms count different batches on
    # each rank, and data parallelism takes rank 0's at its next forward, too.
    for buffer in model.buffers():
        broadcast_over_data(buffer.detach())
    is_joint = computes_together(model)
    weights = gathered(model) if is_joint and pad is None else nullcontext()
    is_joint, without_count = is_joint and pad is not None, pad or step
    with (
        evaluation_mode(model),
        kept_generators(in_checkpoints=True),
        weights,
        activity("evaluation", num_batches) as shown,
    ):
        progress = _Progress(num_batches, shown)
        # Ranks that compute a batch together wait for each other within it: an error ends a process, and so the others.
        is_alone = not is_joint and pipeline_of(model) is None
        together, checks = raised_on_all_ranks() if is_alone else nullcontext(), StopChecks(is_active=checks_stop)
        until_others = checks.taking_part(reports_failure=is_alone)
        with together, around_batches or nullcontext(), EvaluationStorage(log), until_others:
            watch, batches = _watch.get(), read_batches()
            batches = batches if is_joint else checks.before_each(batches)
            batches = batches if watch is None else watch(batches)
            # All of these ranks have equally many rounds, those with a padding batch included.
            rounds = checks.before_each(even_rounds(batches, model)) if is_joint else zip(batches, repeat(True))
            for number, (batch, is_counted) in enumerate(rounds):
                with batch_in_errors(batch, partial(wrong_sample, loader, name, number, batch)):
                    (step if is_counted else without_count)(batch)
                if is_counted:
                    progress.update(num_samples(batch))
        reshard(model)
        if not is_any(progress.num_done > 0):
            raise ConfigError(without_batches)
        found = results()
        if watched is not None:
            watched.finish()
    progress.close()
    return found


def _on_stages(
    model: nn.Module, step: Callable[[Any], object], pad: Callable[[Any], object] | None, skip: Callable[[], object]
) -> tuple[Callable[[Any], object], Callable[[Any], object] | None]:
    """``step`` and ``pad`` for a model that is cut into pipeline stages; unchanged for others."""
    pipeline = pipeline_of(model)
    if pipeline is None:
        return step, pad
    return pipeline.evaluated(step, skip), lambda batch: (pipeline.evaluate(batch), skip())


@contextmanager
def watched_batches(watch: _Watch) -> Iterator[None]:
    """Evaluate the batches that ``watch`` returns for those of a data set: callbacks see each of them.

    An exception of ``watch`` ends the evaluation. Within another such context, it gets the batches of that one.
    """
    outer = _watch.get()
    before = _watch.set(watch if outer is None else lambda batches: watch(outer(batches)))
    try:
        yield
    finally:
        _watch.reset(before)


@contextmanager
def without_table() -> Iterator[None]:
    """Log no results: those of an evaluation in a training have a line of its hooks."""
    before = _logs_table.set(False)
    try:
        yield
    finally:
        _logs_table.reset(before)


def evaluate_batches(
    model: nn.Module,
    read_batches: Callable[[], Iterable[Any]],
    step: Callable[[Any], object],
    results: EvaluationResults,
    *,
    forward: Callable[[Any], object] | None,
    **settings: Any,
) -> dict[str, Any]:
    """The ``results`` of an evaluation, whose ``step`` counts each batch of this rank in them.

    ``forward``: calls the model once and counts nothing; None if ``step`` may call it any number of times.
    ``settings``: the other arguments of :func:`run_evaluation`.
    """

    def read_each() -> Iterator[Any]:
        for batch in read_batches():
            yield batch
            results.end_batch()  # before callbacks see the next one

    def pad(batch: Any) -> None:
        assert forward is not None
        forward(batch)
        results.skip()

    return run_evaluation(
        model,
        read_each,
        step,
        results.compute,
        around_batches=results,
        checks_stop=not results.exchanges_batches,
        skip=results.skip,
        pad=None if forward is None else pad,
        log=results.log,
        **settings,
    )


def batch_limit(num_batches: float | None, limit: int | float | None, *, setting: str, loader: Any) -> int | None:
    """The number of batches that the rank with most evaluates; None: all, of a number that is not known.

    ``limit``: a number, or a share of ``num_batches``.

    Raises:
        ConfigError: a share of an unknown number. ``setting`` is the limit's.
    """
    if num_batches is not None and math.isfinite(num_batches):
        return limited(int(num_batches), limit)
    if isinstance(limit, float):
        raise ConfigError(
            f"{setting}: got {limit}, but {type(loader).__name__} has no length. Give a number of batches instead of a"
            " share."
        )
    return limit


def evaluate_loaders(
    model: nn.Module,
    loaders: Sequence[Any],
    evaluator: DatasetEvaluator,
    *,
    batch_size: int,
    eval_iter: float,
    get_batch: Callable[[Any, Any], Mapping[str, Any]],
    limit: int | float | None = None,
    are_named: bool = False,
    loss_ignores: LossIgnores = "declared",
) -> dict[str, Any]:
    """The mean loss, if the model returns one in evaluation mode, its parts, and the evaluator's results.

    Those of the only loader; of several, or if ``are_named``, those of each by its name, or that of its data set's
    class.

    ``batch_size`` is that of all ranks together; at most ``eval_iter`` batches of each loader are evaluated, or the
    number or share ``limit`` of them. ``loss_ignores``: as in the training.
    """
    device = computing_device(model)
    results: dict[str, Any] = {}
    by_name = are_named or len(loaders) > 1
    for loader, name in zip(loaders, loader_names(loaders), strict=True):
        most = batch_limit(_num_batches(loader), limit, setting="train.limit_eval_batches", loader=loader)
        batches = eval_iter if limit is None or most is None else min(eval_iter, max(1, most))  # 0: a rank without
        results[name] = _evaluate_loader(
            model, loader, batch_size, batches, get_batch, device, evaluator,
            name=name if by_name else "", has_loss=True, loss_ignores=loss_ignores,
        )  # fmt: skip
    if is_main_process() and results and _logs_table.get():
        logger.info("%s", results_table(results))
    return results if by_name or not results else next(iter(results.values()))


def loader_names(loaders: Iterable[Any]) -> list[str]:
    """The names of the loaders in results: their own, or those of the classes of their data sets, numbered if equal."""
    names: list[str] = []
    for loader in loaders:
        name = free = getattr(loader, "name", None) or type(getattr(loader, "dataset", loader)).__name__
        number = 1
        while free in names:
            number += 1
            free = f"{name}_{number}"
        names.append(free)
    return names


def inference_on_dataset(
    model: nn.Module,
    data_loader: Iterable[Any],
    batch_size: int,
    eval_iter: float,
    get_batch: Callable[[Any, Any], Mapping[str, Any]],
    input_placement_device: str | torch.device,
    evaluator: DatasetEvaluator | Iterable[DatasetEvaluator] | None,
    *,
    name: str = "",
) -> dict[str, Any]:
    """Run ``model`` over ``data_loader`` in evaluation mode and return the evaluator's metrics, on every rank.

    At most ``eval_iter`` batches per rank are taken. ``get_batch(data, input_placement_device)`` turns what the loader
    gives into the keyword arguments of the model, which are also the evaluator's ``inputs``. ``batch_size`` is the
    number of samples of a round over all ranks, for the rate in the log. ``evaluator`` may also be a metric of
    torchmetrics or a metrics handler, or several of these. With None the model just runs. ``name`` is that of the data
    set.

    On several ranks, rank r reads the r-th batch of each round; evaluators combine them with
    :meth:`DatasetEvaluator.merge_state`. Module modes, gradient mode and all random generators are restored afterwards.
    An error on one rank is an error on all of them.

    Raises:
        ConfigError: the loader is empty, or ``eval_iter`` leaves nothing of it.
        EvaluationError: model, batch and evaluator do not fit together.
    """
    return _evaluate_loader(
        model, data_loader, batch_size, eval_iter, get_batch, input_placement_device, evaluator, name=name
    )


def _evaluate_loader(
    model: nn.Module,
    data_loader: Iterable[Any],
    batch_size: int,
    eval_iter: float,
    get_batch: Callable[[Any, Any], Mapping[str, Any]],
    input_placement_device: str | torch.device,
    evaluator: Any,
    *,
    name: str,
    has_loss: bool = False,
    loss_ignores: LossIgnores = "declared",
) -> dict[str, Any]:
    meet("an evaluation")
    model = unwrap_model(model)  # its forward may wait for the other ranks, of which one may have run out
    device = torch.device(input_placement_device)
    with raised_on_all_ranks():
        results = EvaluationResults(
            [] if evaluator is None else [evaluator_of(evaluator, "evaluator")],
            Comparisons(lambda: model, loss_ignores=loss_ignores),
            SampleCounter(data_loader),
            has_loss=has_loss,
            is_joint=computes_together(model),
            of_config_file=True,
        )
        length = _num_batches(data_loader)
        if eval_iter < 1:
            raise ConfigError(f"evaluation.eval_iter: got {eval_iter}; it must be a whole number >= 1.")
        limit = min(length, eval_iter)

    def read_batches() -> Iterator[Mapping[str, Any]]:
        for data in islice(opened(data_loader), None if math.isinf(limit) else int(limit)):
            inputs = get_batch(data, device)
            if not isinstance(inputs, Mapping):
                raise EvaluationError(
                    f"get_batch gave {described(inputs)}; "
                    f"it must give a dictionary of {type(model).__name__}.forward's arguments."
                )
            yield inputs

    def step(inputs: Mapping[str, Any]) -> None:
        results.begin_batch(inputs)
        try:
            outputs = model(**inputs)
        except TypeError as error:
            write_forward_help(error, model, inputs)
            raise
        loss = loss_of_outputs(outputs) if has_loss else None
        if loss is not None:
            results.weigh(inputs, outputs)
        results.update(inputs, outputs, loss)

    return evaluate_batches(
        model,
        read_batches,
        step,
        results,
        forward=lambda inputs: model(**inputs),
        num_samples=lambda _: batch_size,
        num_batches=dist.largest(0 if math.isinf(length) else int(limit))[0] or None,
        without_batches="evaluation: the data loader is empty. Give it samples, or turn the evaluation off.",
        loader=data_loader,
        name=name,
    )


def _num_batches(data_loader: Iterable[Any]) -> float:
    """The number of batches; infinite if it is not known."""
    if not isinstance(data_loader, Sized):
        raise ConfigTypeError(
            f"evaluation: the data loader ({type(data_loader).__name__}) has no length; "
            "give it a __len__ that counts batches."
        )
    try:
        return len(data_loader)
    except TypeError:  # torch's DataLoader over a stream
        return math.inf


class _Progress:
    """Logs the progress of the evaluation on rank 0, at most every few seconds and at the end."""

    def __init__(self, num_batches: int | None, shown: Activity) -> None:
        self._num_batches, self._shown = num_batches, shown
        self.num_done = self._num_samples = 0
        self._start = self._last = time.perf_counter()

    def update(self, num_samples: int) -> None:
        """Count a batch. ``num_samples``: of all ranks."""
        self.num_done = self._shown.done = self.num_done + 1
        self._num_samples += num_samples
        now = time.perf_counter()
        if now - self._last < LOG_PERIOD_S or not is_main_process():
            return
        self._last = now
        left = ""
        if self._num_batches:
            batches_left = max(self._num_batches - self.num_done, 0)  # the length of a stream may be an estimate
            left = f", {(now - self._start) / self.num_done * batches_left:.0f} s left"
        self._log(logging.INFO, now, left, is_progress=True)

    def close(self) -> None:
        if is_main_process():
            now = time.perf_counter()
            took_s = now - self._start
            level = logging.INFO if took_s >= LOG_PERIOD_S else logging.DEBUG  # a short one needs no line
            self._log(level, now, f", took {took_s:.1f} s")

    def _log(self, level: int, now: float, time_text: str, *, is_progress: bool = False) -> None:
        done = f"{self.num_done}/{self._num_batches}" if self._num_batches else str(self.num_done)
        rate = self._num_samples / max(now - self._start, 1e-9)
        extra = {"progress": is_progress}  # a progress bar shows it, too
        logger.log(level, "Evaluation: %s batches, %.1f samples/s%s", done, rate, time_text, extra=extra)
