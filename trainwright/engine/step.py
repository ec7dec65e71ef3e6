"""The step of both APIs: read each micro-batch of a window and train on it, update the weights, record."""

import time
from collections.abc import Callable
from typing import Any

from trainwright.data.batches import Batches
from trainwright.engine.update import Update
from trainwright.events.phases import PhaseTimes


class Step:
    """What a training loop calls in each iteration. It has no settings: its parts are chosen before the first step.

    The weights are updated by ``update.finish()``, which ``train`` calls for the last micro-batch of a window (Python
    API), or ``end_window`` (config files); a compiled program does it itself. The update measures its own phases;
    ``forward`` is the rest of ``train``.

    Args:
        update: knows the position in the window. ``update``, ``model`` and ``train`` may be replaced during a run.
        train: ``train(model, batch)``: forward, loss and backward of one micro-batch. Returns its logs (losses).
        begin_window: returns the number of micro-batches of the update that starts.
        end_window: called with what ``keep`` returned for each micro-batch, and the seconds of waiting for batches.
        begin_batch: called with each batch before ``train``. ``end_batch``: called before the next one of a window is
            read.
        explain: called with an error of ``train`` and the batch, to add what the user needs to know.

    Attributes:
        after_batch: called with the logs and the batch of each micro-batch; None: not needed.
    """

    def __init__(
        self,
        update: Update,
        batches: Batches,
        model: Any,
        train: Callable[[Any, Any], Any],
        *,
        begin_window: Callable[[], int],
        end_window: Callable[[list[Any], float], None],
        phases: PhaseTimes,
        keep: Callable[[Any], Any] | None = None,
        begin_batch: Callable[[Any], None] | None = None,
        end_batch: Callable[[], None] | None = None,
        explain: Callable[[Exception, Any], None],
    ) -> None:
        self.model = model
        self.after_batch: Callable[[Any, Any], None] | None = None
        self.train, self._batches = train, batches
        self._begin_window, self._end_window = begin_window, end_window
        self._phases, self._keep, self._explain = phases, keep, explain
        self._begin_batch, self._end_batch = begin_batch, end_batch
        self.use(update)

    def use(self, update: Update) -> None:
        """Train with ``update`` from now on."""
        self.update, update.phases = update, self._phases

    def run(self) -> None:
        """One update of the weights."""
        phases, clock = self._phases, time.perf_counter
        length, read, start = self._begin_window(), self._batches.next, clock()
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
            fetched = clock()
            data_time += fetched - start

            others = phases.backward + phases.optimizer + phases.compile
            try:
                logs = self.train(self.model, batch)
            except Exception as error:
                self._explain(error, batch)
                raise
            trained = clock()
            phases.forward += trained - fetched - (phases.backward + phases.optimizer + phases.compile - others)
            kept.append(logs if self._keep is None else self._keep(logs))
            if self.after_batch is not None:
                self.after_batch(logs, batch)
                phases.metrics += clock() - trained
        if self.update.prepares_early:
            self.update.release()
        phases.data += data_time
        self._end_window(kept, data_time)
