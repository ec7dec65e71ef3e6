"""The making of graph mode's programs: what the compiler needs, what it says, how long it took."""

import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig
from trainwright.engine import EagerTrainer, GraphBase, GraphTrainer

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler"
)


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layers(images).flatten(1)[:, :4]
        return {"loss": F.cross_entropy(scores, labels, weight=torch.arange(1.0, 5), label_smoothing=0.1)}


def losses(backend: str | None, *layers: nn.Module, updates: int = 12) -> tuple[Tensor, Any]:
    """Of a training, and who trained."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 8, 3, 8, 8, generator=generator)
    data = [{"images": each, "labels": torch.arange(8) % 4} for each in images]
    model = Model(*layers)
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    trainer: Any = (
        EagerTrainer(model, data, optimizer)
        if backend is None
        else GraphTrainer(GraphBase(model, optimizer, backend=backend), data)
    )
    trainer.train(0, updates)
    return torch.tensor([value for value, _ in trainer.storage.history("total_loss").values()]), trainer


@pytest.fixture(autouse=True)
def _seen(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "trainwright")
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # megabytes, where somebody listens


FRESH = """
import logging, torch
from torch import nn
from tests.engine.compiled.test_compile import losses

def layers():
    first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    return *first, nn.Dropout(0.2), nn.Flatten(), nn.Linear(72, 4)

logging.basicConfig(level="INFO")
torch.testing.assert_close(losses("inductor", *layers())[0], losses(None, *layers())[0], rtol=1e-5, atol=1e-5)
"""


@needs_compiler
def test_a_network_with_pooling_is_a_program_in_a_process_that_has_compiled_nothing() -> None:
    """Where a test before it has compiled, inductor is there whole already."""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", FRESH], cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "are one program" in done.stderr
    assert "stay eager" not in done.stderr


LAYERS: dict[str, list[nn.Module]] = {
    "max-pool": [nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1, ceil_mode=True)],
    "average-pool": [nn.Conv2d(3, 4, 3, padding=1), nn.AvgPool2d(2)],
    "adaptive-pool": [nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(3), nn.AdaptiveMaxPool2d(2)],
    "upsample": [nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear")],
    "norms": [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)],
    "transposed": [nn.ConvTranspose2d(3, 4, 3, stride=2)],
    "attention": [nn.Flatten(2), nn.TransformerEncoderLayer(64, 4, 16, batch_first=True)],
}


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
        monkeypatch.setattr("trainwright.engine.compiled.graph_trainer.usable_backend", lambda backend, device: backend)
    graph, eager = losses("inductor", *layers)[0], losses(None, *layers)[0]
    assert graph.tolist() == eager.tolist()
    assert re.search(
        r"stay eager: softplus could not be traced \(test_compile\.py:\d+: 'object' object has no"
        r" attribute 'absent'\)\.$",
        caplog.text, re.MULTILINE,
    )  # fmt: skip


def trained(folder: Path, resume: Any = None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(160, 6, generator=generator), torch.arange(160) % 4)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    config = TrainingConfig(
        output_dir=str(folder), graph=True, loss="CrossEntropyLoss", batch_size=8, num_epochs=3, learning_rate=0.01,
        eval_strategy="no", progress_bar=False, resume_from_checkpoint=resume, **settings,
    )  # fmt: skip
    trainer = Trainer(model, config, train_dataset=data)
    trainer.train()
    return trainer


@needs_compiler
def test_a_resumed_program_of_inductor_goes_on_bit_for_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is then taken from disk, and the log says so."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kept"))
    saving: dict[str, Any] = {"save_steps": 25, "save_total_limit": 9}
    whole = trained(tmp_path / "whole", **saving)
    folders = (tmp_path / "whole" / "checkpoints").iterdir()
    first = min(path for path in folders if path.is_dir() and not path.is_symlink())
    resumed = trained(tmp_path / "resumed", str(first), **saving)
    found = re.findall(r"are one program \(.*\), (.*) in \d+\.\d s\.", caplog.text)
    assert found == ["compiled by inductor", "loaded from disk"]
    assert resumed.iter == whole.iter == 60
    assert "Trained 40 iterations" in caplog.text
    for left, right in zip(resumed.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(left, right)
    theirs, ours = (trainer.optimizer.state_dict()["state"] for trainer in (whole, resumed))
    for key, state in theirs.items():
        assert all(torch.equal(value, ours[key][name]) for name, value in state.items())


def slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A making of programs that takes a second more, of no processor."""
    from trainwright.engine.compiled import update as graph_update

    seconds = [0.0]
    clock = graph_update.time.perf_counter

    def make(*arguments: Any, **settings: Any) -> Any:
        seconds[0] += 1000
        return capture(*arguments, **settings)

    capture = graph_update.Capture
    monkeypatch.setattr(graph_update, "Capture", make)
    monkeypatch.setattr("time.perf_counter", lambda: clock() + seconds[0])


@pytest.mark.parametrize("api", ["objects", "config"])
def test_the_making_of_programs_is_a_phase_of_its_own(
    api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    slowed(monkeypatch)
    if api == "objects":
        trainer: Any = trained(tmp_path, save_enabled=False)
    else:
        trainer = losses("aot_eager", nn.Flatten(), nn.Linear(192, 4))[1]
    phases = trainer.phases
    assert 1000 <= phases.compile < 1100
    assert 0 < phases.forward < 100
    assert phases.compile < phases.step < phases.total < 1200
    if api == "objects":
        found = re.search(r"Trained 60 iterations in .* \((.*) each, without 0:16:\d\d of compiling\)", caplog.text)
        assert found is not None
        assert found[1].endswith(("ms", "us"))
        assert re.search(r"Time: .*compile \d\d+ %", caplog.text)


def test_an_attempt_in_vain_is_counted_as_well(caplog: pytest.LogCaptureFixture) -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum().item() > 0 else x

    trainer = losses("aot_eager", Asks(), nn.Flatten(), nn.Linear(192, 4))[1]
    assert "stay eager" in caplog.text
    assert trainer.phases.compile > 0
    assert trainer.phases.forward > 0
