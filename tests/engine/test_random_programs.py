"""Programs with settings drawn at random, each in both APIs: stopped or failed, a run ends as the undisturbed one.

The number in a test's id is the seed of its program. Each program is trained three times: undisturbed; stopped and
resumed from its newest checkpoint by another trainer; failed at a random place, the error caught, and continued by
``train()`` of the same trainer. Weights, losses and rows of metrics are equal bit for bit. Where nothing is random and
nothing depends on the sizes of micro-batches, the weights are those of a plain loop, too: on one process bit for bit.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from tests.ranks import on_ranks
from tests.toys import Classifier, Samples, file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.dist import all_gather_object
from trainwright.data import CyclicSampler
from trainwright.evaluation import ClsEvaluator
from trainwright.hooks import Callback, HookBase

pytestmark = pytest.mark.slow

SCHEDULES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 6},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "AdamW": {"weight_decay": 0.1}}
FUSED = {"objects": False, "config files": True}  # the kernels of an update differ by rounding
PLACES = ("sample", "forward", "step begin", "step end", "epoch end", "evaluation")
UPDATE = ("iteration", "total_loss", "lr", "grad_norm")
MEASURED = re.compile("time|second|memory|_per_s|eta")  # metrics by a clock


class BrokenError(Exception):
    """What fails in a program, or stops it."""


@dataclass(frozen=True)
class Program:
    """What is drawn. Sizes are per process; ``length`` in epochs, or in updates (config files) and steps (objects)."""

    samples: int
    batch: int
    accumulation: int
    epochs: int
    limit: int | None
    drop_last: bool
    shuffle: bool
    noise: bool  # each sample draws
    dropout: float
    norm: bool
    optimizer: str
    schedule: str | None
    clip: float | None
    ema: float | None
    evaluates_every: int | None
    saves_every: int
    workers: int
    ranks: int
    stops_at: float  # shares of the calls of a place
    fails_at: float
    place: str

    @classmethod
    def drawn(cls, seed: int) -> "Program":
        draw = random.Random(seed)
        maybe = partial(draw.choice, (False, True))
        batch, accumulation, ranks = draw.randint(2, 5), draw.randint(1, 4), draw.choice((1, 1, 1, 2))
        update, norm = batch * accumulation * ranks, draw.random() < 0.3
        return cls(
            samples=draw.randint(max(9, update), update + 30),
            batch=batch,
            accumulation=accumulation,
            epochs=draw.randint(1, 4),
            limit=draw.choice((None, draw.randint(3, 15))),
            drop_last=maybe() or norm,  # a norm of a single sample is an error
            shuffle=maybe(),
            noise=draw.random() < 0.3,
            dropout=draw.choice((0.0, 0.0, 0.3)),
            norm=norm,
            optimizer=draw.choice([*OPTIMIZERS]),
            schedule=draw.choice([None, *SCHEDULES]),
            clip=draw.choice((None, 0.1)),
            ema=draw.choice((None, None, 0.8)),
            evaluates_every=draw.choice((None, draw.randint(1, 4))),
            saves_every=draw.randint(1, 3),
            workers=draw.choice((0, 0, 0, 0, 1)),
            ranks=ranks,
            stops_at=draw.random(),
            fails_at=draw.random(),
            place=draw.choice(PLACES),
        )

    def continues_exactly(self, api: str) -> bool:
        """Whether the failure takes nothing with it that a second try of the update does not take back.

        The update is made again from its first sample and without the gradients of the first try. What its dropout has
        drawn, and what its batches have added to running statistics, remains. Samples draw the same again.
        """
        is_of_update = api == "config files" or self.accumulation == 1
        between = ("epoch end", "evaluation", *(["step end"] if is_of_update else []))
        return self.place in between or not (self.dropout or self.norm)

    @property
    def has_plain_loop(self) -> bool:
        return not (self.shuffle or self.noise or self.dropout or (self.norm and self.ranks > 1))


class Breaks:
    """Counts the calls of each place of a run, and raises in one of them."""

    def __init__(self, place: str | None = None, at: int = 0) -> None:
        self.place, self.at, self.calls = place, at, Counter[str]()
        self.before = Counter[str]()  # the calls before the first step, as of a comparison of the ranks' data

    def __call__(self, place: str) -> None:
        if place == "step begin" and not self.calls[place]:
            self.before += self.calls
        self.calls[place] += 1
        if place == self.place and self.calls[place] == self.at:
            raise BrokenError(f"call {self.at} of {place}")


class Data(Samples):
    """Points; a sample may draw, and break."""

    def __init__(self, length: int, noise: bool, breaks: Callable[[str], None], seed: int = 0) -> None:
        super().__init__(**points(length, seed=seed).named, length=length)
        self.noise, self.breaks = noise, breaks

    def __getitem__(self, index: int) -> Any:
        self.breaks("sample")
        sample = super().__getitem__(index)
        noise = torch.randn(4) if self.noise else 0.0
        return {**sample, "inputs": sample["inputs"] + noise}


class Net(Classifier):
    def __init__(self, program: Program, breaks: Callable[[str], None]) -> None:
        torch.manual_seed(0)
        # A bias before a norm has no gradient but rounding, which AdamW makes large.
        first = [nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8)] if program.norm else [nn.Linear(4, 8)]
        super().__init__(body=nn.Sequential(*first, nn.Tanh(), nn.Dropout(program.dropout), nn.Linear(8, 2)))
        self.breaks = breaks

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.breaks("forward" if self.training else "evaluation")
        return super().forward(inputs, labels)


class BreakingCallback(Callback):
    def __init__(self, breaks: Callable[[str], None]) -> None:
        super().__init__()
        self.breaks = breaks

    def on_train_batch_begin(self, batch: Any, logs: Any) -> None:
        self.breaks("step begin")

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        self.breaks("step end")

    def on_epoch_end(self, epochs: int, logs: Any) -> None:
        self.breaks("epoch end")


class BreakingHook(HookBase):
    def __init__(self, breaks: Callable[[str], None]) -> None:
        self.breaks = breaks

    def before_step(self) -> None:
        self.breaks("step begin")

    def after_step(self) -> None:
        self.breaks("step end")


def by_objects(program: Program, folder: Path, breaks: Breaks, *, resume: bool = False) -> Trainer:
    schedule = program.schedule and {"name_": program.schedule, **SCHEDULES[program.schedule]}
    config = quiet(
        folder, batch_size=program.batch, gradient_accumulation_steps=program.accumulation, num_epochs=program.epochs,
        max_steps=program.limit, dataloader_drop_last=program.drop_last, dataloader_shuffle=program.shuffle,
        dataloader_num_workers=program.workers, lr=0.05,
        optimizer={"name_": program.optimizer, "fused": FUSED["objects"], **OPTIMIZERS[program.optimizer]},
        lr_scheduler_type=schedule, max_grad_norm=program.clip, ema=program.ema and {"decay": program.ema},
        eval_strategy="step" if program.evaluates_every else "no", eval_steps=program.evaluates_every,
        eval_batch_size=4, save_steps=program.saves_every, log_steps=1, resume_from_checkpoint=resume or None,
    )  # fmt: skip
    data = Data(program.samples, program.noise, breaks)
    return Trainer(Net(program, breaks), config, data, points(11, seed=1), callbacks=[BreakingCallback(breaks)])


def by_config_file(program: Program, folder: Path, breaks: Breaks, *, resume: bool = False) -> DefaultTrainer:
    schedule = LazyCall(lr_scheduler.ConstantLR)(factor=1.0)
    if program.schedule:
        schedule = LazyCall(getattr(lr_scheduler, program.schedule))(**SCHEDULES[program.schedule])
    cfg = file_config(
        folder, lambda: Net(program, breaks), lambda: Data(program.samples, program.noise, breaks), None,
        train_micro_batch_size=program.batch, num_accumulation_steps=program.accumulation, log_period=1,
        resume=resume, **({"train_iter": program.limit} if program.limit else {"train_epoch": program.epochs}),
        scheduler=schedule, ema=program.ema and {"decay": program.ema}, checkpointer={"period": program.saves_every},
        input_placement_device="cpu", topk=[1],
    )  # fmt: skip
    cfg._set_flag("allow_objects", True)
    cfg.dataloader.train.update(num_workers=program.workers, sampler=partial(CyclicSampler, shuffle=program.shuffle))
    params = {"clip_grad_max_norm": program.clip} if program.clip else {}
    cfg.optim = LazyCall(getattr(torch.optim, program.optimizer))(
        params=params, lr=0.05, fused=FUSED["config files"], **OPTIMIZERS[program.optimizer]
    )
    if program.evaluates_every:
        cfg.dataloader.test = [DataLoader(points(11, seed=1), 4)]
        cfg.train.evaluation.update(evaluator=ClsEvaluator(topk=(1,)), eval_period=program.evaluates_every)
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([BreakingHook(breaks)])
    return trainer


APIS: dict[str, Callable[..., Any]] = {"objects": by_objects, "config files": by_config_file}


def outcome(trainer: Any, folder: Path) -> dict[str, Any]:
    """What two runs that are equal have in common."""
    return {
        "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
        "losses": (folder / "losses.csv").read_text(),
        "rows": [
            {name: value for name, value in json.loads(line).items() if not MEASURED.search(name)}
            for line in (folder / "metrics.json").read_text().splitlines()
        ],
    }


def at_share(share: float, breaks: Breaks, place: str, first: int = 1) -> int | None:
    """A call of this place that every rank makes, not before ``first``; None if there is none."""
    number = min(all_gather_object(breaks.calls[place]))
    return None if number < first else first + int(share * (number + 1 - first))


def trained(program: Program, api: str, base: str) -> dict[str, dict[str, Any]]:
    """The outcomes of the three runs on this rank."""
    new, found = APIS[api], dict[str, dict[str, Any]]()

    whole = Breaks()
    trainer = new(program, Path(base, "whole"), whole)
    trainer.train()
    found["whole"] = outcome(trainer, Path(base, "whole"))

    saved = program.saves_every * program.accumulation + 1  # there is a checkpoint
    if stop := at_share(program.stops_at, whole, "step begin", saved):
        with pytest.raises(BrokenError):
            new(program, Path(base, "stopped"), Breaks("step begin", stop)).train()
        trainer = new(program, Path(base, "stopped"), Breaks(), resume=True)
        trainer.train()
        found[f"stopped at step {stop}"] = outcome(trainer, Path(base, "stopped"))

    first = 1 + max(all_gather_object(whole.before[program.place]))
    if program.continues_exactly(api) and (fail := at_share(program.fails_at, whole, program.place, first)):
        breaks = Breaks(program.place, fail)
        trainer = new(program, Path(base, "failed"), breaks)
        with pytest.raises(Exception, match=f"call {fail} of {program.place}"):
            trainer.train()
        breaks.place = None  # on another rank, which has fewer batches, this call was still to come
        trainer.train()
        found[f"failed at call {fail} of {program.place}"] = outcome(trainer, Path(base, "failed"))
    return found


def plain_loop(program: Program, api: str) -> nn.Module:
    """The weights by torch alone: an update takes the mean over the samples of its micro-batches.

    Each operation is that of the library, in its order: where a gradient is nothing but rounding, as before a norm of
    two samples, AdamW makes steps of full size of it.
    """
    model = Net(program, Breaks())
    data = [points(program.samples)[number] for number in range(program.samples)]
    settings = OPTIMIZERS[program.optimizer] | {"lr": 0.05, "fused": FUSED[api]}
    optimizer = getattr(torch.optim, program.optimizer)(model.parameters(), **settings)
    make_schedule = getattr(lr_scheduler, program.schedule) if program.schedule else None
    schedule = make_schedule and make_schedule(optimizer, **SCHEDULES[program.schedule or ""])
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(program.ema)) if program.ema else None
    for batches in updates_of_steps(program, data) if api == "objects" else updates_of_a_cycle(program, data):
        number = sum(map(len, batches))
        for batch in batches:
            inputs = torch.stack([sample["inputs"] for sample in batch])
            labels = torch.tensor([sample["labels"] for sample in batch])
            (model(inputs, labels)["loss"] / (number / len(batch))).backward()
        if program.clip:
            nn.utils.clip_grad_norm_(model.parameters(), program.clip)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        if average is not None:
            average.update_parameters(model)
    return model if average is None else average.module


def updates_of_steps(program: Program, data: list[Any]) -> Iterator[list[list[Any]]]:
    """The micro-batches of each update: those of one epoch. A step has one of each rank; steps may be limited."""
    size, done = program.batch * program.ranks, 0
    for _ in range(program.epochs):
        steps = [data[at : at + size] for at in range(0, len(data), size)]
        if program.drop_last and len(steps[-1]) < size:
            del steps[-1]
        steps = steps[: None if program.limit is None else max(0, program.limit - done)]
        done += len(steps)
        for at in range(0, len(steps), program.accumulation):
            window = [sample for step in steps[at : at + program.accumulation] for sample in step]
            yield [window[at : at + program.batch] for at in range(0, len(window), program.batch)]


def updates_of_a_cycle(program: Program, data: list[Any]) -> Iterator[list[list[Any]]]:
    """The micro-batches of each update: the next samples of a cycle of epochs."""
    size = program.batch * program.ranks * program.accumulation
    number = program.limit or -(-program.epochs * len(data) // size)
    for first in range(0, number * size, size):
        window = [data[at % len(data)] for at in range(first, first + size)]
        yield [window[at : at + program.batch] for at in range(0, size, program.batch)]


ALWAYS = [*range(8), 140]  # 140: AdamW after norms of two samples, whose gradients are mostly rounding
SEEDS = [pytest.param(seed, marks=[] if seed in ALWAYS else pytest.mark.exhaustive) for seed in range(800)]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_ends_as_its_undisturbed_run_and_as_a_plain_loop(seed: int, api: str, tmp_path: Path) -> None:
    program = Program.drawn(seed)
    print(program)  # shown if the test fails
    if program.ranks > 1:
        ranks = on_ranks(trained, program, api, str(tmp_path), world_size=program.ranks, timeout=120)
    else:
        ranks = [trained(program, api, str(tmp_path))]
    for found in ranks:  # each has running statistics of its own batches
        whole = found["whole"]
        for run, result in found.items():
            for name, weight in whole["weights"].items():
                assert torch.equal(result["weights"][name], weight), f"{run}: {name}"
            assert result["losses"] == whole["losses"], run
            assert result["rows"] == whole["rows"], run
    if program.has_plain_loop:
        expected = plain_loop(program, api).state_dict()
        for name, weight in ranks[0]["whole"]["weights"].items():
            if program.ranks == 1:
                assert torch.equal(weight, expected[name]), f"plain loop: {name}"
            else:  # the processes add up gradients in another order: some units in the last place of weights near 1
                torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-6, msg=f"plain loop: {name}")
