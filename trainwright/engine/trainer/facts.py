"""What a run of the Python API logs about itself: at its start, in ``run.json``, and at its end."""

import logging
import shlex
from collections.abc import Iterable, Mapping, Sized
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from trainwright.engine.step_plan import StepPlan
from trainwright.engine.trainer import loaders, parts
from trainwright.hooks.callbacks import Callback
from trainwright.hooks.timer import SettingNames
from trainwright.optim.schedules import FormulaLR

if TYPE_CHECKING:
    from trainwright.config.settings import TrainingConfig

logger = logging.getLogger("trainwright.engine")


def facts_of_start(
    config: "TrainingConfig",
    plan: StepPlan,
    *,
    train_dataset: Any,
    eval_dataset: Any,
    train_dataloader: Any,
    metrics: Iterable[Any],
    schedule: LRScheduler | None,
) -> dict[str, Any]:
    """The facts that only this API has, by their names in ``RunFacts``."""
    facts = {
        "task": config.task,
        "num_train": _length(train_dataset),
        "num_eval": sum(_length(one) or 0 for one in loaders.each(eval_dataset)) or None,
        "num_left_out": loaders.num_left_out(train_dataloader),
        "iterations_per_epoch": plan.updates_per_epoch,
        "metrics": ", ".join(map(str, metrics)),
        "settings": "" if config.is_by_its_page else config.summary(),
    }
    named = config.lr_scheduler_type
    is_named = isinstance(named, str) and isinstance(schedule, FormulaLR)
    return facts | ({"schedule": f"{named} schedule"} if is_named else {})


def next_commands(config: "TrainingConfig", total_steps: int, callbacks: Iterable[Callback]) -> list[str]:
    """What a user may do after a training."""
    folder = shlex.quote(config.output_dir)
    commands = [] if config.tensorboard is None else [f"tensorboard --logdir {folder}"]
    if not config.save_enabled:
        return commands
    if any(callback.has_ended_run for callback in callbacks):
        longer = "early_stopping=None"
    elif isinstance(config.max_steps, float):
        longer = "max_steps=None"
    elif config.max_steps == total_steps:
        longer = f"max_steps={2 * total_steps}"
    else:
        longer = f"num_epochs={2 * config.num_epochs}"
    return [*commands, f"resume_from_checkpoint=True with {longer} trains it longer"]


def log_dev_run(config: "TrainingConfig", output_dir: str, *, steps: int, is_evaluated: bool) -> None:
    """Log what a ``fast_dev_run`` has done. ``output_dir``: the user's, to which it has written nothing."""
    done = [f"{steps} training {'step' if steps == 1 else 'steps'}"]
    if is_evaluated:
        most = parts.dev_batches(config)
        done.append(f"evaluations of at most {most} {'batch' if most == 1 else 'batches'}")
    if config.save_enabled:
        done.append("checkpoints")
    logger.info(
        "fast_dev_run completed without errors: %s. Nothing was written to %s; the steps have changed the weights.",
        ", ".join(done), output_dir,
    )  # fmt: skip


def _length(dataset: Any) -> int | None:
    return len(dataset) if isinstance(dataset, Sized) else None


def names_of_settings(config: "TrainingConfig", steps_per_epoch: int) -> SettingNames:
    """The settings that the advice at the end of a training names."""
    evaluate = "eval_strategy='step' with eval_steps of more than an epoch"
    if config.eval_steps:
        evaluate = f"a larger eval_steps (now {config.eval_steps})"
    saves: list[tuple[float, str]] = []  # by their number of steps
    periods: Mapping[str, Any] = config.model_checkpoint or {}
    for name, steps in (("every_n_epoch", steps_per_epoch), ("every_n_iteration", 1)):
        if period := periods.get(name):
            saves.append((period * steps, f"a larger {name} of model_checkpoint (now {period})"))
    if config.save_steps:
        share = steps_per_epoch * config.num_epochs if isinstance(config.save_steps, float) else 1
        saves.append((config.save_steps * share, f"a larger save_steps (now {config.save_steps})"))
    return SettingNames(
        workers="dataloader_num_workers",
        no_workers="dataloader_num_workers=0",
        collate="data_collator=lambda batch: batch",
        profile="TrainingConfig(profile=True)",
        save=min(saves)[1] if saves else evaluate,  # evaluations save the best
        evaluate=evaluate,
    )
