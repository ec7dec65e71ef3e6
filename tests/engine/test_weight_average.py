"""Averages of the weights in both APIs, compared with torch's ``AveragedModel`` in a plain loop, bit for bit."""

import copy
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn
from torch.utils.data import DataLoader

from tests.toys import Samples, WithNorm, file_config, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.checkpoint import Checkpointer, CheckpointError
from trainwright.data import CyclicSampler
from trainwright.evaluation import DatasetEvaluator
from trainwright.hooks import Callback, CallbackHook

BATCH, STEPS = 4, 6
Weights = dict[str, Tensor]
Api = Callable[..., Any]


def data() -> Samples:
    inputs_BF = torch.randn(BATCH * STEPS, 3, generator=torch.Generator().manual_seed(1))
    return Samples(inputs=inputs_BF, labels=lambda index: index % 2)


class MeanLoss(DatasetEvaluator):
    def reset(self) -> None:
        self.losses: list[float] = []

    def process(self, inputs: Any, outputs: Any) -> None:
        self.losses.append(outputs["loss"].item())

    def evaluate(self) -> dict[str, float]:
        return {"loss": sum(self.losses) / len(self.losses)}


class ScheduleFree(torch.optim.Optimizer):
    """SGD of Defazio et al. 2024, "The Road Less Scheduled", with the interface of the package schedulefree."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "steps": 0, "trains": False})

    def eval(self) -> None:
        self._switch(trains=False, weight=1 - 1 / 0.9)

    def train(self) -> None:
        self._switch(trains=True, weight=1 - 0.9)

    @torch.no_grad()
    def _switch(self, *, trains: bool, weight: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["trains"] != trains else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight)
            group["trains"] = trains

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["trains"], "not in train mode"
            group["steps"] += 1
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, 1 / group["steps"])
                parameter.add_(parameter.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["steps"]) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])


def objects(
    folder: Path, ema: Any, *, resume: bool = False, optimizer: Any = None, kind: Any = WithNorm, **settings: Any
) -> Trainer:
    fields = quiet(
        folder, ema=ema, batch_size=BATCH, eval_batch_size=BATCH, num_epochs=1, metrics=[], dataloader_shuffle=False,
        lr=0.1, optimizer="SGD", model_checkpoint=None, max_grad_norm=1.0, resume_from_checkpoint=resume or None,
        **{"save_steps": 1, "eval_strategy": "step", "eval_steps": 2, **settings},
    )  # fmt: skip
    model = kind()
    return Trainer(model, fields, data(), data(), optimizer=optimizer and optimizer(model.parameters(), lr=0.1))


def config(
    folder: Path, ema: Any, *, resume: bool = False, optimizer: Any = torch.optim.SGD, graph: bool = False,
    gradient_accumulation_steps: int = 1, mixed_precision: str | None = None, kind: Any = WithNorm, **train: Any,
) -> DefaultTrainer:  # fmt: skip
    steps = gradient_accumulation_steps
    settings = {
        "ema": ema, "train_micro_batch_size": BATCH, "num_accumulation_steps": steps, "train_iter": STEPS // steps,
        "amp": {"enabled": mixed_precision is not None}, "resume": resume, "checkpointer": {"period": 1},
        "scheduler": LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0), "input_placement_device": "cpu",
    }  # fmt: skip
    cfg = file_config(folder, kind, data, **{**settings, **train})
    cfg._set_flag("allow_objects", True)
    cfg.dataloader.train.sampler = partial(CyclicSampler, shuffle=False)
    cfg.dataloader.test = [DataLoader(data(), BATCH)]
    cfg.optim = LazyCall(optimizer)(lr=0.1, params={"clip_grad_max_norm": 1.0})
    cfg.graph.update({"enabled": graph, "backend": "aot_eager"})
    cfg.train.evaluation.update({"evaluator": MeanLoss(), "eval_period": 2, "eval_metric": "loss", "eval_mode": "min"})
    return DefaultTrainer(cfg)


APIS = pytest.mark.parametrize("api", [objects, config])


def reference(
    ema: dict[str, Any], *, accumulation: int = 1, dtype: Any = None
) -> tuple[WithNorm, list[WithNorm], list[WithNorm]]:
    """A plain loop. The averages by iteration, and the weights of the training."""
    model = WithNorm()
    is_equal = ema.get("average") == "equal"
    function = get_swa_multi_avg_fn() if is_equal else get_ema_multi_avg_fn(ema.get("decay", 0.999))
    averaged = AveragedModel(model, multi_avg_fn=function, use_buffers=ema.get("buffers", False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averages, raw = [], []
    for step, batch in enumerate(DataLoader(data(), BATCH), 1):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(**batch)["loss"]
        (loss / accumulation).backward()
        if step % accumulation == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            if step // accumulation > ema.get("start", 0) and step // accumulation % ema.get("every", 1) == 0:
                averaged.update_parameters(model)
            averages.append(copy.deepcopy(averaged.module if averaged.n_averaged else model))
            raw.append(copy.deepcopy(model))
    return model, averages, raw


def checkpoint(trainer: Any, iteration: int) -> Path:
    folder = Path(trainer.checkpointer.save_dir)
    found = folder / f"model_{iteration:07d}"
    return found if found.exists() else folder / f"{iteration + 1:0{len(str(trainer.max_iter))}d}"


def saved_weights(folder: Path) -> tuple[Weights, Weights]:
    """The weights in the model's file, and those of the training."""
    training = load_file(folder / "training_weights.safetensors")
    return load_file(folder / "model.safetensors"), {n.removeprefix("weights."): t for n, t in training.items()}


def equal(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.exhaustive(every=9)
@APIS
@pytest.mark.parametrize(
    ("ema", "settings"),
    [
        ({"decay": 0.8}, {}),
        ({"decay": 0.8, "buffers": True, "start": 1, "every": 2}, {}),
        ({"decay": 0.5}, {"gradient_accumulation_steps": 2}),
        ({"decay": 0.5}, {"mixed_precision": "bf16"}),
    ],
    ids=["plain", "some updates", "accumulation", "bf16"],
)
def test_checkpoints_hold_the_average_and_the_weights_of_the_training(
    api: Api, ema: dict[str, Any], settings: dict[str, Any], tmp_path: Path, one_thread: None
) -> None:
    trainer = api(tmp_path, ema, **settings)
    trainer.train()
    steps = settings.get("gradient_accumulation_steps", 1)
    dtype = torch.bfloat16 if "mixed_precision" in settings else None
    _, averages, raw = reference(ema, accumulation=steps, dtype=dtype)
    for iteration in range(STEPS // steps - 1):
        if iteration < ema.get("start", 0):
            continue
        folder = checkpoint(trainer, iteration) if steps == 1 or api is config else None
        folder = folder or Path(trainer.checkpointer.save_dir) / str((iteration + 1) * steps)
        saved, training = saved_weights(folder)
        assert equal(saved, averages[iteration].state_dict()), iteration
        assert equal(training, raw[iteration].state_dict()), iteration
    assert equal(trainer.model.state_dict(), averages[-1].state_dict())


@APIS
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("warmup", [{"warmup": "timm"}, {"warmup": "timm", "gamma": 2.0, "power": 0.75}], ids=str)
def test_a_rising_decay_is_that_of_timm_over_a_resume(
    api: Api, warmup: dict[str, Any], accumulation: int, tmp_path: Path, one_thread: None
) -> None:
    """``ModelEmaV3`` is given the number of the update, as timm's script does."""
    ema = {"decay": 0.45, **warmup}
    model = WithNorm()
    theirs = ModelEmaV3(
        model, decay=0.45, use_warmup=True, warmup_gamma=warmup.get("gamma", 1.0),
        warmup_power=warmup.get("power", 2 / 3), exclude_buffers=True,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(DataLoader(data(), BATCH), 1):
        (model(**batch)["loss"] / accumulation).backward()
        if number % accumulation == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            theirs.update(model, step=number // accumulation)
    trainer = api(tmp_path, ema, gradient_accumulation_steps=accumulation)
    interrupted(trainer, 4 // accumulation)
    resumed = api(tmp_path, ema, gradient_accumulation_steps=accumulation, resume=True)
    resumed.train()
    assert equal(resumed.model.state_dict(), theirs.module.state_dict())


@pytest.mark.parametrize(
    ("warmup", "decay_of"),
    [
        # EMAModel.get_decay of diffusers, whose step counts from 0 at the first update, and ModelEMA of ultralytics
        ("diffusers", lambda number: min(0.3, (1 + (number - 1)) / (10 + (number - 1)))),
        (3, lambda number: 0.3 * (1 - math.exp(-number / 3))),
        ("yolo", lambda number: 0.3 * (1 - math.exp(-number / 2000))),
    ],
    ids=["diffusers", "number", "yolo"],
)
@APIS
def test_a_rising_decay_is_that_of_the_formula(
    api: Api, warmup: Any, decay_of: Callable[[int], float], tmp_path: Path
) -> None:
    trainer = api(tmp_path, {"decay": 0.3, "warmup": warmup})
    trainer.train()
    _, _, raw = reference({})
    average = {name: value.double() for name, value in raw[0].named_parameters()}
    for number, model in enumerate(raw[1:], 2):
        for name, value in model.named_parameters():
            average[name] = decay_of(number) * average[name] + (1 - decay_of(number)) * value.double()
    for name, value in trainer.model.named_parameters():
        torch.testing.assert_close(value.double(), average[name], atol=1e-6, rtol=0)  # in float32


class Short(WithNorm):
    """Its weights are in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return super().forward(inputs.bfloat16(), labels)


@APIS
@pytest.mark.parametrize("ema", [{"decay": 0.999, "buffers": True}, {"average": "equal"}], ids=["exponential", "equal"])
def test_weights_in_bfloat16_are_averaged_in_float32(api: Api, ema: dict[str, Any], tmp_path: Path) -> None:
    exact: Weights = {}  # the average by its formula, in float64

    def average(trainer: Any) -> None:
        number = trainer.iter + 1
        weight = 1.0 if number == 1 else 1 / number if "average" in ema else 0.001
        for name, tensor in trainer.model.state_dict().items():
            exact[name] = exact.get(name, tensor.double()).lerp(tensor.double(), weight)

    whole = api(tmp_path / "whole", ema, kind=Short)
    whole.register_hooks([CallbackHook(after_step=average)])
    start = Short().state_dict()
    whole.train()
    for name, value in whole.model.state_dict().items():
        if name == "norm.num_batches_tracked" or (name.startswith("norm.running") and "average" in ema):
            continue  # the statistics of an equal average are computed again at the end
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.double(), exact[name], atol=1e-6, rtol=2**-8)  # rounded once
    moved = [name for name in start if not torch.equal(start[name], whole.model.state_dict()[name])]
    assert "last.weight" in moved

    interrupted(api(tmp_path / "cut", ema, kind=Short), 4)
    resumed = api(tmp_path / "cut", ema, kind=Short, resume=True)
    resumed.train()
    assert equal(resumed.model.state_dict(), whole.model.state_dict())
    states = [one.checkpointer.checkpointables["training_weights"].state_dict() for one in (resumed, whole)]
    assert equal(*(state["float32"] for state in states))


@pytest.mark.exhaustive(every=2)
@APIS
def test_the_average_is_evaluated_and_chosen_as_best(api: Api, tmp_path: Path) -> None:
    trainer = api(tmp_path, {"decay": 0.7})
    trainer.train()
    _, averages, _ = reference({"decay": 0.7})
    losses = {}
    for iteration in (1, 3, 5):
        model = averages[iteration].eval()
        with torch.no_grad():
            found = [model(**batch)["loss"].item() for batch in DataLoader(data(), BATCH)]
        losses[iteration] = sum(found) / len(found)
    name = "eval_loss"
    values = [value for value, _ in trainer.storage.history(name).values()]
    assert values == pytest.approx(list(losses.values()), abs=1e-7)
    best = averages[min(losses, key=lambda iteration: losses[iteration])]
    assert equal(load_file(Path(trainer.checkpointer.save_dir, "model_best/model.safetensors")), best.state_dict())


def interrupted(trainer: Any, at: int) -> None:
    def leave(trainer: Any) -> None:
        if trainer.iter == at:
            raise KeyboardInterrupt

    trainer.register_hooks([CallbackHook(before_step=leave)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


@pytest.mark.exhaustive(every=3)
@APIS
@pytest.mark.parametrize("ema", [{"decay": 0.8}, {"average": "equal", "start": 3}], ids=["exponential", "equal"])
def test_interrupted_and_resumed_is_uninterrupted(api: Api, ema: Any, tmp_path: Path) -> None:
    stop = 4
    whole = api(tmp_path / "whole", ema)
    results = whole.train()

    interrupted(api(tmp_path / "cut", ema), stop)
    resumed = api(tmp_path / "cut", ema, resume=True)
    _, averages, _ = reference({**ema, "start": ema.get("start", 0)})
    assert equal(resumed.model.state_dict(), averages[stop - 1].state_dict()), "a loaded model has the average"
    assert resumed.train() == results
    for name in ("model_best", "final"):
        folders = [Path(trainer.checkpointer.save_dir) for trainer in (whole, resumed)]
        paths = [folder / name if name == "model_best" else checkpoint(whole, STEPS - 1) for folder in folders]
        if api is config and name == "final":
            paths = [folder / "model_final" for folder in folders]
        files = [load_file(path / "model.safetensors") for path in paths]
        assert equal(*files), name
    assert equal(resumed.model.state_dict(), whole.model.state_dict())


class Counting(WithNorm):
    """The number of its training passes is a part of its state, and scales the loss."""

    passes = 0

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        self.passes += self.training
        return {"loss": super().forward(**batch)["loss"] * (1 + self.passes)}

    def get_extra_state(self) -> dict[str, int]:
        return {"passes": self.passes}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


def test_extra_state_is_that_of_the_training(tmp_path: Path) -> None:
    whole = objects(tmp_path / "whole", {"decay": 0.8}, kind=Counting)
    whole.train()
    objects(tmp_path / "cut", {"decay": 0.8}, kind=Counting, max_steps=4).train()
    resumed = objects(tmp_path / "cut", {"decay": 0.8}, kind=Counting, resume=True)
    resumed.train()
    assert resumed.model.passes == STEPS
    for folder in (Path(trainer.checkpointer.save_dir) for trainer in (whole, resumed)):
        again = Counting()
        Checkpointer(again).load(folder / "5", checkpointables=[])
        assert again.passes == 5
    weights = [{n: t for n, t in one.model.state_dict().items() if "extra" not in n} for one in (whole, resumed)]
    assert equal(*weights)


@APIS
def test_an_optimizer_that_averages_itself_is_switched_around_evaluations_and_saves(api: Api, tmp_path: Path) -> None:
    model = WithNorm()
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    averages, raw, losses = [], [], []
    for step, batch in enumerate(DataLoader(data(), BATCH), 1):
        optimizer.train()
        model(**batch)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        raw.append(copy.deepcopy(model))
        averaged, other = copy.deepcopy((model, optimizer))
        other.eval()
        averages.append(averaged)
        if step % 2 == 0:
            averaged.eval()
            with torch.no_grad():
                found = [averaged(**batch)["loss"].item() for batch in DataLoader(data(), BATCH)]
            losses.append(sum(found) / len(found))
    trainer = api(tmp_path / "whole", None, optimizer=ScheduleFree)
    trainer.train()
    for iteration in range(STEPS - 1):
        saved, training = saved_weights(checkpoint(trainer, iteration))
        assert equal(saved, averages[iteration].state_dict()), iteration
        assert equal(training, raw[iteration].state_dict()), iteration
    assert equal(trainer.model.state_dict(), averages[-1].state_dict())
    values = trainer.storage.history("eval_loss").values()
    assert [value for value, _ in values] == pytest.approx(losses, abs=1e-7)

    interrupted(api(tmp_path / "cut", None, optimizer=ScheduleFree), 3)
    resumed = api(tmp_path / "cut", None, optimizer=ScheduleFree, resume=True)
    resumed.train()
    assert equal(resumed.model.state_dict(), trainer.model.state_dict())
    with pytest.raises(ConfigError, match="ema: ScheduleFree averages the weights itself"):
        api(tmp_path / "both", {"decay": 0.9}, optimizer=ScheduleFree)


class Wrapped(torch.optim.Optimizer):
    """As pytorch_optimizer's ScheduleFreeWrapper: the optimizer inside of it has no ``train`` and ``eval``."""

    def __init__(self, params: Any, lr: float) -> None:
        self.optimizer, self.calls = torch.optim.SGD(params, lr=lr), list[str]()
        super().__init__(self.optimizer.param_groups, {"lr": lr})
        self.optimizer.param_groups = self.param_groups

    def train(self) -> None:
        self.calls.append("train")

    def eval(self) -> None:
        self.calls.append("eval")

    def step(self, closure: Any = None) -> None:
        assert self.calls[-1] == "train"
        self.optimizer.step()


@APIS
def test_a_wrapper_that_averages_is_switched(api: Api, tmp_path: Path) -> None:
    trainer = api(tmp_path, None, optimizer=Wrapped)
    trainer.train()
    assert {"train", "eval"} == {*trainer.optimizer.calls}


@APIS
def test_an_equal_average_computes_the_statistics_of_batch_norms_at_the_end(api: Api, tmp_path: Path) -> None:
    trainer = api(tmp_path, {"average": "equal", "start": 0.5})
    trainer.train()
    _, averages, _ = reference({"average": "equal", "start": 3})
    expected = averages[-1]

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = expected

        def forward(self, batch: Any) -> None:
            self.model(**batch)

    update_bn([[batch] for batch in DataLoader(data(), BATCH)], Called().train())
    assert equal(trainer.model.state_dict(), expected.state_dict())
    final = Path(trainer.checkpointer.save_dir, "model_final")
    final = final if final.exists() else tmp_path / "final_epoch"
    assert equal(saved_weights(final)[0], expected.state_dict())


@APIS
def test_a_run_that_stops_at_an_evaluation_has_the_results_of_its_final_statistics(api: Api, tmp_path: Path) -> None:
    average, length = {"average": "equal", "start": 2}, {"max_steps": 4} if api is objects else {"train_iter": 4}
    expected = api(tmp_path / "short", average, **length).train()
    trainer = api(tmp_path / "stopped", average)
    trainer.add_callback(StopsAt(4))
    assert trainer.train() == expected


class StopsAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_eval_end(self, logs: Any) -> None:
        if logs["global_step"] == self.step:
            self.trainercontrol.should_training_stop = True


def test_a_frozen_batch_norm_keeps_its_statistics(tmp_path: Path) -> None:
    trainer = objects(tmp_path, {"average": "equal"}, freeze_bn=True)
    before = trainer.model.norm.running_var.clone()
    trainer.train()
    assert torch.equal(trainer.model.norm.running_var, before)


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("name", ["epoch_num", "train_iter"])
def test_a_longer_run_continues_with_the_weights_of_the_training(name: str, tmp_path: Path) -> None:
    ema = {"decay": 0.7}
    if name == "epoch_num":
        objects(tmp_path / "short", ema).train()
        longer = TrainingConfig(**{**objects(tmp_path / "short", ema).config.to_dict(), "num_epochs": 2})
        resumed = Trainer(WithNorm(), longer.copy_with(resume_from_checkpoint=True), data(), data())
        resumed.train()
        whole = Trainer(WithNorm(), longer.copy_with(output_dir=str(tmp_path / "whole")), data(), data())
    else:
        config(tmp_path / "short", ema).train()
        resumed: Any = config(tmp_path / "short", ema, resume=True, train_iter=STEPS + 3)
        resumed.train()
        whole: Any = config(tmp_path / "whole", ema, train_iter=STEPS + 3)
    whole.train()
    assert equal(resumed.model.state_dict(), whole.model.state_dict())


def test_a_saved_and_loaded_state_has_both_weights(tmp_path: Path) -> None:
    best = objects(tmp_path / "best", {"decay": 0.7}, load_best_model_at_end=True)
    best.train()
    loaded = load_file(tmp_path / "best/checkpoints/model_best/model.safetensors")
    assert equal(best.model.state_dict(), loaded)
    trainer = objects(tmp_path / "run", {"decay": 0.7})
    trainer.train()
    trainer.save(tmp_path / "saved")
    _, _, raw = reference({"decay": 0.7})
    saved, training = saved_weights(tmp_path / "saved")
    assert equal(saved, trainer.model.state_dict())
    assert equal(training, raw[-1].state_dict())
    other = objects(tmp_path / "other", {"decay": 0.7})
    other.load(tmp_path / "saved")
    assert equal(other.model.state_dict(), saved)
    assert other.evaluate() == trainer.evaluate()


def test_graph_mode_averages_the_weights_of_its_programs(tmp_path: Path) -> None:
    ema = {"decay": 0.7}
    trainer = config(tmp_path / "graph", ema, graph=True)
    trainer.train()
    _, averages, _ = reference(ema)
    for name, value in averages[-1].state_dict().items():
        assert torch.allclose(trainer.model.state_dict()[name], value, atol=1e-6), name


@pytest.mark.exhaustive(every=3)
@APIS
@pytest.mark.parametrize("ema", [{"start": 100}, {"every": 7}, {"start": 0.7, "every": 4}])
@pytest.mark.slow
def test_an_average_of_nothing_is_a_warning(
    api: Api, ema: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trainwright"):
        api(tmp_path, ema).train()
    named = f"start={ema.get('start', 0)} and every={ema.get('every', 1)}"
    assert f"ema: with {named} nothing is averaged in 6 steps" in caplog.text
    assert not list(tmp_path.rglob("training_weights.safetensors"))


@APIS
@pytest.mark.parametrize(
    ("ema", "message"),
    [
        ({"decay": 1.5}, r"ema\.decay.*1\.5.*must be a number in \[0, 1\)"),
        ({"decai": 0.9}, r"ema\.decai.*Did you mean 'decay'"),
        ({"average": "equal", "decay": 0.9}, r"ema.*an equal average has no decay"),
        (0.999, r"ema.*0\.999.*must be True, False, a dict with some of the keys decay, average"),
    ],
)
def test_a_wrong_setting_is_refused(api: Api, ema: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        api(tmp_path, ema)


def test_a_model_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    class Fixed(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("one of a kind")

    settings = TrainingConfig(output_dir=str(tmp_path), ema={})
    with pytest.raises(ConfigError, match=r"ema: Fixed cannot be copied.*one of a kind"):
        Trainer(Fixed(2, 2), settings, data())


def test_a_resume_without_the_setting_is_a_warning_and_one_that_adds_it_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config(tmp_path / "with", {"decay": 0.5}).train()
    config(tmp_path / "with", None, resume=True, train_iter=STEPS + 1).train()
    assert "holds state that no checkpointable of this run loads: training_weights. Set ema" in caplog.text
    config(tmp_path / "without", None).train()
    with pytest.raises(CheckpointError, match="has no state of training_weights, because it was saved without ema"):
        config(tmp_path / "without", {"decay": 0.5}, resume=True)
