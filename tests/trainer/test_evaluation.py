"""Evaluations of the Python API: on several processes as on one, and what they return."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.ranks import on_ranks
from tests.toys import Stream, file_config, quiet
from tests.trainer.conftest import events_in
from tests.trainer.contracts import INPUTS, LABELS, NAMED, PAIRS, Net, ReturnsLosses, config, make
from tests.trainer.test_trainer_overrides import OwnEvaluateStep, OwnEvaluationStep
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig, get_event_storage
from trainwright.base.dist import get_rank, get_world_size
from trainwright.base.errors import ConfigError
from trainwright.data import ColumnDataset
from trainwright.evaluation import EvaluationError, TorchMetricsHandler
from trainwright.hooks import Callback


class Model(nn.Module):
    """Batch normalization, whose buffers differ between the ranks; fails in its second call on ``fails_on``."""

    fails_on: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.num_calls = nn.BatchNorm1d(4), nn.Linear(4, 3), 0
        self.norm.running_mean += 0.1 * (get_rank() + 1)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.fails_on == get_rank() and self.num_calls == 2:
            raise ArithmeticError("in the model")
        result: Tensor = self.layer(self.norm(x))
        return result


class OwnMetric(Trainer):
    def compute_metric(self, model: Any, inputs: Any) -> float:
        return 0.125


class Batches(Callback):
    def on_eval_batch_end(self, batch: Any, logs: Any) -> None:
        assert logs["eval_epoch_loss"] > 0


def rows_of_inputs() -> Stream:
    return Stream(lambda: ({"x": x} for x, _ in data(11)))


class Shared(IterableDataset[Any]):
    """Yields the share of its rank."""

    is_sharded = True

    def __iter__(self) -> Any:
        yield from (data(11)[number] for number in range(get_rank(), 11, get_world_size()))


def ones() -> ColumnDataset:
    return ColumnDataset(x=torch.ones(16, 4))


def config_trainer(folder: Path) -> Any:
    sizes = {"train_micro_batch_size": 2, "test_micro_batch_size": 3}
    return DefaultTrainer(file_config(folder / "config", Model, ones, rows_of_inputs, **sizes))


def data(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(length)
    return TensorDataset(torch.randn(length, 4, generator=generator), torch.randint(3, (length,), generator=generator))


def build(folder: Path, kind: type[Trainer] = Trainer) -> Trainer:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"batch_size": 4, "eval_batch_size": 3, "num_epochs": 1, "save_enabled": False}
    config = quiet(folder / kind.__name__, loss="CrossEntropyLoss", metrics=["Accuracy", "F1Score"], **settings)
    return kind(Model(), config, data(12), data(7), callbacks=[Batches()])


def failure(trainer: Trainer, fails_on: int) -> str:
    trainer.model.fails_on, trainer.model.num_calls = fails_on, 0
    try:
        return str(trainer.evaluate(data(21)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def of_rank(folder: Path) -> dict[str, Any]:
    messages: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainwright.evaluation").addHandler(handler)
    trainer, config = build(folder), config_trainer(folder)
    found: dict[str, Any] = {
        "lengths": {n: trainer.evaluate(data(n)) for n in (1, 2, 3, 4, 7, 12, 19)},
        "logs": trainer.evaluate(trainer.model, {}),
        "list": trainer.evaluate(list(data(5))),
        "loader": trainer.evaluate(DataLoader(data(5), batch_size=2)),
        "predictions": trainer.predict(data(7)).flatten().tolist(),
        "predictions of a loader": trainer.predict(DataLoader(data(7), batch_size=3)).flatten().tolist(),
        "predictions by batch": [x for part in trainer.predict(data(7), iterate=True) for x in part.flatten().tolist()],
        "shared stream": trainer.evaluate(Shared()),
        "predictions of a shared stream": sorted(trainer.predict(Shared()).flatten().tolist()),
        "config files: predictions of a stream": config.predict(rows_of_inputs()).flatten().tolist(),
        "config files: predictions of the test data": sorted(config.predict().flatten().tolist()),
        **{kind.__name__: build(folder, kind).evaluate() for kind in (OwnEvaluateStep, OwnEvaluationStep, OwnMetric)},
    }
    trained = build(folder).train()
    failures = {
        "first": failure(trainer, 0),
        "last": failure(trainer, get_world_size() - 1),
    }
    try:
        trainer.evaluate(iter([]))
    except Exception as error:
        failures["empty"] = f"{type(error).__name__}: {error}"
    return {"results": found, "trained": trained, "failures": failures, "messages": messages}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = on_ranks(of_rank, tmp_path_factory.mktemp("alone"), world_size=1)[0]
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(of_rank, tmp_path_factory.mktemp("ranks"), world_size=request.param, timeout=240)


def test_results_are_those_of_one_process(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    # Uneven data, ranks without batches, loaders and lists, and overrides.
    for rank in ranks:
        for name, expected in alone["results"].items():
            found = rank["results"][name]
            if name == "lengths":
                assert found == {length: pytest.approx(of_length, rel=1e-6) for length, of_length in expected.items()}
            else:
                assert found == pytest.approx(expected, rel=1e-6)  # float32 losses of other batches
        assert rank["results"] == ranks[0]["results"]


def test_evaluations_in_training_are_the_same_on_all(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["trained"].keys() == alone["trained"].keys() == {"loss", "accuracy", "f1_score"}
        assert rank["trained"] == ranks[0]["trained"]


def test_an_error_on_one_process_is_an_error_on_all(ranks: list[dict[str, Any]]) -> None:
    for name, failing in {"first": 0, "last": len(ranks) - 1}.items():
        for number, rank in enumerate(ranks):
            message = "ArithmeticError: in the model"
            if number != failing:
                message = f"EvaluationError: Evaluation failed on rank {failing}: {message}"
            assert rank["failures"][name] == message
        assert f"Evaluation failed on rank {failing}: ArithmeticError: in the model" in ranks[failing]["messages"]


def test_no_data_is_the_same_error_on_all(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    assert "yielded no batch" in alone["failures"]["empty"]
    assert {rank["failures"]["empty"] for rank in ranks} == {alone["failures"]["empty"]}


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
    trainer = Trainer(make(ReturnsLosses), config(tmp_path, log_steps=3), NAMED, NAMED)
    results = trainer.train()
    assert results == trainer.evaluate()
    rows = read_rows(tmp_path)
    assert [row["iteration"] for row in rows] == [2, 5, 6, 8, 11, 13, 14]
    assert rows[-1]["eval_accuracy"] == results["accuracy"]
    assert rows[2]["eval_loss"] > results["loss"]
    assert (tmp_path / "metrics.csv").is_file()
    assert next(tmp_path.glob("events.out.tfevents.*"))
    assert TrainingConfig.load_from_yaml(tmp_path / "training_config.yaml") == trainer.config


def test_a_model_without_a_loss_in_evaluation_gives_its_accuracy(tmp_path: Path) -> None:
    class Quiet(ReturnsLosses):
        def forward(self, inputs: Tensor, labels: Tensor) -> Any:
            outputs = super().forward(inputs, labels)
            return outputs if self.training else {"logits": outputs["logits"]}

    trainer = Trainer(make(Quiet), config(tmp_path), NAMED, NAMED)
    assert set(trainer.train()) == {"accuracy"}


class Acts(nn.Module):
    """Returns scores by the names of ``scores``, and a loss of the fields of ``labels``."""

    def __init__(self, scores: tuple[str, ...]) -> None:
        super().__init__()
        self.layer, self.scores = nn.Linear(4, 3), scores

    def forward(self, x: Tensor, start_positions: Any = None, end_positions: Any = None, actions: Any = None) -> Any:
        labels = next(one for one in (start_positions, actions) if one is not None)
        return {"loss": F.cross_entropy(self.layer(x), labels), **dict.fromkeys(self.scores, self.layer(x))}


@pytest.mark.parametrize(
    ("fields", "scores", "names"),
    [
        (["start_positions", "end_positions"], ("start_logits", "end_logits"), None),
        (["actions"], ("logits",), ["actions"]),
        (["actions", "labels"], ("logits",), ["actions"]),
    ],
)
def test_labels_of_other_names_reach_metrics(fields: list[str], scores: Any, names: Any, tmp_path: Path) -> None:
    def right(predictions: Any, labels: Any) -> dict[str, float]:
        pairs = zip(predictions, labels, strict=True) if isinstance(labels, tuple) else [(predictions, labels)]
        return {"right": sum(float((p.argmax(1) == y).float().mean()) for p, y in pairs)}

    x, labels = torch.randn(9, 4), {name: torch.arange(place, 9 + place) % 3 for place, name in enumerate(fields)}
    model, data = Acts(scores), ColumnDataset(x=x, **labels)
    given = config(tmp_path, label_names=names)
    found = Trainer(model, given, data, data, metrics_handler=right).evaluate()
    used = [labels[name] for name in names or fields]
    assert found["right"] == pytest.approx(sum(float((model.layer(x).argmax(1) == y).float().mean()) for y in used))


def test_a_named_metric_without_labels_or_scores_is_an_error(tmp_path: Path) -> None:
    data = ColumnDataset(x=torch.randn(9, 4), actions=torch.arange(9) % 3)
    with pytest.raises(EvaluationError, match=r"no labels; it has the fields x, actions.*label_names"):
        Trainer(Acts(("logits",)), config(tmp_path, metrics=["Accuracy"]), data).evaluate(data)
    with pytest.raises(EvaluationError, match=r"no scores; there are loss\..*'logits'"):
        Trainer(Acts(()), config(tmp_path, metrics=["Accuracy"]), data).evaluate(data)
    with pytest.raises(ConfigError, match=r"label_names: the batch has no field 'action'. Did you mean 'actions'"):
        Trainer(Acts(("logits",)), config(tmp_path, label_names=["action"]), data).evaluate(data)
    assert Trainer(Acts(("logits",)), config(tmp_path), data).evaluate(data).keys() == {"loss"}


def test_labels_that_evaluation_step_returns_are_used_first(tmp_path: Path) -> None:
    class Own(Trainer):
        def evaluation_step(self, batch: Any) -> Any:
            return {"logits": self.model(batch[0]), "labels": 2 - batch[-1]}

    for data in (PAIRS, TensorDataset(INPUTS, INPUTS, LABELS)):  # also of a batch without labels
        trainer = Own(make(Net), config(tmp_path, metrics=["Accuracy"], eval_strategy="no"), PAIRS)
        expected = (trainer.model.eval()(INPUTS).argmax(1) == 2 - LABELS).float().mean().item()
        assert trainer.evaluate(data)["accuracy"] == pytest.approx(expected)


class ReturnsLabels(nn.Module):
    """Of two tokens for each sample, beside its scores: ``labels``, by the name of what they are."""

    def __init__(self, labels: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.labels = nn.Linear(3, 3), labels

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.layer(x.unflatten(1, (2, 3))).flatten(0, 1)
        found: Any = scores.argmax(1)
        if self.labels == "flat":
            assert labels is not None
            found = labels.flatten()
        elif self.labels == "of the batch":
            scores, found = scores.unflatten(0, (-1, 2)).transpose(1, 2), labels
        elif self.labels == "predicted":
            scores, found = scores.unflatten(0, (-1, 2)).transpose(1, 2), scores.argmax(1).unflatten(0, (-1, 2))
        return {"loss": scores.mean(), "logits": scores, "labels": found}


@pytest.mark.parametrize("api", ["Python", "files"])
@pytest.mark.parametrize("kind", ["predicted", "flat", "of the batch", "of a batch without"])
def test_predicted_classes_that_a_model_returns_as_labels_are_a_warning(
    api: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = torch.arange(100).view(50, 2) % 3
    model, given = (
        ReturnsLabels(kind),
        {"x": INPUTS} if kind == "of a batch without" else {"x": INPUTS, "labels": labels},
    )
    data = ColumnDataset(**given)
    if api == "Python":
        found = Trainer(model, config(tmp_path, metrics=["Accuracy"]), data).evaluate(data)["accuracy"]
    else:
        cfg = file_config(tmp_path, LazyCall(ReturnsLabels)(labels=kind), lambda: data, lambda: data, train_iter=1)
        cfg.train.evaluation.evaluator = LazyCall(TorchMetricsHandler)(metrics=["Accuracy"])
        trainer = DefaultTrainer(cfg)
        model = trainer.model
        found = trainer.test(trainer.cfg, trainer.test_loader, trainer.model)["accuracy"]
    right = model.layer(INPUTS.unflatten(1, (2, 3))).argmax(2) == labels
    is_own = kind in ("predicted", "of a batch without")
    assert found == pytest.approx(1.0 if is_own else right.float().mean().item())
    assert caplog.text.count("ReturnsLabels returns its predicted classes as 'labels'") == (kind == "predicted")


class TwoCalls(Trainer):
    other: Any = staticmethod(lambda inputs: inputs + 1)

    def compute_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        scores, others = model(inputs[0]), model(self.other(inputs[0]))
        return F.cross_entropy(scores, inputs[1]) + 0.1 * (scores - others).square().mean()


class WithOwnScores(TwoCalls):
    def evaluation_step(self, batch: Any) -> Any:
        return {**super().evaluation_step(batch), "logits": self.model(batch[0])}


class SameTwice(TwoCalls):
    other = staticmethod(lambda inputs: inputs)  # with dropout, in training


@pytest.mark.parametrize(
    ("kind", "metrics", "is_warned"),
    [
        (TwoCalls, ["Accuracy"], True),
        (WithOwnScores, ["Accuracy"], False),
        (SameTwice, ["Accuracy"], False),
        (TwoCalls, None, False),
    ],
)
def test_metrics_of_one_of_several_calls_are_one_warning(
    kind: type[Trainer], metrics: Any, is_warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = kind(make(Net), config(tmp_path, num_epochs=2, metrics=metrics), PAIRS, PAIRS)
    results = trainer.train()
    assert (
        caplog.text.count("compute_loss calls the model 2 times for a batch, and metrics read the scores of the last")
        == is_warned
    )
    if metrics is not None:
        read = INPUTS + 1 if is_warned else INPUTS
        right = trainer.model.eval()(read).argmax(1) == LABELS
        assert results["accuracy"] == pytest.approx(right.float().mean().item())


def test_callbacks_see_loss_and_metric_of_an_evaluation_so_far(tmp_path: Path) -> None:
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
    assert {"eval_epoch_loss", "eval_epoch_metric", "eval_loss", "eval_accuracy"} <= tags


class PutsInLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        get_event_storage().put_scalar("is_training", float(model.training))
        return F.cross_entropy(model(inputs[0]), inputs[1])


def test_values_put_during_evaluations_are_not_in_the_curve_of_the_training(tmp_path: Path) -> None:
    data = [(torch.randn(4), i % 2) for i in range(16)]
    settings = TrainingConfig(output_dir=tmp_path, num_epochs=2, early_stopping=None, log_steps=1, save_enabled=False)
    trainer = PutsInLoss(torch.nn.Linear(4, 2), settings, data, data)
    trainer.train()
    assert [value for value, _ in trainer.storage.history("is_training").values()] == [1.0] * 4
    assert trainer.evaluate()["loss"] > 0
    assert len(trainer.storage.history("is_training").values()) == 4
