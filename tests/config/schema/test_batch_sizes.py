"""Batch sizes and numbers of iterations."""

import math
from fractions import Fraction

import pytest

from trainwright.config import ConfigError
from trainwright.config.schema.batch_sizes import (
    milestone_iterations,
    resolve_batch_sizes,
    total_iterations,
    warmup_iterations,
)


def sizes(micro=None, whole=None, accumulation=None, ranks=1):
    train = {"train_micro_batch_size": micro, "global_batch_size": whole, "num_accumulation_steps": accumulation}
    return resolve_batch_sizes(train, ranks)


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ({"micro": 4}, (4, 4, 1)),
        ({"micro": 4, "ranks": 2}, (4, 8, 1)),
        ({"micro": 4, "accumulation": 3, "ranks": 2}, (4, 24, 3)),
        ({"whole": 24, "ranks": 2}, (12, 24, 1)),
        ({"whole": 24, "accumulation": 3, "ranks": 2}, (4, 24, 3)),
        ({"micro": 4, "whole": 24, "ranks": 2}, (4, 24, 3)),
        ({"micro": 4, "whole": 24, "accumulation": 3, "ranks": 2}, (4, 24, 3)),
    ],
)
def test_what_is_left_out_follows_from_the_rest(given, settled):
    micro, whole, accumulation = sizes(**given)
    assert (micro, whole, accumulation) == settled
    assert micro * accumulation * given.get("ranks", 1) == whole


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "give train_micro_batch_size or global_batch_size"),
        ({"accumulation": 2}, "give train_micro_batch_size or global_batch_size"),
        ({"micro": 4, "whole": 25, "ranks": 2}, r"25 must be divisible by train_micro_batch_size .* is 8 .* 24 and 32"),
        ({"whole": 25, "accumulation": 2}, "25 must be divisible by num_accumulation_steps"),
        ({"micro": 4, "whole": 24, "accumulation": 2}, "24 must be equal to .* is 8"),
        ({"micro": 0}, "got 0"),
        ({"micro": 2.0}, "float"),
        ({"micro": True}, "bool"),
    ],
)
def test_sizes_that_do_not_fit_name_all_of_them(given, says):
    with pytest.raises(ConfigError, match=says) as caught:
        sizes(**given)
    if "got" not in says and "float" not in says and "bool" not in says:
        for name in ("train_micro_batch_size=", "global_batch_size=", "num_accumulation_steps="):
            assert name in str(caught.value)


@pytest.mark.parametrize(
    ("train", "length", "batch", "total"),
    [
        ({"train_iter": 10}, None, 4, 10),
        ({"train_iter": 10, "train_epoch": 0}, 100, 4, 10),
        ({"train_iter": 0, "train_epoch": 40}, 1437, 32, 1797),  # 1796.25, not 40 * 45
        ({"train_iter": 5000, "train_epoch": 40}, 1437, 32, 5000),
        ({"train_iter": 0, "train_epoch": 500, "iter_per_epoch": 10}, None, 4, 5000),
        ({"train_iter": 10000, "train_epoch": 500, "iter_per_epoch": 10}, 7, 4, 10000),
        ({"train_iter": 0, "train_epoch": 0.1}, 30, 1, 3),  # in floats 0.1 * 30 is a little more than 3
        ({"train_epoch": 1}, 1, 4, 1),
    ],
)
def test_a_run_is_the_longer_of_its_iterations_and_its_epochs(train, length, batch, total):
    assert total_iterations(train, length, batch) == total


def test_a_run_of_nothing_or_of_unknown_length_is_refused():
    with pytest.raises(ConfigError, match="train_epoch=0"):
        total_iterations({"train_iter": 0, "train_epoch": 0}, 10, 1)
    with pytest.raises(ConfigError, match="empty"):
        total_iterations({"train_iter": 0, "train_epoch": 2}, 0, 1)
    with pytest.raises(ConfigError, match="iter_per_epoch"):
        total_iterations({"train_iter": 5, "train_epoch": 2}, None, 1)


def test_warmup_is_rounded_up_from_the_number_that_was_written():
    assert warmup_iterations(100, 0.07) == 7  # in floats 7.000000000000001
    assert warmup_iterations(1437, 0.01) == 15
    assert warmup_iterations(100, 0) == 0
    for percent in range(100):
        assert warmup_iterations(1000, percent / 100) == math.ceil(Fraction(percent, 100) * 1000)
    for ratio in (1, 1.5, -0.1):
        with pytest.raises(ConfigError, match="warmup_ratio"):
            warmup_iterations(100, ratio)


def test_milestones_are_ratios_or_iterations():
    assert milestone_iterations([0, 0.29, 0.57], 100) == [0, 29, 57]  # in floats 28.999 and 56.999
    assert milestone_iterations([30, 60], 100) == [30, 60]
    for wrong in ([0.5, 0.2], [0.5, 0.5], [0.5, 1.0], [-0.1], ["a"], [0.5, 3]):
        with pytest.raises(ConfigError, match="increasing"):
            milestone_iterations(wrong, 100)
