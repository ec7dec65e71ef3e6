"""Tensor parallel through both APIs: the losses, norms and evaluations of one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.distributed.layout_runs import (
    Record,
    Texts,
    UnsavedTrainer,
    build_language,
    file_config,
    settings,
    train,
    train_on_ranks,
)
from tests.parallel.test_tensor import of_transformers, with_own_plan
from tests.ranks import on_ranks
from trainwright import Trainer
from trainwright.config import LazyCall

Run = tuple[str, dict[str, Any]]

OF_TWO: list[Run] = [
    ("files", {"updates": 8}),
    ("objects", {"updates": 3, "accumulation": 2, "layout": {"sequence_parallel": True}}),
    ("objects", {"updates": 3, "tied": False, "recompute": True}),
]
OF_FOUR: list[Run] = [
    ("files", {"layout": {"zero_stage": 3}}),
    ("objects", {"layout": {"zero_stage": 1, "sequence_parallel": True}}),
    ("files", {"layout": {"pipeline_parallel_size": 2, "sequence_parallel": True}}),
    ("objects", {"layout": {"pipeline_parallel_size": 2}}),
]


@pytest.mark.parametrize(("world_size", "runs"), [(2, OF_TWO), (4, OF_FOUR)], ids=["2", "4"])
@pytest.mark.exhaustive(every=2)
def test_tensor_parallel_processes_train_as_one(tmp_path: Path, world_size: int, runs: list[Run]) -> None:
    runs = [
        (api, {"updates": 3, "accumulation": 2 if world_size > 2 else 1, **own} | {"layout": layout_of(own)})
        for api, own in runs
    ]
    found = train_on_ranks(tmp_path, runs, world_size=world_size)
    for number, (api, own) in enumerate(runs):
        expected = train(api, tmp_path / f"alone{number}", **{k: v for k, v in own.items() if k != "layout"})
        for rank in found:
            run, case = rank[number], f"{api} {own}"
            assert run["losses"] == pytest.approx(expected["losses"], abs=1e-5), case
            assert run["norms"] == pytest.approx(expected["norms"], abs=1e-5), case
            assert run["results"] == pytest.approx(expected["results"], rel=1e-6), case


def layout_of(own: dict[str, Any]) -> dict[str, Any]:
    return {"tensor_parallel_size": 2, **own.get("layout", {})}


class Rows(Texts):
    """Fields as models of transformers name them."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def objects(folder: Path, name: str, model: nn.Module, **own: Any) -> list[float]:
    """Final values of a run in the Python API; on one process the tensor-parallel size has no effect."""
    named = type(model).__module__.startswith("transformers")
    kind = Rows if named else Texts
    own = {"batch_size": 8, "save_enabled": False, "evaluate_with_generate": False, **own}
    config = settings(folder / name, tensor_parallel_size=2, **own)
    trainer = Trainer(model, config, train_dataset=kind(24))
    trainer.train()
    return [float(value) for value in trainer.evaluate(kind(9, seed=1)).values()]


def features(folder: Path) -> dict[str, list[float]]:
    frozen = build_language(plain=True)
    frozen.blocks[0].requires_grad_(False)  # type: ignore[index, union-attr]
    run = partial(objects, folder)
    return {
        "averaged weights": run("average", build_language(plain=True), ema={"decay": 0.5}),
        "frozen, no decay of norms": run(
            "frozen", frozen, weight_decay=0.1, decay_norm_and_bias=False, layer_decay=0.9
        ),
        "skip": run("skip", build_language(plain=True), non_finite="skip", max_grad_norm=0.1),
        "by value": run("value", build_language(plain=True), clip_grad_value=0.01),
        "no metrics": run("split", build_language(plain=True), metrics=None),
        "llama": run("llama", of_transformers("Llama", tie_word_embeddings=True)),
        "qwen3": run("qwen3", of_transformers("Qwen3", tie_word_embeddings=False)),
        "experts": run("experts", of_transformers("Mixtral", num_local_experts=4, output_router_logits=True)),
        "a plan that is set": run("set", with_own_plan("GPT2LMHeadModel")),
        "llama, files": [of_files(folder / "files")],
    }


def of_files(folder: Path) -> float:
    texts = Rows(24)
    cfg = file_config(folder, {"tensor_parallel_size": 2}, texts, 8, 1, recompute=True, updates=3)
    cfg.model = LazyCall(of_transformers)(kind="Llama", tie_word_embeddings=False)
    cfg.dataloader.train.dataset = LazyCall(Rows)(length=24)
    trainer, record = UnsavedTrainer(cfg), Record()
    trainer.register_hooks([record])
    trainer.train()
    return record.losses[-1]


@pytest.mark.exhaustive
def test_averages_freezing_clipping_and_models_of_transformers_are_those_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    expected = features(tmp_path / "alone")
    for found in on_ranks(features, tmp_path / "ranks", timeout=150):
        for case, values in expected.items():
            assert found[case] == pytest.approx(values, abs=1e-5), case
