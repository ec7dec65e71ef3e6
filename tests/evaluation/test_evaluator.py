import pytest

from trainwright.evaluation import DatasetEvaluator, DatasetEvaluators, EvaluationError


class Counter(DatasetEvaluator):
    def __init__(self, name: str) -> None:
        self.name = name

    def reset(self) -> None:
        self.seen = 0

    def process(self, inputs, outputs) -> None:
        self.seen += 1

    def evaluate(self) -> dict:
        return {self.name: self.seen}


class Silent(Counter):
    def evaluate(self) -> None:
        return None


def test_each_evaluator_sees_every_batch_and_the_figures_are_joined():
    together = DatasetEvaluators([Counter("a"), Silent("x"), Counter("b")])
    together.reset()
    together.process({}, {})
    together.process({}, {})
    assert together.evaluate() == {"a": 2, "b": 2}


def test_two_figures_of_one_name_are_an_error_that_names_both_evaluators():
    class Other(Counter):
        pass

    together = DatasetEvaluators([Counter("accuracy"), Other("accuracy")])
    together.reset()
    with pytest.raises(EvaluationError, match="'accuracy' is a metric of both Counter and Other"):
        together.evaluate()


def test_an_evaluator_that_overrides_too_little_says_what_is_missing():
    class Half(DatasetEvaluator):
        pass

    with pytest.raises(NotImplementedError, match=r"Half must override process"):
        Half().process({}, {})
    with pytest.raises(NotImplementedError, match=r"Half must override evaluate"):
        Half().evaluate()
