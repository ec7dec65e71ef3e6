"""Recipes have the losses of plain PyTorch loops, bit for bit: LoRA, image classification, diffusion, distillation."""

import importlib.util
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainwright.data import EpochSampler

pytest.importorskip("sklearn", reason="the digits are scikit-learn's: pip install 'trainwright[examples]'")

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
SEED = 42


def recipe(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def train(tmp_path: Path, one_thread: None) -> Callable[[ModuleType], tuple[nn.Module, list[float]]]:
    """``train(module)``: the model and the losses of a recipe."""

    def train(module: ModuleType) -> tuple[nn.Module, list[float]]:
        trainer = module.main(str(tmp_path / "run"))
        return trainer.model, [value for value, _ in trainer.storage.history("total_loss").values()]

    return train


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batches(data: Any, size: int, epochs: int) -> Iterator[dict[str, Tensor]]:
    """In the order of the trainer, with its random numbers from the first batch on; the last shorter one is dropped."""
    order = iter(EpochSampler(data, size, shuffle=True, drop_last=True, seed=SEED))
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    for _ in range(epochs * (len(data) // size)):
        rows = [data[index] for index in next(order)]
        yield {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}


def equal(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of peft
def test_lora(train: Any) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    its = recipe("finetune_lora")
    mine, losses = train(its)

    model, expected = its.add_adapters(its.make_base()).train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, fused=True)
    for batch in batches(its.data(), its.BATCH, its.EPOCHS):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == expected
    assert equal(mine, model)
    assert losses[-1] < losses[0]


@pytest.mark.exhaustive
def test_image_classifier(train: Any) -> None:
    pytest.importorskip("timm", reason="timm is not installed")
    its = recipe("image_classifier")
    mine, losses = train(its)

    model, expected, (data, _) = its.make_model(), [], its.data()
    groups = []
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        layer = int(parts[1]) + 1 if parts[0] == "blocks" else {"norm": 3, "head": 4}.get(parts[0], 0)
        decays = not name.endswith("bias") and "norm" not in name
        groups.append(
            {"params": [parameter], "lr": its.LR * 0.75 ** (4 - layer), "weight_decay": 0.05 if decays else 0.0}
        )
    optimizer = torch.optim.AdamW(groups, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, its.EPOCHS * len(data) // its.BATCH)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(its.DECAY))
    mixup = its.Mixup(**its.MIXUP)
    for batch in batches(data, its.BATCH, its.EPOCHS):
        images, labels = mixup(batch["x"], batch["labels"])
        loss = F.cross_entropy(model.train()(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        average.update_parameters(model)
        expected.append(loss.item())
    assert losses == expected
    assert equal(mine, average.module)


def test_ddpm(train: Any) -> None:
    its = recipe("ddpm")
    mine, losses = train(its)

    model, expected = its.Denoiser(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(its.DECAY))
    for batch in batches(its.data(), its.BATCH, its.EPOCHS):
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        expected.append(loss.item())
    assert losses == expected
    assert equal(mine, average.module)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.exhaustive
def test_distillation(train: Any) -> None:
    its = recipe("distillation")
    mine, losses = train(its)

    (data, _), models = its.data(), (its.make_network(256), its.make_network(8))
    for model in models:
        expected = []
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, fused=True)
        for batch in batches(data, its.BATCH, its.EPOCHS):
            scores = model(batch["input"])
            if model is models[0]:
                loss = F.cross_entropy(scores, batch["labels"])
            else:
                loss = its.loss_of_student(scores, models[0](batch["input"]).detach(), batch["labels"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
    assert losses == expected
    assert equal(mine, models[1])
