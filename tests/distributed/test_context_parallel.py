"""Context parallel through both APIs: the losses, norms, evaluations and refusals of parts of sequences."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from tests.distributed.layout_runs import Record, Texts, UnsavedTrainer, file_config
from tests.distributed.layout_runs import settings as settings_of
from tests.engine.test_sharded_resume import forget
from tests.parallel.test_tensor import gpt, of_transformers
from tests.ranks import on_ranks
from tests.toys import Samples
from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.config import LazyCall
from trainwright.data import PackedDataset
from trainwright.inspect.estimate import estimate
from trainwright.models import GPTTextGeneration
from trainwright.parallel.layout import Layout

LENGTH, BATCH = 13, 8  # neither 2 nor 4 divides the tokens


class Language(GPTTextGeneration):
    """Returns its loss, as models of config files do."""

    def forward(  # type: ignore[override]
        self, token_ids: Tensor, labels: Tensor | None = None, position_ids: Any = None, shift_labels: Any = None
    ) -> dict[str, Tensor]:
        outputs = super().forward(token_ids, position_ids=position_ids)
        return outputs if labels is None else {"loss": self.compute_loss(outputs["logits"], labels, shift_labels)}


def build(kind: str, **settings: Any) -> nn.Module:
    model = gpt(initializer_range=0.2, **settings) if kind in ("gpt", "Language") else of_transformers(kind, **settings)
    if kind == "Language":
        model.__class__ = Language
    return model.double()


def texts(kind: str, length: int, *, prompt: int = 0, is_padded: bool = False, is_packed: bool = False) -> Any:
    """The first ``prompt`` tokens have no label, and further ones of some texts; or the last ones are padding.

    ``is_packed``: rows of texts of 1 to 9 tokens.
    """
    if is_packed:
        return packed_texts(kind, length)
    rows = torch.randint(33, (length, LENGTH), generator=torch.Generator().manual_seed(length))
    labels, mask = rows.clone(), torch.ones_like(rows)
    labels[:, :prompt] = labels[1::3, : LENGTH // 3] = -100
    if is_padded:
        labels[::2, -4:], mask[::2, -4:] = -100, 0
    name = "token_ids" if kind in ("gpt", "Language") else "input_ids"
    return Samples(**{name: rows, "labels": labels} | ({"attention_mask": mask} if is_padded else {}))


def packed_texts(kind: str, length: int) -> Subset[Any]:
    name = "token_ids" if kind in ("gpt", "Language") else "input_ids"
    draw = torch.Generator().manual_seed(length)
    sizes = torch.randint(1, 10, (4 * length,), generator=draw).tolist()
    rows = PackedDataset([{name: torch.randint(33, (size,), generator=draw)} for size in sizes], LENGTH)
    return Subset(rows, range(length))


class Looking(Trainer):
    """Evaluates a text between the forward and the backward pass."""

    def compute_loss(self, model: Any, inputs: Any, **named: Any) -> Any:
        loss = super().compute_loss(model, inputs, **named)
        with torch.no_grad():
            model.eval()(torch.zeros(1, 5, dtype=torch.int64))
        model.train()
        return loss


def objects(
    folder: Path,
    kind: str,
    updates: int = 3,
    *,
    data: dict[str, Any] | None = None,
    trainer_class: type[Trainer] = Trainer,
    layout: dict[str, Any],
    **settings: Any,
) -> dict[str, Any]:
    """The values of a run of the Python API."""
    size = BATCH // Layout.of(layout, world_size()).data // settings.get("gradient_accumulation_steps", 1)
    usual = {"max_grad_norm": 1.0, "evaluate_with_generate": False, "log_steps": 1000, "save_enabled": False}
    config = settings_of(folder, batch_size=size, **usual | settings | layout)
    record = Record()
    model = build(kind)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    trainer = trainer_class(model, config, train_dataset=texts(kind, BATCH * updates, **(data or {})))
    trainer.register_hooks([record])
    trainer.train()
    results = trainer.evaluate(texts(kind, 9))
    return {"losses": record.losses, "norms": record.norms, "results": results}


def files(folder: Path, kind: str, updates: int = 3, *, layout: dict[str, Any]) -> dict[str, Any]:
    """The same of a config file, without an evaluation."""
    data = Layout.of(layout, world_size()).data
    cfg = file_config(folder, layout, Texts(1), BATCH // data, data, updates=updates)
    cfg.model = LazyCall(build)(kind=kind)
    cfg.dataloader.train.dataset = LazyCall(texts)(kind=kind, length=BATCH * updates)
    trainer, record = UnsavedTrainer(cfg), Record()
    trainer.register_hooks([record])
    trainer.train()
    return {"losses": record.losses, "norms": record.norms}


def world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


Case = tuple[Callable[..., dict[str, Any]], str, dict[str, Any], dict[str, Any]]  # with its settings, and its layout

OF_TWO: list[Case] = [
    (objects, "gpt", {"updates": 20}, {}),
    (objects, "Llama", {"updates": 20}, {}),
    (objects, "Qwen3", {}, {"zero_stage": 3}),
    (objects, "Llama", {"data": {"prompt": 8}, "gradient_checkpointing": True}, {"zero_stage": 2}),
    (objects, "gpt", {"gradient_checkpointing": True, "trainer_class": Looking}, {}),
    (objects, "gpt", {"data": {"is_padded": True}, "gradient_accumulation_steps": 2}, {"zero_stage": 3}),
    (objects, "gpt", {"data": {"is_packed": True}, "gradient_accumulation_steps": 2}, {"zero_stage": 3}),
    (objects, "Llama", {"data": {"is_packed": True}, "gradient_checkpointing": True}, {}),
    (files, "Language", {}, {}),
    (files, "Qwen3", {}, {"zero_stage": 2}),
]
OF_FOUR: list[Case] = [
    (objects, "gpt", {"updates": 20}, {"context_parallel_size": 4}),
    (objects, "Llama", {"updates": 20}, {"zero_stage": 3}),
    (objects, "Qwen3", {}, {"context_parallel_size": 4, "zero_stage": 2}),
    (objects, "Llama", {}, {"zero_stage": 3, "replicate_size": 2}),
    (objects, "gpt", {"gradient_checkpointing": True}, {"tensor_parallel_size": 2}),
    (files, "Llama", {}, {"tensor_parallel_size": 2}),
    (objects, "Qwen3", {"data": {"is_packed": True}}, {"context_parallel_size": 4}),
]


def run_all(folder: Path, cases: list[Case]) -> list[dict[str, Any]]:
    return [
        train(folder / str(number), kind, **settings, layout={"context_parallel_size": 2} | layout)
        for number, (train, kind, settings, layout) in enumerate(cases)
    ]


@pytest.mark.parametrize(("ranks", "cases"), [(2, OF_TWO), (4, OF_FOUR)], ids=["2", "4"])
@pytest.mark.exhaustive(every=2)
def test_parts_of_sequences_train_as_complete_ones(tmp_path: Path, ranks: int, cases: list[Case]) -> None:
    pytest.importorskip("transformers")
    whole = ("updates", "data", "trainer_class")  # neither accumulated nor computed again
    alone = run_all(
        tmp_path / "alone",
        [
            (train, kind, {name: settings[name] for name in whole if name in settings}, {})
            for train, kind, settings, _ in cases
        ],
    )
    found = on_ranks(run_all, tmp_path / "ranks", cases, world_size=ranks, timeout=150)
    for rank in found:
        for case, values, expected in zip(cases, rank, alone, strict=True):
            for name in expected:
                assert values[name] == pytest.approx(expected[name], abs=1e-5), (case, name)


def saved(folder: Path) -> dict[str, Any]:
    settings = {"save_enabled": True, "save_steps": 2, "resume_from_checkpoint": True}
    return objects(folder, "gpt", updates=4, layout={"context_parallel_size": 2}, **settings)


def test_a_run_continues_with_complete_sequences_on_one_process(tmp_path: Path) -> None:
    unbroken, _ = on_ranks(saved, tmp_path)
    forget(tmp_path, "4")
    assert saved(tmp_path)["losses"] == pytest.approx(unbroken["losses"][2:], abs=1e-5)


def replayed(folder: Path) -> Any:
    config = TrainingConfig(output_dir=str(folder), num_epochs=1, batch_size=4, context_parallel_size=2, metrics=None)
    return Trainer(gpt(), config, train_dataset=texts("gpt", 8)).replay(1)


def test_a_replay_has_no_losses_of_parts_of_samples(tmp_path: Path) -> None:
    for found in on_ranks(replayed, tmp_path):
        assert [len(batch) for batch in found.samples] == [4]
        assert found.facts.sample_losses == []


class Masked(GPTTextGeneration):
    def layer_arguments(self, token_ids: Tensor, *_: Any) -> tuple[Tensor]:
        return (torch.ones(token_ids.shape[1], token_ids.shape[1], dtype=torch.bool).tril(),)


class Shifting(Trainer):
    def compute_loss(self, model: Any, batch: Any) -> Tensor:
        logits = model(batch["token_ids"], position_ids=batch.get("position_ids"))["logits"]
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def refusals(folder: Path) -> list[str]:
    def message(model: nn.Module, data: Any, kind: type[Trainer] = Trainer, **settings: Any) -> str:
        config = settings_of(folder, batch_size=4, save_enabled=False, context_parallel_size=2, **settings)
        given = {"train_dataloader" if isinstance(data, DataLoader) else "train_dataset": data}
        with pytest.raises(ConfigError) as raised:
            kind(model, config, **given).train()
        return str(raised.value)

    def with_fields(**changes: Any) -> Samples:
        return Samples(**texts("gpt", 8).named | changes)

    factors = {"rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_parameters": {"rope_type": "longrope", **factors}, "original_max_position_embeddings": 8}
    masked = gpt()
    masked.__class__ = Masked
    rows, left = texts("gpt", 8).named["token_ids"], torch.ones(8, LENGTH).long()
    left[0, 0] = 0
    return [
        message(gpt(num_attention_heads=1), texts("gpt", 8)),
        message(nn.Linear(2, 2), Samples(torch.ones(8, 2), torch.ones(8, 2))),
        message(gpt(), texts("gpt", 8), kind=Shifting),
        message(gpt(), texts("gpt", 8), graph=True),
        message(gpt(), texts("gpt", 8), compile_blocks=True),
        message(gpt(max_position_embeddings=13), texts("gpt", 8)),
        message(of_transformers("Mistral", sliding_window=8), texts("Llama", 8)),
        message(of_transformers("Phi3", pad_token_id=0, **rope), texts("Llama", 8)),
        message(of_transformers("Lfm2", layer_types=["conv", "full_attention"]), texts("Llama", 8)),
        message(gpt(), with_fields(attention_mask=left)),
        message(gpt(), with_fields(position_ids=rows, attention_mask=torch.ones_like(rows))),
        message(gpt(), with_fields(position_ids=rows[:, :3])),
        message(masked, texts("gpt", 8)),
        message(of_transformers("Llama", attn_implementation="eager"), texts("Llama", 8)),
        # A loader of the user's own: the data of others are compared before the first step.
        message(gpt(), DataLoader(Samples(token_ids=(rows + torch.distributed.get_rank()) % 33, labels=rows), 4)),
    ]


def test_what_cannot_be_divided_is_refused_before_the_first_update(tmp_path: Path) -> None:
    expected = [
        "got 2, which does not divide the 1 attention heads",
        "Linear needs parameters 'position_ids' of forward",
        "Shifting.compute_loss reads 'labels', not 'shift_labels'",
        "graph: got True with",
        "compile_blocks cannot compile",
        "13 tokens, padded to 14 for 2 processes, is longer than max_position_embeddings=13 of the model's config",
        "is longer than sliding_window=8",
        "is longer than original_max_position_embeddings=8",
        "combine tokens otherwise than by attention: Conv1d, conv",
        "'attention_mask' must .* padding only at the end",
        r"the data have 'position_ids' \(4, 13\), with 'attention_mask'",
        r"the data have 'position_ids' \(4, 3\)\. Packed texts have those of each token, here \(4, 13\)",
        "attention has a mask",
        "attn_implementation='sdpa'",
        "Context ranks 0 and 1 have read different batches: 'token_ids' differ",
    ]
    for messages in on_ranks(refusals, tmp_path):
        for message, text in zip(messages, expected, strict=True):
            assert re.search(text, message), message


def test_the_activations_of_a_process_are_those_of_its_part(tmp_path: Path) -> None:
    def activations(ranks: int, **layout: Any) -> int:
        config = TrainingConfig(output_dir=str(tmp_path), num_epochs=1, batch_size=4, metrics=None, **layout)
        rows = Samples(token_ids=torch.ones(8, 256).long(), labels=torch.ones(8, 256).long())
        make = lambda config: Trainer(gpt(max_position_embeddings=256), config, train_dataset=rows)  # noqa: E731
        return estimate(make, config, world_size=ranks).costs[0].activations

    whole = activations(1)
    assert activations(2, context_parallel_size=2) < 0.6 * whole
    assert activations(4, context_parallel_size=4) < 0.35 * whole
