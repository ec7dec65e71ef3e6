"""How many samples a batch has: one rule for the means of a training and of an evaluation, chosen once for a loader."""

import logging
from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler, default_collate

from trainwright.base.batch import described, num_rows
from trainwright.base.errors import ConfigError
from trainwright.data.collate import collate

logger = logging.getLogger("trainwright.data")


class SampleCounter:
    """Counts the samples of the batches of a loader: ``counter(batch, number)``.

    A batch has the samples that the loader's sampler puts into it, less those that its collate function leaves out: if
    the first tensor has fewer rows, their number. The batch sampler is one of ours or torch's, which has a batch size
    and a length. The batches of other loaders have as many samples as their first tensor has rows.

    Batches without a number of samples count alike, 1 each, which is logged once.

    Raises:
        ConfigError: the samples of some batches can be counted, those of others cannot.
    """

    def __init__(self, loader: Any, *, first: int = 0, every: int = 1) -> None:
        """``first``, ``every``: of the loader's batches only these are counted, as those of a rank."""
        self._first, self._every = first, every
        self.begin(loader)
        self._is_known: bool | None = None  # None: no batch yet

    def begin(self, loader: Any) -> None:
        """A pass of ``loader`` begins, whose length may differ from that of the pass before."""
        self._planned, self._keeps_all = planned_samples(loader), keeps_samples(loader)

    def __call__(self, batch: Any, number: int | None) -> int:
        """The samples of ``batch``, 0 for a padding batch. ``number``: its place in the pass, from 0; None: unknown."""
        found = self.known(batch, number)
        if self._is_known is not (found is not None):
            self._check(batch, is_known=found is not None)
        return 1 if found is None else found

    def known(self, batch: Any, number: int | None) -> int | None:
        """As a call, but None where the samples are unknown."""
        planned = self.planned(number)
        if planned is not None and self._keeps_all:
            return planned
        rows = num_rows(batch)
        return rows if planned is None else planned if rows is None else min(planned, rows)

    def planned(self, number: int | None) -> int | None:
        """The samples that the sampler plans for a batch; None: unknown."""
        return None if self._planned is None or number is None else self._planned(self._first + number * self._every)

    def _check(self, batch: Any, *, is_known: bool) -> None:
        if self._is_known is not None:
            raise ConfigError(
                f"The samples of the batch {described(batch)} cannot be counted as those of the batches before it:"
                " some have a tensor with a row for each sample, others have none. Means over samples need batches of"
                " one form."
            )
        self._is_known = is_known
        if not is_known:
            logger.warning(
                "The number of samples of a batch is unknown: %s has no tensor, and its loader no batch size. In means,"
                " all batches count alike. Put a tensor with a row for each sample first, or pass a DataLoader with a"
                " batch size.", described(batch),
            )  # fmt: skip


def planned_samples(loader: Any) -> Callable[[int], int | None] | None:
    """Returns the samples that this process reads for a batch, by its place in the pass that begins.

    None: the sampler does not plan them.
    """
    sampler = getattr(loader, "batch_sampler", None)
    own: Callable[[int], int] | None = getattr(sampler, "num_samples", None)
    if callable(own):
        return own
    if type(sampler) is not BatchSampler:
        return None
    size = sampler.batch_size
    try:
        total = len(sampler.sampler)  # type: ignore[arg-type]  # a sampler of a stream has none
    except (TypeError, NotImplementedError):
        return None

    def planned(number: int) -> int | None:
        left = total - number * size
        return min(size, left) if left > 0 else None  # more batches than the length says

    return planned


def keeps_samples(loader: Any) -> bool:
    """Whether each batch has all samples that its sampler plans: the collate function is ours, or torch's."""
    collate_fn = getattr(loader, "collate_fn", None)
    module = getattr(collate_fn, "__module__", None) or type(collate_fn).__module__
    return collate_fn in (collate, default_collate) or str(module).startswith("trainwright.")
