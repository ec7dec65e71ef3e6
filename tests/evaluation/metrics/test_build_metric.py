"""Metrics by name over whole data sets, against scikit-learn, seqeval, jiwer, rouge_score and sacrebleu."""

import jiwer
import numpy as np
import pytest
import sacrebleu
import seqeval.metrics
import sklearn.metrics as sk
import torch
from rouge_score import rouge_scorer

from trainwright.base.errors import ConfigError, UserError
from trainwright.config.training.metric_config import MetricConfig
from trainwright.evaluation import EvaluationError, Metric, build_metric
from trainwright.evaluation.metrics.build_metric import Words

RNG = np.random.default_rng(0)
TRUE, FOUND = RNG.integers(6, size=200), RNG.integers(8, size=200)
REFERENCES = ["the cat sat on the mat", "it rains in June, mostly", "nothing at all", "a b\nc d e"]
WRITTEN = ["the cat sat on a mat", "in June it rains", "nothing at all", "a b d\ne"]


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("name", ["precision", "recall", "f1"])
def test_ratios_of_classes_are_scikit_learns(name, average):
    expected = getattr(sk, f"{name}_score")(TRUE, FOUND, average=average, zero_division=0)
    for predictions, targets in [(FOUND, TRUE), (FOUND.tolist(), TRUE.tolist()), map(torch.tensor, (FOUND, TRUE))]:
        value = build_metric(name, average=average).compute(predictions, targets, None)
        assert value == {name: pytest.approx(expected, abs=1e-12)}


def test_the_mean_over_classes_is_the_default_and_one_class_can_be_chosen():
    assert build_metric("f1").compute(FOUND, TRUE, None)["f1"] == pytest.approx(
        sk.f1_score(TRUE, FOUND, average="macro")
    )
    value = build_metric("recall", average="binary", pos_label=3).compute(FOUND, TRUE, None)["recall"]
    assert value == pytest.approx(sk.recall_score(TRUE == 3, FOUND == 3))


def test_scores_and_names_of_classes_are_taken_too():
    scores, true = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 4
    assert build_metric("accuracy").compute(scores, true, None)["accuracy"] == sk.accuracy_score(true, scores.argmax(1))
    assert build_metric("f1").compute(["cat", "dog"], ["cat", "cat"])["f1"] == pytest.approx(1 / 3, abs=1e-4)


def test_labels_are_seqevals():
    true = [["O", "B-PER", "I-PER", "O"], ["B-LOC"], ["B-PER", "O"]]
    found = [["O", "B-PER", "O", "O"], ["B-LOC"], ["B-LOC", "B-PER"]]
    expected = {
        name: getattr(seqeval.metrics, f"{name}_score")(true, found)
        for name in ("accuracy", "recall", "precision", "f1")
    }
    assert build_metric("seqeval").compute(found, true, None) == pytest.approx(expected)
    strict = build_metric("seqeval", mode="strict", scheme="IOB2", output_keys=["f1"]).compute(found, true)
    assert strict == {"f1": round(expected["f1"], 4)}
    # No spans at all are no warning.
    assert build_metric("seqeval").compute([["O", "O"]], [["O", "O"]])["f1"] == 0
    assert build_metric("seqeval").compute([[]], [[]])["accuracy"] == 0


@pytest.mark.parametrize("name", ["cer", "wer"])
def test_error_rates_are_those_of_the_whole_corpus(name):
    references, written = [text.replace("\n", " ") for text in REFERENCES], [t.replace("\n", " ") for t in WRITTEN]
    expected = getattr(jiwer, name)(references, written)
    assert build_metric(name).compute(written, references, None) == {name: pytest.approx(expected, abs=1e-12)}


def test_the_character_error_rate_counts_by_hand():
    # kitten -> sitting: 3 of 6. ab -> "": 2 of 2. "" -> xy: 2 insertions. Together 7 of 8.
    assert build_metric("cer").compute(["sitting", "", "xy"], ["kitten", "ab", ""], None) == {"cer": 7 / 8}
    assert build_metric("cer").compute(["۱۲ب۳۴۵"], ["۱۲ب۳۴۶"], None) == {"cer": 1 / 6}
    assert build_metric("wer").compute(["a  b\nc"], ["a b c"], None) == {"wer": 0.0}
    # Empty references have no errors or all.
    assert build_metric("cer").compute(["", ""], ["", ""]) == {"cer": 0.0}
    assert build_metric("wer").compute(["a", ""], ["", ""]) == {"wer": 1.0}


def test_rouge_is_rouge_scores_mean():
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"])
    each = [scorer.score(reference, text) for reference, text in zip(REFERENCES, WRITTEN, strict=True)]
    expected = {key: sum(scores[key].fmeasure for scores in each) / len(each) for key in each[0]}
    assert build_metric("rouge").compute(WRITTEN, REFERENCES, None) == pytest.approx(expected, abs=1e-12)
    # Rouge takes several references and stems.
    assert build_metric("rouge").compute(["a b"], [["c d", "a b"]])["rouge1"] == 1
    assert build_metric("rouge", use_stemmer=True).compute(["walking"], ["walked"])["rouge1"] == 1
    # Words are not cut at their marks.
    assert Words().tokenize("हिन्दी में") == ["हिन्दी", "में"]
    assert Words().tokenize("می\u200cروم!") == ["می\u200cروم"]
    assert Words().tokenize("snake_case, 3.14") == ["snake", "case", "3", "14"]


@pytest.mark.parametrize(
    "text", ["سلام دنیای بزرگ", "привет большой мир", "नमस्ते दुनिया", "東京に行く", "γειά σου Κόσμε"]
)
def test_rouge_knows_the_words_of_all_scripts(text):
    scores = build_metric("rouge").compute([text], [text])
    assert scores["rouge1"] == scores["rougeL"] == 1
    assert build_metric("rouge").compute([text[: len(text) // 2]], [text])["rouge1"] < 1


def test_bleu_is_sacrebleus_in_0_to_1():
    expected = sacrebleu.corpus_bleu(WRITTEN, [REFERENCES]).score / 100
    assert build_metric("bleu").compute(WRITTEN, REFERENCES, None) == {"bleu": pytest.approx(expected)}
    two = [[reference, text] for reference, text in zip(REFERENCES, WRITTEN, strict=True)]
    two[0] = [REFERENCES[0]]
    expected = sacrebleu.corpus_bleu(WRITTEN, [REFERENCES, [None, *WRITTEN[1:]]]).score / 100
    assert build_metric("bleu").compute(WRITTEN, two, None) == {"bleu": pytest.approx(expected)}


@pytest.mark.parametrize("text", ["one two", "the cat sat on the mat", "x"])
def test_the_perfect_text_has_a_bleu_of_1(text):
    assert build_metric("bleu").compute([text], [text], None) == {"bleu": 1.0}


def test_any_torchmetrics_name_will_do():
    value = build_metric("F1Score", average="macro").compute(FOUND, TRUE, None)
    assert value == {"f1_score": pytest.approx(sk.f1_score(TRUE, FOUND, average="macro"), abs=1e-6)}
    metric = build_metric("MeanSquaredError")
    for _ in range(2):  # each call is over its own samples
        assert metric.compute([1.0, 2.0], [1.0, 4.0]) == {"mean_squared_error": 2.0}
    per_class = build_metric("Recall", average="none", num_classes=3).compute([0, 1, 2], [0, 1, 1])
    assert per_class == {"recall_0": 1.0, "recall_1": 0.5, "recall_2": 0.0}
    assert set(build_metric("ROUGEScore", rouge_keys="rouge1").compute(["a b"], ["a b"])) == {
        "rouge1_fmeasure", "rouge1_precision", "rouge1_recall",
    }  # fmt: skip


def test_a_metric_config_is_honoured():
    config = MetricConfig("rouge", output_keys=["rouge1"], n_decimals=2, objective="minimize", use_stemmer=True)
    metric = build_metric(config)
    assert metric.objective == "minimize"
    assert metric.compute(["walking far on"], ["walked far"]) == {"rouge1": 0.8}
    # The arguments may come as a config.
    for config in (MetricConfig("accuracy", n_decimals=1), {"n_decimals": 1}):
        assert build_metric("accuracy", config).compute([1, 0, 0], [1, 1, 0]) == {"accuracy": 0.7}
    assert build_metric("accuracy", {"n_decimals": 1}, n_decimals=2).compute([1, 0, 0], [1, 1, 0]) == {"accuracy": 0.67}


def test_results_that_are_no_numbers_are_refused(monkeypatch):
    with pytest.raises(EvaluationError, match=r"ConfusionMatrix .*\(8, 8\)"):
        build_metric("ConfusionMatrix").compute(FOUND, TRUE)
    # An absent package is one sentence.
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu.metrics", None)
    with pytest.raises(UserError, match=r"bleu .*sacrebleu: pip install sacrebleu"):
        build_metric("bleu").compute(["a"], ["a"])


def test_decimals_and_keys():
    metric = build_metric("rouge", output_keys=["rouge1", "rougeL"])
    assert set(metric.compute(WRITTEN, REFERENCES)) == {"rouge1", "rougeL"}
    assert set(metric.compute(WRITTEN, REFERENCES, output_keys=["rouge2"])) == {"rouge2"}
    exact = metric.compute(WRITTEN, REFERENCES, n_decimals=None)["rouge1"]
    assert metric.compute(WRITTEN, REFERENCES)["rouge1"] == round(exact, 4)
    assert metric.compute(WRITTEN, REFERENCES, n_decimals=1)["rouge1"] == round(exact, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build_metric("acuracy"), "Did you mean 'accuracy'"),
        (lambda: build_metric("seqevall"), "Did you mean 'seqeval'"),
        (lambda: build_metric("f1", avg="micro"), "metric f1: .*'avg'"),
        (lambda: build_metric("f1", average="mean"), "average is 'mean'; it must be one of macro"),
        (lambda: build_metric("rouge", output_keys=["rouge_1"]), "no result 'rouge_1'. Did you mean 'rouge1'"),
        (lambda: build_metric("cer", objective="min"), "objective is 'min'"),
        (lambda: build_metric("cer").compute(["a"], []), "1 predictions and 0 targets"),
        (lambda: build_metric("cer").compute([], []), "no samples"),
        (lambda: build_metric("cer").compute([1], ["a"]), "takes a list of texts.* a int"),
        (lambda: build_metric("f1").compute(np.zeros((2, 2), int), [1, 2]), r"predictions have shape \(2, 2\)"),
    ],
)
def test_what_is_wrong_is_said(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_a_metric_of_ones_own():
    class Length(Metric):
        name, all_keys, default_objective = "length", ("length",), "minimize"

        def values(self, predictions, targets):
            return {"length": sum(map(len, predictions)) / len(targets)}

    assert build_metric(Length()).compute(["ab", "abcd"], ["", ""]) == {"length": 3.0}
    with pytest.raises(ConfigError, match="no result 'size'"):
        Length(output_keys=["size"])
