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

from tests.engine.trainer.contracts import (
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
from tests.toys import assert_equal_weights
from trainwright import Trainer, TrainingConfig
from trainwright.config.errors import ConfigError, ConfigTypeError
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


def test_what_cannot_be_trained_is_said_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigTypeError, match=r"(?s)Trainer.model: got 3 .int.*Trainer.config: got dict.*train_dataset"
    ):
        Trainer(3, {})
    with pytest.raises(ConfigError, match="no trainable parameter"):
        Trainer(make(Net).requires_grad_(False), config(tmp_path), PAIRS)
    with pytest.raises(DataError, match="fewer than a batch of 64"):
        Trainer(make(Net), config(tmp_path, batch_size=64, dataloader_drop_last=True), PAIRS)
    with pytest.raises(ConfigTypeError, match="list of 3 parts; the Trainer takes pairs"):
        Trainer(make(Net), config(tmp_path), TensorDataset(INPUTS, LABELS, LABELS)).train()
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


def test_a_step_without_a_loss_is_an_error(tmp_path: Path) -> None:
    class NoLoss(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            model(inputs[0])

    class NoStep(Trainer):
        def training_step(self, batch: Any) -> Any:
            super().training_step(batch)

    class OtherStep(Trainer):
        def training_step(self, batch: Any) -> Any:
            return {"step_loss": super().training_step(batch)}

    class PairStep(Trainer):
        def training_step(self, batch: Any) -> Any:
            return super().training_step(batch), batch

    class NoLogs(Trainer):
        def train_step(self, model: Any, inputs: Any) -> Any:
            super().train_step(model, inputs)

    class OtherName(Trainer):
        def train_step(self, model: Any, inputs: Any) -> Any:
            return {"loss": super().train_step(model, inputs)["step_loss"]}

    with pytest.raises(ConfigError, match=r"NoLoss.compute_loss .*NoneType"):
        NoLoss(make(Net), config(tmp_path), PAIRS).train()
    for kind, found in ((NoStep, "NoneType"), (OtherStep, "NoneType"), (PairStep, "tuple")):
        with pytest.raises(ConfigTypeError, match=rf'{kind.__name__}.training_step .*{found} .*dict with "loss"'):
            kind(make(Net), config(tmp_path), PAIRS).train()
    with pytest.raises(ConfigError, match=r"NoLogs.train_step returned NoneType; it must return a dict"):
        NoLogs(make(Net), config(tmp_path), PAIRS).train()
    with pytest.raises(ConfigError, match=r"OtherName.train_step returned 'loss'; the loss of a step is \"step_loss\""):
        OtherName(make(Net), config(tmp_path), PAIRS).train()


def test_every_override_point_is_called_where_the_document_says(tmp_path: Path) -> None:
    calls: list[str] = []

    class Mine(Trainer):
        def prepare_input_batch(self, batch: Any) -> Any:
            calls.append("prepare")
            return super().prepare_input_batch(batch)

        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            calls.append("train_step")
            return super().train_step(model, inputs)

        def training_step(self, batch: Any) -> Tensor:
            calls.append("training_step")
            return super().training_step(batch)

        def optimization_step(self) -> None:
            calls.append("optimization_step")
            super().optimization_step()

        def compute_loss(self, model: Any, inputs: Any) -> Any:
            calls.append("compute_loss")
            return super().compute_loss(model, inputs)

    trainer = Mine(
        make(Net),
        config(tmp_path, num_accumulation_steps=2, max_steps=3),
        train_dataset=PAIRS,
    )
    trainer.train()
    step = ["prepare", "train_step", "training_step", "compute_loss"]
    assert calls == [*step, *step, "optimization_step", *step, "optimization_step"]
    plain = Trainer(
        make(Net),
        config(tmp_path / "b", num_accumulation_steps=2, max_steps=3),
        train_dataset=PAIRS,
    )
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
        for left, right in zip(
            trainer.model.parameters(),
            by_hand(make(Net), pair_loss).parameters(),
            strict=True,
        ):
            torch.testing.assert_close(left, right)  # weight 1: another sum, the same mean
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
