"""The hooks of a run, in the order of their calls: one list for both APIs."""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from trainwright.base.dist import get_world_size, is_main_process
from trainwright.base.errors import ConfigTypeError
from trainwright.data.columns import ColumnDataset
from trainwright.engine.best_metric import BestMetric
from trainwright.engine.folder.record import RunRecord
from trainwright.engine.folder.summary import RunSummary
from trainwright.engine.run import Run
from trainwright.hooks import (
    BestCheckpointer,
    CallbackHook,
    EvalHook,
    FiniteCheck,
    Float32MatmulPrecision,
    HookBase,
    Interruptions,
    IterationTimer,
    PeriodicWriter,
)
from trainwright.hooks.due import Period
from trainwright.hooks.profile import profile_hook
from trainwright.hooks.signals import max_time_of
from trainwright.hooks.stragglers import Stragglers
from trainwright.hooks.tensor_parallel import tensor_parallel_hook
from trainwright.hooks.throughput import Throughput
from trainwright.hooks.timer import Facts
from trainwright.hooks.torch_settings import deterministic_hook
from trainwright.hooks.unfreezing import unfreezing_hook
from trainwright.hooks.weight_average import averaging_hook
from trainwright.hooks.windows import WindowSchedule
from trainwright.parallel.pipeline import pipeline_of

logger = logging.getLogger("trainwright.engine")


def run_hooks(run: Run) -> list[HookBase | None]:
    """The hooks of a run: those of the trainer's ``build_hooks``, which a user may change, and those of every run.

    Their slots decide the order of calls. The slots before the user's are the first ones: a hook without a slot, which
    a user has put at the start of the list, keeps its place there.
    """
    spec, me = run.spec, weakref.proxy(run)
    precision, save = spec.float32_matmul_precision, (lambda: me.save()) if spec.save_enabled else (lambda: None)
    run.best_weights.check()
    total_steps, steps_per_epoch = run.planned_length()
    lengths: dict[str, Any] = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
    resume = "--resume" if spec.api == "config file" else "resume_from_checkpoint=True"
    hooks = run.trainer.build_hooks()
    if not isinstance(hooks, list | tuple):
        raise ConfigTypeError(
            f"{run.overrides.kind}.build_hooks returned {type(hooks).__name__}; it must return a list of hooks, for"
            " example [*super().build_hooks(), MyHook()]."
        )
    is_own = run.overrides.has("build_hooks") and not run.overrides.uses("build_hooks")  # super().build_hooks()
    is_own &= not (run.trainer.is_copy or run.overrides.has("train"))
    if is_own and any(hooks) and not any(map(_is_of_library, hooks)):
        logger.warning(
            "%s.build_hooks returned none of the library's hooks, which save, evaluate, log and set the learning rate."
            " Write [*super().build_hooks(), %s()] to have these, too.",
            run.overrides.kind, next(type(hook).__name__ for hook in hooks if hook),
        )  # fmt: skip
    return [
        None if precision is None else Float32MatmulPrecision(precision),
        deterministic_hook(spec.deterministic),
        tensor_parallel_hook(),
        RunRecord(run.folder, lambda: me.record(), run.checkpointer.after_saves),
        unfreezing_hook(run.model, spec.unfreeze, lambda: me.steps_done(), **lengths),
        WindowSchedule(spec.windows, run.samples_of_window) if spec.windows.is_scheduled else None,
        run.own_step_hook(),
        _throughput(run) if spec.log_throughput else None,
        averaging_hook(run.average, spec.ema, lambda *given: me.has_passed(*given), run.update_statistics, total_steps),
        *with_parts(hooks, [run.calls, *run.listed_hooks]),
        CallbackHook(after_end=lambda trainer: None if trainer.has_failed else me.best_weights.use()),
        FiniteCheck(run.check_is_due, spec.non_finite),
        _stragglers(run, run.check_is_due),
        RunSummary(spec.output_dir, lambda: me.next_commands()),
        Interruptions(run.checkpointer, save, resume=resume, max_time_s=lambda: max_time_of(me.spec)),
    ]


def _is_of_library(hook: HookBase | None) -> bool:
    """Whether a hook is one of the library's, or of a class that is derived from one."""
    kinds = type(hook).__mro__
    return any(one.__module__.startswith("trainwright.") and one is not HookBase for one in kinds)


def with_parts(hooks: Sequence[HookBase | None], own: Sequence[HookBase]) -> list[HookBase | None]:
    """``hooks`` of a user's ``build_hooks`` with those of the settings, before the writers, if it has none."""
    missing = [hook for hook in own if not any(hook is there for there in hooks)]
    shown = (number for number, hook in enumerate(hooks) if hook is not None and hook.slot in ("show", "stop"))
    place = next(shown, len(hooks))
    return [*hooks[:place], *missing, *hooks[place:]]


def inner_hooks(run: Run) -> list[HookBase | None]:
    """The hooks that the trainer's ``build_hooks`` returns by default."""
    spec, me = run.spec, weakref.proxy(run)
    if run.has_evaluation:
        evaluate = run.calls.evaluating(lambda: me.evaluate_in_training())
        run.eval_hook = EvalHook(run.eval_is_due, evaluate, prefix=run.eval_prefix)
    run.write_hook = PeriodicWriter(lambda: me.trainer.build_writers(), run.log_is_due, epoch_of=run.epoch_of())
    saved = _best_checkpointers(run)
    best = saved[0] if saved else None
    hooks = [
        IterationTimer(facts=lambda trainer: timing_facts(trainer.run)),
        *run.step_hooks(),
        run.save_hook(),
        run.eval_hook if run.evaluates else None,  # the final evaluation may take long: after the save
        *run.after_evaluation(),
        *saved,
        run.calls,
        *run.listed_hooks,
        profile_hook(spec.profile, run.folder.path),
        *run.progress_lines(best),
        run.write_hook if is_main_process() else None,
        *run.more_hooks(),
    ]
    return [hook for hook in hooks if hook is not None]


def _metrics_of_best(run: Run) -> list[BestMetric]:
    """That of ``metric_for_best_model``, and those of ``save_best``; without evaluations, those of the training."""
    spec, metric = run.spec, run.best_metric
    found, left_out = list[BestMetric](), False
    if spec.save_enabled and run.evaluates:
        found = [metric, *metric.others()]
    elif spec.save_enabled and spec.is_set("metric_for_best_model") and metric.is_of_training:
        others = metric.others()
        found = [metric, *(one for one in others if one.is_of_training)]
        left_out = len(found) <= len(others)
    for setting, has_effect in (("save_top_k", bool(found)), ("save_best", bool(found) and not left_out)):
        if (value := spec.as_set[setting]) is not None and not has_effect:
            reason = "evaluated" if spec.save_enabled else "saved"
            logger.warning("%s=%r has no effect: nothing is %s.", spec.where(setting), value, reason)
    return found


def _best_checkpointers(run: Run) -> list[BestCheckpointer]:
    """One for each metric: after each evaluation; of the training without evaluations, after each epoch."""
    spec, me = run.spec, weakref.proxy(run)

    def on_missing(one: BestMetric, *, is_needed: bool) -> Callable[[], str | None]:
        answer: Callable[[Mapping[str, Any]], str | None] = one.line_for
        if is_needed or one.unknown_result() is not None:
            answer = one.raise_missing
        return lambda: answer(me.trainer.last_eval_results)

    def hook(one: BestMetric, *, is_first: bool) -> BestCheckpointer:
        one.check_mode()
        return BestCheckpointer(
            run.eval_is_due if run.evaluates else run.epoch_ends(),
            run.checkpointer,
            one.key,
            one.mode(),
            "model_best" if is_first else one.file_name,
            on_missing=on_missing(one, is_needed=is_first and spec.load_best_model_at_end),
            only_when_due=not run.evaluates,
            is_of_training=one.is_of_training,
            top_k=(spec.save_top_k or 1) if is_first else 1,
            number=(lambda: me.name_of_save()) if is_first and run.name_of_save is not None else None,
        )

    return [hook(one, is_first=number == 0) for number, one in enumerate(_metrics_of_best(run))]


def _stragglers(run: Run, check_period: Period) -> HookBase | None:
    if get_world_size() == 1:
        return None
    return Stragglers(check_period, torch.device(run.device), measures_forward=not run.spec.graph)


def _throughput(run: Run) -> HookBase:
    of_run, pipeline, windows = weakref.proxy(run), pipeline_of(run.model), run.spec.windows
    return Throughput(
        [run.model] if pipeline is None else pipeline.stages,
        lambda: of_run.update.batch,
        lambda: windows.at(of_run.trainer.iter),
        torch.device(run.device),
    )


def timing_facts(run: Run) -> Facts:
    """What the advice at the end of a training needs to know."""
    loader = run.batches.loader
    dataset = getattr(loader, "dataset", None)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    is_in_memory = isinstance(dataset, TensorDataset | ColumnDataset)
    return Facts(
        batches=run.spec.windows.largest,
        device=torch.device(run.device).type,
        num_workers=getattr(loader, "num_workers", None),
        reads_batches=is_in_memory or hasattr(dataset, "__getitems__"),
        is_in_memory=is_in_memory,
        saves_async=run.checkpointer.asynchronous,
        names=run.setting_names,
    )
