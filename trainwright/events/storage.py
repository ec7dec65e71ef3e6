"""Metrics of a run: recorded in the step at the cost of a list append, converted to numbers only when read."""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsFloat

import torch
from torch import Tensor

from trainwright.base.devices import wide_dtype
from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError, UserError, did_you_mean
from trainwright.events.epoch_means import EpochMeans, RunningMean
from trainwright.events.media import MediaBuffer, MediaView, Medium, histogram_summary, image_copy
from trainwright.events.process_means import LocalMeans, common_keys, is_part, means_of, values_of, with_parts
from trainwright.events.rate import Rate
from trainwright.events.smoothing import HistoryBuffer, median

if TYPE_CHECKING:
    from trainwright.events.media import ArrayLike

logger = logging.getLogger("trainwright.events")

_MAX_PENDING = 1000  # values kept as tensors before they are converted to numbers: bounds memory on the device
_MAX_SAVED = 1000  # values per metric in a checkpoint

# Names of the trainer's own metrics.
_ZERO_OR_ONE = frozenset({"skipped_update"})
OWN_NAMES = frozenset({"total_loss", "lr", "time", "data_time", "grad_norm", "skipped_update", "iteration"})
_OWN_LOSSES = frozenset({"loss", "epoch_loss", "eval_loss"})  # also those of evaluations
_OF_CALLBACKS = frozenset(
    {"step_loss", "epoch_metric", "global_step"}
)  # which have these of evaluations as eval_<name>

Scalar = SupportsFloat | Tensor  # Tensor: exactly one element


class NoEventStorageError(UserError, RuntimeError):
    """There is no current storage."""


# A plain list and no ContextVar: torch.compile cannot trace those.
_storages: list["EventStorage"] = []
# The current storage of each writer thread, by thread id: a view of the snapshot that the thread writes.
storages_of_threads: dict[int, "EventStorage"] = {}


def get_event_storage() -> "EventStorage":
    """The storage of the innermost ``with EventStorage(...)``; inside a run, the trainer's storage.

    Raises:
        NoEventStorageError: there is no current storage.
    """
    # Writer threads compile no model, and the compiler cannot trace threading.get_ident().
    if not torch.compiler.is_dynamo_compiling() and storages_of_threads:
        storage = storages_of_threads.get(threading.get_ident())
        if storage is not None:
            return storage
    if not _storages:
        raise NoEventStorageError(
            "get_event_storage: no run is in progress, so there is no storage to put metrics into. "
            "Call it during training, or open one: with EventStorage() as storage: ..."
        )
    return _storages[-1]


def find_event_storage() -> "EventStorage | None":
    """The storage of this thread's training; None if there is none."""
    return _storages[-1] if _storages else None


def has_event_storage() -> bool:
    """Whether ``get_event_storage`` would find one."""
    return bool(_storages)


class EventStorage:
    """Metrics of a run: the trainer, models and hooks put values, hooks and writers read them.

    ``iter`` is the iteration of the values that are put now; ``samples`` counts consumed training samples. The trainer
    sets both (in your own loop, call ``step``). ``written`` is the iteration of the last regular write of the writers,
    ``written_before`` of the one before it, or None if it is unknown. A resumed run continues its files at
    ``first_unwritten``: this removes the extra row that an interrupted run writes when it stops, so that the files
    equal those of an uninterrupted run. ``last_row`` is the iteration of the row before that, which files must have, or
    None if it is unknown. ``alike`` has functions that return values by name, such as learning rates, which all
    processes must have alike: :meth:`reduce` compares them. ``rate`` has the speed of the steps and the time left.

    >>> with EventStorage() as storage:
    ...     for _ in range(3):
    ...         get_event_storage().put_scalar("loss", 0.5 * storage.iter)
    ...         storage.step()
    >>> storage.latest()
    {'loss': (1.0, 2)}
    """

    is_over = False  # the last iteration is done: ``iter`` is their total number
    evaluated_weights = ""  # by the last evaluation: such as "EMA weights", if not those of the training
    line_at = -1  # the iterations done when a line with all new values was logged

    def __init__(self, start_iter: int = 0) -> None:
        self.start_iter = start_iter
        self.iter = start_iter
        self.samples = 0
        self.results: set[str] = set()  # the names of values that evaluations put
        self.logged_results: set[str] = set()  # those among them that the user's code logs, without a prefix
        # What the user's code logs in training: by name, where and in which iteration it was logged last.
        self.logged: dict[str, tuple[str, int]] = {}
        self.written: int | None = None
        self.written_before: int | None = None
        self.first_unwritten = start_iter
        self.last_row: int | None = None
        self._prefix = ""
        self._outer: EventStorage | None = None  # of the writer thread that has entered this storage
        self._pending: list[tuple[str, Any, int]] = []  # numbers, tensors, and the parts of put_mean
        self._max_pending = _MAX_PENDING
        self._histories: dict[str, HistoryBuffer] = {}
        self._hints: dict[str, bool] = {}
        self._restored: set[str] = set()  # names known from a checkpoint only: the code may use another hint
        self._all_reduce: Callable[[Tensor], object] | None = None
        self._num_parts = self._num_common = 0  # the second: those that every process puts
        self._local: dict[str, LocalMeans] = {}
        self._late: dict[str, int] = {}  # metrics without a value of this process, and the first such iteration
        self._is_difference_logged = False
        self.alike: dict[str, Callable[[], Mapping[str, float]]] = {}
        self._media = MediaBuffer()
        self.epoch_means = EpochMeans()
        self.rate = Rate(start_iter)

    def __repr__(self) -> str:
        return f"EventStorage(start_iter={self.start_iter})"

    def __enter__(self) -> "EventStorage":
        thread = threading.get_ident()
        if thread in storages_of_threads:  # opened by a writer: the current storage of the training stays the same
            self._outer = storages_of_threads[thread]
            storages_of_threads[thread] = self
        else:
            _storages.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._outer is not None:
            storages_of_threads[threading.get_ident()], self._outer = self._outer, None
            return
        while _storages.pop() is not self:  # also removes inner storages that were never exited
            pass

    def step(self) -> None:
        """Advance to the next iteration."""
        self.iter += 1

    # -- putting --------------------------------------------------------------------------------------------------

    def put_scalar(self, name: str, value: Scalar, smoothing_hint: bool = True) -> None:
        """Record a value of the current iteration.

        A tensor of one element is copied on its device and read later, together with all others: this does not wait.
        ``smoothing_hint``: the value is noisy, so writers show its median over recent iterations. All values of a name
        have the same hint.
        """
        if torch.compiler.is_dynamo_compiling():
            # In a compiled model a put is a graph break: if it were traced, it would guard on the list of pending
            # values and recompile at every step. The wrapper is created here, where the compiler is already loaded.
            put_outside_graph = torch.compiler.disable(EventStorage.put_scalar)  # type: ignore[no-untyped-call]
            put_outside_graph(self, name, value, smoothing_hint)
            return
        if self._prefix:
            name = self._prefix + name
        if self._hints.get(name) is not smoothing_hint:
            self._admit(name, smoothing_hint)
        if isinstance(value, Tensor):
            value = copied_scalar(name, value)
        elif type(value) is not float:
            value = as_number(name, value)
        pending = self._pending
        pending.append((name, value, self.iter))
        if len(pending) >= self._max_pending:
            self._flush()

    def put_scalars(self, /, *, smoothing_hint: bool = True, **scalars: Scalar) -> None:
        """Record several values: ``put_scalars(loss=loss, accuracy=0.9)``."""
        for name, value in scalars.items():
            self.put_scalar(name, value, smoothing_hint)

    def put_mean(
        self,
        name: str,
        part: Tensor | tuple[Tensor, float],
        all_reduce: Callable[[Tensor], object],
        *,
        is_optional: bool = False,
    ) -> None:
        """Record this process's part of a mean over all processes, which :meth:`reduce` computes.

        Until then readers see the mean of this process. Every process must put the same parts in the same order.

        Args:
            part: numerator and denominator, shape (2,); or this process's mean, shape (), and its weight, which costs a
                step less. Weight 0: this process has no value, whatever the mean; readers see this and later values of
                the metric after the next :meth:`reduce`.
            all_reduce: adds up a tensor over all processes, in place.
            is_optional: other processes may not put it: it does not count for the number of parts at which all of them
                call :meth:`reduce`, and each puts another part in this iteration.
        """
        name = self._prefix + name
        if self._hints.get(name) is not True:
            self._admit(name, smoothing_hint=True)
        self._all_reduce = all_reduce
        if type(part) is tuple and not part[1]:
            self._late.setdefault(name, self.iter)
        self._pending.append((name, part, self.iter))
        self._num_parts += 1
        if is_optional:
            return
        self._num_common += 1
        if self._num_common >= _MAX_PENDING:
            self.reduce()

    def reduce(self) -> None:
        """Compute the means over all processes of all parts put so far, in one collective call.

        Every process must call it at the same place; does nothing without parts. A value that some processes have not
        put stays the mean of this process, with one warning.

        Raises:
            ConfigError: one of the values of ``alike`` differs between processes. Raised on all of them.
        """
        if not self._num_common or self._all_reduce is None:
            return
        self._late = {}  # their values become known now
        self._flush()
        local, self._local, self._num_parts, self._num_common = self._local, {}, 0, 0
        kept = {name: self._histories[name].newest(len(means.parts)) for name, means in local.items()}
        parts = {
            (name, iteration, place): part
            for name, means in local.items()
            for place, ((_, iteration), part) in enumerate(zip(kept[name], means.parts, strict=True))
            if part is not None
        }
        keys, names_of_some = common_keys(parts, self.alike)
        if names_of_some and not self._is_difference_logged:
            self._is_difference_logged = True
            logger.warning(
                "Metrics that only some processes put: %s. Their values are those of this process, not means over all.",
                ", ".join(names_of_some),
            )
        if not keys:
            return
        together = torch.stack([parts[key] for key in keys])
        self._all_reduce(together)
        numbers = dict(zip(keys, means_of(together).tolist(), strict=True))
        for name, means in local.items():
            values = [
                numbers.get((name, iteration, place), value) for place, (value, iteration) in enumerate(kept[name])
            ]
            self._histories[name].replace_last(values, means.total_before)

    def first_local_iteration(self, name: str) -> float:
        """The iteration from which on the values of a metric are not yet means over all processes; infinity: all are.

        They are means of this process, or absent if it has none.
        """
        self._flush()
        first = self._local[name].first_iteration if name in self._local else math.inf
        return min(first, self._late.get(name, math.inf))

    def admit_logged(self, names: Iterable[str], where: str) -> None:
        """Admit names of values that the user's code logs in training; values of one name are of one source.

        ``where`` they are logged, for the error.

        Raises:
            ConfigError: the training or an evaluation puts a value of this name itself, or this iteration has a value
                that was logged elsewhere.
        """
        for name in names:
            key = self._prefix + name
            if key not in self.logged:
                if key in self.results:
                    raise taken_name(name, "the training", "a result of the evaluation")
                if key in self._hints and key not in self._restored:
                    raise taken_name(name, "the training", "a value of the step (which its model returns) or of a hook")
            before, at = self.logged.get(key, (where, self.iter))
            if before != where and at == self.iter:
                raise ConfigError(
                    f"trainer.log: {name!r} is logged in {before} and in {where}, and an update has one value of a"
                    " name. Log it in one of them: values of micro-batches in the loss, or without a pipeline in"
                    " on_train_batch_begin, not in on_train_batch_end, which comes after the update for the last one."
                )
            self.logged[key] = where, self.iter

    def refuse_logged(self, names: Iterable[str], source: str) -> None:
        """Raise if the user's code logs one of these names in training. ``source``: what puts them, for the error."""
        if twice := self.logged.keys() & set(names):
            raise taken_name(min(twice), "the training", source)

    def put_image(self, name: str, image: "ArrayLike") -> None:
        """Keep an image for the writers: (C, H, W) or (H, W), uint8 in [0, 255] or float in [0, 1].

        The newest images, histograms and texts are kept, up to 64 MiB in total.
        """
        name = self._prefix + name
        self._media.add("image", name, self.iter, image_copy(name, image))

    def put_histogram(self, name: str, values: "ArrayLike", bins: int = 1000) -> None:
        """Keep the histogram of any number of values for the writers, without NaN and inf."""
        name = self._prefix + name
        self._media.add("histogram", name, self.iter, histogram_summary(name, values, bins))

    def put_text(self, name: str, text: str) -> None:
        """Keep a text for the writers, such as a generated sentence; TensorBoard shows it as Markdown."""
        if not isinstance(text, str):
            raise ConfigTypeError(f"put_text({name!r}): got {type(text).__name__}; it must be a str.")
        self._media.add("text", self._prefix + name, self.iter, text)

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Prefix the names of all values put inside with ``name/``. Scopes nest."""
        outer = self._prefix
        self._prefix = f"{outer}{name.rstrip('/')}/"
        try:
            yield
        finally:
            self._prefix = outer

    # -- reading: values are floats -----------------------------------------------------------------------------------

    def history(self, name: str) -> HistoryBuffer:
        """All values of one metric.

        Raises:
            ConfigKeyError: no value was put under this name.
        """
        self._flush()
        if name not in self._histories:
            hint = did_you_mean(name, self._histories) if self._histories else "Nothing has been put yet."
            if name == "loss" and "total_loss" in self._histories:
                hint = "That of the training is 'total_loss'."
            if name in self._late:
                hint = "Other processes have its values (as the last pipeline stage has the loss) until the log line."
            raise ConfigKeyError(f"EventStorage.history: no metric {name!r} has been put. {hint}")
        return self._histories[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        """All values of all metrics, by name."""
        self._flush()
        return dict(self._histories)

    def latest(self) -> dict[str, tuple[float, int]]:
        """The newest value of each metric and its iteration."""
        self._flush()
        return {name: (history.latest(), history.latest_iteration()) for name, history in self._histories.items()}

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, tuple[float, int]]:
        """``latest``, with noisy metrics replaced by the median over their last ``window_size`` iterations.

        At the end of an epoch by their means over it.
        """
        self._flush()
        return self.read_so_far(window_size)

    def end_epoch(self, first: int, following: int) -> None:
        """From now on the smoothed values are the means since iteration ``first``, until a metric has a newer one.

        ``following``: the first iteration of the next epoch, or ``first`` if this one continues.
        """
        if first >= self.epoch_means.first:  # else it has ended
            self.epoch_means.begin(first)
            self.epoch_means.end(*self._noisy(), following)

    def _noisy(self) -> tuple[dict[str, HistoryBuffer], dict[str, float]]:
        """The histories of noisy metrics, and the iteration from which on their values are not final."""
        noisy = {name: history for name, history in self.histories().items() if self._hints[name] and len(history)}
        return noisy, {name: self.first_local_iteration(name) for name in noisy}

    def means_since(self, iteration: int) -> dict[str, tuple[float, int]]:
        """``latest`` of the metrics with a value of ``iteration`` or later, noisy ones replaced by their mean since."""
        return {
            name: (_finite_mean(history.values_since(iteration)) if self._hints[name] else history.latest(), at)
            for name, history in self.histories().items()
            if (at := history.latest_iteration()) >= iteration
        }

    def read_so_far(self, window_size: int = 20) -> dict[str, tuple[float, int]]:
        """As ``latest_with_smoothing_hint``, of values already converted to numbers. Any thread may call it.

        Reads no tensor; :meth:`convert_soon` has the values converted that are pending.
        """
        found = {}
        for name, history in self.histories_so_far().items():
            smooth = self._hints[name]
            mean, at = self.epoch_means.known.get(name, (0.0, None))
            if at == history.latest_iteration():
                value = mean
            else:
                value = _smoothed(name, history.values_of_last_iterations(window_size)) if smooth else history.latest()
            found[name] = (value, history.latest_iteration())
        return found

    def histories_so_far(self) -> dict[str, HistoryBuffer]:
        """As ``histories``, with the values already converted to numbers. Any thread may call it."""
        return {name: history for name, history in self._histories.copy().items() if len(history)}

    def convert_soon(self) -> None:
        """Have the pending values converted to numbers by the thread that puts them, at its next value."""
        self._max_pending = 0

    def smoothing_hints(self) -> dict[str, bool]:
        """The smoothing hint of each metric: True if it is noisy."""
        return dict(self._hints)

    def media(self, after: int = 0) -> list[Medium]:
        """The kept images, histograms and texts with a ``number`` above ``after``, oldest first."""
        return self._media.after(after)

    # -- resume ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The recent values (at most 1,000 per metric) and global means, as plain numbers.

        It does not hold ``iter``: the trainer restores the iteration.
        """
        self.epoch_means.add(*self._noisy())
        return {
            "samples": self.samples,
            "written": self.written,
            "written_before": self.written_before,
            "epoch": self.epoch_means.state_dict(),
            **({"evaluated_weights": self.evaluated_weights} if self.evaluated_weights else {}),
            "results": sorted(self.results),
            "scalars": {
                name: {**history.state_dict(_MAX_SAVED), "smoothing_hint": self._hints[name]}
                for name, history in self._histories.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the metrics of a checkpoint; ``iter`` and ``start_iter`` stay unchanged."""
        self._pending.clear()
        self._local, self._late, self._num_parts, self._num_common = {}, {}, 0, 0
        self._histories, self._hints = {}, {}
        self.samples, self.written = state["samples"], state.get("written")
        self.written_before = state.get("written_before")
        self.evaluated_weights = state.get("evaluated_weights", "")
        self.first_unwritten = self.start_iter if self.written is None else min(self.start_iter, self.written + 1)
        self.last_row = self.written if self.written == self.first_unwritten - 1 else None
        for name, scalar in state["scalars"].items():
            self._histories[name] = HistoryBuffer()
            self._histories[name].load_state_dict(scalar)
            self._hints[name] = scalar["smoothing_hint"]
        self.results = self._histories.keys() & set(state.get("results", ()))
        self._restored = set(self._histories)
        self.epoch_means = EpochMeans()
        if "epoch" in state:
            self.epoch_means.load_state_dict(state["epoch"])

    # -- internals ---------------------------------------------------------------------------------------------------

    def _admit(self, name: str, smoothing_hint: bool) -> None:
        """Check a new name and store its hint; raise if the name already has another hint."""
        if not isinstance(name, str) or name in ("", "iteration"):
            raise ConfigError(
                f"put_scalar: {name!r} cannot name a metric; a name is a non-empty string other than 'iteration', "
                "which the writers use for the iteration itself."
            )
        known = self._hints.get(name)
        if known is not None and known != smoothing_hint and name not in self._restored:
            raise ConfigError(
                f"put_scalar({name!r}): got smoothing_hint={smoothing_hint}; an earlier call used {known}. "
                "Use the same hint in every call, or put the other values under another name."
            )
        self._hints[name] = bool(smoothing_hint)
        self._restored.discard(name)

    def _flush(self) -> None:
        """Convert pending values to numbers and add them to the histories, except those that are late."""
        self._max_pending = _MAX_PENDING
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        if self._late:
            self._pending = [value for value in pending if value[0] in self._late]
            pending = [value for value in pending if value[0] not in self._late]
            self._max_pending += len(self._pending)
        if self._num_parts:
            pending = with_parts(pending)
        columns: dict[str, tuple[list[float], list[int]]] = {}
        numbers = to_numbers(values_of([value for _, value, _ in pending]))
        for (name, _, iteration), number in zip(pending, numbers, strict=True):
            if name not in columns:
                columns[name] = ([], [])
            values, iterations = columns[name]
            values.append(number)
            iterations.append(iteration)
        if self._num_parts:
            self._keep_parts(pending)
        for name, (values, iterations) in columns.items():
            if name not in self._histories:
                self._histories[name] = HistoryBuffer()
            self._histories[name].extend(values, iterations)

    def _keep_parts(self, pending: list[tuple[str, float | Tensor, int]]) -> None:
        """Keep the parts that become values of the histories now, from the first one of each metric on."""
        for name, value, iteration in pending:
            if is_part(value) and name not in self._local:
                history = self._histories.get(name)
                self._local[name] = LocalMeans(iteration, 0.0 if history is None else history.total, [])
        for name, value, _ in pending:
            if name in self._local:
                self._local[name].parts.append(value if is_part(value) else None)


class EvaluationStorage(EventStorage):
    """The current storage during the batches of an evaluation. Drops scalars: they belong to no training iteration.

    Everything else is that of ``training``, the storage of the run, if there is one. ``add_values`` gets what
    ``trainer.log`` is called with; None: it is dropped.
    """

    def __init__(self, add_values: Callable[[Mapping[str, float | Tensor]], None] | None = None) -> None:
        super().__init__()
        self._add_values = add_values
        self._training = get_event_storage() if has_event_storage() else None
        if self._training is not None:
            own = {"_training": self._training, "_add_values": add_values}
            vars(self).update(vars(self._training), _pending=[], _outer=None, **own)

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Count these values of the current batch in the results of the evaluation."""
        for name in values:
            if name in _OF_CALLBACKS:
                raise taken_name(name, "an evaluation", f"'eval_{name}' in the logs of callbacks")
        if self._add_values is not None:
            self._add_values(values)

    def put_scalar(self, name: str, value: Scalar, smoothing_hint: bool = True) -> None:
        """Does nothing."""

    def put_mean(self, *_: Any, **__: Any) -> None:
        """Does nothing."""

    def _flush(self) -> None:
        if self._training is not None:
            self._training._flush()


def _smoothed(name: str, values: list[float]) -> float:
    """The median of the finite values; the newest value if it is not finite: a median would hide it.

    Of values that are 0 or 1 the mean: the median would hide a rare 1.
    """
    if not math.isfinite(values[-1]):
        return values[-1]
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if name.rpartition("/")[2] in _ZERO_OR_ONE else median(finite)


def mean_so_far(storage: EventStorage, name: str, mean: RunningMean, *more: float) -> float:
    """Add the new values of a metric to ``mean``; returns it with those of this process only, and with ``more``."""
    history = storage.histories().get(name)
    return mean.so_far([*(mean.add(history, storage.first_local_iteration(name)) if history else ()), *more])


def _finite_mean(points: list[tuple[float, int]]) -> float:
    """The mean, as in :func:`_smoothed`."""
    is_finite = math.isfinite(points[-1][0])
    values = [value for value, _ in points if math.isfinite(value) or not is_finite]
    return sum(values) / len(values)


def taken_name(name: str, where: str, source: str) -> ConfigError:
    """The error for a name of ``trainer.log``, called in ``where``, that is also ``source``."""
    return ConfigError(
        f"trainer.log: {name!r} is logged in {where}, and is also {source}. Remove the call, or log another name, for"
        f" example 'my_{name}'."
    )


def logged_scalars(values: Mapping[str, Scalar], *others: object, **options: object) -> dict[str, float | Tensor]:
    """The values for ``trainer.log``, checked: floats, and detached copies of tensors, which are not read.

    ``others`` and ``options`` are those of Lightning's ``log(name, value, prog_bar=True)``; nothing is allowed.
    """
    if not isinstance(values, Mapping) or others or options:
        shown = [f"{one!r:.80} ({type(one).__name__})" for one in (values, *others)]
        shown += [f"{name}={value!r:.80}" for name, value in options.items()]
        example = f"{values!r}: value" if isinstance(values, str) else '"accuracy": accuracy'
        raise ConfigTypeError(
            f"trainer.log: got {', '.join(shown)}; it takes values by name, and nothing else:"
            f" trainer.log({{{example}}})."
        )
    if torch.compiler.is_compiling():
        raise ConfigError("trainer.log cannot be part of a compiled program: return the values beside the loss.")
    for name in values:
        if not isinstance(name, str) or not name or name in OWN_NAMES | _OWN_LOSSES:
            raise ConfigError(
                f"trainer.log: {name!r} cannot name a value: it must be a non-empty string, and no name of what the"
                f" trainer records itself ({', '.join(sorted(OWN_NAMES | _OWN_LOSSES))})."
            )
    return {n: copied_scalar(n, v) if isinstance(v, Tensor) else as_number(n, v) for n, v in values.items()}


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
        # Autocast refuses to join some dtypes: float16 where it computes in bfloat16.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            wide = [torch.stack(column).to(wide_dtype(device)) for column in by_dtype.values()]
            on_host: list[float] = torch.cat(wide).tolist()
        for place, number in zip(chain.from_iterable(places[device].values()), on_host, strict=True):
            numbers[place] = number
    return numbers


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The contents of a storage at one moment. It copies no values, so taking one costs microseconds."""

    iter: int
    samples: int
    written: int | None
    histories: dict[str, HistoryBuffer]
    hints: dict[str, bool]
    media: MediaView
    epoch_means: dict[str, tuple[float, int]]


def take_snapshot(storage: EventStorage) -> Snapshot:
    """The current contents of ``storage``. Reads pending values and images to the host: this waits for the device."""
    histories = {name: history.frozen() for name, history in storage.histories().items()}
    return Snapshot(
        storage.iter,
        storage.samples,
        storage.written,
        histories,
        storage.smoothing_hints(),
        storage._media.until_now(),
        storage.epoch_means.known,
    )


class StorageView(EventStorage):
    """A read-only storage that shows one snapshot of a run's storage after the other."""

    def __init__(self, storage: EventStorage) -> None:
        super().__init__(storage.start_iter)
        self.first_unwritten, self.last_row = storage.first_unwritten, storage.last_row

    def __repr__(self) -> str:
        return f"StorageView({self.iter})"

    def show(self, snapshot: Snapshot) -> None:
        """Return the values of ``snapshot`` from now on."""
        self.iter, self.samples, self.written = snapshot.iter, snapshot.samples, snapshot.written
        self._histories, self._hints = snapshot.histories, snapshot.hints
        self.epoch_means.known = snapshot.epoch_means
        self._media_view = snapshot.media

    def media(self, after: int = 0) -> list[Medium]:
        return self._media_view.after(after)

    def _refuse(self, name: str, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"{name!r}: a writer runs in a background thread and reads a snapshot, which cannot be changed. Put metrics"
            " in a hook, or set in_background = False in the writer's class: training then waits for this writer."
        )

    put_scalar = put_image = put_histogram = put_text = _refuse
