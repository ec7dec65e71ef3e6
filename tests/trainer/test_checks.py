"""What a Trainer is given is looked at before the first step, and evaluations are exact whatever their batches were."""

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.toys import Classifier, Samples, file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError, ConfigTypeError, MissingFileError
from trainwright.checkpoint import verify
from trainwright.data import DataError
from trainwright.evaluation import EvaluationError, TorchMetricsHandler
from trainwright.hooks import Callback, CallbackHook
from trainwright.optim import get_default_optimizer_params

INPUTS = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long()
DATA = TensorDataset(INPUTS, LABELS)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def config(folder: Path, **settings: Any) -> TrainingConfig:
    return quiet(folder, **{"lr": 0.01, "batch_size": 4, **settings})


class WithIndex(Trainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.compute_loss(self.model, batch)


SEVERAL = r"train_dataset: got a list of data sets.*\(data set, weight\)"
ARRAYS = r"shapes \(20, 4\) and \(20,\), .*TensorDataset\(inputs, labels\)"
# What is passed beside the model, the settings and the training data, or in place of them.
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"data_collator": 3, "metrics_handler": 3, "model_card": "hi"},  # all in one message
        r"(?s)data_collator: got 3.*metrics_handler: got 3.*model_card: got 'hi'",
    ),
    ({"optimizer": torch.optim.Adam}, "optimizer: got the class Adam, not an object of it"),
    (
        {"loss": nn.CrossEntropyLoss},
        r"loss: got the class CrossEntropyLoss, not .*, CrossEntropyLoss\(...\)",
    ),
    ({"loss": "MSELoss"}, r"loss: got 'MSELoss'.*TrainingConfig\(loss='MSELoss'\)"),
    ({"metrics_handler": TorchMetricsHandler}, "metrics_handler: got the class TorchMetricsHandler, not an object of"),
    ({"data_collator": Trainer}, "data_collator: got the class Trainer, not an object of it"),
    ({"optimizer": "adam"}, r"optimizer: got 'adam'.*TrainingConfig\(optimizer='adam'\)"),
    ({"model": nn.Linear, "train_dataset": None}, r"model: got the class Linear.*\n.*train_dataset: got None"),
    ({"train_data": DATA}, r"'train_data'. Did you mean 'train_dataset'"),
    ({"train_dataset": DataLoader(DATA)}, "train_dataset: .*DataLoader.*train_dataloader"),
    ({"train_dataset": TensorDataset}, "train_dataset: got the class TensorDataset; pass an object"),
    ({"train_dataset": None, "eval_dataset": DATA}, r"train_dataset: got None.*To only evaluate or predict"),
    ({"train_dataset": [DATA, DATA]}, SEVERAL),
    ({"train_dataset": [(DATA, 0.7), (DATA, 0.3)]}, SEVERAL),
    ({"train_dataset": (INPUTS, LABELS)}, ARRAYS),
    ({"train_dataset": (INPUTS.numpy(), LABELS.numpy())}, ARRAYS),
    ({"train_dataset": [INPUTS, LABELS]}, ARRAYS),
    (
        {"train_dataset": {"x": INPUTS.tolist(), "labels": LABELS.tolist()}},
        r"dict of lists of numbers; pass ColumnDataset\(.*torch.tensor",
    ),
    ({"eval_dataset": [DATA, DATA]}, r"eval_dataset: got a list of data sets.*pass \{name: data set"),
    ({"train_dataloader": DATA}, "train_dataloader: got TensorDataset, a data set"),
    ({"eval_dataloader": (b for b in DataLoader(DATA))}, "eval_dataloader: got generator, an iterator"),
    ({"kind": WithIndex}, r"WithIndex.training_step is called with \(batch\)"),
    ({"metrics_handler": lambda eval_pred: {"share": 1.0}}, r"metrics_handler: .*\(eval_pred.*predictions, labels"),
]


@pytest.mark.parametrize(("parts", "message"), WRONG, ids=[message for _, message in WRONG])
def test_parts_of_a_wrong_kind_are_refused(parts: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"model": make(), "train_dataset": None if "train_dataloader" in parts else DATA, **parts}
    kind = given.pop("kind", Trainer)
    with pytest.raises(ConfigTypeError, match=message):
        kind(config=config(tmp_path), **given)


def test_arguments_of_a_wrong_kind_are_refused(tmp_path: Path) -> None:
    trainer = Trainer(make(), config(tmp_path), DATA, DATA, metrics_handler=lambda *both: {"share": 1.0})
    with pytest.raises(ConfigTypeError, match=r"optimizer: got 'sgd'"):
        trainer.set_optimizer("sgd")
    with pytest.raises(ConfigTypeError, match=r"loss: got 'MSELoss'"):
        trainer.set_loss("MSELoss")
    with pytest.raises(ConfigTypeError, match=r"got resume_checkpoint_path=True.*resume_from_checkpoint=True"):
        trainer.train(True)
    with pytest.raises(ConfigTypeError, match=r"dict of arrays; pass ColumnDataset"):
        trainer.evaluate({"x": INPUTS, "labels": LABELS})
    with pytest.raises(ConfigTypeError, match="got 'best'"):
        trainer.evaluate("best")
    with pytest.raises(ConfigTypeError, match=r"logs: got TensorDataset.*dict.*evaluate\(model\)"):
        trainer.evaluate(make(), DATA)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    model, other = make(), make()
    settings = TrainingConfig(output_dir=tmp_path, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="holds none of the model's parameters"):
        Trainer(other, settings, DATA, optimizer=optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(other.parameters(), lr=0.1), 1)
    with pytest.raises(ConfigError, match="belongs to another optimizer"):
        Trainer(model, settings, DATA, optimizer=optimizer, lr_scheduler=schedule)


def test_a_part_of_the_model_that_is_replaced_later_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(make(), nn.Linear(2, 2))
    trainer = Trainer(model, config(tmp_path, num_epochs=1), DATA)
    trainer.config.num_epochs = 2
    model[1] = nn.Linear(2, 2)
    trainer.train()
    assert trainer.state.global_step == 10
    (weights,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "The optimizer holds no 1.weight, 1.bias of the model" in weights


@pytest.mark.parametrize("kind", [list, tuple, dict])
@pytest.mark.parametrize("api", ["python", "config file"])
def test_layers_that_torch_does_not_find_are_a_warning(
    kind: type[Any], api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stack(nn.Module):
        def __init__(self, requires_grad: bool) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)
            first = nn.Linear(4, 4).requires_grad_(requires_grad)
            self.layers = {"a": first} if kind is dict else kind([first, self.head])

        def forward(self, inputs: Tensor, labels: Tensor) -> Any:
            layers = self.layers.values() if kind is dict else self.layers[:1]
            for layer in layers:
                inputs = layer(inputs)
            return {"loss": F.cross_entropy(self.head(inputs), labels)}

    def warnings_of(requires_grad: bool) -> list[str]:
        caplog.clear()
        model, data = Stack(requires_grad), Samples(inputs=INPUTS, labels=LABELS)
        if api == "python":
            Trainer(model, config(tmp_path, num_epochs=1), data).train()
        else:
            DefaultTrainer(
                file_config(tmp_path, lambda: model, lambda: data, train_iter=2, train_micro_batch_size=4)
            ).train()
        return [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name == "trainwright.engine"]

    (warning,) = warnings_of(True)
    assert "Stack.layers" in warning
    assert "its 2 parameters are not trained" in warning
    assert ("nn.ModuleDict" if kind is dict else "nn.ModuleList") in warning
    assert not warnings_of(False)


def test_settings_beside_a_part_that_is_given_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    settings = config(tmp_path, optimizer="AdamW", lr_scheduler_type="cosine", num_epochs=1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = Trainer(model, settings, DATA, optimizer=optimizer, lr_scheduler=schedule)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    for part in ("optimizer='AdamW'", "learning_rate=0.01", "lr_scheduler_type='cosine'", "SGD", "ConstantLR"):
        assert part in warning
    trainer.train()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_data_and_settings_that_are_not_used_are_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(DATA, 6, shuffle=True, drop_last=True)
    settings = config(tmp_path, metrics=["F1Score"], dataloader_shuffle=False)
    handler = {"metrics_handler": lambda predictions, labels: {"share": 1.0}}
    trainer = Trainer(make(), settings, DATA, train_dataloader=loader, eval_dataloader=loader, **handler)
    trainer.predict(loader)
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    for text, parts in zip(
        ("train_dataset is not read", "eval_dataloader leaves out", "without effect", "not in the order"),
        ((), (), ("metrics=['F1Score']", "dataloader_shuffle=False"), ("predict", "RandomSampler")),
        strict=True,
    ):
        (found,) = [one for one in warned if text in one]
        assert all(part in found for part in parts)


def test_a_layer_in_evaluation_mode_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    model[1].eval()
    for freezes in (True, False):
        Trainer(model, config(tmp_path, freeze_bn=freezes, num_epochs=1), DATA).train()
        assert ("1 (BatchNorm1d) is in evaluation mode" in caplog.text) == (not freezes)


def test_a_trainer_that_cannot_be_built_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parameter 0.weight has no shape yet.*call model\(inputs\)"):
        Trainer(nn.Sequential(nn.LazyLinear(2)), config(tmp_path), DATA)

    class Forgetful(Trainer):
        def __init__(self) -> None:
            pass

    with pytest.raises(AttributeError, match=r"Forgetful.__init__ has not called super\(\).__init__"):
        Forgetful().train()


def test_labels_of_model_and_data_are_the_same(tmp_path: Path) -> None:
    def with_labels(owner: Any, *labels: str) -> Any:
        owner.config = SimpleNamespace(id2label=dict(enumerate(labels)))
        return owner

    data = with_labels(TensorDataset(INPUTS, LABELS), "cat", "dog")
    Trainer(with_labels(make(), "cat", "dog", "owl"), config(tmp_path), data, data)
    with pytest.raises(ConfigError, match=r"label 'cat' is 0 in TensorDataset, and 1 in the model"):
        Trainer(with_labels(make(), "dog", "cat"), config(tmp_path), DATA, data)


PLATEAU = {"name_": "ReduceLROnPlateau", "patience": 0, "factor": 0.5, "threshold": 10.0, "mode": "min"}  # never better


def test_steps_between_two_steps_of_a_schedule_that_has_moments_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="lr_scheduling_steps: got 5 with ReduceLROnPlateau"):
        TrainingConfig(lr_scheduler=PLATEAU, lr_scheduling_steps=5)
    model = make()
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(model.parameters(), lr=0.1))
    settings = TrainingConfig(output_dir=tmp_path, lr_scheduling_steps=5)
    with pytest.raises(ConfigError, match=r"lr_scheduling_steps: got 5, .*ReduceLROnPlateau"):
        Trainer(model, settings, DATA, optimizer=schedule.optimizer, lr_scheduler=schedule)
    trainer = Trainer(model, settings, DATA)  # linear, to 0 at the last update
    assert "without effect: lr_scheduling_steps=5" in caplog.text
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0


def test_a_share_of_the_steps_is_reported_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainwright")
    trainer = Trainer(make(), config(tmp_path, num_epochs=4, max_steps=0.25), DATA)
    assert trainer.total_steps == 8  # ceil(0.25 * 5) * 4
    assert "max_steps=0.25: 8 steps in total, that fraction of 4 epochs of 5 batches" in caplog.text
    assert "training ends in epoch 2" in caplog.text


def test_a_copy_of_a_model_in_mixed_precision_computes_with_its_own_weights(tmp_path: Path) -> None:
    model = make()
    trainer = Trainer(model, config(tmp_path, mixed_precision="bf16"), DATA)
    twin = copy.deepcopy(trainer.model)
    nn.init.zeros_(twin.weight)
    nn.init.zeros_(twin.bias)
    assert not twin(INPUTS).any()
    assert twin(INPUTS).dtype is torch.bfloat16
    Trainer(model, config(tmp_path / "plain"), DATA)
    assert model(INPUTS).dtype is torch.float32


class Tokens:
    """Rows of uneven numbers of labels that count."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(6) % 3
        labels[index % 6 :] = -100
        return torch.randn(6, 4, generator=torch.Generator().manual_seed(index)), labels


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_scores_before_a_sigmoid_are_read_as_such_in_every_batch(size: int, tmp_path: Path) -> None:
    scores = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.45, -3, 2, 0.3, 0.2])
    data = TensorDataset(scores, (scores > 0).float())
    model = nn.Identity()
    model.weight = nn.Parameter(torch.zeros(1))
    settings = config(tmp_path, loss="BCEWithLogitsLoss", eval_batch_size=size)
    assert Trainer(model, settings, data, data).evaluate()["accuracy"] == 1.0


def test_a_metric_that_fits_no_more_may_fit_the_next_data(tmp_path: Path) -> None:
    trainer = Trainer(make(), config(tmp_path), DATA, DATA)
    no_classes = TensorDataset(INPUTS, INPUTS[:, :2])
    trainer.set_loss(nn.MSELoss())
    assert set(trainer.evaluate(no_classes)) == {"loss"}
    trainer.set_loss(nn.CrossEntropyLoss())
    assert set(trainer.evaluate()) == {"loss", "accuracy"}


def test_a_run_is_not_gone_on_with_on_other_data_of_as_many_batches(tmp_path: Path) -> None:
    def trainer(rows: int, **settings: Any) -> Trainer:
        data = TensorDataset(INPUTS[:rows], LABELS[:rows])
        return Trainer(make(), config(tmp_path, dataloader_drop_last=False, num_epochs=2, **settings), data)

    trainer(17, max_steps=3).train()
    with pytest.raises(ConfigError, match="the samples of an epoch were 17 and are 20 now"):
        trainer(20, resume_from_checkpoint=True)  # within an epoch: the order would be another one
    trainer(17, max_steps=5, resume_from_checkpoint=True).train()
    grown = trainer(20, resume_from_checkpoint=True)  # the length of an epoch is that at its start
    grown.train()
    assert (grown.state.global_step, grown.run.batches.loader.batch_sampler.samples_per_epoch) == (10, 20)


def test_an_error_at_the_end_of_an_epoch_loses_no_epoch_wherever_the_program_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    class Failing(Callback):
        def on_epoch_begin(self, epochs: int, logs: Any) -> None:
            os.chdir(tmp_path / "elsewhere")

        def on_epoch_end(self, epochs: int, logs: Any) -> None:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        Trainer(make(), config(Path("out"), num_epochs=2), DATA, DATA, callbacks=[Failing()]).train()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert verify(tmp_path / "out" / "epoch_1").iteration == 4
    settings = config(tmp_path / "out", num_epochs=2, resume_from_checkpoint=True)
    resumed = Trainer(make(), settings, DATA, DATA)
    assert resumed.state.global_step == 5
    resumed.train()


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features)


def test_batches_that_do_not_fit_the_model_are_refused_with_their_fields(tmp_path: Path) -> None:
    wrong = [{"x": x, "labels": 1} for x in INPUTS]
    with pytest.raises(ConfigTypeError, match=r"does not take the batch with the fields \['x', 'labels'\]"):
        Trainer(ByName(), config(tmp_path), wrong).train()
    unlabeled = [{"features": x, "class_id": 1} for x in INPUTS]
    with pytest.raises(ConfigError, match=r"labels, label, targets, target .*features, class_id"):
        Trainer(ByName(), config(tmp_path), unlabeled).train()

    class Broken(ByName):
        def forward(self, features: Tensor) -> Tensor:
            return self.layer(features) + "mine"  # a TypeError of the model's own

    with pytest.raises(TypeError, match=r"unsupported operand|must be Tensor"):
        Trainer(Broken(), config(tmp_path), [{"features": x, "labels": 1, "more": 2} for x in INPUTS]).train()


@pytest.mark.parametrize(("name", "hint"), [("bf16", "mixed_precision='bf16'"), ("save_strategy", "model_checkpoint")])
def test_names_of_other_libraries_are_errors_with_ours(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"TrainingConfig.{name}: no such setting. Here: {hint}"):
        TrainingConfig(**{name: True})


def test_a_function_is_enough_for_metrics_of_ones_own(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute_metrics(predictions: Tensor, labels: Tensor) -> dict[str, Any]:
        calls.append(len(labels))
        return {"share": (predictions.argmax(1) == labels).float().mean()}

    settings = config(
        tmp_path, metric_for_best_model="share", greater_is_better=True, load_best_model_at_end=True, eval_batch_size=3
    )
    results = Trainer(make(), settings, DATA, DATA, metrics_handler=compute_metrics).train()
    assert set(results) == {"loss", "share"}
    assert set(calls) == {20}  # all samples at once
    with pytest.raises(EvaluationError, match="returned NoneType; it must return a dict"):
        Trainer(make(), config(tmp_path / "b"), DATA, DATA, metrics_handler=lambda p, t: None).train()
    for value in (torch.zeros(2), "good"):
        with pytest.raises(EvaluationError, match=r"returned \{'share': .*each value must be one number"):
            Trainer(
                make(), config(tmp_path / "b"), DATA, metrics_handler=lambda p, t, value=value: {"share": value}
            ).evaluate(DATA)


def test_the_schedule_after_a_given_one_is_stepped_in_its_own_way(tmp_path: Path) -> None:
    class Swapping(Callback):
        def on_epoch_end(self, epochs: int, logs: Any) -> None:
            if epochs == 1:
                trainer.set_optimizer(torch.optim.SGD(trainer.model.parameters(), lr=0.1))

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    settings = config(tmp_path, num_epochs=2, lr_scheduler_type="linear")
    parts: dict[str, Any] = {"optimizer": optimizer, "lr_scheduler": schedule, "callbacks": [Swapping()]}
    trainer = Trainer(model, settings, DATA, **parts)
    trainer.train()
    rates = [rate for rate, _ in trainer.storage.history("lr").values()]
    assert rates[:5] == [0.1] * 5  # once an epoch
    assert rates[5:] == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02])  # linear, over the updates that are left


class Tagger(nn.Module):
    """Its scores are of tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).transpose(1, 2)


class Writer(Tagger):
    """What it generates is not of its tokens."""

    is_generative = True

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layer(x)}

    def compute_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def generate(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), 2, dtype=torch.long)


@pytest.mark.parametrize("kind", [Tagger, Writer])
@pytest.mark.parametrize("size", [1, 3, 11])
def test_labels_that_do_not_count_have_no_weight_in_the_loss(kind: type[Tagger], size: int, tmp_path: Path) -> None:
    pairs = [Tokens()[index] for index in range(11) if kind is Tagger or index % 6]  # a writer's are never all -100
    rows: Any = pairs if kind is Tagger else [{"x": x, "labels": labels} for x, labels in pairs]
    trainer = Trainer(kind(), config(tmp_path, eval_batch_size=size, metric=None), rows, rows)
    scores, labels = trainer.model.layer(torch.stack([x for x, _ in pairs])), torch.stack([y for _, y in pairs])
    expected = F.cross_entropy(scores.flatten(0, 1), labels.flatten()).item()
    assert trainer.evaluate()["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["model", "optimizer", "loss", "train_dataset", "eval_dataset"])
def test_a_part_that_is_assigned_is_no_part_of_the_steps(name: str, tmp_path: Path) -> None:
    trainer = Trainer(make(), config(tmp_path), DATA, DATA)
    other = {"model": make(), "optimizer": torch.optim.SGD(trainer.model.parameters(), lr=0.5), "loss": nn.MSELoss()}
    setattr(trainer, name, other.get(name, TensorDataset(INPUTS[:8], LABELS[:8])))
    with pytest.raises(ConfigError, match=rf"Trainer.{name} was assigned, without effect"):
        trainer.evaluate() if name == "eval_dataset" else trainer.train()
    if name == "eval_dataset":
        with pytest.raises(ConfigError, match=rf"Trainer.{name} was assigned, without effect"):
            trainer.train()


def test_data_that_are_assigned_with_their_loader_or_read_by_an_override_are_used(tmp_path: Path) -> None:
    class Growing(Trainer):
        def create_train_dataloader(self, dataset: Any) -> Any:
            return DataLoader(dataset, batch_size=4)

    few = TensorDataset(INPUTS[:8], LABELS[:8])
    trainer = Trainer(make(), config(tmp_path / "a", num_epochs=1, dataloader_drop_last=False), DATA, DATA)
    trainer.train_dataset, trainer.train_dataloader = few, DataLoader(few, batch_size=4)
    trainer.eval_dataset, trainer.eval_dataloader = few, DataLoader(few, batch_size=4)
    trainer.train()
    assert trainer.state.global_step == 2
    growing = Growing(make(), config(tmp_path / "b", num_epochs=2), DATA)
    growing.train_dataset = few  # for the next epochs
    growing.train()


def test_a_loader_that_is_assigned_is_read_by_the_next_training(tmp_path: Path) -> None:
    sizes: list[int] = []
    trainer = Trainer(make(), config(tmp_path, num_epochs=2), DATA)
    trainer.register_hooks([CallbackHook(after_step=lambda trainer: sizes.append(trainer.iterations_done))])
    trainer.train_dataloader = DataLoader(TensorDataset(INPUTS[:6], LABELS[:6]), batch_size=2)
    trainer.train()
    assert (trainer.num_batches, len(sizes), trainer.epoch) == (3, 6, 2)


@pytest.mark.parametrize(
    ("name", "loader", "text"),
    [
        ("train_dataloader", DATA, "got TensorDataset, a data set; assign a loader.*create_train_dataloader"),
        ("train_dataloader", None, "got None"),
        ("train_dataloader", iter([1]), "an iterator"),
        ("eval_dataloader", DATA, "got TensorDataset, a data set; assign a loader.*create_eval_dataloader"),
        ("eval_dataloader", None, "got None"),
    ],
)
def test_what_is_assigned_as_a_loader_and_is_none_is_refused_before_the_first_step(
    name: str, loader: Any, text: str, tmp_path: Path
) -> None:
    trainer = Trainer(make(), config(tmp_path, num_epochs=1), DATA, DATA)
    setattr(trainer, name, loader)
    with pytest.raises(ConfigTypeError, match=f"Trainer.{name} was assigned: .*{text}"):
        trainer.train()
    assert trainer.iterations_done == 0
    if name == "eval_dataloader":
        with pytest.raises(ConfigTypeError, match=f"Trainer.{name} was assigned"):
            trainer.evaluate()


def test_one_warning_of_an_assigned_loader_that_no_evaluation_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(make(), config(tmp_path, num_epochs=1), DATA)
    trainer.eval_dataloader = DataLoader(DATA, batch_size=4)
    assert "loss" in trainer.evaluate()
    assert "without effect on train()" not in caplog.text
    trainer.train()
    assert caplog.text.count("Trainer.eval_dataloader was assigned, without effect on train()") == 1


def test_a_list_of_data_sets_is_not_evaluated(tmp_path: Path) -> None:
    trainer = Trainer(make(), config(tmp_path), DATA)
    with pytest.raises(ConfigTypeError, match=r"Trainer.evaluate: got a list of data sets.* pass \{name: data set"):
        trainer.evaluate([DATA, DATA])


def test_methods_of_a_list_name_those_of_the_callbacks(tmp_path: Path) -> None:
    trainer = Trainer(make(), config(tmp_path), DATA)
    for call, hint in (
        (lambda: trainer.callbacks.append, "add_callback"),
        (lambda: trainer.callbacks.remove, "pop_callback"),
        (lambda: trainer.config.callbacks.append, r"Trainer\(..., callbacks="),
    ):
        with pytest.raises(AttributeError, match=hint):
            call()


def test_an_assigned_schedule_is_stepped_as_a_line_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainwright")
    trainer = Trainer(make(), config(tmp_path, num_epochs=2), DATA)
    trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
    trainer.train()
    lines = [r.getMessage() for r in caplog.records if "StepLR" in r.getMessage()]
    assert [line for line in lines if "assigned StepLR is stepped after each update" in line]


class Losing(nn.Linear):
    def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        return {"loss": F.cross_entropy(super().forward(x), labels)}


@pytest.mark.parametrize("call", ["train", "evaluate", "predict"])
def test_a_pair_for_a_model_that_takes_fields_is_refused_with_the_fields(call: str, tmp_path: Path) -> None:
    trainer = Trainer(Losing(4, 2), config(tmp_path), DATA, DATA)
    with pytest.raises(ConfigTypeError, match=r"forward\(x: .*the model gets the first item.*'x': …, 'labels': …"):
        trainer.predict(DATA) if call == "predict" else getattr(trainer, call)()


class NoBatch(Trainer):
    def prepare_input_batch(self, batch: Any) -> Any:
        super().prepare_input_batch(batch)


class NoLoader(Trainer):
    def create_train_dataloader(self, dataset: Any) -> Any:
        super().create_train_dataloader(dataset)


class NoHooks(Trainer):
    def build_hooks(self) -> Any:
        super().build_hooks()


@pytest.mark.parametrize(
    ("kind", "name"),
    [(NoBatch, "prepare_input_batch"), (NoLoader, "create_train_dataloader"), (NoHooks, "build_hooks")],
)
def test_an_override_without_a_return_is_named(kind: type[Trainer], name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigTypeError, match=rf"{kind.__name__}\.{name} returned None"):
        kind(make(), config(tmp_path), DATA).train()


def test_arguments_of_a_wrong_type_are_named(tmp_path: Path) -> None:
    trainer = Trainer(make(), config(tmp_path), DATA)
    weights = tmp_path / "model.pt"
    torch.save(trainer.model.state_dict(), weights)
    with pytest.raises(ConfigTypeError, match=r"predict: got None"):
        trainer.predict(None)
    with pytest.raises(ConfigTypeError, match=r"train: got resume_checkpoint_path=5"):
        trainer.train(5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model.pt is a file.*init_weights\(model, path\)"):
        trainer.load(weights)
    with pytest.raises(ConfigTypeError, match="metrics_handler"):
        config(tmp_path, metrics=[nn.Identity()])


def test_a_checkpoint_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    Trainer(make(), config(tmp_path, num_epochs=2), DATA).train()
    missing = tmp_path / "checkpoints" / "0099"
    with pytest.raises(MissingFileError, match=r"0099: there is no such file or folder; .* there are \d+, 10"):
        Trainer(make(), config(tmp_path / "other", resume_from_checkpoint=str(missing)), DATA)


def test_other_groups_of_parameters_than_in_the_checkpoint_are_refused_with_both(tmp_path: Path) -> None:
    Trainer(make(), config(tmp_path, num_epochs=1), DATA).train()
    model = make()
    optimizer = torch.optim.Adam([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.01)
    settings = config(tmp_path, num_epochs=2, resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=r"Adam for groups of 2 parameters; this run has groups of 1 and 1"):
        Trainer(model, settings, DATA, optimizer=optimizer).train()


def test_a_metric_that_cannot_count_the_training_batches_is_said_to_end_the_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EvaluationError, match="MeanSquaredError"):
        Trainer(make(), config(tmp_path, num_epochs=1, metrics=["MeanSquaredError"]), DATA, DATA).train()
    (warning,) = [r.getMessage() for r in caplog.records if "No training metric" in r.getMessage()]
    assert "ends the first evaluation, too" in warning


@pytest.mark.parametrize("api", ["python", "config file"])
def test_an_evaluation_whose_loss_is_nan_is_one_warning(
    api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Distance(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            return {"loss": F.mse_loss(super().forward(x).sum(1), labels), "prediction_scores": x}

    good = Samples(x=INPUTS, labels=LABELS.float())
    bad = Samples(x=INPUTS, labels=LABELS.float() * float("nan"))
    if api == "python":
        Trainer(Distance(4, 2), config(tmp_path, num_epochs=3, metrics=None), good, bad).train()
    else:
        cfg = file_config(
            tmp_path, lambda: Distance(4, 2), lambda: good, lambda: bad, train_iter=6, train_micro_batch_size=4
        )
        cfg.train.evaluation.update({"evaluator": [], "eval_period": 2, "eval_metric": "loss", "eval_mode": "min"})
        DefaultTrainer(cfg).train()
    (warning,) = [r.getMessage() for r in caplog.records if "eval_loss=nan" in r.getMessage()]
    assert "Look for NaN in the evaluation data" in warning


@pytest.mark.parametrize("data", [INPUTS, INPUTS.numpy()], ids=["tensor", "array"])
def test_evaluation_data_of_inputs_alone_are_no_pairs(data: Any, tmp_path: Path) -> None:
    trainer = Trainer(make(), config(tmp_path, batch_size=2), DATA)
    with pytest.raises(ConfigError, match=r"eval_dataset: its samples have no target"):
        trainer.evaluate(data)


def test_test_data_of_a_config_file_without_a_field_of_the_model_are_refused_with_the_field(tmp_path: Path) -> None:
    cfg = file_config(
        tmp_path, lambda: Losing(4, 2), lambda: Samples(x=INPUTS, labels=LABELS), lambda: Samples(x=INPUTS),
        train_iter=2, train_micro_batch_size=4,
    )  # fmt: skip
    with pytest.raises(ConfigTypeError, match=r"does not take the batch with the fields \['x'\]: .*'labels'"):
        DefaultTrainer(cfg).train()


@pytest.mark.parametrize("kind", ["pairs", "fields"])
def test_evaluation_data_without_targets_are_named(kind: str, tmp_path: Path) -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    train, without = DATA, TensorDataset(INPUTS)
    if kind == "fields":
        train = [{"x": x, "labels": label} for x, label in zip(INPUTS, LABELS, strict=True)]
        without = [{"x": x} for x in INPUTS]
    with pytest.raises(ConfigError, match=r"Trainer.eval_dataset: .*CrossEntropy"):
        Trainer(Net(4, 2), config(tmp_path, num_epochs=1), train, without).train()


@pytest.mark.parametrize(
    "bad", [0.2, 5, True, len, object(), nn.Sequential(nn.Linear(1, 1))], ids=lambda bad: type(bad).__name__
)
@pytest.mark.parametrize("argument", ["train_dataset", "eval_dataset", "eval_dataset by name", "eval_dataloader"])
def test_data_that_cannot_be_read_are_refused_before_the_first_step(argument: str, bad: Any, tmp_path: Path) -> None:
    argument, _, by_name = argument.partition(" ")
    given = {"train_dataset": DATA, argument: {"good": DATA, "bad": bad} if by_name else bad}
    with pytest.raises(ConfigTypeError, match=rf"Trainer\.{argument}"):
        Trainer(make(), config(tmp_path), **given)
    trainer = Trainer(make(), config(tmp_path), DATA)
    if not isinstance(bad, nn.Module):  # evaluate(model) is another model with the same data
        with pytest.raises(ConfigTypeError, match=r"Trainer\.evaluate: got"):
            trainer.evaluate(bad)


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs).squeeze()  # a number for a batch of one sample, which is not a loss


@pytest.mark.parametrize("place", ["training", "evaluation", "evaluation alone"])
@pytest.mark.parametrize("loss", ["MSELoss", "BCEWithLogitsLoss"])
def test_squeeze_and_a_last_batch_of_one_sample(loss: str, place: str, tmp_path: Path) -> None:
    odd = TensorDataset(INPUTS[:9], LABELS[:9].float())
    even = TensorDataset(INPUTS[:8], LABELS[:8].float())
    settings = {"batch_size": 4, "loss": loss, "num_epochs": 1, "dataloader_drop_last": False}
    trainer = Trainer(Squeezed(), quiet(tmp_path, **settings), odd if place == "training" else even, odd)
    with pytest.raises(ConfigError, match=r"Squeezed returned one number .*\(1, 4\).*squeeze\(-1\)"):
        trainer.evaluate() if place == "evaluation alone" else trainer.train()


def test_a_loss_of_the_models_own_is_one_number_although_it_returns_scores_in_evaluation(tmp_path: Path) -> None:
    class Net(Squeezed):
        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(inputs).square().mean() if self.training else self.layer(inputs)

    data = TensorDataset(INPUTS[:5], LABELS[:5].float()[:, None])
    settings = {"batch_size": 1, "loss": "MSELoss", "num_epochs": 1, "eval_on_start": True}
    Trainer(Net(), quiet(tmp_path, **settings), data, data).train()


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"non_finite": "skip"}])
def test_a_loss_function_that_returns_none_is_named(settings: dict[str, Any], tmp_path: Path) -> None:
    def forgets_return(scores: Tensor, labels: Tensor) -> Any:
        nn.functional.cross_entropy(scores, labels)

    trainer = Trainer(nn.Linear(4, 2), quiet(tmp_path, batch_size=2, num_epochs=1, **settings), DATA)
    trainer.set_loss(forgets_return)
    with pytest.raises(ConfigTypeError, match="The loss function forgets_return returned NoneType"):
        trainer.train()


@pytest.mark.parametrize("owner", ["Net", "the Trainer"])
def test_a_loss_that_is_none_names_the_method(owner: str, tmp_path: Path) -> None:
    class Net(nn.Linear):
        def compute_loss(self, logits: Tensor, labels: Tensor) -> Any:
            return None

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            return None

    name, log = ("Net", r"get_event_storage\(\)") if owner == "Net" else ("Own", r"self.log\({name: value}\)")
    with pytest.raises(ConfigTypeError, match=rf"{name}.compute_loss returned NoneType.*log each with {log}"):
        (Trainer if owner == "Net" else Own)(Net(4, 2), config(tmp_path), DATA).train()


def test_gradients_that_are_switched_off_are_named(tmp_path: Path) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError) as caught:
        Trainer(make(), config(tmp_path), DATA).train()
    assert "torch.set_grad_enabled(True)" in str(caught.value.__notes__)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.words(inputs).mean(1))


@pytest.mark.parametrize("setting", [{"clip_grad_norm": 1.0}, {"clip_grad_value": 1.0}, {"non_finite": "skip"}])
def test_sparse_gradients_that_would_be_clipped_are_refused(setting: dict[str, Any], tmp_path: Path) -> None:
    data, model = TensorDataset(torch.arange(24).reshape(8, 3) % 10, LABELS[:8]), Words()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConfigError, match=r"words \(Embedding\) has sparse=True"):
        Trainer(model, quiet(tmp_path / "a", loss="CrossEntropyLoss", **setting), data, optimizer=optimizer).train()
    before = model.words.weight.clone()
    Trainer(model, quiet(tmp_path / "b", loss="CrossEntropyLoss"), data, optimizer=optimizer).train()
    assert not torch.equal(before, model.words.weight)


def test_sparse_gradients_of_a_config_file_are_refused(tmp_path: Path) -> None:
    class Net(Words):
        def forward(self, inputs: Tensor, labels: Tensor) -> Any:
            return {"loss": F.cross_entropy(super().forward(inputs), labels)}

    samples = [{"inputs": torch.arange(3), "labels": 1}] * 8
    cfg = file_config(tmp_path, Net, lambda: samples, train_iter=1, train_micro_batch_size=4)
    cfg.optim = LazyCall(torch.optim.SGD)(params=LazyCall(get_default_optimizer_params)(clip_grad_max_norm=1.0), lr=0.1)
    with pytest.raises(ConfigError, match=r"words \(Embedding\) has sparse=True"):
        DefaultTrainer(cfg).train()


@pytest.mark.parametrize("trained", ["pairs", "names"])
def test_data_to_evaluate_may_have_names_where_those_to_train_have_none(trained: str, tmp_path: Path) -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    torch.manual_seed(0)
    named = [{"x": x, "labels": label} for x, label in zip(INPUTS, LABELS, strict=True)]
    train, other = (DATA, named) if trained == "pairs" else (named, DATA)
    trainer = Trainer(Net(4, 2), config(tmp_path, num_epochs=1), train, {"same": train, "other": other})
    results = trainer.train()
    assert results["same/loss"] == results["other/loss"]
    assert results["same/accuracy"] == results["other/accuracy"]


def test_a_rate_is_not_searched_while_the_trainer_trains(tmp_path: Path) -> None:
    class Finds(Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            trainer.find_lr()

    trainer = Trainer(make(), config(tmp_path), DATA, callbacks=[Finds()])
    with pytest.raises(ConfigError, match=r"find_lr .*before.*train\(\)"):
        trainer.train()


def test_an_empty_data_set_is_named_as_the_argument_that_it_is(tmp_path: Path) -> None:
    empty = Samples(inputs=torch.randn(0, 4), length=0)
    with pytest.raises(DataError, match=r"Trainer.train_dataset: the data set Samples is empty"):
        Trainer(Classifier(), quiet(tmp_path), empty)
    for given in (empty, {"a": points(), "b": empty}):
        with pytest.raises(DataError, match=r"Trainer.eval_dataset: the data set Samples is empty"):
            Trainer(Classifier(), quiet(tmp_path), points(), given)
    with pytest.raises(DataError, match=r"Trainer.predict: the data set Samples is empty"):
        Trainer(Classifier(), quiet(tmp_path), points()).predict(empty)


@pytest.mark.parametrize("text", ["True", "false"])
def test_a_text_that_means_true_is_no_checkpoint(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"resume_from_checkpoint: got '{text}' \(str\).*Write {text.title()}\."):
        quiet(tmp_path, resume_from_checkpoint=text)


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (10, r".*=10\..*TrainingConfig\(num_epochs=10\), or max_steps=10"),
        (True, r".*=True\..*resume_from_checkpoint=True"),
        ([1, 2], r".*=list.*arguments of Trainer\(model, config"),
    ],
)
def test_an_argument_of_train_that_is_no_path_is_answered_with_the_line_to_write(
    given: Any, facts: str, tmp_path: Path
) -> None:
    trainer = Trainer(nn.Linear(4, 2), config(tmp_path), train_dataset=DATA)
    with pytest.raises(ConfigTypeError, match=rf"Trainer\.train: {facts}"):
        trainer.train(given)


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray])
def test_inputs_and_labels_as_two_arguments_are_answered_with_one_data_set(kind: type, tmp_path: Path) -> None:
    inputs, labels = torch.zeros(8, 4), torch.zeros(8).long()
    given = [inputs, labels] if kind is torch.Tensor else [inputs.numpy(), labels.numpy()]
    with pytest.raises(ConfigTypeError, match=r"Trainer\(model, config, torch.utils.data.TensorDataset\(inputs"):
        Trainer(nn.Linear(4, 2), config(tmp_path), *given)


def test_callbacks_that_are_no_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigTypeError, match="callbacks: got 3; pass a list"):
        Trainer(nn.Linear(4, 2), config(tmp_path), DATA, callbacks=3)  # type: ignore[arg-type]
