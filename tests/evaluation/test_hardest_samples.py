"""The hardest samples of an evaluation: exact, for any loader that is known, and equal on any number of ranks."""

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.ranks import on_ranks
from tests.toys import Samples
from trainwright.base.dist import get_data_parallel_rank, get_data_parallel_size
from trainwright.data import SingleRoundSampler, build_image_test_loader
from trainwright.evaluation import inference_on_dataset
from trainwright.evaluation.hardest_samples.search import HardestSamples, Row

LENGTH = 23


def loss_of(index: int) -> float:
    """All different, but for three pairs."""
    return float(index * 7 % LENGTH % 20)


def known() -> Samples:
    """Samples whose losses are known."""
    return Samples(
        values=lambda index: torch.tensor(loss_of(index)), labels=lambda index: torch.tensor(0.0), length=LENGTH
    )


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        for index in range(LENGTH):
            yield {**known()[index], "path": f"{index}.png"}


class Identity(nn.Module):
    """``sample_losses`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, values: Tensor, **rest: Any) -> dict[str, Tensor]:
        return {"sample_losses": values * self.weight}


class Regression(Identity):
    def forward(self, values: Tensor, labels: Tensor, **rest: Any) -> dict[str, Tensor]:
        return {"loss": nn.functional.l1_loss(values * self.weight, labels)}


class Unknown(Identity):
    def forward(self, values: Tensor, **rest: Any) -> dict[str, Tensor]:
        return {"loss": values.mean()}


def hardest(loader: Any, model: nn.Module | None = None, number: int = 6) -> list[Row]:
    found: list[Row] = []
    samples = HardestSamples(number, lambda rows, dataset: found.extend(rows))
    with samples.watching():
        inference_on_dataset(model or Identity(), loader, 4, 1e9, lambda data, device: data, "cpu", None)
    return found


def on_this_rank(shuffle: bool) -> list[Row]:
    sampler = SingleRoundSampler(
        known(), 3, shuffle=shuffle,
        data_parallel_rank=get_data_parallel_rank(), data_parallel_size=get_data_parallel_size(),
    )  # fmt: skip
    return hardest(DataLoader(known(), batch_sampler=sampler))


EXPECTED = sorted(range(LENGTH), key=lambda index: (-loss_of(index), index))[:6]


@pytest.mark.parametrize("model", [Identity(), Regression()])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.usefixtures("forked_workers")
def test_the_losses_and_indices_are_exact(model: nn.Module, num_workers: int) -> None:
    for loader in (
        build_image_test_loader(dataset=[known()], test_batch_size=4, num_workers=num_workers),
        DataLoader(known(), 5, num_workers=num_workers),
    ):
        rows = hardest(loader, model)
        assert [row["sample"] for row in rows] == EXPECTED
        assert [row["loss"] for row in rows] == [loss_of(index) for index in EXPECTED]
        assert {row["label"] for row in rows} == {0.0}


def test_of_a_shuffled_pass_the_indices_are_those_of_the_data_set() -> None:
    rows = on_this_rank(shuffle=True)
    assert {row["sample"] for row in rows[:2]} == set(EXPECTED[:2])
    assert all(row["loss"] == loss_of(row["sample"]) for row in rows)


def test_several_ranks_find_those_of_one() -> None:
    first, second, third = on_ranks(on_this_rank, False, world_size=3)
    assert first == on_this_rank(shuffle=False)
    assert second == third == []  # only the main process reports


def test_a_stream_and_an_unknown_order_have_the_names_of_the_batches_only() -> None:
    for loader in (DataLoader(Stream(), 4), DataLoader([*Stream()], 4, shuffle=True)):
        rows = hardest(loader, number=2)
        assert [row["sample"] for row in rows] == [None, None]
        assert {row["name"] for row in rows} == {f"{index}.png" for index in EXPECTED[:2]}


def test_losses_that_are_not_finite_come_first() -> None:
    samples = [{"values": torch.tensor(value)} for value in (1.0, math.nan, 5.0, math.inf)]
    rows = hardest(DataLoader(samples, 2), number=3)
    assert [row["sample"] for row in rows] == [1, 3, 2]
    assert [row["label"] for row in rows] == [None, None, None]


def test_a_loss_without_a_value_for_each_sample_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    samples = HardestSamples(3, lambda rows, dataset: pytest.fail("there are no rows"))
    with samples.watching():
        for _ in range(2):
            loader = DataLoader(known(), 4)
            inference_on_dataset(Unknown(), loader, 4, 1e9, lambda data, device: data, "cpu", None)
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(found) == 1
    assert found[0].startswith("hardest_samples: the loss of each sample is unknown.")


def test_outside_of_watching_nothing_is_kept() -> None:
    assert hardest(DataLoader(known(), 4))
    model = Identity()
    inference_on_dataset(model, DataLoader(known(), 4), 4, 1e9, lambda data, device: data, "cpu", None)
    assert not model._forward_hooks


class Weighted(Identity):
    """A cross entropy with a weight for a class that the first batch does not have."""

    def __init__(self, *weights: float) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(torch.tensor(weights) if weights else None)

    def forward(self, values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(values, labels), "logits": values * self.weight}


@pytest.mark.parametrize("weights", [(), (1.0, 9.0)], ids=["plain", "weights"])
def test_the_losses_of_all_batches_are_those_of_the_model(weights: tuple[float, ...]) -> None:
    scores = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0] * 6 + [0, 1] * 3)
    loader = DataLoader([{"values": v, "labels": k} for v, k in zip(scores, labels, strict=True)], batch_size=3)
    reported: list[Row] = []
    with HardestSamples(12, lambda rows, dataset: reported.extend(rows)).watching():
        inference_on_dataset(Weighted(*weights), loader, 3, 1e9, lambda data, device: data, "cpu", None)
    weight = torch.tensor(weights) if weights else None
    losses = nn.functional.cross_entropy(scores, labels, weight, reduction="none")
    assert [row["loss"] for row in reported] == pytest.approx(losses.sort(descending=True).values.tolist())
    assert [row["sample"] for row in reported] == losses.argsort(descending=True).tolist()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_losses_of_classes_are_those_of_the_complete_data_in_any_batches() -> None:
    draw, model = torch.Generator().manual_seed(1), Classifier()
    inputs, labels = torch.randn(211, 5, generator=draw), torch.randint(3, (211,), generator=draw)
    inputs[150:170], labels[150:170] = inputs[100:120], labels[100:120]  # equal losses: the first ones are kept
    with torch.no_grad():
        scores = model(inputs, labels)["logits"]
    losses = nn.functional.cross_entropy(scores, labels, reduction="none")
    order = losses.sort(descending=True, stable=True).indices[:40].tolist()
    samples = [{"inputs": one, "labels": label} for one, label in zip(inputs, labels, strict=True)]
    for batch_size in (1, 2, 8, 211):
        rows = hardest(DataLoader(samples, batch_size), model, number=40)
        assert [row["loss"] for row in rows] == pytest.approx(losses[order].tolist(), rel=1e-5)
        assert {row["sample"] for row in rows[:35]} <= set(order)
        for row in rows:
            index = row["sample"]
            assert (row["label"], row["prediction"]) == (int(labels[index]), int(scores[index].argmax()))
