import csv
import math

import pytest

from trainwright.events import CSVWriter, EventStorage


def table(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def train(path, start, stop, *, state=None):
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
    train(tmp_path / "metrics.csv", 0, 5)
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
    train(tmp_path / "uninterrupted.csv", 0, 8)
    path = tmp_path / "metrics.csv"
    state = train(path, 0, saved_at)
    train(path, saved_at, saved_at + 1, state=state)
    with path.open("a") as file:
        file.write("2,1.2")  # torn while writing
    train(path, saved_at, 8, state=state)
    # A column that the cut rows had brought may already be there; the rows are the same.
    assert path.read_bytes() == (tmp_path / "uninterrupted.csv").read_bytes()


def test_a_new_run_keeps_the_table_of_an_earlier_one_beside(tmp_path):
    for _ in range(2):
        train(tmp_path / "metrics.csv", 0, 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["metrics.csv", "metrics.csv.old"]


def test_a_foreign_table_is_never_cut(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,loss\n1,2\n")
    train(path, 3, 4)
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


def test_the_constructor_and_an_empty_storage_create_nothing(tmp_path):
    writer = CSVWriter(tmp_path / "metrics.csv")
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
