"""Errors that users cause: classes of Python's own as well, one message for several faults, the nearest name."""

import pytest

from trainwright.base.errors import (
    ConfigError,
    ConfigImportError,
    ConfigKeyError,
    ConfigSyntaxError,
    ConfigTypeError,
    MissingFileError,
    UserError,
    did_you_mean,
)
from trainwright.checkpoint.errors import CheckpointError, CheckpointTypeError


@pytest.mark.parametrize(
    ("ours", "pythons"),
    [
        (ConfigError, ValueError),
        (ConfigTypeError, TypeError),
        (ConfigKeyError, KeyError),
        (ConfigImportError, ImportError),
        (ConfigSyntaxError, SyntaxError),
        (MissingFileError, FileNotFoundError),
        (CheckpointError, ValueError),
        (CheckpointTypeError, TypeError),
    ],
)
def test_an_error_is_also_one_of_pythons_own(ours: type[UserError], pythons: type[Exception]) -> None:
    with pytest.raises(pythons) as caught:
        raise ours("first line\nsecond line")
    assert isinstance(caught.value, UserError)
    assert str(caught.value) == "first line\nsecond line"  # KeyError alone would show a repr


def test_a_message_cannot_command_a_terminal() -> None:
    for error in (ConfigError("a\x1b[2Jb"), ConfigKeyError("a\x1b[2Jb")):
        assert str(error) == r"a\x1b[2Jb"


def test_the_nearest_name_or_all_of_them() -> None:
    assert did_you_mean("precison", ["seed", "precision"]) == "Did you mean 'precision'?"
    assert did_you_mean("x", ["seed", "amp"]) == "Allowed: amp, seed."
    assert did_you_mean("x", []) == "Nothing is allowed here."


@pytest.mark.parametrize(
    ("name", "allowed", "nearest"),
    [
        ("adamww", ["Adam", "AdamW"], "AdamW"),
        ("ADAM-w", ["Adam", "AdamW"], "AdamW"),
        ("cosin", ["constant", "cosine"], "cosine"),
        ("mape", ["MeanAbsoluteError", "MeanAbsolutePercentageError"], "MeanAbsolutePercentageError"),
        ("mse", ["MSELoss", "NLLLoss"], "MSELoss"),
        ("mse", ["loss", "mean_squared_error"], "mean_squared_error"),
        ("acc", ["AUC", "Accuracy"], "Accuracy"),
        ("BATCH_SIZE", ["batch_size", "seed"], "batch_size"),
    ],
)
def test_the_nearest_name_has_any_case_and_may_be_shortened(name: str, allowed: list[str], nearest: str) -> None:
    assert did_you_mean(name, allowed) == f"Did you mean {nearest!r}?"
