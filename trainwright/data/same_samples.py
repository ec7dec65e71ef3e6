"""Whether the processes have the same data: each trains on a share of them by index, so index 7 must be one sample.

Where each process shuffles its list of files by itself, they train on some samples several times, and never on others.
"""

import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from trainwright.base.batch import fields
from trainwright.base.dist import all_gather_object, broadcast_object, get_world_size, is_any
from trainwright.base.errors import ConfigError
from trainwright.data.seeding import (
    SAMPLE_STREAM,
    generator_state,
    is_generator,
    read_state,
    seed_generators,
    stream_key,
)
from trainwright.data.undone_reads import undone_reads

_MAX_SAMPLES, _MAX_OF_STREAM = 16, 4
_SECONDS = 0.4  # for all data sets; one sample of each is read in any case
_MAX_PARTS, _MAX_DEPTH = 64, 6
_MAX_VALUES = 1 << 16  # of a tensor, spread evenly
_TOLERANCE = 1e-3  # of the largest value: machines with other processors compute a transform a little differently
_MAX_NAMED = 8

Values = dict[str, Any]  # what a sample has at each place in it: the hash of exact values, or statistics of floats

SEEDS = (
    "All processes must have the same samples in the same order, of which each reads its share: give a seed to what"
    " shuffles or splits them, such as random.Random(0).shuffle(files), data.shuffle(seed=0) or random_split(...,"
    " generator=torch.Generator().manual_seed(0)), and sort lists of files (sorted(folder.iterdir()))."
)


class Data(NamedTuple):
    """Data of which each process reads a share.

    Attributes:
        dataset: it has ``__len__`` and ``__getitem__``; None: a stream, of which only ``order`` is compared.
        order: what the order of its samples depends on, by name.
    """

    dataset: Any
    order: Mapping[str, Any]


def check_same_samples(data: Mapping[str, Data]) -> None:
    """Raise on all processes if one has other data: another length, other samples at an index, or another order.

    Of each data set up to 16 samples are read, fewer if this takes time. This changes nothing in a data set and draws
    no random numbers. Samples that are random although the generators are equal are not compared. Every process must
    call this, with the same names.

    Raises:
        ConfigError: it names the data, the processes and what differs.
    """
    if get_world_size() == 1 or not data:
        return
    datasets = [one.dataset for one in data.values() if one.dataset is not None]
    seconds, reads = _SECONDS / max(1, len(datasets)), {}
    with undone_reads(*datasets):
        for name, (dataset, order) in data.items():
            length = None if dataset is None else _length(dataset)
            reads[name] = {**order, _LENGTH: length}, read_samples(dataset, length, seconds)
        of_first = broadcast_object(reads)
        differences = {name: _difference(*of_first[name], *own) for name, own in reads.items() if name in of_first}
        if not is_any(any(differences.values())):
            return
        suspected = all_gather_object(differences)
        random_on = all_gather_object(_random_places(data, reads, suspected))
    for name in data:
        is_random = {place for one in random_on for place in one.get(name, ())}
        check_found(name, [one.get(name) for one in suspected], is_random)


def check_found(
    name: str, found: Iterable[Any], is_random: Iterable[tuple[int, str]] = (), what: str = "sample"
) -> None:
    """Raise for the first difference from rank 0 that was found, by rank, unless it ``is_random``."""
    rows = []
    for rank, row in enumerate(found):
        if row is not None and not isinstance(row, str):
            kept = [place for place in row if place not in set(is_random)]
            row = kept[0] if kept else None
        if row is not None:
            rows.append((rank, row))
    if not rows:
        return
    difference = rows[0][1]
    ranks = [rank for rank, _ in rows]
    named = ", ".join(map(str, ranks[:_MAX_NAMED])) + (" and others" if len(ranks) > _MAX_NAMED else "")
    where = f"rank{'s' if len(ranks) > 1 else ''} {named}"
    if isinstance(difference, str):
        raise ConfigError(f"{name}: {difference} on {where}. {SEEDS}")
    index, field = difference
    of_field = f" (its {field})" if field else ""
    raise ConfigError(f"{name}: {what} {index}{of_field} is another one on {where} than on rank 0. {SEEDS}")


class FirstReads:
    """The first samples that are read of a stream which each process reads completely, for a comparison.

    Attributes:
        values: of each of at most 4 samples; None: numbers were drawn while it was read, so it may be random.
    """

    def __init__(self) -> None:
        self.values: list[Values | None] = []

    def of(self, stream: Any, held: Any = None) -> Iterator[Any]:
        """The samples of a new iteration of the stream. ``held``: what may have generators, if not the stream."""
        samples = iter(stream)
        held = stream if held is None else held
        while len(self.values) < _MAX_OF_STREAM:
            before = _states(held, samples)
            try:
                sample = next(samples)
            except StopIteration:
                return
            try:
                self.values.append(None if _states(held, samples) != before else values_of(sample))
            except Exception:  # of the user's code
                self.values.append(None)
            yield sample
        yield from samples


def _states(stream: Any, samples: Iterator[Any]) -> Any:
    """The states of the global generators, and of those that a stream or its iteration has."""
    local = getattr(getattr(samples, "gi_frame", None), "f_locals", {})
    held = [*getattr(stream, "__dict__", {}).values(), *local.values()]
    return read_state(), [repr(generator_state(one)) for one in held if is_generator(one)]


def check_first_reads(name: str, values: list[Values | None], what: str = "sample") -> None:
    """Raise on all processes if they have read other first samples of a stream that all of them read completely.

    ``what``: of which there are ``values``. Every process must call this.
    """
    if get_world_size() == 1:
        return
    of_first = broadcast_object(values)
    places = [
        (number, field)
        for number, (one, other) in enumerate(zip(of_first, values, strict=False))
        if one is not None and other is not None
        for field in differing(one, other)
    ]
    if is_any(bool(places)):
        check_found(name, all_gather_object(places or None), what=what)


def read_samples(dataset: Any, length: int | None, seconds: float, indices: Iterable[int] | None = None) -> Any:
    """The values of some samples by index, with equal states of the generators for each on all processes."""
    found: dict[int, Values] = {}
    end, key = time.perf_counter() + seconds, stream_key(0, SAMPLE_STREAM)
    if indices is None:  # the same on all processes, in an order in which the first ones lie apart
        indices = random.Random(0).sample(range(length or 0), min(length or 0, _MAX_SAMPLES))
    for index in indices:
        try:
            seed_generators(key, f"{index}")
            found[index] = values_of(dataset[index])
        except Exception:  # of the user's code: the training reports it
            return found
        if time.perf_counter() > end:
            return found
    return found


def values_of(sample: Any) -> Values:
    """What two equal samples have alike, by the place within them."""
    found: Values = {}
    _add(found, "", sample, 0)
    return found


def differing(one: Values, other: Values) -> list[str]:
    """The places at which two samples differ."""
    places = [*one, *(place for place in other if place not in one)]
    return [place for place in places if not _are_same(one.get(place), other.get(place))]


_LENGTH = "the number of samples"


def _difference(order: Values, samples: Any, own_order: Values, own_samples: Any) -> Any:
    """How this process differs from the first: a text, or places (index, field) at which samples differ; None: not."""
    for name, value in order.items():
        if own_order.get(name) != value:
            return f"{name} is {value} on rank 0, but {own_order.get(name)}"
    places = [
        (index, field)
        for index in samples
        if index in own_samples
        for field in differing(samples[index], own_samples[index])
    ]
    return places or None


def _random_places(data: Mapping[str, Data], reads: Mapping[str, Any], suspected: Iterable[Any]) -> dict[str, Any]:
    """By data, the places that have other values when this process reads their samples again."""
    found = {}
    for name, (_, samples) in reads.items():
        places = {place for one in suspected for place in one.get(name) or () if not isinstance(place, str)}
        if not places:
            continue
        indices = [index for index in samples if any(index == place[0] for place in places)]
        again = read_samples(data[name].dataset, None, _SECONDS, indices)
        found[name] = {
            (index, field)
            for index, field in places
            if index in again and field in differing(samples[index], again[index])
        }
    return found


def _add(found: Values, place: str, value: Any, depth: int) -> None:
    inner = getattr(value, "tensor", None)  # of a DistTensorData
    value = inner if isinstance(inner, Tensor) else value
    named = fields(value)
    if depth > _MAX_DEPTH:
        return
    if named is not None:
        for name, part in named.items():
            _add(found, f"{place}.{name}" if place else f"{name!r}", part, depth + 1)
    elif isinstance(value, str | bytes | PurePath):
        found[place] = _hash(_text(value))
    elif isinstance(value, tuple | list):
        if all(isinstance(part, int | float) for part in value):
            array = np.asarray(value)
            found[place] = _hash(repr(value).encode()) if array.dtype == object else _numbers(array)
            return
        found[f"{place}, its length"] = len(value)
        for number, part in enumerate(value[:_MAX_PARTS]):
            _add(found, f"{place}[{number}]" if place else f"part {number}", part, depth + 1)
    elif isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_meta:
            flat = _spread(value.detach().reshape(-1)).cpu()
            numbers = (flat.float() if flat.is_floating_point() else flat).numpy()
            found[place] = (*value.shape, *_numbers(numbers))
    elif isinstance(value, np.ndarray | np.generic | int | float | complex):
        array = np.asarray(value)
        if array.dtype.kind in "biufcSUmM":
            found[place] = (*array.shape, *_numbers(_spread(array.reshape(-1))))
    elif callable(getattr(value, "tobytes", None)):  # an image
        found[place] = _hash(value.tobytes())


def _text(value: str | bytes | PurePath) -> bytes:
    """A path counts with its last part: each machine may have its own copy of the data."""
    if isinstance(value, str) and os.path.isabs(value) and len(value) < 4096 and "\n" not in value:
        value = PurePath(value)
    text = value.name if isinstance(value, PurePath) else value
    return text.encode(errors="replace") if isinstance(text, str) else text


def _spread(flat: Any) -> Any:
    return flat[:: max(1, len(flat) // _MAX_VALUES)]


def _numbers(array: Any) -> tuple[Any, ...]:
    """What is compared of numbers: a hash, or of floats some of them, which may differ a little."""
    array = array.reshape(-1)
    if array.dtype.kind not in "fc" or not len(array):
        return (len(array), array.dtype.kind, _hash(np.ascontiguousarray(array).tobytes()))
    real = np.concatenate([array.real, array.imag]) if array.dtype.kind == "c" else array
    is_finite = np.isfinite(real)
    real = np.where(is_finite, real, 0).astype(np.float64)
    some = real[:: max(1, len(real) // 16)]
    return (len(array), int(is_finite.sum()), _Floats([float(real.mean()), float(real.std()), *some.tolist()]))


class _Floats(list[float]):
    """Numbers that are compared with a tolerance."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list) or len(other) != len(self):
            return False
        largest = max(map(abs, [*self, *other]))
        return all(abs(one - two) <= _TOLERANCE * largest for one, two in zip(self, other, strict=True))

    __hash__ = None


def _are_same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and bool(first == second)


def _hash(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
