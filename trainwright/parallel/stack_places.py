"""Where the main thread of each process is: in which call of the user's code, and whether none of them can continue."""

import linecache
import os
import re
import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")
_MODULE_CALL = os.path.join(_TORCH, "nn", "modules", "module.py")
# Functions that wait until the GPU has done what was asked of it.
_READS = ((_OURS, "to_numbers"), (_TORCH, "synchronize"), (_TORCH, "_maybe_opt_step"))

EVERY_PROCESS = "Every process must do the same, not only where `if is_main_process()` or another condition holds."


class Frame(NamedTuple):
    """A call that has not returned."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"

    @property
    def is_of_user(self) -> bool:
        """Whether it is code of the user's program, or of a package that is neither torch nor ours."""
        is_stdlib = self.file.startswith(_STDLIB) and not _PACKAGES.search(self.file)
        return not (is_stdlib or self.file.startswith((_TORCH, _OURS, "<")))


def frames_of(stack: Iterable[str]) -> list[Frame]:
    """The frames of a stack of :func:`trainwright.base.stacks.stack_of`, the innermost first."""
    found = (_FRAME.match(line) for line in stack)
    return [Frame(match[1], int(match[2]), match[3]) for match in found if match]


def frames_of_traceback(trace: TracebackType | None) -> list[Frame]:
    """The frames of an error, the innermost first."""
    frames: list[Frame] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.insert(0, Frame(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return frames


def place_below(trace: TracebackType | None) -> Frame | None:
    """The innermost code of the user that the library has called when the error came; None if there is none."""
    frames = frames_of_traceback(trace)
    outermost = max((place for place, frame in enumerate(frames) if frame.file.startswith(_OURS)), default=0)
    return next((frame for frame in frames[:outermost] if frame.is_of_user), None)


def waits_for_others(frames: Iterable[Frame]) -> bool:
    """Whether a thread is in a collective call: in torch.distributed, or in a backward pass, which averages."""
    for frame in frames:
        if frame.file.startswith(os.path.join(_TORCH, "distributed")) or frame.function == "_engine_run_backward":
            return True
        if not frame.file.startswith(_TORCH):
            return False
    return False


def reads_gpu(frames: Sequence[Frame]) -> bool:
    """Whether a thread waits until its GPU has done what was asked of it, such as to exchange with other processes."""
    inner = frames[:2]  # one of them may be a generator expression
    return any(frame.file.startswith(root) and frame.function == name for frame in inner for root, name in _READS)


def inner_place(frames: Iterable[Frame]) -> str:
    """The innermost place outside torch: "train.py:21 in forward"."""
    return next((str(frame) for frame in frames if not frame.file.startswith(_TORCH)), "an unknown place")


def calls_of_user(frames: Sequence[Frame]) -> list[Frame]:
    """The calls that the user's program has made, the innermost first, without those of a forward pass."""
    calls = [place for place, frame in enumerate(frames) if frame.file == _MODULE_CALL]
    return [frame for frame in frames[calls[-1] if calls else 0 :] if frame.is_of_user]


def shown_call(calls: Sequence[Frame]) -> str:
    """The innermost call of ``calls`` as its source has it: "`trainer.save(path)` at train.py:21 in on_step_end"."""
    if not calls:
        return "a call at an unknown place"
    source = linecache.getline(calls[0].file, calls[0].line).strip()
    return f"`{source:.80}` at {calls[0]}" if source else str(calls[0])


def row_of(
    frames: Sequence[Frame], *, meeting: str, iteration: int | None, where: str, is_idle: bool, by_user: bool
) -> dict[str, Any]:
    """What a process that stays at one place reports of it, for :func:`are_apart`; JSON.

    Args:
        meeting: the call for which it waits for the others, if it does.
        by_user: processes may be in different functions of the library, as the stages of a pipeline are.
    """
    calls = calls_of_user(frames)
    path = calls if by_user else [frame for frame in frames if not frame.file.startswith(_TORCH)]
    return {
        "path": zlib.crc32(repr((meeting, path)).encode()),
        "calls": zlib.crc32(repr((meeting, calls)).encode()),
        "depth": len(calls),
        "meeting": meeting,
        "waits": bool(meeting) or waits_for_others(frames),
        "idle": is_idle,
        "iteration": iteration,
        "where": where,
        "call": shown_call(calls),
        "place": meeting or inner_place(frames),
    }


def are_apart(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether processes that all stay at one place wait for each other in different calls, so that none can continue.

    A process that computes, reads or writes may come later. Not so where all wait, without using the processor, as
    they do during a long exchange; nor where one waits in a call that another one has passed.
    """
    if len({row["path"] for row in rows}) > 1 and all(row["waits"] and row["idle"] for row in rows):
        return True
    return any(_has_passed(other, row) for row in rows if row["waits"] for other in rows)


def is_certain(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether processes that are apart cannot be in one slow exchange that they have entered in different lines."""
    return any(row["meeting"] for row in rows) or any(_has_passed(other, row) for row in rows for other in rows)


def _has_passed(other: dict[str, Any], row: dict[str, Any]) -> bool:
    is_later = None not in (other["iteration"], row["iteration"]) and other["iteration"] > row["iteration"]
    return is_later and other["calls"] != row["calls"]


def apart_message(rows: Sequence[dict[str, Any]]) -> str:
    """Which processes are alone in which call, and where the others are."""
    met = {row["meeting"] for row in rows} - {""}
    deepest = max(row["depth"] for row in rows)
    is_alone = [row["meeting"] != "" if len(met) == 1 else row["depth"] == deepest for row in rows]
    alone = [rank for rank, is_one in enumerate(is_alone) if is_one]
    if len(alone) < len(rows):
        row = rows[alone[0]]
        what = f"has come to {row['meeting']}: {row['call']}" if row["meeting"] else f"has made the call {row['call']}"
        head = f"Only {shown_ranks(alone)} {what}. {EVERY_PROCESS}"
    else:
        head = f"The processes have made different calls, and wait for each other. {EVERY_PROCESS}"
    found: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        inner = "" if row["meeting"] or row["call"].endswith(row["place"]) else f" ({row['place']})"
        found.setdefault(f"{row['where'].strip() or 'outside of a training'}, {row['call']}{inner}", []).append(rank)
    lines = [f"  {shown_ranks(ranks)}: {text}" for text, ranks in found.items()]
    return "\n".join([f"{head} The job ends, because none of them can continue:", *lines])


def shown_ranks(ranks: Sequence[int]) -> str:
    """
    >>> shown_ranks([3]), shown_ranks([0, 2]), shown_ranks([0, 2, 3, 4, 5])
    ('rank 3', 'ranks 0, 2', 'ranks 0, 2 to 5')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
