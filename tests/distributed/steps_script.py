"""Steps of both APIs on several processes; rank 0 writes what the tests compare to ``sys.argv[1]``."""

import copy
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.toys import file_config, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.dist import all_gather_object, get_rank
from trainwright.engine import EagerTrainer, GraphBase, GraphTrainer
from trainwright.parallel.data_parallel import setup_dist_util

SIZES = [(3, 1), (2, 4), (1, 5), (4, 4)]  # samples of the two processes in each micro-batch
FOLDER = Path(sys.argv[1])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.used = nn.Linear(3, 2)
        self.never_used = nn.Linear(3, 2)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.used(inputs), labels)}


class Points(torch.utils.data.Dataset[Any]):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": torch.arange(3.0) * 0.1 * (index % 5) - 0.2, "labels": index % 2}

    def __len__(self) -> int:
        return 32


def make_batches() -> list[list[dict[str, Tensor]]]:
    """Of both processes, for each micro-batch."""
    draw = torch.Generator().manual_seed(5)
    return [
        [
            {"inputs": torch.randn(n, 3, generator=draw), "labels": torch.randint(0, 2, (n,), generator=draw)}
            for n in pair
        ]
        for pair in SIZES
    ]


def own_batches() -> list[dict[str, Tensor]]:
    return [pair[get_rank()] for pair in make_batches()]


def by_hand(
    accumulation: int = 1,
    weigh: Callable[[int, int], float] | None = None,
    decay: float | None = None,
    frozen: int = 0,
    model: Any = None,
) -> Any:
    """One process: the loss of an update is the mean over all samples of both, or weighted by ``weigh(n, total)``.

    With ``decay`` the average of the weights. ``frozen``: the number of updates in which the bias is frozen.
    """
    model, both = model or Net(), make_batches()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay or 0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for start in range(0, len(both), accumulation):
        batches = [batch for pair in both[start : start + accumulation] for batch in pair]
        total = sum(len(batch["labels"]) for batch in batches)
        if frozen:
            model.used.bias.requires_grad = start >= frozen
        for batch in batches:
            n = len(batch["labels"])
            (model(**batch)["loss"] * (n / total if weigh is None else weigh(n, total))).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return model if decay is None else average.module


def config_files(accumulation: int = 1, kind: Any = EagerTrainer, model: Net | None = None) -> tuple[Net, Any]:
    model, loader = model or Net(), own_batches()
    trainer = kind(model, loader, torch.optim.SGD(model.parameters(), lr=0.5), accumulation)
    trainer.train(0, len(loader) // accumulation)
    return model, trainer


class OwnStep(EagerTrainer):
    """As on the page: torch's own calls."""

    def run_step(self) -> None:
        losses = self.model(**next(self._data_loader_iter))
        losses["loss"].backward()
        self.write_metrics(losses, 0.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class OwnUpdate(EagerTrainer):
    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Gan(nn.Module):
    """A generator of points from points: nothing is drawn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.generator, self.discriminator = nn.Linear(3, 3), nn.Linear(3, 1)

    def losses(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.generator(inputs)
        loss_d = F.softplus(-self.discriminator(inputs)).mean() + F.softplus(self.discriminator(fake.detach())).mean()
        return loss_d, F.softplus(-self.discriminator(fake)).mean()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss_d, loss_g = self.losses(inputs)
        return {"loss": loss_d + loss_g}


def gan_optimizers(gan: Any) -> dict[str, torch.optim.Optimizer]:
    parts = {"g": gan.generator, "d": gan.discriminator}
    return {name: torch.optim.SGD(part.parameters(), lr=0.5) for name, part in parts.items()}


def gan_by_hand() -> Gan:
    gan = Gan()
    optimizers = gan_optimizers(gan)
    for pair in make_batches():
        total = sum(len(batch["labels"]) for batch in pair)
        for place, name in ((0, "d"), (1, "g")):
            gan.zero_grad()
            for batch in pair:
                (gan.losses(batch["inputs"])[place] * (len(batch["labels"]) / total)).backward()
            optimizers[name].step()
    return gan


def gan_step(self: Any, model: Any, inputs: Any) -> dict[str, Tensor]:
    loss_d, _ = model.losses(inputs["inputs"])
    self.backward(loss_d, optimizer="d")
    self.step("d")
    _, loss_g = model.losses(inputs["inputs"])
    self.backward(loss_g, optimizer="g")
    self.step("g")
    return {"step_loss": loss_g.detach(), "loss_g": loss_g.detach()}


class PythonGan(Trainer):
    train_step = gan_step


class ConfigGan(DefaultTrainer):
    train_step = gan_step

    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        return (own_batches(),)

    @classmethod
    def build_optimizer(cls, cfg: Any, model: Any) -> Any:
        return gan_optimizers(model)


def python_api(
    name: str, model: Any = None, kind: type[Trainer] = Trainer, parts: dict[str, Any] | None = None, **settings: Any
) -> tuple[Any, Trainer]:
    model = model or Net()
    parts = parts or {"optimizer": torch.optim.SGD(model.parameters(), lr=0.5)}
    config = quiet(FOLDER / name, num_epochs=1, device_str="cpu", save_enabled=False, **{"metrics": [], **settings})
    trainer = kind(model, config, train_dataloader=own_batches(), **parts)
    trainer.train()
    return model, trainer


def python_gan() -> Any:
    gan = Gan()
    return python_api("gan", gan, PythonGan, {"optimizers": gan_optimizers(gan)})[0]


def config_gan() -> Any:
    cfg = file_config(FOLDER / "config-gan", Gan, Points, train_iter=4, train_micro_batch_size=2)
    cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)
    trainer = ConfigGan(cfg)
    trainer.train()
    return trainer.model


class TwoBackwards(Trainer):
    """The second pass is through the model itself, which is not wrapped."""

    def training_step(self, batch: Any) -> Any:
        losses = [model(**batch)["loss"] for model in (self.run.placement.model, self.model)]
        for loss in losses:
            self.backward(loss)
        return losses[0].detach()


def two_backwards() -> Any:
    gan = Gan()
    return python_api("two", gan, TwoBackwards, {"optimizer": torch.optim.SGD(gan.parameters(), lr=0.25)})[0]


def graph_mode() -> Net:
    """Several processes: all steps are eager."""
    model, loader = Net(), own_batches()
    graph = GraphBase(model, torch.optim.SGD(model.parameters(), lr=0.5), backend="aot_eager")
    GraphTrainer(graph, loader).train(0, len(loader))
    return model


def logged() -> dict[str, Any]:
    """A run of config files, the collective calls of its logged losses, and the losses."""
    calls: list[int] = []
    all_reduce = dist.all_reduce

    def count(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        if tensor.dim() == 2 and tensor.shape[1] == 2:
            calls.append(len(tensor))
        return all_reduce(tensor, *arguments, **named)

    cfg = file_config(FOLDER / "logged", Net, Points, train_iter=10, train_micro_batch_size=2, log_period=5)
    trainer = DefaultTrainer(cfg)
    own = copy.deepcopy(trainer.model)
    dist.all_reduce = count
    try:
        trainer.train()
    finally:
        dist.all_reduce = all_reduce
    batch = trainer.get_batch(next(iter(trainer.build_train_loader(trainer.cfg)[0])), "cpu")
    first = all_gather_object(own(**batch)["loss"].item())
    losses = [value for value, _ in trainer.storage.history("total_loss").values()]
    return {"calls": calls, "losses": losses, "first": sum(first) / len(first)}


class Numbers(Net):
    """Returns numbers by name, one of them on the last rank only."""

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        more = {"rank_only": torch.tensor(3.0)} if get_rank() else {}
        return {**super().forward(inputs, labels), "rank": float(get_rank()), "first": inputs[:, 0].mean(), **more}


def numbers(api: str) -> dict[str, Any]:
    """The logged numbers of a model in each update, and the warnings."""
    model, records = Numbers(), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainwright.events").addHandler(handler)
    _, trainer = python_api("numbers", model, metrics=None) if api == "python" else config_files(model=model)
    logging.getLogger("trainwright.events").removeHandler(handler)
    histories = trainer.storage.histories()
    logged = {
        name: [value for value, _ in histories[name].values()] for name in ("loss", "rank", "first", "total_loss")
    }
    return {"logged": logged, "warnings": records}


def main() -> None:
    setup_dist_util({"device_type": "cpu"})
    found: dict[str, Any] = {}

    def compare(name: str, model: Any, reference: Any) -> None:
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        theirs = torch.cat([p.detach().flatten() for p in reference.parameters()])
        of_all = all_gather_object(mine.tolist())
        found[name] = {"equal_on_all": of_all[0] == of_all[1], "difference": (mine - theirs).abs().max().item()}

    for accumulation in (1, 2):
        for name in ("config files", "python"):
            settings = {"gradient_accumulation_steps": accumulation}
            run = python_api(f"python-{accumulation}", **settings) if name == "python" else config_files(accumulation)
            model, trainer = run
            compare(f"{name} {accumulation}", model, by_hand(accumulation))
            if accumulation == 1:
                found[f"{name} losses"] = [v for v, _ in trainer.storage.history("total_loss").values()]
    model, _ = config_files(kind=OwnStep)
    compare("own run_step", model, by_hand(weigh=lambda n, total: 0.5))
    model, _ = config_files(kind=OwnUpdate)
    compare("own update", model, by_hand())
    compare("graph mode", graph_mode(), by_hand())
    compare("python gan", python_gan(), gan_by_hand())
    compare("config gan", config_gan(), gan_by_hand())
    compare("two backward passes", two_backwards(), by_hand(model=Gan()))
    model, _ = python_api("average", ema={"decay": 0.5})
    compare("average", model, by_hand(decay=0.5))
    model, _ = python_api("unfrozen", unfreeze=[{"step": 2, "layers": ["used.bias"]}])
    compare("unfrozen", model, by_hand(frozen=2))
    found["logged"] = logged()
    for api in ("python", "config files"):
        found[f"numbers {api}"] = numbers(api)
    if get_rank() == 0:
        (FOLDER / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
