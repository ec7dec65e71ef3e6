"""The samples with the largest losses of an evaluation, on any number of ranks.

While it runs, the losses, labels and predictions of all samples stay on the device; those of the hardest ones are read
at its end. Ranks exchange these numbers only, never samples.

B samples of a batch, N of an evaluation on this rank.
"""

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainwright.base.batch import fields, first_labels
from trainwright.base.dist import (
    all_gather_object,
    get_averaging_rank,
    get_tensor_parallel_rank,
    is_main_process,
)
from trainwright.data.sample_count import SampleCounter
from trainwright.data.sample_names import index_of_place, sample_name
from trainwright.evaluation.prediction_table import ID_FIELDS
from trainwright.evaluation.rank_exchange import in_data_order
from trainwright.evaluation.sample_losses import LossesOfTorch, losses_of_samples, scores_of
from trainwright.events.formats import HARDEST_COLUMNS

logger = logging.getLogger("trainwright.evaluation")

Row = dict[str, Any]
COLUMNS = HARDEST_COLUMNS[1:]


class HardestSamples:
    """Find the ``number`` samples with the largest losses of each data set in the evaluations inside ``watching``.

    Args:
        report: called on the main process at the end of the evaluation of a data set, with its rows, the largest loss
            first, and the data set, which is None if its samples cannot be read by their indices. A row has
            ``dataset``, ``sample`` (the index; None: unknown), ``name``, ``loss``, ``label`` and ``prediction``.
        reads_losses: look for losses of torch in the evaluation; not in compiled models.
    """

    _watching: ClassVar["HardestSamples | None"] = None

    def __init__(self, number: int, report: Callable[[list[Row], Any], object], *, reads_losses: bool = True) -> None:
        self.number, self.report, self.reads_losses = number, report, reads_losses
        self.has_warned = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the evaluations inside."""
        HardestSamples._watching = self
        try:
            yield
        finally:
            HardestSamples._watching = None


def watched_evaluation(model: nn.Module, loader: Any, name: str) -> "WatchedEvaluation | None":
    """The part of an evaluation that finds its hardest samples; None: the user has not asked for them."""
    owner = HardestSamples._watching
    return None if owner is None else WatchedEvaluation(owner, model, loader, name)


class WatchedEvaluation:
    """One evaluation of ``model`` on ``loader``."""

    def __init__(self, owner: HardestSamples, model: nn.Module, loader: Any, name: str) -> None:
        self._owner, self._model, self._loader, self._name = owner, model, loader, name
        self._reads_losses = owner.reads_losses
        self._sizes: list[int] = []  # of the batches of this rank
        # The number of a batch, its losses, labels, predictions, and the names of its samples, where it has them.
        self._kept: list[tuple[int, Tensor, Tensor | None, Tensor | None, Any]] = []

    def around(self, step: Callable[[Any], object]) -> Callable[[Any], None]:
        """``step``, and look at what the model returns in it."""

        count = SampleCounter(self._loader)

        def watched_step(batch: Any) -> None:
            outputs: list[Any] = []
            losses: list[Tensor | None] = []
            size = count(batch, len(self._sizes))
            mode = LossesOfTorch(lambda: size, losses.append) if self._reads_losses else None
            hook = self._model.register_forward_hook(lambda module, inputs, found: outputs.append(found))
            with hook, mode or nullcontext():
                step(batch)
            found = losses_of_samples(batch, outputs[-1] if outputs else None, size, losses)
            if mode is not None and not self._sizes:
                self._reads_losses = bool(losses)  # without a loss in the first batch, there are none
            self._add(batch, size, found, outputs)

        return watched_step

    def _add(self, batch: Any, size: int, losses_B: Tensor | None, outputs: list[Any]) -> None:
        self._sizes.append(size)
        if losses_B is None or not size:
            return
        ids = [value for name, value in (fields(batch) or {}).items() if name in ID_FIELDS]
        names = ids[0] if ids and hasattr(ids[0], "__len__") and len(ids[0]) == size else None
        labels, predictions = _column(first_labels(batch), size), _column(scores_of(outputs[-1]), size, are_scores=True)
        self._kept.append((len(self._sizes) - 1, losses_B, labels, predictions, names))

    def finish(self) -> None:
        """Report the hardest samples of all ranks, which must all call this."""
        own = get_tensor_parallel_rank() == 0  # the others have the same
        gathered = all_gather_object((get_averaging_rank(), self._sizes if own else [], self._rows() if own else []))
        ranks = sorted((one for one in gathered if one[1]), key=lambda one: one[0])
        if not is_main_process():
            return
        sizes = in_data_order([[(rank, *one) for one in enumerate(of_rank)] for rank, of_rank, _ in ranks])
        starts = accumulate((size for *_, size in sizes), initial=0)  # of each batch, its first sample's place
        firsts = {(rank, batch): start for (rank, batch, _), start in zip(sizes, starts, strict=False)}
        found = [(firsts[rank, batch] + place, *rest) for rank, _, rows in ranks for batch, place, *rest in rows]
        if not found:
            self._warn()
            return
        found.sort(key=lambda row: (-math.inf if math.isnan(row[1]) else -row[1], row[0]))
        index_of, dataset = index_of_place(self._loader)
        rows = []
        for place, loss, label, prediction, name in found[: self._owner.number]:
            index = None if index_of is None else index_of(place)
            if name is None and index is not None:
                name = sample_name(dataset, index)
            values = self._name, index, name, loss, label, prediction
            rows.append(dict(zip(COLUMNS, values, strict=True)))
        self._owner.report(rows, None if index_of is None else dataset)

    def _rows(self) -> list[tuple[int, int, float, Any, Any, str | None]]:
        """Batch, number in it, loss, label, prediction and name of the hardest samples of this rank."""
        if not self._kept:
            return []
        ends = [*accumulate(len(losses_B) for _, losses_B, *_ in self._kept)]
        losses_N = torch.cat([losses_B for _, losses_B, *_ in self._kept])
        # Stable: of equal losses the first samples are kept, on any number of ranks. NaN counts as infinity.
        keys_N = losses_N.nan_to_num(math.inf, math.inf)
        rows = []
        for place in keys_N.sort(descending=True, stable=True).indices[: self._owner.number].tolist():
            kept = bisect_right(ends, place)
            batch, losses_B, *columns = self._kept[kept]
            number = place - ends[kept] + len(losses_B)
            values = [None if one is None else one[number] for one in columns]
            label, prediction, name = (one.item() if isinstance(one, Tensor) else one for one in values)
            rows.append(
                (batch, number, float(losses_B[number]), label, prediction, None if name is None else str(name))
            )
        return rows

    def _warn(self) -> None:
        if not self._owner.has_warned:
            self._owner.has_warned = True
            logger.warning(
                "hardest_samples: the loss of each sample is unknown. Let the model return it as 'sample_losses', with"
                " one value for each sample; or use a loss of torch, or scores and labels of classes.",
            )


def _column(values: Tensor | None, size: int, *, are_scores: bool = False) -> Tensor | None:
    """One number for each sample: of scores the class; None: there is none."""
    if values is None or len(values) != size:
        return None
    if are_scores and values.ndim == 2 and values.shape[1] > 1:
        values = values.argmax(1)
    if values.numel() != size:
        return None
    return values.detach().reshape(size).clone()  # the next batch may be read into the same memory
