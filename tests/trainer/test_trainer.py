"""The Python API does what a hand-written loop does: same weights, bit for bit, in all three contracts."""

import copy
import gc
import math
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.toys import assert_equal_weights
from tests.trainer.contracts import (
    INPUTS,
    LABELS,
    NAMED,
    PAIRS,
    Net,
    ReturnsLosses,
    by_hand,
    config,
    make,
    pair_loss,
)
from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data import DataError, build_image_train_loader


class HasComputeLoss(Net):
    def forward(self, inputs: Tensor) -> Any:
        return {"logits": self.body(inputs)}

    def compute_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, label_smoothing=0.1)


def returned_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = model(inputs=x, labels=y)
    return outputs["ce_loss"] + outputs["z_loss"]


def own_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model.compute_loss(model(inputs=x)["logits"], y)


CONTRACTS = {
    "returns losses": (ReturnsLosses, NAMED, returned_loss),
    "has compute_loss": (HasComputeLoss, NAMED, own_loss),
    "has compute_loss, pairs": (HasComputeLoss, PAIRS, own_loss),
    "criterion on pairs": (Net, PAIRS, pair_loss),
    "criterion on names": (Net, NAMED, pair_loss),
}


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("accumulation", [1, 3])  # 7 batches an epoch: windows of 3, 3 and 1
@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_weights_are_those_of_a_hand_written_loop(contract: str, accumulation: int, tmp_path: Path) -> None:
    kind, data, loss_of = CONTRACTS[contract]
    theirs = by_hand(make(kind), loss_of, accumulation=accumulation)
    trainer = Trainer(
        make(kind), config(tmp_path, gradient_accumulation_steps=accumulation), train_dataset=data, eval_dataset=data
    )
    trainer.train()
    assert_equal_weights(trainer.model, theirs)
    assert trainer.state.global_step == trainer.total_steps == 14
    assert (trainer.epoch, trainer.state.epoch_step, trainer.consumed_samples) == (2, 7, 100)
    assert trainer.iter == 2 * math.ceil(7 / accumulation)


def test_a_given_loader_is_used_as_it_is(tmp_path: Path) -> None:
    theirs = make(Net)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.01, fused=True)
    torch.manual_seed(42)
    for _ in range(2):
        for x, y in DataLoader(PAIRS, 8, shuffle=True):
            pair_loss(theirs, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    trainer = Trainer(make(Net), config(tmp_path), train_dataloader=DataLoader(PAIRS, 8, shuffle=True))
    trainer.train()
    assert_equal_weights(trainer.model, theirs)


@pytest.mark.parametrize(
    ("model", "settings", "data", "error", "message"),
    [
        (make(Net).requires_grad_(False), {}, PAIRS, ConfigError, "no trainable parameter"),
        (make(Net), {"batch_size": 64, "dataloader_drop_last": True}, PAIRS, DataError, "fewer than a batch of 64"),
        (make(Net), {}, TensorDataset(INPUTS, LABELS, LABELS), ConfigTypeError, "list of 3 parts; the Trainer takes"),
    ],
)
def test_what_cannot_be_trained_is_said_before_the_first_step(
    model: nn.Module, settings: dict[str, Any], data: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        Trainer(model, config(tmp_path, **settings), data).train()


def test_other_parts_that_are_missing_or_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigTypeError, match=r"(?s)Trainer.model: got 3 .int.*config: got {} .dict.*train_dataset"):
        Trainer(3, {})
    with pytest.raises(ConfigError, match="there is no eval_dataset"):
        Trainer(make(Net), config(tmp_path), PAIRS).evaluate()
    with pytest.raises(ConfigError, match="gave 2 batches, but its length is 3"):
        Trainer(make(Net), config(tmp_path), train_dataloader=Short()).train()


class Short:
    """A loader that says one batch too many."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter([(INPUTS, LABELS)] * 2)


def test_trainers_leave_no_thread_and_no_memory(tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    gone, kept = [], []
    for number in range(3):
        model = Net()
        gone.append(weakref.ref(model))
        trainer = Trainer(model, TrainingConfig(output_dir=tmp_path / str(number), num_epochs=1), PAIRS)
        trainer.train()
        kept.append(trainer.checkpointer._writer)
        assert {*threading.enumerate()} <= before  # some of an earlier test may end meanwhile
        assert not trainer.checkpointer._writer._staging._blocks  # the copy that was written
    del model, trainer
    gc.collect()
    assert [model() for model in gone] == [None] * 3


def test_the_plan_and_the_folders_are_attributes(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(10, 4), torch.zeros(10, dtype=torch.long))
    config = TrainingConfig(
        output_dir=str(tmp_path), batch_size=4, num_epochs=3, dataloader_drop_last=False, max_steps=2
    )
    trainer = Trainer(nn.Linear(4, 2), config, train_dataset=data, data_collator=torch.utils.data.default_collate)
    assert (trainer.num_batches, trainer.steps_in_epoch, trainer.total_steps) == (3, 2, 2)
    assert (trainer.checkpoints_dir.parent, trainer.logs_dir.is_relative_to(tmp_path)) == (tmp_path, True)
    assert trainer.data_collator is torch.utils.data.default_collate


def test_without_a_config_it_trains_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    data = TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    assert Trainer(nn.Linear(4, 2), train_dataset=data).output_dir == tmp_path / "tmp_trainer"
    assert "tmp_trainer" in caplog.text


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize(("dtype", "device"), [(torch.float64, None), (torch.float32, "meta")])
@pytest.mark.slow
def test_the_users_default_dtype_and_device_change_no_training(
    tmp_path: Path, dtype: torch.dtype, device: str | None
) -> None:
    def train(folder: Path, epochs: int, *, resume: bool) -> dict[str, Tensor]:
        model = copy.deepcopy(begin)
        settings: dict[str, Any] = {"batch_size": 8, "device": "cpu", "resume_from_checkpoint": resume, "save_steps": 4}
        trainer = Trainer(model, TrainingConfig(output_dir=folder, num_epochs=epochs, **settings), PAIRS, PAIRS)
        trainer.train()
        return model.state_dict()

    begin = Net()
    train(tmp_path / "plain", 1, resume=False)
    expected = train(tmp_path / "plain", 2, resume=True)
    try:
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        train(tmp_path / "other", 1, resume=False)
        found = train(tmp_path / "other", 2, resume=True)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("compute_loss", lambda found: None, ".*NoneType"),
        ("training_step", lambda found: None, '.*NoneType .*dict with "loss"'),
        ("training_step", lambda found: {"step_loss": found}, '.*NoneType .*dict with "loss"'),
        ("training_step", lambda found: (found, 1), '.*tuple .*dict with "loss"'),
        ("train_step", lambda found: None, "returned NoneType; it must return a dict"),
        ("train_step", lambda found: {"loss": found}, "returned 'loss'; the loss of a step is \"step_loss\""),
    ],
)
def test_a_step_without_a_loss_is_an_error(name: str, change: Any, message: str, tmp_path: Path) -> None:
    def returning(change: Any) -> Any:
        return lambda self, *arguments: change(getattr(Trainer, name)(self, *arguments))

    kind = type("Own", (Trainer,), {name: returning(change)})
    with pytest.raises(ConfigError if name != "training_step" else ConfigTypeError, match=rf"Own.{name} {message}"):
        kind(make(Net), config(tmp_path), PAIRS).train()


def test_every_override_point_is_called_where_the_document_says(tmp_path: Path) -> None:
    calls: list[str] = []

    def noting(name: str) -> Any:
        def method(self: Trainer, *arguments: Any) -> Any:
            calls.append(name)
            return getattr(Trainer, name)(self, *arguments)

        return method

    names = ("prepare_input_batch", "train_step", "training_step", "compute_loss", "optimization_step")
    mine = type("Mine", (Trainer,), {name: noting(name) for name in names})
    trainer = mine(make(Net), config(tmp_path, num_accumulation_steps=2, max_steps=3), PAIRS)
    trainer.train()
    prepare, *step = names[:4]  # the batches of an update are read, and so prepared, before its first forward pass
    assert calls == [prepare, prepare, *step, *step, "optimization_step", prepare, *step, "optimization_step"]
    plain = Trainer(make(Net), config(tmp_path / "b", num_accumulation_steps=2, max_steps=3), PAIRS)
    plain.train()
    assert_equal_weights(trainer.model, plain.model)


def test_an_own_train_step_and_an_own_loss_take_any_batch(tmp_path: Path) -> None:
    three = TensorDataset(INPUTS, LABELS, torch.ones(50))

    class Weighted(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            x, y, weight = inputs
            return (F.cross_entropy(model(x), y, reduction="none") * weight).mean()

    class OwnStep(Trainer):
        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            x, y, _ = inputs
            self.optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            self.optimizer.step()
            return {"step_loss": loss.detach()}

    for kind in (Weighted, OwnStep):
        trainer = kind(make(Net), config(tmp_path / kind.__name__), train_dataset=three)
        trainer.train()
        theirs = by_hand(make(Net), pair_loss)
        torch.testing.assert_close(trainer.model.state_dict(), theirs.state_dict())  # another sum, the same mean
    assert Weighted(make(Net), config(tmp_path / "e"), train_dataset=three).evaluate(three)["loss"] > 0


def test_the_mixup_function_of_a_loader_is_applied_to_training_batches(tmp_path: Path) -> None:
    def mixup(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return images * 0, labels * 0

    seen: list[tuple[float, float]] = []

    class Sees(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            seen.append((float(inputs[0].abs().sum()), float(inputs[1].sum())))
            return super().compute_loss(model, inputs)

    loader, _, _ = build_image_train_loader(PAIRS, 10, num_workers=0, mixup_func=mixup)
    trainer = Sees(make(Net), config(tmp_path, num_epochs=1, max_steps=3), train_dataloader=loader, eval_dataset=PAIRS)
    trainer.train()
    assert seen[:3] == [(0.0, 0.0)] * 3
    assert seen[3][0] > 0
