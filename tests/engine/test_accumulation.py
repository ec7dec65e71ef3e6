"""Micro-batches of any sizes give the update that one batch of all their samples, or all their tokens, gives.

B batch, L tokens, F features, C classes, V vocabulary. Everything is float64, so that 1e-6 is far above rounding.
"""

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from tests.engine.token_losses import IGNORED, Language, Points, Sentences, assert_same, by_hand, model_of, sgd
from trainwright import Trainer, TrainingConfig
from trainwright.config.errors import ConfigError
from trainwright.engine import EagerTrainer
from trainwright.hooks import CallbackHook


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.body(inputs), labels)}


def losses_of(trainer: Any) -> list[float]:
    return [value for value, _ in trainer.storage.history("total_loss").values()]


def windows(sizes: list[int], length: int) -> list[list[int]]:
    """The samples of each update, of micro-batches of these sizes."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    batches = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    return [list(chain(*batches[i : i + length])) for i in range(0, len(batches), length)]


# -- config files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[4, 4, 1], [1, 4, 4], [3, 1, 2], [4, 4, 4], [2, 5, 3, 1, 6, 2]], ids=str)
def test_eager_micro_batches_of_uneven_sizes_are_one_big_batch(sizes: list[int]) -> None:
    data = Points(sum(sizes))
    updates = windows(sizes, 3)
    theirs, losses = by_hand(model_of(Classifier), [data.slice(window) for window in updates] * 2)

    ours = model_of(Classifier)
    batches = [data.slice(indices) for indices in windows(sizes, 1)]
    trainer = EagerTrainer(ours, batches, sgd(ours), 3)
    trainer.train(0, 2 * len(updates))
    assert_same(ours, theirs)
    assert losses_of(trainer) == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("says", [lambda count: count, lambda count: int(count), lambda count: count.float()[None]])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_eager_ragged_tokens_are_one_big_batch(says: Any, length: int) -> None:
    sizes = [2, 4, 1, 3, 1, 1]  # one has no token at all
    data = Sentences(sum(sizes))
    updates = windows(sizes, length)
    theirs, losses = by_hand(model_of(Language), [data.slice(window) for window in updates[:-1] if length > 1])

    ours = model_of(Language, says)
    batches = [data.slice(indices) for indices in windows(sizes, 1)]
    trainer = EagerTrainer(ours, batches, sgd(ours), length)
    trainer.train(0, max(1, len(losses)))
    if length > 1:
        assert_same(ours, theirs)
        assert losses_of(trainer) == pytest.approx(losses, rel=1e-6)
        counts = [(data.labels[window] != IGNORED).sum().item() for window in updates]
        assert [v for v, _ in trainer.storage.history("num_tokens").values()] == counts[: len(losses)]
    else:
        theirs, losses = by_hand(model_of(Language), [batches[0]])
        assert_same(ours, theirs)


def test_a_micro_batch_without_any_token_counts_for_nothing() -> None:
    data = Sentences(10)
    assert not (data.labels[4] != IGNORED).any()
    ours = model_of(Language)
    assert model_of(Language)(**data.slice([4]))["loss"].isnan()
    trainer = EagerTrainer(ours, [data.slice([0, 1]), data.slice([4])], sgd(ours), 2)
    trainer.train(0, 1)
    theirs, losses = by_hand(model_of(Language), [data.slice([0, 1])])
    assert_same(ours, theirs)
    assert losses_of(trainer) == pytest.approx(losses)
    assert math.isfinite(trainer.storage.history("accuracy").latest())


def test_a_count_that_is_no_number_is_explained() -> None:
    ours = model_of(Language, lambda count: count.expand(3))
    data = Sentences(4)
    with pytest.raises(ConfigError, match=r"'num_tokens' has shape \(3,\).*one number"):
        EagerTrainer(ours, [data.slice(range(4))], sgd(ours), 2).train(0, 1)


@pytest.mark.parametrize("name", ["labels", "classes_of_samples"])
def test_batches_of_tensors_of_several_sizes_count_by_their_labels_or_else_the_same(name: str) -> None:
    class Packed(Classifier):
        def forward(self, inputs: Tensor, starts: Tensor, **labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return super().forward(inputs, labels[name])

    data = Points(5)
    batches = [{**data.slice(range(4)), "starts": torch.zeros(2)}, {**data.slice([4]), "starts": torch.zeros(2)}]
    for batch in batches:
        batch[name] = batch.pop("labels")
    ours, theirs = model_of(Packed), model_of(Packed)
    EagerTrainer(ours, batches, sgd(ours), 2).train(0, 1)
    optimizer = sgd(theirs)
    for batch, share in zip(batches, (0.8, 0.2) if name == "labels" else (0.5, 0.5), strict=True):
        (theirs(**batch)["loss"] * share).backward()
    optimizer.step()
    assert_same(ours, theirs)


class CountScalings(TorchDispatchMode):
    """How often gradients are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mul_,)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "sizes", "length", "scalings"),
    [(Classifier, [4, 4], 1, 0), (Language, [4, 2], 1, 0), (Classifier, [4, 4], 2, 0), (Classifier, [4, 2], 2, 1)],
    ids=["plain", "tokens without accumulation", "even", "uneven"],
)
def test_gradients_are_multiplied_only_where_it_is_needed(
    kind: type[nn.Module], sizes: list[int], length: int, scalings: int
) -> None:
    data = Points(6 + 2) if kind is Classifier else Sentences(8)
    ours = model_of(kind)
    batches = [data.slice(indices) for indices in windows(sizes, 1)]
    trainer = EagerTrainer(ours, batches, torch.optim.SGD(ours.parameters(), lr=0.1, foreach=False), length)
    with CountScalings() as counted:
        trainer.train(0, 1)
    assert counted.count == scalings * len([*ours.parameters()])


# -- the Python API ----------------------------------------------------------------------------------------------


def config(folder: Path, **settings: Any) -> TrainingConfig:
    fixed = {"num_epochs": 2, "lr_scheduler_type": None, "dataloader_shuffle": False, "progress_bar": False}
    return TrainingConfig(output_dir=str(folder), dataloader_drop_last=False, **{**fixed, **settings})


def epoch_windows(length: int, batch_size: int, accumulation: int) -> list[list[int]]:
    batches = [list(range(start, min(start + batch_size, length))) for start in range(0, length, batch_size)]
    return [list(chain(*batches[i : i + accumulation])) for i in range(0, len(batches), accumulation)]


@pytest.mark.exhaustive(every=5)
@pytest.mark.parametrize("is_given", [False, True], ids=["own loader", "given loader"])
@pytest.mark.parametrize("accumulation", [1, 2, 3, 5])
@pytest.mark.parametrize(("kind", "data"), [(Classifier, Points(11)), (Language, Sentences(11))], ids=["", "tokens"])
def test_objects_micro_batches_are_one_big_batch(
    tmp_path: Path, kind: type[nn.Module], data: Points, accumulation: int, is_given: bool
) -> None:
    # batches of 3, 3, 3, 2: windows end with the epoch
    updates = [data.slice(window) for window in epoch_windows(11, 3, accumulation)] * 2
    theirs, losses = by_hand(model_of(kind), updates)
    ours = model_of(kind)
    settings = config(tmp_path, batch_size=3, gradient_accumulation_steps=accumulation)
    given = {"train_dataloader": DataLoader(data, batch_size=3)} if is_given else {"train_dataset": data}
    trainer = Trainer(ours, settings, optimizer=sgd(ours), **given)
    trainer.train()
    assert_same(ours, theirs)
    assert losses_of(trainer) == pytest.approx(losses, rel=1e-6)


def test_the_own_loader_knows_sizes_that_a_batch_does_not_show(tmp_path: Path) -> None:
    data = Points(5)

    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        return {**batch, "starts": torch.zeros(7)}

    theirs, _ = by_hand(model_of(Classifier), [data.slice(range(5))])
    ours = model_of(Classifier)
    settings = config(tmp_path, batch_size=3, gradient_accumulation_steps=2, num_epochs=1)
    Trainer(ours, settings, train_dataset=data, data_collator=collate, optimizer=sgd(ours)).train()
    assert_same(ours, theirs)


def test_an_own_training_step_is_left_alone(tmp_path: Path) -> None:
    """Who divides by the length of the window goes on doing so."""

    class Own(Trainer):
        def training_step(self, batch: Any) -> Tensor:
            loss = self.compute_loss(self.model, batch)
            (loss / 2).backward()
            return loss.detach()

    data = Sentences(8)
    ours, theirs = model_of(Language), model_of(Language)
    settings = config(tmp_path, batch_size=4, gradient_accumulation_steps=2, num_epochs=1)
    Own(ours, settings, train_dataset=data, optimizer=sgd(ours)).train()
    optimizer = sgd(theirs)
    for indices in (range(4), range(4, 8)):
        (theirs(**data.slice(indices))["loss"] / 2).backward()
    optimizer.step()
    assert_same(ours, theirs)


def test_a_loss_of_the_models_own_is_weighed_by_tokens_too(tmp_path: Path) -> None:
    class OwnLoss(Language):
        def forward(self, inputs: Tensor) -> dict[str, Any]:  # type: ignore[override]
            return {"logits": self.body(inputs), "num_tokens": self.counts.pop(0)}

        def compute_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    data = Sentences(8)
    theirs, _ = by_hand(model_of(Language), [data.slice(range(8))])
    ours = model_of(OwnLoss)
    ours.counts = [(data.labels[indices] != IGNORED).sum() for indices in (range(3), range(3, 6), range(6, 8))]
    settings = config(tmp_path, batch_size=3, gradient_accumulation_steps=3, num_epochs=1)
    Trainer(ours, settings, train_dataset=data, optimizer=sgd(ours)).train()
    assert_same(ours, theirs)


class MeanOfTokens(nn.Module):
    """The mean over the tokens that are not ignored; NaN if all are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, labels: Tensor) -> dict[str, Any]:
        loss = F.cross_entropy(self.weight.expand(len(labels), 2), labels)
        return {"loss": loss, "num_tokens": (labels != -100).sum()}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_of_no_tokens_has_no_gradient(accumulation: int) -> None:
    model = MeanOfTokens()
    none, some = {"labels": torch.tensor([-100, -100])}, {"labels": torch.tensor([0, -100])}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = EagerTrainer(model, [none] * accumulation + [some] * accumulation, optimizer, accumulation)
    losses: list[float] = []
    trainer.register_hooks(
        [CallbackHook(after_step=lambda t: losses.append(float(t.storage.latest()["total_loss"][0])))]
    )
    trainer.train(0, 2)
    assert losses == pytest.approx([0.0, math.log(2)])
    assert model.weight.tolist() == [1.25, 0.75]
