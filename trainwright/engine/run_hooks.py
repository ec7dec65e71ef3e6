"""The hooks of a run, in the order of their calls: one list for both APIs."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from trainwright.base.dist import get_world_size
from trainwright.data.columns import ColumnDataset
from trainwright.engine.folder.record import RunRecord
from trainwright.engine.folder.summary import RunSummary
from trainwright.engine.own_step import OwnStep
from trainwright.engine.run import Run
from trainwright.hooks import FiniteCheck, Float32MatmulPrecision, HookBase, Interruptions
from trainwright.hooks.base import Period
from trainwright.hooks.signals import max_time_of
from trainwright.hooks.stragglers import Stragglers
from trainwright.hooks.tensor_parallel import tensor_parallel_hook
from trainwright.hooks.throughput import Throughput
from trainwright.hooks.timer import Facts, SettingNames
from trainwright.hooks.torch_settings import deterministic_hook
from trainwright.hooks.unfreezing import unfreezing_hook
from trainwright.hooks.weight_average import averaging_hook
from trainwright.parallel.pipeline import pipeline_of


def run_hooks(
    run: Run,
    inner: Iterable[HookBase | None],
    *,
    own_step: OwnStep | None,
    check_period: Period,
    save: Callable[[], None],
    steps_done: Callable[[], int],
    has_passed: Callable[[int, int], bool],
    total_steps: int,
    steps_per_epoch: int | None,
) -> list[HookBase | None]:
    """The hooks that every run needs, with the ``inner`` ones, which a user may change.

    Their slots decide the order of calls. The slots before ``inner`` are the first ones: a hook without a slot, which a
    user has put at the start of ``inner``, keeps its place there.

    Args:
        own_step: for a step of the user's own.
        steps_done: the number of steps before the next iteration, for settings that count steps.
        has_passed: whether the steps so far are more than the first number and, just now, a multiple of the second.
    """
    spec, of_run = run.spec, weakref.proxy(run)
    precision = spec.float32_matmul_precision
    lengths: dict[str, Any] = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
    resume = "--resume" if spec.api == "config file" else "resume_from_checkpoint=True"
    return [
        None if precision is None else Float32MatmulPrecision(precision),
        deterministic_hook(spec.deterministic),
        tensor_parallel_hook(),
        RunRecord(run.folder, lambda: of_run.record()),
        unfreezing_hook(run.model, spec.unfreeze, steps_done, **lengths),
        own_step,
        _throughput(run) if spec.log_throughput else None,
        averaging_hook(run.average, spec.ema, has_passed, run.update_statistics, total_steps),
        *inner,
        FiniteCheck(check_period, spec.non_finite),
        _stragglers(run, check_period),
        RunSummary(spec.output_dir, lambda: of_run.next_commands()),
        Interruptions(run.checkpointer, save, resume=resume, max_time_s=lambda: max_time_of(of_run.spec)),
    ]


def _stragglers(run: Run, check_period: Period) -> HookBase | None:
    if get_world_size() == 1:
        return None
    return Stragglers(check_period, torch.device(run.device), measures_forward=not run.spec.graph)


def _throughput(run: Run) -> HookBase:
    of_run, pipeline = weakref.proxy(run), pipeline_of(run.model)
    return Throughput(
        [run.model] if pipeline is None else pipeline.stages,
        lambda: of_run.update.batch,
        run.spec.gradient_accumulation_steps,
        torch.device(run.device),
    )


def timing_facts(run: Run, names: SettingNames) -> Facts:
    """What the advice at the end of a training needs to know."""
    loader = run.batches.loader
    dataset = getattr(loader, "dataset", None)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return Facts(
        batches=run.spec.gradient_accumulation_steps,
        device=torch.device(run.device).type,
        num_workers=getattr(loader, "num_workers", None),
        reads_batches=isinstance(dataset, TensorDataset | ColumnDataset) or hasattr(dataset, "__getitems__"),
        saves_async=run.checkpointer.asynchronous,
        names=names,
    )
