"""Trains the same small GPT through either API under any layout, and returns what one process must get as well.

``train("objects", tmp_path)`` trains in this process; ``train_layout("files", tmp_path, world_size=4,
tensor_parallel_size=2, zero_stage=3)`` on four processes. Layouts have the names of ``TrainingConfig``.
"""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests import toys
from tests.ranks import on_ranks
from trainwright import DefaultTrainer, Trainer, TrainingConfig
from trainwright.config import LazyCall
from trainwright.evaluation import PPLEvaluator
from trainwright.hooks import HookBase, PeriodicCheckpointer
from trainwright.models import GPTTextGeneration, GPTTextGenerationConfig

VOCABULARY, LENGTH, GLOBAL_BATCH, UPDATES = 32, 12, 24, 8
APIS = ("objects", "files")


class Texts(Dataset[dict[str, Tensor]]):
    """Rows of tokens that can be predicted in part."""

    def __init__(self, length: int = GLOBAL_BATCH * UPDATES, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(VOCABULARY, (length, 1), generator=generator)
        steps = torch.randint(1, 4, (length, LENGTH), generator=generator)
        self.rows = (first + steps.cumsum(1)) % VOCABULARY

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"token_ids": self.rows[index], "labels": self.rows[index]}

    def __len__(self) -> int:
        return len(self.rows)


class Language(GPTTextGeneration):
    """Returns its loss, as models of config files do."""

    def forward(  # type: ignore[override]
        self, token_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        outputs = super().forward(token_ids, attention_mask)
        return outputs if labels is None else outputs | {"loss": self.compute_loss(outputs["logits"], labels)}

    def before_layers(self, token_ids: Tensor, labels: Any = None, attention_mask: Tensor | None = None) -> Tensor:
        return super().before_layers(token_ids, attention_mask)

    def layer_arguments(self, token_ids: Tensor, labels: Any = None, attention_mask: Any = None) -> Any:
        return super().layer_arguments(token_ids, attention_mask)

    def after_layers(self, hidden: Tensor, token_ids: Any = None, labels: Any = None, **_: Any) -> dict[str, Tensor]:
        outputs = super().after_layers(hidden)
        return outputs if labels is None else outputs | {"loss": self.compute_loss(outputs["logits"], labels)}


def build_language(*, tied: bool = True, plain: bool = False, hidden_size: int = 16) -> nn.Module:
    torch.manual_seed(0)
    config = GPTTextGenerationConfig(
        vocab_size=VOCABULARY, hidden_size=hidden_size, num_hidden_layers=4, num_attention_heads=2,
        hidden_dropout_prob=0.0, max_position_embeddings=LENGTH, initializer_range=0.2,
    )  # fmt: skip
    model = (GPTTextGeneration if plain else Language)(config)
    if not tied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


class Record(HookBase):
    """Keeps the latest values after each update."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def after_step(self) -> None:
        storage = self.trainer.storage
        storage.reduce()
        latest = storage.latest()
        self.losses.append(float(latest["total_loss"][0]))
        self.norms.append(float(latest["grad_norm"][0]))


class UnsavedTrainer(DefaultTrainer):
    """Writes no checkpoints."""

    def build_hooks(self) -> list[HookBase | None]:
        return [hook for hook in super().build_hooks() if not isinstance(hook, PeriodicCheckpointer)]


def settings(folder: Path, **own: Any) -> TrainingConfig:
    """Of a run of one epoch on the CPU, without evaluations."""
    usual = {"num_epochs": 1, "eval_strategy": "no", "device_str": "cpu", "num_dataloader_workers": 0}
    return TrainingConfig(output_dir=str(folder), **{**usual, "learning_rate": 1e-2, **own})


def train(
    api: str,
    folder: Path,
    *,
    layout: dict[str, Any] | None = None,
    accumulation: int = 1,
    precision: str | None = None,
    recompute: bool = False,
    tied: bool = True,
    updates: int = UPDATES,
    eval_samples: int = 25,
    clip: float = 1.0,
) -> dict[str, Any]:
    """Losses, norms before clipping, and evaluation results of a run. Each rank calls this."""
    from trainwright.parallel.layout import Layout

    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    data = Layout.of(layout or {}, world).data
    size, record = GLOBAL_BATCH // data // accumulation, Record()
    texts = Texts(GLOBAL_BATCH * updates)
    if api == "objects":
        config = settings(
            folder, batch_size=size, gradient_accumulation_steps=accumulation, max_grad_norm=clip,
            mixed_precision=precision, gradient_checkpointing=recompute, save_enabled=False, eval_batch_size=4,
            evaluate_with_generate=False, log_steps=1000, **(layout or {}),
        )  # fmt: skip
        trainer = Trainer(build_language(tied=tied, plain=True), config, train_dataset=texts)
        trainer.register_hooks([record])
        trainer.train()
        results = trainer.evaluate(Texts(eval_samples, seed=1))
    else:
        trainer = UnsavedTrainer(file_config(folder, layout or {}, texts, size, data, accumulation, clip, tied=tied,
                                             recompute=recompute, precision=precision, updates=updates,
                                             eval_samples=eval_samples))  # fmt: skip
        trainer.register_hooks([record])
        with contextlib.redirect_stdout(None):
            trainer.train()
        results = trainer.test(trainer.cfg, trainer.test_loader, trainer.model, PPLEvaluator())
    return {"losses": record.losses, "norms": record.norms, "results": results}


def file_config(
    folder: Path, layout: dict[str, Any], texts: Texts, size: int, data: int, accumulation: int = 1, clip: float = 1.0,
    *, updates: int, tied: bool = True, recompute: bool = False, precision: str | None = None, eval_samples: int = 4,
) -> Any:  # fmt: skip
    parts = LazyCall(build_language)(tied=tied), LazyCall(Texts)(length=len(texts))
    sizes = {"train_micro_batch_size": size, "num_accumulation_steps": accumulation, "test_micro_batch_size": 4}
    cfg = toys.file_config(
        folder, *parts, LazyCall(Texts)(length=eval_samples, seed=1), **sizes, train_iter=updates, log_period=1000,
        global_batch_size=size * data * accumulation, checkpointer={"period": 10_000}, evaluation={"enabled": False},
        scheduler=LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0), amp={"enabled": precision is not None},
        activation_checkpoint={"enabled": recompute},
    )  # fmt: skip
    cfg._set_flag("allow_objects", True)
    cfg.optim.lr, cfg.optim.params.clip_grad_max_norm = 1e-2, clip
    layout = dict(layout)
    stage, offload = layout.pop("zero_stage", 0), layout.pop("zero_offload", False)
    cfg.train.zero_optimization.update({"enabled": stage > 0, "stage": max(stage, 1), "offload": offload})
    cfg.train.dist.update({"device_type": "cpu", **layout})
    return cfg


def train_all(folder: Path, runs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Several runs in one process: pairs of an API and the arguments of :func:`train`."""
    return [train(api, folder / str(number), **arguments) for number, (api, arguments) in enumerate(runs)]


def train_on_ranks(
    folder: Path, runs: list[tuple[str, dict[str, Any]]], *, world_size: int, timeout: float = 120
) -> list[list[dict[str, Any]]]:
    """The results of ``runs`` on each rank."""
    return on_ranks(train_all, folder, runs, world_size=world_size, timeout=timeout)


def assert_equal_runs(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Compare losses, norms and evaluation results."""
    assert len(found["losses"]) == len(expected["losses"])
    for name in ("losses", "norms"):
        worst = max(abs(a - b) for a, b in zip(found[name], expected[name], strict=True))
        assert worst <= tolerance, (name, worst)
    assert found["results"] == pytest.approx(expected["results"], abs=tolerance)
