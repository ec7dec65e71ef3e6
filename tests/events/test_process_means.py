"""Means over all processes: of this process until they are added up, and what all processes must have alike."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import on_ranks
from trainwright.base.dist import get_rank
from trainwright.base.errors import ConfigError, ConfigKeyError
from trainwright.events.process_means import common_keys
from trainwright.events.storage import EventStorage


def add_other_process(parts: Tensor) -> None:
    """As if another process had put the mean 4 over 3 samples each time."""
    parts += torch.tensor([12.0, 3.0], dtype=parts.dtype)


def part(mean: float, count: int) -> Tensor:
    return torch.tensor([mean * count, count], dtype=torch.float64)


def test_means_are_of_this_process_until_they_are_reduced_in_one_call() -> None:
    calls: list[Any] = []
    with EventStorage() as storage:
        storage.put_scalar("loss", 7.0)
        storage.step()
        for mean in (1.0, 2.0):
            storage.put_mean("loss", part(mean, 1), lambda parts: (calls.append(parts.shape), add_other_process(parts)))
            storage.put_scalar("lr", 0.1)
            storage.step()
        assert storage.history("loss").values() == [(7.0, 0), (1.0, 1), (2.0, 2)]
        assert (storage.first_local_iteration("loss"), storage.first_local_iteration("lr")) == (1, math.inf)
        storage.reduce()
        storage.reduce()
        assert calls == [(2, 2)]
        assert storage.history("loss").values() == [(7.0, 0), (3.25, 1), (3.5, 2)]
        assert storage.history("loss").global_avg() == (7.0 + 3.25 + 3.5) / 3
        assert storage.first_local_iteration("loss") == math.inf
        assert storage.latest_with_smoothing_hint()["loss"] == (3.5, 2)


def test_reduced_means_do_not_depend_on_when_they_were_read() -> None:
    states = []
    for reads in (False, True):
        with EventStorage() as storage:
            for number in range(7):
                storage.put_mean("loss", part(0.1 * number, 2), add_other_process)
                storage.put_mean("other", part(0.3 * number, 0), add_other_process)
                if reads:
                    storage.latest()
                if number in (3, 6):
                    storage.reduce()
                storage.step()
        states.append(storage.state_dict())
    assert states[0] == states[1]
    assert states[0]["scalars"]["other"]["values"] == [4.0] * 7  # this process's batches were empty


def test_a_bad_loss_of_one_process_makes_the_mean_bad() -> None:
    with EventStorage() as storage:
        storage.put_mean("loss", part(math.nan, 1), add_other_process)
        storage.reduce()
    assert math.isnan(storage.history("loss").latest())


def test_a_process_without_values_sees_them_after_the_next_exchange() -> None:
    without = (torch.tensor(math.nan), 0.0)
    with EventStorage() as storage:
        storage.put_mean("loss", without, add_other_process)
        with pytest.raises(ConfigKeyError, match="'loss' has been put\\. Other processes have its values"):
            storage.history("loss")
        assert (storage.latest(), storage.first_local_iteration("loss")) == ({}, 0)
        storage.reduce()
        assert (storage.latest(), storage.first_local_iteration("loss")) == ({"loss": (4.0, 0)}, math.inf)
        for mean in (without, (torch.tensor(2.0), 1.0)):  # as with a padding batch, and the next batch
            storage.step()
            storage.put_mean("loss", mean, add_other_process)
            storage.put_scalar("lr", 0.1)
        assert storage.latest() == {"loss": (4.0, 0), "lr": (0.1, 2)}
        assert storage.first_local_iteration("loss") == 1
        for _ in range(3000):  # more than are kept as tensors
            storage.put_scalar("more", 1.0)
        assert len(storage.history("more")) == 3000
        storage.reduce()
        assert storage.history("loss").values() == [(4.0, 0), (4.0, 1), (3.5, 2)]
        assert storage.history("loss").global_avg() == (4.0 + 4.0 + 3.5) / 3
        assert storage.history("lr").values() == [(0.1, 1), (0.1, 2)]


def differing_processes() -> dict[str, Any]:
    """What :func:`common_keys` returns or raises."""
    own = {("loss", 0, 0): part(1.0, 1), ("loss", 1, 1): part(1.0, 1)}
    rank_only = own | ({("rank_only", 1, 0): part(1.0, 1)} if get_rank() else {})
    rate = {"equal": {"lr": 0.1}, "rounded": {"lr": 0.1 * (1 + 1e-9 * get_rank())}, "other": {"lr": 0.1 + get_rank()}}
    one_lacks = {"lr of a stage": 0.5} if get_rank() else {}
    cases: dict[str, tuple[Any, Any]] = {
        "same": (own, rate["equal"]),
        "rounded": (own, rate["rounded"]),
        "some parts": (rank_only, rate["equal"]),
        "no value here": (own, one_lacks),
        "another rate": (own, rate["other"]),
        "nothing in common": ({(f"of {get_rank()}", 0, 0): part(1.0, 1)}, {}),
    }
    found: dict[str, Any] = {}
    for name, (parts, values) in cases.items():
        try:
            found[name] = common_keys(parts, {"optimizer": lambda values=values: values})
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_what_processes_have_in_common_and_what_they_must_have_alike() -> None:
    both = [("loss", 0, 0), ("loss", 1, 1)]
    first, second = on_ranks(differing_processes)
    assert first == second
    assert first["same"] == first["rounded"] == first["no value here"] == (both, [])
    assert first["some parts"] == (both, ["rank_only"])
    assert first["nothing in common"] == ([], ["of 0", "of 1"])
    assert first["another rate"].startswith("lr: 0.1 on rank 0, but 1.1 on rank 1. All processes must have the same")
