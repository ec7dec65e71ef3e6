"""Training on packed texts equals a hand-written loop over single texts; models that mix the texts are refused."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, Subset

from tests.parallel.test_tensor import gpt, of_transformers
from tests.toys import Samples, file_config
from trainwright import DefaultTrainer, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.config import LazyCall
from trainwright.data import CyclicSampler, PackedDataset
from trainwright.models import GPTTextGeneration
from trainwright.models.packed_texts import check_packed_texts
from trainwright.optim import get_default_optimizer_params

LENGTH, BATCH, UPDATES = 16, 4, 6


def build(kind: str, **settings: Any) -> nn.Module:
    if kind == "gpt":
        return gpt(initializer_range=0.2, **settings).double()
    return of_transformers(kind, use_cache=False, **settings).double()


def documents(kind: str) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    sizes = torch.randint(1, 12, (60,), generator=draw).tolist()
    name = "token_ids" if kind in ("gpt", "Returning") else "input_ids"
    return [{name: torch.randint(1, 33, (size,), generator=draw)} for size in sizes]


def rows(kind: str) -> Subset[Any]:
    packed = PackedDataset(documents(kind), LENGTH)
    assert len(packed) >= BATCH * UPDATES - 4, "there are enough rows"
    return Subset(packed, range(BATCH * (len(packed) // BATCH)))


def texts_of(row: dict[str, Tensor]) -> list[Tensor]:
    ids = row.get("input_ids", row.get("token_ids"))
    assert ids is not None
    starts = [place for place, position in enumerate(row["position_ids"].tolist()) if position == 0] + [len(ids)]
    return [ids[start:end] for start, end in pairwise(starts)]


def by_hand(kind: str, data: Subset[Any]) -> tuple[list[float], nn.Module]:
    """Each text by itself, without packing or padding: the mean over the tokens of the texts of an update."""
    model = build(kind)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    name = "token_ids" if kind == "gpt" else "input_ids"
    for first in range(0, len(data), BATCH):
        # The tokens of padding are texts of one token, which predict nothing.
        texts = [text for place in range(first, first + BATCH) for text in texts_of(data[place]) if len(text) > 1]
        number = sum(len(text) - 1 for text in texts)
        total = 0.0
        for text in texts:
            outputs = model(**{name: text[None]})
            logits = outputs["logits"] if kind == "gpt" else outputs.logits
            loss = cross_entropy(logits[0, :-1], text[1:], reduction="sum") / number
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


def settings(folder: Path, **changes: Any) -> TrainingConfig:
    usual: dict[str, Any] = {"num_epochs": 1, "batch_size": BATCH, "learning_rate": 0.1, "optimizer": "SGD"}
    usual |= {
        "lr_scheduler": "constant",
        "dataloader_shuffle": False,
        "metrics": None,
        "eval_strategy": "no",
        "log_steps": 1,
    }
    return TrainingConfig(output_dir=str(folder), **usual | changes)


def losses_of(trainer: Any) -> list[float]:
    return [value for value, _ in trainer.storage.history("total_loss").values()]


@pytest.mark.parametrize("kind", ["gpt", "Llama", "Qwen3"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_packed_texts_train_as_single_ones(kind: str, accumulation: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    expected, model = by_hand(kind, rows(kind))
    config = settings(tmp_path, batch_size=BATCH // accumulation, gradient_accumulation_steps=accumulation)
    trainer = Trainer(build(kind), config, rows(kind))
    trainer.train()
    assert losses_of(trainer) == pytest.approx(expected, abs=2e-6)
    for one, other in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)  # transformers' loss is in float32


class Returning(GPTTextGeneration):
    """Returns its loss, as models of config files do."""

    def forward(self, token_ids: Tensor, labels: Tensor, position_ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        outputs = super().forward(token_ids, position_ids=position_ids)
        return {"loss": self.compute_loss(outputs["logits"], labels), "prediction_scores": outputs["logits"]}


def returning() -> nn.Module:
    model = build("gpt")
    model.__class__ = Returning
    return model


def test_packed_texts_in_a_config_file(tmp_path: Path) -> None:
    expected, _ = by_hand("gpt", rows("gpt"))
    sizes = {"train_micro_batch_size": BATCH, "train_iter": len(expected), "log_period": 1}
    constant = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)
    cfg = file_config(tmp_path, returning, LazyCall(rows)(kind="gpt"), **sizes, scheduler=constant)
    cfg.optim = LazyCall(torch.optim.SGD)(params=LazyCall(get_default_optimizer_params)(), lr=0.1)
    cfg.dataloader.train.sampler = LazyCall(CyclicSampler)(shuffle=False)
    trainer = DefaultTrainer(cfg)
    trainer.train()
    assert losses_of(trainer) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("kind", ["gpt", "Llama"])
def test_a_run_over_packed_texts_resumes_bitwise(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def run(folder: Path, **changes: Any) -> Any:
        config = settings(folder, dataloader_shuffle=True, num_epochs=2, **changes)
        trainer = Trainer(build(kind), config, rows(kind), rows(kind))
        trainer.train()
        return trainer

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", max_steps=7, save_steps=7)
    parts = run(tmp_path / "parts", resume_from_checkpoint=True)
    for one, other in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert parts.evaluate() == whole.evaluate()


def test_the_flattening_collator_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    data = [text for text in documents("Llama") if len(text["input_ids"]) > 1][:24]
    kind = "Llama"
    padded = [{"input_ids": text["input_ids"], "position_ids": torch.arange(len(text["input_ids"]))} for text in data]
    model, losses = build(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in range(0, len(padded), BATCH):
        texts = [one["input_ids"] for one in padded[first : first + BATCH]]
        number = sum(len(text) - 1 for text in texts)
        scores = [(model(input_ids=text[None]).logits[0, :-1], text[1:]) for text in texts]
        loss = sum(cross_entropy(logits, labels, reduction="sum") for logits, labels in scores) / number
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    collator = transformers.DataCollatorWithFlattening()
    trainer = Trainer(build(kind), settings(tmp_path), data, data_collator=collator)
    trainer.train()
    assert losses_of(trainer) == pytest.approx(losses, abs=2e-6)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(33, 8), nn.Linear(8, 33)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(input_ids))
        return logits


def mixing(kind: str, **changes: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": 33, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    if kind == "OPT":
        return transformers.OPTForCausalLM(
            transformers.OPTConfig(**sizes, ffn_dim=32, word_embed_proj_dim=32, **changes)
        )
    if kind == "BertForMaskedLM":
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=32, **changes))
    return of_transformers(kind, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Plain", {}, "Plain.forward takes no 'position_ids'"),
        ("Llama", {"use_cache": True}, r"With its cache, .* Set model\.config\.use_cache = False"),
        ("OPT", {}, "Tried with a row of two texts: a change of one changes the scores of the other in OPTForCausalLM"),
        ("BertForMaskedLM", {}, "Tried with a row of two texts"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "otherwise than by attention: Conv1d, conv"),
        (
            "Llama",
            {"attention": "flash_attention_2"},
            "'flash_attention_2' knows the texts only in a batch of",
        ),
    ],
)
@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_models_that_would_mix_the_texts_are_refused(
    kind: str, changes: dict[str, Any], message: str, method: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    kernel, changes = changes.get("attention", "sdpa"), {k: v for k, v in changes.items() if k != "attention"}
    model = Plain() if kind == "Plain" else mixing(kind, **{"use_cache": False} | changes)
    if kind != "Plain":
        model.config._attn_implementation = kernel  # its package is not installed here
    trainer = Trainer(model, settings(tmp_path), rows("Llama"), rows("Llama"))
    with pytest.raises(ConfigError, match=message):
        getattr(trainer, method)()


def test_what_a_model_declares_is_looked_at_each_time(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = of_transformers("Llama", use_cache=False)
    trainer = Trainer(model, settings(tmp_path), rows("Llama"), rows("Llama"))
    trainer.train()
    model.config.use_cache = True
    with pytest.raises(ConfigError, match="With its cache"):
        trainer.evaluate()


def test_a_subclass_of_the_collator_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    collator = type("Own", (transformers.DataCollatorWithFlattening,), {})()
    trainer = Trainer(mixing("OPT", use_cache=False), settings(tmp_path), documents("Llama"), data_collator=collator)
    with pytest.raises(ConfigError, match="DataCollatorWithFlattening: packed texts would see each other"):
        trainer.train()


def test_a_stream_of_texts_for_the_collator_of_transformers_is_not_read_before() -> None:
    transformers = pytest.importorskip("transformers")
    texts = documents("Llama")

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(texts)

    loader = DataLoader(Stream(), 2, collate_fn=transformers.DataCollatorWithFlattening())
    check_packed_texts(of_transformers("Llama", use_cache=False), loader)
    with pytest.raises(ConfigError, match="With its cache"):  # what a model declares is looked at
        check_packed_texts(of_transformers("Llama", use_cache=True), loader)


def test_a_model_is_tried_again_until_a_trial_has_compared_something() -> None:
    """The first text of the data has one token only, so that nothing can be compared."""
    transformers = pytest.importorskip("transformers")
    model, collator = mixing("OPT", use_cache=False), transformers.DataCollatorWithFlattening()
    same: Any = [{"input_ids": torch.full((6,), 5)}]
    check_packed_texts(model, DataLoader(same, 1, collate_fn=collator))
    texts: Any = documents("Llama")
    with pytest.raises(ConfigError, match="packed texts would see each other"):
        check_packed_texts(model, DataLoader(texts, 1, collate_fn=collator))


def test_other_data_with_positions_are_not_looked_at(tmp_path: Path) -> None:
    ids = torch.randint(33, (8, 6))
    data = Samples(input_ids=ids, labels=ids, position_ids=torch.arange(6).expand(8, -1))
    model = of_transformers("Llama", use_cache=True) if pytest.importorskip("transformers") else None
    trainer = Trainer(model, settings(tmp_path), data)
    trainer.train()
    assert len(losses_of(trainer)) == 2
