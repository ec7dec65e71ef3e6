"""What a run logs about itself before it starts, and how its log reaches the console."""

import logging
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

from torch import nn

from trainwright.base.dist import is_main_process
from trainwright.base.notebook import summary
from trainwright.base.terminal import columns_of
from trainwright.config.secrets import redact
from trainwright.events.storage import EventStorage
from trainwright.events.writers.notebook import LossPicture
from trainwright.events.writers.progress import shown_values
from trainwright.hooks.base import HookBase, has_failed
from trainwright.models.checkpoint_files import class_name
from trainwright.parallel.pipeline import ModelSize, pipeline_of

logger = logging.getLogger("trainwright.engine")

_MAX_PARTS = 4  # of the model that are shown
_NOT_RESULTS = ("lr", "grad_norm")


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


def described_stages(model: nn.Module) -> str | None:
    """The pipeline stages of this process and their parameters; None: the model is complete."""
    pipeline = pipeline_of(model)
    if pipeline is None:
        return None
    size = ModelSize.of(model)
    names = "; ".join(map(str, pipeline.stages))
    return f"{names}: {size.total:,} parameters ({_bytes(size.num_bytes)}) in this process"


def described_optimizers(optimizers: Mapping[str, Any], schedule: str) -> str:
    """The class and the learning rates of each, and the schedule, of one or of all."""
    texts = []
    for name, one in optimizers.items():
        found = (group.get("initial_lr", group.get("lr")) for group in one.param_groups)  # some optimizers have none
        rates = sorted({rate for rate in found if rate is not None})
        lr = f", lr {' to '.join(f'{rate:.3g}' for rate in dict.fromkeys((rates[0], rates[-1])))}" if rates else ""
        texts.append(f"{'' if name == 'optimizer' else name + ': '}{type(one).__name__}{lr}")
    return "; ".join(texts) + (f"{';' if len(texts) > 1 else ','} {schedule}" if schedule else "")


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

    ``commands()`` returns these commands.
    """

    slot = "show"
    in_copies = False

    def __init__(self, folder: str, commands: Callable[[], Sequence[str]]) -> None:
        self._folder, self._commands = folder, commands
        self._starts_at_end = False  # only the final evaluation and save are left to do

    def before_train(self) -> None:
        self._starts_at_end = self.trainer.start_iter >= self.trainer.max_iter  # which a stop changes

    def after_train(self) -> None:
        trainer = self.trainer
        has_ended = self._starts_at_end or trainer.iterations_done > trainer.start_iter
        if not is_main_process() or has_failed(trainer) or not has_ended:
            return
        rows = {
            **_results(trainer.hooks, trainer.storage),
            "Stopped": trainer.stop_reason,
            "Skipped": _skipped(trainer.storage, trainer.iterations_done),
            "Folder": self._folder,
            "Next": list(self._commands()),
        }
        logger.info("%s", table(f"Finished after iteration {trainer.iterations_done}", rows))


def _results(hooks: Iterable[HookBase], storage: EventStorage) -> dict[str, object]:
    best = [result.text for hook in hooks if (result := hook.best_result()) is not None]
    last = {n: found for n, found in storage.latest_with_smoothing_hint().items() if n not in _NOT_RESULTS}
    texts = [f"{name} {value}" for name, value in shown_values(last).items()]
    if storage.evaluated_weights and not storage.results.isdisjoint(last):
        texts.append(f"evaluated: {storage.evaluated_weights}")
    return {"Best": best or None, "Last": ", ".join(texts)}


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
    rows, done = trainer.run.rows(), trainer.iterations_done
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
