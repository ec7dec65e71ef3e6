"""TorchMetricsHandler: torchmetrics for runs without a task."""

import gc
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sklearn.metrics as sk
import torch

from tests.toys import Classifier, file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.errors import ConfigError
from trainwright.checkpoint.state_files import decode_state, encode_state
from trainwright.config.training.metric_config import MetricConfig
from trainwright.evaluation import EvaluationError, MetricsHandler, TMMetrics, TorchMetricsHandler
from trainwright.evaluation.handlers import FunctionHandler

N, C = 60, 3
GENERATOR = torch.Generator().manual_seed(0)
LOGITS, CLASSES = torch.randn(N, C, generator=GENERATOR), torch.randint(C, (N,), generator=GENERATOR)
NUMBERS = torch.randn(N, generator=GENERATOR)
ACCURACY = sk.accuracy_score(CLASSES, LOGITS.argmax(1))


def fed(handler, predictions, labels, cuts=(0, 7, 8, 40, N)):
    for start, stop in pairwise(cuts):
        handler.update(predictions[start:stop], labels[start:stop])
    return handler


def test_results_have_snake_case_names_in_the_order_asked_for():
    handler = fed(
        TorchMetricsHandler(
            ["Accuracy", {"name_": "F1Score", "average": "macro"}, {"name": "AUROC", "from_logits": True}]
        ),
        LOGITS,
        CLASSES,
    )
    values = handler.compute()
    assert list(values) == ["accuracy", "f1_score", "auroc"]
    assert all(type(value) is float for value in values.values())
    assert values["accuracy"] == pytest.approx(ACCURACY)
    assert values["f1_score"] == pytest.approx(sk.f1_score(CLASSES, LOGITS.argmax(1), average="macro"))


def test_accuracy_is_the_default_and_first():
    handler = TorchMetricsHandler()
    assert isinstance(handler.first, TMMetrics)
    assert handler.first.name == "Accuracy"
    assert list(handler.metrics) == ["accuracy"]
    assert TorchMetricsHandler([]).first is None
    # Outputs of a model are read.
    for outputs in ({"loss": 1, "logits": LOGITS}, (LOGITS, "hidden"), {"prediction_scores": LOGITS}):
        handler = TorchMetricsHandler()
        handler.update(outputs, CLASSES, attention_mask=None)
        assert handler.compute()["accuracy"] == pytest.approx(ACCURACY)


def test_a_default_that_does_not_fit_switches_itself_off_with_one_line(caplog):
    caplog.set_level(logging.INFO, "trainwright.evaluation")
    handler = fed(TorchMetricsHandler(["Accuracy"], is_default=True), NUMBERS, NUMBERS)
    assert handler.is_off
    assert handler.compute() == {}
    handler.reset()
    assert fed(handler, NUMBERS, NUMBERS).compute() == {}
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("No metric is computed: metric Accuracy: cannot count predictions (7,) float32")


def test_a_default_that_stops_fitting_switches_itself_off(caplog):
    caplog.set_level(logging.INFO, "trainwright.evaluation")
    handler = TorchMetricsHandler(is_default=True)
    handler.update(NUMBERS[:8], torch.ones(8))
    handler.update(NUMBERS[:8], NUMBERS[:8])
    assert handler.compute() == {}
    assert len(caplog.records) == 1
    # A default without samples stays on.
    handler = TorchMetricsHandler(is_default=True)
    assert handler.compute() == {}
    assert fed(handler, LOGITS, CLASSES).compute() == {"accuracy": pytest.approx(ACCURACY)}


def test_a_metric_that_was_asked_for_is_an_error_that_says_shapes_and_types():
    with pytest.raises(
        EvaluationError, match=r"predictions \(60,\) float32 and targets \(60,\) float32.*MeanSquaredError"
    ):
        TorchMetricsHandler(["Accuracy"]).update(NUMBERS, NUMBERS)
    with pytest.raises(EvaluationError, match="has seen no samples"):
        TorchMetricsHandler(["Accuracy"]).compute()


def test_settings_of_an_entry_are_honoured():
    config = MetricConfig("Recall", average="none", output_keys=["recall_1"], n_decimals=2)
    expected = sk.recall_score(CLASSES, LOGITS.argmax(1), average=None)[1]
    assert fed(TorchMetricsHandler(config), LOGITS, CLASSES).compute() == {"recall_1": round(expected, 2)}
    with pytest.raises(EvaluationError, match="no result 'recall_9'; there are recall_0"):
        fed(
            TorchMetricsHandler(MetricConfig("Recall", average="none", output_keys=["recall_9"])), LOGITS, CLASSES
        ).compute()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["Acuracy"], "Did you mean 'Accuracy'"),
        (["Accuracy", "accuracy"], "'accuracy' is there twice. Leave one out"),
        (
            ["Accuracy", {"name": "Accuracy", "top_k": 2}],
            r"'Accuracy' is there twice. Give each a name: metrics_handler .* {'first': TorchMetricsHandler\(\[",
        ),
        (["confusion_matrix"], "'confusion_matrix' gives a table"),
    ],
)
def test_wrong_names_are_an_error(metrics, message):
    with pytest.raises(ConfigError, match=message):
        TorchMetricsHandler(metrics)


@pytest.mark.parametrize("api", ["Python", "files"])
def test_a_metric_with_other_arguments_has_a_name_of_its_own(api: str, tmp_path: Path) -> None:
    second = {"name": "Accuracy", "top_k": 2}
    data, expected = points(), {}
    if api == "Python":
        handlers = {"top1": TorchMetricsHandler("Accuracy"), "top2": TorchMetricsHandler([second])}
        trainer: Any = Trainer(Classifier((4, 3)), quiet(tmp_path), data, data, metrics_handler=handlers)
        found = trainer.evaluate()
    else:
        cfg = file_config(
            tmp_path, LazyCall(Classifier)(sizes=(4, 3)), points, points, train_iter=1, train_micro_batch_size=4
        )
        cfg.train.evaluation.evaluator = {
            "top1": LazyCall(TorchMetricsHandler)(metrics="Accuracy"),
            "top2": LazyCall(TorchMetricsHandler)(metrics=[second]),
        }
        trainer = DefaultTrainer(cfg)
        found = trainer.test(trainer.cfg, trainer.test_loader, trainer.model)
    scores = trainer.model.body(data.named["inputs"])
    labels = torch.tensor([data[index]["labels"] for index in range(len(data))])
    for number in (1, 2):
        hits = (scores.topk(number).indices == labels[:, None]).any(1)
        expected[f"top{number}"] = pytest.approx(hits.float().mean().item())
    assert {name: found[name] for name in expected} == expected


def test_a_handler_whose_trainer_is_gone_gets_the_next_one(tmp_path: Path) -> None:
    handler, own = MetricsHandler(["accuracy"]), MetricsHandler(["accuracy"], trainer="the user's")
    for part in ("a", "b"):
        trainers = [
            Trainer(Classifier(), quiet(tmp_path / part), points(), metrics_handler=one) for one in (handler, own)
        ]
        assert handler.trainer.model is trainers[0].model
        assert own.trainer == "the user's"
        other = Trainer(Classifier(), quiet(tmp_path / "other"), points(), metrics_handler=handler)
        assert handler.trainer.model is trainers[0].model
        del trainers, other
        gc.collect()


def test_a_whole_data_set_at_once_does_not_touch_what_was_counted():
    handler = fed(TorchMetricsHandler(), LOGITS, CLASSES)
    assert handler.compute_metrics(LOGITS, LOGITS.argmax(1)) == {"accuracy": 1.0}
    assert handler.compute()["accuracy"] == pytest.approx(ACCURACY)


def test_a_train_copy_counts_for_itself():
    handler = fed(
        TorchMetricsHandler(MetricConfig("Recall", average="none", output_keys=["recall_1"])), LOGITS, CLASSES
    )
    before, copy = handler.compute(), handler.train_copy()
    fed(copy, LOGITS[:20], CLASSES[:20], cuts=(0, 20))
    assert copy.compute() != before
    assert list(copy.compute()) == ["recall_1"]
    assert handler.compute() == before
    assert TorchMetricsHandler(is_default=True).train_copy().is_default


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4])
def test_a_state_continues_exactly(cut):
    names, cuts = (
        ["Accuracy", {"name": "AUROC", "from_logits": True}, {"name": "F1", "average": "macro"}],
        (0, 7, 8, 40, N),
    )
    whole = fed(TorchMetricsHandler(names), LOGITS, CLASSES, cuts)
    first = fed(TorchMetricsHandler(names), LOGITS, CLASSES, cuts[: cut + 1])
    text, tensors = encode_state(first.state_dict(), "metrics")
    second = TorchMetricsHandler(names)
    second.load_state_dict(decode_state(text, tensors, "metrics"))
    assert fed(second, LOGITS, CLASSES, cuts[cut:]).compute() == whole.compute()


def test_a_state_of_other_metrics_is_refused_and_off_stays_off():
    with pytest.raises(ConfigError, match="the saved ones are accuracy, these are auroc"):
        TorchMetricsHandler("AUROC").load_state_dict(TorchMetricsHandler("Accuracy").state_dict())
    off = fed(TorchMetricsHandler(is_default=True), NUMBERS, NUMBERS)
    again = TorchMetricsHandler(is_default=True)
    again.load_state_dict(off.state_dict())
    assert again.is_off


def test_an_error_in_a_metric_function_says_what_it_was_called_with():
    def of_arrays(predictions, labels):
        return {"share": predictions.astype(float).mean()}

    handler = FunctionHandler(of_arrays)
    with pytest.raises(AttributeError) as raised:
        handler.compute_metrics(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
    (note,) = raised.value.__notes__
    assert "predictions: Tensor (4, 2) float32, labels: Tensor (4,) int64" in note
