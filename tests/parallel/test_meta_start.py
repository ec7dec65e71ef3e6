"""Models on the meta device: each layout has the initial weights of one process, and trains as from ordinary ones."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.distributed.layout_runs import (
    GLOBAL_BATCH,
    Record,
    Texts,
    UnsavedTrainer,
    build_language,
    file_config,
    settings,
)
from tests.ranks import on_ranks
from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.config import LazyCall
from trainwright.parallel.layout import Layout
from trainwright.parallel.parallelize import parallelize

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {},  # data parallel
        {"zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 3},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
    ],
    4: [
        {"zero_stage": 3, "replicate_size": 2},
        {"zero_stage": 3, "tensor_parallel_size": 2},
        {"zero_stage": 1, "pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_schedule": "Interleaved1F1B"},
    ],
}


def llama() -> nn.Module:
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def complete(model: nn.Module) -> dict[str, Tensor]:
    """The values that this process holds, and of divided ones all values. Every process must call it."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def start(api: str, kind: str, folder: Path, layout: dict[str, Any], *, trains: bool = True) -> dict[str, Any]:
    """The initial weights, and losses of a run in float64."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    data, record = Layout.of(layout, world).data, Record()
    node = (
        LazyCall(llama)() if kind == "llama" else LazyCall(build_language)(tied=kind == "tied", plain=api == "objects")
    )
    node = LazyCall(nn.Module.double)(self=node) if kind != "llama" else node
    torch.manual_seed(7)
    texts = Texts(GLOBAL_BATCH * 3)
    if api == "objects":
        config = settings(
            folder, batch_size=GLOBAL_BATCH // data // 2, gradient_accumulation_steps=2, save_enabled=False,
            max_grad_norm=1.0, meta_init=True, seed=7, **layout,
        )  # fmt: skip
        trainer: Any = Trainer(node, config, train_dataset=texts)
    else:
        cfg = file_config(folder, layout, texts, GLOBAL_BATCH // data // 2, data, 2, updates=3)
        cfg.model, cfg.train.seed, cfg.train.dist.meta_init = node, 7, True
        trainer = UnsavedTrainer(cfg)
    found = {"weights": complete(trainer.model), "trained": {}, "losses": []}
    if trains:
        trainer.register_hooks([record])
        trainer.train()
        found |= {"trained": complete(trainer.model), "losses": record.losses}
    return found


def start_all(folder: Path, calls: list[tuple[str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        start(api, kind, folder / str(number), layout, trains=kind != "llama")
        for number, (api, kind, layout) in enumerate(calls)
    ]


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize(("world_size", "api"), [(2, "objects"), (2, "files"), (4, "files")])
def test_each_layout_starts_and_trains_as_one_process(world_size: int, api: str, tmp_path: Path) -> None:
    kinds = ["tied", "llama"] if api == "files" else ["untied"]
    alone = {kind: start(api, kind, tmp_path / kind, {}, trains=kind != "llama") for kind in kinds}
    calls = [(api, kind, layout) for layout in LAYOUTS[world_size] for kind in kinds]
    ranks = on_ranks(start_all, tmp_path, calls, world_size=world_size, timeout=200)
    for place, (_, kind, layout) in enumerate(calls):
        held = set[str]()
        for rank in ranks:
            found, expected = rank[place], alone[kind]
            for name, tensor in found["weights"].items():
                assert torch.equal(tensor, expected["weights"][name]), (layout, name)
            for name, tensor in found["trained"].items():
                torch.testing.assert_close(tensor, expected["trained"][name], rtol=0, atol=1e-7)  # Adam raises rounding
            held |= found["weights"].keys()
            assert found["losses"] == pytest.approx(expected["losses"], rel=0, abs=1e-6), layout  # logged in float32
        assert held == alone[kind]["weights"].keys(), layout


class Rows(nn.Module):
    """Has a table that ``reset_parameters`` computes, if ``sets_table``, and weights that it shares."""

    def __init__(self, *, sets_table: bool = True) -> None:
        super().__init__()
        self.sets_table = sets_table
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.layers[1].weight = self.layers[0].weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def reset_parameters(self) -> None:
        for layer in self.layers:
            nn.init.constant_(layer.bias, 3.0)  # of modules in it
        if self.sets_table:
            self.table.copy_(torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + self.table)
        return x


def test_a_model_has_the_weights_of_an_ordinary_one_with_the_same_seed(caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        with torch.device(device):
            models = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.LSTM(4, 4), nn.Embedding(3, 4, 0)), Rows()
        if device == "cpu":
            models[1].reset_parameters()
        torch.manual_seed(0)
        for model in models if device == "meta" else ():
            parallelize(model, torch.device("cpu")).fill()
        found.append(models)
    for ordinary, made in zip(*found, strict=True):
        if isinstance(ordinary, Rows):
            assert made.layers[1].weight is made.layers[0].weight
            torch.testing.assert_close(made.table, ordinary.table)
            assert (made.layers[1].bias == 3).all()
        else:
            torch.testing.assert_close(made.state_dict(), ordinary.state_dict(), rtol=0, atol=0)
    assert "Rows initialises parameters of the modules in it" in caplog.text


class Counted(nn.Linear):
    """Counts how often it was initialised."""

    calls = 0

    def reset_parameters(self) -> None:
        if self.weight.device.type != "meta":
            Counted.calls += 1
        super().reset_parameters()


@pytest.mark.parametrize("loaded", [0, 1, 2])
def test_only_what_is_not_loaded_gets_initial_values_those_of_any_start(loaded: int, tmp_path: Path) -> None:
    def weights(file: Path | None) -> dict[str, Tensor]:
        Counted.calls = 0
        torch.manual_seed(0)
        with torch.device("meta"):
            model = nn.Sequential(Counted(4, 4), Counted(4, 2))
        config = TrainingConfig(
            output_dir=str(tmp_path / "run"), device_str="cpu", init_weights_from=None if file is None else str(file)
        )
        return Trainer(model, config, train_dataset=TensorDataset(torch.ones(8, 4))).model.state_dict()

    fresh, there = weights(None), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))[:loaded].state_dict()
    torch.save({**there, "unused": torch.ones(1)}, tmp_path / "weights.pt")
    if loaded:
        torch.testing.assert_close(weights(tmp_path / "weights.pt"), {**fresh, **there}, rtol=0, atol=0)
    assert Counted.calls == (0 if loaded == 2 else 2)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_tensors_without_values_are_refused_by_name(is_loaded: bool, tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(
        {f"0.{name}": value for name, value in Rows().state_dict().items()} | {"1.scale": torch.ones(1)}, weights
    )
    with torch.device("meta"):
        model = nn.Sequential(Rows(sets_table=False), nn.Module())
        model[1].scale = nn.Parameter(torch.ones(1))
    config = TrainingConfig(
        output_dir=str(tmp_path / "run"), device_str="cpu", init_weights_from=str(weights) if is_loaded else None
    )
    with pytest.raises(ConfigError, match=r"0 \(Rows\): table") as caught:  # a table is in no file
        Trainer(model, config, train_dataset=TensorDataset(torch.ones(8, 4)))
    assert ("1 (Module): scale" in str(caught.value)) is not is_loaded


def loaded(folder: Path, layout: dict[str, Any], source: Path) -> dict[str, Tensor]:
    """The weights of a config-file run and of one of the Python API, which begin with those of ``source``."""
    data = Layout.of(layout, torch.distributed.get_world_size()).data
    texts = Texts(GLOBAL_BATCH)
    cfg = file_config(folder / "files", layout, texts, GLOBAL_BATCH // data // 2, data, 2, updates=1)
    cfg.model, cfg.train.dist.meta_init, cfg.train.load_weight = LazyCall(llama)(), True, str(source)
    first = complete(UnsavedTrainer(cfg).model)
    own = {"init_weights_from": str(source), "meta_init": True, "gradient_accumulation_steps": 2, **layout}
    config = settings(folder / "objects", **own)
    second = complete(Trainer(LazyCall(llama)(), config, train_dataset=texts).model)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    return first


@pytest.mark.parametrize("layout", [{"zero_stage": 3}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_a_folder_of_transformers_in_several_files_is_loaded(layout: dict[str, Any], tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "saved", max_shard_size="5KB")
    assert (tmp_path / "saved/model.safetensors.index.json").exists()
    held = set[str]()
    for found in on_ranks(loaded, tmp_path, layout, tmp_path / "saved", timeout=120):
        for name, tensor in found.items():
            assert torch.equal(tensor, complete(model)[name]), name
        held |= found.keys()
    assert held == complete(model).keys()


@pytest.mark.exhaustive
def test_no_process_holds_more_than_its_part_and_a_block() -> None:
    program = Path(__file__).parents[2] / "benchmarks/start_memory.py"
    # What is freed goes back to the system at once: by default glibc sometimes keeps a tensor of 17 MB.
    variables = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, program, "4"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=variables).stdout
    for line in output.splitlines()[1:]:
        share, estimated, *grown = map(float, line.partition(":")[2].split())
        assert estimated == pytest.approx(grown[0], rel=0.1), line
        assert max(grown[0], grown[2]) <= 1.3 * share + 50, line
