"""If a private part of torch changes, the training completes with the public API and the same weights."""

import pytest
import torch

from tests._torch_compat.conftest import Trained
from trainwright._torch_compat.probing import check_close, is_usable


def test_a_training_on_todays_torch_takes_no_public_way(lines_of_training: Trained) -> None:
    assert lines_of_training() == []
    assert lines_of_training(optimizer="rmsprop") == []


def test_a_probe_that_fails_is_one_line_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    def probe() -> None:
        raise ValueError("first line\nsecond line")

    caplog.set_level("INFO", logger="trainwright")
    assert not is_usable("something", probe)
    assert [record.getMessage() for record in caplog.records] == [
        f"torch {torch.__version__}: using the public API for something (ValueError: first line)."
    ]


def test_numbers_are_close_up_to_rounding() -> None:
    check_close("it", [1.0, 2.0], [1.000001, 2.0])
    for found in ([1.0, 2.1], [1.0], [1.0, float("nan")]):
        with pytest.raises((ArithmeticError, ValueError)):
            check_close("it", found, [1.0, 2.0])
