"""A program of a user of the Python API, for type checkers; it runs, too."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from trainwright import Trainer, TrainerConfig, TrainingConfig, get_event_storage
from trainwright.checkpoint import Checkpointer, CheckpointError, verify
from trainwright.config import ConfigError, MetricConfig, TaskType, UserError, get_config_help
from trainwright.data import ColumnDataset, CyclicSampler, SingleRoundSampler, to_batch
from trainwright.engine import EagerTrainer, HookBase, TrainingLoop
from trainwright.evaluation import MetricsHandler, build_metric
from trainwright.events import EventStorage, EventWriter, HistoryBuffer, JSONWriter
from trainwright.hooks import Callback, CallbackHook, EarlyStoppingCallback, IterationTimer, Logs, TrainerControl
from trainwright.models import ModelCard
from trainwright.optim import WarmupCosineLR, configure_cosine_scheduler_with_warmup
from trainwright.parallel import get_rank, get_world_size, is_main_process
from trainwright.report import Run


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(inputs)
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


class Counting(HookBase):
    def __init__(self) -> None:
        self.count = 0

    def after_step(self) -> None:
        self.count += 1
        get_event_storage().put_scalar("count", self.count, smoothing_hint=False)


class Printing(Callback):
    def on_epoch_end(self, epochs: int, logs: Logs) -> None:
        print(epochs, logs["epoch_loss"])

    def on_eval_end(self, logs: Logs) -> None:
        if self.trainercontrol is not None:
            self.trainercontrol.should_training_stop = False


class Last(EventWriter):
    rows = 0

    def write(self, storage: EventStorage | None = None) -> None:
        current = get_event_storage() if storage is None else storage
        history: HistoryBuffer = current.history("total_loss")
        assert history.latest() > 0
        self.rows += 1


class OwnTrainer(Trainer):
    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**inputs)["loss"]
        return 2 * loss

    def build_hooks(self) -> list[HookBase | None]:
        return [*super().build_hooks(), Counting(), CallbackHook(after_train=lambda trainer: None)]

    def build_writers(self) -> list[EventWriter]:
        return [*super().build_writers(), Last()]


def data() -> ColumnDataset:
    inputs = torch.arange(16 * 8).reshape(16, 8) / 128
    return ColumnDataset(inputs=inputs, labels=torch.arange(16) % 2)


def train(folder: Path) -> None:
    config = TrainingConfig(
        output_dir=str(folder / "run"), num_epochs=2, batch_size=4, lr=0.1, device="cpu", metrics=["accuracy"],
        optimizer={"name_": "SGD", "momentum": 0.9}, ema={"decay": 0.5}, early_stopping=None, mixed_precision=None,
        gradient_accumulation_steps=2, progress_bar=False, tensorboard=None,
    )  # fmt: skip
    rate: float = config.learning_rate
    device: torch.device = config.device
    assert (rate, device.type, config.lr, config["epochs"]) == (0.1, "cpu", 0.1, 2)
    copied: TrainingConfig = config.copy_with(batch_size=2)
    config.update(eval_strategy="step", eval_steps=1)
    copied.save_to_yaml(folder / "config.yaml")
    assert TrainingConfig.load_from_yaml(folder / "config.yaml") == copied

    trainer = OwnTrainer(Net(4), config, data(), data(), callbacks=[Printing()])
    results: dict[str, float] = trainer.train()
    assert results["accuracy"] <= 1
    model: nn.Module = trainer.model
    step: int = trainer.state.global_step
    print(trainer.evaluate(), step, sum(parameter.numel() for parameter in model.parameters()))
    print(trainer.predict(data()))
    trainer.save(folder / "saved")
    trainer.load(folder / "saved")
    optimizer: torch.optim.Optimizer = trainer.optimizer
    optimizer.zero_grad()
    assert verify(trainer.checkpoints_dir / "model_best") is not None
    print(Run(folder / "run"))

    of_task = TrainerConfig(output_dir=str(folder / "task"), task=TaskType.TEXT_CLASSIFICATION, metrics=["f1"])
    assert of_task.num_epochs == 1
    try:
        TrainingConfig(batch_size=0)
    except ConfigError as error:
        of_user: UserError = error
        print(of_user)


def own_loop(folder: Path) -> None:
    net = Net(4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data(), batch_size=4)
    loop = TrainingLoop(net, optimizer, loader, max_iter=3, output_dir=folder / "loop", hooks=[Counting()])
    for batch in loop:
        loss: Tensor = net(**batch)["loss"]
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    eager = EagerTrainer(net, loader, optimizer, grad_acc_steps=2)
    eager.register_hooks([IterationTimer(), None])
    with EventStorage(0):
        eager.train(0, 2)
    checkpointer = Checkpointer(net, str(folder / "own"), optimizer=optimizer)
    checkpointer.save("first", iteration=3)
    checkpointer.wait()
    extra = checkpointer.load(checkpointer.get_checkpoint_file())
    assert extra["iteration"] == 3
    try:
        checkpointer.load(str(folder / "absent"))
    except (CheckpointError, FileNotFoundError) as error:
        print(error)


def parts(folder: Path) -> None:
    optimizer = torch.optim.SGD(Net(4).parameters(), lr=0.1)
    schedule: torch.optim.lr_scheduler.LRScheduler = WarmupCosineLR(optimizer, 10, 0.1, 2)
    schedule.step()
    configure_cosine_scheduler_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=4)
    sampler = SingleRoundSampler(data(), 4, shuffle=False)
    batches: list[list[int]] = list(sampler)
    endless: Iterator[list[int]] = iter(CyclicSampler(data(), 4, shuffle=True, seed=1))
    assert (len(batches), len(next(endless))) == (4, 4)
    assert to_batch({"x": [1]}) is not None
    assert build_metric("accuracy").compute([1, 0], [1, 1])
    assert MetricConfig("f1", n_decimals=2).n_decimals == 2
    control = TrainerControl()
    EarlyStoppingCallback(control, "eval_loss", patience=2, mode="min")
    assert (get_rank(), get_world_size(), is_main_process()) == (0, 1, True)
    writer: EventWriter = JSONWriter(folder / "metrics.json")
    writer.close()
    assert get_config_help()["seed"]["default"] == 42
    handler: type[MetricsHandler] = MetricsHandler
    assert handler is not None
    assert ModelCard is not None


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        train(Path(name))
        own_loop(Path(name))
        parts(Path(name))
