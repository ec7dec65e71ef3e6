"""The Python API does what a hand-written loop does: same weights, bit for bit, in all three contracts."""

import copy
import gc
import math
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright
from tests.engine.trainer.contracts import (
    INPUTS,
    LABELS,
    NAMED,
    PAIRS,
    Net,
    ReturnsLosses,
    assert_equal_weights,
    by_hand,
    config,
    make,
    pair_loss,
)
from trainwright import Trainer, TrainingConfig
from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.data import DataError

PACKAGE = str(Path(trainwright.__file__).parent)


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


@pytest.mark.usefixtures("no_compiler")
def test_a_graph_gives_the_weights_of_the_eager_model(tmp_path: Path) -> None:
    trainer = Trainer(make(Net), config(tmp_path, graph=True, batch_size=25, max_steps=3), train_dataset=PAIRS)
    eager = Trainer(make(Net), config(tmp_path / "eager", batch_size=25, max_steps=3), train_dataset=PAIRS)
    trainer.train()
    eager.train()
    for left, right in zip(trainer.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(left, right)  # a program sums in another order


def frames_of_forward(module: nn.Module, seen: list[list[str]]) -> None:
    forward = module.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        frame, own = sys._getframe(1), []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                own.append(frame.f_code.co_name)
            frame = frame.f_back
        seen.append(own[::-1])
        return forward(*args, **kwargs)

    module.body.forward, forward = spy, module.body.forward  # the body: the model's signature stays readable


@pytest.mark.parametrize("contract", CONTRACTS)
def test_five_frames_stand_between_train_and_the_model(contract: str, tmp_path: Path) -> None:
    kind, data, _ = CONTRACTS[contract]
    model, seen = make(kind), []
    frames_of_forward(model, seen)
    Trainer(model, config(tmp_path, num_epochs=1), train_dataset=data).train()
    assert len(seen) == 7
    first, *later = (len(frames) for frames in seen)
    assert max(later) <= 5, seen[1]
    assert first <= max(later) + 1  # which chooses what the step does, by its batch


def test_what_cannot_be_trained_is_said_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigTypeError, match=r"(?s)Trainer.model: got int.*Trainer.config: got dict.*train_dataset"):
        Trainer(3, {})
    with pytest.raises(ConfigError, match="no trainable parameter"):
        Trainer(make(Net).requires_grad_(False), config(tmp_path), PAIRS)
    with pytest.raises(DataError, match="fewer than a batch of 64"):
        Trainer(make(Net), config(tmp_path, batch_size=64, dataloader_drop_last=True), PAIRS)
    with pytest.raises(ConfigTypeError, match="list of 3 parts; the Trainer takes pairs"):
        Trainer(make(Net), config(tmp_path), TensorDataset(INPUTS, LABELS, LABELS)).train()
    with pytest.raises(ConfigTypeError, match="does not take the batch"):
        Trainer(make(ReturnsLosses), config(tmp_path), [{"input": x, "labels": 1} for x in INPUTS]).train()
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
