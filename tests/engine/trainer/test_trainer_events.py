"""What the Python API does around its steps: evaluations, metrics, schedules, checkpoints, each when it is due."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Trainer, TrainerConfig, TrainingConfig

# B batch, F features, C classes.
INPUTS = torch.randn(50, 6, generator=torch.Generator().manual_seed(5))
LABELS = torch.randint(3, (50,), generator=torch.Generator().manual_seed(6))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, inputs: Tensor) -> Any:
        return self.body(inputs)


class ReturnsLosses(Net):
    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        logits = self.body(inputs)
        return {"logits": logits, "ce_loss": F.cross_entropy(logits, labels), "z_loss": 1e-3 * logits.square().mean()}


class Named:
    """Samples with names."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": INPUTS[index], "labels": LABELS[index]}


PAIRS = TensorDataset(INPUTS, LABELS)


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def config(folder: Path, **settings: Any) -> TrainingConfig:
    given = {
        "dataloader_drop_last": False,
        "lr_scheduler_type": None,
        "save_freq": 0,
        "progress_bar": False,
        **settings,
    }
    return TrainingConfig(output_dir=folder, learning_rate=0.01, **given)


def test_evaluation_is_exact_and_changes_nothing(tmp_path: Path) -> None:
    trainer = Trainer(make(Net), config(tmp_path, eval_batch_size=16), train_dataset=PAIRS, eval_dataset=PAIRS)
    before = torch.get_rng_state()
    results = trainer.evaluate()
    assert torch.equal(before, torch.get_rng_state())
    assert trainer.model.training
    with torch.no_grad():
        logits = trainer.model.eval()(INPUTS)
    assert results["accuracy"] == pytest.approx((logits.argmax(1) == LABELS).sum().item() / 50, rel=1e-7)
    assert results["loss"] == pytest.approx(F.cross_entropy(logits, LABELS).item(), rel=1e-6)  # float32 batches
    assert trainer.evaluate(DataLoader(PAIRS, 50)) == pytest.approx(results)
    assert torch.equal(trainer.predict(INPUTS), logits)


def test_train_returns_the_last_evaluation_and_writes_it(tmp_path: Path, read_rows: Any) -> None:
    trainer = Trainer(make(ReturnsLosses), config(tmp_path, log_steps=3), Named(), Named())
    results = trainer.train()
    assert results == trainer.evaluate()
    rows = read_rows(tmp_path)
    assert [row["iteration"] for row in rows] == [2, 5, 6, 8, 11, 13, 14]
    assert rows[-1]["evaluation/accuracy"] == results["accuracy"]
    assert rows[2]["evaluation/loss"] > results["loss"]
    assert (tmp_path / "metrics.csv").is_file()
    assert next(tmp_path.glob("events.out.tfevents.*"))
    assert TrainingConfig.load_from_yaml(tmp_path / "training_config.yaml") == trainer.config


def test_a_model_without_a_loss_in_evaluation_gives_its_accuracy(tmp_path: Path) -> None:
    class Quiet(ReturnsLosses):
        def forward(self, inputs: Tensor, labels: Tensor) -> Any:
            outputs = super().forward(inputs, labels)
            return outputs if self.training else {"logits": outputs["logits"]}

    trainer = Trainer(make(Quiet), config(tmp_path), Named(), Named())
    assert set(trainer.train()) == {"accuracy"}


def test_the_schedule_runs_over_the_true_number_of_updates(tmp_path: Path) -> None:
    rates: list[float] = []

    class Watching(Trainer):
        def optimization_step(self) -> None:
            rates.append(self.optimizer.param_groups[0]["lr"])
            super().optimization_step()

    settings = {"lr_scheduler_type": "linear", "gradient_accumulation_steps": 3, "warmup_steps": 2}
    trainer = Watching(make(Net), config(tmp_path, **settings), train_dataset=PAIRS)
    trainer.train()
    assert rates == pytest.approx([0.0, 0.005, 0.01, 0.0075, 0.005, 0.0025])
    assert trainer.lr_scheduler.get_last_lr() == [0.0]


def test_evaluations_and_checkpoints_are_due_by_steps_at_the_end_of_their_window(tmp_path: Path) -> None:
    evaluated: list[int] = []

    class Watching(Trainer):
        def evaluate(self, dataset: Any = None) -> dict[str, Any]:
            evaluated.append(self.state.global_step)
            return super().evaluate(dataset)

    settings = {"eval_strategy": "step", "eval_steps": 5, "save_steps": 4, "gradient_accumulation_steps": 3}
    Watching(make(Net), config(tmp_path, **settings), PAIRS, PAIRS).train()
    assert evaluated == [6, 10, 14]  # windows end at 3, 6, 7, 10, 13, 14
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]*"))
    assert names == ["06", "10", "13", "14"]


def test_what_is_set_between_two_trainings_counts_for_the_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path, num_epochs=2, save_freq=1)
    trainer = Trainer(make(Net), settings, PAIRS, PAIRS)
    trainer.inner_training_loop(1)
    events = list(tmp_path.glob("events.out.tfevents.*"))
    settings.tensorboard = None
    settings.print_steps = 7
    trainer.train()
    assert list(tmp_path.glob("events.out.tfevents.*")) == events
    assert capsys.readouterr().out.startswith("epoch=2/2, global_step=14, ")


def test_callbacks_see_loss_and_metric_of_an_evaluation_so_far(tmp_path: Path) -> None:
    from trainwright.hooks import Callback

    class Watching(Callback):
        def on_eval_batch_end(self, batch: Any, logs: Any) -> None:
            seen.append((logs["eval_step_loss"], logs["eval_epoch_loss"], logs["eval_epoch_metric"]))

        def on_eval_end(self, logs: Any) -> None:
            ends.append((logs["eval_epoch_loss"], logs["eval_epoch_metric"]))

    seen: list[tuple[float, ...]] = []
    ends: list[tuple[float, ...]] = []
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    config = TrainingConfig(output_dir=tmp_path, num_epochs=2, progress_bar=False)
    Trainer(nn.Linear(4, 2), config, data, data, callbacks=[Watching()]).train()
    assert len(seen) == 6
    assert seen[0][0] == pytest.approx(seen[0][1])
    assert seen[1][1] == pytest.approx((seen[0][0] + seen[1][0]) / 2)
    assert [epoch[1:] for epoch in seen[2::3]] == [pytest.approx(end) for end in ends]
    tags = events_in(tmp_path)
    assert {"eval_epoch_loss", "eval_epoch_metric", "evaluation/loss", "evaluation/accuracy"} <= tags


def test_the_names_of_the_trainer_config_page_are_in_csv_and_tensorboard(tmp_path: Path) -> None:
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    data = [{"features": x, "labels": int(x[0] > 0)} for x in inputs]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, features: Any, labels: Any = None) -> Any:
            logits = self.layer(features)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    config = TrainerConfig(
        output_dir=tmp_path, task="text_classification", num_epochs=2, batch_size=8, num_dataloader_workers=0,
        progress_bar=False,
    )  # fmt: skip
    trainer = Trainer(Model(), config, data, data)
    trainer.train()
    logs = trainer.load_csv_logs()
    assert logs["step"] == [3.0, 6.0, 6.0]
    assert logs["train.loss"] == logs["total_loss"]
    assert logs["evaluation.accuracy"][-1] == trainer.last_eval_results["accuracy"]
    assert {"train.loss", "total_loss"} <= events_in(tmp_path / "logs")


def events_in(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])
