"""Checks of the data: each sample once per epoch, none in training and evaluation, random numbers of workers."""

import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, WeightedRandomSampler

from trainwright.base.batch import num_rows
from trainwright.data.batch_loader import BatchLoader, BatchReader, opened
from trainwright.data.sampler import CyclicSampler, EpochSampler, SampleIndices
from trainwright.inspect.check.batches import fingerprint, inputs_and_labels
from trainwright.inspect.check.copies import Copy
from trainwright.inspect.check.finding import Finding, Skipped, passed, problem, undecided
from trainwright.inspect.check.observed import SetUp

_EPOCHS = 3
_MOST_INDICES = 3_000_000
_MOST_COMPARED = 50_000  # samples of each data set
_READS = 16  # of each of two workers
_FEWEST_EQUAL = 16  # samples that are all equal


def check_samples(setup: SetUp) -> Finding:
    """Each training sample is read once per epoch; samples differ, and so do labels."""
    new = setup.make()
    loader = new.run.batches.loader
    spec = setup.run.spec
    limits = [n for n in ("limit_train_batches", "overfit_batches") if getattr(spec, n) is not None]
    if limits:
        raise Skipped(f"{limits[0]} leaves samples out")
    if (fault := _equal_samples(setup, new)) is not None:
        return fault
    dataset, sampler = _dataset(loader), getattr(loader, "sampler", None)
    if isinstance(sampler, WeightedRandomSampler) or getattr(sampler, "replacement", False):
        return passed(f"{type(sampler).__name__} draws samples with replacement, as configured.")
    batches, size = getattr(loader, "batch_sampler", None), len(dataset)
    drops, batch = bool(getattr(batches, "drop_last", False)), getattr(batches, "batch_size", None) or 1
    return _judge_indices(loader, size, fewest_dropped=batch if drops else 0)


def _equal_samples(setup: SetUp, new: Copy) -> Finding | None:
    """What is wrong with samples that have the same inputs or the same label; None: they differ."""
    end, number = time.perf_counter() + 0.1 * setup.seconds_left(), 0
    first, equal = dict[str, list[Tensor]](), {"inputs", "labels"}
    try:
        size: float = len(new.run.batches.loader.dataset)
    except (AttributeError, TypeError):  # a stream
        size = math.inf
    for batch in new.run.batches.loader:
        found = inputs_and_labels(new.prepared(batch))
        first = first or found
        equal = {name for name in equal if found[name] and all(map(_has_rows_of, found[name], first[name]))}
        number += num_rows(batch) or 0
        if not equal or number >= size or time.perf_counter() > end:
            break
    else:
        size = number  # a remainder is dropped
    new.run.batches.close()
    if not equal or number < _FEWEST_EQUAL:
        return None
    values = {"equal": sorted(equal), "samples": number}
    if "inputs" in equal:
        fix = "The data set must give another sample for each index, and transforms must not erase it."
        return problem(f"The inputs of all {number:,} samples that were read are equal.", fix, values)
    text, fix = f"All {number:,} samples that were read have the same label.", "Look at how the labels are read."
    is_sure = number >= size and not setup.has_own_loss
    return problem(text, fix, values) if is_sure else undecided(text, f"{fix} Are the data sorted by label?", values)


def _has_rows_of(values: Tensor, first: Tensor) -> bool:
    return values.shape[1:] == first.shape[1:] and bool((values == first[:1]).all())


def _judge_indices(loader: Any, size: int, *, fewest_dropped: int) -> Finding:
    """``fewest_dropped``: an epoch may leave out fewer samples than that, at its end."""
    epochs = max(1, min(_EPOCHS, _MOST_INDICES // size))
    of_epochs = [Counter(indices) for indices in _epochs(loader, size, epochs)]
    counts: Counter[int] = sum(of_epochs, Counter())
    missing = max(size - len(epoch) for epoch in of_epochs)
    never = [index for index in range(size) if index not in counts]
    repeated = [index for index, number in counts.items() if number > epochs]
    outside = [index for index in counts if not 0 <= index < size]
    values = {"samples": size, "epochs": epochs, "never": len(never), "repeated": len(repeated)}
    if outside:
        return problem(f"Indices outside of the data set, first {outside[0]}.", "Correct the sampler.", values)
    is_remainder = missing < fewest_dropped
    if never and not (is_remainder and len(never) < 0.05 * size):
        shown = ", ".join(map(str, never[:5]))
        return problem(
            f"{len(never):,} of {size:,} samples are never read in {epochs} epochs ({shown} …).",
            "Shuffle, or set drop_last=False." if is_remainder else "The sampler must give each index.", values,
        )  # fmt: skip
    if repeated:
        return problem(
            f"{len(repeated):,} of {size:,} samples are read more often than once per epoch (first"
            f" {repeated[0]}).", "Correct the sampler, or use WeightedRandomSampler if this is intended.", values,
        )  # fmt: skip
    note = f"; the last {missing} of each epoch are dropped (drop_last)" if missing else ""
    return passed(f"{size:,} samples, each once per epoch ({epochs} epochs{note}).", values=values)


def _epochs(loader: Any, size: int, epochs: int) -> Iterator[list[int]]:
    sampler = getattr(loader, "batch_sampler", None) or loader.sampler
    if isinstance(sampler, CyclicSampler):
        stream = (index for indices in sampler for index in indices)
        for _ in range(epochs):
            yield list(islice(stream, size))
        return
    if isinstance(sampler, EpochSampler):
        sampler.infinite = False
    for _ in range(epochs):
        indices = islice(sampler, 2 * size + 1)
        yield [int(index) for part in indices for index in (part if isinstance(part, list | tuple) else [part])]


def _dataset(loader: Any) -> Any:
    """The data set of a loader; Skipped if it has no indices."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset) or not isinstance(loader, DataLoader):
        raise Skipped(f"the data are a {type(loader if dataset is None else dataset).__name__}, which has no indices")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise Skipped(f"{type(dataset).__name__} has no indices")
    return dataset


def check_test_data(setup: SetUp) -> Finding:
    """No sample of the evaluation data is among the training data."""
    new = setup.make()
    loaders = new.eval_loaders
    if not loaders:
        raise Skipped("there are no evaluation data, or they are the training data (overfit_batches)")
    train = _dataset(new.run.batches.loader)
    lines, values, judge, fix = [], {}, passed, ""
    for number, loader in enumerate(loaders):
        name = getattr(loader, "name", None) or (
            f"data set {number + 1}" if len(loaders) > 1 else "the evaluation data"
        )
        found = _overlap(setup, train, _dataset(loader))
        values[str(name)] = found
        if found["is_random"]:
            judge = undecided if judge is passed else judge
            lines.append(f"{name}: samples are random, and cannot be compared")
            continue
        share, natural = found["common"] / max(1, found["evaluated"]), found["duplicates"]
        lines.append(
            f"{found['common']:,} of {found['evaluated']:,} samples of {name} are among {found['trained']:,} training"
            " samples"
        )
        if share > max(0.01, 3 * natural) and found["common"] >= 3:
            judge = problem
            fix = "Remove them from one of the two: the evaluation measures what was learned by heart."
        elif found["common"]:
            lines[-1] += f" ({natural:.1%} of the training samples have duplicates, too)"
    return judge("; ".join(lines) + ".", fix, values)


def _overlap(setup: SetUp, train: Any, evaluated: Any) -> dict[str, Any]:
    """How many samples two data sets have in common: by indices if they are parts of one, else by content."""
    sources = [_source(train), _source(evaluated)]
    if sources[0][0] is sources[1][0]:
        first, second = ({*indices} for _, indices in sources)
        common = len(first & second)
        sizes = {"common": common, "evaluated": len(second), "trained": len(first)}
        return {**sizes, "duplicates": 0.0, "is_random": False}
    is_random = [_is_random(train), _is_random(evaluated)]
    found: dict[str, Any] = {"is_random": is_random[0] != is_random[1], "common": 0, "evaluated": 0, "trained": 0}
    if found["is_random"]:
        return found | {"duplicates": 0.0}
    end = time.perf_counter() + 0.2 * setup.seconds_left()
    theirs = [*_fingerprints(evaluated, end, seeded=is_random[1])]
    ours = Counter(_fingerprints(train, end + 0.2 * setup.seconds_left(), seeded=is_random[0]))
    total = sum(ours.values())
    found |= {"common": sum(one in ours for one in theirs), "evaluated": len(theirs), "trained": total}
    found["duplicates"] = sum(number for number in ours.values() if number > 1) / max(1, total)
    return found


def _source(dataset: Any) -> tuple[Any, Any]:
    """The data set that a Subset is a part of, and its indices."""
    indices: Any = range(len(dataset))
    while type(dataset) is Subset:
        dataset, indices = dataset.dataset, [int(dataset.indices[index]) for index in indices]
    return dataset, indices


def _is_random(dataset: Any) -> bool:
    places = range(0, len(dataset), max(1, len(dataset) // 4))
    return [*_read(dataset, places, 1)] != [*_read(dataset, places, 2)]


def _fingerprints(dataset: Any, end: float, *, seeded: bool) -> Iterator[bytes]:
    order = np.random.default_rng(0).permutation(len(dataset))[:_MOST_COMPARED]
    for number, one in enumerate(_read(dataset, order.tolist(), 0 if seeded else None)):
        yield one
        if number % 100 == 0 and time.perf_counter() > end:
            return


def _read(dataset: Any, places: Any, seed: int | None) -> Iterator[bytes]:
    for place in places:
        if seed is not None:  # random samples are equal if they are drawn with equal numbers
            random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        yield fingerprint(dataset[place])


def check_workers(setup: SetUp) -> Finding:
    """Workers draw different random numbers: two of them read the same samples, and random ones must differ."""
    loader = setup.make().run.batches.loader
    loader = getattr(loader, "loader", loader)
    if not getattr(loader, "num_workers", 0):
        raise Skipped("samples are read without workers")
    dataset = _dataset(loader)
    first, again = _reads(loader, dataset), _reads(loader, dataset)
    own, other = first[0::2], first[1::2]
    period = min(4, len(dataset))
    pairs = [(own[n], own[n + period]) for n in range(len(own) - period)]
    collisions = sum(a == b for a, b in pairs) / max(1, len(pairs))
    values = {"reads": len(own), "equal_reads": collisions}
    if collisions == 1:
        return passed("Samples read by workers are not random.", values=values)
    chance = max(collisions, 0.05) ** len(own)  # that independent workers agree in all reads
    fix = "Draw from the global generators of torch, numpy or random, or seed your own one in worker_init_fn."
    if own == other and chance < 1e-3:
        return problem(f"Two workers draw the same random numbers: {len(own)} random samples agree.", fix, values)
    is_kept = isinstance(loader, BatchLoader) or loader.persistent_workers
    if first == again and chance < 1e-3 and not is_kept:
        return problem("Workers draw the same random numbers in each epoch.", fix, values)
    return passed(f"{len(own)} random samples of two workers differ.", values=values)


def _reads(loader: DataLoader[Any], dataset: Any) -> list[bytes]:
    """The samples that two workers read in turn: the same ones each."""
    places = [place % min(4, len(dataset)) for place in range(_READS) for _ in range(2)]
    batches: list[Any] = [[place] for place in places]
    settings: dict[str, Any] = {"collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn}
    if isinstance(loader, BatchLoader):
        batches = [SampleIndices([p], epoch=n, position=0, epoch_length=None) for n, p in enumerate(places)]
        dataset, settings["collate_fn"] = BatchReader(dataset, loader.collate_fn, seed=loader.seed), _unchanged
    settings["multiprocessing_context"] = loader.multiprocessing_context
    reads = DataLoader(dataset, batch_sampler=batches, num_workers=2, **settings)
    return [fingerprint(batch) for batch in opened(reads)]


def _unchanged(batch: Any) -> Any:
    return batch
