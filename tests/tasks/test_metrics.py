"""The handlers of the five tasks and custom ones: exact over a data set in any batches; labels of -100; errors."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import seqeval.metrics
import sklearn.metrics as sk
import torch

from trainwright.base.errors import ConfigError
from trainwright.config.torch_names import TaskType
from trainwright.config.training.metric_config import MetricConfig
from trainwright.evaluation import (
    EvaluationError,
    Image2TextMetricHandler,
    Metric,
    MetricsHandler,
    SequenceLabelingMetricsHandler,
    SpeechRecognitionMetricsHandler,
    TextClassificationMetricsHandler,
    TextGenerationMetricsHandler,
    metrics_handler_for,
)

N, C = 50, 4
GENERATOR = torch.Generator().manual_seed(0)
LOGITS, CLASSES = torch.randn(N, C, generator=GENERATOR), torch.randint(C, (N,), generator=GENERATOR)
UNEVEN, WHOLE = (0, 1, 20, 27, N), (0, N)


def fed(handler, predictions, labels, cuts):
    handler.reset()
    for start, stop in pairwise(cuts):
        handler.update(predictions[start:stop], labels[start:stop])
    return handler.compute()


# ---- which handler, which metrics


@pytest.mark.parametrize(
    ("task", "handler", "metrics"),
    [
        ("text_classification", TextClassificationMetricsHandler, ["accuracy"]),
        (TaskType.SEQUENCE_LABELING, SequenceLabelingMetricsHandler, ["seqeval"]),
        (TaskType.IMAGE2TEXT, Image2TextMetricHandler, ["cer"]),
        ("speech_recognition", SpeechRecognitionMetricsHandler, ["cer", "wer"]),
        ("text_generation", TextGenerationMetricsHandler, ["rouge"]),
    ],
)
def test_a_task_has_its_handler_and_its_metrics(task, handler, metrics):
    assert metrics_handler_for(task) is handler
    assert list(handler().metrics) == metrics
    assert set(metrics) <= set(handler.valid_metrics)


def test_a_task_without_metrics_is_an_error():
    with pytest.raises(ConfigError, match=r"'text_clasification'.*'text_classification'"):
        metrics_handler_for("text_clasification")
    with pytest.raises(ConfigError, match="no metrics for 'backbone'"):
        metrics_handler_for(TaskType.BACKBONE)
    # Two metrics with one result are an error.
    with pytest.raises(ConfigError, match="'accuracy' and 'seqeval' both give 'accuracy'"):
        MetricsHandler(["accuracy", "seqeval"])
    handler = MetricsHandler(["accuracy", MetricConfig("seqeval", output_keys=["f1"])])
    assert list(handler.metrics) == ["accuracy", "seqeval"]
    # No metrics give nothing.
    assert fed(TextClassificationMetricsHandler([]), LOGITS, CLASSES, WHOLE) == {}
    # No samples are an error.
    with pytest.raises(EvaluationError, match="TextClassificationMetricsHandler has seen no samples"):
        TextClassificationMetricsHandler().compute()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["cer"], "TextClassificationMetricsHandler has no 'cer'; it has accuracy, recall, precision, f1"),
        (["acuracy"], "Did you mean 'accuracy'"),
        (["f1", "f1"], "'f1' is there twice"),
        ([MetricConfig("f1", average="mean")], "average is 'mean'"),
        ([MetricConfig("f1", output_keys=["f2"])], "no result 'f2'"),
    ],
)
def test_metrics_that_do_not_belong_here_are_an_error(metrics, message):
    with pytest.raises(ConfigError, match=message):
        TextClassificationMetricsHandler(metrics)


# ---- text classification

NAMES = ["accuracy", "recall", "precision", "f1"]
EXPECTED = {
    "accuracy": sk.accuracy_score(CLASSES, LOGITS.argmax(1)),
    **{
        name: getattr(sk, f"{name}_score")(CLASSES, LOGITS.argmax(1), average="macro")
        for name in ("recall", "precision", "f1")
    },
}


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray, list])
def test_classes_of_a_whole_data_set_at_once(kind):
    predictions, labels = {
        torch.Tensor: (LOGITS, CLASSES),
        np.ndarray: (LOGITS.numpy(), CLASSES.numpy()),
        list: (LOGITS.tolist(), CLASSES.tolist()),
    }[kind]
    handler = TextClassificationMetricsHandler(NAMES)
    assert handler.compute_metrics(predictions, labels) == pytest.approx(EXPECTED)
    assert handler.compute_metrics({"logits": LOGITS}, CLASSES[:, None]) == pytest.approx(EXPECTED)
    assert handler.compute_metrics(LOGITS.argmax(1), CLASSES) == pytest.approx(EXPECTED)


def test_results_are_exact_unless_decimals_are_asked_for():
    third = ([0, 1, 1], [0, 0, 0])
    assert TextClassificationMetricsHandler().compute_metrics(*third) == {"accuracy": 1 / 3}
    rounded = TextClassificationMetricsHandler([MetricConfig("accuracy", n_decimals=2)])
    assert rounded.compute_metrics(*third) == {"accuracy": 0.33}
    assert TextClassificationMetricsHandler([MetricConfig("accuracy")]).compute_metrics(*third) == {"accuracy": 1 / 3}
    # Half precision and gradients are no matter.
    logits = LOGITS.bfloat16().requires_grad_()
    assert TextClassificationMetricsHandler().compute_metrics(logits, CLASSES)["accuracy"] == pytest.approx(
        sk.accuracy_score(CLASSES, logits.argmax(1))
    )
    # Samples labeled minus 100 do not count.
    labels = CLASSES.clone()
    labels[::2] = -100
    kept = labels >= 0
    values = fed(TextClassificationMetricsHandler(), LOGITS, labels, UNEVEN)
    assert values == {"accuracy": sk.accuracy_score(CLASSES[kept], LOGITS.argmax(1)[kept])}


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        (LOGITS, CLASSES[1:], "hold 50 and 49 samples"),
        (LOGITS[:, :, None], CLASSES, r"\(50, 4, 1\) float32 and labels \(50,\) int64"),
        (LOGITS, LOGITS, "do not fit"),
    ],
)
def test_what_does_not_fit_is_said(predictions, labels, message):
    with pytest.raises(EvaluationError, match=message):
        TextClassificationMetricsHandler().update(predictions, labels)


# ---- sequence labeling

IOB = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC"}
PLAIN = {0: "O", 1: "NAME", 2: "OP", 3: "NUMBER"}


def trainer_with(id2label, **dataset):
    config = SimpleNamespace(**dataset)
    return SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(id2label=id2label)), train_dataset=SimpleNamespace(config=config)
    )


def tokens(num_rows, length, seed):
    generator = torch.Generator().manual_seed(seed)
    scores, labels = torch.randn(num_rows, length, 4, generator=generator), torch.randint(4, (num_rows, length))
    labels[:, -2:] = -100
    return scores, labels


def expected_of(scores, labels, names):
    pairs = [(r[row >= 0].argmax(-1), row[row >= 0]) for r, row in zip(scores, labels, strict=True)]
    found, true = ([[names[int(i)] for i in row] for row in rows] for rows in zip(*pairs, strict=True))
    keys = ("accuracy", "recall", "precision", "f1")
    return {key: getattr(seqeval.metrics, f"{key}_score")(true, found) for key in keys}


@pytest.mark.parametrize("num_rows", [1, 6])
def test_labels_of_tokens_are_seqevals(num_rows):
    scores, labels = tokens(num_rows, 9, seed=1)
    handler = SequenceLabelingMetricsHandler(trainer=trainer_with(IOB))
    assert handler.compute_metrics(scores, labels) == pytest.approx(expected_of(scores, labels, IOB))
    assert handler.compute_metrics(scores.argmax(-1), labels) == handler.compute_metrics(scores, labels)


@pytest.mark.parametrize(
    ("names", "schema"), [(PLAIN, {}), (PLAIN, {"is_iob_schema": False}), (IOB, {"is_iob_schema": False})]
)
def test_labels_in_no_scheme_are_spans_of_their_own_and_o_is_outside(names, schema):
    scores, labels = tokens(6, 9, seed=3)
    spans = {number: name if name == "O" else f"B-{name}" for number, name in names.items()}
    trainer = trainer_with(names, **schema)
    values = SequenceLabelingMetricsHandler(trainer=trainer).compute_metrics(scores, labels)
    assert values == pytest.approx(expected_of(scores, labels, spans))
    assert values != expected_of(scores, labels, IOB)


@pytest.mark.parametrize("stray", ["o", "b-PER", "Label", "-", "PER"])
def test_a_stray_label_does_not_change_how_spans_are_scored(stray, caplog):
    names = {**IOB, 4: stray}
    scores, labels = tokens(6, 9, seed=8)
    values = SequenceLabelingMetricsHandler(trainer=trainer_with(names)).compute_metrics(scores, labels)
    assert values == pytest.approx(expected_of(scores, labels, IOB))
    SequenceLabelingMetricsHandler(trainer=trainer_with(names)).compute_metrics(scores, labels)
    assert caplog.text.count(f"the label {stray!r} is of no scheme of spans") == 1
    # A stray label of a span does not hide the others.
    plain = {**PLAIN, 4: "B-PER"}
    values = SequenceLabelingMetricsHandler(trainer=trainer_with(plain)).compute_metrics(scores, labels)
    assert values == SequenceLabelingMetricsHandler(trainer=trainer_with(PLAIN)).compute_metrics(scores, labels)


SPANS = [(0, 3, "PER"), (4, 5, "LOC"), (5, 7, "PER")]  # begin, end, kind
SCHEMES = {"IOB1": None, "IOB2": None, "IOE2": None, "IOBES": "BIES", "BILOU": "BILU", "BMES": "BMES"}


def written(spans, scheme, length=8):
    """The labels of spans in a scheme, by its definition."""
    labels = ["O"] * length
    for begin, end, kind in spans:
        if scheme == "IOB2":
            prefixes = "B" + "I" * (end - begin - 1)
        elif scheme == "IOE2":
            prefixes = "I" * (end - begin - 1) + "E"
        elif scheme == "IOB1":  # B only after a span of the same kind
            prefixes = ("B" if begin and labels[begin - 1].endswith(kind) else "I") + "I" * (end - begin - 1)
        else:
            first, inside, last, single = SCHEMES[scheme]
            prefixes = single if end - begin == 1 else first + inside * (end - begin - 2) + last
        labels[begin:end] = [f"{prefix}-{kind}" for prefix in prefixes]
    return labels


@pytest.mark.parametrize("scheme", SCHEMES)
def test_spans_are_counted_in_each_scheme(scheme):
    true, found = written(SPANS, scheme), written([SPANS[0], (4, 5, "PER"), (5, 6, "PER")], scheme)
    names = dict(enumerate(dict.fromkeys([*true, *found])))
    ids = {name: number for number, name in names.items()}
    handler = SequenceLabelingMetricsHandler(trainer=trainer_with(names))
    values = handler.compute_metrics(*([torch.tensor([ids[label] for label in text])] for text in (found, true)))
    assert values["precision"] == values["recall"] == values["f1"] == pytest.approx(1 / 3)


def test_spans_of_one_kind_need_no_name():
    true, found = (torch.tensor([[*row]]) for row in ((1, 2, 0, 1, 0), (1, 2, 0, 1, 2)))
    handler = SequenceLabelingMetricsHandler(trainer=trainer_with(dict(enumerate("OBI"))))
    assert handler.compute_metrics(found, true)["f1"] == 0.5


def test_batches_may_be_of_different_lengths_and_ids_of_labels_text():
    handler = SequenceLabelingMetricsHandler(trainer=trainer_with({str(n): name for n, name in IOB.items()}))
    parts = [tokens(3, 5, seed=4), tokens(1, 9, seed=5), tokens(4, 3, seed=6)]
    for scores, labels in parts:
        handler.update(scores, labels)
    rows, labels = ([row for part in parts for row in part[i]] for i in (0, 1))
    assert handler.compute() == pytest.approx(expected_of(rows, labels, IOB))
    assert handler.compute_metrics(rows, labels) == handler.compute()


def test_labeling_needs_the_names_of_labels_and_shapes_that_fit():
    scores, labels = tokens(2, 5, seed=7)
    with pytest.raises(ConfigError, match="Give the model a config with id2label"):
        SequenceLabelingMetricsHandler().update(scores, labels)
    handler = SequenceLabelingMetricsHandler(trainer=trainer_with({0: "O", 1: "B-PER"}))
    with pytest.raises(EvaluationError, match="is not in id2label, which has 0 to 1"):
        handler.update(scores, labels)
    with pytest.raises(EvaluationError, match=r"shape \(5, 4\) and labels of shape \(4,\)"):
        handler.update(scores, labels[:, :4])


# ---- texts


class Reader:
    """A model whose ids are characters; 0 is padding."""

    config = SimpleNamespace(blank_id=0)

    def post_process(self, outputs):
        outputs = outputs["generated_ids"] if isinstance(outputs, dict) else outputs
        return [{"text": "".join(chr(int(i)) for i in row if i)} for row in outputs]


def ids_of(texts, length, padding):
    return torch.tensor([[ord(one) for one in text] + [padding] * (length - len(text)) for text in texts])


READ, THERE = ["12A34", "7B", "999"], ["12A35", "77B", "999"]


@pytest.mark.parametrize("padding", [0, -100])
@pytest.mark.parametrize("labels", ["ids", "texts", "lists"])
def test_texts_are_made_by_the_model(labels, padding):
    handler = Image2TextMetricHandler(["cer", "wer"], SimpleNamespace(model=Reader()))
    true = {"ids": ids_of(THERE, 7, padding), "texts": THERE, "lists": ids_of(THERE, 7, padding).tolist()}[labels]
    expected = {"cer": 2 / 11, "wer": 2 / 3}  # one substitution, one deletion; two texts of three are wrong
    assert handler.compute_metrics(ids_of(READ, 6, 0), true) == expected
    assert handler.compute_metrics({"generated_ids": ids_of(READ, 6, 0)}, true) == expected
    assert handler.compute_metrics(READ, true) == expected


def test_error_rates_are_not_means_over_batches():
    handler = SpeechRecognitionMetricsHandler(trainer=SimpleNamespace(model=Reader()))
    handler.update(ids_of(READ[:1], 5, 0), THERE[:1])
    handler.update(ids_of(READ[1:], 4, 0), THERE[1:])
    assert handler.compute() == {"cer": 2 / 11, "wer": 2 / 3}
    handler.reset()
    handler.update(READ[2:], THERE[2:])
    assert handler.compute() == {"cer": 0.0, "wer": 0.0}


def test_generated_texts_may_have_several_references():
    handler = TextGenerationMetricsHandler(["rouge", "bleu"])
    values = handler.compute_metrics(["the cat sat there"], [["a dog", "the cat sat there"]])
    assert values == {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0, "rougeLsum": 1.0, "bleu": 1.0}


def test_texts_need_a_model_that_makes_them():
    with pytest.raises(ConfigError, match=r"predictions are \(3, 6\) int64, no texts, and the model"):
        Image2TextMetricHandler().update(ids_of(READ, 6, 0), THERE)
    silent = SimpleNamespace(model=SimpleNamespace(post_process=lambda outputs: [{"label": 1}] * 3))
    with pytest.raises(EvaluationError, match='mapping that has a "text" for every sample'):
        Image2TextMetricHandler(trainer=silent).update(ids_of(READ, 6, 0), THERE)
    with pytest.raises(EvaluationError, match=r"are 3 texts, labels .* are 2"):
        Image2TextMetricHandler().update(READ, THERE[:2])


# ---- the user's own


class Share(MetricsHandler):
    """Only compute_metrics is overridden."""

    def compute_metrics(self, predictions, labels):
        self.seen = predictions, labels
        return {"share": torch.stack([p.argmax(-1).float().mean() for p in predictions]).mean()}


def test_own_compute_metrics_gets_the_whole_data_set():
    handler = Share(trainer=None)
    values = fed(handler, LOGITS.requires_grad_(), CLASSES, UNEVEN)
    LOGITS.requires_grad_(False)
    predictions, labels = handler.seen
    assert torch.equal(predictions, LOGITS)
    assert not predictions.requires_grad
    assert torch.equal(labels, CLASSES)
    assert type(values["share"]) is float
    # Batches may be written to after the update.
    handler, batch, target = Share(), LOGITS[:2].clone(), CLASSES[:2].clone()
    handler.update(batch, target)
    batch.zero_()
    target.zero_()
    handler.compute()
    assert torch.equal(handler.seen[0], LOGITS[:2])
    assert torch.equal(handler.seen[1], CLASSES[:2])


def test_own_compute_metrics_gets_a_list_of_samples_where_shapes_differ():
    handler = Share()
    handler.update(torch.zeros(2, 5, 3), [["a"], ["b"]])
    handler.update(torch.ones(1, 7, 3), [["c"]])
    handler.compute()
    predictions, labels = handler.seen
    assert [tuple(p.shape) for p in predictions] == [(5, 3), (5, 3), (7, 3)]
    assert labels == [["a"], ["b"], ["c"]]


def test_own_compute_metrics_may_build_on_the_tasks():
    class More(TextClassificationMetricsHandler):
        def compute_metrics(self, predictions, labels, **batch):
            return {**super().compute_metrics(predictions, labels), "samples": len(labels)}

    assert fed(More(), LOGITS, CLASSES, UNEVEN) == {"accuracy": EXPECTED["accuracy"], "samples": N}

    # Own names need no metric of ours.
    class Named(Share):
        valid_metrics = ("share", "accuracy")

    assert list(Named(["share", "accuracy"]).metrics) == ["share", "accuracy"]
    with pytest.raises(ConfigError, match=r"Named .*'shares'.*share, accuracy.*'share'"):
        Named(["shares"])


def test_own_process_makes_samples_small_and_sees_the_rest_of_the_batch():
    class Weighted(MetricsHandler):
        def process(self, predictions, labels, weight=1, **batch):
            return [float(p) * weight for p in predictions], [float(label) for label in labels]

    handler = Weighted("MeanAbsoluteError")
    handler.update(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]), weight=2)
    assert handler.compute() == {"mean_absolute_error": 0.0}


def test_the_base_computes_any_metric():
    assert fed(MetricsHandler(["accuracy"]), LOGITS, CLASSES, UNEVEN) == {"accuracy": EXPECTED["accuracy"]}
    values = fed(MetricsHandler(["MeanSquaredError"]), LOGITS, LOGITS + 2, UNEVEN)
    assert values == {"mean_squared_error": pytest.approx(4)}

    class Count(Metric):
        name, all_keys = "count", ("count",)

        def values(self, predictions, targets):
            return {"count": len(predictions)}

    assert fed(TextClassificationMetricsHandler([Count()]), LOGITS, CLASSES, UNEVEN) == {"count": N}
