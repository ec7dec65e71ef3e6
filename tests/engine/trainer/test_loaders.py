"""Iterable data sets: the same weights as the same samples in a loop by hand, with and without a length."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from tests.toys import Stream
from trainwright import Trainer, TrainingConfig
from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.engine.trainer.loaders import batches_of_rank

INPUTS = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long()


class Counted(Stream):
    def __init__(self) -> None:
        super().__init__(lambda: zip(INPUTS, LABELS, strict=True))

    def __len__(self) -> int:
        return 20


def stream() -> Stream:
    return Stream(lambda: zip(INPUTS, LABELS, strict=True))


class Plain:
    """No data set of torch's."""

    def __iter__(self) -> Iterator[Any]:
        return zip(INPUTS, LABELS, strict=True)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def config(folder: Path, **settings: Any) -> TrainingConfig:
    given = {"batch_size": 8, "lr": 0.1, "lr_scheduler_type": None, "progress_bar": False, **settings}
    return TrainingConfig(output_dir=folder, dataloader_drop_last=False, **given)


def by_hand(steps: int) -> nn.Module:
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    for step in range(steps):
        rows = slice(8 * (step % 3), 8 * (step % 3) + 8)
        F.cross_entropy(model(INPUTS[rows]), LABELS[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    ("data", "settings", "steps"),
    [
        (Counted(), {"num_epochs": 3}, 9),
        (stream(), {"max_steps": 7}, 7),
        (Plain(), {"max_steps": 7}, 7),
    ],
)
def test_the_weights_are_those_of_a_loop(data: Any, settings: dict[str, Any], steps: int, tmp_path: Path) -> None:
    trainer = Trainer(make(), config(tmp_path, **settings), data, data)
    results = trainer.train()
    assert trainer.state.global_step == steps
    assert torch.equal(trainer.model.weight, by_hand(steps).weight)
    with torch.no_grad():
        assert results["loss"] == pytest.approx(F.cross_entropy(trainer.model(INPUTS), LABELS).item())
    assert trainer.evaluate(stream()) == pytest.approx(results)


def test_a_given_loader_without_a_length_is_trained_on(tmp_path: Path) -> None:
    trainer = Trainer(make(), config(tmp_path, max_steps=7), train_dataloader=DataLoader(stream(), 8))
    trainer.train()
    assert torch.equal(trainer.model.weight, by_hand(7).weight)
    with pytest.raises(ConfigTypeError, match=r"train_dataloader: DataLoader has no length.*max_steps"):
        Trainer(make(), config(tmp_path), train_dataloader=DataLoader(stream(), 8))
    with pytest.raises(ConfigError, match=r"train_dataloader: list is empty"):
        Trainer(make(), config(tmp_path), train_dataloader=[])


def test_a_stream_resumes_by_leaving_out_what_was_read(tmp_path: Path) -> None:
    Trainer(make(), config(tmp_path, max_steps=2), Counted()).train()
    resumed = Trainer(make(), config(tmp_path, resume_from_checkpoint=True), Counted())
    resumed.train()
    assert torch.equal(resumed.model.weight, by_hand(6).weight)


def test_what_cannot_be_trained_on_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigTypeError, match=r"no length.*TrainingConfig.max_steps"):
        Trainer(make(), config(tmp_path), stream())
    with pytest.raises(ConfigTypeError, match="is an iterator"):
        Trainer(make(), config(tmp_path, max_steps=3), iter(stream()))

    with pytest.raises(ConfigError, match="remove sampler and bucket_by_length"):
        Trainer(make(), config(tmp_path, max_steps=3, bucket_by_length=True), stream())

    with pytest.raises(ConfigError, match="yields no sample"):
        Trainer(make(), config(tmp_path, max_steps=3), Stream([])).train()

    forgets = DataLoader(INPUTS, 4, collate_fn=lambda samples: None)  # type: ignore[arg-type]  # a tensor has items
    with pytest.raises(ConfigTypeError, match="DataLoader gave None"):
        Trainer(make(), config(tmp_path), train_dataloader=forgets).train()


def test_batches_by_length_resume_exactly(tmp_path: Path) -> None:
    rows = [{"inputs": INPUTS[i % 20], "labels": LABELS[i % 20], "length": i * 7 % 31} for i in range(48)]

    def run(folder: str, **settings: Any) -> torch.Tensor:
        given = config(tmp_path / folder, num_epochs=2, bucket_by_length="length", lr_scheduler=None, **settings)
        trainer = Trainer(Columns(), given, rows)
        trainer.train()
        return trainer.model.linear.weight

    whole = run("whole")
    run("killed", max_steps=7)
    assert torch.equal(run("killed", resume_from_checkpoint=True), whole)


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = make()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, length: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.linear(inputs), labels) + 0 * length.sum()}


def test_a_setting_of_streams_has_no_effect_on_other_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Trainer(make(), config(tmp_path, shuffle_buffer=8), list(zip(INPUTS, LABELS, strict=True)))
    assert "shuffle_buffer has no effect: list is read by index" in caplog.text


def test_a_shuffled_loader_of_an_evaluation_on_several_processes_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainwright.engine.trainer.loaders.get_data_parallel_size", lambda: 2)
    for shuffle in (False, True):
        assert "shuffles differently" not in caplog.text
        assert len(list(batches_of_rank(DataLoader(range(8), 2, shuffle=shuffle)))) == 2  # type: ignore[arg-type]
    assert "shuffles differently on each process" in caplog.text
