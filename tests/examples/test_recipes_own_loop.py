"""The recipe of a plain loop: the weights of the loop alone, and a kill changes nothing."""

import json
import runpy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from trainwright.data.seeding import permutation

RECIPE = Path(__file__).parents[2] / "examples/recipes/own_loop.py"


def run(folder: Path, max_iter: int = 70) -> dict[str, torch.Tensor]:
    loop = runpy.run_path(str(RECIPE))["main"](str(folder), max_iter)
    weights: dict[str, torch.Tensor] = loop.model.state_dict()
    return weights


def by_hand(max_iter: int = 70) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    digits = load_digits()
    inputs, labels = torch.from_numpy(digits.data.astype("float32") / 16), torch.from_numpy(digits.target)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max_iter)
    torch.manual_seed(0)
    order = torch.cat([permutation(len(labels), 0, epoch) for epoch in range(3)])
    for rows in islice(order.split(32), max_iter):
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(inputs[rows])
        F.cross_entropy(logits.float(), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
    return net.state_dict()


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_the_weights_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    assert_equal(run(tmp_path), by_hand())


def test_killed_and_resumed_is_uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = run(tmp_path / "whole"), iter(range(100))

    def failing(*arguments: Any) -> torch.Tensor:
        if next(calls) == 63:
            raise RuntimeError("killed")
        return F.nll_loss(F.log_softmax(arguments[0], 1), arguments[1])

    with monkeypatch.context() as context:
        context.setattr(F, "cross_entropy", failing)
        with pytest.raises(RuntimeError, match="killed"):
            run(tmp_path / "killed")
    assert_equal(run(tmp_path / "killed"), whole)
    rows = [
        [json.loads(line) for line in (tmp_path / name / "metrics.json").read_text().splitlines()]
        for name in ("whole", "killed")
    ]
    losses = [{row["iteration"]: row["total_loss"] for row in each} for each in rows]
    assert losses[0] == losses[1]
    assert [row["iteration"] for row in rows[1]] == [row["iteration"] for row in rows[0]]
