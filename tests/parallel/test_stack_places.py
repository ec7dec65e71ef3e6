"""Where processes are, and whether they wait for each other in different calls."""

from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright
from trainwright.parallel.stack_places import (
    Frame,
    apart_message,
    are_apart,
    inner_place,
    reads_gpu,
    row_of,
    waits_for_others,
)

TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(trainwright.__file__).parent)
BACKWARD = Frame(f"{TORCH}/autograd/graph.py", 800, "_engine_run_backward")
BROADCAST = Frame(f"{TORCH}/distributed/distributed_c10d.py", 3000, "broadcast")
STEP = Frame(f"{OURS}/engine/loop.py", 120, "train")
SAVE = Frame(f"{OURS}/checkpoint/checkpointer.py", 200, "save")
MAIN, CALLBACK = Frame("/project/train.py", 50, "<module>"), Frame("/project/train.py", 21, "on_step_end")
FORWARD = [Frame("/project/model.py", 9, "forward"), Frame(f"{TORCH}/nn/modules/module.py", 1700, "_call_impl")]


def row(*frames: Frame, iteration: int | None = 4, meeting: str = "", idle: bool = True, by_user: bool = False) -> Any:
    where = "" if iteration is None else f" in iteration {iteration + 1}"
    return row_of(frames, meeting=meeting, iteration=iteration, where=where, is_idle=idle, by_user=by_user)


saves = row(BROADCAST, SAVE, CALLBACK, STEP, MAIN)
trains = row(BACKWARD, STEP, MAIN, iteration=5)


def test_what_waits_for_its_gpu() -> None:
    logged = Frame(f"{OURS}/events/storage.py", 56, "to_numbers")
    scaled = Frame(f"{TORCH}/amp/grad_scaler.py", 380, "_maybe_opt_step")
    assert reads_gpu([logged, STEP, MAIN])
    assert reads_gpu([Frame(f"{TORCH}/amp/grad_scaler.py", 379, "<genexpr>"), scaled, STEP])
    assert reads_gpu([Frame(f"{TORCH}/cuda/__init__.py", 1085, "synchronize"), CALLBACK])
    assert not reads_gpu([])
    assert not reads_gpu([CALLBACK, STEP, logged])
    assert not reads_gpu([Frame("/project/train.py", 3, "to_numbers"), STEP])


def test_what_waits_and_where() -> None:
    assert waits_for_others([BACKWARD, STEP])
    assert waits_for_others([Frame(f"{TORCH}/_tensor.py", 1, "to"), BROADCAST, SAVE])
    assert not waits_for_others([MAIN, BROADCAST])
    assert not waits_for_others([Frame(f"{TORCH}/nn/functional.py", 1, "linear"), *FORWARD])
    assert inner_place([BROADCAST, SAVE, MAIN]) == "checkpointer.py:200 in save"
    assert inner_place([]) == "an unknown place"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([saves, trains], True),
        ([saves, saves], False),  # a long exchange
        ([saves, row(SAVE, CALLBACK, STEP, MAIN)], False),  # writes a file
        ([saves, row(Frame("/project/data.py", 3, "read"), STEP, MAIN)], False),  # comes later
        ([saves, row(BACKWARD, STEP, MAIN, idle=False)], False),  # computes
        ([saves, row(BACKWARD, STEP, MAIN, idle=False, iteration=5)], True),  # has passed
        ([saves, saves, trains], True),
        ([saves, row(MAIN, iteration=None)], False),
        ([row(BACKWARD, STEP, MAIN), row(BROADCAST, SAVE, STEP, MAIN)], True),
        ([row(BACKWARD, STEP, MAIN, by_user=True), row(BROADCAST, SAVE, STEP, MAIN, by_user=True)], False),
        ([row(SAVE, CALLBACK, MAIN, meeting="save"), row(SAVE, CALLBACK, MAIN, meeting="load")], True),
    ],
    ids=["alone", "together", "writes", "reads", "computes", "passed", "three", "after", "library", "stages", "meet"],
)
def test_processes_are_apart_only_if_none_can_go_on(rows: list[Any], expected: bool) -> None:
    assert are_apart(rows) is expected


def test_the_message_names_the_call_its_process_and_where_the_others_are() -> None:
    head, *lines = apart_message([trains, trains, saves, trains]).splitlines()
    assert head.startswith("Only rank 2 has made the call train.py:21 in on_step_end. Every process must do the same")
    assert lines == [
        "  ranks 0, 1, 3: in iteration 6, train.py:50 in <module> (loop.py:120 in train)",
        "  rank 2: in iteration 5, train.py:21 in on_step_end (checkpointer.py:200 in save)",
    ]
