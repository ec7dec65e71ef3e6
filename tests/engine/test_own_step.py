"""A step of the user's own keeps the settings of the run by the trainer's backward, clip_gradients and step."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.toys import Classifier, assert_equal_weights, file_config, pairs, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig
from trainwright.config import ConfigError
from trainwright.hooks import Callback

# B batch, F features, C classes.
PAIRS = pairs()
INPUTS, LABELS = PAIRS.tensors


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def config(folder: Path, **settings: Any) -> TrainingConfig:
    given: dict[str, Any] = {"learning_rate": 0.05, "dataloader_drop_last": False, "save_enabled": False}
    return quiet(folder, **{**given, "num_epochs": 2, "optimizer": "SGD", "metrics": None, **settings})


class Helped(Trainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        x, y = inputs
        with self.autocast():
            loss = F.cross_entropy(model(x), y)
        self.backward(loss)
        self.step(self.optimizer)
        return {"step_loss": loss.detach()}


class Cleared(Helped):
    """The same with gradients set to None first, and clipped by a call."""

    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        self.zero_grad()
        return super().train_step(model, inputs)

    def step(self, *optimizers: Any) -> Any:
        self.clip_gradients()
        return super().step(*optimizers)


class Bare(Trainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[0]), inputs[1])
        loss.backward()
        self.optimizer.step()
        return {"step_loss": loss.detach()}


SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_grad_norm": 0.01},
    {"gradient_accumulation_steps": 4},
    {"gradient_accumulation_steps": 3, "max_grad_norm": 0.05, "batch_size": 9},
    {"mixed_precision": "bf16"},
    {"mixed_precision": "fp16", "max_grad_norm": 0.05, "gradient_accumulation_steps": 2},
    {"non_finite": "skip"},
    {"non_finite": "skip", "mixed_precision": "fp16"},
]
LOADER = DataLoader(PAIRS, 8)  # whose batches are weighed by their samples
GIVEN_LOADER = pytest.param({"data": LOADER, "gradient_accumulation_steps": 3}, id="given loader")


def trained(kind: type[Trainer], folder: Path, data: Any = PAIRS, **settings: Any) -> Trainer:
    given = {"train_dataloader": data} if isinstance(data, DataLoader) else {"train_dataset": data}
    trainer = kind(make(), config(folder, **settings), **given)
    trainer.train()
    return trainer


@pytest.mark.exhaustive(every=5)
@pytest.mark.parametrize("settings", [*SETTINGS, GIVEN_LOADER], ids=str)
@pytest.mark.parametrize("kind", [Helped, Cleared])
def test_the_helpers_do_what_the_trainers_own_step_does(
    kind: type[Trainer], settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = trained(Trainer, tmp_path / "plain", **settings)
    own = trained(kind, tmp_path / "own", **settings)
    assert_equal_weights(own.model, plain.model)
    assert own.run.grad_scaler is None or own.run.grad_scaler.state_dict() == plain.run.grad_scaler.state_dict()
    names = ("total_loss", "grad_norm", "skipped_update")
    for name in (name for name in names if name in plain.storage.latest()):
        assert own.storage.history(name).values() == plain.storage.history(name).values()
    assert "no effect" not in caplog.text


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_an_update_that_is_not_finite_is_left_out(precision: str | None, tmp_path: Path) -> None:
    inputs = INPUTS.clone()
    inputs[20] = float("nan")
    settings: dict[str, Any] = {"non_finite": "skip", "mixed_precision": precision, "max_grad_norm": 1.0}
    plain = trained(Trainer, tmp_path / "plain", TensorDataset(inputs, LABELS), **settings)
    own = trained(Helped, tmp_path / "own", TensorDataset(inputs, LABELS), **settings)
    assert all(torch.isfinite(p).all() for p in own.model.parameters())
    assert_equal_weights(own.model, plain.model)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_grad_norm": 0.5}, "max_grad_norm=0.5"),
        ({"mixed_precision": "fp16"}, "gradient scaler"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4"),
        ({"non_finite": "skip"}, "non_finite='skip'"),
    ],
)
def test_what_a_bare_step_bypasses_is_one_warning(
    settings: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(Bare, tmp_path / "with", **settings)
    (line,) = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert said in line
    assert "Bare.train_step" in line
    assert "self.step(optimizer)" in line
    caplog.clear()
    trained(Bare, tmp_path / "without")
    assert "no effect" not in caplog.text


def test_gradients_that_are_cleared_inside_a_window_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Clears(Helped):
        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            self.optimizer.zero_grad()
            return super().train_step(model, inputs)

    trained(Clears, tmp_path / "own", gradient_accumulation_steps=4)
    assert "only its last batch counts" in caplog.text


@pytest.mark.parametrize("settings", SETTINGS[1:], ids=str)
def test_an_optimization_step_of_ones_own_sees_plain_gradients(settings: dict[str, Any], tmp_path: Path) -> None:
    norms: list[float] = []

    class Looks(Trainer):
        def optimization_step(self) -> None:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))
            super().optimization_step()

    plain = trained(Trainer, tmp_path / "plain", **settings)
    own = trained(Looks, tmp_path / "own", **settings)
    assert_equal_weights(own.model, plain.model)
    assert len(norms) == plain.max_iter
    if "grad_norm" in own.storage.latest():
        recorded = [value for value, _ in own.storage.history("grad_norm").values()]
        assert norms == pytest.approx(recorded)


class PlainStep(Trainer):
    def optimization_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_an_optimization_step_sees_unscaled_gradients_in_every_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"mixed_precision": "fp16", "gradient_accumulation_steps": 2}
    own, plain = trained(PlainStep, tmp_path / "own", **settings), trained(Trainer, tmp_path / "plain", **settings)
    assert_equal_weights(own.model, plain.model)
    (warning,) = [record.getMessage() for record in caplog.records if "calls optimizer.step()" in record.getMessage()]
    assert "gradient scaler" in warning
    assert "gradient_accumulation_steps" not in warning  # it is called at the end of each window


def test_gradients_of_fp16_that_were_not_scaled_are_an_error_that_says_how_to_scale_them(tmp_path: Path) -> None:
    class PlainBackward(Trainer):
        def training_step(self, batch: Any) -> Any:
            loss = self.compute_loss(self.model, batch)
            loss.backward()
            return loss.detach()

    with pytest.raises(ConfigError, match=r"self\.backward\(loss\)"):
        trained(PlainBackward, tmp_path, mixed_precision="fp16")


class Emptied(Trainer):
    """Gradients are set to None after the backward pass."""

    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        loss = F.cross_entropy(model(inputs[0]), inputs[1])
        loss.backward()
        self.optimizer.zero_grad()
        self.optimizer.step()
        return {"step_loss": loss.detach()}


class Unstepped(Trainer):
    def optimization_step(self) -> None:
        pass


@pytest.mark.parametrize(("kind", "text"), [(Emptied, "without a gradient"), (Unstepped, "no optimizer step in 2 it")])
def test_a_short_training_whose_step_changes_no_weight_is_warned_of(
    kind: type[Trainer], text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind(make(), config(tmp_path, batch_size=16, max_steps=2, lr_scheduler_type=None), PAIRS).train()
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert text in warning
    assert f"{kind.__name__}." in warning


def test_an_optimizer_may_step_twice_in_an_update(tmp_path: Path) -> None:
    class Twice(Trainer):
        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            for _ in range(2):
                with self.autocast():
                    loss = F.cross_entropy(model(inputs[0]), inputs[1])
                self.backward(loss)
                self.step()
            return {"step_loss": loss.detach()}

    twice = trained(Twice, tmp_path / "fp16", mixed_precision="fp16", num_epochs=1)
    assert twice.run.grad_scaler.state_dict()["_growth_tracker"] == 2 * twice.max_iter


def test_a_training_step_without_a_backward_pass_is_refused_in_the_first_update(tmp_path: Path) -> None:
    class WithoutBackward(Trainer):
        def training_step(self, batch: Any) -> Any:
            return self.compute_loss(self.model, batch)

    trainer = WithoutBackward(make(), config(tmp_path), train_dataset=PAIRS)
    with pytest.raises(ConfigError, match=r"WithoutBackward\.training_step .*no gradient"):
        trainer.train()
    assert trainer.iter == 0


def differentiated(trainer: Any, loss: Any) -> None:
    trainer.backward(loss)


def accumulated(trainer: Any, loss: Any) -> None:
    loss.backward()
    if (trainer.iter + 1) % 3 == 0:
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()


def stepped(trainer: Any, loss: Any) -> None:
    trainer.optimizer.zero_grad()
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def descended(trainer: Any, loss: Any) -> None:
    """Without an optimizer, and without gradients that stay."""
    parameters = [one for one in trainer.model.parameters() if one.requires_grad]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.data.sub_(0.1 * gradient)


def descended_after_backward(trainer: Any, loss: Any) -> None:
    loss.backward()
    for parameter in trainer.model.parameters():
        parameter.data.sub_(0.1 * parameter.grad)
        parameter.grad = None


def descended_with_graph(trainer: Any, loss: Any) -> None:
    parameters = [one for one in trainer.model.parameters() if one.requires_grad]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters, create_graph=True), strict=True):
        parameter.data.sub_(0.1 * gradient.detach())


def balanced(trainer: Any, loss: Any) -> None:
    """Without gradients; the sum of the parameters stays."""
    for parameter in trainer.model.parameters():
        change = 0.01 * torch.randn_like(parameter)
        parameter.data.add_(change - change.mean())


def in_some_updates(is_due: Callable[[int], bool], skipped: float = 1.0) -> Callable[[Any, Any], Any]:
    def use(trainer: Any, loss: Any) -> Any:
        if not is_due(trainer.iter):
            return loss * skipped
        trainer.backward(loss)
        trainer.step()
        return loss

    return use


def summed(trainer: Any, loss: Any) -> None:
    trainer.losses = [*getattr(trainer, "losses", []), loss]
    if len(trainer.losses) == 4:
        trainer.backward(sum(trainer.losses) / 4)
        trainer.step()
        trainer.losses = []


def computed_again(trainer: Any, loss: Any) -> Any:
    descended(trainer, loss)
    return sum(parameter.square().sum() for parameter in trainer.model.parameters())


def returned_in_some_updates(trainer: Any, loss: Any) -> Any:
    return loss if trainer.iter < 9 else loss.detach()


_UNUSED = (
    "Own.train_step returns a loss with its graph, and has called neither self.backward nor self.step. Write before the"
    " return: self.backward(loss), then"
)
_NO_STEP = (
    "Own.train_step has made no optimizer step in {} iterations: no parameter has changed. Write self.backward(loss),"
    " then self.step()."
)
USES: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "none": (lambda trainer, loss: None, f"{_UNUSED} self.step()."),
    "none, and detached": (returned_in_some_updates, _NO_STEP.format(10)),
    "backward": (differentiated, _NO_STEP.format(12)),  # may accumulate
    "accumulation": (accumulated, ""),
    "step": (stepped, ""),
    "descent": (descended, ""),
    "descent after a backward pass": (descended_after_backward, ""),
    "descent with a graph": (descended_with_graph, ""),
    "descent, and the loss again": (computed_again, ""),
    "without gradients": (balanced, ""),
    "from the third update on": (in_some_updates(lambda number: number >= 2), ""),
    "in two of three updates": (in_some_updates(lambda number: number % 3 > 0), ""),
    "all but the first": (in_some_updates(lambda number: number > 0, skipped=0.0), ""),
    "a sum of four": (summed, ""),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("api", ["Python", "config file"])
@pytest.mark.parametrize("is_mean", [False, True])
def test_a_loss_that_is_returned_instead_of_differentiated_is_a_warning_after_some_updates(
    api: str, use: str, is_mean: bool, tmp_path: Path, caplog: Any, recwarn: Any
) -> None:
    do, text = USES[use]
    own_step(api, tmp_path, do, is_mean=is_mean).train()
    warnings = [one for one in caplog.messages if "with its graph" in one or "no optimizer step" in one]
    assert warnings == ([text] if text else [])
    if use in ("none", "none, and detached", "all but the first"):
        assert not [one for one in recwarn if "lr_scheduler.step()" in str(one.message)]


def own_step(api: str, folder: Path, do: Callable[[Any, Any], object], *, is_mean: bool) -> Any:
    class Step:
        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            is_dict = isinstance(inputs, dict)
            loss = model(**inputs)["loss"] if is_dict else F.cross_entropy(model(inputs[0]), inputs[1])
            loss = torch.stack([loss, loss]).mean() if is_mean else loss  # a mean saves no tensors
            returned = do(self, loss)
            return {"step_loss": loss if returned is None else returned}

    if api == "Python":
        settings = config(folder, batch_size=16, num_epochs=3, lr_scheduler_type="linear")
        return type("Own", (Step, Trainer), {})(make(), settings, PAIRS)
    cfg = file_config(folder, Classifier, points, train_iter=12, train_micro_batch_size=8)
    return type("Own", (Step, DefaultTrainer), {})(cfg)


def test_a_step_without_a_backward_pass_names_the_steps_of_several_optimizers(tmp_path: Path, caplog: Any) -> None:
    class Own(DefaultTrainer):
        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            return {"loss": model(**inputs)["loss"]}

    cfg = file_config(tmp_path, LazyCall(Classifier)(sizes=(4, 8, 2)), points, train_iter=2, train_micro_batch_size=8)
    sgd, parts = LazyCall(torch.optim.SGD), {"a": "body.0", "b": "body.2"}
    cfg.optim = {name: sgd(params={"part": part}, lr=0.1) for name, part in parts.items()}
    Own(cfg).train()
    assert f"{_UNUSED} self.step('a') and self.step('b')." in caplog.messages


class Stepping(Trainer):
    """Its training_step steps an optimizer, by default that of the trainer, which steps after it."""

    stepped, times = "optimizer", 1

    def training_step(self, batch: Any) -> Any:
        getattr(self, self.stepped).zero_grad()
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        loss.backward()
        for _ in range(self.times):
            getattr(self, self.stepped).step()
        return loss.detach()


class SteppingAnother(Stepping):
    stepped, times = "another", 3

    @property
    def another(self) -> Any:
        vars(self).setdefault("_another", torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
        return vars(self)["_another"]


class SteppingAlone(Stepping):
    def optimization_step(self) -> None:
        pass


class SteppingBySelf(Trainer):
    def training_step(self, batch: Any) -> Any:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.backward(loss)
        self.step()
        return loss.detach()


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 4}, {"dataloader_num_workers": 1}], ids=str)
@pytest.mark.parametrize("kind", [Stepping, SteppingBySelf])
def test_a_training_step_that_steps_the_optimizer_of_the_trainer_is_refused(
    kind: type[Trainer], settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"training_step steps the optimizer, and the trainer.*made twice"):
        trained(kind, tmp_path / "twice", **settings)


def test_a_training_step_may_step_another_optimizer_or_in_place_of_the_trainer(tmp_path: Path) -> None:
    plain = trained(Trainer, tmp_path / "plain")
    for kind in (SteppingAnother, SteppingAlone):
        assert_equal_weights(trained(kind, tmp_path / kind.__name__).model, plain.model)


class Divides(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return F.cross_entropy(model(inputs[0]), inputs[1]) / self.config.gradient_accumulation_steps


class Reads(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        self.log({"window": float(self.config.gradient_accumulation_steps)})
        return F.cross_entropy(model(inputs[0]), inputs[1]) / 1.0


@pytest.mark.parametrize(("kind", "steps"), [(Divides, 4), (Divides, 1), (Reads, 4)])
def test_a_loss_that_is_divided_by_the_accumulation_is_a_warning(
    kind: type[Trainer], steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(kind, tmp_path, gradient_accumulation_steps=steps)
    text = (
        "Divides.compute_loss divides by gradient_accumulation_steps: an update takes the mean over its micro-batches"
    )
    assert (text in caplog.text) == (kind is Divides and steps > 1)


class Doubled:
    """A step that calls that of the trainer."""

    def train_step(self, model: Any, inputs: Any) -> Any:
        return dict(super().train_step(model, inputs))  # type: ignore[misc]


class Changed(Doubled):
    """And that changes the gradients after it."""

    def train_step(self, model: Any, inputs: Any) -> Any:
        outputs = super().train_step(model, inputs)
        for parameter in self.model.parameters():
            parameter.grad *= 0.5
        self.step()
        return outputs


class Skipping(Doubled):
    """It steps in every second iteration, with the gradients of two."""

    def train_step(self, model: Any, inputs: Any) -> Any:
        outputs = super().train_step(model, inputs)
        if self.iter % 2:
            self.step()
        return outputs


def hidden(train_step: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partialmethod(lambda self, *given: train_step(self, *given))


class Raw(Doubled):
    """It steps the optimizer in code that is not of its class, and leaves the gradients."""

    @hidden
    def train_step(self, model: Any, inputs: Any) -> Any:
        self.optimizer.zero_grad()
        outputs = Doubled.train_step(self, model, inputs)
        self.optimizer.step()
        return outputs


of_late_steps = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


def of_file(kind: type, folder: Path, lr: float = 0.1, **train: Any) -> Any:
    model = LazyCall(Classifier)(sizes=(4, 8, 2), seed=0)
    cfg = file_config(folder, model, points, **{"train_iter": 8, "train_micro_batch_size": 4, **train})
    cfg.optim = LazyCall(torch.optim.SGD)(params={"clip_grad_max_norm": 0.5}, lr=lr, momentum=0.9)
    cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)
    trainer = type("Own", (kind, DefaultTrainer), {})(cfg) if kind is not DefaultTrainer else DefaultTrainer(cfg)
    trainer.train()
    return trainer


@of_late_steps
def test_a_step_that_calls_that_of_the_trainer_and_no_step_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_file(Doubled, tmp_path)
    assert (
        "Own.train_step has made no optimizer step in 8 iterations: no parameter has changed. Write self.step() after"
        " the trainer's train_step." in caplog.messages
    )


@of_late_steps
@pytest.mark.parametrize("kind", [Raw, Changed, Skipping])
def test_a_step_that_calls_that_of_the_trainer_and_steps_itself_makes_one_step(kind: type, tmp_path: Path) -> None:
    steps: list[int] = []

    class Counted(kind):  # type: ignore[misc]
        def build_optimizer(self, cfg: Any, model: Any) -> Any:
            optimizer = DefaultTrainer.build_optimizer(cfg, model)
            optimizer.register_step_post_hook(lambda *_: steps.append(self.iter))
            return optimizer

    of_file(Counted, tmp_path)
    assert steps == ([1, 3, 5, 7] if kind is Skipping else [*range(8)])


@of_late_steps
def test_a_step_that_names_a_step_and_makes_none_is_warned_of(tmp_path: Path, caplog: Any) -> None:
    class Never(Doubled):
        def train_step(self, model: Any, inputs: Any) -> Any:
            outputs = super().train_step(model, inputs)
            if self.iter < 0:
                self.step()
            return outputs

    of_file(Never, tmp_path)
    assert (
        "Own.train_step has made no optimizer step in 8 iterations: no parameter has changed. Write self.step() after"
        " the trainer's train_step." in caplog.messages
    )


class Loop:
    """It steps in every ``every``-th iteration; 0: never."""

    every = 1

    def run_step(self) -> None:
        batch = self.get_batch(next(self._trainer._data_loader_iter), self.device)
        loss = self.model(**batch)["loss"]
        loss.backward()
        self.storage.put_scalar("total_loss", loss.detach())
        if self.every and (self.iter + 1) % self.every == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


class Never(Loop):
    every = 0


class Seldom(Loop):
    every = 32


class Timed:
    def run_step(self) -> None:
        super().run_step()  # type: ignore[misc]


@of_late_steps
@pytest.mark.parametrize(
    ("kind", "length", "text"),
    [
        (Never, 8, "in 8 iterations"),
        (Never, 120, "in 100 iterations"),
        (Loop, 8, None),
        (Seldom, 64, None),
        (Timed, 8, None),
    ],
)
def test_a_run_step_of_a_config_file_that_makes_no_step_is_warned_of(
    kind: type, length: int, text: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_file(kind, tmp_path, train_iter=length, num_accumulation_steps=2, non_finite="skip")
    warnings = [one.split(": ")[0] for one in caplog.messages if one.startswith("Own.")]
    assert warnings == ([] if text is None else [f"Own.run_step has made no optimizer step {text}"])


def test_a_run_step_that_calls_that_of_the_trainer_keeps_the_program_of_graph_mode(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = LazyCall(Classifier)(sizes=(4, 2), seed=0)
    cfg = file_config(tmp_path, model, points, train_iter=4, train_micro_batch_size=8)
    cfg.graph.enabled = True
    with caplog.at_level("INFO", "trainwright"):
        type("Own", (Timed, DefaultTrainer), {})(cfg).train()
    assert "the step of AdamW are one program" in caplog.text


@pytest.mark.parametrize("api", ["Python", "config file"])
def test_a_run_step_that_calls_that_of_the_trainer_bypasses_no_setting(
    api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if api == "Python":
        trained(type("Own", (Timed, Trainer), {}), tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.1)
    else:
        of_file(Timed, tmp_path, num_accumulation_steps=2)
    assert "no effect" not in caplog.text


class AtBatch(Callback):
    """Calls ``do(trainer)`` after a number of batches."""

    def __init__(self, number: int, do: Callable[[Any], object]) -> None:
        self.number, self.do = number, do
        self.trainer: Any = None

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        if self.trainer.state.global_step == self.number:
            self.do(self.trainer)


def train_with(folder: Path, number: int, do: Callable[[Any], object], **settings: Any) -> Trainer:
    callback = AtBatch(number, do)
    trainer = Trainer(make(), config(folder, batch_size=10, **settings), train_dataset=PAIRS, callbacks=[callback])
    callback.trainer = trainer
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", ["compute_loss", "train_step"])
def test_a_method_that_a_callback_assigns_is_used_from_the_next_update_on(tmp_path: Path, name: str) -> None:
    calls: list[int] = []

    def assign(trainer: Any) -> None:
        method = getattr(trainer, name)
        setattr(trainer, name, lambda *arguments: (calls.append(trainer.state.global_step), method(*arguments))[1])

    train_with(tmp_path, 3, assign)
    assert calls == [4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    "replace",
    [
        lambda trainer: trainer.set_loss(nn.CrossEntropyLoss()),
        lambda trainer: trainer.set_optimizer(torch.optim.SGD(trainer.model.parameters(), lr=0.05)),
    ],
    ids=["loss", "optimizer"],
)
def test_a_loss_or_optimizer_may_be_replaced_within_a_window(tmp_path: Path, replace: Callable[[Any], object]) -> None:
    """Both are replaced by their equals, so the weights are those of a run without."""
    runs = [
        train_with(tmp_path / str(number), number, replace, gradient_accumulation_steps=4, loss="CrossEntropyLoss")
        for number in (2, -1)
    ]
    for left, right in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(left, right)
