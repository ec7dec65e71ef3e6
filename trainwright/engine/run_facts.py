"""What advice about time has to know of a run, and how each door spells the settings that cure."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from trainwright.data.columns import ColumnDataset
from trainwright.hooks.advice import Facts, SettingNames
from trainwright.hooks.callbacks import Callback
from trainwright.hooks.overrides import is_overridden

_OF_ALL_HOOKS = {
    "ProfileHook": "the profiler, which is there for a few iterations: leave it out otherwise",
    "Interruptions": "agreeing with the other processes: it waits for the slowest of them, so give each as much to do",
}
_IS_WRITING = "writing lines and figures"
_IS_LOOKING = "looking for values that are not finite"
OF_OBJECTS = SettingNames(
    workers="dataloader_num_workers",
    no_workers="dataloader_num_workers=0",
    collate="data_collator=lambda batch: batch",
    metrics="metrics=[], which leaves it out of evaluations too,",
    graph="TrainingConfig(graph=True)",
    batch_size="batch_size",
    profile="TrainingConfig(profile=True)",
)
OF_FILES = SettingNames(
    workers="num_workers of dataloader.train",
    no_workers="num_workers=0 of dataloader.train",
    graph="graph.enabled=True",
    batch_size="train.train_micro_batch_size",
    asynchronous="train.checkpointer.asynchronous=True",
    profile="train.profile=True",
)
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
_OF_EACH_BATCH = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


def facts_of_objects(trainer: Any) -> Facts:
    """Those of a :class:`~trainwright.Trainer`."""
    config = trainer.config
    logs = "a larger log_steps" if config.log_steps is None else f"a larger log_steps (now {config.log_steps})"
    hooks = {
        "RunCallbacks": _about_callbacks(list(trainer.callbacks), config.print_steps),
        "TrainMetrics": f"the metric of the training: {logs} computes it less often, and metrics=[] not at all",
        "WriteSteps": f"{_IS_WRITING}: {logs} does it less often",
        "FiniteCheck": f"{_IS_LOOKING}: {logs} does it less often",
        "ScheduleSteps": "the schedule: a larger lr_scheduling_steps steps it less often",
        **_OF_ALL_HOOKS,
    }
    per_epoch = trainer._plan.steps_per_epoch
    names = replace(OF_OBJECTS, save=_saves_of(config, per_epoch), evaluate=_evaluations_of(config), hooks=hooks)
    batches = config.gradient_accumulation_steps
    return _facts(trainer, trainer.train_dataloader, names, batches=batches, is_graph=bool(config.graph))


def facts_of_files(trainer: Any) -> Facts:
    """Those of a :class:`~trainwright.DefaultTrainer`."""
    train = trainer.cfg.train
    logs = f"a larger train.log_period (now {train.log_period})"
    hooks = {
        "PeriodicWriter": f"{_IS_WRITING}: {logs} does it less often",
        "FiniteCheck": f"{_IS_LOOKING}: {logs} does it less often",
        "LRScheduler": "the schedule: another train.scheduler may be cheaper",
        **_OF_ALL_HOOKS,
    }
    by_epochs, by_period = "train.checkpointer.save_model_after_n_epoch", "train.checkpointer.period"
    save = by_epochs if train.checkpointer.get("save_model_after_n_epoch") else by_period
    by_epochs, by_period = "train.evaluation.eval_after_n_epoch", "train.evaluation.eval_period"
    evaluate = by_epochs if train.evaluation.get("eval_after_n_epoch") else by_period
    names = replace(OF_FILES, save=f"a larger {save}", evaluate=f"a larger {evaluate}", hooks=hooks)
    batches = int(train.get("num_accumulation_steps") or 1)
    return _facts(trainer, trainer.train_loader, names, batches=batches, is_graph=bool(trainer.cfg.graph.enabled))


def _facts(trainer: Any, loader: Any, names: SettingNames, *, batches: int, is_graph: bool) -> Facts:
    return Facts(
        batches=batches,
        device=torch.device(trainer.device).type,
        num_workers=getattr(loader, "num_workers", None),
        reads_batches=_reads_batches(getattr(loader, "dataset", None)),
        is_graph=is_graph,
        can_fuse=_can_fuse(trainer.optimizer),
        saves_beside=bool(getattr(trainer.checkpointer, "asynchronous", True)),
        names=names,
    )


# Which setting is in force.


def _saves_of(config: Any, steps_per_epoch: int) -> str:
    """The most frequent of those that save; that of evaluations, which save the best, where there is no other."""
    found: list[tuple[float, str]] = []
    periods = config.model_checkpoint or {}
    for name, steps in (("every_n_epoch", steps_per_epoch), ("every_n_iteration", 1)):
        if period := periods.get(name):
            found.append((period * steps, f"a larger {name} of model_checkpoint (now {period})"))
    if config.save_steps:
        share = steps_per_epoch * config.num_epochs if isinstance(config.save_steps, float) else 1
        found.append((config.save_steps * share, f"a larger save_steps (now {config.save_steps})"))
    return min(found)[1] if found else _evaluations_of(config)


def _evaluations_of(config: Any) -> str:
    if config.eval_steps:
        return f"a larger eval_steps (now {config.eval_steps})"
    return "eval_strategy='step' with eval_steps of more than an epoch"


def _about_callbacks(callbacks: list[Callback], print_steps: int | None) -> str:
    """Those that do something at each step, and the settings of ours."""
    at_each_step = [each for each in callbacks if any(is_overridden(each, name) for name in _OF_EACH_BATCH)]
    names = list(dict.fromkeys(type(each).__name__ for each in at_each_step or callbacks))
    cures = list(_cures_of(names, print_steps))
    if any(name not in ("PrintCallback", "ProgressBarCallback") for name in names):
        cures.append("do less in them, or not at each step")
    return f"callbacks ({', '.join(names)}): {'; '.join(cures)}" if names else "callbacks"


def _cures_of(names: list[str], print_steps: int | None) -> Iterator[str]:
    if print_steps is not None and "PrintCallback" in names:
        yield f"a larger print_steps (now {print_steps}) prints fewer lines"
    if "ProgressBarCallback" in names:
        yield "progress_bar=False leaves the bar out"


# What the parts are.


def _reads_batches(dataset: Any) -> bool:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return isinstance(dataset, TensorDataset | ColumnDataset) or hasattr(dataset, "__getitems__")


def _can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    kinds: list[Callable[..., Any]] = [getattr(torch.optim, name) for name in _FUSED]
    return type(optimizer) in kinds and not any(group.get("fused") for group in optimizer.param_groups)
