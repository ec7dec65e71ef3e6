"""Processes with other settings, or another model, are refused on all of them, by the name of what differs."""

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.ranks import on_ranks
from tests.toys import file_config, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.errors import ConfigError
from trainwright.hooks import Callback
from trainwright.parallel.rank_checks import check_same_model, check_same_settings, data_size


def message(call: Any, *arguments: Any) -> str:
    try:
        call(*arguments)
    except ConfigError as error:
        return str(error)
    return ""


def rank() -> int:
    return int(os.environ["RANK"])


def settings_of_rank(cases: list[list[dict[str, Any]]]) -> list[str]:
    return [message(check_same_settings, case[rank()]) for case in cases]


def test_what_differs_is_named_with_both_values() -> None:
    same = {"a": 1, "b": {"c": [1, "x"], "d": None}, "nan": math.nan}
    cases = [
        ([same, dict(reversed(same.items()))], ""),
        ([{"a": 1}, {"a": 1.0}], "a: 1 on rank 0, but 1.0 on rank 1"),
        ([{"a": {"b": "x"}}, {"a": {"b": "y"}}], "a.b: 'x' on rank 0, but 'y' on rank 1"),
        ([{"a": 1}, {}], "a: 1 on rank 0, but no value on rank 1"),
        ([{"a": [1, 2]}, {"a": [1, 3]}], "a: [1, 2] on rank 0, but [1, 3] on rank 1"),
        # What may differ: devices, workers, trackers, and objects, which show their address.
        ([{"device": "cuda:0", "x": {"num_workers": 1}}, {"device": "cuda:1", "x": {"num_workers": 2}}], ""),
        ([{"trackers": {"wandb": {}}}, {"trackers": None}], ""),
        ([{"sampler": {"rank": 0}}, {"sampler": {"rank": 1}}], ""),
        ([{"a": object()}, {"a": object()}], ""),
    ]
    for found in on_ranks(settings_of_rank, [[*case] for case, _ in cases]):
        for text, (_, expected) in zip(found, cases, strict=True):
            assert text[: len(expected)] == expected
            assert expected or not text


def split_of_rank() -> list[str]:
    splits = [Subset(range(8), [0, place]) for place in (1, 1 + rank())]
    return [message(check_same_settings, {"data": data_size(split)}) for split in splits]


def test_a_split_that_each_process_draws_by_itself_is_refused() -> None:
    for same, other in on_ranks(split_of_rank):
        assert not same
        assert other.startswith("data: '2 samples, whose indices have the checksum ")


def models_of_rank() -> list[str]:
    other = rank() == 1
    frozen = nn.Linear(2, 3).requires_grad_(not other)
    named: nn.Module = nn.ModuleDict({"a": nn.Linear(2, 3)}) if other else nn.Sequential(nn.Linear(2, 3))
    models = [
        nn.Linear(2, 3), nn.Linear(2, 3 + other), frozen, named,
        nn.Linear(2, 3, dtype=torch.float64 if other else torch.float32),
        nn.Sequential(nn.Linear(2, 3), *([nn.BatchNorm1d(3)] if other else [])),
    ]  # fmt: skip
    return [message(check_same_model, model) for model in models]


def test_models_that_differ_are_refused_with_the_first_difference() -> None:
    for same, shape, frozen, name, dtype, longer in on_ranks(models_of_rank):
        assert same == ""
        assert "rank 0 has weight (3 x 2 float32); rank 1 has weight (4 x 2 float32)" in shape
        assert "rank 1 has weight (3 x 2 float32, frozen)" in frozen
        assert "rank 0 has 0.weight (3 x 2 float32); rank 1 has a.weight (3 x 2 float32)" in name
        assert "rank 1 has weight (3 x 2 float64)" in dtype
        assert "rank 0 has nothing that the other does not have; rank 1 has 1.weight (3 float32)" in longer


def build(api: str, folder: Path) -> str:
    data = TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)
    if api.startswith("files"):
        part = TensorDataset(*data[: 3 if rank() else 16])
        test = (lambda: part) if api == "files' data" else None
        sizes = {"train_iter": 2, "train_micro_batch_size": 4}
        cfg = file_config(folder, lambda: nn.Linear(4, 2), lambda: data, test, **sizes)
        cfg.dataloader.train.num_workers = rank()
        cfg.optim = LazyCall(torch.optim.SGD)(lr=0.1 + rank() * (api == "files"))
        return message(DefaultTrainer, cfg)
    epochs = 1 + rank() * (api == "epochs")
    config = quiet(folder, num_epochs=epochs, batch_size=4, num_dataloader_workers=rank())
    eval_dataset = (
        None if api == "evaluation" and rank() else TensorDataset(*data[: 3 if api == "length" and rank() else 16])
    )
    return message(Trainer, nn.Linear(4, 2), config, data, eval_dataset)


class OtherRate(Callback):
    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        if rank() == 1 and logs["global_step"] == 3:
            self.optimizer.param_groups[0]["lr"] = 0.5


class TwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale.float()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x.long().abs() % 5).mean(1))


def train_with(case: str, folder: Path) -> str:
    generator = torch.Generator().manual_seed(0)  # an earlier case has seeded the global one by rank
    data = TensorDataset(torch.randn(16, 4, generator=generator), torch.arange(16) % 2)
    evaluated = {"eval_dataloader": DataLoader(data if rank() else TensorDataset(*data[:9]), 4)}
    parts: dict[str, Any] = {"loader": evaluated, "rate": {"callbacks": [OtherRate()]}}.get(case, {})
    zero = 0 if case in ("loader", "rate") else 3
    named = {"Adafactor": "Adafactor", "Rprop": "Rprop"}.get(case, "SGD")
    settings = {"num_epochs": 4, "batch_size": 2, "learning_rate": 0.01, "metrics": None, "log_steps": 2}
    config = quiet(folder, zero_stage=zero, optimizer=named, **settings)
    model = {"sparse": Words, "types": TwoTypes}.get(case, lambda: nn.Linear(4, 2))()

    def run() -> None:
        Trainer(model, config, data, **parts).train()
        if case == "again":
            Trainer(model, config, data)

    return message(run)


BUILT = {
    "files": "optim.lr: 0.1 on rank 0, but 1.1 on rank 1",
    "epochs": "TrainingConfig.num_epochs: 1 on rank 0, but 2 on rank 1",
    "evaluation": "Trainer.eval_dataset: '16 samples' on rank 0, but None on rank 1",
    "length": "Trainer.eval_dataset: '16 samples' on rank 0, but '3 samples' on rank 1",
    "files' data": "dataloader.test.0: '16 samples' on rank 0, but '3 samples' on rank 1",
    "same": "",
}
TRAINED = {
    "rate": "lr: 0.01 on rank 0, but 0.5 on rank 1.",
    "loader": "Trainer.eval_dataloader: '3 batches' on rank 0, but '4 batches' on rank 1.",
    "again": "The model is divided between the processes already, by an earlier trainer.",
    "Adafactor": "Adafactor (torch.optim): its step cannot update parameters that ZeRO",
    "Rprop": "Rprop (torch.optim.rprop): its step cannot update parameters that ZeRO",
    "sparse": "words (Embedding) has sparse=True;",
    "types": "ZeRO: scale (float64) and layer.weight (float32) of TwoTypes are divided together",
}


def refusals(folder: Path) -> dict[str, str]:
    built = {case: build(case, folder / f"built {case}") for case in BUILT}
    return built | {case: train_with(case, folder / f"trained {case}") for case in TRAINED}


def test_what_would_train_wrongly_or_fail_within_torch_is_refused(tmp_path: Path) -> None:
    for found in on_ranks(refusals, tmp_path):
        for case, expected in (BUILT | TRAINED).items():
            assert found[case][: len(expected)] == expected
            assert expected or not found[case]
