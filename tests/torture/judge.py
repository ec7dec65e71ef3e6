"""Judges a run from outside: by its history, its files, and what an undisturbed run has left of the same.

Nothing that the library reports is trusted, except that its log must name the checkpoint that it resumes from.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.torture import reader
from tests.torture.reader import Snapshot
from tests.torture.starts import Files, Noted

LOST, DIFFERING, TORN, STALE, KEPT, ENDED = "lost", "differing", "torn", "stale", "kept", "ended"
KINDS = {
    LOST: "lost committed checkpoints",
    DIFFERING: "differing lines and files",
    TORN: "torn lines",
    STALE: "stale entries",
    KEPT: "faults of retention",
    ENDED: "wrong ends and left processes",
}
_TEMPORARY = re.compile(r"\.tmp-.+-(\d+)-[0-9a-f]{8}-\d+-\d+")
_COMPARED = ("model.safetensors", "optimizer.json", "optimizer.safetensors", "lr_scheduler.json", "extra.json")
_EXPECTED_NAMES = re.compile(
    r"config(\.\d+)?\.yaml|log\.txt(\.rank\d+)?|metrics\.json(\.old(\.\d+)?)?|last_checkpoint|events\.out\.tfevents\..+|model_.+"
    r"|losses\.csv(\.old(\.\d+)?)?|run\.json"
    r"|\.trainwright\.json"  # the list of the files that the run wrote
)


@dataclass
class Fault:
    kind: str
    text: str


@dataclass
class Reference:
    """An undisturbed run: what every other one must be equal to."""

    folder: Path
    max_to_keep: int
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        found = reader.look(self.folder)
        assert not found.faults, found.faults
        self.steps = found.steps
        self.rows, torn = reader.metrics(self.folder)
        assert self.rows, "the undisturbed run has no metrics"
        assert not torn, "the undisturbed run has a torn line"
        assert self.lines, "the undisturbed run has no history"
        assert len(found.steps) == self.max_to_keep, found.steps

    @property
    def iterations(self) -> int:
        return len(self.lines)


def judge_start(
    reference: Reference,
    folder: Path,
    pid: int,
    files: Files,
    noted: Noted,
    before: Snapshot,
    after: Snapshot,
    *,
    was_stopped: bool = False,
) -> list[Fault]:
    """What is wrong after a start has ended, by a kill or by itself.

    Args:
        before: what it found.
        was_stopped: it has ended itself, because of another rank for one, and has written what it knew.
    """
    faults = [Fault(LOST, text) for text in after.faults]
    faults += _judge_lines(reference, files, before)
    faults += _judge_progress(noted, before, after)
    faults += _judge_rows(reference, folder, was_stopped=was_stopped)
    if noted.pointed:  # it has saved, so what killed ones had begun is gone
        others = [name for name in after.temporary if _process_of(name) != pid]
        faults += [Fault(STALE, f"{name} of an earlier process is left after a save") for name in others]
    # A new one is committed before an old one is deleted, so a kill between the two leaves one more until a save has
    # come to its end; the second name to be noted shows that the first save has.
    left_before = max(0, len(before.steps) - reference.max_to_keep) if len(noted.pointed) < 2 else 0
    faults += _judge_retention(reference, after, spare=1 + left_before)
    return faults


def judge_end(reference: Reference, folder: Path, after: Snapshot) -> list[Fault]:
    """What is wrong when the run is over."""
    faults = []
    rows, is_torn = reader.metrics(folder)
    if is_torn:
        faults.append(Fault(TORN, "metrics.json ends within a line"))
    if rows != reference.rows:
        missing = [row["iteration"] for row in reference.rows if row not in rows]
        faults.append(Fault(DIFFERING, f"metrics.json has {len(rows)} rows; missing or different: {missing}"))
    losses, expected = (place / "losses.csv" for place in (folder, reference.folder))
    if losses.read_bytes() != expected.read_bytes():
        faults.append(Fault(DIFFERING, "losses.csv is not the undisturbed run's"))
    for name in ("model_final", "model_best"):
        for file in _COMPARED:
            ours, theirs = folder / name / file, reference.folder / name / file
            if not ours.exists() or ours.read_bytes() != theirs.read_bytes():
                faults.append(Fault(DIFFERING, f"{name}/{file} is not the undisturbed run's"))
    faults += _judge_retention(reference, after, spare=0)
    if after.steps[-reference.max_to_keep :] != reference.steps:
        faults.append(Fault(KEPT, f"{after.steps} are there, the newest are {reference.steps}"))
    linked = set(after.links.values())
    stale = [name for name in after.names if not _EXPECTED_NAMES.fullmatch(name) and name not in linked]
    return faults + [Fault(STALE, f"{name} is left at the end") for name in stale]


def _judge_lines(reference: Reference, files: Files, before: Snapshot) -> list[Fault]:
    """Each line of the history is that of the undisturbed run, from the checkpoint on and one after the other."""
    name, done = before.committed
    lines = reader.trace(files.trace)
    said = re.findall(r"Resuming from (\S+)\.$", files.log.read_text(errors="replace"), re.MULTILINE)
    # Before the pointer names a new checkpoint, a resume says the folder that the link leads to.
    if said and Path(said[0]).name not in (name, before.links.get(name)):
        return [Fault(LOST, f"it says to resume from {said[0]}, the newest is {name or 'none'}")]
    if lines and name and not said:
        return [Fault(LOST, f"it does not say to resume from {name}")]
    for expected, line in enumerate(lines, done + 1):
        if line["iteration"] != expected:
            text = f"iteration {line['iteration']} came where {expected} was due, after {name or 'nothing'}"
            return [Fault(LOST if expected == done + 1 else DIFFERING, text)]
        theirs = reference.lines.get(expected, {})
        if wrong := [key for key in line if line[key] != theirs.get(key)]:  # what follows from it is no news
            return [
                Fault(DIFFERING, f"iteration {expected}, resumed from {name or 'nothing'}: other {', '.join(wrong)}")
            ]
    return []


def _judge_progress(noted: Noted, before: Snapshot, after: Snapshot) -> list[Fault]:
    """What was committed once is never gone again."""
    faults = []
    name, iteration = after.committed
    if iteration < before.committed[1]:
        faults.append(Fault(LOST, f"the newest was {before.committed[0]}, now it is {name or 'none'}"))
    if noted.pointed and name != noted.pointed[-1]:  # killed before it was noted, it can only be a later one
        digits = noted.pointed[-1].rpartition("_")[2]
        if not digits.isdigit() or iteration <= int(digits):
            faults.append(Fault(LOST, f"last_checkpoint was {noted.pointed[-1]}, now the newest is {name or 'none'}"))
    return faults


def _judge_rows(reference: Reference, folder: Path, *, was_stopped: bool) -> list[Fault]:
    """At every moment each row exists at most once, in order, and equals the uninterrupted run's. The last may be torn.

    A run that was stopped has added what it knew of the iteration it was in, and of the one before.
    """
    try:
        rows, _ = reader.metrics(folder)
    except ValueError as error:
        return [Fault(TORN, f"metrics.json has a line within that is torn ({error})")]
    for number, row in enumerate(rows[:-2] if was_stopped else rows):
        if number >= len(reference.rows) or row != reference.rows[number]:
            due = reference.rows[number] if number < len(reference.rows) else "nothing"
            return [Fault(DIFFERING, f"metrics.json: row {number} is {row}, where {due} was due")]
    return []


def _judge_retention(reference: Reference, after: Snapshot, *, spare: int) -> list[Fault]:
    protected = {*after.links.values(), after.committed[0]}
    older = [name for name in after.steps[: -(reference.max_to_keep + spare)] if name not in protected]
    return [Fault(KEPT, f"{', '.join(older)} should be deleted; there are {', '.join(after.steps)}")] if older else []


def _process_of(name: str) -> int:
    match = _TEMPORARY.fullmatch(name)
    return int(match[1]) if match else -1
