"""Muon with AdamW for the rest: which parameters, the steps of torch's two optimizers, and all that a run does."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from tests.parallel.test_tensor import gpt, of_transformers
from tests.ranks import on_ranks
from tests.toys import Samples, file_config, quiet
from trainwright import DefaultTrainer, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.config import LazyCall
from trainwright.data import CyclicSampler
from trainwright.hooks import CallbackHook
from trainwright.optim import Muon, get_default_optimizer_params


class Net(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).mean(1)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


class Returning(Net):
    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(ids)
        return {"loss": cross_entropy(logits, labels), "prediction_scores": logits}


MATRICES = ["blocks.0.1.weight", "blocks.1.1.weight"]
IDS = torch.randint(11, (48, 5), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(11, (48,), generator=torch.Generator().manual_seed(1))


def names_of(model: nn.Module) -> list[str]:
    groups = get_default_optimizer_params(model, hidden_matrices=True)
    hidden = {id(one) for group in groups if group["is_hidden"] for one in group["params"]}
    return [name for name, parameter in model.named_parameters() if id(parameter) in hidden]


def test_the_matrices_of_hidden_layers() -> None:
    pytest.importorskip("transformers")
    assert names_of(Net()) == MATRICES
    assert names_of(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 3))) == [
        "0.weight",
        "2.weight",
    ]
    llama = names_of(of_transformers("Llama"))
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in llama} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    ours = gpt()
    assert names_of(ours) == [name for name, one in ours.named_parameters() if "blocks." in name and one.dim() == 2]


def by_hand(updates: int, *, others: dict[str, Any], clip: float | None = None) -> tuple[nn.Module, list[float]]:
    model = Net()
    named = dict(model.named_parameters())
    hidden = [named.pop(name) for name in MATRICES]
    steps = [
        torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(named.values(), **{"lr": 0.01, "weight_decay": 0.1} | others),
    ]
    losses = []
    for update in range(updates):
        rows = slice(8 * (update % 6), 8 * (update % 6) + 8)
        loss = cross_entropy(model(IDS[rows]), LABELS[rows])
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for one in steps:
            one.step()
            one.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses


def run(folder: Path, epochs: int = 2, **changes: Any) -> Trainer:
    usual: dict[str, Any] = {
        "optimizer": "Muon",
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "loss": "CrossEntropyLoss",
    }
    usual |= {"batch_size": 8, "lr_scheduler": "constant", "dataloader_shuffle": False, "metrics": None, "log_steps": 1}
    config = TrainingConfig(output_dir=str(folder), num_epochs=epochs, eval_strategy="no", **usual | changes)
    return Trainer(Net(), config, Samples(IDS, LABELS))


def assert_equal(model: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> None:
    for one, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("others", [{}, {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.9)}])
def test_a_trainer_steps_as_the_two_optimizers_of_torch(
    clip: float | None, others: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model, losses = by_hand(12, others=others, clip=clip)
    optimizer = {"name_": "Muon", "adamw": others} if others else "Muon"
    trainer = run(tmp_path, optimizer=optimizer, max_grad_norm=clip)
    trainer.train()
    assert [value for value, _ in trainer.storage.history("total_loss").values()] == pytest.approx(losses, abs=1e-6)
    assert_equal(trainer.model, model)
    assert "Muon: 2 matrices of hidden layers, " in caplog.text
    assert "AdamW: the other 9 tensors." in caplog.text


def samples() -> Samples:
    return Samples(ids=IDS, labels=LABELS)


def test_a_config_file(tmp_path: Path) -> None:
    model, _ = by_hand(6, others={})
    constant = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)
    cfg = file_config(tmp_path, Returning, samples, train_micro_batch_size=8, train_iter=6, scheduler=constant)
    cfg.dataloader.train.sampler = LazyCall(CyclicSampler)(shuffle=False)
    cfg.optim = LazyCall(Muon)(lr=0.01, weight_decay=0.1)
    trainer = DefaultTrainer(cfg)
    trainer.train()
    assert_equal(trainer.model, model)


def test_a_run_resumes_bitwise(tmp_path: Path) -> None:
    schedule = {"lr_scheduler": "linear", "dataloader_shuffle": True}
    whole = run(tmp_path / "whole", epochs=4, **schedule)
    whole.train()
    first = run(tmp_path / "parts", epochs=4, save_steps=7, **schedule)
    first.register_hooks([CallbackHook(after_step=lambda trainer: trainer.iter == 6 and trainer.stop("enough"))])
    first.train()
    second = run(tmp_path / "parts", epochs=4, resume_from_checkpoint=True, **schedule)
    second.train()
    assert first.iter == 7
    assert_equal(second.model, whole.model, 0)
    rates = {group["is_hidden"]: group["lr"] for group in second.optimizer.param_groups}
    assert rates == {group["is_hidden"]: group["lr"] for group in whole.optimizer.param_groups}


def test_a_copy_steps_by_itself() -> None:
    model = Net()
    optimizer = Muon(get_default_optimizer_params(model, hidden_matrices=True), lr=0.01)
    cross_entropy(model(IDS), LABELS).backward()
    optimizer.step()
    other_model, other = copy.deepcopy((model, optimizer))
    before = [parameter.clone() for parameter in model.parameters()]
    cross_entropy(other_model(IDS), LABELS).backward()
    other.step()
    assert all(torch.equal(one, then) for one, then in zip(model.parameters(), before, strict=True))
    assert any(not torch.equal(one, then) for one, then in zip(other_model.parameters(), before, strict=True))
    optimizer.load_state_dict(other.state_dict())
    assert all(part.state is optimizer.state for part in optimizer._parts)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "is_hidden": True})
    assert optimizer.param_groups[-1]["ns_steps"] == 5


def on_two(folder: Path) -> list[list[float]]:
    trainer = run(folder, zero_stage=3, batch_size=4)
    trainer.train()
    return [parameter.full_tensor().flatten().tolist() for parameter in trainer.model.parameters()]  # type: ignore[attr-defined]


def test_zero_over_two_processes(tmp_path: Path) -> None:
    model, _ = by_hand(12, others={})
    for found in on_ranks(on_two, tmp_path):
        for one, expected in zip(found, model.parameters(), strict=True):
            # Muon computes in bfloat16, and rounds otherwise.
            assert one == pytest.approx(expected.flatten().tolist(), abs=2e-3)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft with this transformers
def test_the_model_within_an_adapter_has_the_matrices() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(of_transformers("Llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert names_of(model)
    assert all("layers." in name for name in names_of(model))


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Muon: the model has no matrix of a hidden layer, .* Use AdamW"):
        Muon(get_default_optimizer_params(nn.Linear(8, 2), hidden_matrices=True))
    data = [{"inputs": torch.randn(8), "labels": 1}] * 8
    with pytest.raises(ConfigError, match=r"^TrainingConfig\.optimizer: Muon: the model has no matrix [^:]*none\.\)$"):
        Trainer(nn.Linear(8, 2), quiet(tmp_path, optimizer="Muon"), data)
    for wrong, message in (({"adamw": 1e-3}, "Muon.adamw: got 0.001"), ({"ns_steps": 100}, "Muon.ns_steps: got 100")):
        with pytest.raises(ConfigError, match=message):
            Muon(get_default_optimizer_params(Net(), hidden_matrices=True), **wrong)
    with pytest.raises(ConfigError, match="the groups do not say which parameters are matrices of hidden layers"):
        Muon(Net().parameters())
    with pytest.raises(ConfigError, match=r"Muon has no argument 'betas'.*: 'adamw': \{'betas': \[0.9, 0.95\]\}"):
        TrainingConfig(output_dir="run", optimizer={"name_": "Muon", "betas": [0.9, 0.95]})
    with pytest.raises(ConfigError, match=r"Muon has no argument 'adamv'\. Did you mean 'adamw'"):
        TrainingConfig(output_dir="run", optimizer={"name_": "Muon", "adamv": {}})


def test_a_resume_with_another_rate_says_which_one_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trainer(rate: float, adamw_rate: float, *, resume: bool) -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = {"name_": "Muon", "adamw": {"lr": adamw_rate}}
        config = quiet(
            tmp_path, batch_size=8, num_epochs=2, optimizer=optimizer, learning_rate=rate, metrics=None,
            max_steps=None if resume else 2, resume_from_checkpoint=resume,
        )  # fmt: skip
        data = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        return Trainer(model, config, TensorDataset(data, (data[:, 0] > 0).long()))

    trainer(0.02, 0.001, resume=False).train()
    with caplog.at_level(logging.WARNING, "trainwright"):
        trainer(0.02, 0.005, resume=True).train()
    lines = [line for line in caplog.text.splitlines() if line.strip().startswith("optimizer.")]
    assert [line.split()[:3] for line in lines if ".lr" in line] == [["optimizer.adamw.lr", "0.001", "0.005"]]
