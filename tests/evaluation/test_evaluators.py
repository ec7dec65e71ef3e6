import logging
import math

import pytest
import torch

from trainwright.base.errors import ConfigError
from trainwright.evaluation import (
    BLEUEvaluator,
    ClsEvaluator,
    DatasetEvaluator,
    EvaluationError,
    PPLEvaluator,
    RegEvaluator,
)
from trainwright.evaluation.adapters import evaluator_of


def scores_with_best(*classes: int, num_classes: int = 3) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(classes), num_classes).float()


def test_top_k_agrees_with_sorting_by_hand():
    torch.manual_seed(0)
    scores, labels = torch.randn(50, 10), torch.randint(10, (50,))
    evaluator = ClsEvaluator(topk=(1, 3, 5))
    for part in (slice(0, 17), slice(17, 40), slice(40, 50)):
        evaluator.process({"labels": labels[part]}, {"prediction_scores": scores[part]})
    for k in (1, 3, 5):
        hits = sum(
            int(label) in sorted(range(10), key=row.__getitem__, reverse=True)[:k]
            for row, label in zip(scores.tolist(), labels, strict=True)
        )
        assert evaluator.evaluate()[f"Acc@{k}"] == 100 * hits / 50


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16])
def test_labels_of_any_integer_type(dtype):
    evaluator = ClsEvaluator(topk=1)
    evaluator.process({"labels": torch.tensor([2, 0]).to(dtype)}, {"prediction_scores": scores_with_best(2, 1)})
    assert evaluator.evaluate() == {"Acc@1": 50.0}


def test_class_probabilities_count_as_their_most_probable_class():
    labels, scores = torch.tensor([2, 0, 1]), scores_with_best(2, 1, 1)
    for soft in (1.0, 0.8):
        evaluator = ClsEvaluator(topk=1)
        targets = torch.nn.functional.one_hot(labels, 3) * soft + (1 - soft) / 3
        evaluator.process({"labels": targets}, {"prediction_scores": scores})
        assert evaluator.evaluate() == {"Acc@1": pytest.approx(200 / 3)}
    with pytest.raises(EvaluationError, match="class probabilities"):  # whole numbers may be several labels
        evaluator.process({"labels": torch.eye(3).long()}, {"prediction_scores": scores})


def test_more_than_there_are_classes_keeps_its_name_and_is_said_once(caplog):
    evaluator = ClsEvaluator()
    with caplog.at_level(logging.WARNING, "trainwright"):
        for _ in range(2):
            evaluator.reset()
            evaluator.process({"labels": torch.tensor([0])}, {"prediction_scores": scores_with_best(1)})
    assert evaluator.evaluate() == {"Acc@1": 0.0, "Acc@5": 100.0}
    assert [record.getMessage() for record in caplog.records] == [
        "Acc@5: there are only 3 classes, so all of them count and it is always 100. topk=[1] leaves it out (train.topk"
        " in a config file)."
    ]


def test_ignored_labels_are_left_out_and_other_wrong_ones_are_errors():
    scores = {"prediction_scores": torch.eye(3)}
    evaluator, other = ClsEvaluator(topk=1), ClsEvaluator(topk=1)
    evaluator.process({"labels": torch.tensor([0, -100, 0])}, scores)
    other.process({"labels": torch.tensor([-100, -100, 2])}, scores)
    evaluator.merge_state([other])
    assert evaluator.evaluate() == {"Acc@1": pytest.approx(200 / 3)}
    with pytest.raises(EvaluationError, match="labels hold 255, but there are 3 classes"):  # at once on a CPU
        other.process({"labels": torch.tensor([0, 1, 255])}, scores)
    evaluator.merge_state([other])
    with pytest.raises(EvaluationError, match="labels hold 255, but there are 3 classes"):
        evaluator.evaluate()


def test_reset_forgets():
    evaluator = ClsEvaluator(topk=1)
    evaluator.process({"labels": torch.tensor([0])}, {"prediction_scores": scores_with_best(1)})
    evaluator.reset()
    with pytest.raises(EvaluationError, match="no samples"):
        evaluator.evaluate()
    # Another class can be ignored.
    evaluator = ClsEvaluator(topk=1, ignore_index=1)
    evaluator.process({"labels": torch.tensor([2, 1, 0])}, {"prediction_scores": scores_with_best(2, 1, 1)})
    assert evaluator.evaluate() == {"Acc@1": 50.0}


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        ({"labels": 0}, {"losses": 1, "cls": 2}, r"'prediction_scores'.*the model returns.*losses: int, cls: int"),
        ({"labels": 0}, torch.zeros(4, 3), r"'prediction_scores'.*float32 \(4, 3\)"),
        (
            {"images": 0},
            {"prediction_scores": torch.zeros(4, 3)},
            r"'labels' in the batch.*images.*give the field this",
        ),
        ({"labels": torch.zeros(3).long()}, {"prediction_scores": torch.zeros(4, 3)}, r"\(4, 3\).*\(3,\)"),
        ({"labels": torch.zeros(4)}, {"prediction_scores": torch.zeros(4, 3)}, r"float32.*whole numbers"),
    ],
)
def test_what_does_not_fit_is_named(inputs, outputs, said):
    with pytest.raises(EvaluationError, match=said):
        ClsEvaluator().process(inputs, outputs)


@pytest.mark.parametrize("topk", [0, (), (1, 0), (1.5,)])
def test_a_wrong_k_is_refused(topk):
    with pytest.raises(ConfigError, match=r"ClsEvaluator.topk: got"):
        ClsEvaluator(topk=topk)


def test_the_score_is_that_of_the_whole_data_set():
    evaluator = BLEUEvaluator(n_gram=1)
    # 5 of 6 words are right; the brevity penalty compares these 6 words with the 4 + 3 of the nearest references.
    evaluator.process({"reference": ["a b c e"]}, {"candidate": ["a b c d"]})
    evaluator.process({"reference": [["f g h", "z z z z z z"]]}, {"candidate": ["f g"]})
    assert evaluator.evaluate()["bleu_score"] == pytest.approx(5 / 6 * math.exp(1 - 7 / 6))


def test_the_right_text_scores_one_and_an_unrelated_one_zero():
    evaluator = BLEUEvaluator()
    evaluator.process({"reference": ["the cat sat on the mat"]}, {"candidate": ["the cat sat on the mat"]})
    assert evaluator.evaluate() == {"bleu_score": pytest.approx(1.0)}
    evaluator.reset()
    evaluator.process({"reference": ["the cat sat on the mat"]}, {"candidate": ["no word in common here"]})
    assert evaluator.evaluate() == {"bleu_score": 0.0}

    # A tokenizer parts words from punctuation.
    def score(tokenize: str | None) -> float:
        evaluator = BLEUEvaluator(n_gram=1, tokenize=tokenize)
        evaluator.process({"reference": ["good, yes."]}, {"candidate": ["good , yes ."]})
        return evaluator.evaluate()["bleu_score"]

    assert score("13a") == pytest.approx(1.0)
    assert score(None) == 0.0
    # Lists of unequal length are refused.
    with pytest.raises(EvaluationError, match="1 entries and 2 entries"):
        BLEUEvaluator().process({"reference": ["a", "b"]}, {"candidate": ["a"]})
    with pytest.raises(EvaluationError, match="one text"):
        BLEUEvaluator().process({"reference": ["a"]}, {"candidate": "a"})
    with pytest.raises(EvaluationError, match="'candidate'"):
        BLEUEvaluator().process({"reference": ["a"]}, {"text": ["a"]})


def batch(size: int) -> dict:
    return {"input_ids": torch.zeros(size, 7, dtype=torch.long)}


def test_perplexity():
    evaluator = PPLEvaluator()
    evaluator.process(batch(3), {"lm_loss": torch.tensor(1.0)})
    evaluator.process(batch(1), {"lm_loss": torch.tensor(3.0)})
    assert evaluator.evaluate() == {"lm_loss_PPL": pytest.approx(math.exp((3 * 1.0 + 1 * 3.0) / 4))}
    # Each of several losses has its own mean.
    evaluator = PPLEvaluator()
    evaluator.process(
        batch(2), {"lm_loss": torch.tensor([2.0]), "sop_loss": torch.tensor(0.5), "scores": torch.zeros(2, 9)}
    )
    evaluator.process(batch(2), {"lm_loss": torch.tensor(4.0)})
    assert evaluator.evaluate() == {
        "lm_loss_PPL": pytest.approx(math.exp(3.0)),
        "sop_loss_PPL": pytest.approx(math.exp(0.5)),
    }
    # A bare scalar is a loss.
    evaluator = PPLEvaluator()
    evaluator.process(batch(2), torch.tensor(0.25))
    assert evaluator.evaluate() == {"loss_PPL": pytest.approx(math.exp(0.25))}
    # A hopeless loss is cut and nan is not hidden.
    evaluator = PPLEvaluator()
    evaluator.process(batch(2), {"a_loss": torch.tensor(1000.0), "b_loss": torch.tensor(math.nan)})
    results = evaluator.evaluate()
    assert results["a_loss_PPL"] == math.exp(20)
    assert math.isnan(results["b_loss_PPL"])
    # A model without a loss is named.
    with pytest.raises(EvaluationError, match=r"{prediction_scores: float32"):
        PPLEvaluator().process(batch(2), {"prediction_scores": torch.zeros(2, 3)})
    with pytest.raises(EvaluationError, match="no samples"):
        PPLEvaluator().evaluate()


def pearson(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt())


def test_correlations_over_all_batches_agree_with_their_definition():
    torch.manual_seed(0)
    labels = torch.randn(30, dtype=torch.float64)
    scores = labels.exp() + 0.1 * torch.randn(30, dtype=torch.float64)
    evaluator = RegEvaluator()
    for part in (slice(0, 20), slice(20, 30)):
        evaluator.process({"labels": labels[part]}, {"prediction_scores": scores[part].unsqueeze(1)})
    results = evaluator.evaluate()
    ranks = [values.argsort().argsort().double() for values in (scores, labels)]
    assert results["pearson"] == pytest.approx(pearson(scores, labels))
    assert results["spearman"] == pytest.approx(pearson(*ranks))
    assert results["corr"] == pytest.approx((results["pearson"] + results["spearman"]) / 2)


def test_one_sample_has_no_correlation():
    evaluator = RegEvaluator()
    evaluator.process({"labels": torch.tensor([1.0])}, {"prediction_scores": torch.tensor([1.0])})
    with pytest.raises(EvaluationError, match=r"1 samples.*at least two"):
        evaluator.evaluate()
    evaluator.reset()
    with pytest.raises(EvaluationError, match="0 samples"):
        evaluator.evaluate()
    # Scores of several classes are refused.
    with pytest.raises(EvaluationError, match=r"\(4, 3\).*\(4,\)"):
        RegEvaluator().process({"labels": torch.zeros(4)}, {"prediction_scores": torch.zeros(4, 3)})


class _Counts(DatasetEvaluator):
    def __init__(self):
        self.total = 0

    def process(self, inputs, outputs):
        self.total += len(inputs)

    def evaluate(self):
        return {"total": self.total}


class _Resets(_Counts):
    def reset(self):
        self.total = 0


class _ClearsAtItsEnd(_Counts):
    def evaluate(self):
        total, self.total = self.total, 0
        return {"total": total}


class _AddsNothing(_Counts):
    def process(self, inputs, outputs):
        print(len(inputs))


@pytest.mark.parametrize(
    ("kind", "is_named"), [(_Counts, True), (_Resets, False), (_ClearsAtItsEnd, False), (_AddsNothing, False)]
)
def test_an_evaluator_that_counts_a_batch_in_later_evaluations_is_named(kind, is_named, caplog):
    evaluator_of(kind(), "evaluator")
    assert (f"{kind.__name__} has no reset(): what process() has added" in caplog.text) is is_named
