"""Resolution of settings: names and aliases are mapped to fields, values are checked, and faults are collected."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from pydantic import BaseModel, ValidationError

from trainwright.config.errors import ConfigError, ConfigKeyError, Fault, did_you_mean, error_of, got
from trainwright.config.foreign_names import setting_hint
from trainwright.config.torch_names import (
    CUSTOM,
    GivenName,
    TaskType,
    arguments_fault,
    described_loss,
    find_torch_class,
)
from trainwright.config.training.aliases import ALIASES, UNSPECIFIED, Alias, canonical, field_of
from trainwright.config.validation import ema_fault, faults_of, unfreeze_fault


class Draft:
    """A configuration that is not checked yet: the values that the user set, by field, and their faults so far.

    ``values`` are settings by any of their names.
    """

    def __init__(self, kind: type[BaseModel], values: Mapping[str, Any], faults: Iterable[Fault] = ()) -> None:
        self.kind = kind
        self.given: dict[str, Any] = {}  # by field, in canonical spelling
        self.settings: dict[str, Any] = {}  # of all fields; complete after check_types
        self.faults = list(faults)
        self._name_of: dict[str, str] = {}  # the name that the user used
        self._unspecified: list[Alias] = []
        self._refused: set[str] = set()
        known = {*kind.model_fields, *ALIASES}
        for name in sorted(values, key=_rank):
            if name in known:
                self._set(name, values[name])
            else:
                hint = setting_hint(str(name), known)
                self.faults.append(Fault(f"{kind.__name__}.{name}", f"no such setting. {hint}", ConfigKeyError))

    def refuse(self, field: str, text: str, kind: type[ConfigError] = ConfigError) -> None:
        """Add a fault of a field."""
        self.faults.append(Fault(f"{self.kind.__name__}.{self._name_of.get(field, field)}", text, kind))
        self._refused.add(field.partition(".")[0])

    @property
    def names(self) -> dict[str, str]:
        """The name that the user used, by field."""
        return {field: name for field, name in self._name_of.items() if field in self.given}

    def forget_defaults(self) -> None:
        """Treat default values as not set: a saved file contains all settings, most with their defaults."""
        for field, value in list(self.given.items()):
            default = _default(self.kind, field)
            if type(value) is type(default) and value == default:
                del self.given[field]

    def keep(self, others: Mapping[str, Any]) -> None:
        """Set the fields that the user did not set."""
        excluded = {s.field for s in self._unspecified if s.field in others and not s.accepts(others[s.field])}
        kept = {field: value for field, value in others.items() if field not in self._name_of and field not in excluded}
        self.given = {**kept, **self.given}

    def check_types(self, validate: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Validate each value with pydantic."""
        try:
            self.settings = validate(self.given)
        except ValidationError as error:
            for fault in faults_of(error, self.kind, self.given):
                self.refuse(fault.path, fault.text, fault.kind)
            self.settings = {name: self.given.get(name, _default(self.kind, name)) for name in self.kind.model_fields}

    def check_together(self, checks: Iterable[tuple[tuple[str, ...], Callable[["Draft"], None]]]) -> None:
        """Apply each check whose fields have no fault of their own."""
        for fields, check in checks:
            if not self._refused.intersection(fields):
                check(self)

    def raise_faults(self, source: str = "") -> None:
        """Raise one error with all faults, if there are any."""
        if self.faults:
            lines = (f"{source}: {fault}" if source else str(fault) for fault in self.faults)
            raise error_of(self.faults, "\n".join(lines))

    def _set(self, name: str, value: Any) -> None:
        field, alias = field_of(name), ALIASES.get(name)
        try:
            converted = alias.write(value) if alias else value
            if field == "loss" and callable(converted):
                converted = _written_loss(converted)
            if converted is not UNSPECIFIED:
                converted = canonical(field, converted)
        except ValueError as error:
            self._name_of[field] = name
            is_complete = isinstance(error, ConfigError)  # a complete message of a metric's config
            self.refuse(field, str(error) if is_complete else f"{got(value)}; it must be {error}.")
            return
        if field in self.given and not self._agree(field, alias, converted):
            earlier = self._name_of[field]
            other = ALIASES[earlier].read(self.given[field]) if earlier in ALIASES else self.given[field]
            self._name_of[field] = name
            self.refuse(
                field, f"got {value!r}, and {earlier}={other!r}: these are two names of one setting. Give one of them."
            )
        elif converted is UNSPECIFIED and alias:
            self._unspecified.append(alias)
        elif field not in self.given:
            self.given[field] = converted
            self._name_of[field] = name

    def _agree(self, field: str, alias: Alias | None, converted: Any) -> bool:
        given = self.given[field]
        if alias is None:
            return bool(given == converted)
        return alias.accepts(given) if converted is UNSPECIFIED else bool(alias.read(given) == alias.read(converted))


def _written_loss(loss: Any) -> dict[str, Any]:
    written = described_loss(loss)
    if written is None:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ValueError(f"a loss of torch.nn; pass your own {name} to the trainer: Trainer(..., loss=...)")
    return written


def _rank(name: str) -> int:
    """Fields first, then plain aliases, then aliases whose values have another form."""
    return 0 if name not in ALIASES else 1 if ALIASES[name].is_plain else 2


def _default(kind: type[BaseModel], field: str) -> Any:
    info = kind.model_fields[field]
    return None if info.is_required() else info.get_default(call_default_factory=True)


_WITHOUT_WARMUP = (None, "constant")

_INSIDE_OPTIMIZER = {"learning_rate": "lr", "weight_decay": "weight_decay"}


def _check_rates(draft: Draft) -> None:
    """The rates among the arguments of the optimizer are the settings of the same names."""
    arguments = draft.settings["optimizer"]
    for field, name in _INSIDE_OPTIMIZER.items():
        if not isinstance(arguments, dict) or arguments.get(name) is None:
            continue
        inner = arguments[name]
        if field in draft.given and draft.given[field] != inner:
            draft.refuse(
                field,
                f"got {draft.given[field]!r}, but optimizer has {name}={inner!r}: these are two names of one setting."
                " Give one of them.",
            )
        elif isinstance(inner, bool) or not isinstance(inner, int | float) or not inner >= 0:
            draft.refuse("optimizer", f"got {name}={inner!r}; it must be a number >= 0.")
        else:
            draft.settings[field] = inner


def _check_torch_name(draft: Draft, field: str, kind: str | None = None, also: Mapping[str, Any] | None = None) -> None:
    given, value, kind = draft.given.get(field), draft.settings[field], kind or field
    if isinstance(given, GivenName):
        draft.settings[field] = given  # pydantic converted it to str
        return
    if value is None or value == CUSTOM:
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
            draft.refuse(
                "lr_scheduler_kwargs",
                f"got {arguments!r} with lr_scheduler=None; these are the arguments of lr_scheduler.",
            )
        return
    twice = sorted(set(arguments or {}).intersection(name)) if isinstance(name, dict) else []
    if twice:
        draft.refuse("lr_scheduler_kwargs", f"got {', '.join(twice)}, which lr_scheduler has too. Give one of them.")
    else:
        _check_torch_name(draft, "lr_scheduler", also=arguments)


def _check_scheduling_steps(draft: Draft) -> None:
    """A schedule that depends on a metric is stepped after each evaluation."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    steps, schedule = draft.settings["lr_scheduling_steps"], draft.settings["lr_scheduler"]
    if None not in (steps, schedule) and find_torch_class("lr_scheduler", schedule)[0] is ReduceLROnPlateau:
        draft.refuse(
            "lr_scheduling_steps",
            f"got {steps} with ReduceLROnPlateau, which is stepped after each evaluation, or without one at the end of"
            " each epoch. Leave it out; eval_strategy='step' with eval_steps evaluates more often.",
        )


def _check_one_schedule(draft: Draft) -> None:
    """A schedule of torch replaces the default warm-up schedule, but not one that the user set."""
    if draft.settings["lr_scheduler"] is None:
        return
    kind = draft.settings["lr_scheduler_type"]
    if "lr_scheduler_type" in draft.given and kind is not None:
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


def _check_value(draft: Draft, field: str, fault_of: Callable[[Any], str | None]) -> None:
    if (fault := fault_of(draft.settings[field])) is not None:
        draft.refuse(field, fault)


def _check_model_checkpoint(draft: Draft) -> None:
    periods = draft.settings["model_checkpoint"]
    if periods is not None and len(periods) != 1:
        draft.refuse("model_checkpoint", f"got {periods!r}; give one of every_n_epoch and every_n_iteration, or None.")


def _check_overfit(draft: Draft) -> None:
    for other in ("limit_train_batches", "limit_eval_batches"):
        if draft.settings["overfit_batches"] is not None and draft.settings[other] is not None:
            draft.refuse(
                "overfit_batches",
                f"got {draft.settings['overfit_batches']} with {other}={draft.settings[other]}; it limits training and"
                " evaluation. Give one of them.",
            )


def _check_clipping(draft: Draft) -> None:
    norm, value = draft.settings["max_grad_norm"], draft.settings["clip_grad_value"]
    if norm is not None and value is not None:
        draft.refuse(
            "clip_grad_value", f"got {value} with max_grad_norm={norm}: clip by value or by norm, not by both."
        )


def _check_folders(draft: Draft) -> None:
    for field in ("checkpoints_dir", "logs_dir"):
        name = draft.settings[field]
        paths = PurePosixPath(name), PureWindowsPath(name)
        is_folder = name == "." and field == "logs_dir"  # logs may be in output_dir itself
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
        reason = str(error).splitlines()[0]
        draft.refuse("device_str", f"got {name!r}; it must be a device such as 'cpu' or 'cuda:0' ({reason})")


CHECKS: tuple[tuple[tuple[str, ...], Callable[[Draft], None]], ...] = (
    (("learning_rate", "weight_decay", "optimizer"), _check_rates),
    (("optimizer",), partial(_check_torch_name, field="optimizer")),
    (("loss",), partial(_check_torch_name, field="loss")),
    (("lr_scheduler", "lr_scheduler_kwargs"), _check_lr_scheduler),
    (("lr_scheduler", "lr_scheduling_steps"), _check_scheduling_steps),
    (("lr_scheduler", "lr_scheduler_type"), _check_one_schedule),
    (("lr_scheduler_type",), _check_lr_scheduler_type),
    (("lr_scheduler_type", "warmup_steps", "warmup_ratio"), _check_warmup),
    (("eval_strategy", "eval_steps"), _check_evaluation),
    (("ema",), partial(_check_value, field="ema", fault_of=ema_fault)),
    (("unfreeze",), partial(_check_value, field="unfreeze", fault_of=unfreeze_fault)),
    (("model_checkpoint",), _check_model_checkpoint),
    (("overfit_batches", "limit_train_batches", "limit_eval_batches"), _check_overfit),
    (("max_grad_norm", "clip_grad_value"), _check_clipping),
    (("checkpoints_dir", "logs_dir"), _check_folders),
    (("checkpoints_dir", "logs_dir"), _check_apart),
    (("task",), _check_task),
    (("device_str",), _check_device),
)
