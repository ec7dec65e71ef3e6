"""An exported model computes what the model computes, for any number of samples, in other programs."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.config_trainer.test_default_trainer import config as config_of_file
from trainwright import DefaultTrainer, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.models.export import ExportError, export_model

FORMATS = ["model.onnx", "model.pt2", "model"]


class Net(nn.Module):
    """With layers that differ between training and evaluation, a label that is not needed, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.body(inputs)
        outputs = {"scores": self.head(hidden), "hidden": hidden}
        return outputs if labels is None else {"loss": F.cross_entropy(outputs["scores"], labels), **outputs}


class ByValue(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum() > 0 else -inputs


class Random(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.rand(inputs.shape[1])


class Fixed(nn.Module):
    """Computes with the number of samples of the example."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * float(int(inputs.shape[0]))


def run(path: Path, inputs: Tensor) -> list[Tensor]:
    """What another program computes with an exported model."""
    if path.suffix == ".onnx":
        runtime = pytest.importorskip("onnxruntime", reason="pip install 'trainwright[onnx]'")
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (name,) = (item.name for item in session.get_inputs())
        return [torch.tensor(value) for value in session.run(None, {name: np.asarray(inputs)})]
    if path.suffix == ".pt2":
        return [*torch.export.load(path).module()(inputs=inputs).values()]
    other = Net().eval()
    safetensors.torch.load_model(other, str(path / "model.safetensors"))
    return [*other(inputs).values()]


@pytest.mark.exhaustive(every=8)
@pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:The given buffer is not writable",  # torch 2.11
)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.slow
def test_an_exported_model_computes_the_same_for_any_number_of_samples(name: str, tmp_path: Path) -> None:
    if name.endswith("onnx"):
        pytest.importorskip("onnxruntime", reason="pip install 'trainwright[onnx]'")
    torch.manual_seed(0)
    model = Net()
    model(torch.randn(16, 4))  # statistics of batch normalization
    batch = {"inputs": torch.randn(3, 4), "labels": torch.tensor([0, 1, 2])}
    path, difference = export_model(model, tmp_path / name, batch)
    assert difference <= 1e-5
    assert model.training
    assert [*tmp_path.iterdir()] == [path]
    for size in (1, 2, 7):
        inputs = torch.randn(size, 4)
        expected = [*model.eval()(inputs).values()]
        for found, one in zip(run(path, inputs), expected, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-6)
        model.train()


@pytest.mark.parametrize(
    ("model", "match"),
    [(ByValue(), "cannot trace ByValue"), (Random(), "differs from the model")],
    ids=["control flow", "random"],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(model: nn.Module, match: str, tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"earlier")
    with pytest.raises(ExportError, match=match):
        export_model(model, tmp_path / "model.pt2", torch.randn(3, 4))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"earlier"]


@pytest.mark.parametrize(
    ("existing", "name", "match"),
    [
        ("model.pt2/", "model.pt2", "model.pt2 is a folder; pass the name of a file"),
        ("runs/", "runs", "runs exists; pass the name of a new or empty folder"),
        ("runs", "runs", "runs exists; pass the name of a new or empty folder"),
        ("runs", "runs/model.pt2", "runs cannot be created: File exists"),
        ("runs", "..", "name of a file or of a new folder|exists"),
    ],
)
def test_a_path_that_cannot_be_replaced_is_refused_before_the_export(
    existing: str, name: str, match: str, tmp_path: Path
) -> None:
    file = tmp_path / (existing + "kept" if existing.endswith("/") else existing)
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with pytest.raises(ConfigError, match=match):
        export_model(Net(), tmp_path / name, torch.randn(3, 4))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


@pytest.mark.parametrize(
    "batch", [{"inputs": {"a": torch.ones(3, 4)}}, ({"a": torch.ones(3, 4)}, None)], ids=["by name", "by position"]
)
def test_nested_inputs_are_refused(batch: Any, tmp_path: Path) -> None:
    class Nested(nn.Linear):
        def forward(self, inputs: Any) -> Tensor:
            return super().forward(inputs["a"])

    with pytest.raises(ExportError, match=r"inputs is of type dict\). Where inputs are nested"):
        export_model(Nested(4, 3), tmp_path / "model.pt2", batch)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # of torch.onnx
def test_a_file_that_onnx_runtime_cannot_load_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Could not find an implementation for Gemm(13)")

    monkeypatch.setattr(pytest.importorskip("onnxruntime"), "InferenceSession", refuse)
    with pytest.raises(ExportError, match=r"cannot load Net: .*Gemm\(13\).*in float32"):
        export_model(Net(), tmp_path / "model.onnx", torch.randn(3, 4))
    assert not [*tmp_path.iterdir()]


def test_a_number_of_samples_in_the_program_is_found(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"batch of 1|differs|cannot trace"):
        export_model(Fixed(), tmp_path / "model.pt2", torch.randn(3, 4))
    # A failed export leaves nothing also of a name with brackets.
    with pytest.raises(ExportError, match="differs from the model"):
        export_model(Random(), tmp_path / "model[1].pt2", torch.randn(3, 4))
    assert not [*tmp_path.iterdir()]


def test_other_endings_and_a_missing_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'model.tflite'; the name must end in .onnx or .pt2"):
        export_model(Net(), tmp_path / "model.tflite", torch.randn(2, 4))

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match="pip install onnx "):
        export_model(Net(), tmp_path / "model.onnx", torch.randn(2, 4))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11
def test_trainer_exports_what_it_evaluates(tmp_path: Path) -> None:
    """With an average of the weights, the average."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 4), torch.arange(32) % 3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    config = TrainingConfig(
        output_dir=tmp_path / "run", num_epochs=2, batch_size=8, lr=0.1, loss="CrossEntropyLoss", ema={"decay": 0.5},
        device="cpu", progress_bar=False, save_enabled=False,
    )  # fmt: skip
    trainer = Trainer(model, config, train_dataset=data)
    trainer.train()
    path = trainer.export(tmp_path / "model.pt2")
    found = torch.export.load(path).module()(data.tensors[0])
    torch.testing.assert_close(found, trainer.predict(data), rtol=1e-5, atol=1e-6)


def test_default_trainer_exports(tmp_path: Path) -> None:
    trainer = DefaultTrainer(config_of_file(tmp_path / "run", train_iter=3))
    trainer.train()
    batch = next(iter(trainer.test_loader[0]))
    path = trainer.export(tmp_path / "model.pt2")
    inputs = trainer.get_batch(batch)
    program: Callable[..., Any] = torch.export.load(path).module()
    expected = trainer.model.eval()(**inputs)
    found = program(inputs=inputs["inputs"])  # it takes no labels: forward has them as an option
    assert found
    for key, one in found.items():
        torch.testing.assert_close(one, expected[key], rtol=1e-5, atol=1e-6)


def test_a_saved_model_loads_without_the_parts_for_training(tmp_path: Path) -> None:
    from trainwright.tasks.text_generation.model import GPTTextGeneration, GPTTextGenerationConfig

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8}
    model = GPTTextGeneration(GPTTextGenerationConfig(vocab_size=16, **sizes))
    ids = torch.randint(0, 16, (2, 8))
    export_model(model, tmp_path / "model", {"token_ids": ids})
    torch.save((ids, model.eval()(token_ids=ids)["logits"]), tmp_path / "expected.pt")
    program = (
        "import sys, torch\n"
        "from trainwright.models import Model\n"
        f"model = Model.load({str(tmp_path / 'model')!r}).eval()\n"
        f"ids, expected = torch.load({str(tmp_path / 'expected.pt')!r})\n"
        "torch.testing.assert_close(model(token_ids=ids)['logits'], expected)\n"
        "loaded = [name for name in sys.modules if name.startswith(('trainwright.engine', 'trainwright.hooks'))]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
