import json
import math
import os
import signal
import subprocess
import textwrap

import pytest
import torch

from tests.fork_server import python
from trainwright.events import EventStorage, JSONWriter


def rows(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not strict JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def train(path, start, stop, *, state=None, period=4, final=True):
    """A loop with the trainer's calls: write every ``period`` iterations, then the last evaluation."""
    writer = JSONWriter(path, window_size=3)
    with EventStorage(start) as storage:
        if state is not None:
            storage.load_state_dict(state)
        for iteration in range(start, stop):
            storage.iter = iteration
            storage.put_scalar("loss", torch.tensor(float(iteration**2)))
            storage.put_scalar("lr", 1.0 / (iteration + 1), smoothing_hint=False)
            if iteration % 6 == 5:
                storage.put_scalar("acc", float(iteration), smoothing_hint=False)
            if (iteration + 1) % period == 0:
                writer.write()
        if final:
            storage.iter = stop
            storage.put_scalar("acc", 100.0, smoothing_hint=False)
            writer.write()
        writer.close()
        return storage.state_dict()


def test_each_row_is_one_sorted_strict_json_object_with_smoothed_values(tmp_path):
    path = tmp_path / "deep" / "metrics.json"
    train(path, 0, 8)
    assert rows(path) == [
        {"iteration": 3, "loss": 4.0, "lr": 0.25},
        {"iteration": 5, "acc": 5.0},
        {"iteration": 7, "loss": 36.0, "lr": 0.125},
        {"iteration": 8, "acc": 100.0},
    ]
    for line in path.read_text().splitlines():
        assert list(json.loads(line)) == sorted(json.loads(line))


def test_nothing_is_written_before_there_is_something_to_write(tmp_path):
    writer = JSONWriter(tmp_path / "metrics.json")
    with EventStorage():
        writer.write()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_nothing_new_adds_no_row(tmp_path):
    path = tmp_path / "metrics.json"
    writer = JSONWriter(path)
    storage = EventStorage()
    storage.put_scalar("loss", 1.0)
    writer.write(storage)
    writer.write(storage)
    writer.close()
    writer.write(storage)
    storage.step()
    storage.put_scalar("loss", 2.0)
    writer.write(storage)  # opens the file again and appends
    writer.close()
    writer.close()
    assert [row["iteration"] for row in rows(path)] == [0, 1]


def test_nan_and_inf_become_null(tmp_path):
    path = tmp_path / "metrics.json"
    storage = EventStorage()
    storage.put_scalars(a=math.nan, b=math.inf, c=torch.tensor(-math.inf))
    JSONWriter(path).write(storage)
    assert rows(path) == [{"iteration": 0, "a": None, "b": None, "c": None}]


@pytest.mark.parametrize("saved_at", range(1, 20))
@pytest.mark.parametrize("crashed_after", [0, 1, 5])
def test_a_run_resumed_anywhere_leaves_the_file_of_an_uninterrupted_run(tmp_path, saved_at, crashed_after):
    train(tmp_path / "uninterrupted.json", 0, 25)
    path = tmp_path / "metrics.json"
    state = train(path, 0, saved_at, final=False)  # saves a checkpoint ...
    train(path, saved_at, saved_at + crashed_after, state=state, final=False)  # ... and dies later
    with path.open("a") as file:
        file.write('{"acc": 1.0, "iterat')  # while writing a row
    train(path, saved_at, 25, state=state)
    assert path.read_bytes() == (tmp_path / "uninterrupted.json").read_bytes()


def test_a_finished_run_that_goes_on_moves_its_final_evaluation_to_the_end(tmp_path):
    path = tmp_path / "metrics.json"
    state = train(path, 0, 8)
    del state["scalars"]["acc"]
    train(path, 8, 12, state=state)
    assert [row["iteration"] for row in rows(path)] == [3, 5, 7, 11, 12]


def test_torn_and_foreign_lines_are_cut_on_resume(tmp_path):
    path = tmp_path / "metrics.json"
    path.write_text(
        '{"iteration": 1}\n{"iterat\n[1]\n\xff\n{"iteration": 2}\n{"iteration": 3}\n{"iteration": 2', "latin-1"
    )
    storage = EventStorage(3)
    storage.put_scalar("loss", 1.0)
    JSONWriter(path).write(storage)
    assert rows(path) == [{"iteration": 1}, {"iteration": 2}, {"iteration": 3, "loss": 1.0}]


def test_a_whole_last_line_that_lacks_its_line_end_is_kept(tmp_path):
    path = tmp_path / "metrics.json"
    path.write_text('{"iteration": 1}\n{"iteration": 2}')
    storage = EventStorage(3)
    storage.put_scalar("loss", 1.0)
    JSONWriter(path).write(storage)
    assert [row["iteration"] for row in rows(path)] == [1, 2, 3]


def test_a_new_run_keeps_the_file_of_an_earlier_one_beside(tmp_path):
    path = tmp_path / "metrics.json"
    for _ in range(3):
        train(path, 0, 4)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "metrics.json",
        "metrics.json.old",
        "metrics.json.old.1",
    ]
    assert path.read_bytes() == (tmp_path / "metrics.json.old").read_bytes()


def test_one_writer_may_serve_two_runs_in_a_row(tmp_path):
    path = tmp_path / "metrics.json"
    writer = JSONWriter(path)
    for start in (0, 3):
        with EventStorage(start) as storage:
            for iteration in range(start, start + 5):
                storage.iter = iteration
                storage.put_scalar("loss", 1.0)
                writer.write()
            writer.close()
    assert [row["iteration"] for row in rows(path)] == list(range(8))


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_killed_process_leaves_only_whole_rows(tmp_path):
    path = tmp_path / "metrics.json"
    program = textwrap.dedent(
        """
        import sys
        from trainwright.events import EventStorage, JSONWriter
        writer = JSONWriter(sys.argv[1])
        with EventStorage() as storage:
            while True:
                storage.put_scalars(**{f"metric_{i}": 1.0 / (i + 1) for i in range(300)})
                writer.write()
                if storage.iter == 3:
                    print("going", flush=True)
                storage.step()
        """
    )
    process = subprocess.Popen([python(), "-c", program, str(path)], stdout=subprocess.PIPE)
    with process:
        assert process.stdout.readline() == b"going\n"
        process.send_signal(signal.SIGKILL)
    assert path.read_bytes().endswith(b"}\n")
    found = rows(path)
    assert [row["iteration"] for row in found] == list(range(len(found)))
    assert len(found) >= 4


def test_doubled_rows_and_rows_out_of_order_are_one_per_iteration_after_a_resume(tmp_path, caplog):
    path = tmp_path / "metrics.json"
    caplog.set_level("INFO", "trainwright.events")
    lines = ['{"iteration": 2}', '{"iteration": 1, "x": 2}', '{"iteration": 1, "x": 1}', '{"iteration": 9}', "no row"]
    path.write_text("\n".join(lines) + "\n")
    storage = EventStorage(3)
    storage.put_scalar("loss", 1.0)
    JSONWriter(path).write(storage)
    assert rows(path) == [{"iteration": 1, "x": 1}, {"iteration": 2}, {"iteration": 3, "loss": 1.0}]
    message = "removed 1 row from iteration 4 on, to be written again, 1 duplicate row, 1 incomplete line."
    assert message in caplog.text


def test_only_what_was_removed_is_logged_after_a_resume(tmp_path, caplog):
    path = tmp_path / "metrics.json"
    caplog.set_level("INFO", "trainwright.events")
    path.write_text('{"iteration": 2}\n{"iteration": 3}\n{"iteration": 4}\n')
    storage = EventStorage(3)
    storage.put_scalar("loss", 1.0)
    JSONWriter(path).write(storage)
    assert caplog.messages == [f"{path}: removed 2 rows from iteration 4 on, to be written again."]


def test_a_line_that_nests_too_deep_is_cut(tmp_path):
    path = tmp_path / "metrics.json"
    path.write_text('{"iteration": 1}\n{"iteration": 2, "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n" + "[" * 100_000)
    storage = EventStorage(3)
    storage.put_scalar("loss", 1.0)
    JSONWriter(path).write(storage)
    assert rows(path) == [{"iteration": 1}, {"iteration": 3, "loss": 1.0}]
