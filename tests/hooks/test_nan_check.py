"""What is looked at for NaN and infinity, when, and what is said."""

import logging
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.toys import Classifier, Samples, file_config
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError, UserError
from trainwright.engine.loop import TrainerBase
from trainwright.hooks import Callback, CallbackHook, FiniteCheck, HookBase, NonFiniteError

NAN, INF = math.nan, math.inf


class Puts(TrainerBase):
    """Puts what ``put`` says for each iteration."""

    def __init__(self, put: Callable[[int], dict[str, Any]], *hooks: Any) -> None:
        super().__init__()
        self.put = put
        self.model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.register_hooks(hooks)

    def run_step(self) -> None:
        self.storage.put_scalars(**self.put(self.iter))


def loss_at(values: dict[int, float]) -> Callable[[int], dict[str, Any]]:
    return lambda iteration: {"total_loss": torch.tensor(values.get(iteration, 1.0))}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("bad", [0, 4, 5, 9, 11])
def test_a_bad_loss_stops_the_training_in_its_log_period_with_iteration_and_name(bad: int) -> None:
    trainer = Puts(loss_at({bad: NAN}), FiniteCheck(period=5))
    with pytest.raises(
        NonFiniteError, match=rf"Iteration {bad + 1}: total_loss is nan\..*All parameters are still finite"
    ):
        trainer.train(0, 12)
    assert trainer.iter == min(bad // 5 * 5 + 4, 11)


def test_every_iteration_and_every_name_is_reported() -> None:
    def put(iteration: int) -> dict[str, Any]:
        return {
            "main_loss": INF if iteration in (3, 4, 6) else 1.0,
            "grad_norm": NAN if iteration == 3 else 1.0,
            "lr": NAN,
            "time": INF,
        }

    with pytest.raises(NonFiniteError, match=r"4-5, 7: main_loss is inf, grad_norm is nan"):
        Puts(put, FiniteCheck(period=10)).train(0, 30)


def test_results_of_evaluations_are_not_losses_of_the_training() -> None:
    def evaluate(trainer: Any) -> None:
        trainer.storage.put_scalar("val_loss", NAN, smoothing_hint=False)

    Puts(loss_at({}), CallbackHook(after_step=evaluate), FiniteCheck(period=1)).train(0, 3)


def test_a_resumed_run_does_not_look_at_what_was_before() -> None:
    check = FiniteCheck(period=2)
    trainer = Puts(loss_at({}), check)
    trainer.register_hooks(
        [CallbackHook(before_step=lambda t: t.iter == 10 and t.storage.load_state_dict(earlier.storage.state_dict()))]
    )
    earlier = Puts(loss_at({3: NAN}))
    earlier.train(0, 10)
    trainer.train(10, 14)


def test_check_looks_at_once_and_again_after_it_has_raised() -> None:
    check = FiniteCheck(period=1000)
    seen = []

    def save(trainer: Any) -> None:
        if trainer.iter == 3:
            for _ in range(2):
                with pytest.raises(NonFiniteError, match="Iteration 2"):
                    check.check()
                seen.append(trainer.iter)

    with pytest.raises(NonFiniteError, match="Iteration 2"):
        Puts(loss_at({1: INF}), check, CallbackHook(before_step=save)).train(0, 5)
    assert seen == [3, 3]


def spoil(trainer: Any) -> None:
    if trainer.iter == 2:
        with torch.no_grad():
            trainer.model[0].weight[0, 1] = INF
            trainer.model[1].bias[0] = NAN


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_check_finds_parameters_that_no_loss_has_shown(policy: Any) -> None:
    check = FiniteCheck(period=1000, policy=policy)
    checks = CallbackHook(before_step=lambda t: check.check())
    with pytest.raises(NonFiniteError, match=r"After iteration 3: 2 parameters \(0\.weight, 1\.bias\) are"):
        Puts(loss_at({}), check, checks, CallbackHook(after_step=spoil)).train(0, 5)
    with pytest.raises(NonFiniteError, match=r"Now 2 parameters \(0\.weight, 1\.bias\) are not finite"):
        Puts(loss_at({3: NAN}), CallbackHook(after_step=spoil), FiniteCheck(lambda: True)).train(0, 5)


def test_buffers_frozen_parameters_and_large_finite_ones_are_no_cause() -> None:
    check = FiniteCheck(period=1)
    trainer = Puts(loss_at({}), check, CallbackHook(before_step=lambda t: check.check()))
    with torch.no_grad():
        trainer.model[1].running_mean.fill_(INF)
        trainer.model[0].weight.fill_(3e38)  # its square is infinite
        trainer.model[0].bias.fill_(NAN).requires_grad_(False)
        trainer.model.append(nn.Linear(300, 300).half())
        trainer.model[2].weight.fill_(60000.0)
    trainer.train(0, 2)


@pytest.mark.parametrize(
    ("bad", "period", "is_checked", "said"),
    [
        (
            {3: NAN, 4: NAN, 5: INF, 6: NAN, 12: NAN},
            5,
            True,
            ["Iteration 4: total_loss is nan", "Iteration 13: total_loss is nan"],
        ),
        (
            {1: NAN, 2: INF, 7: NAN, 11: NAN},
            10,
            False,
            ["Iterations 2-3, 8: total_loss is nan in iteration 2", "Iteration 12: total_loss is nan"],
        ),
    ],
    ids=["over periods", "in one period"],
)
def test_warn_says_a_row_once_and_goes_on(
    bad: dict[int, float], period: int, is_checked: bool, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    check = FiniteCheck(period=period, policy="warn")
    also = [CallbackHook(after_step=spoil, before_step=lambda t: check.check())] if is_checked else []
    Puts(loss_at(bad), check, *also).train(0, 20)
    assert [line.partition(".")[0] for line in warnings_of(caplog)] == said


def test_skip_tells_each_update_that_was_left_out_and_what_was_not(caplog: pytest.LogCaptureFixture) -> None:
    def put(iteration: int) -> dict[str, Any]:
        return {"total_loss": NAN if iteration in (2, 3, 6, 8) else 1.0}

    def skipped(trainer: Any) -> None:
        is_skipped = torch.tensor(trainer.iter in (2, 3, 6))
        trainer.storage.put_scalar("skipped_update", is_skipped, smoothing_hint=False)

    Puts(put, CallbackHook(after_step=skipped), FiniteCheck(period=5, policy="skip")).train(0, 10)
    assert [line.partition(".")[0] for line in warnings_of(caplog)] == [
        "Iterations 3-4: total_loss is nan in iteration 3",
        "Iteration 7: total_loss is nan",
        "Iteration 9: total_loss is nan",
    ]
    assert ["Skipped" in line for line in warnings_of(caplog)] == [True, True, False]


def test_the_error_is_the_users_with_an_exit_code_and_can_go_to_another_process() -> None:
    error = NonFiniteError("text")
    assert isinstance(error, FloatingPointError)
    assert isinstance(error, UserError)
    assert error.exit_code == 1
    assert str(pickle.loads(pickle.dumps(error))) == "text"
    with pytest.raises(ConfigError, match="'stop', 'skip' or 'warn'"):
        FiniteCheck(policy="halt")  # type: ignore[arg-type]


DATA = TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def config(folder: Path) -> TrainingConfig:
    return TrainingConfig(output_dir=folder, batch_size=4, progress_bar=False, save_enabled=False)


def mode_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "in evaluation mode" in r.getMessage()]


@pytest.mark.parametrize("api", ["python", "config"])
def test_a_frozen_part_in_evaluation_mode_stays_in_it(api: str, tmp_path: Path) -> None:
    class Model(Classifier):
        def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            modes.append([part.training for part in self.body])
            return super().forward(inputs, labels)

    modes: list[list[bool]] = []
    parts = [nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(3)]
    model = Model(body=nn.Sequential(*parts, nn.Linear(4, 2)))
    parts[0].requires_grad_(False).eval()
    parts[1].requires_grad_(False)  # frozen alone: as torch's train() has it
    parts[2].eval()  # a pretrained part that is trained
    data = Samples(inputs=torch.ones(8, 4), labels=torch.arange(8) % 2)
    if api == "python":
        settings = {"eval_strategy": "no", "save_enabled": False, "progress_bar": False, "device": "cpu"}
        Trainer(model, TrainingConfig(output_dir=tmp_path, batch_size=4, num_epochs=2, **settings), data).train()
    else:
        DefaultTrainer(
            file_config(tmp_path, lambda: model, lambda: data, train_iter=4, train_micro_batch_size=4)
        ).train()
    assert modes == [[False, True, True, True]] * 4
    assert parts[0][0].num_batches_tracked == 0


def test_a_callback_that_leaves_evaluation_mode_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Look(Callback):
        def on_train_batch_end(self, batch: Any, logs: Any) -> None:
            self.model.eval()

    Trainer(make(), config(tmp_path), DATA, callbacks=[Look()]).train()
    (warning,) = mode_warnings(caplog)
    assert "Sequential is trained in evaluation mode" in warning
    assert "Call model.train()" in warning


class Cut(nn.Module):
    """The first layer gets no gradient before ``iterations`` forward passes."""

    def __init__(self, iterations: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.iterations, self.passes = iterations, 0

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.passes += 1
        hidden = self.first(inputs)
        hidden = hidden.detach() if self.passes <= self.iterations else hidden
        return {"loss": nn.functional.cross_entropy(self.last(hidden), labels)}


@pytest.mark.parametrize("api", ["python", "config file"])
@pytest.mark.parametrize(("iterations", "optimizer"), [(99, "Adam"), (3, "Adam"), (99, "LBFGS")])
def test_a_layer_without_a_gradient_in_any_update_is_one_warning(
    iterations: int, optimizer: str, api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = Cut(iterations), Samples(inputs=torch.ones(16, 4), labels=torch.arange(16) % 2)
    if api == "python":
        settings = {"eval_strategy": "no", "save_enabled": False, "progress_bar": False, "device": "cpu"}
        settings |= {"optimizer": optimizer, "batch_size": 4, "num_epochs": 2}
        Trainer(model, TrainingConfig(output_dir=tmp_path, **settings), data).train()
    else:
        cfg = file_config(tmp_path, lambda: model, lambda: data, train_iter=8, train_micro_batch_size=4, log_period=1)
        cfg.optim = LazyCall(getattr(torch.optim, optimizer))(params={}, lr=0.01)
        DefaultTrainer(cfg).train()
    found = [text for text in warnings_of(caplog) if "without a gradient in every update" in text]
    assert len(found) == (iterations == 99 and optimizer == "Adam")
    assert not found or "2 parameters (first.weight, first.bias)" in found[0]


def test_a_layer_that_is_unfrozen_at_the_look_is_no_layer_without_gradients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unfreeze(HookBase):
        slot = "step"  # before the check

        def after_step(self) -> None:
            if self.trainer.iterations_done == self.trainer.max_iter:
                self.trainer.model.first.requires_grad_(True)

    model, data = Cut(0), Samples(inputs=torch.ones(16, 4), labels=torch.arange(16) % 2)
    model.first.requires_grad_(False)
    settings = {"eval_strategy": "no", "save_enabled": False, "progress_bar": False, "device": "cpu"}
    settings |= {"optimizer": "Adam", "batch_size": 4, "num_epochs": 2}
    trainer = Trainer(model, TrainingConfig(output_dir=tmp_path, **settings), data)
    trainer.register_hooks([Unfreeze()])
    trainer.train()
    assert model.first.weight.requires_grad
    assert "without a gradient" not in caplog.text


@pytest.mark.parametrize("api", ["python", "config file"])
@pytest.mark.parametrize("kind", ["unfrozen", "no gradient", "held", "changed by hand"])
def test_a_layer_that_is_trainable_later_and_that_no_optimizer_changes_is_one_warning(
    kind: str, api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Later(HookBase):
        def after_step(self) -> None:
            trainer, first = self.trainer, self.trainer.model.first
            if trainer.iterations_done == 3:
                first.requires_grad_(True)
                if kind == "no gradient":
                    trainer.model.last.extra = nn.Parameter(torch.ones(2))
                if kind in ("no gradient", "held"):
                    trainer.optimizer.add_param_group({"params": [*first.parameters()]})
            if kind == "changed by hand" and trainer.iterations_done > 3:
                with torch.no_grad():
                    for parameter in first.parameters():
                        parameter.mul_(0.9)

    model, data = Cut(0), Samples(inputs=torch.ones(128, 4), labels=torch.arange(128) % 2)
    model.first.requires_grad_(False)
    if api == "python":
        settings = {"eval_strategy": "no", "save_enabled": False, "progress_bar": False, "device": "cpu"}
        settings |= {"batch_size": 1, "num_epochs": 1, "logging_steps": 2}
        sgd = torch.optim.SGD(model.last.parameters(), lr=0.01)
        parts = {"optimizer": sgd, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(sgd, factor=1.0)}
        trainer: Any = Trainer(model, TrainingConfig(output_dir=tmp_path, **settings), data, **parts)
    else:
        cfg = file_config(tmp_path, lambda: model, lambda: data, train_iter=128, train_micro_batch_size=1, log_period=2)
        cfg.optim = LazyCall(torch.optim.SGD)(params={}, lr=0.01)
        cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)
        trainer = DefaultTrainer(cfg)
    trainer.register_hooks([Later()])
    trainer.train()
    found = [text for text in warnings_of(caplog) if "trainable since a later iteration" in text]
    assert len(found) == (kind == "unfrozen")
    text = "After iteration 104: 2 parameters (first.weight, first.bias) are trainable since"
    assert all(one.startswith(text) for one in found)


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("own_step", [False, True])
def test_a_step_of_the_users_own_that_trains_in_evaluation_mode_is_warned_of(
    own_step: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stepper(TrainerBase):
        def run_step(self) -> None:
            trainer.model(torch.ones(2, 4), torch.tensor([0, 1]))["loss"].backward()
            trainer.optimizer.step()

    model, data = (
        Classifier(body=make(), is_scored=False).eval(),
        Samples(inputs=torch.ones(16, 4), labels=lambda index: index % 2),
    )
    cfg = file_config(tmp_path, lambda: model, lambda: data, train_iter=4, train_micro_batch_size=8)
    trainer = DefaultTrainer(cfg)
    if own_step:
        trainer.model.eval()
        trainer._trainer = Stepper()
    trainer.train()
    assert len(mode_warnings(caplog)) == own_step
