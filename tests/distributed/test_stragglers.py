"""A rank that is slower than the others is named in the log; ranks that are equally slow are not."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import on_ranks
from tests.toys import Samples
from trainwright import Trainer, TrainingConfig
from trainwright.base.dist import get_rank

CASES: dict[str, dict[str, Any]] = {"": {}, "reading": {}, "forward": {}, "reading, ZeRO": {"zero_stage": 3}}


def seconds(kind: str, case: str) -> float:
    return 0.2 if kind in case and get_rank() == 1 else 0.03


def waiting(case: str) -> Samples:
    def read(index: int) -> Tensor:
        time.sleep(seconds("reading", case))
        return torch.randn(4)

    return Samples(read, lambda index: index % 2, length=24)


class Net(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.linear, self.case = nn.Linear(4, 2), case
        # Data parallelism sends it from rank 0 to the others before each forward pass.
        self.register_buffer("number", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Any:
        time.sleep(seconds("forward", self.case))
        return self.linear(x) + self.number


def train_all(folder: Path) -> dict[str, list[str]]:
    """The warnings of each case."""
    found: dict[str, list[str]] = {}
    handler = logging.Handler(logging.WARNING)
    logging.getLogger("trainwright.hooks").addHandler(handler)
    for case, layout in CASES.items():
        messages = found[case] = list[str]()
        handler.emit = lambda record, messages=messages: messages.append(record.getMessage())  # type: ignore[misc]
        config = TrainingConfig(
            output_dir=str(folder / case), num_epochs=1, batch_size=1, log_steps=2, metrics=None, save_enabled=False,
            eval_strategy="no", device_str="cpu", num_dataloader_workers=0, **layout,
        )  # fmt: skip
        Trainer(Net(case), config, train_dataset=waiting(case)).train()
    return found


@pytest.mark.exhaustive
def test_a_slow_rank_is_named_at_a_log_line(tmp_path: Path) -> None:
    first, *others = on_ranks(train_all, tmp_path, world_size=3, timeout=120)
    assert first.pop("") == []
    for case, messages in first.items():
        assert messages, case
        assert "rank 1 (2" in messages[0], case  # 200 ms and more
        assert "rank 0" not in messages[0], case
    assert not any(other[case] for other in others for case in CASES)
