"""Several optimizers by name, in both APIs: they step together, or as a step of the user's own decides."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from tests.toys import Samples, assert_equal_weights, file_config, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig, get_config
from trainwright.config import ConfigError, ConfigKeyError, ConfigTypeError
from trainwright.hooks import CallbackHook

# B batch, F features.
INPUTS_BF = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
LABELS_B = torch.randint(2, (24,), generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    """Two parts, each with an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(inputs).relu())
        return {"loss": F.cross_entropy(logits, labels)}


def rows() -> Samples:
    return Samples(inputs=INPUTS_BF, labels=LABELS_B)


def optimizers_of(net: Any) -> dict[str, torch.optim.Optimizer]:
    body = torch.optim.SGD(net.body.parameters(), lr=0.5, momentum=0.9)
    return {"body": body, "head": torch.optim.Adam(net.head.parameters(), lr=0.01)}


def settings_of(folder: Path, **settings: Any) -> TrainingConfig:
    return quiet(folder, batch_size=6, metrics=[], eval_strategy="no", **settings)


def python(folder: Path, num_epochs: int = 4, kind: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    net = Net()
    optimizers = optimizers_of(net)
    schedules = {"body": ExponentialLR(optimizers["body"], 0.9)}
    given = settings_of(folder, num_epochs=num_epochs, lr_scheduling_steps=1, **settings)
    trainer = kind(net, given, rows(), optimizers=optimizers, lr_schedulers=schedules)
    trainer.train()
    return trainer


def config_files(folder: Path, train_iter: int = 16, **settings: Any) -> DefaultTrainer:
    trainer = DefaultTrainer(configured(folder, train_iter, **settings))
    trainer.train()
    return trainer


def configured(folder: Path, train_iter: int = 16, **settings: Any) -> DictConfig:
    sizes = {"train_iter": train_iter, "train_micro_batch_size": 6, "log_period": 1}
    cfg = file_config(folder, Net, rows, **sizes, **settings)
    cfg.optim = {
        "body": LazyCall(torch.optim.SGD)(params={"part": "body"}, lr=0.5, momentum=0.9),
        "head": LazyCall(torch.optim.Adam)(params={"part": "head"}, lr=0.01),
    }
    cfg.train.scheduler = {"body": LazyCall(ExponentialLR)(gamma=0.9)}
    return cfg


def by_hand(trainer: Any, batches: list[Any], max_norm: float | None = None) -> Net:
    """A plain PyTorch loop over ``batches``."""
    net = Net()
    optimizers = optimizers_of(net)
    if isinstance(trainer, DefaultTrainer):  # config files select fused kernels, which round differently
        optimizers["body"] = torch.optim.SGD(net.body.parameters(), lr=0.5, momentum=0.9, fused=True)
        optimizers["head"] = torch.optim.Adam(net.head.parameters(), lr=0.01, fused=True)
    schedule = ExponentialLR(optimizers["body"], 0.9)
    for batch in batches:
        net(**batch)["loss"].backward()
        for optimizer in optimizers.values():
            if max_norm is not None:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return net


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batches of a run, recorded by a forward hook."""
    found: list[Any] = []
    forward = Net.forward

    def recorded(net: Net, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found.append({"inputs": inputs, "labels": labels})
        return forward(net, inputs, labels)

    monkeypatch.setattr(Net, "forward", recorded)
    return found


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("run", [python, config_files])
def test_without_an_own_step_all_step_on_the_loss(run: Callable[..., Any], batches: list[Any], tmp_path: Path) -> None:
    trainer = run(tmp_path)
    assert len(batches) == 16
    assert_equal_weights(trainer.model, by_hand(trainer, batches[:16]))
    latest = trainer.storage.latest()
    assert latest["lr/body"][0] == pytest.approx(0.5 * 0.9**15)
    assert latest["lr/head"][0] == 0.01
    assert "lr" not in latest


def test_each_is_clipped_by_its_own_norm(batches: list[Any], tmp_path: Path) -> None:
    trainer = python(tmp_path, max_grad_norm=0.05)
    assert_equal_weights(trainer.model, by_hand(trainer, batches[:16], max_norm=0.05))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"mixed_precision": "fp16", "max_grad_norm": 0.1},
    {"gradient_accumulation_steps": 3, "mixed_precision": "bf16"},
    {"non_finite": "skip"},
]


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.slow
def test_a_resumed_run_continues_bitwise(settings: dict[str, Any], tmp_path: Path) -> None:
    straight = python(tmp_path / "straight", 4, **settings)
    python(tmp_path / "resumed", 2, **settings)
    resumed = python(tmp_path / "resumed", 4, resume_from_checkpoint=True, **settings)
    assert_equal_weights(resumed.model, straight.model)
    assert resumed.lr_schedulers["body"].get_last_lr() == straight.lr_schedulers["body"].get_last_lr()
    for name in ("body", "head"):
        ours, theirs = (run.optimizers[name].state_dict()["state"] for run in (resumed, straight))
        assert all(torch.equal(ours[0][key], theirs[0][key]) for key in ours[0] if isinstance(ours[0][key], Tensor))


def test_a_resumed_run_of_a_config_file_continues_bitwise(tmp_path: Path, read_rows: Any) -> None:
    straight = config_files(tmp_path / "straight", 16)
    config_files(tmp_path / "resumed", 8)
    resumed = config_files(tmp_path / "resumed", 16, resume=True)
    assert_equal_weights(resumed.model, straight.model)
    rates = [[row["lr/body"] for row in read_rows(tmp_path / name)] for name in ("straight", "resumed")]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) == 16


def test_one_schedule_of_a_config_file_is_for_each(tmp_path: Path) -> None:
    cfg = configured(tmp_path)
    cfg.train.scheduler = get_config("common/train.py").train.scheduler
    trainer = DefaultTrainer(cfg)
    assert {name: type(s).__name__ for name, s in trainer.lr_schedulers.items()} == dict.fromkeys(
        ("body", "head"), type(trainer.lr_schedulers["body"]).__name__
    )
    assert trainer.cfg.train.scheduler.max_iter == 16


@pytest.mark.usefixtures("no_compiler")
def test_in_graph_mode_their_steps_follow_the_program(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trainwright")
    compiled, eager = python(tmp_path / "graph", 1, graph=True), python(tmp_path / "eager", 1)
    for left, right in zip(compiled.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(left, right)
    assert "It is followed by the step of SGD and Adam, which is of several optimizers." in caplog.text


def test_schedules_by_an_evaluation_result_are_stepped(tmp_path: Path) -> None:
    net = Net()
    optimizers = optimizers_of(net)
    schedules = {"head": ReduceLROnPlateau(optimizers["head"], patience=0, threshold=1e9)}
    config = quiet(tmp_path, num_epochs=3, batch_size=6, metrics=[])
    Trainer(net, config, rows(), rows(), optimizers=optimizers, lr_schedulers=schedules).train()
    assert optimizers["head"].param_groups[0]["lr"] < 0.01
    assert optimizers["body"].param_groups[0]["lr"] == 0.5


WRONG: list[tuple[Callable[[Any, Any], dict[str, Any]], str]] = [
    (lambda b, h: {"lr_schedulers": {"bodi": ExponentialLR(b, 0.9)}}, r"lr_schedulers: .*'bodi'.*'body'"),
    (lambda b, h: {"lr_schedulers": {"body": ExponentialLR(h, 0.9)}}, "belongs to another optimizer"),
    (lambda b, h: {"optimizer": b}, "got optimizers and optimizer"),
    (lambda b, h: {"lr_scheduler": ExponentialLR(b, 0.9)}, "got optimizers and lr_scheduler"),
    (lambda b, h: {"optimizers": None, "lr_schedulers": {"body": ExponentialLR(b, 0.9)}}, "needs optimizers="),
    (lambda b, h: {"optimizers": (b, None)}, r"pair \(optimizer, scheduler\) is passed as"),
    (lambda b, h: {"optimizers": {"body": 0.1}}, r"optimizers\['body'\]: got 0.1"),
    (lambda b, h: {"optimizers": {"a": b, "b": b}}, "hold the same parameter"),
    (lambda b, h: {"optimizers": {"a/b": b}}, "letters, digits"),
    (lambda b, h: {"optimizers": {"a": torch.optim.SGD(nn.Linear(2, 2).parameters())}}, "none of the model's param"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments_are_refused(arguments: Callable[..., dict[str, Any]], message: str, tmp_path: Path) -> None:
    net = Net()
    both = optimizers_of(net)
    with pytest.raises((ConfigError, ConfigTypeError), match=message):
        Trainer(net, quiet(tmp_path), rows(), **{"optimizers": both, **arguments(both["body"], both["head"])})


def test_wrong_settings_of_a_config_file_are_refused(tmp_path: Path) -> None:
    cfg = configured(tmp_path)
    cfg.optim.head.lr = -1.0
    cfg.optim.body.momentun = 0.9
    with pytest.raises(ConfigError, match=r"optim.head.lr.*got -1.0") as error:
        DefaultTrainer(cfg)
    assert "optim.body.momentun" in str(error.value)
    cfg = configured(tmp_path)
    cfg.train.scheduler = {"bdy": LazyCall(ExponentialLR)(gamma=0.9)}
    with pytest.raises(ConfigError, match=r"train.scheduler.bdy: .* Did you mean 'body'"):
        DefaultTrainer(cfg)
    for key, value, text in (
        ("hed", {"lr": 1e-3}, "Did you mean 'head'"),
        ("lr", 1e-3, "optim has several by name. Allowed: body, head"),
    ):
        cfg = configured(tmp_path)
        cfg.optim[key] = value
        with pytest.raises(ConfigKeyError, match=rf"optim.{key}.*: is not an optimizer; .*{text}"):
            DefaultTrainer(cfg)
    cfg = configured(tmp_path)
    cfg.optim.head.params.part = "hed"
    with pytest.raises(ConfigError, match=r"part='hed': Net has no such submodule. Did you mean 'head'"):
        DefaultTrainer(cfg)


# A GAN: a step of the user's own.


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.discriminator(inputs)


def gan_optimizers(gan: Any) -> dict[str, torch.optim.Optimizer]:
    adam = torch.optim.Adam
    return {"g": adam(gan.generator.parameters(), lr=0.01), "d": adam(gan.discriminator.parameters(), lr=0.02)}


def gan_step(self: Any, model: Any, inputs: Any) -> dict[str, Tensor]:
    real_BF = inputs["inputs"]
    with self.autocast():
        fake_BF = model.generator(torch.randn(len(real_BF), 3))
        judged = model.discriminator(real_BF), model.discriminator(fake_BF.detach())
        loss_d = F.softplus(-judged[0]).mean() + F.softplus(judged[1]).mean()
    self.backward(loss_d, optimizer="d")
    self.step("d")
    with self.autocast():
        loss_g = F.softplus(-model.discriminator(fake_BF)).mean()
    self.backward(loss_g, optimizer="g")
    self.step("g")
    return {"loss_d": loss_d.detach(), "loss_g": loss_g.detach()}


class PythonGan(Trainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        losses = gan_step(self, model, inputs)
        return {"step_loss": losses["loss_d"] + losses["loss_g"]}


def python_gan(folder: Path, kind: type[Trainer] = PythonGan, **settings: Any) -> Trainer:
    gan = Gan()
    trainer = kind(gan, settings_of(folder, **settings), Samples(inputs=INPUTS_BF), optimizers=gan_optimizers(gan))
    trainer.train()
    return trainer


def test_one_gradient_scaler_scales_all_losses(tmp_path: Path) -> None:
    """As torch's example of several losses: each optimizer is unscaled, clipped and stepped, then the scale updated."""
    trainer = python_gan(tmp_path / "ours", num_epochs=1, mixed_precision="fp16", max_grad_norm=0.1)
    gan, scaler = Gan(), torch.amp.GradScaler("cpu")
    optimizers = gan_optimizers(gan)
    fresh = PythonGan(gan, settings_of(tmp_path / "new"), Samples(inputs=INPUTS_BF), optimizers=optimizers)
    seen = [batch["inputs"] for batch in fresh.train_dataloader]
    torch.manual_seed(fresh.config.seed)
    for real_BF in seen:
        with torch.autocast("cpu", torch.float16):
            fake_BF = gan.generator(torch.randn(len(real_BF), 3))
            judged = gan.discriminator(real_BF), gan.discriminator(fake_BF.detach())
            loss_d = F.softplus(-judged[0]).mean() + F.softplus(judged[1]).mean()
        scaler.scale(loss_d).backward()
        scaler.unscale_(optimizers["d"])
        nn.utils.clip_grad_norm_(gan.discriminator.parameters(), 0.1)
        scaler.step(optimizers["d"])
        with torch.autocast("cpu", torch.float16):
            loss_g = F.softplus(-gan.discriminator(fake_BF)).mean()
        scaler.scale(loss_g).backward()
        scaler.unscale_(optimizers["g"])
        nn.utils.clip_grad_norm_(gan.generator.parameters(), 0.1)
        scaler.step(optimizers["g"])
        scaler.update()
        gan.zero_grad()
    assert_equal_weights(trainer.model, gan)
    assert trainer.run.grad_scaler.state_dict() == scaler.state_dict()


def test_accumulation_gives_the_gradient_of_one_large_batch(tmp_path: Path) -> None:
    """The noise is that of each batch, so only the first update of the discriminator's biases is compared."""

    class Deterministic(PythonGan):
        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            loss_d = F.softplus(-model.discriminator(inputs["inputs"])).mean()
            loss_g = model.discriminator(model.generator(inputs["inputs"][:, :3])).mean()
            self.backward(loss_d, optimizer="d")
            self.backward(loss_g, optimizer="g")
            self.clip_gradients(0.1, optimizer="d")
            self.step()
            return {"step_loss": loss_d.detach()}

    weights = []
    for size, steps in ((24, 1), (6, 4)):
        gan = Gan()
        optimizers = {"g": torch.optim.SGD(gan.generator.parameters(), lr=0.1)}
        optimizers |= {"d": torch.optim.SGD(gan.discriminator.parameters(), lr=0.1)}
        settings = {"batch_size": size, "gradient_accumulation_steps": steps, "num_epochs": 1, "metrics": []}
        config = quiet(tmp_path / str(size), eval_strategy="no", **settings)
        Deterministic(gan, config, Samples(inputs=INPUTS_BF), optimizers=optimizers).train()
        weights.append([*gan.parameters()])
    for left, right in zip(*weights, strict=True):
        torch.testing.assert_close(left, right)


def test_only_the_named_optimizers_parameters_get_gradients(tmp_path: Path) -> None:
    seen: list[tuple[bool, ...]] = []

    class Looks(PythonGan):
        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            parts = model.generator, model.discriminator
            has = lambda: tuple(any(p.grad is not None for p in part.parameters()) for part in parts)  # noqa: E731
            loss = model.discriminator(model.generator(inputs["inputs"][:, :3])).mean()
            self.backward(loss, optimizer="g", retain_graph=True)
            seen.append(has())
            self.backward(loss, inputs=[*model.discriminator.parameters()])
            seen.append(has())
            self.step()
            with self.toggled("d"):
                requires = tuple(all(p.requires_grad for p in part.parameters()) for part in parts)
            seen.append(requires)
            seen.append(has())
            assert all(p.requires_grad for p in model.parameters())
            return {"step_loss": loss.detach()}

    python_gan(tmp_path, Looks, max_steps=1)
    assert seen == [(True, False), (True, True), (False, True), (False, False)]


def test_an_unknown_name_is_an_error_with_the_nearest_one(tmp_path: Path) -> None:
    class Wrong(PythonGan):
        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            self.step("dd")
            return {}

    with pytest.raises(ConfigError, match=r"no optimizer 'dd'\. Did you mean 'd'"):
        python_gan(tmp_path, Wrong, max_steps=1)


def test_a_skipped_update_is_that_of_its_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    class Infinite(PythonGan):
        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            loss = model.discriminator(inputs["inputs"]).mean()
            self.backward(loss, optimizer="d")
            self.backward(model.generator(inputs["inputs"][:, :3]).mean() * float("nan"), optimizer="g")
            self.step()
            return {"step_loss": loss.detach()}

    gan, before = python_gan(tmp_path, Infinite, max_steps=2, non_finite="skip").model, Gan()
    assert_equal_weights(gan.generator, before.generator)
    assert not torch.equal(gan.discriminator[0].weight, before.discriminator[0].weight)
    (end,) = [message for message in caplog.messages if message.startswith("Finished after")]
    assert "Skipped  2 of 4 optimizer steps, whose loss or gradients were not finite\n" in end


class Counter:
    """A part of the run that its trainer does not know."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("api", ["python", "config files"])
def test_a_checkpointable_that_is_added_to_a_trainer_is_resumed(api: str, tmp_path: Path) -> None:
    def make(length: int, *, resume: bool) -> Any:
        if api == "config files":
            return DefaultTrainer(configured(tmp_path, 4 * length, resume=resume))
        net = Net()
        config = settings_of(tmp_path, num_epochs=length, resume_from_checkpoint=resume)
        return Trainer(net, config, rows(), optimizers=optimizers_of(net))

    for length, expected in ((1, 4), (2, 8)):
        trainer, counter = make(length, resume=length > 1), Counter()
        trainer.checkpointer.add_checkpointable("counter", counter)
        assert counter.count == expected - 4
        hook = CallbackHook(after_step=lambda _, counter=counter: setattr(counter, "count", counter.count + 1))
        trainer._hooks.insert(0, hook)
        hook.trainer = trainer
        trainer.train()
        assert counter.count == expected


@pytest.mark.parametrize("base", [Trainer, DefaultTrainer])
def test_an_optimizer_that_does_not_step_at_first_has_its_schedule_without_a_warning(base: Any, tmp_path: Path) -> None:
    class Late(base):  # type: ignore[misc]
        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            name = "head" if self.iter < 2 else "body"
            loss = model(**inputs)["loss"]
            self.backward(loss, optimizer=name)
            self.step(name)
            return {"step_loss": loss.detach()}

    if base is DefaultTrainer:
        trainer = Late(configured(tmp_path, 3))
    else:
        net = Net()
        optimizers = optimizers_of(net)
        config = settings_of(tmp_path, max_steps=3, lr_scheduling_steps=1)
        schedules = {"body": ExponentialLR(optimizers["body"], 0.9)}
        trainer = Late(net, config, rows(), optimizers=optimizers, lr_schedulers=schedules)
    trainer.train()
    assert trainer.storage.latest()["lr/body"][0] == pytest.approx(0.5 * 0.9**2)


@pytest.mark.parametrize("non_finite", ["stop", "skip"])
def test_an_optimizer_without_gradients_may_step_in_float16(non_finite: str, tmp_path: Path) -> None:
    def trained(names: tuple[str | None, ...], period: int) -> Trainer:
        class Some(Trainer):
            def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
                with self.toggled("body"):
                    loss = model(**inputs)["loss"]
                    if self.iter % period == 0:
                        self.backward(loss)
                for name in names if self.iter % period == 0 or None in names else ():
                    self.step(name)
                return {"step_loss": loss.detach()}

        folder = tmp_path / f"{len(names)}"
        return python(folder, 1, Some, mixed_precision="fp16", non_finite=non_finite)

    every, one = trained((None, "body"), 2), trained(("body",), 2)
    assert_equal_weights(every.model, one.model)
    assert every.run.grad_scaler.state_dict() == one.run.grad_scaler.state_dict()


def with_clipping(folder: Path, iterations: int = 4, *, by_norm: float | None = None, **settings: Any) -> DictConfig:
    cfg = configured(folder, iterations, checkpointer={"period": 4}, **settings)
    cfg.optim.body.params.update({"clip_grad_value": 0.1, "clip_grad_max_norm": by_norm})
    return cfg


def test_a_resume_records_the_clipping_of_an_optimizer_that_trains_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DefaultTrainer(with_clipping(tmp_path)).train()
    cfg = with_clipping(tmp_path, 8, resume=True)
    cfg.optim.body.params.clip_grad_value = 0.2
    trainer = DefaultTrainer(cfg)
    assert trainer.optimizers["body"].param_groups[0]["clip_grad_value"] == 0.2
    assert trainer.cfg.optim.body.params.clip_grad_value == 0.2
    (line,) = [line for line in caplog.text.splitlines() if "optim.body.params.clip_grad_value" in line]
    assert line.endswith("0.1     0.2  taken now")


def test_both_clippings_of_an_optimizer_are_refused_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^optim\.body\.params\.clip_grad_value.*: got 0\.1 with optim\.body\.params\.clip_grad_max_norm=1\.0",
    ):
        DefaultTrainer(with_clipping(tmp_path, by_norm=1.0))
