"""Data ranks that use different parameters in an update: an error that names them, or the numbers of a loop by hand."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parallel.test_sharding import REDUCES_UNUSED
from tests.ranks import on_ranks
from tests.toys import quiet
from trainwright import Trainer
from trainwright.base.errors import ConfigError
from trainwright.data import ColumnDataset

BATCH, BATCHES = 4, 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO 1": (2, {"zero_stage": 1}),
    "ZeRO 3": (2, {"zero_stage": 3}),
    "tensor": (4, {"tensor_parallel_size": 2}),
    "pipeline": (4, {"pipeline_parallel_size": 2}),
    "pipeline, ZeRO 3": (4, {"pipeline_parallel_size": 2, "zero_stage": 3}),
}


class Layer(nn.Module):
    """One of two parts of the same shapes: the batch decides."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, hidden: Tensor, takes_one: bool) -> Tensor:
        return hidden + (self.one if takes_one else self.other)(hidden)


class Experts(nn.Module):
    tensor_plan = dict.fromkeys(("layers.*.one", "layers.*.other"), "colwise_gather_output")
    pipeline_layers = "layers"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(6, 6), nn.ModuleList(Layer() for _ in range(2))

    def before_layers(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.first(x)

    def layer_arguments(self, x: Tensor, labels: Tensor | None = None) -> tuple[bool]:
        return (bool(x[0, 5] > 0),)

    def after_layers(self, hidden: Tensor, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(hidden, labels)}

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.before_layers(x)
        for layer in self.layers:
            hidden = layer(hidden, *self.layer_arguments(x))
        return self.after_layers(hidden, x, labels)


def build(parts: str) -> tuple[Experts, Tensor, Tensor]:
    """The model, and the samples and labels of batches that use these parts."""
    torch.manual_seed(0)
    x = torch.randn(BATCH * len(parts), 6)
    x[:, 5] = torch.tensor([1.0 if part == "1" else -1.0 for part in parts for _ in range(BATCH)])
    return Experts(), x, torch.arange(len(x)) % 6


def train_by_hand(parts: str) -> dict[str, Tensor]:
    """The weights after plain gradient descent: each update averages the losses of a batch of each data rank."""
    model, x, labels = build(parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    batches = [*zip(x.split(BATCH), labels.split(BATCH), strict=True)]
    for update in zip(batches[::2], batches[1::2], strict=True):
        loss = torch.stack([model(*batch)["loss"] for batch in update]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(folder: Path, parts: str, settings: dict[str, Any]) -> dict[str, Tensor] | str:
    """The weights, or the message of the error. ``parts``: of each batch of data rank 0 and 1 in turn."""
    model, x, labels = build(parts)
    settings |= {"optimizer": {"name_": "SGD", "momentum": 0.9}, "lr": 0.1, "weight_decay": 0.1, "num_epochs": 1}
    settings |= {"batch_size": BATCH, "dataloader_shuffle": False, "log_steps": 2, "metrics": None}
    trainer = Trainer(model, quiet(folder, save_enabled=False, **settings), ColumnDataset(x=x, labels=labels))
    try:
        trainer.train()
    except ConfigError as error:
        return str(error)
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in trainer.model.state_dict().items()
    }


@pytest.mark.parametrize(
    "layout", [name if name == "ZeRO 3" else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS]
)
def test_parts_that_only_some_ranks_use_are_named(tmp_path: Path, layout: str) -> None:
    size, settings = LAYOUTS[layout]
    for message in on_ranks(train, tmp_path, "10" * BATCHES, settings, world_size=size):
        assert "ranks 0 and 1 have used different parameters" in message
        assert re.search(r"others: layers\.\d\.one\.\{weight, bias\}, layers\.\d\.other\.\{weight, bias\}", message)
        assert "Set find_unused_parameters=True" in message


@pytest.mark.exhaustive(every=8)
@pytest.mark.skipif(not hasattr(torch.distributed.fsdp.FSDPModule, REDUCES_UNUSED), reason="needs torch 2.13")
@pytest.mark.parametrize(
    "layout",
    [name if name in ("pipeline", "ZeRO 3") else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS],
)
def test_with_the_setting_the_numbers_are_those_of_a_loop_by_hand(tmp_path: Path, layout: str) -> None:
    size, settings = LAYOUTS[layout]
    parts = "10110010"  # in the second and the third update no rank uses the other parts, which do not change
    expected = train_by_hand(parts)
    settings = settings | {"find_unused_parameters": True}
    ranks = on_ranks(train, tmp_path / "ranks", parts, settings, world_size=size)
    found = {name: value for weights in ranks for name, value in weights.items()}
    assert found.keys() == expected.keys()
    for weights in ranks:
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=name)


def test_all_ranks_may_use_other_parts_in_another_update(tmp_path: Path) -> None:
    one, other = on_ranks(train, tmp_path, "1100" * 2, {"zero_stage": 3})
    for name, value in train_by_hand("1100" * 2).items():
        torch.testing.assert_close(one[name], value, rtol=0, atol=1e-6)
        assert torch.equal(one[name], other[name])


def test_a_rank_that_uses_other_parts_later_is_found_with_the_next_log_line(tmp_path: Path) -> None:
    for message in on_ranks(train, tmp_path, "11" * 2 + "10" + "11" * 3, {"zero_stage": 3}):
        assert "the parameters that updates have used, from first.weight on" in message
        assert "on rank 0, but" in message
