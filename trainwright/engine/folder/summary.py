"""What a run logs about itself before it starts, and how its log reaches the console."""

import logging
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from trainwright.config.secrets import redact
from trainwright.events.storage import EventStorage
from trainwright.events.writers.notebook import LossPicture
from trainwright.events.writers.progress import shown_values
from trainwright.hooks.base import HookBase, has_failed
from trainwright.models.checkpoint_files import class_name
from trainwright.notebook import summary
from trainwright.optim.named import NamedOptimizers
from trainwright.parallel.dist import get_data_parallel_size, get_world_size, is_main_process
from trainwright.parallel.mesh import current_mesh
from trainwright.parallel.pipeline import ModelSize, pipeline_of
from trainwright.terminal import columns_of

logger = logging.getLogger("trainwright.engine")

_MAX_PARTS = 4  # of the model that are shown
_NOT_RESULTS = ("lr", "grad_norm")


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the start of a run shows, in the terms of both APIs. None: unknown, or not shown.

    Attributes:
        schedule: the name of the learning-rate schedule, or those of several.
        folder: the run's folder.
        batch_size: samples of a micro-batch of one process.
        accumulation: micro-batches of an update.
        first_iter, last_iter: the iterations to do, the first one excluded: ``first_iter`` are done.
        num_train, num_eval: samples of the data.
        num_left_out: samples that an epoch leaves out, because its last batch would not be complete.
        iterations_per_epoch: a fraction where an epoch ends within an iteration.
        precision: of the computations.
        task, metrics: of the Python API.
        settings: those that differ from the defaults, as the user writes them.
    """

    model: nn.Module
    optimizer: Any
    schedule: str | None
    device: torch.device
    folder: str
    batch_size: int
    accumulation: int
    first_iter: int
    last_iter: int
    num_train: int | None
    num_eval: int | None
    iterations_per_epoch: float | Fraction | None = None
    precision: str | None = None
    mode: str = "eager"
    task: str | None = None
    metrics: str | None = None
    settings: str = ""
    num_left_out: int = 0


def log_start(facts: RunFacts) -> None:
    """Log the model, the data, the batches, the length, the optimizer and the settings of a run, as one table."""
    logger.info("%s", table("Training", _rows(facts)))


def _rows(facts: RunFacts) -> dict[str, object]:
    mesh, ranks = current_mesh(), get_data_parallel_size()
    global_batch = facts.batch_size * facts.accumulation * ranks
    processes = "1 process" if ranks == 1 else f"{ranks} processes"
    if get_world_size() != ranks:
        processes = f"{ranks} data rank{'s' if ranks > 1 else ''}"
    data = [
        f"{number:,} {name}"
        for name, number in (("to train", facts.num_train), ("to evaluate", facts.num_eval))
        if number
    ]
    left_out = f"; each epoch leaves out {facts.num_left_out:,}: dataloader_drop_last" if facts.num_left_out else ""
    per_epoch = facts.iterations_per_epoch
    epochs = f" ({float(facts.last_iter / per_epoch):.1f} epochs)" if per_epoch else ""
    batch = f"{global_batch:,} samples = {facts.batch_size} x {facts.accumulation} accumulation x {processes}"
    return {
        "Task": facts.task,
        "Model": described_model(facts.model),
        "Stage": _described_stages(facts.model),
        "Data": f"{', '.join(data)} (samples{left_out})" if data else None,
        "Iterations": f"{facts.first_iter + 1} to {facts.last_iter}{epochs}",
        "Batch": batch,
        "Layout": f"{mesh.layout.world_size} processes: {mesh.layout}" if mesh else None,
        "Optimizer": _described_optimizer(facts.optimizer, facts.schedule),
        "Device": ", ".join(filter(None, [str(facts.device.type), facts.precision, f"{facts.mode} mode"])),
        "Metrics": facts.metrics,
        "Folder": facts.folder,
        "Settings": facts.settings,
    }


def described_model(model: nn.Module) -> str:
    """The class, the parameters and their memory, and the largest of its parts.

    >>> described_model(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    'Sequential: 58 parameters (232 B): 40 in Linear 0, 18 in Linear 1'
    """

    pipeline = pipeline_of(model)
    size = ModelSize.of(model) if pipeline is None else pipeline.complete_size  # modules of other stages are absent
    frozen = "" if size.trainable == size.total else f", {size.trainable:,} trainable"
    parts = sorted(((number, name) for name, number in size.parts.items()), reverse=True)
    shown = [f"{number:,} in {name}" for number, name in parts[:_MAX_PARTS] if number]
    others = sum(number for number, _ in parts[_MAX_PARTS:])
    shown += [f"{others:,} in others"] if others else []
    text = f"{class_name(model)}: {size.total:,} parameters ({_bytes(size.num_bytes)}{frozen})"
    return text + (f": {', '.join(shown)}" if shown else "")


def _described_stages(model: nn.Module) -> str | None:
    """The pipeline stages of this process and their parameters; None: the model is complete."""
    pipeline = pipeline_of(model)
    if pipeline is None:
        return None
    size = ModelSize.of(model)
    names = "; ".join(map(str, pipeline.stages))
    return f"{names}: {size.total:,} parameters ({_bytes(size.num_bytes)}) in this process"


def _described_optimizer(optimizer: Any, schedule: str | None) -> str:
    several = optimizer.optimizers if isinstance(optimizer, NamedOptimizers) else {"": optimizer}
    texts = []
    for name, one in several.items():
        found = (group.get("initial_lr", group.get("lr")) for group in one.param_groups)  # some optimizers have none
        rates = sorted({rate for rate in found if rate is not None})
        lr = f", lr {' to '.join(f'{rate:.3g}' for rate in dict.fromkeys((rates[0], rates[-1])))}" if rates else ""
        texts.append(f"{name + ': ' if name else ''}{type(one).__name__}{lr}")
    return "; ".join(texts) + (f", {schedule}" if schedule else "")


def table(title: str, rows: Mapping[str, object]) -> str:
    """A title and the rows that have a value. Long text continues below, aligned; a list has an item a line."""
    rows = {name: value for name, value in rows.items() if value}
    width = max((len(name) for name in rows), default=0)
    room = columns_of(sys.stdout) - width - 4
    lines = [title]
    for name, value in rows.items():
        shown = [str(line) for line in value] if isinstance(value, list) else _wrapped(str(value), room)
        lines += [f"  {place:<{width}}  {text}" for place, text in zip(chain([name], repeat("")), shown, strict=False)]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


class RunSummary(HookBase):
    """At the end of a training, log its best and last metrics, its folder, and the commands that use its results.

    ``commands()`` returns these commands; register this hook behind those that evaluate, save and write.
    """

    in_copies = False

    def __init__(self, folder: str, commands: Callable[[], Sequence[str]]) -> None:
        self._folder, self._commands = folder, commands

    def after_train(self) -> None:
        trainer = self.trainer
        if not is_main_process() or has_failed(trainer) or trainer.iterations_done <= trainer.start_iter:
            return
        rows = {
            **_results(trainer.hooks, trainer.storage),
            "Skipped": _skipped(trainer.storage, trainer.iterations_done),
            "Folder": self._folder,
            "Next": list(self._commands()),
        }
        logger.info("%s", table(f"Finished after iteration {trainer.iterations_done}", rows))


def _results(hooks: Iterable[HookBase], storage: EventStorage) -> dict[str, object]:
    """The best and the last metrics."""
    best = next(filter(None, (hook.best_result() for hook in hooks)), None)
    last = {n: found for n, found in storage.latest_with_smoothing_hint().items() if n not in _NOT_RESULTS}
    return {
        "Best": None if best is None else [best.text],
        "Last": ", ".join(f"{name} {value}" for name, value in shown_values(last).items()),
    }


def _skipped(storage: EventStorage, iterations_done: int) -> str | None:
    """How many steps were skipped because a loss or gradient was not finite; None if none was."""
    history = storage.histories().get("skipped_update")
    if history is None or not history.total:
        return None
    number, checked = round(history.total), round(history.total / history.global_avg())
    # An update may have steps of several optimizers, and earlier ones none that was checked.
    more = "; no weight was changed" if number == checked >= iterations_done else ""
    return f"{number:,} of {checked:,} optimizer steps, whose loss or gradients were not finite{more}"


def html_of(trainer: Any) -> str:
    """A trainer in a notebook: its run, how far it is, its results."""
    rows, done = _rows(trainer.run.facts()), trainer.iterations_done
    storage = vars(trainer).get("storage")  # None: nothing was trained yet
    if done and storage is not None:
        rows["Iterations"] = f"{done:,} of {max(done, trainer.max_iter):,} done"
        rows |= _results(trainer.hooks, storage)
    rows |= {name: rows.pop(name) for name in ("Folder", "Settings")}  # last
    shown = {name: redact(one[0] if isinstance(one, list) else str(one)) for name, one in rows.items() if one}
    return summary(type(trainer).__name__, shown, "" if storage is None else LossPicture().html(storage))


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def log_recomputed(names: Sequence[str]) -> None:
    """Log the blocks that are recomputed in the backward pass."""
    if names:
        logger.info("The backward pass recomputes %d blocks: %s.", len(names), ", ".join(names))
    else:
        logger.warning(
            "Activation checkpointing: the model has no repeated blocks (children of nn.ModuleList or"
            " nn.Sequential with"
            " parameters) and no set_activation_checkpoint, so nothing is recomputed."
        )
