import logging

import pytest
import torch

from trainwright.config.errors import ConfigError
from trainwright.evaluation import ClsEvaluator, EvaluationError


def scores_with_best(*classes: int, num_classes: int = 3) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(classes), num_classes).float()


def test_samples_are_counted_over_batches_of_unequal_size():
    evaluator = ClsEvaluator(topk=(1,))
    evaluator.process({"labels": torch.tensor([0, 1, 2])}, {"prediction_scores": scores_with_best(0, 1, 0)})
    evaluator.process({"labels": torch.tensor([0])}, {"prediction_scores": scores_with_best(1)})
    assert evaluator.evaluate() == {"Acc@1": 50.0}


def test_two_of_three_is_not_rounded():
    evaluator = ClsEvaluator(topk=1)
    evaluator.process({"labels": torch.tensor([0, 1, 2])}, {"prediction_scores": scores_with_best(0, 1, 0)})
    assert evaluator.evaluate()["Acc@1"] == pytest.approx(200 / 3)


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


def test_more_than_there_are_classes_keeps_its_name_and_is_said_once(caplog):
    evaluator = ClsEvaluator()
    with caplog.at_level(logging.WARNING, "trainwright"):
        for _ in range(2):
            evaluator.reset()
            evaluator.process({"labels": torch.tensor([0])}, {"prediction_scores": scores_with_best(1)})
    assert evaluator.evaluate() == {"Acc@1": 0.0, "Acc@5": 100.0}
    assert [record.getMessage() for record in caplog.records] == [
        "Acc@5: there are only 3 classes, so all of them count and it is always 100."
    ]


def test_reset_forgets():
    evaluator = ClsEvaluator(topk=1)
    evaluator.process({"labels": torch.tensor([0])}, {"prediction_scores": scores_with_best(1)})
    evaluator.reset()
    with pytest.raises(EvaluationError, match="no samples"):
        evaluator.evaluate()


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        ({"labels": 0}, {"losses": 1, "cls": 2}, r"'prediction_scores'.*the model returns.*'losses', 'cls'"),
        ({"labels": 0}, torch.zeros(4, 3), r"'prediction_scores'.*Tensor of shape \(4, 3\)"),
        ({"images": 0}, {"prediction_scores": torch.zeros(4, 3)}, r"'labels' in the batch.*'images'"),
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
