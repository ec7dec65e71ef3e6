"""Resolution of settings: names and aliases are mapped to fields, values are checked, and faults are collected."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from pydantic import ValidationError

from trainwright.base.errors import ConfigError, ConfigKeyError, Fault, did_you_mean, error_of, got, nearest_of
from trainwright.config.foreign_names import setting_hint
from trainwright.config.torch_names import (
    CUSTOM,
    GivenName,
    TaskType,
    arguments_fault,
    described_loss,
    find_torch_class,
    split_name,
)
from trainwright.config.training.row import UNSPECIFIED, Alias, Table
from trainwright.config.validation import CONTRADICTIONS, faults_of

_Check = TypeVar("_Check", bound=Callable[..., str | None])


class Draft:
    """A configuration that is not checked yet: the values that the user set, by field, and their faults so far.

    ``values`` are settings by any of their names.
    """

    def __init__(self, kind: type[Table], values: Mapping[str, Any], faults: Iterable[Fault] = ()) -> None:
        self.kind = kind
        self.given: dict[str, Any] = {}  # by field, in canonical spelling
        self.settings: dict[str, Any] = {}  # of all fields; complete after check_types
        self.faults = list(faults)
        self._name_of: dict[str, str] = {}  # the name that the user used
        self._unspecified: list[Alias] = []
        self._refused: set[str] = set()
        known = {*kind.model_fields, *kind.aliases}
        for name in sorted(values, key=self._rank):
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

    def forget_defaults(self, is_set: Collection[str]) -> None:
        """Treat default values of other fields than these as not set."""
        for field, value in list(self.given.items()):
            default = _default(self.kind, field)
            if field not in is_set and type(value) is type(default) and value == default:
                del self.given[field]

    def keep(self, others: Mapping[str, Any]) -> None:
        """Set the fields that the user did not set."""
        excluded = {s.field for s in self._unspecified if s.field in others and not s.accepts(others[s.field])}
        kept = {field: value for field, value in others.items() if field not in self._name_of and field not in excluded}
        self.given = {**kept, **self.given}

    def check_types(self, validate: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Validate each value with pydantic."""
        try:
            names = {field: value for field, value in self.given.items() if isinstance(value, GivenName)}
            self.settings = validate(self.given) | names  # pydantic converts them to str
        except ValidationError as error:
            for fault in faults_of(error, self.kind, self.given):
                text = _place_of(fault.path, self.given.get(fault.path)) or fault.text
                self.refuse(fault.path, text, fault.kind)
            self.settings = {name: self.given.get(name, _default(self.kind, name)) for name in self.kind.model_fields}

    def check_together(self) -> None:
        """Resolve and check fields that depend on each other, if they have no fault of their own."""
        for fields, resolve in _RESOLVED:
            if not self._refused.intersection(fields):
                resolve(self)
        for fields, fault_of in _CHECKS:
            if not self._refused.intersection(fields):
                text = fault_of(*(self.settings[field] for field in fields))
                if text is not None:
                    self.refuse(fields[0], text)

    def raise_faults(self, source: str = "") -> None:
        """Raise one error with all faults, if there are any."""
        if self.faults:
            lines = (f"{source}: {fault}" if source else str(fault) for fault in self.faults)
            raise error_of(self.faults, "\n".join(lines))

    def _set(self, name: str, value: Any) -> None:
        field, alias = self.kind.field_of(name), self.kind.aliases.get(name)
        try:
            converted = alias.write(value) if alias else value
            if field == "loss" and callable(converted):
                converted = _written_loss(converted)
            if converted is not UNSPECIFIED:
                converted = self.kind.rows[field].canonical(converted)
        except ValueError as error:
            self._name_of[field] = name
            is_complete = isinstance(error, ConfigError)  # a complete message of a metric's config
            self.refuse(field, str(error) if is_complete else f"{got(value)}; it must be {error}.")
            return
        if field in self.given and not self._agree(field, alias, converted):
            earlier = self._name_of[field]
            named = self.kind.aliases.get(earlier)
            other = self.given[field] if named is None else named.read(self.given[field])
            self._name_of[field] = name
            self.refuse(
                field, f"got {value!r}, and {earlier}={other!r}: these are two names of one setting. Give one of them."
            )
        elif converted is UNSPECIFIED and alias:
            self._unspecified.append(alias)
        elif field not in self.given:
            self.given[field] = converted
            self._name_of[field] = name

    def _rank(self, name: str) -> int:
        """Fields first, then plain aliases, then aliases whose values have another form."""
        alias = self.kind.aliases.get(name)
        return 0 if alias is None else 1 if alias.is_plain else 2

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


def _place_of(field: str, value: Any) -> str:
    """Where a value belongs that is none of this field, as the text of an error; "" if that is not known."""
    if field == "lr_scheduler_type" and isinstance(value, str):
        found, _ = find_torch_class("lr_scheduler", value)
        if found is not None:
            return f"got {value!r}, a schedule of torch: lr_scheduler={{'name_': {found.__name__!r}, ...}}."
    elif field in ("optimizer", "lr_scheduler") and hasattr(value, "step"):
        if not isinstance(value, type):
            return f"got an object of {type(value).__name__}; pass it to the trainer: Trainer(..., {field}=...)."
        name = value.__name__
        return f"got the class {name}; give its name, {name!r}, or {{'name_': {name!r}, ...}} with its arguments."
    return ""


def _default(kind: type[Table], field: str) -> Any:
    info = kind.model_fields[field]
    return None if info.is_required() else info.get_default(call_default_factory=True)


_INSIDE_OPTIMIZER = {"learning_rate": "lr", "weight_decay": "weight_decay"}


def _resolve_rates(draft: Draft) -> None:
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


def _resolve_schedule(draft: Draft) -> None:
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


_RESOLVED: tuple[tuple[tuple[str, ...], Callable[[Draft], None]], ...] = (
    (("learning_rate", "weight_decay", "optimizer"), _resolve_rates),
    (("lr_scheduler", "lr_scheduler_type"), _resolve_schedule),
)
_CHECKS: list[tuple[tuple[str, ...], Callable[..., str | None]]] = []


def _check(*fields: str) -> Callable[[_Check], _Check]:
    """A function of the values of these fields that returns the text of an error about the first one, or None."""

    def register(fault_of: _Check) -> _Check:
        _CHECKS.append((fields, fault_of))
        return fault_of

    return register


def _torch_fault(kind: str, value: Any, also: Mapping[str, Any] | None = None) -> str | None:
    if value is None or value == CUSTOM or isinstance(value, GivenName):
        return None
    if isinstance(value, dict) and "name_" not in value:
        return f"got {value!r}, which lacks the key 'name_': {{\"name_\": name, ...}}."
    found, fault = find_torch_class(kind, value)
    return fault if found is None else arguments_fault(kind, found, {**split_name(value)[1], **(also or {})})


_check("optimizer")(partial(_torch_fault, "optimizer"))
_check("loss")(partial(_torch_fault, "loss"))


@_check("lr_scheduler_kwargs", "lr_scheduler")
def _arguments_fault(arguments: Any, schedule: Any) -> str | None:
    if schedule is None and arguments is not None:
        return f"got {arguments!r} with lr_scheduler=None; these are the arguments of lr_scheduler."
    twice = sorted(set(arguments or {}).intersection(schedule)) if isinstance(schedule, dict) else []
    return f"got {', '.join(twice)}, which lr_scheduler has too. Give one of them." if twice else None


_check("lr_scheduler", "lr_scheduler_kwargs")(partial(_torch_fault, "lr_scheduler"))


@_check("lr_scheduling_steps", "lr_scheduler")
def _scheduling_fault(steps: Any, schedule: Any) -> str | None:
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    if None in (steps, schedule) or find_torch_class("lr_scheduler", schedule)[0] is not ReduceLROnPlateau:
        return None
    return (
        f"got {steps} with ReduceLROnPlateau, which is stepped after each evaluation, or without one at the end of"
        " each epoch. Leave it out; eval_strategy='step' with eval_steps evaluates more often."
    )


@_check("lr_scheduler_type")
def _type_fault(kind: Any) -> str | None:
    return _torch_fault("lr_scheduler", kind) if isinstance(kind, dict) else None


@_check("lr_scheduler_type", "warmup_steps", "warmup_ratio")
def _warmup_fault(kind: Any, steps: Any, ratio: float) -> str | None:
    if not (steps or ratio) or (kind not in (None, "constant") and not isinstance(kind, dict)):
        return None
    return f"got {kind!r} with a warm-up; a schedule that has one is needed, for example 'constant_with_warmup'."


@_check("eval_steps", "eval_strategy")
def _evaluation_fault(steps: Any, strategy: str) -> str | None:
    if (strategy == "step") == (steps is not None):
        return None
    if steps is None:
        return "missing; eval_strategy='step' needs it, for example eval_steps=500."
    return f"got {steps} with eval_strategy={strategy!r}; eval_steps needs eval_strategy='step'."


@_check("eval_every_n_epoch", "eval_strategy")
def _epochs_fault(epochs: int | None, strategy: str) -> str | None:
    if epochs is None or strategy in ("epoch", "eval_epoch"):
        return None
    return f"got {epochs} with eval_strategy={strategy!r}; it needs eval_strategy='epoch'."


_CHECKS += CONTRADICTIONS


@_check("model_checkpoint")
def _checkpoint_fault(periods: Any) -> str | None:
    if periods is None or len(periods) == 1:
        return None
    return f"got {periods!r}; give one of every_n_epoch and every_n_iteration, or None."


@_check("clip_grad_value", "max_grad_norm")
def _clipping_fault(value: Any, norm: Any) -> str | None:
    if value is None or norm is None:
        return None
    return f"got {value} with max_grad_norm={norm}: clip by value or by norm, not by both."


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


_check("checkpoints_dir")(partial(_folder_fault, "checkpoints"))
_check("logs_dir")(partial(_folder_fault, "logs"))


@_check("tensorboard")
def _comment_fault(tensorboard: Mapping[str, Any] | None) -> str | None:
    comment = (tensorboard or {}).get("comment")
    if not comment or (fault := _folder_fault("digits", comment)) is None:
        return None
    return f"comment: {fault.replace('output_dir', 'logs_dir')}"


@_check("logs_dir", "checkpoints_dir")
def _apart_fault(logs_dir: str, checkpoints_dir: str) -> str | None:
    logs, checkpoints = PurePosixPath(logs_dir), PurePosixPath(checkpoints_dir)
    is_above = logs in checkpoints.parents and logs != PurePosixPath(".")
    if checkpoints not in (logs, *logs.parents) and not is_above:
        return None
    return f"got {str(logs)!r}; it must be another folder than checkpoints_dir, and not in it."


@_check("task")
def _task_fault(task: str | None) -> str | None:
    known = TaskType.words()
    return None if task is None or task in known else f"got {task!r}. {did_you_mean(task, known)}"


@_check("device_str")
def _device_fault(name: str | None) -> str | None:
    if name is None:
        return None
    import torch

    try:
        torch.device(name)
    except RuntimeError:
        device = name.lower().replace("gpu", "cuda")
        near = device if re.fullmatch("cuda(:[0-9]+)?", device) else nearest_of(name, ("cpu", "cuda", "mps", "xpu"))
        hint = "" if near is None else f" Did you mean {near!r}?"
        return f"got {name!r}; it must be a device such as 'cpu' or 'cuda:0'.{hint}"
    return None
