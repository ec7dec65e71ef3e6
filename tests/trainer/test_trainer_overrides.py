"""Every point where a user may change the Python API is called, as the documents say, and changes what it says."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks import on_ranks
from tests.toys import Samples, assert_equal_weights, pairs, pairs_net, quiet
from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.hooks import Callback

# B batch, F features, C classes.
PAIRS = pairs()
INPUTS, LABELS = PAIRS.tensors


def config(folder: Path, **settings: Any) -> TrainingConfig:
    return quiet(folder, **{"learning_rate": 0.01, "dataloader_drop_last": False, **settings})


def trained(kind: type[Trainer], folder: Path, **settings: Any) -> Trainer:
    trainer = kind(pairs_net(), config(folder, **settings), PAIRS, PAIRS)
    trainer.train()
    return trainer


def rows_of(read_rows: Any, folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.json without what a clock says."""
    return [{k: v for k, v in row.items() if "time" not in k and k != "eta_seconds"} for row in read_rows(folder)]


def test_an_inner_training_loop_around_ours_sees_each_epoch(tmp_path: Path, read_rows: Any) -> None:
    seen: list[tuple[int, int, float]] = []

    class Mine(Trainer):
        def inner_training_loop(self, epoch_num: int) -> dict[str, float]:
            results = super().inner_training_loop(epoch_num)
            seen.append((epoch_num, self.state.global_step, results["loss"]))
            return results

    plain = trained(Trainer, tmp_path / "plain", num_epochs=3, log_steps=1)
    mine = trained(Mine, tmp_path / "mine", num_epochs=3, log_steps=1)
    assert_equal_weights(mine.model, plain.model)
    assert rows_of(read_rows, tmp_path / "mine") == rows_of(read_rows, tmp_path / "plain")
    losses = [loss for loss, _ in plain.storage.history("total_loss").values()]
    assert [(epoch, step) for epoch, step, _ in seen] == [(1, 7), (2, 14), (3, 21)]
    for epoch, _, loss in seen:  # since the run began, not of the epoch
        assert loss == pytest.approx(sum(losses[: 7 * epoch]) / (7 * epoch))


def test_an_inner_training_loop_of_ones_own_is_an_epoch(tmp_path: Path) -> None:
    class Mine(Trainer):
        def inner_training_loop(self, epoch_num: int) -> dict[str, float]:
            for batch in self.create_train_dataloader(self.train_dataset):
                self.training_step(self.prepare_input_batch(batch))
                self.optimization_step()
            return {}

    plain = trained(Trainer, tmp_path / "plain", num_epochs=3)
    mine = trained(Mine, tmp_path / "mine", num_epochs=3)
    assert_equal_weights(mine.model, plain.model)
    assert mine.last_eval_results == plain.last_eval_results
    assert (mine.epoch, mine.state.global_step) == (3, 21)
    for name in ("epoch_1", "epoch_2", "epoch_3", "final_epoch"):
        here, there = ((tmp_path / run / name).resolve().name for run in ("mine", "plain"))
        assert here == there


def test_one_epoch_can_be_trained_by_a_call(tmp_path: Path) -> None:
    trainer = Trainer(pairs_net(), config(tmp_path / "calls"), PAIRS)
    trainer.inner_training_loop(1)
    assert trainer.state.global_step == 7
    trainer.train()
    assert_equal_weights(trainer.model, trained(Trainer, tmp_path / "plain").model)


def test_evaluate_is_called_with_what_it_takes(tmp_path: Path) -> None:
    calls: list[Any] = []

    class ByData(Trainer):
        def evaluate(self, eval_dataset: Any) -> dict[str, Any]:  # type: ignore[override]
            calls.append(eval_dataset)
            return super().evaluate(eval_dataset)

    class ByModel(Trainer):
        def evaluate(self, model: nn.Module, logs: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
            calls.append(model)
            logs = super().evaluate(model, logs)
            logs["eval_epoch_loss"] += 100
            return logs

    class ByNothing(Trainer):
        def evaluate(self) -> dict[str, Any]:  # type: ignore[override]
            calls.append(None)
            return {"mine": 1.0}

    plain = trained(Trainer, tmp_path / "plain", num_epochs=1)
    assert trained(ByData, tmp_path / "data", num_epochs=1).last_eval_results == plain.last_eval_results
    by_model = trained(ByModel, tmp_path / "model", num_epochs=1)
    assert by_model.last_eval_results["loss"] == plain.last_eval_results["loss"] + 100
    assert trained(ByNothing, tmp_path / "nothing", num_epochs=1).last_eval_results == {"mine": 1.0}
    assert calls == [PAIRS, by_model.model, None]


class OwnEvaluateStep(Trainer):
    def evaluate_step(self, model: nn.Module, inputs: Any) -> dict[str, Any]:
        return {"eval_step_loss": F.cross_entropy(model(inputs[0]), inputs[1]), "eval_epoch_metric": 0.75}


class OwnEvaluationStep(Trainer):
    def evaluation_step(self, batch: Any) -> dict[str, Any]:
        return {**super().evaluation_step(batch), "logits": F.one_hot(batch[1], 3).float()}  # always right


class OwnBatch(Trainer):
    def prepare_input_batch(self, batch: Any) -> Any:
        x, y = super().prepare_input_batch(batch)
        return x * 0, y


@pytest.mark.parametrize(
    ("kind", "factor", "metrics"),
    [
        (OwnEvaluateStep, 1, {"metric": 0.75}),
        (OwnEvaluationStep, 1, {"accuracy": 1.0}),
        (OwnBatch, 0, {}),
    ],
)
def test_own_parts_of_an_evaluation_are_what_its_results_are_of(
    kind: type[Trainer], factor: int, metrics: dict[str, float], tmp_path: Path
) -> None:
    trainer = trained(kind, tmp_path, num_epochs=1)
    with torch.no_grad():
        reference = F.cross_entropy(trainer.model.eval()(INPUTS * factor), LABELS).item()
    assert trainer.last_eval_results["loss"] == pytest.approx(reference)
    assert trainer.last_eval_results.items() >= metrics.items()


def test_a_compute_metric_of_ones_own_is_shown_and_is_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Mine(Trainer):
        def compute_metric(self, model: nn.Module, inputs: Any) -> float:
            model.eval()
            assert len(inputs) == 2
            return 0.125

    plain = trained(Trainer, tmp_path / "plain", num_epochs=1)
    mine = trained(Mine, tmp_path / "mine", num_epochs=1, print_steps=7)
    assert_equal_weights(mine.model, plain.model)  # training mode is as it was
    assert mine.last_eval_results["metric"] == 0.125
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("epoch_metric=0.125")
    assert lines[1].endswith("eval_epoch_metric=0.125")


def test_loaders_of_ones_own(tmp_path: Path) -> None:
    class Mine(Trainer):
        def create_train_dataloader(self, dataset: Any) -> DataLoader[Any]:
            return DataLoader(dataset, 10)

        def create_eval_dataloader(self, dataset: Any) -> DataLoader[Any]:
            return DataLoader(dataset, 25)

    trainer = trained(Mine, tmp_path, num_epochs=2)
    assert trainer.total_steps == 10
    theirs = pairs_net()
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.01, fused=True)
    torch.manual_seed(42)
    for _ in range(2):
        for x, y in DataLoader(PAIRS, 10):
            F.cross_entropy(theirs(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_weights(trainer.model, theirs)


@pytest.mark.parametrize("generator", ["ours", "of torch", "kept", "of the epoch"])
def test_each_epoch_has_the_loader_that_is_created_for_it_also_after_a_resume(generator: str, tmp_path: Path) -> None:
    """Also between two epochs, with a generator that continues or starts again."""

    class Growing(Trainer):
        epochs: tuple[int, ...] = ()

        def create_train_dataloader(self, dataset: Any) -> Any:
            self.epochs += (self.state.epoch,)
            data = TensorDataset(INPUTS * self.state.epoch, LABELS)
            if generator == "ours":
                return super().create_train_dataloader(data)
            self.kept = getattr(self, "kept", torch.Generator().manual_seed(7))
            new = torch.Generator().manual_seed(self.state.epoch)
            own = {"of torch": None, "kept": self.kept, "of the epoch": new}[generator]
            return DataLoader(data, 10, shuffle=True, generator=own)

    settings = {"num_epochs": 3, "batch_size": 10}
    whole = trained(Growing, tmp_path / "whole", **settings)
    assert whole.epochs == (1, 2, 3)
    for steps in (5, 7):
        trained(Growing, tmp_path / f"part{steps}", **settings, max_steps=steps)
        resumed = trained(Growing, tmp_path / f"part{steps}", **settings, resume_from_checkpoint=True)
        assert resumed.epochs == (1, 2, 3)
        assert_equal_weights(resumed.model, whole.model)


def test_loaders_of_epochs_may_have_different_lengths(tmp_path: Path) -> None:
    class Shrinking(Trainer):
        def create_train_dataloader(self, dataset: Any) -> Any:
            return DataLoader(TensorDataset(INPUTS[self.state.epoch * 7 - 7 :], LABELS[self.state.epoch * 7 - 7 :]), 8)

    trainer = trained(Shrinking, tmp_path, num_epochs=2)
    assert trainer.state.global_step == trainer.total_steps == 7 + 6


class Generative(nn.Module):
    is_generative = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layer(inputs)}

    def generate(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"generated_ids": torch.ones(len(inputs), dtype=torch.long)}


@pytest.mark.parametrize("generates", [True, False])
def test_a_generative_model_is_judged_by_what_it_generates(generates: bool, tmp_path: Path) -> None:
    settings = {"evaluate_with_generate": generates, "num_epochs": 1, "metrics": ["Accuracy"]}
    trainer = Trainer(Generative(), config(tmp_path, **settings), *2 * [Samples(inputs=INPUTS, labels=LABELS)])
    outputs = trainer.evaluation_step({"inputs": INPUTS, "labels": LABELS})
    if generates:
        assert torch.equal(outputs["logits"], torch.ones(50, dtype=torch.long))
    else:
        assert torch.equal(outputs["logits"], trainer.model.layer(INPUTS))
    assert outputs["loss"] > 0


def test_model_and_config_in_either_order_and_by_either_name(tmp_path: Path) -> None:
    settings = config(tmp_path)
    for trainer in (
        Trainer(pairs_net(), settings, PAIRS),
        Trainer(settings, pairs_net(), PAIRS),
        Trainer(config=settings, model=pairs_net(), train_dataset=PAIRS),
        Trainer(pairs_net(), training_config=settings, train_dataset=PAIRS),
    ):
        assert trainer.config is trainer.configs is settings
        assert isinstance(trainer.model, nn.Sequential)


@pytest.mark.parametrize("name", ["mine", "Adam", None])
def test_a_given_optimizer_and_loss_have_any_name_and_leave_the_config_alone(name: str | None, tmp_path: Path) -> None:
    settings = config(tmp_path / "first", num_epochs=1, max_grad_norm=0.5)
    before = repr(settings)
    trainer = Trainer(pairs_net(), settings, PAIRS)
    trainer.set_optimizer(torch.optim.SGD(trainer.model.parameters(), lr=0.1), optimizer_name=name)
    trainer.set_loss(nn.CrossEntropyLoss(label_smoothing=0.1), loss_name=name)
    assert trainer.config is trainer.configs
    written = {"name_": "CrossEntropyLoss", "label_smoothing": 0.1}
    assert (trainer.configs.optimizer, trainer.configs.loss) == (name or "custom_", name or written)
    assert repr(settings) == before
    trainer.train()
    assert repr(settings) == before
    assert TrainingConfig.load_from_yaml(tmp_path / "first" / "training_config.yaml").optimizer == "custom_"
    second = Trainer(pairs_net(), settings, PAIRS)  # trains as a first one does
    assert type(second.optimizer) is torch.optim.Adam
    assert type(second.loss) is nn.CrossEntropyLoss


def test_a_given_optimizer_is_not_written_to(tmp_path: Path) -> None:
    model = pairs_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = set(optimizer.param_groups[0])
    norms = []
    for limit in (1e-3, 1e-4):
        trainer = Trainer(
            model, config(tmp_path, num_epochs=1, max_grad_norm=limit, learning_rate=5e-5), PAIRS, optimizer=optimizer
        )
        before = [p.detach().clone() for p in model.parameters()]
        trainer.train()
        moved = torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), before, strict=True)])
        norms.append(float(moved.detach().norm()))
    assert set(optimizer.param_groups[0]) == keys
    assert norms[1] < 0.11 * 7 * 1e-4 < norms[0]  # 7 updates with a rate of 0.1: the second limit counts


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Tensor:
        return self.module(inputs) * 0  # type: ignore[no-any-return]


class Constant(nn.Linear):
    def compute_loss(self, logits: Any, labels: Any) -> Any:
        return logits.sum() * 0 + 7


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_evaluate_looks_at_the_model_that_it_is_given(tmp_path: Path, precision: str | None) -> None:
    trainer = trained(Trainer, tmp_path, num_epochs=1, mixed_precision=precision)
    own, other = trainer.evaluate(), copy.deepcopy(trainer.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    alike = pytest.approx(math.log(3), rel=1e-2)  # three classes
    assert trainer.evaluate(other.train(), {})["eval_epoch_loss"] == alike
    assert trainer.evaluate_step(other, next(iter(trainer.eval_dataloader)))["eval_step_loss"] > 1
    assert other.training
    assert trainer.evaluate() == own
    assert trainer.evaluate(trainer.model)["eval_epoch_loss"] == own["loss"]
    assert trainer.evaluate(Wrapper(trainer.model), {})["eval_epoch_loss"] == alike  # and not what it wraps
    assert trainer.evaluate(nn.DataParallel(trainer.model), {})["eval_loss"] == own["loss"]
    assert trainer.evaluate(Constant(6, 3), {})["eval_epoch_loss"] == 7.0  # its own loss


@pytest.mark.parametrize("metrics", [None, ["accuracy"], [{"name": "accuracy", "ignore_index": 255}]])
def test_metrics_ignore_the_class_that_the_loss_ignores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, metrics: Any
) -> None:
    caplog.set_level("INFO", "trainwright")
    labels = LABELS.clone()
    labels[::4] = 255
    data, given = TensorDataset(INPUTS, labels), {} if metrics is None else {"metrics": metrics}
    trainer = Trainer(pairs_net(), config(tmp_path, loss=nn.CrossEntropyLoss(ignore_index=255), **given), data, data)
    results = trainer.train()
    kept = labels != 255
    right = trainer.model.eval()(INPUTS).argmax(dim=1) == labels
    assert results["accuracy"] == pytest.approx(right[kept].double().mean().item())
    assert "No training metric" not in caplog.text


def test_soft_labels_without_a_declared_loss_turn_the_metric_of_the_training_off_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any) -> Tensor:
            return F.cross_entropy(model(inputs[0]), inputs[1])

    data = [(x, torch.nn.functional.one_hot(label, 3) * 0.9 + 1 / 30) for x, label in PAIRS]
    trainer = Mine(pairs_net(), config(tmp_path, num_epochs=1, metrics=["Accuracy"]), data, PAIRS)
    assert trainer.train().keys() == {"loss", "accuracy"}
    assert "No training metric is computed: metric Accuracy: cannot count" in caplog.text
    assert "class probabilities? loss='CrossEntropyLoss' declares it" in caplog.text
    assert "accuracy" not in trainer.storage.latest()


@pytest.mark.parametrize("soft", [1.0, 0.9])
@pytest.mark.parametrize(
    "settings", [{}, {"metrics": ["accuracy"]}, {"task": "text_classification", "metrics": ["accuracy"]}]
)
def test_accuracy_of_class_probabilities_is_that_of_their_most_probable_class(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, soft: float, settings: dict[str, Any]
) -> None:
    caplog.set_level("INFO", "trainwright")
    targets = F.one_hot(LABELS, 3) * soft + (1 - soft) / 3
    data = TensorDataset(INPUTS, targets)
    trainer = Trainer(pairs_net(), config(tmp_path, num_epochs=2, **settings), data, data)
    results = trainer.train()
    right = trainer.model.eval()(INPUTS).argmax(dim=1) == LABELS
    assert results["accuracy"] == pytest.approx(right.double().mean().item())
    assert "task" in settings or "accuracy" in trainer.storage.latest()
    assert "metric is computed" not in caplog.text


def accuracy_of_probabilities(folder: Path) -> tuple[float, float]:
    data = TensorDataset(INPUTS, F.one_hot(LABELS, 3) * 0.9 + 1 / 30)
    trainer = Trainer(pairs_net(), config(folder, num_epochs=1), data, data)
    right = trainer.train()["accuracy"], (trainer.model.eval()(INPUTS).argmax(dim=1) == LABELS).double().mean().item()
    return right


def test_two_processes_count_class_probabilities_as_one(tmp_path: Path) -> None:
    for found, right in on_ranks(accuracy_of_probabilities, tmp_path):
        assert found == pytest.approx(right)


def test_a_metric_of_regression_gets_class_probabilities_as_they_are(tmp_path: Path) -> None:
    targets = F.one_hot(LABELS, 3).float()
    data = TensorDataset(INPUTS, targets)
    trainer = Trainer(pairs_net(), config(tmp_path, num_epochs=1, metrics=["MeanSquaredError"]), data, data)
    value = trainer.train()["mean_squared_error"]
    assert value == pytest.approx(F.mse_loss(trainer.model.eval()(INPUTS), targets).item())


def test_a_resume_within_an_epoch_counts_the_class_probabilities_before_it(tmp_path: Path) -> None:
    data = TensorDataset(INPUTS, F.one_hot(LABELS, 3) * 0.9 + 1 / 30)

    def train(name: str, **settings: Any) -> Trainer:
        trainer = Trainer(pairs_net(), config(tmp_path / name, num_epochs=2, **settings), data, data)
        trainer.train()
        return trainer

    plain = train("plain")
    train("cut", max_steps=10)
    resumed = train("cut", resume_from_checkpoint=True)
    assert resumed.storage.latest()["accuracy"] == plain.storage.latest()["accuracy"]
    assert resumed.last_eval_results == plain.last_eval_results


@pytest.mark.parametrize(("loss", "shown"), [("MSELoss", False), ("CrossEntropyLoss", True)])
def test_the_start_shows_no_accuracy_for_a_loss_of_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loss: str, shown: bool
) -> None:
    caplog.set_level("INFO", "trainwright")
    data = TensorDataset(INPUTS, F.one_hot(LABELS, 3).float())
    Trainer(pairs_net(), config(tmp_path, num_epochs=1, loss=loss), data, data).train()
    assert ("  Metrics     accuracy" in caplog.text) is shown


def test_soft_labels_of_no_declared_loss_are_one_line_for_training_and_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any) -> Tensor:
            return F.cross_entropy(model(inputs[0]), inputs[1])

    caplog.set_level("INFO", "trainwright")
    data = TensorDataset(INPUTS, F.one_hot(LABELS, 3) * 0.9 + 1 / 30)
    Mine(pairs_net(), config(tmp_path, num_epochs=1), data, data).train()
    assert caplog.text.count("No metric is computed") == 1


def test_update_metrics_gives_the_means_of_the_epoch_to_a_step_of_ones_own(tmp_path: Path) -> None:
    class Mine(Trainer):
        def train_step(self, model: nn.Module, inputs: Any) -> dict[str, Any]:
            loss = self.compute_loss(model, inputs)
            loss.backward()
            epoch_loss, epoch_metric = self.update_metrics(model, inputs, loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            shown.append((loss.item(), epoch_loss, epoch_metric))
            return {"step_loss": loss.item(), "epoch_loss": epoch_loss, "epoch_metric": epoch_metric}

    shown: list[tuple[float, float, float]] = []
    mine = trained(Mine, tmp_path / "mine")
    assert_equal_weights(mine.model, trained(Trainer, tmp_path / "plain").model)
    for epoch in (shown[:7], shown[7:]):
        losses = [loss for loss, _, _ in epoch]
        for count, (_, mean, metric) in enumerate(epoch, start=1):
            assert mean == pytest.approx(sum(losses[:count]) / count)
            assert 0 <= metric <= 1
    assert shown[6][2] * 50 == pytest.approx(round(shown[6][2] * 50), abs=1e-4)  # of all 50 samples


def test_a_loop_of_the_programs_own_ends_where_the_training_does_and_follows_its_settings(tmp_path: Path) -> None:
    trainer = Trainer(pairs_net(), config(tmp_path, num_epochs=1), PAIRS)
    with pytest.raises(ConfigError, match=r"run_step: the step is built when the training starts. Call train"):
        trainer.run_step()
    trainer.config.num_epochs = 3
    for epoch in (1, 2, 3, 4):
        assert trainer.inner_training_loop(epoch)["loss"] > 0
        assert trainer.state.epoch == min(epoch, 3)
    whole = Trainer(pairs_net(), config(tmp_path / "whole", num_epochs=3), PAIRS)
    whole.train()
    assert trainer.iterations_done == whole.iterations_done == trainer.max_iter
    assert all(map(torch.equal, trainer.model.state_dict().values(), whole.model.state_dict().values()))
    trainer.train()
    assert trainer.inner_training_loop(1)["loss"] > 0  # nothing is left


def test_a_loop_of_the_programs_own_evaluates_once_for_each_epoch(tmp_path: Path) -> None:
    class Counted(Callback):
        def on_eval_end(self, logs: Any) -> None:
            evaluated.append(self.trainer.state.global_step)

    evaluated: list[int] = []
    trainer = Trainer(pairs_net(), config(tmp_path, num_epochs=3), PAIRS, PAIRS, callbacks=[Counted()])
    for epoch in (1, 2, 3):
        trainer.inner_training_loop(epoch)
    assert evaluated == [7, 14, 21]
