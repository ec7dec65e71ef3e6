"""Labels of no class of the model: found before the first step where that is cheap, else with the sample's index."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from tests.ranks import on_ranks
from tests.toys import Classifier, Samples, file_config, pairs, pairs_net, points, quiet
from trainwright import DefaultTrainer, Trainer
from trainwright.base.errors import ConfigError
from trainwright.data import ColumnDataset
from trainwright.data.known_labels import known_labels


def columns(*labels: int) -> ColumnDataset:
    return ColumnDataset(inputs=torch.ones(len(labels), 4), labels=torch.tensor(labels))


class Declared(Classifier):
    """A classifier as those of transformers."""

    loss_type = "ForSequenceClassification"

    def __init__(self, classes: int = 2) -> None:
        super().__init__((4, classes))
        self.config = SimpleNamespace(num_labels=classes)


def test_labels_that_are_at_hand_are_known() -> None:
    tensors = TensorDataset(torch.zeros(3, 2), torch.tensor([4, 5, 6]))
    assert known_labels(tensors).tolist() == [4, 5, 6]  # type: ignore[union-attr]
    assert known_labels(Subset(tensors, [2, 0])).tolist() == [6, 4]  # type: ignore[union-attr]
    assert known_labels(ConcatDataset([tensors, columns(1, 2)])).tolist() == [4, 5, 6, 1, 2]  # type: ignore[union-attr]


class Changed(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is read")


@pytest.mark.parametrize(
    "data",
    [
        Changed(torch.zeros(2, 2), torch.tensor([1, 2])),  # may give other labels than its tensor has
        TensorDataset(torch.tensor([1, 2])),
        TensorDataset(torch.zeros(2, 2), torch.tensor([1, 2]), torch.tensor([7, 9])),  # which one has the labels?
        TensorDataset(torch.zeros(2, 2), torch.tensor([0.5, 1])),
        TensorDataset(torch.zeros(2, 2), torch.tensor([[0, 1], [1, 0]])),
        ColumnDataset(inputs=torch.zeros(2, 2)),
        ConcatDataset([columns(1), points()]),
        points(),
        None,
    ],
    ids=[str(n) for n in range(9)],
)
def test_labels_that_would_have_to_be_read_are_not_known(data: Dataset[Any] | None) -> None:
    assert known_labels(data) is None


def trainer_of(api: str, folder: Path, model: Any, train: Any, test: Any) -> Any:
    if api == "Python":
        config = quiet(folder, num_epochs=1, batch_size=2, eval_batch_size=2, metrics=None)
        return Trainer(model(), config, train(), test())
    cfg = file_config(folder, model, train, test, train_iter=2, train_micro_batch_size=2, test_micro_batch_size=2)
    cfg.train.evaluation.update(eval_period=2)
    cfg.train.evaluation.evaluator.topk = (1,)
    return DefaultTrainer(cfg)


def good() -> ColumnDataset:
    return columns(0, 1, 0, -100, 1, 0)


def bad() -> ColumnDataset:
    return columns(0, 1, 0, 2, 1, 3)


@pytest.mark.parametrize("api", ["Python", "config file"])
def test_a_class_that_the_model_does_not_declare_is_refused_before_the_first_step(tmp_path: Path, api: str) -> None:
    trainer = trainer_of(api, tmp_path, Declared, good, bad)
    name = "Trainer.eval_dataset" if api == "Python" else "dataloader.test"
    fact = rf"{name}: sample 3 has the label 2, and Declared has 2 classes, 0 to 1 \(2 of 6 samples"
    with pytest.raises(ConfigError, match=fact):
        trainer.train()
    assert trainer.iter == trainer.start_iter == 0
    trainer = trainer_of(api, tmp_path / "b", Declared, bad, good)
    with pytest.raises(ConfigError, match=r"(train_dataset|dataloader.train): sample 3 has the label 2"):
        trainer.train()


@pytest.mark.parametrize("api", ["Python", "config file"])
def test_what_a_model_declares_is_no_reason_to_refuse_good_labels(tmp_path: Path, api: str) -> None:
    trainer_of(api, tmp_path, Declared, good, good).train()


def from_one() -> ColumnDataset:
    return columns(1, 2, 1, 2, 2, 1)


class FromOne(Declared):
    """Its classes are counted from 1."""

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        assert labels.min() >= 0, "changed already"
        assert labels.max() <= 1, "changed already"
        return super().forward(inputs, labels)


def counted_from_0(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "labels": batch["labels"] - 1}


class OwnBatch(Trainer):
    def prepare_input_batch(self, batch: Any) -> Any:
        return counted_from_0(super().prepare_input_batch(batch))


class OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return model(**counted_from_0(inputs))["loss"]


class OwnDefaultTrainer(DefaultTrainer):
    @classmethod
    def get_batch(cls, *arguments: Any) -> Any:
        return counted_from_0(dict(super().get_batch(*arguments)))


@pytest.mark.parametrize("kind", [OwnBatch, OwnLoss, Trainer, OwnDefaultTrainer])
def test_labels_that_the_user_changes_on_the_way_are_not_judged(tmp_path: Path, kind: Any) -> None:
    if kind is OwnDefaultTrainer:
        cfg = file_config(tmp_path, FromOne, from_one, train_iter=2, train_micro_batch_size=2)
        kind(cfg).train()
        return
    collator = None
    if kind is Trainer:
        collator = lambda samples: counted_from_0(default_collate(samples))  # noqa: E731
    config = quiet(tmp_path, num_epochs=1, batch_size=2, metrics=None)
    kind(FromOne(), config, from_one(), data_collator=collator).train()


@pytest.mark.parametrize("api", ["Python", "config file"])
def test_labels_that_count_for_nothing_are_no_classes(tmp_path: Path, api: str) -> None:
    class Ignores(Declared):
        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return super().forward(inputs, torch.where(labels == 255, -100, labels))

    data = lambda: columns(0, 1, 255, 1, 0, 255)  # noqa: E731
    if api == "Python":
        config = quiet(tmp_path, num_epochs=1, batch_size=2, metrics=None, loss_ignores=255)
        Trainer(Ignores(), config, data()).train()
    else:
        cfg = file_config(tmp_path, Ignores, data, train_iter=2, train_micro_batch_size=2, loss_ignores=255)
        DefaultTrainer(cfg).train()


def test_a_label_that_no_training_sample_has_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = TensorDataset(torch.randn(4, 6), torch.tensor([0, -100, 2, 3]))
    more = TensorDataset(torch.randn(4, 6), torch.tensor([0, 1, 2, 1]))

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    trainer = Trainer(Wide(), quiet(tmp_path, num_epochs=1, batch_size=4), pairs(), {"first": data, "second": more})
    with caplog.at_level(logging.WARNING, "trainwright"):
        trainer.train()
    assert caplog.text.count("which no training sample has") == 1
    assert "Trainer.eval_dataset (1 of 2): sample 3 has the label 3" in caplog.text


def read_by_samples() -> Samples:
    found = bad()
    return Samples(inputs=found.columns["inputs"], labels=lambda index: int(found.columns["labels"][index]), length=6)


@pytest.mark.parametrize("api", ["Python", "config file"])
def test_the_evaluation_names_the_sample_of_a_wrong_label(tmp_path: Path, api: str) -> None:
    trainer = trainer_of(api, tmp_path, Classifier, good, read_by_samples)
    with pytest.raises(Exception, match=r"2 is out of bounds|labels hold 2") as raised:
        trainer.evaluate() if api == "Python" else trainer.test(trainer.cfg, trainer.test_loader, trainer.model)
    assert "The label 2 is that of sample 3." in raised.value.__notes__


def test_a_loader_of_torch_and_one_that_shuffles(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(6, 6), torch.tensor([0, 1, 2, 0, 9, 1]))
    for shuffles, note in (
        (False, "The label 9 is that of sample 4 of 'x'."),
        (True, "of the evaluation of 'x', counted"),
    ):
        loader = DataLoader(data, 2, shuffle=shuffles)
        trainer = Trainer(pairs_net(), quiet(tmp_path / str(shuffles)), pairs(), eval_dataloader={"x": loader})
        with pytest.raises(IndexError) as raised:
            trainer.evaluate()
        assert note in "".join(raised.value.__notes__)


def on_two_ranks(folder: Path) -> str:
    trainer = trainer_of("Python", folder, Classifier, good, read_by_samples)
    try:
        trainer.evaluate()
    except Exception as error:
        return str(error) + " ".join(getattr(error, "__notes__", ()))
    return ""


def test_two_ranks_name_the_sample_by_its_index_in_the_data_set(tmp_path: Path) -> None:
    found = on_ranks(on_two_ranks, tmp_path)
    assert any("The label 2 is that of sample 3." in text for text in found)
