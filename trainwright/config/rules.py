"""The rules about settings that their types do not express, of both APIs: rows over the settings.

A rule says why a value is refused, or where two settings contradict each other; each is checked before anything is
built. A setting that has no effect beside another one is a warning of :func:`without_effect`.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath, PureWindowsPath

from trainwright.base.errors import did_you_mean, nearest_of
from trainwright.config.foreign_names import value_hint
from trainwright.config.named_settings import Api, NamedSettings
from trainwright.config.torch_names import CUSTOM, GivenName, TaskType, arguments_fault, find_torch_class, split_name

_Judge = Callable[[NamedSettings], str | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """A row: the text about the first of ``settings``, or None. ``api``: of which settings; None: of both."""

    settings: tuple[str, ...]
    api: Api | None
    judge: _Judge


RULES: list[Rule] = []


def rule(*settings: str, api: Api | None = None) -> Callable[[_Judge], _Judge]:
    """A row of :data:`RULES`."""

    def register(judge: _Judge) -> _Judge:
        RULES.append(Rule(settings, api, judge))
        return judge

    return register


def faults(spec: NamedSettings, refused: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """The name of each setting that a rule refuses, and the text of its error.

    ``refused``: settings with a fault of their own, whose values say nothing.
    """
    for row in RULES:
        if row.api in (None, spec.api) and not set(refused).intersection(row.settings):
            text = row.judge(spec)
            if text is not None:
                yield row.settings[0], text


def without_effect(spec: NamedSettings) -> Iterator[str]:
    """A sentence for each setting that has no effect, because of another one."""
    if spec.init_weights_partial and spec.init_weights_from is None:
        yield f"{spec.where('init_weights_partial')}: True has no effect without {spec.name_of('init_weights_from')}."
    if spec.checkpoint_mirror and not spec.save_enabled:
        why = f"{spec.name_of('save_enabled')}=False"
        yield f"{spec.where('checkpoint_mirror')}: no effect, because {why}: there are no checkpoints to copy."
    compiled = next((name for name in ("graph", "compile_blocks") if getattr(spec, name)), None)
    if spec.graph and spec.compile_blocks:
        why = f"{spec.name_of('graph')}=True compiles the whole update"
        yield f"{spec.where('compile_blocks')}: True has no effect: {why}."
    if compiled is not None and spec.gradient_checkpointing == "offload":
        why = f"{spec.name_of(compiled)}=True compiles the blocks"
        yield f"{spec.where('gradient_checkpointing')}: 'offload' has the effect of True: {why}."
    if spec.api == "config file" and spec.warmup_ratio and not _has_warmup(spec.lr_scheduler):
        name = spec.name_of("lr_scheduler")
        yield (
            f"{spec.where('warmup_ratio')}: {spec.warmup_ratio} has no effect: {name} has no warm-up. Schedules"
            " of trainwright.optim have one, and so has a class of yours with an argument warmup_iter."
        )


def _has_warmup(schedule: object) -> bool:
    """Whether a schedule of a config file gets the number of warm-up iterations; it may be a user's method's."""
    return schedule is None or re.search("warmup_(iter|ratio)", repr(schedule)) is not None


# Settings of both APIs.


@rule("ema")
def _average(spec: NamedSettings) -> str | None:
    ema = spec.ema if isinstance(spec.ema, Mapping) else {}
    for name in ("decay", "warmup", "buffers"):
        if ema.get("average") == "equal" and ema.get(name):
            why = "the statistics are computed at the end" if name == "buffers" else "an equal average has no decay"
            return f"got average='equal' with {name}={ema[name]!r}, but {why}. Give one of them."
    for name in ("gamma", "power"):
        if name in ema and ema.get("warmup") != "timm":
            given = f"warmup={ema['warmup']!r}" if ema.get("warmup") else "no warmup"
            return f"got {name}={ema[name]!r} with {given}. It belongs to 'warmup': 'timm'."
    return None


@rule("unfreeze")
def _moments(spec: NamedSettings) -> str | None:
    for number, stage in enumerate(spec.unfreeze or []):
        if ("step" in stage) == ("epoch" in stage):
            return f"got {dict(stage)!r} as item {number}; give each one either a step or an epoch."
    return None


@rule("overfit_batches", "limit_train_batches", "limit_eval_batches")
def _limits(spec: NamedSettings) -> str | None:
    for name in ("limit_train_batches", "limit_eval_batches"):
        limit = getattr(spec, name)
        if spec.overfit_batches is not None and limit is not None:
            return (
                f"got {spec.overfit_batches} with {spec.name_of(name)}={limit}; it limits training and evaluation."
                " Give one of them."
            )
    return None


@rule("clip_grad_value", "max_grad_norm")
def _clipping(spec: NamedSettings) -> str | None:
    if spec.clip_grad_value is None or spec.max_grad_norm is None:
        return None
    return both_clippings(spec.clip_grad_value, spec.name_of("max_grad_norm"), spec.max_grad_norm)


def both_clippings(value: float, name: str, norm: float) -> str:
    """The text of the error about clipping in two ways. ``name``: of the largest norm."""
    return f"got {value} with {name}={norm}: clip by value or by norm, not by both. Set {name}=None to clip by value."


@rule("max_steps", "num_epochs")
def _length(spec: NamedSettings) -> str | None:
    if spec.max_steps == 0 and spec.num_epochs == 0:
        return f"got 0, and {spec.name_of('num_epochs')} is 0 too; one of them must be greater than 0."
    return None


@rule("gradient_accumulation_steps", "pipeline_parallel_size", "elastic")
def _windows(spec: NamedSettings) -> str | None:
    schedule, why = spec.gradient_accumulation_steps, ""
    if (spec.pipeline_parallel_size or 1) > 1:
        name = spec.name_of("pipeline_parallel_size")
        why = f"{name}={spec.pipeline_parallel_size}, whose schedule has one number of micro-batches"
    elif spec.elastic:
        why = f"{spec.name_of('elastic')}=True, which keeps one number of samples per update"
    return f"got {schedule} with {why}. Give one number." if isinstance(schedule, Mapping) and why else None


# Settings that config files have in another form, or not at all.


def _torch_class(kind: str, spec: NamedSettings, name: str = "", arguments: str = "") -> str | None:
    value = getattr(spec, name or kind)
    if value is None or value == CUSTOM or isinstance(value, GivenName):
        return None
    if isinstance(value, dict) and "name_" not in value:
        return f"got {value!r}, which lacks the key 'name_': {{\"name_\": name, ...}}."
    found, fault = find_torch_class(kind, value)
    also = (getattr(spec, arguments) if arguments else None) or {}
    return fault if found is None else arguments_fault(kind, found, {**split_name(value)[1], **also})


rule("optimizer", api="Python")(partial(_torch_class, "optimizer"))
rule("loss", api="Python")(partial(_torch_class, "loss"))


@rule("lr_scheduler_kwargs", "lr_scheduler", api="Python")
def _arguments(spec: NamedSettings) -> str | None:
    arguments, schedule = spec.lr_scheduler_kwargs, spec.lr_scheduler
    if schedule is None and arguments is not None:
        return f"got {arguments!r} with lr_scheduler=None; these are the arguments of lr_scheduler."
    twice = sorted(set(arguments or {}).intersection(schedule)) if isinstance(schedule, dict) else []
    return f"got {', '.join(twice)}, which lr_scheduler has too. Give one of them." if twice else None


rule("lr_scheduler", "lr_scheduler_kwargs", api="Python")(
    partial(_torch_class, "lr_scheduler", arguments="lr_scheduler_kwargs")
)


@rule("lr_scheduling_steps", "lr_scheduler", api="Python")
def _scheduling(spec: NamedSettings) -> str | None:
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    steps, schedule = spec.lr_scheduling_steps, spec.lr_scheduler
    if steps is None or schedule is None or find_torch_class("lr_scheduler", schedule)[0] is not ReduceLROnPlateau:
        return None
    return (
        f"got {steps} with ReduceLROnPlateau, which is stepped after each evaluation, or without one at the end of"
        " each epoch. Leave it out; eval_strategy='step' with eval_steps evaluates more often."
    )


@rule("lr_scheduler_type", api="Python")
def _type(spec: NamedSettings) -> str | None:
    kind = spec.lr_scheduler_type
    return _torch_class("lr_scheduler", spec, "lr_scheduler_type") if isinstance(kind, dict) else None


@rule("lr_scheduler_type", "warmup_steps", "warmup_ratio", api="Python")
def _warmup(spec: NamedSettings) -> str | None:
    kind = spec.lr_scheduler_type
    has_warmup = kind not in (None, "constant") and not isinstance(kind, dict)
    if has_warmup or not (spec.warmup_steps or spec.warmup_ratio):
        return None
    return f"got {kind!r} with a warm-up; a schedule that has one is needed, for example 'constant_with_warmup'."


@rule("eval_steps", "eval_strategy", api="Python")
def _evaluation(spec: NamedSettings) -> str | None:
    steps, strategy = spec.eval_steps, spec.eval_strategy
    if (strategy == "step") == (steps is not None):
        return None
    if steps is None:
        return "missing; eval_strategy='step' needs it, for example eval_steps=500."
    return f"got {steps} with eval_strategy={strategy!r}; eval_steps needs eval_strategy='step'."


@rule("eval_every_n_epoch", "eval_strategy", api="Python")
def _epochs(spec: NamedSettings) -> str | None:
    epochs, strategy = spec.eval_every_n_epoch, spec.eval_strategy
    if epochs is None or strategy in ("epoch", "eval_epoch"):
        return None
    return f"got {epochs} with eval_strategy={strategy!r}; it needs eval_strategy='epoch'."


@rule("model_checkpoint", api="Python")
def _periods(spec: NamedSettings) -> str | None:
    periods = spec.model_checkpoint
    if periods is None or len(periods) == 1:
        return None
    return f"got {periods!r}; give one of every_n_epoch and every_n_iteration, or None."


_FILES = "training_config.yaml metrics.json metrics.csv losses.csv run.json hardest_samples.csv curves.png log.txt"
_FILES_OF_RUN = (*_FILES.split(), "README.md")


def _folder_fault(example: str, name: str) -> str | None:
    paths = PurePosixPath(name), PureWindowsPath(name)
    is_folder = name == "." and example == "logs"  # logs may be in output_dir itself
    if any(path.anchor or ".." in path.parts or not (path.parts or is_folder) for path in paths):
        return f"got {name!r}; it must be a path inside output_dir, such as {example!r}."
    if paths[0].parts[:1] and paths[0].parts[0] in _FILES_OF_RUN:
        return f"got {name!r}, which is a file of the run; it must be another name, such as {example!r}."
    return None


rule("checkpoints_dir", api="Python")(lambda spec: _folder_fault("checkpoints", spec.checkpoints_dir))
rule("logs_dir", api="Python")(lambda spec: _folder_fault("logs", spec.logs_dir))


@rule("tensorboard", api="Python")
def _comment(spec: NamedSettings) -> str | None:
    comment = (spec.tensorboard or {}).get("comment")
    if not comment or (fault := _folder_fault("digits", comment)) is None:
        return None
    return f"comment: {fault.replace('output_dir', 'logs_dir')}"


@rule("logs_dir", "checkpoints_dir", api="Python")
def _apart(spec: NamedSettings) -> str | None:
    logs, checkpoints = PurePosixPath(spec.logs_dir), PurePosixPath(spec.checkpoints_dir)
    is_above = logs in checkpoints.parents and logs != PurePosixPath(".")
    if checkpoints not in (logs, *logs.parents) and not is_above:
        return None
    return f"got {str(logs)!r}; it must be another folder than checkpoints_dir, and not in it."


@rule("task", api="Python")
def _task(spec: NamedSettings) -> str | None:
    known = TaskType.words()
    if spec.task is None or spec.task in known:
        return None
    return f"got {spec.task!r}. {value_hint('task', spec.task) or did_you_mean(spec.task, known)}"


@rule("device_str", api="Python")
def _device(spec: NamedSettings) -> str | None:
    name = spec.device_str
    if name is None:
        return None
    import torch

    try:
        torch.device(name)
    except RuntimeError:
        device = name.lower().replace("gpu", "cuda")
        near = device if re.fullmatch("cuda(:[0-9]+)?", device) else nearest_of(name, ("cpu", "cuda", "mps", "xpu"))
        hint = value_hint("device_str", name) or ("" if near is None else f"Did you mean {near!r}?")
        return f"got {name!r}; it must be a device such as 'cpu' or 'cuda:0'. {hint}".rstrip()
    return None
