"""Where processes are, and whether they wait for each other in different calls."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright
from trainwright.parallel.stack_places import (
    Frame,
    apart_message,
    are_apart,
    calls_of_user,
    frames_of,
    frames_of_traceback,
    inner_place,
    is_certain,
    reads_gpu,
    row_of,
    shown_call,
    waits_for_others,
)
from trainwright.stacks import stack_of

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


def test_the_frames_of_a_thread_and_of_an_error() -> None:
    frames = frames_of(stack_of(threading.get_ident()))
    assert "test_the_frames_of_a_thread_and_of_an_error" in [frame.function for frame in frames]
    assert frames[-1].is_of_user or frames[-1].file.startswith("<")
    try:
        torch.zeros(2) @ torch.zeros(3)
    except RuntimeError as error:
        (frame,) = frames_of_traceback(error.__traceback__)
    assert str(frame).startswith("test_stack_places.py:")
    assert frame.is_of_user
    assert shown_call([frame]) == f"`torch.zeros(2) @ torch.zeros(3)` at {frame}"


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


def test_the_calls_of_the_program_do_not_include_its_forward_pass() -> None:
    assert calls_of_user([BROADCAST, SAVE, CALLBACK, STEP, MAIN]) == [CALLBACK, MAIN]
    assert calls_of_user([BROADCAST, *FORWARD, STEP, MAIN]) == [MAIN]
    assert not Frame(threading.__file__, 1, "run").is_of_user


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


def test_processes_in_two_exchanges_may_be_in_a_slow_one_together() -> None:
    sends, receives = row(BROADCAST, CALLBACK, STEP, MAIN), row(BROADCAST, MAIN)
    assert are_apart([sends, receives])
    assert not is_certain([sends, receives])
    assert is_certain([row(SAVE, CALLBACK, STEP, MAIN, meeting="Trainer.save"), receives])
    assert is_certain([sends, row(BACKWARD, STEP, MAIN, iteration=5)])


def test_the_message_names_the_call_its_process_and_where_the_others_are() -> None:
    head, *lines = apart_message([trains, trains, saves, trains]).splitlines()
    assert head.startswith("Only rank 2 has made the call train.py:21 in on_step_end. Every process must do the same")
    assert lines == [
        "  ranks 0, 1, 3: in iteration 6, train.py:50 in <module> (loop.py:120 in train)",
        "  rank 2: in iteration 5, train.py:21 in on_step_end (checkpointer.py:200 in save)",
    ]


def test_the_message_names_what_all_processes_must_come_to() -> None:
    freezes = row(SAVE, STEP, MAIN, meeting="Trainer.save")
    head, first, second = apart_message([freezes, trains]).splitlines()
    assert head.startswith("Only rank 0 has come to Trainer.save: train.py:50 in <module>.")
    assert first == "  rank 0: in iteration 5, train.py:50 in <module>"
    assert second.startswith("  rank 1: in iteration 6,")
    both = apart_message([freezes, row(SAVE, STEP, MAIN, meeting="Trainer.load")])
    assert both.startswith("The processes have made different calls, and wait for each other.")
