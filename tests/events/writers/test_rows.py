import csv
import errno
import json
import math
import os

import pytest
import torch

from trainwright.events import CSVWriter, EventStorage, JSONWriter
from trainwright.events.writers.rows import LossWriter, RowFile
from trainwright.events.writers.tensorboard import TensorBoardWriter


def test_a_block_that_cannot_be_written_whole_leaves_no_trace(tmp_path, monkeypatch):
    file = RowFile(tmp_path / "rows")
    file.append(b"first\n")
    real_write = os.write

    def full_disk(descriptor, block):
        if len(block) <= 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, block[:4])

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full_disk)
        with pytest.raises(OSError, match="No space"):
            file.append(b"second\n")
    assert file.path.read_bytes() == b"first\n"
    file.append(b"third\n")
    assert file.path.read_bytes() == b"first\nthird\n"
    file.close()
    file.close()


def test_a_failed_replacement_leaves_the_old_file_and_nothing_beside(tmp_path, monkeypatch):
    file = RowFile(tmp_path / "rows")
    file.append(b"first\n")

    def broken(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", broken)
        with pytest.raises(OSError, match="Input/output"):
            file.replace(b"")
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows"]
    assert file.path.read_bytes() == b"first\n"


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


def test_a_finished_run_that_goes_on_moves_its_final_evaluation_to_the_end(tmp_path, caplog):
    path = tmp_path / "metrics.json"
    caplog.set_level("INFO", "trainwright.events")
    state = train(path, 0, 8)
    del state["scalars"]["acc"]
    train(path, 8, 12, state=state)
    assert "removed 1 row from iteration 9 on" in caplog.text
    assert [row["iteration"] for row in rows(path)] == [3, 5, 7, 11, 12]


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"iteration": 1}\n{"iterat\n[1]\n\xff\n{"iteration": 2}\n{"iteration": 3}\n{"iteration": 2', [1, 2]),
        ('{"iteration": 1}\n{"iteration": 2}', [1, 2]),  # a complete last line that lacks its line end
        ('{"iteration": 1}\n{"iteration": 2, "x": ' + DEEP + "]" * 100_000 + "}\n" + DEEP, [1]),
    ],
    ids=["torn and foreign", "no line end", "too deep"],
)
def test_only_complete_rows_before_the_resumed_iteration_are_kept(tmp_path, text, kept):
    path = tmp_path / "metrics.json"
    path.write_text(text, "latin-1")
    storage = EventStorage(3)
    storage.put_scalar("loss", 1.0)
    JSONWriter(path).write(storage)
    assert rows(path) == [*({"iteration": iteration} for iteration in kept), {"iteration": 3, "loss": 1.0}]


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


def test_doubled_rows_and_rows_out_of_order_are_one_per_iteration_after_a_resume(tmp_path, caplog):
    path = tmp_path / "metrics.json"
    caplog.set_level("INFO", "trainwright.events")
    lines = ['{"iteration": 2}', '{"iteration": 1, "x": 2}', '{"iteration": 1, "x": 1}', '{"iteration": 9}', "no row"]
    path.write_text("\n".join(lines) + "\n")
    storage = EventStorage(3)
    storage.put_scalar("loss", 1.0)
    JSONWriter(path).write(storage)
    assert rows(path) == [{"iteration": 1, "x": 1}, {"iteration": 2}, {"iteration": 3, "loss": 1.0}]
    message = "removed 1 row from iteration 10 on, to be written again, 1 duplicate row, 1 incomplete line."
    assert message in caplog.text


def table(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def train_table(path, start, stop, *, state=None):
    writer = CSVWriter(path)
    with EventStorage(start) as storage:
        if state is not None:
            storage.load_state_dict(state)
        for iteration in range(start, stop):
            storage.iter = iteration
            storage.put_scalar("loss", 0.5 * iteration, smoothing_hint=False)
            if iteration >= 3:
                storage.put_scalar("acc", iteration, smoothing_hint=False)
            writer.write()
        writer.close()
        return storage.state_dict()


def test_a_new_metric_adds_a_column_and_leaves_earlier_cells_empty(tmp_path):
    train_table(tmp_path / "metrics.csv", 0, 5)
    assert table(tmp_path / "metrics.csv") == [
        ["iteration", "loss", "acc"],
        ["0", "0.0", ""],
        ["1", "0.5", ""],
        ["2", "1.0", ""],
        ["3", "1.5", "3.0"],
        ["4", "2.0", "4.0"],
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.csv"]


@pytest.mark.parametrize("saved_at", range(1, 7))
def test_a_resumed_run_leaves_the_table_of_an_uninterrupted_run(tmp_path, saved_at):
    train_table(tmp_path / "uninterrupted.csv", 0, 8)
    path = tmp_path / "metrics.csv"
    state = train_table(path, 0, saved_at)
    train_table(path, saved_at, saved_at + 1, state=state)
    with path.open("a") as file:
        file.write("2,1.2")  # torn while writing
    train_table(path, saved_at, 8, state=state)
    # A column that the cut rows had brought may already be there; the rows are the same.
    assert path.read_bytes() == (tmp_path / "uninterrupted.csv").read_bytes()


def test_a_foreign_table_is_never_cut(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,loss\n1,2\n")
    train_table(path, 3, 4)
    assert (tmp_path / "metrics.csv.old").read_text() == "epoch,loss\n1,2\n"
    assert table(path) == [["iteration", "acc", "loss"], ["3", "3.0", "1.5"]]


def test_values_are_exact_and_odd_names_survive(tmp_path):
    path = tmp_path / "metrics.csv"
    storage = EventStorage()
    storage.put_scalars(**{"a,b": 0.1 + 0.2, 'q"': math.nan, "i": math.inf})
    CSVWriter(path).write(storage)
    header, row = table(path)
    assert header == ["iteration", "a,b", "i", 'q"']
    assert float(row[1]) == 0.1 + 0.2
    assert float(row[2]) == math.inf
    assert math.isnan(float(row[3]))


@pytest.mark.parametrize("kind", [JSONWriter, CSVWriter, TensorBoardWriter])
def test_the_constructor_and_an_empty_storage_create_nothing(tmp_path, kind):
    writer = kind(tmp_path / "metrics")
    writer.write(EventStorage())
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_doubled_and_odd_rows_are_cut_on_resume(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(f"iteration,x\n2,5\n\n1,3\n1,4\n{'9' * 5000},1\n²,1\n")
    storage = EventStorage(3)
    storage.put_scalar("x", 1.0)
    CSVWriter(path).write(storage)
    assert table(path) == [["iteration", "x"], ["1", "4"], ["2", "5"], ["3", "1.0"]]


def test_a_table_with_a_field_of_megabytes_is_kept_beside(tmp_path):
    path = tmp_path / "metrics.csv"
    content = "iteration,x\n1," + "5" * 1_000_000 + "\n"
    path.write_text(content)
    storage = EventStorage(3)
    storage.put_scalar("x", 1.0)
    CSVWriter(path).write(storage)
    assert table(path) == [["iteration", "x"], ["3", "1.0"]]
    assert (tmp_path / "metrics.csv.old").read_text() == content


def write_losses(path, start, end, every=2, losses=lambda iteration: 1 / (iteration + 3)):
    writer = LossWriter(path)
    with EventStorage(start) as storage:
        for iteration in range(start, end):
            storage.iter = iteration
            storage.put_scalar("total_loss", losses(iteration))
            if (iteration + 1) % every == 0:
                writer.write(storage)
        writer.write(storage)
    writer.close()


def losses_of(path):
    lines = path.read_text().splitlines()
    return [(int(row["iteration"]), float(row["total_loss"])) for row in csv.DictReader(lines)]


def test_losses_csv_has_every_loss_exactly(tmp_path):
    write_losses(tmp_path / "losses.csv", 0, 7, every=3)
    assert losses_of(tmp_path / "losses.csv") == [(at, 1 / (at + 3)) for at in range(7)]
    write_losses(tmp_path / "other.csv", 0, 2, losses=lambda iteration: math.nan if iteration else math.inf)
    assert (tmp_path / "other.csv").read_text().splitlines()[1:] == ["0,inf", "1,nan"]


@pytest.mark.parametrize("again", [0, 3, 6])
def test_a_resume_replaces_the_losses_that_it_repeats(tmp_path, again):
    path = tmp_path / "losses.csv"
    write_losses(path, 0, 7)
    with path.open("a") as file:
        file.write("garbage\n,\n7,0.12")  # of a crash
    write_losses(path, again, 9, losses=float)
    assert losses_of(path) == [(at, 1 / (at + 3) if at < again else float(at)) for at in range(9)]
    assert (tmp_path / "losses.csv.old").exists() == (again == 0)


@pytest.mark.parametrize("moves", ["file", "folder"])
@pytest.mark.parametrize("kind", [JSONWriter, CSVWriter, LossWriter, TensorBoardWriter])
def test_a_file_that_is_deleted_or_moved_during_a_run_is_made_again_with_a_warning(tmp_path, caplog, kind, moves):
    folder = tmp_path / "run"
    writer = kind(folder if kind is TensorBoardWriter else folder / "rows")
    with EventStorage() as storage:
        for iteration in range(4):
            storage.iter = iteration
            storage.put_scalar("total_loss", float(iteration), smoothing_hint=False)
            writer.write(storage)
            if iteration == 1:
                (path,) = folder.iterdir()
                path.unlink() if moves == "file" else folder.rename(tmp_path / "moved")
    writer.close()
    (path,) = folder.iterdir()
    if kind is JSONWriter:
        assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [2, 3]
    elif kind is not TensorBoardWriter:
        assert path.read_text() == "iteration,total_loss\n2,2.0\n3,3.0\n"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert str(folder) in warning
    assert "deleted or moved" in warning
