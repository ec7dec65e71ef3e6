"""Steps and builders of users are called by the arguments that they take."""

from typing import Any

import pytest

from trainwright.config import LazyCall
from trainwright.engine.default.call_signature import bind_step, call_with_known


def with_both(self: Any, get_batch: Any, input_placement_device: Any) -> None:
    self.got = (get_batch, input_placement_device)


def with_one(self: Any, get_batch: Any) -> None:
    self.got = (get_batch,)


def with_none(self: Any) -> None:
    self.got = ()


def with_any(self: Any, *args: Any) -> None:
    self.got = args


@pytest.mark.parametrize(
    ("run_step", "expected"),
    [(with_both, ("batch", "cpu")), (with_one, ("batch",)), (with_none, ()), (with_any, ("batch", "cpu"))],
)
def test_a_step_gets_the_arguments_it_takes(run_step: Any, expected: tuple[Any, ...]) -> None:
    stepper = type("Stepper", (), {"run_step": run_step})()
    owner, step = bind_step(stepper, "batch", "cpu")  # type: ignore[arg-type]
    step()
    assert owner is stepper
    assert stepper.got == expected


def loader(dataset: str, train_batch_size: int, seed: int = 0) -> tuple[str, int, int]:
    return dataset, train_batch_size, seed


def test_a_builder_gets_what_it_takes_and_the_node_leaves_open() -> None:
    given = {"train_batch_size": 8, "seed": 5, "consumed_samples": 3, "tokenizer": None}
    assert call_with_known(LazyCall(loader)(dataset="d"), given) == ("d", 8, 5)


def test_something_ready_made_is_returned_as_it_is() -> None:
    ready = [1, 2]
    assert call_with_known(ready, {"train_batch_size": 8}) is ready
