"""What two runs differ in, and the first update whose losses differ by bits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainwright.events.formats import LOSSES_NAME
from trainwright.inspect.report.run_data import RunData, read_loss_table, sorted_by_x

_OF_THE_PLACE = ("output_dir", "train.output_dir", "resume_from_checkpoint")  # differ without an effect
_START = {"api": "API"} | {name: name for name in ("trainer", "seed", "precision", "device", "processes")}


@dataclass(frozen=True)
class Losses:
    """A comparison of the losses of two runs.

    Attributes:
        num_common: updates that both runs have made.
        first: the first update, counted from 1, whose losses differ by bits; None: all are equal.
        values: the two losses of that update.
        num_differing: updates with other losses.
        fault: why nothing was compared.
    """

    num_common: int = 0
    first: int | None = None
    values: tuple[float, float] | None = None
    num_differing: int = 0
    fault: str = ""


@dataclass(frozen=True)
class Section:
    """Values by name: those that differ, and the number of equal ones. None: a run has no such value."""

    title: str
    differing: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    num_equal: int = 0


def compare(a: RunData, b: RunData) -> tuple[Losses, list[Section]]:
    """The comparison of two runs: losses, then settings, data, code, versions and machine."""
    settings = (
        {name: value for name, value in run.settings.items() if not name.endswith(_OF_THE_PLACE)} for run in (a, b)
    )
    return compare_losses(a, b), [_section("Configuration", *settings), *compare_starts(a.latest, b.latest)]


def compare_starts(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Section]:
    both = (a, b)
    return [
        _section("Run", *({name: start.get(key) for key, name in _START.items()} for start in both)),
        _section("Data", *(_flat(start.get("data")) for start in both)),
        _section("Code", *(_flat(start.get("git")) for start in both)),
        _section("Versions", *(_flat(start.get("versions")) for start in both)),
        _section("Machine", *(_flat(start.get("machine")) | _flat(start.get("numerics")) for start in both)),
    ]


def compare_losses(a: RunData, b: RunData) -> Losses:
    """The losses of ``losses.csv``, bit by bit; NaN equals NaN."""
    tables = [read_loss_table(run.folder / LOSSES_NAME) for run in (a, b)]
    for run, table in zip((a, b), tables, strict=True):
        if table is None or not len(table):
            return Losses(fault=f"{run.name} has no {LOSSES_NAME}")
    first, second = (sorted_by_x(*table.T) for table in tables if table is not None)
    common, in_first, in_second = np.intersect1d(first[0], second[0], return_indices=True)
    if not len(common):
        return Losses(fault="the runs have no update in common")
    x, y = first[1][in_first], second[1][in_second]
    differs = (x.view(np.int64) != y.view(np.int64)) & ~(np.isnan(x) & np.isnan(y))
    places = np.flatnonzero(differs)
    if not len(places):
        return Losses(len(common))
    place = places[0]
    return Losses(len(common), int(common[place]) + 1, (float(x[place]), float(y[place])), len(places))


def _section(title: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Section:
    names = dict.fromkeys([*a, *b])
    differing = {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}
    return Section(title, differing, len(names) - len(differing))


def _flat(tree: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in (tree or {}).items():
        found |= {f"{name} {key}": one for key, one in value.items()} if isinstance(value, Mapping) else {name: value}
    return found
