"""Two processes: one mean over the tokens of both, and NaN on one of them is found by both."""

import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.torchrun import torchrun
from trainwright.checkpoint import verify

HERE = Path(__file__).parent
TRAIN_NET = HERE.parents[1] / "tools" / "train_net.py"


@dataclass
class Run:
    code: int
    output: str
    folder: Path
    seen: Path
    seconds: float

    def samples(self) -> list[list[int]]:
        """Of each update, all ranks together."""
        found: dict[int, list[int]] = {}
        for file in self.seen.glob("rank*.jsonl"):
            for line in file.read_text().splitlines():
                iteration, numbers = json.loads(line)
                found.setdefault(iteration, []).extend(numbers)
        return [found[iteration] for iteration in sorted(found)]

    def rows(self) -> list[dict[str, float | None]]:
        return [json.loads(line) for line in (self.folder / "metrics.json").read_text().splitlines()]

    def checkpoints(self) -> list[str]:
        return sorted(p.name for p in self.folder.glob("model_0*"))


def train(folder: Path, *arguments: str) -> Run:
    seen = folder.with_name(f"{folder.name}-seen")
    seen.mkdir(exist_ok=True)
    start, output = time.monotonic(), f"train.output_dir={folder}"
    config = ("--config-file", HERE / "numbers_project.py")
    done = torchrun(TRAIN_NET, *config, *arguments, output, code=None, SEEN_FOLDER=str(seen))
    return Run(done.returncode, done.stdout, folder, seen, time.monotonic() - start)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.exhaustive(every=2)
def test_the_loss_is_one_mean_over_the_tokens_of_all_processes(
    tmp_path: Path, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("SEEN_FOLDER", str(tmp_path))
    from numbers_project import IGNORED, Language, Sentences

    run = train(tmp_path / "two", f"train.num_accumulation_steps={accumulation}", "train.log_period=1")
    assert run.code == 0, run.output

    data = Sentences(50)
    first = load_file(run.folder / "model_0000003" / "model.safetensors")
    torch.manual_seed(1234)  # train.seed: what the weights are drawn with
    theirs = Language()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.3, momentum=0.9)
    losses, counts = [], []
    for number, picked in enumerate(run.samples()):
        logits = theirs.body(data.inputs[picked]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, data.labels[picked].flatten(), ignore_index=IGNORED)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        counts.append((data.labels[picked] != IGNORED).sum().item())
        if number == 3:
            expected = copy.deepcopy(theirs.state_dict())
    assert len({len(picked) for picked in run.samples()}) == 1
    assert len(set(counts)) > 1
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, rtol=1e-6, atol=1e-12)
    last = load_file(run.folder / "model_final" / "model.safetensors")
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(last[name], value, rtol=1e-6, atol=1e-12)
    rows = run.rows()[:12]
    assert [row["num_tokens"] for row in rows] == pytest.approx(_medians(counts))
    assert [row["total_loss"] for row in rows] == pytest.approx(_medians(losses), rel=1e-6)  # float32 between ranks


def _medians(values: list[float]) -> list[float]:
    from trainwright.events.smoothing import median

    return [median(values[: i + 1]) for i in range(len(values))]


@pytest.mark.parametrize(
    ("spoils", "at", "arguments", "says", "saved"),
    [
        ("loss", 6, (), "Iteration 7: total_loss is nan", 1),
        ("own metric", 6, (), "Iteration 7: aux_loss is nan", 1),
        ("loss", 7, (), "Iteration 8: total_loss is nan", 1),  # the last one before a save
        ("loss", 4 * 2 + 1, ("train.num_accumulation_steps=2",), "Iteration 5: total_loss is nan", 1),
        ("gradient", 6, ("train.log_period=100",), "parameters (body.0.weight, body.1.weight, body.1.bias) are not", 1),
    ],
    ids=["in a period", "seen by one rank", "before a save", "in a window", "gradient"],
)
@pytest.mark.exhaustive(every=3)
def test_what_one_rank_meets_ends_all_of_them(
    tmp_path: Path, spoils: str, at: int, arguments: tuple[str, ...], says: str, saved: int
) -> None:
    run = train(tmp_path / "run", f"model.spoils={spoils}", f"model.at={at}", *arguments)
    assert run.code != 0
    assert run.seconds < 30
    assert says in run.output, run.output
    printed = run.output.count(
        "trainwright: "
    )  # both have said it, with no traceback; or one, and the other that it has
    assert printed >= 1, run.output
    assert printed + run.output.count(", because rank ") == 2, run.output
    assert "Traceback (most recent call last)" not in run.output.partition("torch/distributed")[0], run.output
    assert "exitcode  : 1" in run.output
    assert len(run.checkpoints()) == saved
    verify(run.folder / run.checkpoints()[-1])
    weights = load_file(run.folder / run.checkpoints()[-1] / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.exhaustive
def test_skip_is_agreed_on(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "model.spoils=loss", "model.at=6", "train.non_finite=skip", "train.log_period=1")
    assert run.code == 0, run.output
    assert [row["iteration"] for row in run.rows() if row.get("skipped_update")] == [6]
    assert "Iteration 7: total_loss is nan, loss is nan. Skipped: no weight was changed." in run.output
    weights = load_file(run.folder / "model_final" / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())
