"""Parameters, optimizers and schedules that the user adds to a run are saved and brought back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from tests.toys import Classifier, Samples, assert_equal_weights, file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.errors import ConfigError
from trainwright.data import CyclicSampler
from trainwright.hooks import HookBase

INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True))


class Weighed(Trainer):
    log_var: Tensor

    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        loss: Tensor = ((model(inputs[0]) - inputs[1]) ** 2 * torch.exp(-self.log_var) + self.log_var).mean()
        return loss


def weighed(folder: Path, epochs: int, *, size: int = 1, late: bool = False, **settings: Any) -> Weighed:
    torch.manual_seed(0)
    model, log_var = nn.Linear(4, 1), torch.zeros(size, requires_grad=True)
    config = quiet(folder, num_epochs=epochs, metrics=None, **settings)
    optimizer = torch.optim.Adam([*model.parameters(), log_var], lr=0.05)
    trainer = Weighed(model, config, DATA, optimizer=None if late else optimizer)
    if late:
        trainer.set_optimizer(optimizer)
    trainer.log_var = log_var
    return trainer


@pytest.mark.parametrize("late", [False, True])
def test_a_resumed_run_goes_on_with_them(late: bool, tmp_path: Path) -> None:
    whole = weighed(tmp_path / "whole", 4, late=late)
    whole.train()
    weighed(tmp_path / "run", 2, late=late).train()
    resumed = weighed(tmp_path / "run", 4, late=late, resume_from_checkpoint=not late)
    kept = resumed.log_var
    assert late or float(kept.detach()) != 0  # at once, in the user's own tensor
    resumed.train(tmp_path / "run" / "epoch_2" if late else None)
    assert resumed.log_var is kept
    assert torch.equal(kept, whole.log_var)
    assert torch.equal(resumed.model.weight, whole.model.weight)


def test_others_are_refused_before_the_first_step(tmp_path: Path) -> None:
    weighed(tmp_path, 2).train()
    with pytest.raises(ConfigError, match=r"0.2 \(1,\) as parameters of the optimizer.*this run has 0.2 \(2,\)"):
        weighed(tmp_path, 4, size=2, resume_from_checkpoint=True).train()


class Centers(nn.Module):
    """A loss with a parameter, and with a buffer that changes."""

    moved: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("moved", torch.zeros(1))

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        self.moved += outputs.detach().mean()
        loss: Tensor = ((outputs * self.scale - target) ** 2).mean()
        return loss


@pytest.mark.parametrize("is_trained", [True, False])
def test_the_state_of_a_loss_module(is_trained: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(epochs: int, folder: Path) -> tuple[Trainer, Centers]:
        torch.manual_seed(0)
        model, loss = nn.Linear(4, 1), Centers()
        parameters = [*model.parameters(), *(loss.parameters() if is_trained else ())]
        optimizer = torch.optim.Adam(parameters, lr=0.05)
        trainer = Trainer(model, quiet(folder, num_epochs=epochs, metrics=None), DATA, optimizer=optimizer)
        trainer.set_loss(loss, loss_name="centers")
        return trainer, loss

    whole, expected = make(4, tmp_path / "whole")
    whole.train()
    assert ("parameters that the optimizer does not hold" in caplog.text) == (not is_trained)
    make(2, tmp_path / "run")[0].train()
    resumed, loss = make(4, tmp_path / "run")
    resumed.train(resume_checkpoint_path=tmp_path / "run" / "final_epoch")
    for name, value in expected.state_dict().items():
        assert torch.equal(loss.state_dict()[name], value), name
    assert (float(loss.scale.detach()) == 1) == (not is_trained)


OUTSIDE: list[Tensor] = []


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layer(inputs) * OUTSIDE[-1] - 1).square().mean()}


def adam_with_more(params: Any, lr: float) -> torch.optim.Optimizer:
    OUTSIDE.append(torch.ones(1, requires_grad=True))
    return torch.optim.Adam([*params, {"params": [OUTSIDE[-1]]}], lr=lr)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_parameters_that_the_optimizer_does_not_hold_are_logged(
    is_replaced: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters() if is_replaced else model[1].parameters(), lr=0.1)
    if is_replaced:
        model[0] = nn.Linear(4, 4)
    config = quiet(tmp_path, num_epochs=1, loss="MSELoss", metrics=None)
    Trainer(model, config, DATA, optimizer=optimizer).train()
    (record,) = [one for one in caplog.records if "does not train these 2 parameters" in one.getMessage()]
    assert "no 0.weight, 0.bias of the model" in record.getMessage()
    assert record.levelname == "WARNING"


class AddLayer(HookBase):
    """The first layer is trained from the fourth update on."""

    def before_step(self) -> None:
        if self.trainer.iter == 3:
            self.trainer.optimizer.add_param_group({"params": [*self.trainer.model.body[0].parameters()], "lr": 0.01})


def last_layer(params: Any, lr: float) -> torch.optim.Optimizer:
    every = [p for one in params for p in (one["params"] if isinstance(one, dict) else [one])]
    return torch.optim.SGD([p for p in every if len(p) == 2], lr=lr, momentum=0.9)


class StepsItself(Trainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        loss = model(**inputs)["loss"]
        self.backward(loss)
        self.step()
        return {"step_loss": loss.detach()}


@pytest.mark.parametrize("api", [Trainer, StepsItself, DefaultTrainer])
def test_gradients_of_parameters_that_no_optimizer_holds_do_not_pile_up(api: Any, tmp_path: Path) -> None:
    data = points(24)
    plain = Classifier((4, 8, 2), seed=0)
    optimizer = last_layer(plain.parameters(), 0.1)
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": [*plain.body[0].parameters()], "lr": 0.01})
        plain(**default_collate([data[i] for i in range(4 * step, 4 * step + 4)]))["loss"].backward()
        optimizer.step()
        plain.zero_grad()
    if api is DefaultTrainer:
        settings = {"train_iter": 6, "train_micro_batch_size": 4}
        cfg = file_config(tmp_path, lambda: Classifier((4, 8, 2), seed=0), lambda: data, **settings)
        cfg.optim = LazyCall(last_layer)(params=cfg.optim.params, lr=0.1)
        cfg.dataloader.train.sampler = CyclicSampler
        cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)
        trainer = DefaultTrainer(cfg)
    else:
        model = Classifier((4, 8, 2), seed=0)
        config = quiet(tmp_path, num_epochs=1, batch_size=4, dataloader_shuffle=False, metrics=None)
        trainer = api(model, config, data, optimizer=last_layer(model.parameters(), 0.1))
    trainer.register_hooks([AddLayer()])
    trainer.train()
    for ours, theirs in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_config_file_api(tmp_path: Path) -> None:
    def train(folder: Path, iterations: int, **train: Any) -> DefaultTrainer:
        cfg = file_config(
            folder, Scaled, lambda: Samples(inputs=INPUTS), train_iter=iterations, train_micro_batch_size=4, **train
        )
        cfg.optim = LazyCall(adam_with_more)(params=dict(cfg.optim.params), lr=0.05)
        cfg.optim.params.pop("_target_", None)
        cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)
        trainer = DefaultTrainer(cfg)
        trainer.train()
        return trainer

    train(tmp_path / "whole", 6)
    whole = OUTSIDE[-1].clone()
    train(tmp_path / "run", 3)
    train(tmp_path / "run", 6, resume=True)
    assert torch.equal(OUTSIDE[-1], whole)


# B batch, F features.
OPTIMIZERS_DATA = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.discriminator = nn.Linear(4, 1)

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.layer(x_BF)


class Gan(Trainer):
    """With the discriminator in the model, and a second one that only the trainer holds."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        torch.manual_seed(3)
        self.critic = nn.Linear(4, 1)
        self.optimizer_d = torch.optim.Adam(self.model.discriminator.parameters(), lr=0.01)
        self.optimizer_c = torch.optim.SGD(self.critic.parameters(), lr=0.01, momentum=0.9)
        self.schedule_d = torch.optim.lr_scheduler.ExponentialLR(self.optimizer_d, 0.9)

    def prepare_input_batch(self, batch: Any) -> Any:
        return batch[0], batch[0]

    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        x, _ = inputs
        fake = model(x)
        for judge, optimizer in ((self.model.discriminator, self.optimizer_d), (self.critic, self.optimizer_c)):
            self.backward(F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(x)).mean())
            self.step(optimizer)
        self.schedule_d.step()
        self.model.discriminator.requires_grad_(False)
        loss = F.softplus(-self.model.discriminator(fake)).mean()
        self.backward(loss)
        self.step(self.optimizer)
        self.model.discriminator.requires_grad_(True)
        return {"step_loss": loss.detach()}


def run(folder: Path, num_epochs: int, kind: type[Trainer] = Gan, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = Generator()
    config = quiet(folder, num_epochs=num_epochs, metrics=None, eval_strategy="no", **settings)
    optimizer = torch.optim.Adam(model.layer.parameters(), lr=0.02)
    trainer = kind(model, config, train_dataset=OPTIMIZERS_DATA, optimizer=optimizer)
    trainer.train()
    return trainer


def test_a_resumed_run_has_the_state_of_every_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    straight = run(tmp_path / "straight", 4)
    run(tmp_path / "resumed", 2)
    caplog.clear()
    resumed = run(tmp_path / "resumed", 4, resume_from_checkpoint=True)
    assert_equal_weights(resumed.model, straight.model)
    assert torch.equal(resumed.critic.weight, straight.critic.weight)
    assert resumed.schedule_d.get_last_lr() == straight.schedule_d.get_last_lr()
    assert "other optimizers" not in caplog.text


def test_an_optimizer_that_only_one_of_both_has_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Renamed(Gan):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.second = self.optimizer_d
            del self.schedule_d, self.optimizer_d

        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            loss = model(inputs[0]).square().mean()
            self.backward(loss)
            self.step(self.optimizer)
            return {"step_loss": loss.detach()}

    run(tmp_path, 1)
    caplog.clear()
    run(tmp_path, 2, Renamed, resume_from_checkpoint=True, allow_other_trainer=True)
    assert "Saved state that is not used: optimizer_d, schedule_d. Without saved state: second." in caplog.text
