"""Models of transformers in the Python API; and the loaders that it makes or is given."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, WeightedRandomSampler

from tests.toys import Samples, Stream, assert_equal_weights, quiet
from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.checkpoint import verify
from trainwright.data import EpochSampler
from trainwright.engine import EagerTrainer
from trainwright.engine.loaders import batches_of_rank

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
LENGTH, WORDS = 12, 40


def sentences(size: int) -> Samples:
    """Class 1 if the first word is in the upper half."""
    words = torch.randint(WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(size))
    mask, labels = torch.ones_like(words), (words[:, 0] >= WORDS / 2).long()
    return Samples(input_ids=words, attention_mask=mask, labels=labels)


def classifier() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=LENGTH, num_labels=2,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def config(folder: Path, **settings: Any) -> TrainingConfig:
    return quiet(folder, **{"lr": 5e-3, "num_epochs": 2, "dataloader_drop_last": False, **settings})


def test_a_classifier_gets_the_weights_of_a_loop_by_hand(tmp_path: Path) -> None:
    data = sentences(48)
    trainer = Trainer(classifier(), config(tmp_path), data, data)
    results = trainer.train()
    theirs = classifier()
    optimizer = torch.optim.Adam(theirs.parameters(), lr=5e-3, fused=True)
    order = iter(EpochSampler(data, 8, shuffle=True, seed=42))
    torch.manual_seed(42)
    theirs.train()
    for _ in range(12):
        rows = [data[index] for index in next(order)]
        batch = {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}
        theirs(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_weights(trainer.model, theirs)
    assert set(results) == {"loss", "accuracy"}


def test_a_checkpoint_of_a_classifier_is_one_of_transformers(tmp_path: Path) -> None:
    settings = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    trainer = Trainer(classifier(), config(tmp_path, **settings), sentences(16), sentences(64))
    trainer.train()
    assert "config.json" in verify(tmp_path / "final_epoch", deep=True).files
    reloaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoints" / "model_best")
    batch = {"input_ids": sentences(64).named["input_ids"]}
    with torch.no_grad():
        assert torch.equal(reloaded.eval()(**batch).logits, trainer.model.eval()(**batch).logits)


def test_a_language_model_with_tied_weights_resumes(tmp_path: Path) -> None:
    def gpt() -> Any:
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2)
        )

    words = sentences(32).named["input_ids"]
    data = Samples(input_ids=words, labels=words)
    whole = Trainer(gpt(), config(tmp_path / "whole"), data, data)
    results = whole.train()
    Trainer(gpt(), config(tmp_path / "cut", max_steps=5), data, data).train()
    resumed = Trainer(gpt(), config(tmp_path / "cut", resume_from_checkpoint=True), data, data)
    assert resumed.train() == results
    assert_equal_weights(resumed.model, whole.model)


def test_the_loss_of_routers_counts_once(tmp_path: Path) -> None:
    """``loss`` has it, with its coefficient; ``aux_loss`` is the part alone."""
    settings = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings, **heads))
    batch = {"input_ids": sentences(8).named["input_ids"], "labels": sentences(8).named["input_ids"]}
    with torch.no_grad():
        expected = model(**batch)
    data = [{name: rows[index] for name, rows in batch.items()} for index in range(8)]
    given = {"num_epochs": 1, "batch_size": 8, "metrics": None, "eval_strategy": "no"}
    trainer = Trainer(copy.deepcopy(model), config(tmp_path, **given), data)
    trainer.train()
    eager = EagerTrainer(model.train(), [batch], torch.optim.Adam(model.parameters()))
    eager.train(0, 1)
    for storage in (trainer.storage, eager.storage):
        assert storage.latest()["total_loss"][0] == pytest.approx(float(expected.loss))
        assert storage.latest()["aux_loss"][0] == pytest.approx(float(expected.aux_loss))


INPUTS = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long()


class NoDataset:
    """No data set of torch's."""

    def __iter__(self) -> Iterator[Any]:
        return zip(INPUTS, LABELS, strict=True)


class Counted(Stream):
    def __len__(self) -> int:
        return 20


def stream(kind: type[Stream] = Stream) -> Stream:
    return kind(lambda: zip(INPUTS, LABELS, strict=True))


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


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
        (stream(Counted), {"num_epochs": 3}, 9),
        (stream(), {"max_steps": 7}, 7),
        (NoDataset(), {"max_steps": 7}, 7),
    ],
)
def test_the_weights_are_those_of_a_loop(data: Any, settings: dict[str, Any], steps: int, tmp_path: Path) -> None:
    trainer = Trainer(make(), config(tmp_path, lr=0.1, **settings), data, data)
    results = trainer.train()
    assert trainer.state.global_step == steps
    assert torch.equal(trainer.model.weight, by_hand(steps).weight)
    with torch.no_grad():
        assert results["loss"] == pytest.approx(F.cross_entropy(trainer.model(INPUTS), LABELS).item())
    assert trainer.evaluate(stream()) == pytest.approx(results)


def test_a_given_loader_without_a_length_is_trained_on(tmp_path: Path) -> None:
    trainer = Trainer(make(), config(tmp_path, lr=0.1, max_steps=7), train_dataloader=DataLoader(stream(), 8))
    trainer.train()
    assert torch.equal(trainer.model.weight, by_hand(7).weight)
    with pytest.raises(ConfigTypeError, match=r"train_dataloader: DataLoader has no length.*max_steps"):
        Trainer(make(), config(tmp_path), train_dataloader=DataLoader(stream(), 8))
    with pytest.raises(ConfigError, match=r"train_dataloader: list is empty"):
        Trainer(make(), config(tmp_path), train_dataloader=[])


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
        trainer = Trainer(Columns(), config(tmp_path / folder, lr=0.1, bucket_by_length="length", **settings), rows)
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
    monkeypatch.setattr("trainwright.engine.loaders.get_averaging_size", lambda: 2)
    seeded = torch.Generator().manual_seed(0)
    orders: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"shuffle": True}, True),
        ({"shuffle": True, "generator": seeded}, False),
        ({"sampler": SubsetRandomSampler(range(8))}, True),
        ({"sampler": WeightedRandomSampler([1.0] * 8, 8)}, True),
        ({"sampler": WeightedRandomSampler([1.0] * 8, 8, generator=seeded)}, False),
    ]
    for order, is_warned in orders:
        caplog.clear()
        assert len(list(batches_of_rank(DataLoader(range(8), 2, **order)))) == 2  # type: ignore[arg-type]
        assert ("shuffles differently on each process" in caplog.text) == is_warned
