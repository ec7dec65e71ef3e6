"""Checks of several settings together, and values that follow from other settings. Each check lists its fields."""

from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from trainwright.config.enums import CUSTOM, GivenName, TaskType
from trainwright.config.errors import did_you_mean
from trainwright.config.torch_names import arguments_fault, find_torch_class
from trainwright.config.training.field_resolution import Draft

_WITHOUT_WARMUP = (None, "constant")
_INSIDE_OPTIMIZER = {"learning_rate": "lr", "weight_decay": "weight_decay"}


def _check_rates(draft: Draft) -> None:
    """The rates of an optimizer with arguments are the settings of these names."""
    arguments = draft.settings["optimizer"]
    for field, name in _INSIDE_OPTIMIZER.items():
        if not isinstance(arguments, dict) or arguments.get(name) is None:
            continue
        inner = arguments[name]
        if draft.is_given(field) and draft.given[field] != inner:
            draft.refuse(
                field,
                f"got {draft.given[field]!r}, but optimizer has {name}={inner!r}: these are two names of one setting."
                " Give one of them.",
            )
        elif isinstance(inner, bool) or not isinstance(inner, int | float) or not inner >= 0:
            draft.refuse("optimizer", f"got {name}={inner!r}; it must be a number >= 0.")
        else:
            draft.settings[field] = inner


def _check_optimizer(draft: Draft) -> None:
    _check_torch_name(draft, "optimizer", "optimizer")


def _check_loss(draft: Draft) -> None:
    if draft.settings["loss"] is not None:
        _check_torch_name(draft, "loss", "loss")


def _check_torch_name(draft: Draft, field: str, kind: str, also: dict[str, Any] | None = None) -> None:
    given, value = draft.given.get(field), draft.settings[field]
    if isinstance(given, GivenName):
        draft.settings[field] = given  # pydantic has made a plain text of it
        return
    if value == CUSTOM:
        return
    if isinstance(value, dict) and "name_" not in value:
        draft.refuse(field, f"got {value!r}, which lacks the key 'name_': {{\"name_\": name, ...}}.")
        return
    _, fault = find_torch_class(kind, value)
    if fault is None:
        fault = arguments_fault(kind, {**(value if isinstance(value, dict) else {"name_": value}), **(also or {})})
    if fault is not None:
        draft.refuse(field, fault)


def _check_lr_scheduler(draft: Draft) -> None:
    name, arguments = draft.settings["lr_scheduler"], draft.settings["lr_scheduler_kwargs"]
    if name is None:
        if arguments is not None:
            draft.refuse("lr_scheduler_kwargs", f"got {arguments!r} with lr_scheduler=None; it says what they are for.")
        return
    twice = sorted(set(arguments or {}).intersection(name)) if isinstance(name, dict) else []
    if twice:
        draft.refuse("lr_scheduler_kwargs", f"got {', '.join(twice)}, which lr_scheduler has too. Give one of them.")
    else:
        _check_torch_name(draft, "lr_scheduler", "lr_scheduler", arguments)


def _check_scheduling_steps(draft: Draft) -> None:
    """A schedule that looks at a metric is stepped when there is a new value of it."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    steps, schedule = draft.settings["lr_scheduling_steps"], draft.settings["lr_scheduler"]
    if (
        steps is not None
        and schedule is not None
        and find_torch_class("lr_scheduler", schedule)[0] is ReduceLROnPlateau
    ):
        draft.refuse(
            "lr_scheduling_steps",
            f"got {steps} with ReduceLROnPlateau, which is stepped after each evaluation, or without one at the end of"
            " each epoch. Leave it out; eval_strategy='step' with eval_steps evaluates more often.",
        )


def _check_one_schedule(draft: Draft) -> None:
    """A schedule of torch's takes the place of the default warm-up schedule, and not of one that was asked for."""
    if draft.settings["lr_scheduler"] is None:
        return
    kind = draft.settings["lr_scheduler_type"]
    if draft.is_given("lr_scheduler_type") and kind is not None:
        draft.refuse(
            "lr_scheduler",
            f"got {draft.settings['lr_scheduler']!r}, and lr_scheduler_type={kind!r}: there can be one schedule. Give"
            " one of them.",
        )
    draft.settings["lr_scheduler_type"] = None


def _check_lr_scheduler_type(draft: Draft) -> None:
    if isinstance(draft.settings["lr_scheduler_type"], dict):
        _check_torch_name(draft, "lr_scheduler_type", "lr_scheduler")


def _check_warmup(draft: Draft) -> None:
    kind = draft.settings["lr_scheduler_type"]
    has_warmup = draft.settings["warmup_steps"] or draft.settings["warmup_ratio"]
    if has_warmup and (kind in _WITHOUT_WARMUP or isinstance(kind, dict)):
        draft.refuse(
            "lr_scheduler_type",
            f"got {kind!r} with a warm-up; a schedule that has one is needed, for example 'constant_with_warmup'.",
        )


def _check_evaluation(draft: Draft) -> None:
    steps, strategy = draft.settings["eval_steps"], draft.settings["eval_strategy"]
    if (strategy == "step") != (steps is not None):
        draft.refuse(
            "eval_steps",
            f"got {steps} with eval_strategy={strategy!r}; eval_steps goes with eval_strategy='step', and only with"
            " that.",
        )


def _check_model_checkpoint(draft: Draft) -> None:
    periods = draft.settings["model_checkpoint"]
    if periods is not None and len(periods) != 1:
        draft.refuse("model_checkpoint", f"got {periods!r}; give one of every_n_epoch and every_n_iteration, or None.")


def _check_folders(draft: Draft) -> None:
    for field in ("checkpoints_dir", "logs_dir"):
        name = draft.settings[field]
        paths = PurePosixPath(name), PureWindowsPath(name)
        is_folder = name == "." and field == "logs_dir"  # logs may lie in output_dir itself
        if any(path.anchor or ".." in path.parts or not (path.parts or is_folder) for path in paths):
            draft.refuse(field, f"got {name!r}; it must be a path inside output_dir, such as {field[:-4]!r}.")


def _check_apart(draft: Draft) -> None:
    checkpoints, logs = (PurePosixPath(draft.settings[field]) for field in ("checkpoints_dir", "logs_dir"))
    if (
        checkpoints == logs
        or checkpoints in logs.parents
        or (logs != PurePosixPath(".") and logs in checkpoints.parents)
    ):
        draft.refuse("logs_dir", f"got {str(logs)!r}; it must be another folder than checkpoints_dir, and not in it.")


def _check_task(draft: Draft) -> None:
    task = draft.settings["task"]
    if task is not None and task not in TaskType.words():
        draft.refuse("task", f"got {task!r}. {did_you_mean(task, TaskType.words())}")


def _check_device(draft: Draft) -> None:
    name = draft.settings["device_str"]
    if name is None:
        return
    import torch

    try:
        torch.device(name)
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        draft.refuse("device_str", f"got {name!r}; it must be a device such as 'cpu' or 'cuda:0' ({said})")


CHECKS: tuple[tuple[tuple[str, ...], Callable[[Draft], None]], ...] = (
    (("learning_rate", "weight_decay", "optimizer"), _check_rates),
    (("optimizer",), _check_optimizer),
    (("loss",), _check_loss),
    (("lr_scheduler", "lr_scheduler_kwargs"), _check_lr_scheduler),
    (("lr_scheduler", "lr_scheduling_steps"), _check_scheduling_steps),
    (("lr_scheduler", "lr_scheduler_type"), _check_one_schedule),
    (("lr_scheduler_type",), _check_lr_scheduler_type),
    (("lr_scheduler_type", "warmup_steps", "warmup_ratio"), _check_warmup),
    (("eval_strategy", "eval_steps"), _check_evaluation),
    (("model_checkpoint",), _check_model_checkpoint),
    (("checkpoints_dir", "logs_dir"), _check_folders),
    (("checkpoints_dir", "logs_dir"), _check_apart),
    (("task",), _check_task),
    (("device_str",), _check_device),
)
