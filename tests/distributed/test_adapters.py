"""Models of peft under tensor, sequence, pipeline and context parallelism: as on one process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.distributed.layout_runs import (
    Record,
    Texts,
    UnsavedTrainer,
    build_language,
    file_config,
    settings,
)
from tests.parallel.test_tensor import by_heads, of_transformers, with_own_plan
from tests.ranks import on_ranks
from trainwright import Trainer
from trainwright.base.errors import ConfigError
from trainwright.config import LazyCall

pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of peft

UPDATES = 4
CONSTANT = {"lr_scheduler_type": "constant"}


class Rows(Texts):
    """Fields as models of transformers name them."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def adapted(model: nn.Module, *targets: str, **own: Any) -> Any:
    """With adapters whose B is not zero, so that all of them have gradients from the first update on."""
    import peft

    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[*targets], init_lora_weights=False, **own))  # type: ignore[arg-type]


def llama(**own: Any) -> Any:
    model = of_transformers("Llama", tie_word_embeddings=False, attn_implementation="sdpa")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return adapted(model, *names, **{"task_type": "CAUSAL_LM", **own})


def gpt2() -> Any:
    """Layers with the inputs first, and q, k and v in one."""
    return adapted(with_own_plan("GPT2LMHeadModel"), "c_attn", "c_proj", "c_fc", fan_in_fan_out=True)


def latent() -> Any:
    """Of latent attention, whose rotary key is used by all heads."""
    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    return adapted(by_heads("MiniCPM3"), *names, task_type="CAUSAL_LM")


def own_model() -> Any:
    return adapted(build_language(tied=False), "q", "v", "projection", "up", "down", "head")


def embeddings() -> Any:
    return llama(modules_to_save=["lm_head", "embed_tokens"])


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "dropout": partial(llama, lora_dropout=0.5),
    "task": partial(llama, task_type=None),
    "head": embeddings,
    "gpt2": gpt2,
    "latent": latent,
    "own": own_model,
}
TENSOR, PIPELINE, CONTEXT = ({f"{name}_parallel_size": 2} for name in ("tensor", "pipeline", "context"))
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("llama", TENSOR),
    "tensor, sequence": ("own", {**TENSOR, "sequence_parallel": True}),
    "tensor, sequence, llama": ("llama", {**TENSOR, "sequence_parallel": True}),
    "tensor, without a task": ("task", TENSOR),
    "tensor, head": ("head", TENSOR),
    "tensor, gpt2": ("gpt2", TENSOR),
    "tensor, latent": ("latent", TENSOR),
    "tensor, own": ("own", TENSOR),
    "tensor, recompute": ("llama", {**TENSOR, "gradient_checkpointing": True}),
    "pipeline": ("llama", PIPELINE),
    "pipeline, own": ("own", PIPELINE),
    "pipeline, head": ("head", PIPELINE),
    "interleaved": ("own", {**PIPELINE, "pipeline_schedule": "Interleaved1F1B"}),
    "context": ("llama", CONTEXT),
    "zero": ("llama", {"zero_stage": 3}),
}


def trained(folder: Path, kind: str, **own: Any) -> dict[str, Any]:
    model = MODELS[kind]()
    data = Texts(8 * UPDATES) if kind == "own" else Rows(8 * UPDATES)
    size = 8 // (2 if own.get("zero_stage") and torch.distributed.is_initialized() else 1)
    # Adam divides by the size of a gradient, and so would enlarge the rounding of small ones.
    usual = {"batch_size": size, "metrics": None, "max_grad_norm": 1.0, "save_enabled": False, "optimizer": "SGD"}
    usual["learning_rate"] = 0.1
    trainer = Trainer(model, settings(folder, **{**usual, **own}), train_dataset=data)
    record = Record()
    trainer.register_hooks([record])
    trainer.train()
    values = {"losses": record.losses, "norms": record.norms}
    if "pipeline_parallel_size" not in own:
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        values["adapters"] = {name: full(model.get_parameter(name)) for name in names}
    if "tensor_parallel_size" in own or not torch.distributed.is_initialized():
        merged = model.merge_and_unload()
        values["merged"] = {name: full(value) for name, value in merged.state_dict().items()}
    return values


def full(value: Any) -> Tensor:
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().clone()


def trained_all(folder: Path, cases: list[str]) -> dict[str, Any]:
    return {case: trained(folder / case, CASES[case][0], **CASES[case][1]) for case in cases}


def is_close(found: Any, expected: Any, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=tolerance), (
            name,
            float((found[name] - value).abs().max()),
        )


@pytest.mark.parametrize("layout", ["tensor", "pipeline, interleaved", "context, zero"])
def test_adapters_train_as_on_one_process(tmp_path: Path, layout: str) -> None:
    cases = [case for case in CASES if case.partition(",")[0] in layout.split(", ")]
    found = on_ranks(trained_all, tmp_path, cases, timeout=150)
    alone = {kind: trained(tmp_path / kind, kind) for kind in {CASES[case][0] for case in cases}}
    for case in cases:
        expected = alone[CASES[case][0]]
        for rank in found:
            assert rank[case]["losses"] == pytest.approx(expected["losses"], abs=1e-6), case
            assert rank[case]["norms"] == pytest.approx(expected["norms"], rel=2e-6), case
            for name in ("adapters", "merged"):
                if name in rank[case]:
                    is_close(rank[case][name], expected[name], 1e-6)


def resumed(folder: Path) -> dict[str, Any]:

    values = {}
    for name, own in {"tensor": TENSOR, "pipeline": PIPELINE}.items():
        runs = []
        for updates, resume in ((2, None), (UPDATES, True)):
            config = settings(
                folder / name, batch_size=8, metrics=None, max_steps=updates, resume_from_checkpoint=resume,
                save_steps=2, save_enabled=True, save_trainable_only=True, max_grad_norm=1.0, **CONSTANT, **own,
            )  # fmt: skip
            model, record = llama(), Record()
            trainer = Trainer(model, config, train_dataset=Rows(8 * UPDATES))
            trainer.register_hooks([record])
            trainer.train()
            runs.append(record.losses)
        values[name] = runs[0] + runs[1]
    return values


def test_a_resume_goes_on_and_peft_loads_the_adapters(tmp_path: Path) -> None:
    import peft

    found = on_ranks(resumed, tmp_path, timeout=150)
    expected = trained(tmp_path / "alone", "llama", optimizer="Adam", learning_rate=1e-2, **CONSTANT)
    for rank in found:
        for name in ("tensor", "pipeline"):
            assert rank[name] == pytest.approx(expected["losses"], abs=1e-6), name
    trained_names = {name.replace(".default", ""): value for name, value in expected["adapters"].items()}
    for layout in ("tensor", "pipeline"):
        saved = tmp_path / layout / "checkpoints" / str(UPDATES)
        base = of_transformers("Llama", tie_word_embeddings=False)
        weights = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base, str(saved)))
        assert weights.keys() == load_file(saved / "adapter_model.safetensors").keys()
        is_close(weights, trained_names, 1e-6)


def of_files(folder: Path, layout: dict[str, Any]) -> list[float]:
    cfg = file_config(folder, layout, Rows(24), 8, 1, updates=3)
    cfg.model = LazyCall(llama)()
    cfg.dataloader.train.dataset = LazyCall(Rows)(length=24)
    trainer, record = UnsavedTrainer(cfg), Record()
    trainer.register_hooks([record])
    trainer.train()
    return record.losses


def files_and_refusals(folder: Path) -> tuple[list[float], dict[str, str], dict[str, Any]]:
    import peft

    def base() -> nn.Module:
        return of_transformers("Llama", tie_word_embeddings=False)

    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    models = {
        "dora": lambda: llama(use_dora=True),
        "embedding": lambda: adapted(base(), "embed_tokens", "q_proj"),
        "prompts": lambda: peft.get_peft_model(base(), prompts),
        "no plan": lambda: adapted(nn.Sequential(nn.Linear(4, 8)), "0"),
    }
    refused = {}
    for name, build in models.items():
        config = settings(folder / name, batch_size=8, metrics=None, save_enabled=False, **TENSOR)
        try:
            Trainer(build(), config, train_dataset=Rows(8))
        except ConfigError as error:
            refused[name] = str(error)
    random = trained(folder / "dropout", "dropout", **TENSOR)
    return of_files(folder / "files", TENSOR), refused, random


def test_config_files_and_what_is_refused(tmp_path: Path) -> None:
    expected = of_files(tmp_path / "alone", {})
    first, second = on_ranks(files_and_refusals, tmp_path, timeout=100)
    is_close(first[2]["adapters"], second[2]["adapters"], 0.0)  # the processes draw the same masks
    for losses, refused, _ in (first, second):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert "has a variant of LoRA (DoraLinearVariant)" in refused["dora"]
        assert "embed_tokens has an adapter peft.tuners.lora.layer.Embedding" in refused["embedding"]
        assert refused["prompts"].startswith(
            "tensor parallel: the adapter 'default' of peft is of the type PROMPT_TUNING"
        )
        assert refused["no plan"].startswith("tensor parallel: Sequential has no plan")
