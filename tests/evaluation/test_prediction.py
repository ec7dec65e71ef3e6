"""Predictions of both APIs are those of a hand-written loop, in the order of the samples."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.toys import Stream, file_config
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data import ColumnDataset, SingleRoundSampler
from trainwright.evaluation.prediction import join
from trainwright.hooks import Callback

INPUTS = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.layer = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.layer(self.drop(self.norm(inputs)))
        if labels is None:
            return {"prediction_scores": scores, "loss": None}
        return {"prediction_scores": scores, "loss": nn.functional.cross_entropy(scores, labels)}


class Plain(Net):
    def forward(self, inputs: Tensor) -> Any:  # type: ignore[override]
        return super().forward(inputs)["prediction_scores"]


def trainer_of(model: nn.Module, folder: Path, **settings: Any) -> Trainer:
    data = TensorDataset(INPUTS, LABELS)
    if not isinstance(model, Plain):
        data = [{"inputs": x, "labels": y} for x, y in zip(INPUTS, LABELS, strict=True)]  # type: ignore[assignment]
    config = TrainingConfig(output_dir=folder, eval_batch_size=4, num_epochs=1, tensorboard=None, **settings)
    return Trainer(model, config, data)


def by_hand(model: nn.Module) -> Tensor:
    modes = model.training
    model.eval()
    with torch.no_grad():
        outputs = [model(INPUTS[at : at + 4]) for at in range(0, 11, 4)]
    model.train(modes)
    return torch.cat([out if isinstance(out, Tensor) else out["prediction_scores"] for out in outputs])


def test_every_kind_of_data_gives_the_outputs_of_a_loop_by_hand(tmp_path: Path) -> None:
    trainer = trainer_of(Plain(), tmp_path)
    trainer.model.train()
    expected, random = by_hand(trainer.model), torch.get_rng_state()
    kinds = {
        "with labels": TensorDataset(INPUTS, LABELS),
        "without labels": TensorDataset(INPUTS),
        "samples": list(INPUTS),
        "rows of an array": list(INPUTS.numpy()),
        "a stream": Stream(INPUTS),
        "a loader": DataLoader(TensorDataset(INPUTS, LABELS), batch_size=4),
        "a generator of batches": (INPUTS[at : at + 4] for at in range(0, 11, 4)),
        "one batch": INPUTS,
    }
    for name, data in kinds.items():
        found = trainer.predict(data)
        assert torch.equal(found, expected) or (name == "one batch" and torch.allclose(found, expected)), name
        assert not found.requires_grad
    assert all(module.training for module in trainer.model.modules())
    assert torch.equal(torch.get_rng_state(), random)


def columns() -> ColumnDataset:
    return ColumnDataset(inputs=INPUTS, labels=LABELS)


PAIRS = TensorDataset(INPUTS, LABELS)
OTHER_ORDER: dict[str, dict[str, Any]] = {
    "shuffled": {"batch_size": 4, "shuffle": True},
    "a subset": {"batch_size": 4, "sampler": SubsetRandomSampler(range(11))},
    "weighted": {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 11, 11)},
    "inside of batches": {"batch_sampler": BatchSampler(RandomSampler(PAIRS), 4, False)},
    "batches of ours": {"batch_sampler": SingleRoundSampler(PAIRS, 4, shuffle=True)},
    "a part of a process": {"batch_size": 4, "sampler": DistributedSampler(PAIRS, 2, 0, shuffle=False)},
    "shuffled by processes": {"batch_size": 4, "sampler": DistributedSampler(PAIRS, 1, 0)},
}
IN_ORDER: dict[str, dict[str, Any]] = {
    "in order": {"batch_size": 4},
    "complete batches": {"batch_size": 11, "drop_last": True},
    "complete batches of ours": {"batch_sampler": SingleRoundSampler(PAIRS, 11, drop_last=True)},
    "batches in order": {"batch_sampler": BatchSampler(SequentialSampler(PAIRS), 4, False)},
    "batches of ours in order": {"batch_sampler": SingleRoundSampler(PAIRS, 4)},
    "all of a process": {"batch_size": 4, "sampler": DistributedSampler(PAIRS, 1, 0, shuffle=False)},
    "a sampler of the user": {"batch_size": 4, "sampler": range(11)},
}


@pytest.mark.parametrize("kind", [*OTHER_ORDER, *IN_ORDER])
def test_a_loader_with_another_order_than_the_samples_is_a_warning(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(Plain(), tmp_path)
    found = trainer.predict(DataLoader(PAIRS, **{**OTHER_ORDER, **IN_ORDER}[kind]))
    assert kind in OTHER_ORDER or torch.allclose(found, by_hand(trainer.model))
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(warned) == (kind in OTHER_ORDER)
    assert all("Trainer.predict: the outputs are not in the order of the samples" in one for one in warned)


def test_the_loaders_of_a_training_are_warnings_where_they_shuffle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for shuffles in (False, True):
        trainer = trainer_of(Plain(), tmp_path, dataloader_shuffle=shuffles, dataloader_drop_last=False)
        assert "not in the order" not in caplog.text
        trainer.predict(trainer.train_dataloader)
    assert "not in the order of the samples: the loader has another one (EpochSampler)" in caplog.text


def test_a_loader_that_leaves_samples_out_is_a_warning_where_some_are_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warned() -> list[str]:
        found = [one.getMessage().partition(":")[0] for one in caplog.records if "leaves out its last" in one.message]
        caplog.clear()
        return found

    trainer = trainer_of(Plain(), tmp_path, metrics=None)
    for size, number in ((11, 0), (4, 1)):
        loader = DataLoader(PAIRS, size, drop_last=True)
        assert len(trainer.predict(loader)) == 11 - 3 * number
        assert warned() == ["Trainer.predict"] * number
        trainer.evaluate(loader)
        assert warned() == ["Trainer.evaluate"] * number
    trainer.evaluate(DataLoader(Stream([*PAIRS]), 4, drop_last=True))  # whose length is unknown
    assert "Trainer.evaluate: the loader may leave out its last, shorter batch" in caplog.text
    caplog.clear()
    config_trainer = DefaultTrainer(column_config(tmp_path / "file"))
    loader = DataLoader(columns(), 4, shuffle=True, drop_last=True)
    assert len(config_trainer.predict(loader)["prediction_scores"]) == 8
    assert "DefaultTrainer.predict: the outputs are not in the order of the samples" in caplog.text
    assert warned() == ["DefaultTrainer.predict"]
    cfg = column_config(tmp_path / "test")
    cfg.dataloader.test = [LazyCall(DataLoader)(dataset=LazyCall(columns)(), batch_size=4, drop_last=True)]
    DefaultTrainer(cfg)
    assert warned() == ["dataloader.test.0 leaves out its last, shorter batch"]


def test_iterate_yields_the_outputs_batch_by_batch_and_lets_the_caller_train_between(tmp_path: Path) -> None:
    trainer = trainer_of(Plain(), tmp_path)
    trainer.model.train()
    found = trainer.predict(TensorDataset(INPUTS), iterate=True)
    parts = []
    for part in found:
        assert trainer.model.training
        assert torch.is_grad_enabled()
        parts.append(part)
    assert [len(part) for part in parts] == [4, 4, 3]
    assert torch.equal(torch.cat(parts), by_hand(trainer.model))


def test_iterate_draws_what_a_prediction_of_all_draws_and_keeps_the_random_state(tmp_path: Path) -> None:
    class Noisy(Plain):
        def forward(self, inputs: Tensor) -> Any:  # type: ignore[override]
            return super().forward(inputs) + torch.rand(len(inputs), 1)

    trainer, states = trainer_of(Noisy(), tmp_path), []
    loader = DataLoader(TensorDataset(INPUTS, LABELS), 4, shuffle=True)
    torch.manual_seed(3)
    expected, parts = trainer.predict(loader), []
    for part in trainer.predict(loader, iterate=True):
        parts.append(part)
        states.append(torch.get_rng_state())
    assert torch.equal(torch.cat(parts), expected)
    torch.manual_seed(3)
    assert all(torch.equal(state, torch.get_rng_state()) for state in states)


def test_averaged_weights_predict_within_a_training_in_both_forms(tmp_path: Path) -> None:
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    class Predict(Callback):
        def on_train_batch_end(self, batch: Any, logs: Any) -> None:
            parts = trainer.predict(TensorDataset(INPUTS), iterate=True)
            found.append((trainer.predict(TensorDataset(INPUTS)), torch.cat(list(parts)), by_hand(trainer.model)))

    trainer = trainer_of(Plain(), tmp_path, ema={"decay": 0.5}, loss="CrossEntropyLoss", batch_size=2, lr=0.1)
    trainer.add_callback(Predict())
    trainer.train()
    assert all(torch.equal(whole, joined) for whole, joined, _ in found)
    assert not torch.equal(found[-1][0], found[-1][2])  # the weights of the training


def test_a_dict_of_outputs_is_joined_by_name_and_keeps_what_belongs_to_samples(tmp_path: Path) -> None:
    trainer = trainer_of(Net(), tmp_path)
    expected = by_hand(trainer.model)
    labelled = trainer.predict([{"inputs": x, "labels": y} for x, y in zip(INPUTS, LABELS, strict=True)])
    plain = trainer.predict([{"inputs": x, "number": 3} for x in INPUTS])  # a field that forward does not take
    assert labelled.keys() == plain.keys() == {"prediction_scores"}
    assert torch.equal(labelled["prediction_scores"], expected)
    assert torch.equal(plain["prediction_scores"], expected)


def test_a_user_decides_what_a_batch_gives(tmp_path: Path) -> None:
    class Classes(Trainer):
        def predict_step(self, batch: Any) -> Any:
            return super().predict_step(batch).argmax(1)

    trainer = Classes(Plain(), TrainingConfig(output_dir=tmp_path), TensorDataset(INPUTS, LABELS))
    assert torch.equal(trainer.predict(TensorDataset(INPUTS)), by_hand(trainer.model).argmax(1))
    # Bfloat16 is the precision of the run.
    trainer = trainer_of(Plain(), tmp_path, mixed_precision="bf16")
    assert trainer.predict(TensorDataset(INPUTS)).dtype is torch.bfloat16


Pair = namedtuple("Pair", ["scores", "hidden"])


def test_outputs_of_unequal_sizes_are_one_entry_for_each_sample() -> None:
    ragged = join([torch.zeros(2, 3), torch.ones(1, 5)])
    assert [len(row) for row in ragged] == [3, 3, 5]
    assert join([[{"boxes": 1}, {"boxes": 2}], [{"boxes": 3}]]) == [{"boxes": 1}, {"boxes": 2}, {"boxes": 3}]
    both = join([Pair(torch.zeros(2), torch.zeros(2, 2)), Pair(torch.zeros(1), torch.zeros(1, 2))])
    assert isinstance(both, Pair)
    assert both.hidden.shape == (3, 2)
    assert join([(torch.tensor(0.5), torch.zeros(2)), (torch.tensor(0.25), torch.zeros(1))])[0].shape == (3,)


def test_what_cannot_be_predicted_is_a_clear_error(tmp_path: Path) -> None:
    class OnlyLoss(Net):
        def forward(self, inputs: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            return {"loss": self.layer(inputs).sum()}

    trainer = trainer_of(OnlyLoss(), tmp_path)
    with pytest.raises(ConfigError, match="no value for each sample"):
        trainer.predict([{"inputs": x, "labels": y} for x, y in zip(INPUTS, LABELS, strict=True)])
    with pytest.raises(ConfigTypeError, match="missing a required argument: 'labels'"):
        trainer.predict([{"inputs": x} for x in INPUTS])
    with pytest.raises(ValueError, match="at least one sample"):
        trainer.predict([])
    with pytest.raises(ConfigTypeError, match=r"a tuple of 20 parts.*list"):
        trainer_of(torch.nn.Linear(3, 1), tmp_path).predict(torch.randn(20, 3).unbind())


def column_config(folder: Path) -> Any:
    sizes = {"train_iter": 2, "train_micro_batch_size": 4, "test_micro_batch_size": 4}
    return file_config(folder, Net, columns, columns, **sizes)


def test_config_files_predict_their_test_data_and_any_other(tmp_path: Path) -> None:
    trainer = DefaultTrainer(column_config(tmp_path))
    expected = by_hand(trainer.model)
    assert torch.equal(trainer.predict()["prediction_scores"], expected)
    assert torch.equal(trainer.predict([{"inputs": x} for x in np.asarray(INPUTS)])["prediction_scores"], expected)
    parts = list(trainer.predict(ColumnDataset(inputs=INPUTS), iterate=True))
    assert torch.equal(torch.cat([part["prediction_scores"] for part in parts]), expected)
    with pytest.raises(ConfigTypeError, match="number"):
        trainer.predict([{"inputs": x, "number": 3} for x in INPUTS])
