"""Both APIs compute the mean loss, its parts and metrics by the same code, on any number of ranks."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score, MulticlassHingeLoss

from tests.ranks import on_ranks
from tests.toys import file_config, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.dist import get_rank
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.config.training.metric_config import MetricConfig
from trainwright.data import ColumnDataset, build_image_test_loader
from trainwright.evaluation import (
    ClsEvaluator,
    DatasetEvaluator,
    EvaluationError,
    MetricsHandler,
    PPLEvaluator,
    TorchMetricsHandler,
)
from trainwright.hooks import Callback

IGNORED = -100


def data(length: int = 19, ignored: bool = True) -> ColumnDataset:
    generator = torch.Generator().manual_seed(length)
    x, labels = torch.randn(length, 4, generator=generator), torch.randint(3, (length,), generator=generator)
    if ignored:
        labels[::3] = IGNORED
    return ColumnDataset(x=x, labels=labels)


def three() -> ColumnDataset:
    return data(3)


def every_label(length: int = 19) -> ColumnDataset:
    return data(length, ignored=False)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        scores = self.layer(x)
        digit, norm = F.cross_entropy(scores, labels), scores.square().mean()
        return {"loss": digit + norm, "digit_loss": digit, "norm_loss": norm.detach(), "prediction_scores": scores}


class OneLoss(Parts):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        outputs = super().forward(x, labels)
        return {"lm_loss": outputs["digit_loss"], "prediction_scores": outputs["prediction_scores"]}


class OnlyScores(Parts):
    """As the documented models of config files: no loss in evaluation mode."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        outputs = super().forward(x, labels)
        return outputs if self.training else {"prediction_scores": outputs["prediction_scores"]}


class InOrder(DatasetEvaluator):
    """Without ``merge_state``: rank 0 sees each batch, in the order of the data."""

    def reset(self) -> None:
        self.value = 0.0

    def process(self, inputs: Any, outputs: Any) -> None:
        for one in inputs["x"][:, 0].tolist():
            self.value = 0.9 * self.value + one

    def evaluate(self) -> dict[str, float]:
        return {"in order": self.value}


class FirstScores(MetricsHandler):
    def compute_metrics(self, predictions: Any, labels: Any, **batch: Any) -> dict[str, float]:
        return {"first": float((predictions[:, 0] * torch.arange(len(predictions))).sum()), "labels": len(labels)}


class FailsOnRank1(MulticlassAccuracy):
    def update(self, preds: Any, target: Any) -> None:
        if get_rank() == 1:
            raise ArithmeticError("in the metric")
        super().update(preds, target)


def by_objects(folder: Path, handler: Any, model: Any = Parts, test: Any = data, **settings: Any) -> Trainer:
    sizes = {"batch_size": 4, "eval_batch_size": 3, "num_epochs": 1, "save_enabled": False}
    return Trainer(model(), quiet(folder / "objects", **{**sizes, **settings}), data(), test(), metrics_handler=handler)


def by_files(
    folder: Path, evaluator: Any, model: Any = Parts, test: Any = data, evaluation: Any = (), **train: Any
) -> DefaultTrainer:
    sizes = {"train_micro_batch_size": 4, "test_micro_batch_size": 3, "train_iter": 4}
    cfg = file_config(folder / "files", model, data, test, **{**sizes, **train})
    cfg._set_flag("allow_objects", True)
    cfg.train.evaluation.update({"evaluator": evaluator, **dict(evaluation)})
    return DefaultTrainer(cfg)


def evaluated(folder: Path, *arguments: Any, **settings: Any) -> dict[str, Any]:
    trainer = by_files(folder, *arguments, **settings)
    found: dict[str, Any] = trainer.test(trainer.cfg, trainer.test_loader, trainer.model)
    return found


def accuracy(**settings: Any) -> Any:
    return LazyCall(torchmetrics.Accuracy)(task="multiclass", num_classes=3, ignore_index=IGNORED, **settings)


def own_accuracy() -> Any:
    return torchmetrics.Accuracy(task="multiclass", num_classes=3, ignore_index=IGNORED)


def collection() -> Any:
    names = {"acc": MulticlassAccuracy(3, average="micro"), "f1": MulticlassF1Score(3), "auroc": MulticlassAUROC(3)}
    return torchmetrics.MetricCollection(names)


def results_of_rank(folder: Path) -> dict[str, Any]:
    found = {
        "objects": by_objects(folder, own_accuracy()).evaluate(),
        "files": evaluated(folder, accuracy()),
        "limited": evaluated(folder, accuracy(), test=three),  # the last ranks have no batch
        "several": evaluated(folder, [LazyCall(ClsEvaluator)(topk=(1, 2)), accuracy(), LazyCall(InOrder)()]),
        "named": evaluated(folder, {"right": accuracy(), "top": LazyCall(ClsEvaluator)(topk=2)}),
        "collection": evaluated(folder, collection(), test=every_label),
        "objects: collection": by_objects(folder, collection(), test=every_label).evaluate(),
        "handler": evaluated(folder, LazyCall(FirstScores)()),
        "objects: evaluator": by_objects(folder, ClsEvaluator(topk=(1, 2))).evaluate(),
        "objects: evaluator in order": by_objects(folder, InOrder()).evaluate(),
        "only scores": evaluated(folder, accuracy(), OnlyScores),
        "one loss": evaluated(folder, LazyCall(PPLEvaluator)(), OneLoss, every_label),
    }
    failures = {}
    for name, failing in {
        "objects": lambda: by_objects(folder, FailsOnRank1(3), test=every_label).evaluate(),
        "files": lambda: evaluated(folder, FailsOnRank1(3), test=every_label),
    }.items():
        try:
            failing()
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
    return {"results": found, "failures": failures}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = on_ranks(results_of_rank, tmp_path_factory.mktemp("alone"), world_size=1)[0]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(results_of_rank, tmp_path_factory.mktemp("ranks"), world_size=2, timeout=240)


def test_both_apis_have_the_same_results(alone: dict[str, Any]) -> None:
    results = alone["results"]
    assert results["objects"] == results["files"]
    assert list(results["objects"]) == ["loss", "MulticlassAccuracy", "digit_loss", "norm_loss"]
    assert results["collection"] == results["objects: collection"]
    cls = {name: value for name, value in results["several"].items() if name.startswith("Acc@")}
    assert results["objects: evaluator"] == {**{n: v for n, v in results["objects"].items() if "loss" in n}, **cls}
    assert results["objects: evaluator in order"]["in order"] == results["several"]["in order"]


def test_losses_are_means_over_the_targets_that_count(alone: dict[str, Any]) -> None:
    x, labels = (data().columns[name] for name in ("x", "labels"))
    model, counted = Parts(), labels != IGNORED
    with torch.no_grad():
        expected = F.cross_entropy(model.layer(x[counted]), labels[counted]).item()
    found = alone["results"]["files"]
    assert found["digit_loss"] == pytest.approx(expected, rel=1e-6)  # float32 losses of batches
    assert found["loss"] == pytest.approx(found["digit_loss"] + found["norm_loss"], rel=1e-6)
    right = (model.layer(x[counted]).argmax(1) == labels[counted]).float().mean().item()
    assert found["MulticlassAccuracy"] == pytest.approx(right)


def test_results_of_ranks_are_those_of_one(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["results"] == ranks[0]["results"]
        for name, expected in alone["results"].items():
            assert rank["results"][name] == pytest.approx(expected, rel=1e-6, nan_ok=True)  # sums in another order


def test_a_metric_that_fails_on_one_rank_is_an_error_on_all(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    assert alone["failures"] == {}
    for api in ("objects", "files"):
        assert ranks[1]["failures"][api] == "ArithmeticError: in the metric"
        assert "Evaluation failed on rank 1: ArithmeticError" in ranks[0]["failures"][api]


def test_several_metrics_keep_their_names(alone: dict[str, Any]) -> None:
    results = alone["results"]
    losses = ["loss", "digit_loss", "norm_loss"]
    assert set(results["several"]) == {*losses, "MulticlassAccuracy", "Acc@1", "Acc@2", "in order"}
    assert set(results["named"]) == {*losses, "right", "Acc@2"}
    assert set(results["collection"]) == {*losses, "acc", "f1", "auroc"}
    assert set(results["handler"]) == {*losses, "first", "labels"}
    # Without a loss in evaluation mode there is none; a single one is the total, whatever its name.
    assert set(results["only scores"]) == {"MulticlassAccuracy"}
    assert set(results["one loss"]) == {"loss", "lm_loss_PPL"}


@pytest.mark.parametrize("api", ["Python", "config file"])
def test_the_first_metric_of_callbacks_is_first_in_the_settings_whatever_its_name(api: str, tmp_path: Path) -> None:
    class FirstMetric(Callback):
        def on_eval_end(self, logs: Any) -> None:
            self.first, self.hinge = logs["eval_epoch_metric"], logs["eval_hinge_loss"]

    if api == "Python":
        metrics: Any = [{"name": "HingeLoss", "from_logits": True}, "Accuracy"]
        trainer: Any = by_objects(tmp_path, None, test=every_label, metrics=metrics)
    else:
        metrics = {"hinge_loss": LazyCall(MulticlassHingeLoss)(num_classes=3), "acc": accuracy()}
        trainer = by_files(tmp_path, metrics, test=every_label)
    trainer.add_callback(callback := FirstMetric())
    trainer.train()
    assert callback.first == callback.hinge


def test_a_metric_with_a_value_for_each_class_has_a_result_for_each(tmp_path: Path) -> None:
    trainer = by_objects(tmp_path, MulticlassAccuracy(3, average=None, ignore_index=IGNORED))
    names = [f"MulticlassAccuracy_{place}" for place in range(3)]
    assert list(trainer.evaluate())[1:4] == names
    evaluation = {"eval_metric": names[1]}
    assert set(names) <= by_files(tmp_path, accuracy(average=None), evaluation=evaluation).train().keys()


@pytest.mark.parametrize(
    ("evaluator", "error", "said"),
    [
        (LazyCall(dict)(a=1), ConfigTypeError, r"train\.evaluation\.evaluator.*got int.*metric of torchmetrics"),
        ([LazyCall(object)()], ConfigTypeError, r"train\.evaluation\.evaluator: got object; it must be a DatasetEval"),
        ([accuracy(), accuracy()], EvaluationError, "'MulticlassAccuracy' is a metric of both"),
    ],
)
def test_what_is_no_metric_is_named(evaluator: Any, error: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=said):
        evaluated(tmp_path, evaluator)


class NoLabels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, kinds: Tensor) -> Any:
        return {"loss": self.layer(x).mean(), "prediction_scores": self.layer(x)}


def of_kinds() -> ColumnDataset:
    return ColumnDataset(x=torch.randn(8, 4), kinds=torch.arange(8) % 3)


def test_a_metric_without_labels_or_scores_is_an_error_of_its_setting(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"train\.evaluation\.evaluator: the batch has no labels.*fields x, kind"):
        evaluated(tmp_path, accuracy(), NoLabels, of_kinds)

    class NoScores(Parts):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            return {"loss": super().forward(x, labels)["loss"]}

    with pytest.raises(EvaluationError, match=r"train\.evaluation\.evaluator: .*no scores; there are loss\. Return"):
        evaluated(tmp_path, accuracy(), NoScores)


def test_a_wrong_eval_metric_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval_metric: got 'MulticlassAcuracy'.*Did you mean 'MulticlassAccuracy'"):
        by_files(tmp_path, accuracy(), evaluation={"eval_metric": "MulticlassAcuracy", "eval_mode": "max"}).train()


def test_a_run_is_evaluated_by_its_loss(tmp_path: Path, read_rows: Any) -> None:
    evaluation = {"eval_metric": "loss", "eval_period": 2}
    trainer = by_files(tmp_path, LazyCall(ClsEvaluator)(topk=1), evaluation=evaluation, log_period=2)
    results = trainer.train()
    assert set(results) == {"loss", "digit_loss", "norm_loss", "Acc@1"}
    last = read_rows(tmp_path / "files")[-1]
    assert {name: last[f"eval_{name}"] for name in ("loss", "digit_loss", "norm_loss")} == {
        name: pytest.approx(results[name]) for name in ("loss", "digit_loss", "norm_loss")
    }
    assert last["Acc@1"] == results["Acc@1"]
    assert (tmp_path / "files" / "model_best").exists()
    record = json.loads((tmp_path / "files" / "run.json").read_text())
    assert "loss" in json.dumps(record)


def test_the_loss_of_each_data_set_has_its_name(tmp_path: Path, read_rows: Any) -> None:
    trainer = by_files(tmp_path, LazyCall(ClsEvaluator)(topk=1), log_period=2)
    cfg = trainer.cfg.copy()
    cfg.train.output_dir = str(tmp_path / "named")
    cfg.dataloader.test = {
        name: LazyCall(build_image_test_loader)(dataset=LazyCall(data)(length=length), num_workers=0)
        for name, length in {"clean": 7, "noisy": 10}.items()
    }
    cfg.train.evaluation.update({"eval_metric": "noisy/loss", "eval_mode": "min"})
    results = DefaultTrainer(cfg).train()
    last = read_rows(tmp_path / "named")[-1]
    assert last["eval_noisy/loss"] == pytest.approx(results["noisy"]["loss"])
    assert last["eval_clean/digit_loss"] == pytest.approx(results["clean"]["digit_loss"])
    assert last["noisy/Acc@1"] == results["noisy"]["Acc@1"]
    assert (tmp_path / "named" / "model_best").exists()


class Resets(DatasetEvaluator):
    """Counts the calls of ``reset``; the documents promise one before the batches of each evaluation."""

    def __init__(self) -> None:
        self.num_resets = 0

    def reset(self) -> None:
        self.num_resets += 1

    def process(self, inputs: Any, outputs: Any) -> None:
        pass

    def evaluate(self) -> dict[str, Any]:
        return {"resets": float(self.num_resets)}


def largest(predictions: Tensor, labels: Tensor) -> dict[str, float]:
    return {"largest": float(predictions.max()), "samples": len(labels)}


@pytest.mark.parametrize("in_dict", [False, True])
def test_a_function_and_named_metrics_are_evaluated_together_in_both_apis(tmp_path: Path, in_dict: bool) -> None:
    by_name = LazyCall(TorchMetricsHandler)(metrics=["Accuracy"])
    cls = LazyCall(ClsEvaluator)(topk=1)
    lazy: Any = {"own": largest, "right": by_name, "top": cls} if in_dict else [largest, by_name, cls]
    objects = {"own": largest, "right": TorchMetricsHandler(["Accuracy"]), "top": ClsEvaluator(topk=1)}
    found = by_objects(tmp_path, objects if in_dict else list(objects.values()), test=every_label).evaluate()
    assert found == evaluated(tmp_path, lazy, test=every_label)
    own, right = ("own/", "right") if in_dict else ("", "accuracy")
    assert {f"{own}largest", f"{own}samples", right, "Acc@1"} < set(found)
    assert found[f"{own}samples"] == len(every_label())
    assert found[right] == pytest.approx(found["Acc@1"] / 100)


def test_a_list_of_metrics_chooses_the_best_checkpoint(tmp_path: Path) -> None:
    metrics = [largest, TorchMetricsHandler(["Accuracy"])]
    settings = {"metric_for_best_model": "accuracy", "save_enabled": True}
    trainer = by_objects(tmp_path, metrics, test=every_label, **settings)
    results = trainer.train()
    assert trainer.best_checkpoint is not None
    assert results["samples"] == len(every_label())


class Quantile:
    def __call__(self, predictions: Tensor, labels: Tensor) -> dict[str, float]:
        return {"median": float(predictions.median())}


def scaled(predictions: Tensor, labels: Tensor, *, factor: float) -> dict[str, float]:
    return {"scaled": factor * float(predictions.max())}


@pytest.mark.parametrize("in_dict", [False, True])
def test_callable_objects_are_functions_in_a_list_too(tmp_path: Path, in_dict: bool) -> None:
    objects: Any = {"one": partial(scaled, factor=2.0), "two": Quantile(), "three": largest}
    found = by_objects(tmp_path, objects if in_dict else [*objects.values()]).evaluate()
    assert ({"one", "two", "three/samples"} if in_dict else {"scaled", "median", "samples"}) <= set(found)
    for wrong in (nn.Linear(2, 2), LazyCall(Quantile)(), LazyCall(Quantile), Quantile, {"_target_": "a.b"}):
        with pytest.raises(ConfigTypeError, match=r"Trainer\.metrics_handler"):
            by_objects(tmp_path, [largest, wrong])


@pytest.mark.parametrize("in_dict", [False, True])
def test_a_handler_in_a_list_has_the_trainer_and_its_objective(
    tmp_path: Path, in_dict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Steps(MetricsHandler):
        def compute_metrics(self, predictions: Any, labels: Any, **batch: Any) -> dict[str, float]:
            return {"steps": float(self.trainer.state.global_step)}

    by_name = TorchMetricsHandler([MetricConfig("Accuracy", objective="minimize")])
    handlers: Any = {"own": Steps(), "right": by_name} if in_dict else [Steps(), by_name]
    best = {"metric_for_best_model": "right" if in_dict else "accuracy", "save_enabled": True}
    trainer = by_objects(tmp_path, handlers, test=every_label, **best)
    assert trainer.train()["own" if in_dict else "steps"] == 4
    assert "so far (lower is better)" in caplog.text


def test_a_name_in_a_list_of_metrics_is_answered_with_what_computes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigTypeError, match=r"Trainer\.metrics_handler: got str; .* such as TorchMetricsHandler"):
        by_objects(tmp_path, [largest, "Accuracy"])


def test_an_evaluator_is_reset_once_for_each_evaluation(tmp_path: Path) -> None:
    trainer = Trainer(Parts(), quiet(tmp_path), data(), data(), metrics_handler=Resets())
    assert [trainer.evaluate()["resets"] for _ in range(2)] == [1, 2]
    loader, evaluator = build_image_test_loader([data()], 4, num_workers=0), Resets()
    cfg = file_config(tmp_path, Parts, data)
    found = [DefaultTrainer.test(cfg, [loader], Parts(), evaluator)["resets"] for _ in range(2)]
    assert found == [1, 2]


class OwnAccuracy(InOrder):
    def evaluate(self) -> dict[str, float]:
        return {"my_accuracy": self.value}


class Forgets(InOrder):
    def evaluate(self) -> Any:
        {"accuracy": float(self.value)}


class ReadsTensors(InOrder):
    def process(self, inputs: Any, outputs: Any) -> None:
        self.value += (outputs.argmax(1) == inputs["labels"]).sum()


class ReadsSamples(InOrder):
    def process(self, inputs: Any, outputs: Any) -> None:
        for one, other in zip(inputs, outputs, strict=False):
            self.value += one["labels"] == other["instances"]


class Fails(InOrder):
    def process(self, inputs: Any, outputs: Any) -> None:
        raise ArithmeticError("in the evaluator")


class Narrow(MetricsHandler):
    def process(self, predictions: Any, labels: Any) -> Any:  # type: ignore[override]
        return super().process(predictions, labels)


@pytest.mark.parametrize(
    ("kind", "name", "written"),
    [
        (OwnAccuracy, "my_accuracy", "Write train.evaluation.eval_metric='my_accuracy'."),
        (InOrder, "in order", "eval_metric='in order' and train.evaluation.eval_mode='max' or 'min'."),
    ],
)
def test_a_result_of_another_name_is_answered_with_the_setting_of_the_best_model(
    kind: Any, name: str, written: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_files(tmp_path, LazyCall(kind)()).train()
    assert "did not compute 'Acc@1'" in caplog.text
    assert written in caplog.text
    assert not (tmp_path / "files/model_best").exists()
    caplog.clear()
    evaluation = {"eval_metric": name, **({"eval_mode": "max"} if "eval_mode" in written else {})}
    by_files(tmp_path / "set", LazyCall(kind)(), evaluation=evaluation).train()
    assert "did not compute" not in caplog.text
    assert (tmp_path / "set/files/model_best").exists()


def test_without_a_loss_the_python_api_names_its_setting_of_the_best_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_objects(tmp_path, own_accuracy(), OnlyScores, save_enabled=True).train()
    assert "Write metric_for_best_model='MulticlassAccuracy'." in caplog.text
    caplog.clear()
    settings = {"save_enabled": True, "metric_for_best_model": "MulticlassAccuracy"}
    by_objects(tmp_path / "set", own_accuracy(), OnlyScores, **settings).train()
    assert "did not compute" not in caplog.text


@pytest.mark.parametrize("api", ["Python", "config file"])
@pytest.mark.parametrize(("kind", "times"), [(Forgets, 1), (InOrder, 0)])
def test_an_evaluator_without_a_return_is_named_once_at_the_start(
    api: str, kind: type, times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = type(kind.__name__, (kind,), {})  # it is named once for each class
    if api == "Python":
        trainer: Any = by_objects(tmp_path, own(), num_epochs=2)
    else:
        trainer = by_files(tmp_path, own(), evaluation={"eval_period": 2, "eval_metric": "loss"})
    assert caplog.text.count("Forgets.evaluate has no return statement") == times
    assert "loss" in trainer.train()
    assert caplog.text.count("Forgets.evaluate has no return statement") == times


def test_an_evaluate_of_a_trainer_without_a_return_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Forgot(Trainer):
        def evaluate(self, dataset: Any = None) -> Any:  # type: ignore[override]
            super().evaluate(dataset)

    class Writes(Trainer):
        def evaluate(self, dataset: Any = None) -> Any:  # type: ignore[override]
            super().evaluate(dataset)
            return {}

    for kind in (Writes, Forgot):
        caplog.clear()
        settings = quiet(tmp_path, batch_size=4, num_epochs=1, save_enabled=False)
        assert kind(Parts(), settings, data(), data()).train() == {}
        assert ("Forgot.evaluate has no return statement" in caplog.text) is (kind is Forgot)


@pytest.mark.parametrize("api", ["Python", "config file"])
@pytest.mark.parametrize(
    ("kind", "error", "is_misread"),
    [(ReadsTensors, AttributeError, True), (ReadsSamples, TypeError, True), (Fails, ArithmeticError, False)],
)
def test_an_error_of_an_evaluator_shows_what_it_was_called_with(
    api: str, kind: Any, error: Any, is_misread: bool, tmp_path: Path
) -> None:
    with pytest.raises(error) as raised:
        by_objects(tmp_path, kind()).evaluate() if api == "Python" else evaluated(tmp_path, LazyCall(kind)())
    (note,) = [one for one in raised.value.__notes__ if one.startswith(f"{kind.__name__}.process was called with")]
    assert "inputs {x: float32 (3, 4) on cpu, labels: int64 (3,) on cpu} and outputs {" in note
    scores = "prediction_scores" if "prediction_scores: float32 (3, 3)" in note else "logits"
    assert (f"read outputs['{scores}'] and inputs['labels']" in note) is is_misread


def test_a_handler_that_does_not_take_the_fields_of_a_batch_is_answered_with_the_line(tmp_path: Path) -> None:
    line = r"Narrow\.process is called .*'x'.* Write def process\(self, predictions, labels, \*\*batch\)\."
    with pytest.raises(ConfigTypeError, match=line):
        by_objects(tmp_path, Narrow(["accuracy"]), test=every_label).evaluate()
    with pytest.raises(ConfigTypeError, match=line):
        evaluated(tmp_path, LazyCall(Narrow)(metrics=["accuracy"]), test=every_label)
    pairs = [(x, int(label)) for x, label in zip(*every_label().columns.values(), strict=True)]
    given = {"metrics_handler": Narrow(["accuracy"])}
    trainer = Trainer(nn.Linear(4, 3), quiet(tmp_path, loss="CrossEntropyLoss"), pairs, pairs, **given)
    assert "accuracy" in trainer.evaluate()
