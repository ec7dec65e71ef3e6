"""Graph mode of the Python API."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.toys import Samples, Stream, file_config, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer

pytestmark = pytest.mark.usefixtures("no_compiler")

SAMPLES = 203  # the last batch of an epoch is a short one


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(6, 16, bias=False)
        self.layers = nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class WithLoss(Net):
    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class WithOwnLoss(Net):
    def forward(self, inputs: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": super().forward(inputs)}

    def compute_loss(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return (F.cross_entropy(logits, labels, reduction="none") * weights).mean()


def named(pairs: TensorDataset) -> Samples:
    """Fields by name; one of them is a text, which no model looks at."""
    inputs, labels = pairs.tensors
    weights, text = lambda index: torch.tensor(1.0 + index % 3), "sample {}".format
    return Samples(inputs=inputs, labels=labels, weights=weights, text=text)


def pairs(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, (inputs[:, :4].argmax(-1) + torch.randint(0, 2, (count,), generator=generator)) % 4)


CONTRACTS: dict[str, tuple[type[nn.Module], Any]] = {
    "pairs": (Net, pairs()),
    "losses": (WithLoss, named(pairs())),
    "own-loss": (WithOwnLoss, named(pairs())),
}


def run(folder: Path, graph: bool, contract: str = "pairs", kind: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    net, data = CONTRACTS[contract]
    torch.manual_seed(0)
    given = {"num_epochs": 8, "batch_size": 8, "learning_rate": 0.01, "loss": "CrossEntropyLoss", "max_grad_norm": 0.5}
    given |= {"eval_strategy": "no", "save_enabled": False, "log_steps": 10, "lr_scheduler_type": "linear"}
    config = quiet(folder, graph=graph, dataloader_drop_last=False, **{**given, **settings})
    trainer = kind(net(), config, train_dataset=data, eval_dataset=pairs(24))
    trainer.train()
    return trainer


def values(trainer: Trainer, name: str = "total_loss") -> Tensor:
    return torch.tensor([value for value, _ in trainer.storage.history(name).values()])


def messages(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


class OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        return F.cross_entropy(model(inputs[0]), inputs[1], label_smoothing=0.1)


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize(("contract", "kind"), [*((name, Trainer) for name in CONTRACTS), ("pairs", OwnLoss)])
def test_the_losses_and_metrics_are_those_of_eager_steps(
    tmp_path: Path, contract: str, kind: type[Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    eager, graph = (run(tmp_path / str(graph), graph, contract, kind) for graph in (False, True))
    assert len(values(graph)) >= 200
    for name in ("total_loss", "grad_norm", "accuracy"):
        torch.testing.assert_close(values(graph, name), values(eager, name), rtol=1e-5, atol=1e-5)
    assert len(messages(caplog, "are one program")) == 1  # the last batch of an epoch is short
    assert not messages(caplog, "stay eager")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 3},
        {"mixed_precision": "bf16", "num_epochs": 2},
        {"non_finite": "skip"},
        {"freeze_bn": True},
        {"optimizer": "sgd", "metrics": []},
        {"eval_strategy": "epoch", "save_enabled": True, "save_freq": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.exhaustive(every=12)
def test_what_a_configuration_asks_of_a_step(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    eager, graph = run(tmp_path / "eager", False, **settings), run(tmp_path / "graph", True, **settings)
    tolerance = 2e-3 if "mixed_precision" in settings else 1e-5  # bfloat16 rounds at the third digit
    torch.testing.assert_close(values(graph), values(eager), rtol=tolerance, atol=tolerance)
    assert graph.last_eval_results == pytest.approx(eager.last_eval_results, rel=1e-4)
    assert len(messages(caplog, "are one program")) == 1


class OwnStep(Trainer):
    def training_step(self, batch: Any) -> Any:
        self.steps_made = getattr(self, "steps_made", 0) + 1
        return super().training_step(batch)


class OwnUpdate(Trainer):
    def optimization_step(self) -> None:
        super().optimization_step()
        self.updates_made = getattr(self, "updates_made", 0) + 1


@pytest.mark.parametrize(("kind", "name"), [(OwnStep, "training_step"), (OwnUpdate, "optimization_step")])
def test_an_overridden_step_stays_eager(
    tmp_path: Path, kind: type[Trainer], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    graph = run(tmp_path, True, kind=kind, num_epochs=1)
    assert getattr(graph, "steps_made", 0) + getattr(graph, "updates_made", 0) == 26
    lines = messages(caplog, "stay eager")
    assert len(lines) == 1
    assert f"{kind.__name__} has its own {name}" in lines[0]


class Changing(Trainer):
    """Another optimizer and another loss in the middle of the training."""

    def after_step(self) -> None:
        super().after_step()
        if self.iter == 40:
            self.set_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9))
        if self.iter == 60:
            self.set_loss(nn.CrossEntropyLoss(label_smoothing=0.2))


@pytest.mark.exhaustive
def test_another_optimizer_and_another_loss_are_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    eager, graph = run(tmp_path / "eager", False, kind=Changing), run(tmp_path / "graph", True, kind=Changing)
    torch.testing.assert_close(values(graph), values(eager), rtol=1e-5, atol=1e-5)
    assert [re.search(r"the step of (\w+)", line)[1] for line in messages(caplog, "are one program")] == [  # type: ignore[index]
        "Adam", "SGD", "SGD",
    ]  # fmt: skip


def checkpoints(folder: Path) -> Path:
    return sorted(path for path in (folder / "checkpoints").iterdir() if path.is_dir() and not path.is_symlink())[0]


def test_nothing_is_read_from_tensors_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device each reading would wait for it."""
    reads: list[int] = []
    read = Tensor.item

    class Watch(Trainer):
        def before_step(self) -> None:
            super().before_step()
            if self.iter == 5:
                monkeypatch.setattr(Tensor, "item", lambda tensor: reads.append(self.iter) or read(tensor))
            elif self.iter == 25:
                monkeypatch.setattr(Tensor, "item", read)

    run(tmp_path, True, kind=Watch, log_steps=1000, num_epochs=2, metrics=[])
    assert not reads


class Ignoring(nn.Module):
    """A linear classifier whose loss leaves out labels of -100."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.layer(inputs), labels)}


@pytest.mark.parametrize("api", ["objects", "files"])
def test_labels_of_a_stream_that_are_all_ignored_are_counted_with_the_loss_of_a_program(
    api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = (torch.arange(20) % 2).index_fill(0, torch.arange(10, 12), -100)  # of the sixth update
    rows = Samples(inputs=torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), labels=labels)
    models = []
    for is_graph in (False, True):
        model, stream = Ignoring(), Stream([rows[number] for number in range(20)])
        folder = tmp_path / str(is_graph)
        caplog.clear()
        trainer: Any
        if api == "objects":
            config = quiet(folder, batch_size=2, max_steps=10, optimizer="SGD", learning_rate=0.1, metrics=None,
                           graph=is_graph, device_str="cpu")  # fmt: skip
            trainer = Trainer(model, config, train_dataset=stream)
        else:
            cfg = file_config(folder, lambda: model, lambda: stream, train_iter=10, train_micro_batch_size=2)  # noqa: B023
            cfg.graph.enabled = is_graph
            cfg.optim = LazyCall(torch.optim.SGD)(params={}, lr=0.1)
            trainer = DefaultTrainer(cfg)
        with caplog.at_level("INFO", "trainwright"):
            trainer.train()
        assert ("are one program" in caplog.text) == is_graph
        (line,) = [record.getMessage() for record in caplog.records if "loss is nan" in record.getMessage()]
        assert line.startswith("Iteration 6: the loss is nan, as none of the labels counts")
        models.append(trainer.model)
    eager, compiled = (model.state_dict() for model in models)
    torch.testing.assert_close({name.removeprefix("model."): one for name, one in compiled.items()}, dict(eager))
