"""A metric over a complete data set: which results, how many decimals, what is refused."""

import numpy as np
import pytest

from trainwright.config.errors import ConfigError, UserError
from trainwright.evaluation import EvaluationError, Metric, build_metric

RNG = np.random.default_rng(0)
TRUE, FOUND = RNG.integers(6, size=200), RNG.integers(8, size=200)
REFERENCES = ["the cat sat on the mat", "it rains in June, mostly"]
WRITTEN = ["the cat sat on a mat", "in June it rains"]


def test_results_that_are_no_numbers_are_refused():
    with pytest.raises(EvaluationError, match=r"ConfusionMatrix .*\(8, 8\)"):
        build_metric("ConfusionMatrix").compute(FOUND, TRUE)


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


def test_an_absent_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu.metrics", None)
    with pytest.raises(UserError, match=r"bleu .*sacrebleu: pip install sacrebleu"):
        build_metric("bleu").compute(["a"], ["a"])


def test_a_metric_of_ones_own():
    class Length(Metric):
        name, all_keys, default_objective = "length", ("length",), "minimize"

        def values(self, predictions, targets):
            return {"length": sum(map(len, predictions)) / len(targets)}

    assert build_metric(Length()).compute(["ab", "abcd"], ["", ""]) == {"length": 3.0}
    with pytest.raises(ConfigError, match="no result 'size'"):
        Length(output_keys=["size"])
