"""Which sample has the label that an error of an evaluation names."""

import re
from typing import Any

from trainwright.base.dist import get_averaging_size
from trainwright.data.sample_names import index_of_place, shown_samples
from trainwright.data.sampler import SingleRoundSampler
from trainwright.models.targets import class_labels

# Of torch's losses, of our evaluators and of metrics by name.
_LABEL = re.compile(r"Target (-?\d+) is out of bounds|hold (?:class )?(-?\d+)")


def wrong_sample(loader: Any, name: str, number: int, batch: Any, error: Exception) -> str | None:
    """A note with the first sample of a batch whose label the message of ``error`` names; None if it names none.

    ``number`` of the batch on this rank; ``name`` of the data set of ``loader``, where there are several.
    """
    found, labels = _LABEL.search(str(error)), class_labels(batch)
    if found is None or labels is None:
        return None
    label = int(found[1] or found[2])
    rows = (labels == label).flatten(1).any(1) if labels.dim() > 1 else labels == label
    if not rows.any():
        return None
    place = int(rows.int().argmax())
    of = f" of {name!r}" if name else ""
    index_of, dataset = index_of_place(loader)
    first = _first_place(loader, number)
    if index_of is None or first is None:
        return f"The label {label} is that of sample {place} in batch {number} of the evaluation{of}, counted from 0."
    return f"The label {label} is that of sample {shown_samples(dataset, [index_of(first + place)])}{of}."


def _first_place(loader: Any, number: int) -> int | None:
    """The place of a batch's first sample in the pass of all ranks."""
    sampler = loader.batch_sampler
    if isinstance(sampler, SingleRoundSampler):
        return (sampler.data_parallel_rank + number * sampler.data_parallel_size) * sampler.micro_batch_size
    return number * sampler.batch_size if get_averaging_size() == 1 else None
