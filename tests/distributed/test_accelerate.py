"""`accelerate launch` and a given Accelerator: the same numbers as without."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.distributed.objects_project import Model, Points
from tests.distributed.objects_runs import ACCELERATE, assert_same_numbers, run
from tests.toys import assert_equal_weights, quiet
from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import ConfigError, ConfigTypeError

accelerate = pytest.importorskip("accelerate")

CONFIG: dict[str, Any] = {"num_epochs": 2, "metrics": ["Accuracy"], "dataloader_drop_last": False}


@pytest.fixture
def fresh() -> Iterator[None]:
    """An Accelerator's settings are those of the process; the next test may want others."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_processes_of_accelerate_launch_come_to_the_numbers_of_one(tmp_path: Path) -> None:
    config = {**CONFIG, "gradient_accumulation_steps": 2}
    one = run(tmp_path / "one", config={**config, "batch_size": 8})
    two = run(tmp_path / "two", launcher=ACCELERATE, config={**config, "batch_size": 4, "distributed": True})
    assert_same_numbers(one, two)
    assert (two.found()["world_size"], two.found()["accelerate"]) == (2, False)

    # The Accelerator says 2 as well, and the configuration nothing.
    given = {"gradient_accumulation_steps": 2}
    three = run(tmp_path / "three", launcher=ACCELERATE, config={**CONFIG, "batch_size": 4}, accelerator=given)
    assert_same_numbers(one, three)
    assert {kind for _, _, kind in three.lines()} == {"DistributedDataParallel"}
    assert (three.found()["model"], three.found()["accelerate"]) == ("Model", True)


def trained(folder: Path, accelerator: Any = None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    config = quiet(folder, **{"batch_size": 8, "lr_scheduler_type": "linear", **CONFIG, **settings})
    trainer = Trainer(Model(dropout=0.2), config, Points(42, 0), Points(19, 1), accelerator=accelerator)
    trainer.train()
    return trainer


@pytest.mark.exhaustive(every=9)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.usefixtures("fresh")
@pytest.mark.slow
def test_in_one_process_an_accelerator_changes_no_bit(tmp_path: Path, precision: str, accumulation: int) -> None:
    settings = {"mixed_precision": precision, "gradient_accumulation_steps": accumulation}
    plain = trained(tmp_path / "plain", **settings)
    given = trained(tmp_path / "given", accelerate.Accelerator(cpu=True, **settings))
    assert given.config.gradient_accumulation_steps == accumulation
    assert (given.config.mixed_precision or "no") == precision
    assert_equal_weights(plain.model, given.model)
    assert plain.evaluate() == given.evaluate()
    assert given.run.placement.model is given.model


@pytest.mark.usefixtures("fresh")
def test_a_run_goes_on_with_an_accelerator_and_without(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    whole = trained(tmp_path / "whole", num_epochs=3, lr_scheduler_type=None)
    trained(tmp_path / "parts", accelerator, num_epochs=1, lr_scheduler_type=None)
    trained(tmp_path / "parts", num_epochs=2, resume_from_checkpoint=True, lr_scheduler_type=None)
    last = trained(tmp_path / "parts", accelerator, num_epochs=3, resume_from_checkpoint=True, lr_scheduler_type=None)
    assert last.start_iter == last.max_iter
    assert_equal_weights(whole.model, last.model)


@pytest.mark.usefixtures("fresh")
def test_a_step_of_the_users_own_may_use_the_accelerator(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    seen = []

    class Own(Trainer):
        def training_step(self, batch: Any) -> Any:
            loss = self.compute_loss(self.model, batch)
            self.accelerator.backward(loss)
            seen.append(self.accelerator.sync_gradients)
            return loss.detach()

    model = Model()
    trainer = Own(model, quiet(tmp_path, batch_size=8, num_epochs=1), Points(48, 0), accelerator=accelerator)
    before = model.body[0].weight.clone()
    trainer.train()
    assert seen == [False, False, True] * 2
    assert not torch.equal(before, model.body[0].weight)


@pytest.mark.usefixtures("fresh")
def test_what_contradicts_the_accelerator_is_one_error(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    config = TrainingConfig(output_dir=str(tmp_path), mixed_precision="bf16", gradient_accumulation_steps=4, graph=True)
    with pytest.raises(ConfigError) as raised:
        Trainer(Model(), config, Points(8, 0), accelerator=accelerator)
    message = str(raised.value)
    assert "mixed_precision: got 'bf16', but the passed Accelerator has mixed_precision='no'" in message
    assert "gradient_accumulation_steps: got 4, but the passed Accelerator has gradient_accumulation_steps=2" in message
    assert "dynamo_backend" in message


def test_something_else_is_no_accelerator(tmp_path: Path) -> None:
    config = TrainingConfig(output_dir=str(tmp_path))
    with pytest.raises(ConfigTypeError, match=r"Trainer.accelerator: got str.*accelerate.Accelerator"):
        Trainer(Model(), config, Points(8, 0), accelerator="auto")


def test_a_precision_that_only_the_launcher_names_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    data = TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.long))
    Trainer(torch.nn.Linear(2, 2), TrainingConfig(output_dir=str(tmp_path)), data)
    assert "--mixed_precision bf16, but TrainingConfig.mixed_precision=None is used" in caplog.text
