"""Recipes have the losses and weights of plain PyTorch loops, bit for bit, and resume exactly."""

import importlib.util
import random
import tarfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.toys import assert_equal_weights
from trainwright.data import EpochSampler
from trainwright.data.seeding import ORDER_STREAM, mixed_seed, permutation

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
    """``train(module)``: the model and the losses of a recipe in one epoch."""

    def train(module: ModuleType) -> tuple[nn.Module, list[float]]:
        module.EPOCHS = 1
        trainer = module.main(str(tmp_path / "run"))
        return trainer.model, [value for value, _ in trainer.storage.history("total_loss").values()]

    return train


def batches(data: Any, size: int, epochs: int) -> Iterator[dict[str, Tensor]]:
    """In the order of the trainer, with its random numbers from the first batch on; the last shorter one is dropped."""
    order = iter(EpochSampler(data, size, shuffle=True, drop_last=True, seed=SEED))
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    for _ in range(epochs * (len(data) // size)):
        rows = [data[index] for index in next(order)]
        yield {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}


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
    assert_equal_weights(mine, model)


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
    assert_equal_weights(mine, average.module)


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
    assert_equal_weights(mine, average.module)


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
    assert_equal_weights(mine, models[1])


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.from_numpy(found.data.astype("float32") / 16), torch.from_numpy(found.target)


@pytest.mark.parametrize("name", ["vae", "multi_task"])
def test_models_of_several_losses(name: str, tmp_path: Path) -> None:
    its, (inputs, labels) = recipe(name), digits()
    trainer = its.main(str(tmp_path), 2)
    torch.manual_seed(0)
    model, logged = its.VAE() if name == "vae" else its.TwoHeads(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 if name == "vae" else 3e-3, fused=True)
    torch.manual_seed(SEED)
    for epoch in range(2):
        order = permutation(1500, SEED, epoch)
        for rows in order[: 23 * 64].split(64) if name == "vae" else order.split(50):
            x = inputs[rows]
            outputs = model(x) if name == "vae" else model(x, labels[rows], x.mean(dim=1))
            losses = {key: value for key, value in outputs.items() if key.endswith("_loss")}
            total = sum(losses.values())
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            logged.append({"total_loss": total.item(), **{key: value.item() for key, value in losses.items()}})
    for key in logged[0]:
        assert [value for value, _ in trainer.storage.history(key).values()] == [row[key] for row in logged], key
    assert_equal_weights(trainer.model, model)
    if name == "vae":
        assert [image.name for image in trainer.storage.media()] == ["digits", "digits"]
    else:
        assert trainer.last_eval_results["accuracy"] > 0.5


@pytest.mark.exhaustive
def test_causal_lm(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

    its = recipe("causal_lm")
    trainer = its.main(str(tmp_path), 1)
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model, losses = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).train(), []
    blocks = its.source_code()[:-64]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, fused=True)
    num_updates = len(blocks) // 16
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, -(-num_updates // 10), num_updates)
    torch.manual_seed(SEED)
    for rows in permutation(len(blocks), SEED, 0)[: num_updates * 16].split(16):
        loss = model(input_ids=blocks[rows], labels=blocks[rows]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
        losses.append(loss.item())
    assert [value for value, _ in trainer.storage.history("total_loss").values()] == losses
    assert_equal_weights(trainer.model, model)


def shards_by_hand(folder: Path, steps: int) -> Iterator[Tensor]:
    """Shards in the order of the seed, samples shuffled in blocks of 512, 16 a batch: by tarfile and random alone."""
    shards = sorted(folder.glob("*.tar"))
    random.Random(mixed_seed(0, ORDER_STREAM, 0)).shuffle(shards)
    pieces = []
    for shard in shards:
        with tarfile.open(shard) as tar:
            pieces += [tar.extractfile(member).read() for member in tar]  # type: ignore[union-attr]
    order = list(range(512))
    random.Random(mixed_seed(mixed_seed(SEED, ORDER_STREAM, 0, 0), ORDER_STREAM, 0, 0)).shuffle(order)
    for start in range(0, 16 * steps, 16):
        yield torch.tensor([list(pieces[number]) for number in order[start : start + 16]])


def test_stream_language_model(tmp_path: Path) -> None:
    its, steps = recipe("stream_language_model"), 12
    trainer = its.main(str(tmp_path / "whole"), steps)
    torch.manual_seed(0)
    model = its.ByteModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    for tokens in shards_by_hand(tmp_path / "whole" / "shards", steps):
        model(tokens)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_weights(trainer.model, model)
    its.main(str(tmp_path / "cut"), 5)
    assert_equal_weights(its.main(str(tmp_path / "cut"), steps).model, model)


def own_loop(folder: Path, max_iter: int = 70) -> nn.Module:
    model: nn.Module = recipe("own_loop").main(str(folder), max_iter).model
    return model


def test_own_loop(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs, labels = digits()
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 70)
    torch.manual_seed(0)
    order = torch.cat([permutation(len(labels), 0, epoch) for epoch in range(3)])
    for rows in islice(order.split(32), 70):
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(inputs[rows])
        F.cross_entropy(logits.float(), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
    assert_equal_weights(own_loop(tmp_path), net)


def test_own_loop_killed_and_resumed_is_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_rows: Callable
) -> None:
    whole, calls = own_loop(tmp_path / "whole"), iter(range(100))

    def failing(*arguments: Any) -> Tensor:
        if next(calls) == 63:
            raise RuntimeError("killed")
        return F.nll_loss(F.log_softmax(arguments[0], 1), arguments[1])

    with monkeypatch.context() as context:
        context.setattr(F, "cross_entropy", failing)
        with pytest.raises(RuntimeError, match="killed"):
            own_loop(tmp_path / "killed")
    assert_equal_weights(own_loop(tmp_path / "killed"), whole)
    losses = [
        [(row["iteration"], row["total_loss"]) for row in read_rows(tmp_path / name)] for name in ("whole", "killed")
    ]
    assert losses[0] == losses[1]
