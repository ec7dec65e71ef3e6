"""The Python API on two ranks does what one process with twice the batch does, to the rounding of float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.objects_project import Model, Points
from tests.distributed.objects_runs import TORCHRUN, Run, assert_same_numbers, run
from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import ConfigError

pytestmark = pytest.mark.slow

CONFIG: dict[str, Any] = {"num_epochs": 2, "metrics": ["Accuracy"], "dataloader_drop_last": False}


def both(base: Path, config: dict[str, Any], **said: Any) -> tuple[Run, Run]:
    two = run(base / "two", launcher=TORCHRUN, config={**CONFIG, "batch_size": 4, **config}, **said)
    one = run(base / "one", config={**CONFIG, "batch_size": 8, **config}, **said)
    return one, two


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """42 samples: the last batch of an epoch has 2."""
    return both(tmp_path_factory.mktemp("uneven"), {})


def test_losses_metrics_and_weights_are_those_of_one_process(uneven: tuple[Run, Run]) -> None:
    one, two = uneven
    assert_same_numbers(one, two)
    assert one.seen() == two.seen()
    assert sorted(n for i, numbers in two.seen().items() if i < 6 for n in numbers) == list(range(42))
    assert {iteration: len(numbers) for iteration, numbers in two.seen().items()}[5] == 2
    assert two.found()["consumed"] == 84


def test_steps_get_the_wrapped_model_and_the_user_keeps_his_own(uneven: tuple[Run, Run]) -> None:
    _, two = uneven
    assert {kind for _, _, kind in two.lines()} == {"DistributedDataParallel"}
    first, second = two.found(0), two.found(1)
    assert first == second  # evaluations and predictions, too
    assert (first["model"], first["world_size"], first["accelerate"]) == ("Model", 2, False)


@pytest.mark.exhaustive(every=8)
@pytest.mark.parametrize(
    ("config", "said"),
    [
        # 41 samples: one is left for the last batch, so that the second rank borrows it.
        # The loss of one rank alone is NaN, with finite gradients: both leave that update out.
        ({"gradient_accumulation_steps": 2, "non_finite": "skip"}, {"samples": 41, "model": {"spoils": 31}}),
        ({"gradient_accumulation_steps": 2, "dataloader_drop_last": True}, {"calls_plain_model": True}),
        ({"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}, {"own_step": "helped", "samples": 41}),
        ({"dataloader_drop_last": True}, {"own_step": "bare"}),
        (
            {"eval_batch_size": 4, "num_epochs": 3},
            {"samples": 41, "freeze": True, "model": {"unused": True, "tokens": True}},
        ),
    ],
    ids=[
        "accumulation, a borrowed sample, a spoilt one",
        "whole batches, the plain model",
        "a step of the user's own with the helpers",
        "a bare step of the user's own",
        "tokens, an unused and a frozen layer",
    ],
)
def test_other_ways_to_make_an_update_come_to_the_same(
    tmp_path: Path, config: dict[str, Any], said: dict[str, Any]
) -> None:
    one, two = both(tmp_path, config, **said)
    assert_same_numbers(one, two)
    assert {i: sorted(set(n)) for i, n in one.seen().items()} == {i: sorted(set(n)) for i, n in two.seen().items()}


def test_early_stopping_and_the_best_checkpoint_are_agreed_on(tmp_path: Path) -> None:
    stopping = {"monitor": "eval_epoch_loss", "patience": 1, "mode": "min"}
    config = {"num_epochs": 6, "early_stopping": stopping, "load_best_model_at_end": True, "print_steps": 2}
    one, two = both(tmp_path, config)
    assert_same_numbers(one, two)
    assert max(one.rows()) < 36  # it has stopped
    printed = [[line for line in r.output.splitlines() if line.startswith("epoch=")] for r in (one, two)]
    assert len(printed[0]) == len(printed[1]) > 0
    for ours, theirs in zip(*printed, strict=True):
        if "eval" not in ours:  # the batches of evaluations are counted on one process
            assert ours.split(", ")[:2] == theirs.split(", ")[:2]
            assert numbers_of(ours) == pytest.approx(numbers_of(theirs))
    assert torch.equal(two.weights("saved")["body.0.weight"], two.weights("checkpoints/model_best")["body.0.weight"])
    torch.testing.assert_close(one.weights("saved"), two.weights("saved"), rtol=0, atol=1e-10)


def numbers_of(line: str) -> list[float]:
    return [float(part.partition("=")[2]) for part in line.split(", ")[2:]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """With dropout, which each rank draws by itself."""
    base = tmp_path_factory.mktemp("whole")
    return run(base / "whole", launcher=TORCHRUN, config=RESUMABLE, model={"dropout": 0.3})


def test_max_time_stops_two_processes_at_the_same_iteration(tmp_path: Path, uneven: tuple[Run, Run]) -> None:
    config = {**CONFIG, "batch_size": 4, "resume_from_checkpoint": True}
    first = run(tmp_path / "run", launcher=TORCHRUN, config={**config, "max_time": 1e-6}, part="first")
    rest = run(tmp_path / "run", launcher=TORCHRUN, config=config, part="rest")
    assert (first.code, rest.code) == (0, 0), first.output + rest.output
    assert list(first.seen()) == [0]
    assert first.seen() | rest.seen() == uneven[1].seen()
    assert torch.equal(rest.weights()["body.0.weight"], uneven[1].weights()["body.0.weight"])


RESUMABLE = {**CONFIG, "batch_size": 4, "num_epochs": 4, "save_steps": 5, "resume_from_checkpoint": True}


def test_a_run_of_two_processes_that_is_killed_goes_on_bit_for_bit(tmp_path: Path, whole: Run) -> None:
    said = {"launcher": TORCHRUN, "config": RESUMABLE, "model": {"dropout": 0.3}}
    killed = run(tmp_path / "run", **said, kill_at=8)
    assert killed.code != 0
    again = run(tmp_path / "run", **said, part="again")
    assert (whole.code, again.code) == (0, 0), again.output
    first = min(again.seen())
    assert 5 <= first <= 9, "it goes on from a checkpoint, not from the beginning"
    assert again.seen() == {i: numbers for i, numbers in whole.seen().items() if i >= first}
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (again.folder / "final_epoch" / name).read_bytes() == (whole.folder / "final_epoch" / name).read_bytes()
    kept = [
        [{k: v for k, v in row.items() if k not in ("time", "data_time")} for row in r.rows().values()]
        for r in (whole, again)
    ]
    assert kept[0] == kept[1]


def test_a_given_loader_shares_its_samples_out_by_itself(tmp_path: Path) -> None:
    two = run(tmp_path / "two", launcher=TORCHRUN, config={**CONFIG, "batch_size": 4}, given_loader=True)
    assert two.code == 0, two.output
    torch.manual_seed(0)
    model, data, held_out = Model(), Points(42, 0), Points(19, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for iteration, numbers in two.seen().items():
        optimizer.param_groups[0]["lr"] = two.rows()[iteration]["lr"]
        F.cross_entropy(model.body(data.inputs[numbers]), data.labels[numbers]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sorted(n for i, ns in two.seen().items() if i < 6 for n in ns) == list(range(42))
    for name, value in two.weights().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=1e-10)
    expected = F.cross_entropy(model.body(held_out.inputs), held_out.labels).item()  # each sample once, in 5 batches
    assert two.found()["results"]["loss"] == pytest.approx(expected, abs=1e-10)


def test_several_processes_cannot_share_one_gpu_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"device_str: got 'cuda:1', .*2 processes.*'cuda'"):
        Trainer(torch.nn.Linear(2, 2), TrainingConfig(output_dir=str(tmp_path), device_str="cuda:1"), [1, 2])


def test_distributed_in_one_process_says_how_to_start_several(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = TrainingConfig(output_dir=str(tmp_path), distributed=True)
    Trainer(torch.nn.Linear(2, 2), config, list(range(16)))
    assert [r.message for r in caplog.records if "torchrun --nproc-per-node" in r.message]
