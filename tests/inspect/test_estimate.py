"""An estimate is the memory and the traffic that a run needs, without this memory and without the other processes."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.counted_peak import counted_peak
from tests.ranks import on_ranks
from tests.tensor_peak import measured_peak
from tests.toys import Classifier, Samples, file_config
from trainwright import DefaultTrainer, Trainer, TrainingConfig, get_config
from trainwright.base.dist import get_world_size
from trainwright.base.errors import ConfigError
from trainwright.checkpoint import Checkpointer
from trainwright.engine import estimate, fitting_layouts
from trainwright.inspect.estimate import layouts_of, with_layout
from trainwright.parallel.layout import Layout
from trainwright.tasks.text_generation.model import GPTTextGeneration, GPTTextGenerationConfig

LENGTH, VOCABULARY = 64, 512


def texts(name: str) -> Samples:
    ids = torch.randint(1, VOCABULARY, (1024, LENGTH), generator=torch.Generator().manual_seed(0))
    rows = ids.numpy()  # is no tensor of a step
    return Samples(**dict.fromkeys((name, "labels"), lambda index: torch.from_numpy(rows[index])), length=1024)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm2(self.second(torch.relu(self.norm1(self.first(x))))))


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


class ResNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 32, 3, 2, 1), Residual(32), Residual(32), nn.Conv2d(32, 64, 3, 2, 1))
        self.extend([Residual(64), Residual(64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)])


def gpt(dropout: float = 0.1) -> nn.Module:
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    config = GPTTextGenerationConfig(vocab_size=VOCABULARY, hidden_dropout_prob=dropout, **sizes)
    return GPTTextGeneration(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))


def pairs(*shape: int) -> Samples:
    x = np.random.default_rng(0).standard_normal((24, *shape), dtype=np.float32)
    return Samples(lambda index: torch.from_numpy(x[index]), lambda index: index % 10, length=24)


MODELS: dict[str, Any] = {
    "mlp": (MLP, lambda: pairs(256)),
    "resnet": (ResNet, lambda: pairs(3, 32, 32)),
    "gpt": (gpt, lambda: texts("token_ids")),
    "bert": (bert, lambda: texts("input_ids")),
    "llama": (llama, lambda: texts("input_ids")),
}


def run_of(name: str, updates: int = 3, **settings: Any) -> Any:
    """The configuration of a run, and the function that builds its trainer."""
    make, data = MODELS[name]
    dataset = data()
    if name in ("mlp", "resnet"):
        settings["loss"] = "CrossEntropyLoss"
    settings = {
        "output_dir": tempfile.mkdtemp(),
        "batch_size": 4,
        "num_epochs": 9,
        "save_enabled": False,
        "progress_bar": False,
        **settings,
    }
    settings["max_steps"] = updates * settings.get("gradient_accumulation_steps", 1)
    config = TrainingConfig(device_str="cpu", **settings)
    return config, lambda config: Trainer(make(), config, train_dataset=dataset)


def measured(name: str, settings: dict[str, Any]) -> int:
    config, build = run_of(name, **settings)
    return measured_peak(lambda: build(config))


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_the_peak_is_within_ten_percent_of_the_measured_one(name: str) -> None:
    config, build = run_of(name)
    found = estimate(build, config).costs[0]
    assert found.peak == pytest.approx(measured(name, {}), rel=0.1)
    assert found.peak == found.parameters + found.gradients + found.optimizer + found.activations
    parameters = sum(p.numel() for p in MODELS[name][0]().parameters())
    assert found.trainable == 4 * parameters
    assert found.optimizer == pytest.approx(2 * found.trainable, rel=0.01)  # AdamW


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        {"mixed_precision": "bf16", "gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True, "optimizer": "SGD"},
        {"optimizer": "RMSprop", "max_grad_norm": 1.0},
        {"ema": True, "non_finite": "skip"},
    ],
    ids=lambda settings: "-".join(settings),
)
@pytest.mark.slow
def test_settings_that_change_the_memory(settings: dict[str, Any]) -> None:
    for name in ("mlp", "gpt"):
        config, build = run_of(name, **settings)
        assert estimate(build, config).peak == pytest.approx(measured(name, settings), rel=0.1)


# Of two processes.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "data parallel": ("resnet", {}),
    "ZeRO 3": ("gpt", {"zero_stage": 3, "mixed_precision": "bf16", "gradient_checkpointing": True}),
    "tensor": ("gpt", {"tensor_parallel_size": 2}),
    "tensor, split loss": ("gpt", {"tensor_parallel_size": 2, "metrics": []}),
    "pipeline": ("gpt", {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 4}),
}


def counted(name: str, updates: int = 8, **settings: Any) -> int:
    config, build = run_of(name, updates, **settings)
    return counted_peak(lambda: build(config))


def counted_each(folder: Path) -> dict[str, int]:
    return {layout: counted(name, output_dir=str(folder), **settings) for layout, (name, settings) in LAYOUTS.items()}


@pytest.fixture(scope="module")
def on_two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    """The measured peak of each layout, by rank."""
    return on_ranks(counted_each, tmp_path_factory.mktemp("estimated"), world_size=2, timeout=180)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_counted_tensors_are_those_of_the_allocator() -> None:
    assert counted("gpt", updates=3) == pytest.approx(measured("gpt", {}), rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_two_processes(layout: str, on_two_processes: list[dict[str, int]]) -> None:
    name, settings = LAYOUTS[layout]
    config, build = run_of(name, **settings)
    found = estimate(build, config, world_size=2)
    assert [*found.costs] == ([0, 1] if layout == "pipeline" else [0])
    for rank, cost in found.costs.items():
        assert cost.peak == pytest.approx(on_two_processes[rank][layout], rel=0.1)
    assert found.peak == max(cost.peak for cost in found.costs.values())


@pytest.mark.exhaustive
def test_the_traffic_of_layouts() -> None:
    whole = estimate(*reversed(run_of("gpt"))).costs[0].trainable
    steps = {"gradient_accumulation_steps": 4}
    traffic = {}
    for stage in (1, 3):
        config, build = run_of("gpt", zero_stage=stage, **steps)
        traffic[stage] = estimate(build, config, world_size=64).costs[0].traffic
    assert traffic[1] == {"all-gather": whole, "reduce-scatter": whole}  # once in an update
    assert traffic[3]["all-gather"] > 4 * whole  # in each forward and backward pass
    config, build = run_of("gpt", pipeline_parallel_size=2, **steps)
    first, last = estimate(build, config, world_size=2).costs.values()
    hidden = 4 * 4 * LENGTH * 128 * 4  # micro-batches, samples, tokens, features, bytes
    assert first.traffic["send"] == last.traffic["receive"] == hidden


@pytest.mark.exhaustive
def test_zero_3_in_mixed_precision_keeps_no_copy_of_all_parameters() -> None:
    def build(config: Any) -> Trainer:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(16)))
        return Trainer(model, config, train_dataset=TensorDataset(torch.zeros(64, 512), torch.zeros(64, 512)))

    settings = {"mixed_precision": "bf16", "gradient_checkpointing": True, "loss": "MSELoss"}
    config = TrainingConfig(output_dir=tempfile.mkdtemp(), batch_size=1, zero_stage=3, **settings)
    block, bfloat16 = 4 * 512 * 513, 2 * 512 * 513
    assert estimate(build, config, world_size=64).peak < 16 * bfloat16 + 2 * block


def described(tmp_path: Path) -> Any:
    data = Samples(inputs=torch.zeros(64, 256), labels=torch.arange(64) % 10)
    settings = {"train_micro_batch_size": 8, "train_iter": 3}
    return file_config(tmp_path / "run", lambda: Classifier((256, 1024, 1024, 10)), data, **settings)


@pytest.mark.slow
def test_a_configuration_file_is_estimated_with_its_own_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = estimate(DefaultTrainer, described(tmp_path))
    with_save = measured_peak(lambda: DefaultTrainer(described(tmp_path)))
    # The rehearsal of the first save holds the optimizer's state once more, in host memory, where this run trains.
    state = 2 * 4 * sum(p.numel() for p in Classifier((256, 1024, 1024, 10)).parameters())
    assert with_save < 1.1 * (found.peak + state)
    monkeypatch.setattr(Checkpointer, "rehearse", lambda self: None)
    assert found.peak == pytest.approx(measured_peak(lambda: DefaultTrainer(described(tmp_path))), rel=0.1)


def test_an_estimate_leaves_nothing_behind(tmp_path: Path) -> None:
    cfg = described(tmp_path)
    estimate(DefaultTrainer, cfg, world_size=8)
    assert not (tmp_path / "run").exists()
    assert get_world_size() == 1
    assert float(torch.ones(2).sum()) == 2.0
    assert cfg["train"].train_micro_batch_size == 8


def test_the_estimate_of_one_rank(tmp_path: Path) -> None:
    assert [*estimate(DefaultTrainer, described(tmp_path), world_size=4, rank=2).costs] == [2]
    for rank in (-1, 4):
        with pytest.raises(ConfigError, match=rf"rank={rank} with world_size=4"):
            estimate(DefaultTrainer, described(tmp_path), world_size=4, rank=rank)


def test_a_step_that_reads_a_value_is_named() -> None:
    class Reads(MLP):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y if y.sum().item() > 0 else -y

    config, _ = run_of("mlp")
    with pytest.raises(ConfigError, match=r"test_estimate.py:\d+ uses the value of a tensor"):
        estimate(lambda config: Trainer(Reads(), config, train_dataset=pairs(256)), config)


def test_an_own_step_is_estimated() -> None:
    class Twice(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Tensor:
            both = torch.cat([inputs[0], inputs[0]])
            return nn.functional.cross_entropy(model(both), inputs[1].repeat(2))

    config, build = run_of("mlp", batch_size=12)
    own = estimate(lambda config: Twice(MLP(), config, train_dataset=pairs(256)), config)
    assert own.costs[0].activations > estimate(build, config).costs[0].activations


def test_offloaded_parameters_are_not_on_the_device() -> None:
    config, build = run_of("gpt", zero_stage=3, zero_offload=True)
    found, usual = estimate(build, config).costs[0], estimate(build, run_of("gpt")[0]).costs[0]
    assert found.optimizer == 0
    assert found.trainable == usual.trainable
    assert found.peak < usual.peak - 2 * usual.trainable


def test_a_frozen_part_has_no_gradients_and_no_state() -> None:
    def build(config: Any) -> Trainer:
        model = MLP()
        model[2].requires_grad_(False)
        return Trainer(model, config, train_dataset=pairs(256))

    config, _ = run_of("mlp")
    found = estimate(build, config).costs[0]
    frozen = 4 * (1024 * 1024 + 1024)
    assert found.parameters - found.trainable == frozen
    assert found.optimizer == pytest.approx(2 * found.trainable, rel=0.01)


def test_experts_of_transformers_are_estimated_in_float32_as_in_bfloat16() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model, data, costs = MixtralConfig(vocab_size=VOCABULARY, **sizes, **heads), texts("input_ids"), []
    for dtype in (torch.float32, torch.bfloat16):
        config = TrainingConfig(output_dir="x", batch_size=4, num_epochs=1)

        def build(config: Any, dtype: torch.dtype = dtype) -> Trainer:
            return Trainer(MixtralForCausalLM(model).to(dtype), config, train_dataset=data)

        costs.append(estimate(build, config).costs[0])
    assert costs[0].trainable == 2 * costs[1].trainable
    assert costs[0].gradients == 2 * costs[1].gradients
    assert costs[0].activations == pytest.approx(2 * costs[1].activations, rel=0.4)  # some are float32 in both


def test_the_sizes_are_those_that_both_apis_read() -> None:
    layout = Layout(data=2, tensor=4, pipeline=2, zero_stage=3)
    config = with_layout(TrainingConfig(output_dir="x"), layout)
    names = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "zero_stage")
    assert [getattr(config, name) for name in names] == [2, 4, 2, 3]
    cfg: Any = {"train": get_config("common/train.py").train}
    found = with_layout(cfg, layout).train
    assert [found.dist[name] for name in names[:3]] == [2, 4, 2]
    assert {"enabled": True, "stage": 3}.items() <= dict(found.zero_optimization).items()
    assert not with_layout(cfg, Layout(data=2, replicate=2)).train.zero_optimization.enabled
    layout = Layout(data=4, tensor=2, replicate=2, zero_stage=1, sequence_parallel=True)
    config, dist = with_layout(config, layout), with_layout(cfg, layout).train.dist
    assert (
        (config.replicate_size, config.sequence_parallel) == (dist.replicate_size, dist.sequence_parallel) == (2, True)
    )


def test_copies_of_the_model_are_those_of_machines() -> None:
    layouts = [layout for layout in layouts_of(64) if layout.zero_stage == 3 and layout.pipeline == 1]
    found = [(layout.tensor, layout.replicate, layout.shard) for layout in layouts if not layout.sequence_parallel]
    assert found[:4] == [(1, 8, 8), (1, 1, 64), (2, 8, 4), (2, 1, 32)]
    assert found[-1] == (8, 1, 8)
    assert {layout.sequence_parallel for layout in layouts if layout.tensor > 1} == {False, True}


@pytest.mark.parametrize("world_size", [4, 16])
def test_all_layouts_of_the_search_can_be_configured(world_size: int) -> None:
    for layout in layouts_of(world_size):
        names = ("tensor_parallel_size", "pipeline_parallel_size", "replicate_size", "zero_stage", "sequence_parallel")
        config = with_layout(TrainingConfig(output_dir="x"), layout)
        assert Layout.of({name: getattr(config, name) for name in names}, world_size) == layout


def test_those_that_fit_come_first(tmp_path: Any) -> None:
    data = TensorDataset(torch.zeros(64, 256), torch.zeros(64, dtype=torch.long))
    config = TrainingConfig(output_dir=str(tmp_path), batch_size=4, loss="CrossEntropyLoss")

    def find(memory: int) -> Any:
        build = lambda config: Trainer(MLP(), config, train_dataset=data)  # noqa: E731
        return fitting_layouts(build, config, world_size=2, memory=memory, wanted=1)

    enough = find(2**30)
    assert len(enough) == 1
    assert enough[0].fits(2**30)
    assert enough[0].layout == Layout(data=2, replicate=2)
    none = find(2**20)
    assert not any(candidate.fits(2**20) for candidate in none)
    assert none[0].estimate is None
    assert none[0].state_bytes > 4 * 4 * 256 * 1024  # parameters, gradients and two states, of the first layer alone
