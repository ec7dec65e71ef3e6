"""The step of both APIs: read each micro-batch of a window and train on it, update the weights, record."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from trainwright.data.batches import Batches
from trainwright.engine.step_metrics import StepLog
from trainwright.engine.update import Update
from trainwright.events.phases import PhaseTimes


class Step:
    """What a training loop calls in each iteration. It has no settings: its parts are chosen before the first step.

    A step of the user's own, a pipeline schedule, a compiled program and a closure are other callables in it, not other
    steps. The update measures its own phases; ``forward`` is the rest of ``train``.

    Args:
        update: knows the position in the window. ``update``, ``model``, ``train`` and ``finish`` may be replaced during
            a run.
        train: ``train(model, batch)``: forward, loss and backward of one micro-batch. Returns its logs (losses).
        finish: updates the weights after the last micro-batch of a window; None: ``train`` does it.
        length: the micro-batches of an update; or what returns those of the update that starts.
        keep: returns what ``record`` needs of the logs of a micro-batch.
        record: called with what was kept of each micro-batch, and the seconds of waiting for batches.
        records_first: record before the update, for a method of the user's that may read gradients.
        begin_batch: called with each batch before ``train``. ``end_batch``: called before the next one of a window is
            read.
        explain: called with an error of ``train`` and the batch, to add what the user needs to know.

    Attributes:
        after_batch: called with the logs and the batch of each micro-batch; None: not needed.
        new_log: makes the log of values of the user's code, when there is a first one.
    """

    new_log: Callable[[], StepLog]

    def __init__(
        self,
        update: Update,
        batches: Batches,
        model: Any,
        train: Callable[[Any, Any], Any],
        *,
        finish: Callable[[], object] | None,
        length: int | Callable[[], int],
        keep: Callable[[Any], Any],
        record: Callable[[list[Any], float], object],
        phases: PhaseTimes,
        records_first: bool = False,
        begin_batch: Callable[[Any], None] | None = None,
        end_batch: Callable[[], None] | None = None,
        explain: Callable[[Exception, Any], None],
    ) -> None:
        self.model, self.train, self.finish = model, train, finish
        self.after_batch: Callable[[Any, Any], None] | None = None
        self._batches, self._length, self._phases = batches, length, phases
        self._keep, self._record, self._records_first = keep, record, records_first
        self._begin_batch, self._end_batch, self._explain = begin_batch, end_batch, explain
        self._log: StepLog | None = None
        self.use(update)

    def log(self, values: Mapping[str, Any]) -> None:
        """Record values of the current micro-batch, or of the next one: their means over those of the update."""
        if self._log is None:  # a step in which nothing is logged makes no further calls
            self._log = self.new_log()
            self._keep, self._record = self._log.around(self._keep, self._record)
        self._log.add(values)

    def use(self, update: Update) -> None:
        """Train with ``update`` from now on."""
        self.update, update.phases = update, self._phases

    def run(self) -> None:
        """One update of the weights."""
        phases, clock, length = self._phases, time.perf_counter, self._length
        length = length if isinstance(length, int) else length()
        read, start = self._batches.next, clock()
        if self.update.begin is not None:
            read = self.update.begin(length, read)
        kept: list[Any] = []
        data_time = 0.0
        for left in range(length - 1, -1, -1):
            self.update.is_window_end, self.update.is_counted = left == 0, False
            if kept:
                start = clock()
                if self._end_batch is not None:
                    self._end_batch()
            self.update.batch = batch = read()
            if self._begin_batch is not None:
                self._begin_batch(batch)
            if self.update.sync is not None:
                self.update.sync.before_batch(is_last=left == 0)
            fetched = clock()
            data_time += fetched - start

            others = phases.backward + phases.optimizer + phases.waiting + phases.compile
            try:
                logs = self.train(self.model, batch)
            except Exception as error:
                self._explain(error, batch)
                raise
            trained = clock()
            others = phases.backward + phases.optimizer + phases.waiting + phases.compile - others
            phases.forward += trained - fetched - others
            kept.append(self._keep(logs))
            if left == 0:
                if self._records_first:
                    self._record(kept, data_time)
                if self.finish is not None:
                    self.finish()
            if self.after_batch is not None:
                start = clock()
                self.after_batch(logs, batch)
                phases.metrics += clock() - start
        if self.update.prepares_early:
            self.update.release()
        phases.data += data_time
        if not self._records_first:
            self._record(kept, data_time)
