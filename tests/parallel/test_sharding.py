"""ZeRO and its hybrid: numbers of one process through both APIs, a user's own parts, and evaluations on any ranks."""

import contextlib
import io
import logging
import math
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.layout_runs import Texts, assert_equal_runs, build_language, train, train_on_ranks
from tests.ranks import on_ranks
from tests.toys import Samples
from trainwright import Trainer, TrainingConfig
from trainwright.base.dist import get_rank, get_world_size
from trainwright.base.errors import ConfigError
from trainwright.engine.accumulation import part_of_mean
from trainwright.evaluation import DatasetEvaluator, EvaluationError, PPLEvaluator, inference_on_dataset
from trainwright.events import EventStorage
from trainwright.hooks import CallbackHook
from trainwright.hooks.callbacks import Callback
from trainwright.hooks.callbacks.logs import Logs
from trainwright.inspect.estimate import estimate
from trainwright.optim.clip import total_norm
from trainwright.parallel.layout import Layout
from trainwright.parallel.mesh import use_layout
from trainwright.parallel.parallelize import parallelize
from trainwright.parallel.sharding import ShardedGradients, check_shardable, sharded_units

ZERO_2 = {"zero_stage": 2}
ZERO_3 = {"zero_stage": 3}
OFFLOAD = {"zero_stage": 3, "zero_offload": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulation": 2},
    "untied, recomputed": {"tied": False, "recompute": True, "clip": 0.2},
}
CPU = torch.device("cpu")
REDUCES_UNUSED = "set_reduce_scatter_unused_params"  # of FSDPModule, since torch 2.13


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, Any]]:
    """``alone(api, settings)``: a run of one process."""
    base = tmp_path_factory.mktemp("alone")
    return cache(lambda api, name: train(api, base / api / name, **SETTINGS[name]))


@pytest.mark.parametrize(
    ("api", "world_size", "runs"),
    [
        ("objects", 2, [(ZERO_3, "plain"), (ZERO_2, "accumulation"), ({"zero_stage": 1}, "plain"), (OFFLOAD, "plain")]),
        ("files", 1, [(OFFLOAD, "accumulation"), (OFFLOAD, "untied, recomputed")]),
        pytest.param(
            "files",
            2,
            [(ZERO_3, "accumulation"), ({"zero_stage": 1}, "accumulation")],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "files",
            4,
            [({"zero_stage": 3, "replicate_size": 2}, "plain"), (ZERO_2, "untied, recomputed")],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_numbers_are_those_of_one_process(
    api: str, world_size: int, runs: list[tuple[dict[str, Any], str]], alone: Callable[..., Any], tmp_path: Path
) -> None:
    calls = [(api, {"layout": layout, **SETTINGS[name]}) for layout, name in runs]
    for found in train_on_ranks(tmp_path, calls, world_size=world_size):
        for (_, name), run in zip(runs, found, strict=True):
            assert_equal_runs(run, alone(api, name))
        if len(runs) == 4:
            assert found[0] == found[3]  # bitwise, the same layout twice, once in host memory


@pytest.mark.exhaustive
def test_parts_of_different_sizes_give_the_numbers_of_copies(alone: Callable[..., Any], tmp_path: Path) -> None:
    # No parameter divides by 3. Adam amplifies the rounding of a mean of 3: on some CPUs the norms of 3 copies (torch's
    # DistributedDataParallel) differ by 2e-5 from those of one process.
    settings = SETTINGS["untied, recomputed"]
    calls = [("objects", {"layout": layout, **settings}) for layout in (ZERO_3, {})]
    expected = alone("objects", "untied, recomputed")
    for parts, copies in train_on_ranks(tmp_path, calls, world_size=3):
        assert_equal_runs(parts, copies)
        assert parts["losses"] == pytest.approx(expected["losses"], rel=0, abs=1e-5)
        assert parts["results"] == pytest.approx(expected["results"], rel=0, abs=1e-5)


class Net(nn.Module):
    def __init__(self, *, is_unused: bool = False, scalar: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(9, 3)
        if is_unused:
            self.unused = nn.Linear(2, 2)
        if scalar:
            self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Gan(nn.Module):
    """A collection of models, which is not called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Net()
        self.critic = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))


class ScaledLoss(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs * self.scale, labels)


def points(length: int = 24) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(length, 5, generator=generator)
    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())


def trainer(folder: Path, kind: type[Trainer] = Trainer, model: Any = None, parts: Any = None, **said: Any) -> Trainer:
    said = {"zero_stage": 3, "metrics": None, "save_enabled": False, "eval_strategy": "no", **said}
    config = TrainingConfig(
        output_dir=str(folder), num_epochs=2, batch_size=8 // get_world_size(), learning_rate=1e-2, device_str="cpu",
        num_dataloader_workers=0, log_steps=1000, seed=3, **said,
    )  # fmt: skip
    torch.manual_seed(0)
    model = (model or Net)()
    data = {"train_dataset": points(), "eval_dataset": points(5)}
    return kind(model, config, **data, **(parts or (lambda model: {}))(model))


class WithHelpers(Trainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        loss = F.cross_entropy(model(inputs[0]), inputs[1])
        self.backward(loss)
        self.step()
        return {"step_loss": loss.detach()}


class Bare(Trainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        loss = F.cross_entropy(model(inputs[0]), inputs[1])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"step_loss": loss.detach()}


class HalfGradients(Trainer):
    def optimization_step(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        super().optimization_step()


class GanTrainer(Trainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        generator, critic = self.model.generator, self.model.critic
        fake, real = generator(inputs[0]), F.one_hot(inputs[1], 3).float()
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        self.backward(loss)
        self.step("critic")
        self.zero_grad()
        self.backward(F.softplus(-critic(generator(inputs[0]))).mean())
        self.step("generator")
        self.zero_grad()
        return {"step_loss": loss.detach()}


class CallsModel(Callback):
    """Between two steps."""

    model: Any = None

    def on_step_end(self, *arguments: Any, **named: Any) -> None:
        with torch.no_grad():
            self.model(torch.ones(2, 5))


def _with_callback(model: nn.Module) -> dict[str, Any]:
    callback = CallsModel()
    callback.model = model
    return {"callbacks": [callback]}


def _with_loss(model: nn.Module) -> dict[str, Any]:
    model.criterion = loss = ScaledLoss()  # also a part of the model, so that the test reads it
    del model.criterion
    return {"loss": loss, "optimizer": torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=0.01)}


def _frozen() -> nn.Module:
    model = Net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("last", "blocks.1")))
    return model


def _sgd(model: Any) -> dict[str, Any]:
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("first")]
    groups = [{"params": model.first.parameters(), "lr": 0.1}, {"params": rest}]
    return {"optimizer": torch.optim.SGD(groups, lr=0.05, momentum=0.9)}


def _fused(kind: Any, model: Any) -> dict[str, Any]:
    return {"optimizer": kind(model.parameters(), lr=0.05, fused=True)}


def _adams(model: Any) -> dict[str, Any]:
    parts = {"generator": model.generator, "critic": model.critic}
    return {"optimizers": {name: torch.optim.Adam(part.parameters(), lr=0.01) for name, part in parts.items()}}


CASES: dict[str, dict[str, Any]] = {
    "own optimizer": {"parts": _sgd},
    "optimizer with a state": {"parts": lambda model: {"optimizer": torch.optim.Adagrad(model.parameters(), lr=0.05)}},
    "fused SGD": {"parts": partial(_fused, torch.optim.SGD), "zero_stage": 1},
    "fused Adagrad": {"parts": partial(_fused, torch.optim.Adagrad), "zero_stage": 1},
    "own step": {"kind": WithHelpers, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, **ZERO_2},
    "bare step": {"kind": Bare, **ZERO_2},
    "reads gradients": {"kind": HalfGradients},
    "two optimizers": {"kind": GanTrainer, "model": Gan, "parts": _adams},
    "loss with parameters": {"parts": _with_loss, "max_grad_norm": 0.5},
    "frozen parameters": {"model": _frozen},
    "an unused layer": {"model": lambda: Net(is_unused=True)},
    "unfreezing": {"unfreeze": [{"step": 2, "layers": ["first", "blocks"]}], **ZERO_2},
    "unfreezing, gathered again": {"unfreeze": [{"step": 2, "layers": ["first", "blocks"]}]},
    "a call between two steps": {"parts": _with_callback, **ZERO_2},
    "skipped updates": {"non_finite": "skip", "max_grad_norm": 1.0},
    "clipped by value": {"clip_grad_value": 0.01},
    "averaged weights": {"ema": {"decay": 0.9}},
    "equally averaged weights": {"ema": {"average": "equal", "start": 2}},
    "float16": {"mixed_precision": "fp16"},
    "bfloat16": {"mixed_precision": "bf16"},
}
TOLERANCES = {"bfloat16": 1e-3, "float16": 1e-4}  # products are rounded, and batches are divided differently


def weights(model: nn.Module) -> dict[str, Tensor]:
    values: dict[str, Any] = model.state_dict()
    return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for name, v in values.items()}


def train_cases(folder: Path, **more: Any) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, case in CASES.items():
        with contextlib.redirect_stdout(io.StringIO()):
            one = trainer(folder / name, **case, **more)
            one.train()
        found[name] = weights(one.model)
    return found


def train_offloaded(folder: Path) -> dict[str, dict[str, Tensor]]:
    return train_cases(folder / "offloaded", zero_offload=True)


@pytest.mark.exhaustive
def test_parts_of_the_user_train_as_on_one_process(tmp_path: Path) -> None:
    expected = train_cases(tmp_path / "one")
    for found in (*on_ranks(train_cases, tmp_path / "two"), *on_ranks(train_offloaded, tmp_path, world_size=1)):
        for name, values in expected.items():
            for key, value in values.items():
                difference = (found[name][key] - value).abs().max().item()
                assert difference <= TOLERANCES.get(name, 1e-6), (name, key, difference)


def resume_offloaded(folder: Path) -> list[dict[str, Tensor]]:
    """Weights of two runs that continue those in ``folder``: one offloads from now on, the other one until now."""
    found = []
    for name, offload in (("plain", True), ("offloaded", False)):
        saves: dict[str, Any] = {"save_enabled": True, "lr_scheduler_type": "constant"}
        trainer(folder / name, zero_offload=not offload, max_steps=4, **saves).train()
        later = trainer(folder / name, zero_offload=offload, resume_from_checkpoint=True, **saves)
        later.train()
        assert all(value.device == CPU for state in later.optimizer.state.values() for value in state.values())
        found.append(weights(later.model))
    return found


def test_a_checkpoint_of_one_process_continues_with_and_without_offload(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", lr_scheduler_type="constant")
    whole.train()
    for found in on_ranks(resume_offloaded, tmp_path, world_size=1)[0]:
        for name, value in weights(whole.model).items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


class CallsPart(Trainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        return {"step_loss": self.model.first(inputs[0])}


class OwnGradients(Trainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        self.backward(model(inputs[0]).sum(), optimizer=self.optimizer)
        return {}


class OldOptimizer(Trainer):
    def __init__(self, model: nn.Module, *arguments: Any, **named: Any) -> None:
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        super().__init__(model, *arguments, **named)
        self.other = other

    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        raise AssertionError("not reached")


class Penalty(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return sum(parameter.square().sum() for parameter in model.parameters())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "graph": ({"graph": True}, "TrainingConfig.graph: got True with"),
    "scalar": ({"model": lambda: Net(scalar=True)}, "scale of Net has no dimension to divide"),
    "closure": ({"parts": lambda m: {"optimizer": torch.optim.LBFGS(m.parameters())}}, "excludes several processes"),
    "part": ({"kind": CallsPart}, "call the model, and let its forward do that"),
    "some gradients": ({"kind": OwnGradients}, "Use self.toggled(optimizer)"),
    "loss of parts": (
        {"kind": Penalty},
        "Penalty.compute_loss returned a DTensor, of which each process may have a part",
    ),
    "old optimizer": ({"kind": OldOptimizer}, "it holds no parameter of the model"),
}


def refuse_cases(folder: Path) -> dict[str, str]:
    found = {}
    for name, (case, _) in REFUSED.items():
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                trainer(folder / name, **case).train()
            except (ConfigError, RuntimeError) as error:
                found[name] = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return found


def test_what_cannot_be_shared_is_refused_on_every_rank(tmp_path: Path) -> None:
    for found in on_ranks(refuse_cases, tmp_path):
        for name, (_, text) in REFUSED.items():
            assert text in found.get(name, ""), (name, found.get(name))


def warnings_of_fused(folder: Path, name: str, zero_stage: int) -> str:
    messages = io.StringIO()
    handler = logging.StreamHandler(messages)
    logging.getLogger("trainwright.optim").addHandler(handler)
    trainer(folder, parts=partial(_fused, getattr(torch.optim, name)), zero_stage=zero_stage).train()
    return messages.getvalue()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_a_fused_step_that_torch_has_not_for_parts_is_a_plain_one(name: str, tmp_path: Path) -> None:
    shared = on_ranks(warnings_of_fused, tmp_path / "shared", name, 1)[0]
    assert f"{name}: fused=True has no effect on parameters that ZeRO" in shared
    assert "fused" not in on_ranks(warnings_of_fused, tmp_path / "plain", name, 0)[0]


def log_parts() -> list[float]:
    """What is logged of the sum of a divided tensor, which is 10; each process has 1 + 2 or 3 + 4."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (get_world_size(),))
    total: Any = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, 4.0]), mesh, [Shard(0)]).sum()
    logs, storage = Logs(total=total), EventStorage()
    storage.put_scalar("scalar", total)
    storage.put_mean("loss", part_of_mean([total], [1], CPU), torch.distributed.all_reduce)
    storage.reduce()
    return [logs["total"], *(value for value, _ in storage.latest().values())]


def test_what_is_logged_of_a_divided_value_is_all_of_it() -> None:
    assert on_ranks(log_parts) == [[10.0, 10.0, 10.0]] * 2


class CountExchanges(TorchDispatchMode):
    """Counts the calls of each collective, and the bytes that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = function._schema.name.split("::")
        if "c10d" in namespace and name != "wait_tensor":
            name = name.strip("_").removesuffix("_base")
            self.calls[name] += 1
            self.bytes[name] += args[1].nbytes if isinstance(args[1], Tensor) else 0
        return function(*args, **(kwargs or {}))


def count_exchanges(stage: int, accumulation: int) -> dict[str, int]:
    mesh = use_layout(Layout(data=2, zero_stage=stage), "cpu")
    assert mesh is not None
    model = build_language()
    parallelize(model, CPU)
    sync = ShardedGradients(model, mesh)
    tokens = torch.ones(2, 4, dtype=torch.int64)
    for is_counted in (False, True):
        with CountExchanges() if is_counted else contextlib.nullcontext() as counter:
            for number in range(accumulation):
                sync.before_batch(is_last=number == accumulation - 1)
                model(tokens, tokens)["loss"].backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert counter is not None
    return dict(counter.calls)


def count_all() -> list[dict[str, int]]:
    return [count_exchanges(stage, 4) for stage in (1, 2, 3)]


def test_stages_1_and_2_exchange_once_for_each_window() -> None:
    first, second, third = on_ranks(count_all)[0]
    units = 5  # four blocks and the rest
    assert first == second == {"allgather": units, "reduce_scatter": units}
    assert third == {"allgather": 4 * (4 + units), "reduce_scatter": 4 * units}  # the rest stays gathered


def trained(folder: str, gather: str | None, *, epochs: int = 4, **layout: int) -> tuple[Trainer, list[float]]:
    settings = TrainingConfig(
        output_dir=f"{folder}/{gather}", **layout, zero_gather_precision=gather, num_epochs=epochs, batch_size=4,
        learning_rate=1e-2, device_str="cpu", save_enabled=False, metrics=[], progress_bar=False,
    )  # fmt: skip
    trainer = Trainer(build_language(), settings, Texts(16))
    losses: list[float] = []
    put = CallbackHook(after_step=lambda one: losses.append(float(one.storage.latest()["total_loss"][0])))
    trainer.register_hooks([put])
    trainer.train()
    return trainer, losses


def losses_and_bytes(folder: str, gather: str | None) -> tuple[list[float], dict[str, int], bool]:
    with CountExchanges() as counter:
        trainer, losses = trained(folder, gather, zero_stage=3)
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    are_wide = all(one.dtype is torch.float32 for one in (*trainer.model.parameters(), *states))
    return losses, {name: counter.bytes[name] for name in ("allgather", "reduce_scatter")}, are_wide


def gather_both(folder: str) -> Any:
    return [losses_and_bytes(folder, gather) for gather in (None, "bf16")]


def gather_nothing(folder: str) -> Any:
    return [trained(folder, gather, epochs=1, tensor_parallel_size=2)[1] for gather in (None, "bf16")]


def test_parameters_are_gathered_in_half_the_bytes_and_updated_in_float32(tmp_path: Path) -> None:
    (losses, sent, _), (of_half, sent_of_half, are_wide) = on_ranks(gather_both, str(tmp_path))[0]
    assert are_wide
    assert sent_of_half["allgather"] * 2 == sent["allgather"] > 0
    assert sent_of_half["reduce_scatter"] == sent["reduce_scatter"] > 0
    torch.testing.assert_close(of_half, losses, rtol=2e-2, atol=0)
    assert of_half != losses


def test_blocks_are_gathered_on_their_own() -> None:
    model: Any = Net()
    assert sharded_units(model) == [*model.blocks]
    model.blocks[1][0].weight = model.last.weight = model.blocks[0][0].weight
    assert sharded_units(model) == []  # a shared weight belongs to no block
    pairs = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2))
    assert sharded_units(nn.ModuleDict({"layers": pairs})) == [one for pair in pairs for one in pair]


class Language(nn.Module):
    """A language model whose weights are mostly those of its vocabulary."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(2000, 16), nn.Linear(16, 2000, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def fused_forward(self: Any, ids: Tensor, labels: Tensor | None = None) -> Any:
    logits = nn.functional.linear(self.norm(self.embedding(ids)), self.head.weight)
    return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def language_run(folder: Path, is_tied: bool, stage: int, is_fused: bool = False) -> dict[str, Any]:
    model = Language(is_tied=is_tied)
    if is_fused:
        fused_forward.__module__ = "of_others.losses"
        model.forward = MethodType(fused_forward, model)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(2000, (24, 8), generator=draw)
    size = 8 // (torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
    layout = {"zero_stage": stage} if size < 8 else {}
    config = TrainingConfig(
        output_dir=str(folder), batch_size=size, num_epochs=1, metrics=None, dataloader_shuffle=False, log_steps=1,
        max_grad_norm=1.0, save_enabled=False, eval_strategy="step", eval_steps=2, **layout,
    )  # fmt: skip
    data = Samples(ids=ids, labels=ids.roll(-1, 1))
    trainer = Trainer(model, config, data, data)
    results = trainer.train()
    units = [name for name, module in trainer.model.named_modules() if type(module).__name__.startswith("FSDP")]
    losses = [value for value, _ in trainer.storage.history("total_loss").values()]
    return {"losses": losses, "loss": results["loss"], "units": units}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_embedding_and_head_are_units_of_their_own(is_tied: bool, stage: int, tmp_path: Path) -> None:
    alone = language_run(tmp_path / "alone", is_tied, 0)
    for found in on_ranks(language_run, tmp_path / "ranks", is_tied, stage):
        assert found["units"] == ["", *([] if is_tied else ["embedding", "head"])]  # the blocks are small
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)


def test_a_head_that_another_package_uses_without_a_call_is_no_unit(tmp_path: Path) -> None:
    alone = language_run(tmp_path / "alone", False, 0, True)
    for found in on_ranks(language_run, tmp_path / "ranks", False, 3, True):
        assert found["units"] == [""]
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6)


def test_the_vocabulary_is_not_gathered_for_all_of_a_step(tmp_path: Path) -> None:
    def peak(model: Callable[[], nn.Module]) -> int:
        config = TrainingConfig(output_dir=str(tmp_path), batch_size=1, num_epochs=1, metrics=None, zero_stage=3)
        ids = torch.zeros(16, 4, dtype=torch.int64)
        make = lambda config: Trainer(model(), config, Samples(ids=ids, labels=ids))  # noqa: E731
        return estimate(make, config, world_size=8).costs[0].peak

    class InOneUnit(Language):
        get_input_embeddings = get_output_embeddings = None  # type: ignore[assignment]

    assert peak(Language) < 0.8 * peak(InOneUnit)


def test_a_torch_that_cannot_reduce_unused_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, REDUCES_UNUSED, raising=False)
    check_shardable(Net())
    with pytest.raises(ConfigError, match=r"find_unused_parameters=True .*torch 2\.13"):
        check_shardable(Net(), is_one_unit=True)


class OneOf(nn.Module):
    """Each batch uses one of two layers, which are gathered on their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor, part: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.layers[int(part[0])](x), labels)}


def evaluate_one_of(folder: Path, parts: list[int]) -> float | str:
    """The loss of batches of two samples that use these layers, or the message of an error."""
    x = torch.randn(2 * len(parts), 3, generator=torch.Generator().manual_seed(0))
    data = Samples(x=x, part=lambda index: parts[index // 2], labels=lambda index: index % 3, length=len(x))
    config = TrainingConfig(output_dir=folder, batch_size=2, metrics=None, early_stopping=None, **ZERO_3)
    try:
        return float(Trainer(OneOf(), config, data, data).evaluate()["loss"])
    except EvaluationError as error:
        return str(error)


def test_a_padding_batch_uses_the_layers_of_the_batch_of_another_rank(tmp_path: Path) -> None:
    expected = evaluate_one_of(tmp_path / "one", [1, 1, 0])
    assert on_ranks(evaluate_one_of, tmp_path, [1, 1, 0]) == [pytest.approx(expected)] * 2
    for message in on_ranks(evaluate_one_of, tmp_path, [1, 0]):
        assert "different parts of OneOf" in message
        assert "find_unused_parameters=True" in message


class Seen(DatasetEvaluator):
    """The numbers of the samples, in order: processed on rank 0."""

    def reset(self) -> None:
        self.numbers: list[int] = []

    def process(self, inputs: Any, outputs: Any) -> None:
        self.numbers += inputs["token_ids"][:, 0].tolist()

    def evaluate(self) -> dict[str, Any]:
        return {"numbers": self.numbers}


class OwnEvaluation(Trainer):
    def evaluate_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        for _ in range(1 + get_rank()):  # any number of calls
            loss = self.evaluation_step(inputs)["loss"]
        return {"eval_step_loss": loss}


LENGTHS = (1, 4, 5, 9, 13)


def rows(length: int) -> list[dict[str, Tensor]]:
    found = torch.arange(length)[:, None] + torch.arange(6)
    return [{"token_ids": row % 32, "labels": row % 32} for row in found]


def evaluate_all(folder: Path, stage: int = 3) -> list[Any]:
    found: list[Any] = []
    for number, kind in enumerate((Trainer, OwnEvaluation)):
        config = TrainingConfig(
            output_dir=str(folder / str(number)), zero_stage=stage, eval_batch_size=4, device_str="cpu",
            save_enabled=False, batch_size=1, num_dataloader_workers=0, evaluate_with_generate=False,
        )  # fmt: skip
        one = kind(build_language(), config, train_dataset=rows(8))
        for length in LENGTHS:
            found.append(one.evaluate(rows(length)))
            if number == 0:
                found.append(one.predict(rows(length))["logits"])
                found.append([part["logits"] for part in one.predict(rows(length), iterate=True)])
    for length in LENGTHS:
        batches = [torch.utils.data.default_collate(rows(length)[i : i + 4]) for i in range(0, length, 4)]
        mine = batches[get_rank() :: get_world_size()]
        found += [
            inference_on_dataset(one.model, mine, 4, 100, lambda data, _: data, CPU, evaluator)
            for evaluator in (PPLEvaluator(), Seen())
        ]
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (2, 4))])
def test_evaluations_are_exact_for_each_length(world_size: int, tmp_path: Path) -> None:
    expected = evaluate_all(tmp_path / "one")
    for found in on_ranks(evaluate_all, tmp_path / "ranks", world_size=world_size):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


class Generates(nn.Module):
    """Generates as many numbers as its first input says."""

    is_generative = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        return {"loss": inputs.square().mean(), "logits": inputs}

    def generate(self, inputs: Tensor) -> Tensor:
        return torch.stack([self(inputs)["logits"] for _ in range(int(inputs[0, 0]))])


def generate_on_a_rank(folder: str) -> Any:
    config = TrainingConfig(
        output_dir=folder, zero_stage=3, device_str="cpu", batch_size=1, save_enabled=False, eval_strategy="no",
        metrics=None, early_stopping=None, num_epochs=1,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = Trainer(Generates(), config, Samples(inputs=torch.ones(4, 4)))
    trainer.train()
    batch = torch.full((2, 4), 2.0 + 3 * get_rank())
    found = trainer.predict({"inputs": batch})
    return found.shape, trainer.predict({"inputs": torch.full((2, 4), 2.0)})  # alike on all ranks


def test_a_batch_is_generated_from_by_each_process_alone(tmp_path: Path) -> None:
    (first, one), (second, other) = on_ranks(generate_on_a_rank, str(tmp_path))
    assert (first, second) == ((2, 2, 4), (5, 2, 4))
    torch.testing.assert_close(one, other)


def norm_of_float64(layout: Layout, norm_type: float) -> Tensor:
    if layout.data > 1:
        use_layout(layout, "cpu")
    model = build_language().double()
    if layout.data > 1:
        parallelize(model, CPU)
    tokens = torch.arange(8).reshape(2, 4)
    model(tokens, tokens)["loss"].backward()
    return total_norm(model.parameters(), norm_type)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_of_float64_gradients_is_float64(norm_type: float) -> None:
    expected = norm_of_float64(Layout(), norm_type)
    for found in on_ranks(norm_of_float64, Layout(data=2, zero_stage=3), norm_type):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_without_zero_gathers_have_no_precision(tmp_path: Path) -> None:
    losses, of_half = on_ranks(gather_nothing, str(tmp_path), world_size=4)[0]
    assert losses == of_half


@pytest.mark.compile
@pytest.mark.exhaustive
def test_compiled_blocks_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{}, {"zero_stage": 3}, {"tensor_parallel_size": 2}]
    expected = train("objects", tmp_path / "alone")
    calls = [("objects", {"layout": layout | {"compile_blocks": True}}) for layout in layouts]
    for found in train_on_ranks(tmp_path, calls, world_size=2, timeout=240):
        for run in found:
            assert_equal_runs(run, expected)
