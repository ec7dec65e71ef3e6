import logging
from collections.abc import Callable
from functools import singledispatchmethod, wraps
from typing import Any

import pytest

from trainwright.base.errors import ConfigTypeError
from trainwright.evaluation import (
    DatasetEvaluator,
    DatasetEvaluators,
    EvaluationError,
    flatten_results_dict,
    print_csv_format,
)
from trainwright.evaluation.adapters import evaluator_of


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


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_an_evaluator_that_returns_a_number_is_an_error_that_names_it(value):
    class Single(Counter):
        def evaluate(self):
            return value

    with pytest.raises(EvaluationError, match=r"Single returned float .* a dict of numbers by name"):
        DatasetEvaluators([Single("accuracy")]).evaluate()


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


def test_nested_figures_get_names_with_slashes():
    assert flatten_results_dict({"val": {"a": 1, "deep": {"b": 2}}, "c": 3}) == {"val/a": 1, "val/deep/b": 2, "c": 3}
    assert flatten_results_dict({}) == {}


def test_figures_are_lines_to_copy(caplog):
    with caplog.at_level(logging.INFO, "trainwright"):
        print_csv_format({"Acc@1": 50.0, "note": "ok", "cifar": {"Acc@1": 12.34567, "by class": {"cat": 1}}})
    assert [record.getMessage() for record in caplog.records] == [
        "copypaste: Acc@1,note",
        "copypaste: 50.0000,ok",
        "copypaste: Task: cifar",
        "copypaste: Acc@1,by class/cat",
        "copypaste: 12.3457,1.0000",
    ]


class _Own(DatasetEvaluator):
    def process(self, inputs: Any, outputs: Any) -> None: ...

    def evaluate(self) -> dict[str, Any]:
        return {}


class _OfOutputs(_Own):
    def process(self, outputs: Any) -> None:  # type: ignore[override]
        ...


class _WithoutResults(DatasetEvaluator):
    def process(self, inputs: Any, outputs: Any) -> None: ...


class _WithoutReset:
    def update(self, predictions: Any, labels: Any) -> None: ...

    def compute(self) -> dict[str, Any]:
        return {}


class _OfOne(_WithoutReset):
    def reset(self) -> None: ...

    def update(self, predictions: Any) -> None: ...  # type: ignore[override]


class _OfThree(_OfOne):
    def update(self, predictions: Any, labels: Any, weights: Any) -> None: ...  # type: ignore[override]


def _with_three(method: Callable[..., None]) -> Callable[..., None]:
    return wraps(method)(lambda self, inputs, outputs: method(self, inputs, outputs, 3))


class _Decorated(_Own):
    @_with_three
    def process(self, inputs: Any, outputs: Any, weight: int) -> None:  # type: ignore[override]
        ...


class _Dispatching(_Own):
    process = singledispatchmethod(lambda self, inputs, outputs: None)  # type: ignore[assignment]


class _Complete(_WithoutReset):
    def reset(self) -> None: ...

    def update(self, *batch: Any, **more: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (_OfOutputs, r"_OfOutputs\.process is called with \(inputs, outputs\)\. Write def process\(self, inputs, out"),
        (_WithoutResults, r"_WithoutResults has no evaluate, .* Write def evaluate\(self\)"),
        (_WithoutReset, r"_WithoutReset has no reset, which each evaluation calls\. Write def reset\(self\)"),
        (_OfOne, r"_OfOne\.update is called with \(predictions, labels, \*\*batch\)\. Write def update\(self, predic"),
    ],
)
def test_an_evaluator_whose_methods_cannot_be_called_is_refused_before_an_evaluation(kind: type, text: str) -> None:
    with pytest.raises(ConfigTypeError, match=f"train.evaluation.evaluator: {text}"):
        evaluator_of(kind(), "train.evaluation.evaluator")


def test_evaluators_of_the_user_that_can_be_called_are_accepted() -> None:
    for one in (_Own(), _Complete(), _OfThree(), _Decorated(), _Dispatching(), lambda predictions, labels: {}):
        assert isinstance(evaluator_of(one, "here"), DatasetEvaluator)
