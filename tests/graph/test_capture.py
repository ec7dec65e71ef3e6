"""What a program holds of a model: its operations, the fields of a batch, and the state that it depends on."""

import re
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graph.conftest import (
    FEW_UPDATES,
    Net,
    Small,
    batches,
    both,
    losses,
    refusals,
)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(
        self, inputs: Tensor, labels: Tensor, task: Any = None, mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        losses = F.cross_entropy(self.layer(inputs), labels, reduction="none")
        losses = losses if mask is None else losses * mask
        return {"loss": losses.mean() * (3.0 if task is True else 1.0)}


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("fixed", [{"task": "a"}, {}], ids=["beside a text", "beside tensors"])
def test_a_field_that_comes_later_is_looked_at(fixed: dict[str, Any]) -> None:
    mask = torch.full((8,), 0.1)
    data = [{**batch, **fixed, **({"mask": mask} if index > 3 else {})} for index, batch in enumerate(batches(8))]
    eager, _ = both(net=Optional, data=data)
    assert eager.values()[4:8].max() < eager.values()[:4].min()


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("order", [(1, True), (True, 1), (True, 1.0)])
def test_numbers_that_are_equal_and_of_other_types(order: tuple[Any, Any]) -> None:
    data = [{**batch, "task": order[index > 3]} for index, batch in enumerate(batches(8))]
    both(net=Optional, data=data)


class CountsByClass(Net):
    num_calls = 0

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        type(self).num_calls += 1
        return super().forward(inputs, labels)


def test_a_counter_of_the_class_stays_eager(caplog: pytest.LogCaptureFixture) -> None:
    CountsByClass.num_calls = 0
    both(net=CountsByClass)
    assert CountsByClass.num_calls == 2 * FEW_UPDATES
    assert len(refusals(caplog)) == 1
    if torch.__version__ < "2.12":  # does not trace it: the line that does it
        assert re.search(r"`setattr`.*test_capture\.py:\d+", refusals(caplog)[0])
    else:
        assert "writes to type(graph.model)" in refusals(caplog)[0]


class Normalizes(Small):
    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.first.weight.data = F.normalize(self.first.weight.data)
        return super().forward(inputs, labels)


def test_data_put_into_a_parameter_stay_eager(caplog: pytest.LogCaptureFixture) -> None:
    both(net=Normalizes)
    assert "replaces the data of a tensor" in refusals(caplog)[0]


LAYERS: dict[str, list[nn.Module]] = {
    "max-pool": [nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1, ceil_mode=True)],
    "average-pool": [nn.Conv2d(3, 4, 3, padding=1), nn.AvgPool2d(2)],
    "adaptive-pool": [nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(3), nn.AdaptiveMaxPool2d(2)],
    "upsample": [nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear")],
    "norms": [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)],
    "transposed": [nn.ConvTranspose2d(3, 4, 3, stride=2)],
    "attention": [nn.Flatten(2), nn.TransformerEncoderLayer(64, 4, 16, batch_first=True)],
}


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_images_are_written_down(name: str, caplog: pytest.LogCaptureFixture) -> None:
    eager, graph = losses(None, *LAYERS[name])[0], losses("aot_eager", *LAYERS[name])[0]
    torch.testing.assert_close(graph, eager, rtol=1e-5, atol=1e-5)
    assert "stay eager" not in caplog.text


def test_an_error_inside_torch_is_logged_with_the_operation_and_the_place(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        return object().absent  # type: ignore[attr-defined]

    from torch._inductor import decomposition

    table = {torch.ops.aten.softplus.default: fails}
    monkeypatch.setattr(decomposition, "select_decomp_table", lambda: table)
    layers = nn.Conv2d(3, 4, 3), nn.Softplus()
    if not shutil.which("g++"):
        monkeypatch.setattr("trainwright.graph.step._usable_backend", lambda backend, device: backend)
    graph, eager = losses("inductor", *layers)[0], losses(None, *layers)[0]
    assert graph.tolist() == eager.tolist()
    assert re.search(
        r"stay eager: softplus could not be traced \(test_capture\.py:\d+: 'object' object has no"
        r" attribute 'absent'\)\.$",
        caplog.text, re.MULTILINE,
    )  # fmt: skip
