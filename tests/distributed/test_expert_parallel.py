"""Expert parallel through both APIs: the numbers of one process, the work of each, checkpoints, and refusals."""

import logging
import re
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.distributed.expert_runs import WIDTH, Case, Mixture, Record, Rows, build, by_hand, run_all, trainer_of
from tests.distributed.layout_runs import settings
from tests.engine.test_sharded_resume import forget, full
from tests.ranks import on_ranks
from tests.toys import OwnStep
from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.cli.main import main
from trainwright.config import LazyCall
from trainwright.inspect.estimate import StepCost, estimate

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of peft
MIXTURE = {"kind": "Mixture", "is_double": True}
TENSOR = {"tensor_parallel_size": 2}
WITH_TENSOR = {**TENSOR, "expert_parallel_size": 4}  # of four processes, each has some experts, and two the same tokens


def layouts_by_hand(ranks: int) -> list[Case]:
    own: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("objects", {}, {}),
        ("objects", {"bias": 9.0}, {"zero_stage": 3}),  # the last process has no tokens for its experts
        ("objects", {"experts": 8}, {"zero_stage": 2, "gradient_checkpointing": True}),
        ("objects", {}, {"gradient_accumulation_steps": 2, "expert_parallel_size": 2, "zero_stage": 1}),
        ("objects", {"experts": 2}, {"expert_parallel_size": 2, "zero_stage": 3}),  # of four, two share one expert
    ]
    own += [("objects", {}, TENSOR), ("objects", {"bias": 9.0}, {**TENSOR, "gradient_checkpointing": True})]
    if ranks == 4:
        accumulated = {"gradient_accumulation_steps": 2, "expert_parallel_size": 2}
        own += [
            ("objects", {"experts": 8}, {"tensor_parallel_size": 4, "gradient_checkpointing": "selective"}),
            ("objects", {}, {**TENSOR, **accumulated, "zero_stage": 1}),
            ("objects", {}, {**TENSOR, "zero_stage": 3}),
        ]
    usual = {"expert_parallel_size": ranks, "max_grad_norm": 1e3}  # nothing is clipped: norms are float32
    return [(api, MIXTURE | model, usual | layout) for api, model, layout in own]


@pytest.mark.parametrize("ranks", [2, 4])
def test_divided_experts_train_as_a_loop_of_one_process(tmp_path: Path, ranks: int) -> None:
    cases = layouts_by_hand(ranks)
    expected = [by_hand(build(**model), 3, micro_batches(ranks, own)) for _, model, own in cases]
    for found in on_ranks(run_all, tmp_path, cases, world_size=ranks, timeout=150):
        for case, values, of_hand in zip(cases, found, expected, strict=True):
            assert values["losses"] == pytest.approx(of_hand["losses"], abs=1e-14), case
            assert values["norms"] == pytest.approx(of_hand["norms"], abs=1e-6), case


def micro_batches(ranks: int, own: dict[str, Any]) -> int:
    """Those of an update, of all processes."""
    number: int = ranks // own.get("tensor_parallel_size", 1) * own.get("gradient_accumulation_steps", 1)
    return number


def test_models_of_transformers_train_as_on_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    layouts: list[tuple[str, str, dict[str, Any]]] = [
        ("objects", "Mixtral", {"expert_parallel_size": 4}),
        ("files", "Mixtral", {"expert_parallel_size": 2, "zero_stage": 3}),
        ("objects", "Qwen2Moe", {"expert_parallel_size": 2, "gradient_checkpointing": "selective"}),
        ("objects", "Qwen3Moe", {"expert_parallel_size": 4, "zero_stage": 3, "gradient_checkpointing": True}),
        ("objects", "Olmoe", {"expert_parallel_size": 2, "zero_stage": 2, "replicate_size": 2}),
        ("objects", "DeepseekV3", {"expert_parallel_size": 2, "zero_stage": 1}),
        ("objects", "GptOss", {"expert_parallel_size": 2}),
        ("objects", "Qwen2Moe", {"expert_parallel_size": 4, "context_parallel_size": 2, "zero_stage": 3}),
        ("files", "Mixtral", {**WITH_TENSOR, "zero_stage": 3}),
        ("objects", "Qwen2Moe", {**WITH_TENSOR, "gradient_checkpointing": "selective"}),
        ("objects", "DeepseekV3", {**TENSOR, "expert_parallel_size": 2, "zero_stage": 2, "replicate_size": 2}),
    ]
    cases: list[Case] = [(api, {"kind": kind}, layout) for api, kind, layout in layouts]
    # The load-balancing loss of an update is the mean of those of its micro-batches, of all processes.
    parts = [{"gradient_accumulation_steps": micro_batches(4, own)} for _, _, own in cases]
    of_one = [(api, model, accumulated) for (api, model, _), accumulated in zip(cases, parts, strict=True)]
    alone = run_all(tmp_path / "alone", of_one)
    for found in on_ranks(run_all, tmp_path / "ranks", cases, world_size=4, timeout=200):
        for case, values, expected in zip(cases, found, alone, strict=True):
            for name in expected:
                assert values[name] == pytest.approx(expected[name], abs=1e-6), (case, name)


def of_few_tokens(folder: Path, own: dict[str, Any]) -> dict[str, Tensor]:
    """The weights after updates with one text of three tokens each."""
    rows = Rows(4).rows[:, :3]
    usual = {"batch_size": 1, "optimizer": "SGD", "save_enabled": False, "metrics": None, **own}
    model = build("Mixture", is_double=True)
    trainer = Trainer(model, settings(folder, **usual), [{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    return {name: full(value) for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_need_not_divide_by_the_tensor_ranks(tmp_path: Path, ranks: int) -> None:
    alone = of_few_tokens(tmp_path / "alone", {})
    own = {"tensor_parallel_size": ranks, "expert_parallel_size": ranks}
    for found in on_ranks(of_few_tokens, tmp_path / "ranks", own, world_size=ranks):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, atol=1e-12, rtol=0, msg=name)


class Counted(Trainer):
    """Counts the operations of the second update."""

    updates, count = 0, 0

    def train_step(self, model: Any, inputs: Any) -> Any:
        self.updates += 1
        with FlopCounterMode(display=False) as counter:
            result = super().train_step(model, inputs)
        if self.updates == 2:
            self.count = counter.get_total_flops()
        return result


def operations(folder: Path, own: dict[str, Any]) -> int:
    trainer = trainer_of(folder, build("Mixture"), 2, kind=Counted, **own)
    trainer.train()
    assert isinstance(trainer, Counted)
    return trainer.count


def test_processes_share_the_operations_of_one(tmp_path: Path) -> None:
    whole = operations(tmp_path / "alone", {})
    for ranks in (2, 4):
        found = on_ranks(operations, tmp_path / str(ranks), {"expert_parallel_size": ranks}, world_size=ranks)
        assert sum(found) == whole
        assert max(found) < 1.5 * whole / ranks  # as the router divides them
    tensor = on_ranks(operations, tmp_path / "tensor", TENSOR)  # each with all layers but the experts
    assert sum(on_ranks(operations, tmp_path / "both", WITH_TENSOR, world_size=4)) == sum(tensor)


def test_each_process_has_its_experts(tmp_path: Path) -> None:
    cases: list[tuple[int, dict[str, Any], list[int]]] = [
        (2, {"expert_parallel_size": 2, "zero_stage": 3}, [2, 2]),
        (4, {"expert_parallel_size": 2, "zero_stage": 3}, [1, 1, 1, 1]),
        (2, {"expert_parallel_size": 2, **TENSOR}, [2, 2]),
        (4, WITH_TENSOR, [1, 1, 1, 1]),
    ]
    for ranks, own, expected in cases:
        assert on_ranks(held, tmp_path, own, world_size=ranks) == expected


def held(folder: Path, own: dict[str, Any]) -> int:
    trainer = trainer_of(folder, build("Mixture"), 1, **own)
    block: Any = trainer.model.blocks[0]
    return len(block.experts.up.to_local())


def saved_and_resumed(folder: Path, own: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights after two epochs, and after the second one is resumed from the first."""
    unbroken = weights_of(folder, own)
    forget(folder, "4")
    return unbroken, weights_of(folder, own)


def weights_of(folder: Path, own: dict[str, Any]) -> dict[str, Tensor]:
    usual = {"optimizer": "AdamW", "learning_rate": 1e-2, "ema": {"decay": 0.5}, "num_epochs": 2, "log_steps": 1}
    usual |= {"save_enabled": True, "save_steps": 2, "resume_from_checkpoint": True}
    trainer = trainer_of(folder, build("Mixture", balance=0.0), 2, **usual | own)
    trainer.train()
    found = {name: full(value) for name, value in trainer.model.state_dict().items()}
    trainer.checkpointer.close()
    return found


def test_a_run_resumes_bitwise_in_its_layout_and_exactly_in_others(tmp_path: Path) -> None:
    halves = {"expert_parallel_size": 2}
    others: list[tuple[int, dict[str, Any]]] = [
        (4, {"expert_parallel_size": 4}),
        (4, {**halves, "zero_stage": 1}),
        (4, {**WITH_TENSOR, "zero_stage": 3}),
        (1, {}),
    ]
    for number, layout in enumerate((halves, {**halves, "zero_stage": 3}, {**halves, **TENSOR})):
        unbroken, resumed = on_ranks(saved_and_resumed, tmp_path / str(number), layout)[0]
        assert [name for name, value in unbroken.items() if not torch.equal(resumed[name], value)] == []
        for place, (ranks, other) in enumerate(others if number == 1 else others[-1:]):
            folder = tmp_path / f"{number}-{place}"
            shutil.copytree(tmp_path / str(number), folder, symlinks=True)
            forget(folder, "4")
            found = (
                weights_of(folder, other) if ranks == 1 else on_ranks(weights_of, folder, other, world_size=ranks)[0]
            )
            for name, value in unbroken.items():
                torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)


def initialized(folder: Path, source: Path, own: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The weights of a model that is built, and of one that starts on the meta device, both saved."""
    models = build("Mixtral"), LazyCall(build)(kind="Mixtral")
    found = []
    for place, model in enumerate(models):
        own = {**own, "init_weights_from": str(source), "meta_init": place > 0}
        trainer = trainer_of(folder / str(place), model, 1, **own)
        found.append({name: full(value) for name, value in trainer.model.state_dict().items()})
        trainer.save(str(folder / str(place) / "saved"))
    return found


def test_weights_of_transformers_are_loaded_and_exported(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model: Any = build("Mixtral")
    for parameter in model.parameters():
        parameter.data.mul_(2)
    model.save_pretrained(tmp_path / "source")
    expected = model.state_dict()
    layouts: tuple[dict[str, Any], ...] = {}, {"zero_stage": 3}, TENSOR
    for number, own in enumerate(layouts):
        own = {"expert_parallel_size": 2, **own}
        for ranks in on_ranks(initialized, tmp_path / str(number), tmp_path / "source", own, timeout=150):
            for found in ranks:
                assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
        for place in range(2):
            saved, out = tmp_path / str(number) / str(place) / "saved", tmp_path / f"{number}-{place}"
            assert main(["checkpoint", "export", str(saved), "--output", str(out)]) == 0
            exported = transformers.MixtralForCausalLM.from_pretrained(out).state_dict()
            assert [name for name, value in expected.items() if not torch.equal(exported[name], value)] == []


class OwnEvaluation(Trainer):
    """Calls the model for each text: processes make different numbers of calls."""

    def evaluate_step(self, model: Any, inputs: Any) -> Any:
        rows = inputs["input_ids"]
        losses = [model(row[None], row[None])["loss"] for row in rows for _ in range(1 + int(row[0]) % 2)]
        return {"loss": torch.stack(losses).mean()}


def adapted(**own: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False, **own)
    base: Any = build("Mixtral")
    model: nn.Module = get_peft_model(base, config)
    return model


def features(folder: Path, halves: dict[str, Any]) -> dict[str, Any]:
    accumulated = {} if halves else {"gradient_accumulation_steps": 2}

    def run(name: str, model: nn.Module | None = None, **own: Any) -> list[float]:
        usual = {"optimizer": "AdamW", "learning_rate": 1e-2, **halves, **accumulated}
        record = Record()
        trainer = trainer_of(folder / name, model or build("Mixture"), 3, **usual | own)
        trainer.register_hooks([record])
        trainer.train()
        results = trainer.evaluate(Rows(9, seed=1))
        return [*record.losses, *record.norms, *map(float, results.values())]

    frozen, some = build("Mixture"), build("Mixture")
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("experts" not in name)
    for name, parameter in some.named_parameters():
        parameter.requires_grad_("blocks.0" not in name)
    zero = {"zero_stage": 3} if halves else {}
    of_peft = {"adapters": run("adapters", adapted(), **zero)} if find_spec("peft") else {}
    return {
        **of_peft,
        "average": run("average", ema={"decay": 0.5}),
        "frozen experts": run("frozen", frozen, **zero),
        "a frozen block": run("some", some),
        "bfloat16": run("bfloat16", mixed_precision="bf16"),
        "float16": run("float16", mixed_precision="fp16", **zero),
        "offload": run("offload", gradient_checkpointing="offload", **zero),
        "skip": run("skip", non_finite="skip", max_grad_norm=0.1),
        "by value": run("value", clip_grad_value=0.01, max_grad_norm=None),
        "decay": run("decay", weight_decay=0.1, decay_norm_and_bias=False, layer_decay=0.9),
        "own step": run("step", kind=OwnStep),
        "own evaluation": run("evaluation", kind=OwnEvaluation, **zero),
        "rmsprop": run("rmsprop", optimizer="RMSprop"),
    }


@pytest.mark.exhaustive
def test_features_have_the_values_of_one_process(tmp_path: Path) -> None:
    expected = features(tmp_path / "alone", {})
    halves = on_ranks(features, tmp_path / "halves", {"expert_parallel_size": 2}, timeout=200)
    for found in [*halves, *on_ranks(features, tmp_path / "tensor", WITH_TENSOR, world_size=4, timeout=300)]:
        for case, values in expected.items():
            tolerance = 2e-2 if case in ("bfloat16", "float16") else 1e-5
            assert found[case] == pytest.approx(values, abs=tolerance), case


def warnings_of_torch(folder: Path) -> list[str]:
    messages = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    logger.addHandler(Listener())
    for zero_stage in (3, 0):
        layout = {"expert_parallel_size": 2, "zero_stage": zero_stage, "max_grad_norm": 0.1}
        trainer_of(folder / str(zero_stage), build("Mixture"), 1, **layout).train()
    logger.warning("of another placement")
    return messages


def test_the_norm_of_experts_is_no_warning_of_torch(tmp_path: Path) -> None:
    assert on_ranks(warnings_of_torch, tmp_path, world_size=4, timeout=150) == [["of another placement"]] * 4


class Penalized(Trainer):
    def train_step(self, model: Any, inputs: Any) -> Any:
        loss = model(**inputs)["loss"]
        (gradient,) = torch.autograd.grad(loss, [model.embedding.weight], create_graph=True)
        self.backward(loss + gradient.square().sum())
        self.step()
        return {"step_loss": loss.detach()}


class Dense(Mixture):
    tensor_plan: ClassVar[dict[str, str]] = {}


def refusals(folder: Path) -> list[str]:
    def message(model: nn.Module, **own: Any) -> str:
        with pytest.raises(ConfigError) as raised:
            trainer_of(folder, model, 1, **{"expert_parallel_size": 2} | own).train()
        return str(raised.value)

    dense = Dense()
    wide: Any = build("Mixture")
    wide.blocks[0].experts.register_parameter("bias", nn.Parameter(torch.zeros(WIDTH)))
    in_rows: Any = build("Mixture")
    in_rows.blocks[0].experts.register_forward_pre_hook(lambda module, inputs: (inputs[0], inputs[1], inputs[2][:, :1]))
    messages = [
        message(dense),
        message(wide),
        message(build("Mixture", experts=3)),
        message(build("Mixture"), expert_parallel_size=3),
        message(build("Mixture"), find_unused_parameters=True),
        message(build("Mixture"), compile_blocks=True),
        message(build("Mixture"), graph=True),
        message(in_rows),
        message(build("Mixture"), kind=Penalized),
    ]
    if find_spec("peft"):
        messages.append(message(adapted(target_parameters=["mlp.experts.down_proj"])))
    return messages


def test_what_cannot_be_divided_is_refused_before_the_first_update(tmp_path: Path) -> None:
    expected = [
        "expert_parallel_size: got 2, but Dense has no experts that can be divided",
        r"num_experts, the first dimension of all its parameters; it has num_experts 4, bias \(16,\)",
        "blocks.0.experts has 3 experts, .*: expert_parallel_size must divide 3",
        "TrainingConfig.expert_parallel_size: got 3, which does not divide the 2 data ranks. Set 1 or 2",
        "expert_parallel_size: got 2 with find_unused_parameters=True",
        "expert_parallel_size: got 2 with compile_blocks=True",
        "graph: got True with",
        r"blocks.0.experts .* shapes \(144, 16\), \(144, 2\), \(144, 1\)",
        "expert parallel: create_graph=True",
    ]
    if find_spec("peft"):
        expected.append("base_model.model.model.layers.0.mlp.experts has an adapter of peft")
    for messages in on_ranks(refusals, tmp_path):
        for message, text in zip(messages, expected, strict=True):
            assert re.search(text, message), message


def test_an_estimate_counts_the_experts_and_tokens_of_a_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def cost(**layout: Any) -> StepCost:
        config = TrainingConfig(output_dir=str(tmp_path), num_epochs=1, batch_size=4, metrics=None, **layout)
        model = partial(build, "Mixtral", intermediate_size=512, num_local_experts=8)

        def make(config: TrainingConfig) -> Trainer:
            return Trainer(model().bfloat16(), config, train_dataset=Rows(32))

        return estimate(make, config, world_size=8).costs[0]

    whole, found = cost(), cost(expert_parallel_size=8)
    assert found.trainable < 0.2 * whole.trainable
    assert found.traffic["all-to-all"] > 0
    assert found.traffic["all-reduce"] < 0.2 * whole.traffic["all-reduce"]
    tensor = cost(tensor_parallel_size=2, expert_parallel_size=8)
    assert tensor.trainable < found.trainable
    assert tensor.traffic["all-to-all"] == pytest.approx(found.traffic["all-to-all"] / 2, rel=0.01)
