"""A loader begins where a run has come to, or says that it cannot."""

import logging

import pytest
from torch.utils.data import DataLoader

from trainwright.data import build_image_train_loader
from trainwright.data.loaders import set_position


def test_a_loader_of_ours_begins_there() -> None:
    whole, _, _ = build_image_train_loader(Numbers(10), 4, num_workers=0, seed=3)
    later, _, _ = build_image_train_loader(Numbers(10), 4, num_workers=0, seed=3)
    set_position(later, 8)
    first = [next(batches).tolist() for batches in [iter(whole)] for _ in range(4)]
    assert [next(batches).tolist() for batches in [iter(later)] for _ in range(2)] == first[2:]


@pytest.mark.parametrize(("consumed", "warnings"), [(0, 0), (8, 1)])
def test_another_loader_is_warned_of_unless_it_begins_at_the_start(
    consumed: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        set_position(DataLoader([1, 2, 3]), consumed)
    assert len([r for r in caplog.records if "cannot be set to a position" in r.message]) == warnings


class Numbers:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index
