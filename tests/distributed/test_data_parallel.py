"""Two processes under torchrun do what one does: the same samples, the same figures, the same weights."""

import time
from pathlib import Path

import pytest
import torch

from tests.distributed.objects_runs import Run
from tests.torchrun import torchrun

HERE = Path(__file__).parent
TRAIN_NET = HERE.parents[1] / "tools" / "train_net.py"
ITERATIONS = 12


def train(folder: Path, *arguments: str, processes: int = 1, config: str = "config.py") -> Run:
    seen = folder.parent / f"{folder.name}-seen-{time.monotonic_ns()}"
    seen.mkdir(parents=True)
    given = ("--config-file", HERE / config, *arguments, f"train.output_dir={folder}")
    done = torchrun(TRAIN_NET, *given, processes=processes, code=None, SEEN_FOLDER=str(seen))
    return Run(done.returncode, done.stdout, folder, seen)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(base: Path) -> Run:
    """One process: 2 micro-batches of 4 make an update of 8."""
    run = train(base / "alone")
    assert run.code == 0, run.output
    return run


@pytest.fixture(scope="module")
def together(base: Path) -> Run:
    """Two processes: a micro-batch of 4 each."""
    run = train(base / "together", processes=2)
    assert run.code == 0, run.output
    return run


def assert_same_weights(a: Run, b: Run) -> None:
    ours, theirs = a.weights("model_final"), b.weights("model_final")
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-5)  # gradients summed in another order


def test_the_samples_of_each_update_are_those_of_one_process(alone: Run, together: Run) -> None:
    assert list(alone.seen()) == list(range(ITERATIONS))
    assert together.seen() == alone.seen()
    assert all(len(numbers) == 8 for numbers in alone.seen().values())
    per_rank = [len((together.seen_folder / f"rank{r}.jsonl").read_text().splitlines()) for r in (0, 1)]
    assert per_rank == [ITERATIONS, ITERATIONS]


def test_no_sample_is_left_out_or_repeated_in_an_epoch(together: Run) -> None:
    stream = sorted(n for i, numbers in together.seen().items() if i < 6 for n in numbers)  # 48 of the first 50
    assert len(set(stream)) == 48


def test_losses_accuracy_and_weights_are_those_of_one_process(alone: Run, together: Run) -> None:
    one, two = alone.rows(), together.rows()
    assert list(one) == list(two) == list(range(ITERATIONS + 1))
    for iteration in range(ITERATIONS):
        assert one[iteration]["total_loss"] == pytest.approx(two[iteration]["total_loss"], rel=1e-4), iteration
        assert one[iteration]["lr"] == two[iteration]["lr"]
    assert one[ITERATIONS]["Acc@1"] == two[ITERATIONS]["Acc@1"]
    assert_same_weights(alone, together)


def test_each_rank_has_a_log_and_only_one_writes_the_rest(together: Run) -> None:
    names = sorted(p.name for p in together.folder.iterdir() if not p.name.startswith("."))
    assert [n for n in names if n.startswith("log")] == ["log.txt", "log.txt.rank1"]
    assert len([n for n in names if n.startswith("events")]) == 1
    assert names.count("metrics.json") == 1


def test_accumulation_on_two_processes_takes_the_samples_of_a_bigger_update(base: Path) -> None:
    sizes = ("train.train_micro_batch_size=2", "train.num_accumulation_steps=2", "train.train_iter=4")
    two = train(base / "accumulate2", *sizes, processes=2)
    one = train(base / "accumulate1", sizes[0], "train.num_accumulation_steps=4", sizes[2])
    assert (two.code, one.code) == (0, 0), two.output + one.output
    assert two.seen() == one.seen()
    assert_same_weights(one, two)
