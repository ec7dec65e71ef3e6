"""How a batch becomes a loss: what a model may return for a pair, and what an error says about the batch."""

import logging
import re
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.toys import Classifier, quiet
from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data import ColumnDataset
from trainwright.engine import EagerTrainer, GraphBase, GraphTrainer

INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
PAIRS = TensorDataset(INPUTS, torch.randint(3, (16,), generator=torch.Generator().manual_seed(1)))


def config(folder: Path, **settings: Any) -> TrainingConfig:
    return quiet(folder, **{"save_enabled": False, "batch_size": 8, "lr": 0.01, **settings})


class OwnLoss(nn.Module):
    """Returns its loss in the form that ``shape`` makes of it and the scores."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.shape = nn.Linear(4, 4), shape

    def forward(self, x: Tensor) -> Any:
        scores = self.layer(x)
        return self.shape(F.mse_loss(scores, x), scores)


SHAPES = {
    "number": lambda loss, scores: loss,
    "tuple": lambda loss, scores: (loss, scores),
    "alone in a tuple": lambda loss, scores: (loss,),
    "dict": lambda loss, scores: {"loss": loss, "scores": scores},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.exhaustive(every=4)
@pytest.mark.usefixtures("no_compiler")
def test_a_model_that_returns_its_loss_for_the_first_of_a_pair_is_trained_by_it(
    shape: str, graph: bool, tmp_path: Path
) -> None:
    model = OwnLoss(SHAPES[shape])
    trainer = Trainer(model, config(tmp_path, graph=graph), PAIRS, PAIRS)
    before = F.mse_loss(model.layer(INPUTS), INPUTS).item()
    loss = trainer.train()["loss"]
    assert loss == pytest.approx(F.mse_loss(model.layer(INPUTS), INPUTS).item(), rel=1e-6)
    assert loss < before


NOTE = "The batch of this step: {inputs: float32 (3, 4) on cpu, labels: int64 (3,) on cpu}"


def notes_of(run: Any) -> list[str]:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        run()
    batch, fix = caught.value.__notes__
    assert fix.startswith("A layer expects ")
    return [batch]


@pytest.mark.parametrize("graph", [False, True])
def test_an_error_of_the_model_tells_the_batch_of_a_trainer(graph: bool, tmp_path: Path) -> None:
    samples = [{"inputs": row, "labels": 0} for row in torch.randn(3, 4)]
    trainer = Trainer(Classifier((5, 2)), config(tmp_path, batch_size=3, graph=graph), samples, samples)
    assert notes_of(trainer.train) == [NOTE]
    assert notes_of(trainer.evaluate) == [NOTE]


def test_labels_that_the_model_takes_and_the_batch_lacks_are_named(tmp_path: Path) -> None:
    trainer = Trainer(Classifier(), config(tmp_path, batch_size=3), [{"inputs": row} for row in torch.randn(3, 4)])
    with pytest.raises(ConfigError) as caught:
        trainer.train()
    assert "The batch has no field 'labels', which Classifier.forward takes." in caught.value.__notes__


def test_an_error_in_a_loss_of_the_users_own_tells_the_pair(tmp_path: Path) -> None:
    class Mine(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Tensor:
            return model(inputs[0][:, :3])

    trainer = Mine(nn.Linear(4, 2), config(tmp_path), PAIRS)
    assert notes_of(trainer.train) == ["The batch of this step: (float32 (8, 4) on cpu, int64 (8,) on cpu)"]


@dataclass
class Fields:
    loss: Tensor
    logits: Tensor
    norm: Tensor
    note: str = "no number"


Entries = namedtuple("Entries", ["loss", "logits", "norm"])


RETURNED = {
    "dict": lambda loss, logits, norm: {"loss": loss, "logits": logits, "norm": norm, "note": "no number"},
    "dataclass": Fields,
    "named tuple": Entries,
    "tuple": lambda loss, logits, norm: (loss, logits, norm),
    "dict with parts": lambda loss, logits, norm: {
        "first_loss": 7 * loss.detach(), "loss": loss, "logits": logits, "norm": norm, "norm_loss": norm.square()
    },
}  # fmt: skip


class Returns(nn.Module):
    """Returns a loss, scores and a number."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kind = nn.Linear(4, 3), kind

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        scores = self.layer(x)
        return self.kind(F.cross_entropy(scores, labels), scores, self.layer.bias.norm())


NAMED = ColumnDataset(x=PAIRS.tensors[0], labels=PAIRS.tensors[1])


def by_hand(accumulation: int) -> tuple[Tensor, list[float], list[float]]:
    """A plain loop over the samples in order: weights, losses and norms of the updates."""
    model, losses, norms = Returns(Entries), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in torch.arange(16).split(4 * accumulation):
        found = []
        for rows in window.split(4):
            loss, _, norm = model(INPUTS[rows], PAIRS.tensors[1][rows])
            (loss / accumulation).backward()
            found.append((loss.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss for loss, _ in found) / accumulation)
        norms.append(sum(norm for _, norm in found) / accumulation)
    return model.layer.weight, losses, norms


@pytest.mark.parametrize("api", ["python", "config files"])
@pytest.mark.parametrize(
    ("kind", "accumulation", "graph"),
    [
        *((kind, number, False) for kind in RETURNED for number in (1, 2)),
        ("dataclass", 2, True),
        ("dict with parts", 1, True),
    ],
)
@pytest.mark.exhaustive(every=6)
def test_losses_and_numbers_of_any_output_are_trained_on_and_logged(
    kind: str, graph: bool, accumulation: int, api: str, tmp_path: Path
) -> None:
    model = Returns(RETURNED[kind])
    if api == "python":
        settings = {"batch_size": 4, "gradient_accumulation_steps": accumulation, "lr": 0.1, "graph": graph}
        settings |= {"optimizer": "SGD", "lr_scheduler_type": None, "num_epochs": 1}
        loader = DataLoader(NAMED, 4)
        trainer: Any = Trainer(model, config(tmp_path, **settings), train_dataloader=loader)
        trainer.train()
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = [{k: v[i : i + 4] for k, v in NAMED.columns.items()} for i in range(0, 16, 4)]
        stepper = (
            GraphTrainer(GraphBase(model, optimizer, backend="aot_eager"), loader, accumulation) if graph else None
        )
        trainer = stepper or EagerTrainer(model, loader, optimizer, accumulation)
        trainer.train(0, 4 // accumulation)
    weight, losses, norms = by_hand(accumulation)
    torch.testing.assert_close(model.layer.weight, weight, rtol=0 if not graph else 1e-6, atol=0 if not graph else 1e-7)
    logged = {name: [value for value, _ in history.values()] for name, history in trainer.storage.histories().items()}
    assert logged["total_loss"] == pytest.approx(losses, rel=1e-6)
    if kind != "tuple":
        assert logged["loss"] == pytest.approx(losses, rel=1e-6)
        assert logged["norm"] == pytest.approx(norms, rel=1e-6)


class SometimesMore(Returns):
    """Returns a further loss in every second call, and the names of the trainer's own metrics."""

    num_calls = 0

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        self.num_calls += 1
        more = {"more_loss": self.layer.weight.mean().square()} if self.num_calls % 2 else {}
        return {"loss": F.cross_entropy(self.layer(x), labels), **more, "lr": 7.0, "accuracy": 0.25}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_number_of_some_batches_is_the_mean_over_these(accumulation: int, tmp_path: Path) -> None:
    settings = {"batch_size": 4, "gradient_accumulation_steps": accumulation, "num_epochs": 1, "log_steps": 1}
    trainer = Trainer(SometimesMore(None), config(tmp_path, **settings), NAMED)
    trainer.train()
    assert len(trainer.storage.history("more_loss").values()) == 2
    latest = {name: value for name, (value, _) in trainer.storage.latest().items()}
    assert (latest["model/lr"], latest["accuracy"]) == (7.0, 0.25)
    assert latest["lr"] != 7.0


class Detector(nn.Module):
    """Called as those of torchvision: losses in training, a dict of predictions for each image in evaluation.

    As FCOS it has a ``compute_loss`` of another use, and losses without "loss" in their names.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(1, 4, 1)

    def forward(self, images: list[Tensor], targets: Any = None) -> Any:
        boxes_B4 = torch.stack([self.layer(image).mean(dim=(1, 2)) for image in images])
        if not self.training:
            return [{"boxes": box[None], "scores": torch.ones(1)} for box in boxes_B4]
        expected_B4 = torch.stack([target["boxes"][0] for target in targets])
        return self.compute_loss(targets, boxes_B4, expected_B4)

    def compute_loss(self, targets: Any, boxes_B4: Tensor, expected_B4: Tensor) -> dict[str, Tensor]:
        return {"box": (boxes_B4 - expected_B4).abs().mean(), "size": 0.1 * boxes_B4.square().mean()}


def scenes() -> list[Any]:
    """Images of several sizes with their boxes."""
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.rand(1, 4 + i % 3, 5, generator=draw), {"boxes": torch.rand(1, 4, generator=draw), "labels": i})
        for i in range(10)
    ]


class MeanBoxError(torchmetrics.Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("errors", [], dist_reduce_fx="cat")

    def update(self, predictions: Any, targets: Any) -> None:
        for prediction, target in zip(predictions, targets, strict=True):
            self.errors.append((prediction["boxes"] - target["boxes"]).abs().mean())

    def compute(self) -> Tensor:
        return torch.stack(self.errors).mean()


def mean_box_error(predictions: Any, targets: Any) -> dict[str, float]:
    metric = MeanBoxError()
    metric.update(predictions, targets)
    return {"MeanBoxError": metric.compute().item()}


@pytest.mark.parametrize("metric", [MeanBoxError(), mean_box_error], ids=["torchmetrics", "function"])
def test_a_detection_model_takes_lists_of_images_and_of_dicts(metric: Any, tmp_path: Path) -> None:
    data, model, theirs = scenes(), Detector(), Detector()
    loader = DataLoader(data, 4, collate_fn=lambda samples: tuple(zip(*samples, strict=True)))
    settings = {"optimizer": "SGD", "lr_scheduler_type": None, "num_epochs": 2, "early_stopping": None}
    settings |= {"greater_is_better": False, "gradient_accumulation_steps": 3}
    trainer = Trainer(
        model, config(tmp_path, **settings), train_dataloader=loader, eval_dataloader=loader, metrics_handler=metric
    )
    results = trainer.train()

    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    for _ in range(2):
        for images, targets in loader:  # the last batch is shorter: weighted by its samples
            (sum(theirs(images, targets).values()) * len(images) / 10).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.layer.weight, theirs.layer.weight)
    images, targets = zip(*data, strict=True)
    assert results == pytest.approx(mean_box_error(theirs.eval()(images), targets), rel=1e-5)
    assert len(trainer.storage.history("loss_size").values()) == 2


WEIGHTS = torch.tensor([1.0, 2.0, 0.5])
WEIGHTED = nn.CrossEntropyLoss(weight=WEIGHTS)


class Labelled(nn.Module):
    """``WEIGHTED`` as a loss of the user's own."""

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels, weight=WEIGHTS)


LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "object in the configuration": ({"loss": WEIGHTED}, {}),
    "name and tensor": ({"loss": {"name_": "CrossEntropyLoss", "weight": WEIGHTS}}, {}),
    "name and list": ({"loss": {"name_": "CrossEntropyLoss", "weight": WEIGHTS.tolist()}}, {}),
    "object for the trainer": ({}, {"loss": WEIGHTED}),
    "own object for the trainer": ({}, {"loss": Labelled()}),
}


@pytest.mark.parametrize("form", LOSSES)
def test_a_loss_with_class_weights_in_each_form(form: str, tmp_path: Path) -> None:
    settings, arguments = LOSSES[form]
    torch.manual_seed(0)
    model, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(model.state_dict())
    given = config(tmp_path, optimizer="SGD", lr_scheduler_type=None, num_epochs=1, **settings)
    loader = DataLoader(PAIRS, 8)
    trainer = Trainer(model, given, train_dataloader=loader, eval_dataset=PAIRS, **arguments)
    results = trainer.train()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    for x, labels in loader:
        WEIGHTED(theirs(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.weight, theirs.weight)
    written = trainer.config.loss
    if form == "own object for the trainer":
        assert written == "custom_"
    else:  # of the complete data set
        assert results["loss"] == pytest.approx(WEIGHTED(theirs(INPUTS), PAIRS.tensors[1]).item(), rel=1e-6)
        assert written == {"name_": "CrossEntropyLoss", "weight": [1.0, 2.0, 0.5]}
        trainer.config.save_to_yaml(tmp_path / "saved.yaml")
        assert TrainingConfig.load(tmp_path / "saved.yaml").loss == written


def test_class_weights_of_numpy_have_the_precision_of_lists(tmp_path: Path) -> None:
    """Those that scikit-learn computes are float64, whatever the model."""
    given = {"name_": "CrossEntropyLoss", "weight": WEIGHTS.double().numpy(), "label_smoothing": np.float64(0.1)}
    trainer = Trainer(nn.Linear(4, 3), config(tmp_path, num_epochs=1, loss=given), PAIRS, PAIRS)
    trainer.train()
    assert trainer.config.loss == {"name_": "CrossEntropyLoss", "weight": WEIGHTS.tolist(), "label_smoothing": 0.1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "weight", [[1.0, 2.0, 0.5], WEIGHTS.double().numpy(), WEIGHTS], ids=["list", "NumPy", "tensor"]
)
def test_class_weights_without_a_dtype_have_that_of_the_model(dtype: torch.dtype, weight: Any, tmp_path: Path) -> None:
    data, model = TensorDataset(INPUTS.to(dtype), PAIRS.tensors[1]), nn.Linear(4, 3).to(dtype)
    given = config(tmp_path, num_epochs=1, loss={"name_": "CrossEntropyLoss", "weight": weight})
    trainer = Trainer(model, given, data, data)
    results = trainer.train()
    assert trainer.config.loss == {"name_": "CrossEntropyLoss", "weight": WEIGHTS.tolist()}
    weighted = nn.CrossEntropyLoss(weight=WEIGHTS.to(dtype))
    expected = weighted(model(data.tensors[0]), data.tensors[1]).item()
    assert results["loss"] == pytest.approx(expected, rel=1e-6 if dtype is torch.float64 else 0.02)


@pytest.mark.parametrize("head", [torch.float32, torch.bfloat16])
def test_class_weights_have_the_dtype_of_the_outputs(head: torch.dtype, tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 3).to(head)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.body(inputs.bfloat16()).to(head)).float()

    model, weight = Net(), [1 / 3, 2.0, 0.5]
    given = config(tmp_path, num_epochs=1, loss={"name_": "CrossEntropyLoss", "weight": weight})
    results = Trainer(model, given, PAIRS, PAIRS).train()
    expected = nn.CrossEntropyLoss(weight=torch.tensor(weight))(model(PAIRS.tensors[0]), PAIRS.tensors[1])
    assert results["loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_class_weights_under_autocast_are_those_of_single_precision(tmp_path: Path) -> None:
    model, weight = nn.Linear(4, 3), [1 / 3, 2.0, 0.5]
    given = config(tmp_path, num_epochs=1, loss={"name_": "CrossEntropyLoss", "weight": weight}, mixed_precision="bf16")
    results = Trainer(model, given, PAIRS, PAIRS).train()
    with torch.autocast("cpu", torch.bfloat16):
        expected = nn.CrossEntropyLoss(weight=torch.tensor(weight))(model(PAIRS.tensors[0]), PAIRS.tensors[1])
    assert results["loss"] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("form", ["object", "name and tensor", "trainer", "saved"])
def test_class_weights_of_a_model_in_double_precision_keep_their_dtype(form: str, tmp_path: Path) -> None:
    weighted = nn.CrossEntropyLoss(weight=WEIGHTS.double() / 3)
    written = {"name_": "CrossEntropyLoss", "weight": weighted.weight.tolist(), "dtype": "float64"}
    forms = {"object": weighted, "name and tensor": {"name_": "CrossEntropyLoss", "weight": weighted.weight}}
    given = config(tmp_path, num_epochs=1, **({"loss": forms[form]} if form in forms else {}))
    if form == "saved":
        config(tmp_path, num_epochs=1, loss=weighted).save_to_yaml(tmp_path / "saved.yaml")
        given = TrainingConfig.load(tmp_path / "saved.yaml")
    data = TensorDataset(INPUTS.double(), PAIRS.tensors[1])
    model = nn.Linear(4, 3).double()
    trainer = Trainer(model, given, data, data, **({"loss": weighted} if form == "trainer" else {}))
    results = trainer.train()
    assert trainer.config.loss == written
    assert results["loss"] == pytest.approx(weighted(model(data.tensors[0]), data.tensors[1]).item(), rel=1e-6)


def test_a_dtype_of_a_loss_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loss.*dtype='float6'.*Did you mean 'float16'"):
        config(tmp_path, loss={"name_": "CrossEntropyLoss", "weight": [1.0], "dtype": "float6"})


def test_a_compute_loss_of_another_use_leaves_the_weights_of_the_criterion(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Net(nn.Linear):
        def compute_loss(self, outputs: Tensor) -> Tensor:
            raise AssertionError("not of outputs and target")

    model, theirs = Net(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(model.state_dict())
    given = config(tmp_path, optimizer="SGD", num_epochs=1, gradient_accumulation_steps=2, loss=WEIGHTED)
    results = Trainer(model, given, train_dataloader=DataLoader(PAIRS, 8), eval_dataset=PAIRS).train()
    inputs, labels = PAIRS.tensors  # both batches are one update
    WEIGHTED(theirs(inputs), labels).backward()
    torch.optim.SGD(theirs.parameters(), lr=0.01).step()
    torch.testing.assert_close(model.weight, theirs.weight)
    assert results["loss"] == pytest.approx(WEIGHTED(theirs(inputs), labels).item(), rel=1e-6)
    (warning,) = [one.getMessage() for one in caplog.records if "is not called" in one.getMessage()]
    assert "Net.compute_loss(outputs: torch.Tensor) -> torch.Tensor is not called" in warning
    assert "The loss is CrossEntropyLoss" in warning


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.usefixtures("no_compiler")
def test_a_criterion_compares_with_the_labels_that_label_names_declares(graph: bool, tmp_path: Path) -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model, theirs = Net(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(model.state_dict())
    inputs, answers = INPUTS, PAIRS.tensors[1].clone()
    answers[:5] = -100  # the batches of an update have other numbers of labels
    data = ColumnDataset(x=inputs, labels=(answers + 1) % 3, answers=answers)
    given = config(
        tmp_path, optimizer="SGD", num_epochs=1, gradient_accumulation_steps=2, label_names=["answers"], graph=graph,
        dataloader_shuffle=False, metrics=["Accuracy"],
    )  # fmt: skip
    results = Trainer(model, given, data, data).train()
    F.cross_entropy(theirs(inputs), answers).backward()
    torch.optim.SGD(theirs.parameters(), lr=0.01).step()
    torch.testing.assert_close(model.weight, theirs.weight)
    scores, counted = theirs(inputs), answers != -100
    assert results["loss"] == pytest.approx(F.cross_entropy(scores, answers).item(), rel=1e-6)
    assert results["accuracy"] == pytest.approx(float((scores.argmax(1) == answers)[counted].float().mean()))


def test_labels_that_are_declared_and_missing_are_an_error(tmp_path: Path) -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    data = ColumnDataset(x=INPUTS, labels=PAIRS.tensors[1])
    given = config(tmp_path, num_epochs=1, label_names=["answers"], eval_strategy="no")
    with pytest.raises(ConfigError, match=r"none of answers is among the batch's fields x, labels.*label_names"):
        Trainer(Net(4, 3), given, data).train()


def test_losses_without_loss_in_their_names_are_an_error_that_lists_them(tmp_path: Path) -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            scores = super().forward(x)
            return {"ce": F.cross_entropy(scores, y), "reg": scores.square().mean()}

    data = ColumnDataset(x=INPUTS, y=PAIRS.tensors[1])
    given = config(tmp_path, num_epochs=1, eval_strategy="no")
    with pytest.raises(ConfigError, match=r"returned dict with 'ce', 'reg'; a loss has the name 'loss', or 'loss' in"):
        Trainer(Net(4, 3), given, data).train()


def test_a_causal_language_model_without_labels_names_them(tmp_path: Path) -> None:
    @dataclass
    class CausalLMOutput:
        logits: Tensor
        loss: Tensor | None = None

    class Net(nn.Embedding):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **others: Any) -> CausalLMOutput:
            return CausalLMOutput(super().forward(input_ids))

    data = ColumnDataset(input_ids=torch.arange(64).reshape(16, 4))
    given = config(tmp_path, num_epochs=1, eval_strategy="no")
    with pytest.raises(ConfigError, match="causal language model are its tokens: add labels=input_ids to each sample"):
        Trainer(Net(64, 64), given, data).train()


def test_a_loss_of_ones_own_in_a_configuration_is_an_error_that_names_the_argument(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TrainingConfig.loss: got .*Labelled"):
        config(tmp_path, loss=Labelled())
    with pytest.raises(ConfigTypeError, match=r"Trainer.loss: got the class CrossEntropyLoss.*a module or a function"):
        Trainer(nn.Linear(4, 3), config(tmp_path), PAIRS, loss=nn.CrossEntropyLoss)


@pytest.mark.parametrize("loss", ["MSELoss", "L1Loss", "HuberLoss", nn.SmoothL1Loss()])
@pytest.mark.parametrize("kind", ["pairs", "fields"])
def test_outputs_are_not_compared_with_the_targets_of_other_samples(kind: str, loss: Any, tmp_path: Path) -> None:
    class Net(nn.Linear):
        is_flat = False

        def forward(self, x: Tensor) -> Tensor:
            outputs = super().forward(x)
            return outputs[:, 0] if self.is_flat else outputs

    def trainer(targets: Tensor) -> Trainer:
        data: Any = TensorDataset(INPUTS, targets)
        if kind == "fields":
            data = ColumnDataset(x=INPUTS, labels=targets)
        settings = {"loss": loss} if isinstance(loss, str) else {}
        own = None if isinstance(loss, str) else loss
        return Trainer(Net(4, 1), config(tmp_path, num_epochs=1, **settings), data, loss=own)

    with pytest.raises(ConfigError, match=r"\(8, 1\) .*\(8,\) .*\(8, 8\)"):
        trainer(INPUTS[:, 0]).train()
    assert not (tmp_path / "metrics.json").exists()
    trainer(INPUTS[:, :1]).train()
    Net.is_flat = True
    with pytest.raises(ConfigError, match=r"\(8,\) .*\(8, 1\) .*\(8, 8\).* targets.squeeze\(1\)"):
        trainer(INPUTS[:, :1]).train()


PICTURES = torch.rand(32, 1, 4, 4, generator=torch.Generator().manual_seed(1))
CLASSES = torch.randint(3, (32,), generator=torch.Generator().manual_seed(2))
DATA = TensorDataset(PICTURES, CLASSES)
VOCABULARY = 11
TEXTS = (torch.arange(32)[:, None] + torch.arange(6)) % VOCABULARY  # each token is the one before, plus one


class AutoEncoder(nn.Module):
    """``gives_pair``: also what a variational one gives."""

    def __init__(self, gives_pair: bool) -> None:
        super().__init__()
        self.layer, self.gives_pair = nn.Linear(16, 16), gives_pair

    def forward(self, x: Tensor) -> Any:
        out = torch.sigmoid(self.layer(x.flatten(1)))
        return (out, out.mean(1)) if self.gives_pair else out


class Reconstructing(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        out = model(inputs[0])
        return F.mse_loss(out[0] if isinstance(out, tuple) else out, inputs[0].flatten(1))


@pytest.mark.parametrize("gives_pair", [True, False])
def test_a_reconstruction_has_no_accuracy_and_none_ends_its_run(
    gives_pair: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainwright")
    settings = config(tmp_path, num_epochs=8, print_steps=1000)
    trainer = Reconstructing(AutoEncoder(gives_pair), settings, DATA, DATA)
    assert set(trainer.train()) == {"loss"}
    assert trainer.epoch == 8
    assert "accuracy" not in trainer.storage.latest()
    assert any("No accuracy is computed" in record.getMessage() for record in caplog.records)


def test_a_loss_that_is_not_of_classes_has_no_accuracy(tmp_path: Path) -> None:
    numbers = TensorDataset(PICTURES.flatten(1), (CLASSES > 0).float()[:, None])
    trainer = Trainer(nn.Linear(16, 1), config(tmp_path, loss="MSELoss"), numbers, numbers)
    assert set(trainer.train()) == {"loss"}
    asked = Trainer(nn.Linear(16, 1), config(tmp_path, loss="MSELoss", metric="Accuracy"), numbers, numbers)
    assert set(asked.train()) == {"loss", "accuracy"}


def test_a_classification_by_a_loss_of_the_users_own_keeps_its_accuracy(tmp_path: Path) -> None:
    class Smoothed(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Tensor:
            return F.cross_entropy(model(inputs[0].flatten(1)), inputs[1], label_smoothing=0.1)

    trainer = Smoothed(nn.Linear(16, 3), config(tmp_path), DATA, DATA)
    assert set(trainer.train()) == {"loss", "accuracy"}
    assert "accuracy" in trainer.storage.latest()


class NextToken(nn.Module):
    """Predicts ``input + step`` with certainty; ``shifts``: its loss is that of the next token, as in transformers."""

    def __init__(self, step: int, shifts: bool) -> None:
        super().__init__()
        self.scale, self.step, self.shifts = nn.Parameter(torch.tensor(3.0)), step, shifts
        self.loss_type = "ForCausalLM" if shifts else None

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.scale * F.one_hot((input_ids + self.step) % VOCABULARY, VOCABULARY).float()
        if labels is None:
            return {"logits": scores}
        of, to = (scores[:, :-1], labels[:, 1:]) if self.shifts else (scores, labels)
        return {"loss": F.cross_entropy(of.transpose(1, 2), to), "logits": scores}


@pytest.mark.parametrize(("step", "shifts", "accuracy"), [(1, True, 1.0), (0, True, 0.0), (0, False, 1.0)])
def test_labels_are_shifted_where_the_loss_shifts_them(
    step: int, shifts: bool, accuracy: float, tmp_path: Path
) -> None:
    data = [{"input_ids": row, "labels": row} for row in TEXTS]
    trainer = Trainer(NextToken(step, shifts), config(tmp_path, num_epochs=1, lr=1e-6), data, data)
    assert trainer.train()["accuracy"] == accuracy
    assert trainer.storage.latest()["accuracy"][0] == accuracy  # of the training


@pytest.mark.parametrize("loss_ignores", ["declared", None, [-100, 3]])
def test_labels_are_shifted_by_declaration_where_all_first_scores_are_equal(loss_ignores: Any, tmp_path: Path) -> None:
    data = [{"input_ids": row, "labels": row} for row in TEXTS]
    model = NextToken(1, shifts=True)
    model.scale.data.zero_()  # the loss is that of any comparison; one update makes the right scores the largest
    settings = config(tmp_path, num_epochs=1, lr=1.0, loss_ignores=loss_ignores, dataloader_shuffle=False)
    trainer = Trainer(model, settings, data, data)
    assert trainer.train()["accuracy"] == 1.0
    first = (TEXTS[:8, 1:] != 3) if loss_ignores == [-100, 3] else torch.ones(8, 5, dtype=torch.bool)
    counted = (TEXTS[:, 1:] != 3) if loss_ignores == [-100, 3] else torch.ones(32, 5, dtype=torch.bool)
    wrong = first & (TEXTS[:8, 1:] != 0)  # of equal scores the first class is the largest
    expected = 1 - wrong.sum().item() / counted.sum().item()
    assert trainer.storage.latest()["accuracy"][0] == pytest.approx(expected)  # of the training


@pytest.mark.parametrize("is_declared", [True, False])
def test_labels_that_are_the_tokens_are_one_warning_unless_the_model_says_what_it_predicts(
    is_declared: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = [{"input_ids": row, "labels": row} for row in TEXTS]
    model = NextToken(1, shifts=True)
    model.loss_type = "ForCausalLM" if is_declared else None
    trainer = Trainer(model, config(tmp_path, num_epochs=2, lr=1e-6), data, data)
    assert trainer.train()["accuracy"] == float(is_declared)
    warned = [record for record in caplog.records if "NextToken.loss_type = 'ForCausalLM'" in record.getMessage()]
    assert len(warned) == (not is_declared)


def test_a_first_batch_whose_labels_are_all_ignored_does_not_decide_whether_they_are_shifted(tmp_path: Path) -> None:
    data: list[dict[str, Tensor]] = [{"input_ids": row, "labels": row} for row in TEXTS]
    data[0] = {"input_ids": TEXTS[0], "labels": torch.full_like(TEXTS[0], -100)}
    settings = config(tmp_path, eval_batch_size=1)
    assert Trainer(NextToken(1, shifts=True), settings, data, data).evaluate()["accuracy"] == 1.0


def test_labels_that_are_shifted_out_have_no_weight_in_the_loss(tmp_path: Path) -> None:
    rows = [torch.cat([row[: 2 + n % 4], row.new_full((4 - n % 4,), -100)]) for n, row in enumerate(TEXTS)]
    data = [{"input_ids": row, "labels": labels} for row, labels in zip(TEXTS, rows, strict=True)]
    model = NextToken(1, shifts=True)
    losses = [
        Trainer(model, config(tmp_path / str(size), eval_batch_size=size), data, data).evaluate()["loss"]
        for size in (1, 5, 32)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@pytest.mark.parametrize("loss", ["CrossEntropyLoss", "NLLLoss"])
@pytest.mark.parametrize(
    ("model", "labels"),
    [
        (nn.Linear(4, 1), INPUTS[:, :1]),  # of numbers: cross-entropy would be 0
        (nn.Linear(4, 1), PAIRS.tensors[1] * 0),
        (nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), (INPUTS[:, 0] > 0).float()),  # would be one distribution
    ],
)
def test_one_score_for_each_sample_is_not_for_a_loss_of_classes(
    loss: str, model: nn.Module, labels: Tensor, tmp_path: Path
) -> None:
    trainer = Trainer(model, config(tmp_path, loss=loss), TensorDataset(INPUTS, labels))
    with pytest.raises(ConfigError, match=rf"{loss} takes a score for each class.*\(8,.*BCEWithLogitsLoss.*MSELoss"):
        trainer.train()
    assert not (tmp_path / "metrics.json").exists()


class Chooses(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).argmax(1)


class Computes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def call(self, x: Tensor) -> Tensor:  # as Keras calls it
        return self.layer(x)  # type: ignore[no-any-return]


def test_classes_are_no_scores_and_a_model_without_forward_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"takes scores, and the outputs are int64 of .* without argmax"):
        Trainer(Chooses(4, 3), config(tmp_path), PAIRS).train()
    with pytest.raises(ConfigError, match=r"returned tuple. Return one of the 2 from it, such as outputs\[0\]"):
        Trainer(nn.LSTM(4, 3), config(tmp_path), PAIRS).train()
    masks = TensorDataset(torch.rand(8, 3, 4, 4), torch.ones(8, 1, 4, 4, dtype=torch.long))
    with pytest.raises(RuntimeError) as of_pixels:
        Trainer(nn.Conv2d(3, 2, 1), config(tmp_path), masks).train()
    assert "labels.squeeze(1) of (B, 1, H, W)" in "".join(of_pixels.value.__notes__)
    with pytest.raises(NotImplementedError) as error:
        Trainer(Computes(), config(tmp_path), PAIRS).train()
    assert "define it, or rename the method that computes the outputs" in "".join(error.value.__notes__)


def test_scores_are_not_for_a_loss_of_log_probabilities(tmp_path: Path) -> None:
    settings = config(tmp_path, num_epochs=1, loss="NLLLoss")
    Trainer(nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)), settings, PAIRS).train()
    with pytest.raises(ConfigError, match=r"NLLLoss takes logarithms.*log_softmax"):
        Trainer(nn.Linear(4, 3), settings, PAIRS).train()


PARTS: dict[str, tuple[Any, str | None]] = {
    "in the total": (lambda loss, other: {"loss": loss + 0.1 * other, "a_loss": loss, "b_loss": other}, None),
    "detached": (lambda loss, other: {"loss": loss, "a_loss": loss.detach(), "b_loss": other.detach()}, None),
    "not in the total": (
        lambda loss, other: {"loss": loss, "a_loss": loss, "b_loss": other, "c_loss": other.square()},
        r"'b_loss', 'c_loss' is logged, not trained: add it to `loss`",
    ),
    "of a total by another name": (
        lambda loss, other: {"all_losses": loss + 0.1 * other, "a_loss": loss, "b_loss": other},
        r"'all_losses' beside 'a_loss', 'b_loss'.*count twice: return the total as `loss`",
    ),
    "of a copy by another name": (
        lambda loss, other: {"all_losses": loss, "a_loss": loss.detach()},
        r"'all_losses' beside 'a_loss'.*count twice",
    ),
    "detached, without a total": (
        lambda loss, other: {"a_loss": loss, "b_loss": other.detach()},
        r"'b_loss' has no gradient.*return the total as `loss`",
    ),
    "zero, without a total": (lambda loss, other: {"a_loss": loss, "b_loss": torch.tensor(0.0)}, None),
}


@pytest.mark.parametrize("api", ["python", "config files"])
@pytest.mark.parametrize("kind", PARTS)
def test_losses_that_are_not_trained_or_count_twice_are_one_warning(
    kind: str, api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, message = PARTS[kind]
    model = Returns(lambda loss, logits, norm: make(loss, norm))
    if api == "python":
        Trainer(model, config(tmp_path, num_epochs=1), NAMED).train()
    else:
        loader = DataLoader(NAMED, 4)
        EagerTrainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.1)).train(0, 2)
    warned = [record.getMessage() for record in caplog.records if "_loss'" in record.getMessage()]
    assert len(warned) == (message is not None)
    assert message is None or re.search(message, warned[0])


@pytest.mark.parametrize("api", ["python", "config files"])
def test_a_detached_total_beside_its_parts_is_an_error_that_names_both(api: str, tmp_path: Path) -> None:
    model = Returns(lambda loss, logits, norm: {"loss": (loss + norm).detach(), "a_loss": loss, "b_loss": norm})
    if api == "python":
        trainer: Any = Trainer(model, config(tmp_path, num_epochs=1), NAMED)
        train = trainer.train
    else:
        trainer = EagerTrainer(model, DataLoader(NAMED, 4), torch.optim.SGD(model.parameters(), lr=0.1))
        train = partial(trainer.train, 0, 2)
    with pytest.raises(ConfigError, match=r"'loss' cannot be differentiated.*the total; 'a_loss', 'b_loss'"):
        train()


def test_the_parts_of_a_loss_are_not_evaluated_and_choose_no_best_model(tmp_path: Path) -> None:
    """The part that grows during the training is detached; the loss falls, so the last model is the best."""
    model = Returns(
        lambda loss, logits, norm: {"loss": loss, "logits": logits, "size_loss": 100 * logits.square().mean().detach()}
    )
    settings: dict[str, Any] = {"optimizer": "SGD", "lr": 0.3, "lr_scheduler_type": None, "num_epochs": 3}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_enabled": True}
    trainer = Trainer(model, config(tmp_path, **settings), NAMED, NAMED)
    trainer.train()
    losses = [value for value, _ in trainer.storage.history("eval_loss").values()]
    with torch.no_grad():
        loaded = trainer.model(*PAIRS.tensors)["loss"].item()
    assert loaded == pytest.approx(losses[-1], rel=1e-6)
    assert loaded == pytest.approx(min(losses), rel=1e-6)
    assert loaded < losses[0]


@pytest.mark.parametrize(
    ("model", "loss", "is_said"),
    [
        (nn.Sequential(nn.Linear(4, 2), nn.Softmax(1)), "CrossEntropyLoss", True),
        (nn.Linear(4, 2), "CrossEntropyLoss", False),
        (nn.Sequential(nn.Linear(4, 2), nn.LogSoftmax(1)), "CrossEntropyLoss", False),
        (nn.Sequential(nn.Linear(4, 2), nn.LogSoftmax(1)), "NLLLoss", False),
    ],
    ids=["softmax", "scores", "log_softmax", "NLLLoss"],
)
def test_softmax_before_the_loss_is_one_warning(
    model: nn.Module, loss: str, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
    Trainer(model, quiet(tmp_path, num_epochs=2, batch_size=4, loss=loss, metrics=None), data).train()
    assert caplog.text.count("as after softmax") == is_said


SEVERAL = (INPUTS[:, :3] > -0.5).float()  # several labels of most samples


@pytest.mark.parametrize("kind", ["pairs", "fields"])
def test_several_labels_of_a_sample_are_not_for_the_loss_of_classes_by_default(kind: str, tmp_path: Path) -> None:
    def trainer(**settings: Any) -> Trainer:
        data: Any = TensorDataset(INPUTS, SEVERAL)
        if kind == "fields":
            data = ColumnDataset(input=INPUTS, labels=SEVERAL)
        torch.manual_seed(0)
        return Trainer(nn.Linear(4, 3), config(tmp_path, num_epochs=1, **settings), data, data)

    with pytest.raises(ConfigError, match=r"sum to 1, and those of a sample sum to [23].*loss='BCEWithLogitsLoss'"):
        trainer().train()
    assert not (tmp_path / "metrics.json").exists()
    right = trainer(loss="BCEWithLogitsLoss")
    loss = right.train()["loss"]
    scores = right.model.eval()(INPUTS)
    by_hand = -(SEVERAL * F.logsigmoid(scores) + (1 - SEVERAL) * F.logsigmoid(-scores)).mean()
    assert loss == pytest.approx(by_hand.item(), rel=1e-5)


SMOOTH = F.one_hot(PAIRS.tensors[1], 3) * 0.9 + 0.1 / 3
SUMS: dict[str, tuple[Tensor, dict[str, Any], bool]] = {
    "several labels, as declared": (SEVERAL, {"loss": "CrossEntropyLoss"}, False),
    "several labels with weights": (SEVERAL * 0.7, {}, True),
    "samples with weights": (SMOOTH * 0.5, {}, True),
    "smooth": (SMOOTH, {}, False),
    "of low precision": (SMOOTH.bfloat16().float(), {}, False),
    "one of each": (F.one_hot(PAIRS.tensors[1], 3).float(), {}, False),
    "some that do not count": (SMOOTH * (torch.arange(16) % 3 > 0)[:, None], {}, False),
}


@pytest.mark.parametrize("kind", SUMS)
def test_class_probabilities_that_do_not_sum_to_one_are_a_warning(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    targets, settings, is_warned = SUMS[kind]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    Trainer(model, config(tmp_path, num_epochs=2, metrics=None, **settings), TensorDataset(INPUTS, targets)).train()
    assert caplog.text.count("If a sample may have several labels, set loss='BCEWithLogitsLoss'") == is_warned


class OptionalLabels(nn.Module):
    """Returns its loss if it gets ``labels``, which count twice there."""

    def __init__(self, *, is_dict: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.is_dict = nn.Linear(4, 3), is_dict

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.layer(x)
        if labels is None:
            return {"logits": scores} if self.is_dict else scores
        return {"loss": 2 * F.cross_entropy(scores, labels), "logits": scores}


class OfTokens(nn.Module):
    """As nanoGPT: (scores, loss), with a loss if it gets ``targets``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        scores = self.layer(x)
        return scores, None if targets is None else F.cross_entropy(scores, targets)


class WithSize(nn.Linear):
    def forward(self, input: Tensor, target_size: int | None = None) -> Tensor:  # no labels
        return super().forward(input)


@pytest.mark.parametrize("is_dict", [False, True])
def test_a_loss_of_the_model_that_pairs_leave_out_is_one_warning(
    is_dict: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trained(model: nn.Module, data: Any, **settings: Any) -> float:
        caplog.clear()
        loss = Trainer(model, config(tmp_path, num_epochs=1, **settings), data, data).train()["loss"]
        scores = getattr(model, "layer", model)(INPUTS).detach()
        return loss / float(F.cross_entropy(scores, PAIRS.tensors[1]))

    alike, line = pytest.approx(1, rel=1e-5), "such as ColumnDataset(x=..., labels=...); if not, set loss="
    assert trained(OptionalLabels(is_dict=is_dict), PAIRS) == alike
    assert caplog.text.count("OptionalLabels.forward gets the first item of a pair, without 'labels'") == 1
    assert line in caplog.text
    fields = ColumnDataset(x=INPUTS, labels=PAIRS.tensors[1])
    assert trained(OptionalLabels(is_dict=is_dict), fields) == pytest.approx(2, rel=1e-5)
    assert line not in caplog.text
    assert trained(OptionalLabels(is_dict=is_dict), PAIRS, loss="CrossEntropyLoss") == alike  # as the user says
    assert line not in caplog.text
    assert trained(WithSize(4, 3), PAIRS) == alike
    assert line not in caplog.text


def test_a_loss_after_the_scores_is_answered_with_both(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = ColumnDataset(x=INPUTS, targets=PAIRS.tensors[1])
    with pytest.raises(ConfigTypeError, match=r"Return a dict, {'loss': outputs\[1\], 'logits': outputs\[0\]}"):
        Trainer(OfTokens(), config(tmp_path), fields).train()
    with pytest.raises(ConfigTypeError, match="returned tuple"):
        Trainer(OfTokens(), config(tmp_path), PAIRS).train()
    assert "ColumnDataset(x=..., targets=...)" in caplog.text


class RootMean(nn.Module):
    def __init__(self, *, is_flat: bool) -> None:
        super().__init__()
        self.mean, self.is_flat = nn.MSELoss(), is_flat

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.mean(outputs.squeeze(-1) if self.is_flat else outputs, targets).sqrt()


def ranked(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of all pairs of samples, as is meant."""
    scores = outputs.squeeze(1)
    return F.softplus(-(scores[:, None] - scores) * (targets[:, None] - targets).sign()).mean()


class OwnColumn(nn.Linear):
    def compute_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().mean()


COLUMN_LOSSES: dict[str, tuple[Any, str | None]] = {
    "a function": (lambda outputs, targets: (outputs - targets).square().mean(), "<lambda>"),
    "exp first": (lambda outputs, targets: (outputs.exp() - targets).square().mean(), "<lambda>"),
    "a module": (RootMean(is_flat=False), "RootMean"),
    "of torch": (partial(F.l1_loss), "partial"),
    "of the model": (None, "OwnColumn.compute_loss"),
    "with a column": (lambda outputs, targets: (outputs - targets[:, None]).square().mean(), None),
    "a flat module": (RootMean(is_flat=True), None),
    "a view": (lambda outputs, targets: F.mse_loss(outputs.view(-1), targets), None),
    "a product": (lambda outputs, targets: -(targets.view(-1) @ outputs).sum() + outputs.square().sum(), None),
    "of pairs": (ranked, None),
}


@pytest.mark.parametrize("kind", COLUMN_LOSSES)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_of_the_users_that_compares_outputs_with_other_targets_is_one_warning(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loss, name = COLUMN_LOSSES[kind]
    model = OwnColumn(4, 1) if loss is None else nn.Linear(4, 1)
    for data in (TensorDataset(INPUTS, INPUTS[:, 0]), TensorDataset(INPUTS, INPUTS[:, :1])):
        if kind == "of pairs" and data.tensors[1].dim() == 2:
            continue
        caplog.clear()
        Trainer(model, config(tmp_path, num_epochs=2, metrics=None), data, loss=loss).train()
        is_warned = name is not None and data.tensors[1].dim() == 1
        assert caplog.text.count(f"The loss {name} compares each output with every target") == is_warned
        assert caplog.text.count("compares each output") == is_warned
