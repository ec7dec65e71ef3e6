"""The types of settings: what pydantic checks, and beside it the words in which a message says what is allowed."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, WithJsonSchema
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from trainwright.config.enums import TaskType
from trainwright.config.training.metric_config import MetricConfig

# The headings under which a YAML file, the help and the reference page show the settings.
CATEGORIES = ("train", "learning", "metrics", "logging", "checkpoint", "callback", "device")


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a setting may be, as the end of the sentence "it must be ..."."""

    text: str


def setting(default: Any, category: str, help: str) -> Any:
    """A field of a configuration; ``...`` for one that must be given."""
    assert category in CATEGORIES
    return Field(default, description=help, json_schema_extra={"category": category})


def with_default(field: FieldInfo, default: Any) -> Any:
    """The same setting in a subclass, with another default."""
    return Field(default, description=field.description, json_schema_extra=field.json_schema_extra)


def allowed_text(field: FieldInfo) -> str:
    """The words of its :class:`Allowed`."""
    return next(item.text for item in field.metadata if isinstance(item, Allowed))


def category_of(field: FieldInfo) -> str:
    """The heading under which a setting is shown."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict), "made by setting()"
    return str(extra["category"])


_AtLeastOne = Annotated[int, Field(ge=1)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Whole = Annotated[int, Field(ge=0)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Name = Annotated[str, Field(min_length=1)]

Text = Annotated[str, Allowed("text")]
Key = Annotated[_Name, Allowed("a name")]
Folder = Annotated[_Name, Allowed("a path")]
PathOrNone = Annotated[_Name | None, Allowed("a path, or None")]
YesNo = Annotated[bool, Allowed("True or False")]
YesNoOrNone = Annotated[bool | None, Allowed("True, False or None")]
Count = Annotated[_AtLeastOne, Allowed("a whole number >= 1")]
CountOrNone = Annotated[_AtLeastOne | None, Allowed("a whole number >= 1, or None")]
CountOrZero = Annotated[_Whole, Allowed("a whole number >= 0")]
Workers = Annotated[int, Field(ge=-1), Allowed("a whole number >= 0, or -1")]
Seed = Annotated[int, Field(ge=0, lt=2**63), Allowed("a whole number in [0, 2**63)")]
Positive = Annotated[_Finite, Field(gt=0), Allowed("a number > 0")]
PositiveOrNone = Annotated[Annotated[_Finite, Field(gt=0)] | None, Allowed("a number > 0, or None")]
NotNegative = Annotated[_Finite, Field(ge=0), Allowed("a number >= 0")]
Ratio = Annotated[float, Field(ge=0, le=1), Allowed("a number in [0, 1]")]
StepsOrShare = Annotated[
    _AtLeastOne | _Share | None, Allowed("a whole number >= 1, a share of the steps such as 0.5 or 1.0, or None")
]
SaveSteps = Annotated[_Whole | _Share | None, Allowed("a whole number >= 0, a share of the steps such as 0.1, or None")]
Named = Annotated[str | dict[str, Any], Allowed('a name, or {"name_": name, ...} with its arguments')]
NamedOrNone = Annotated[
    str | dict[str, Any] | None, Allowed('a name, {"name_": name, ...} with its arguments, or None')
]
Arguments = Annotated[dict[str, Any] | None, Allowed("a dict of arguments, or None")]
Metrics = Annotated[
    list[_Name | MetricConfig] | None, Allowed("a list of names, of dicts and of MetricConfigs, or None")
]
EvalStrategy = Annotated[Literal["epoch", "eval_epoch", "step", "no"], Allowed("'epoch', 'eval_epoch', 'step' or 'no'")]
MatmulPrecision = Annotated[Literal["highest", "high", "medium"] | None, Allowed("None, 'highest', 'high' or 'medium'")]
Precision = Annotated[Literal["no", "fp16", "bf16"] | None, Allowed("None, 'no', 'fp16' or 'bf16'")]
NonFinite = Annotated[Literal["stop", "skip", "warn"], Allowed("'stop', 'skip' or 'warn'")]
WarmupSchedule = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]
WARMUP_SCHEDULES: tuple[str, ...] = get_args(WarmupSchedule)
LRSchedulerKind = Annotated[
    WarmupSchedule | dict[str, Any] | None,
    Allowed(f'{", ".join(WARMUP_SCHEDULES)}, {{"name_": one of torch\'s, ...}} or None'),
]
_TASKS: dict[str, Any] = {"type": "string", "enum": TaskType.words()}
Task = Annotated[str, Allowed("the name of a task"), WithJsonSchema(_TASKS)]
TaskOrNone = Annotated[
    str | None, Allowed("the name of a task, or None"), WithJsonSchema({"anyOf": [_TASKS, {"type": "null"}]})
]
Resume = Annotated[bool | _Name | None, Allowed("None, False, True (the newest checkpoint) or a path")]
Device = Annotated[str | None, Allowed("None or a device such as 'cpu' or 'cuda:0'")]


class EarlyStopping(TypedDict, total=False):
    """When to stop before the last epoch."""

    monitor: Annotated[_Name, Allowed("the name of a value in the logs")]
    patience: CountOrZero
    mode: Annotated[Literal["max", "min", "auto"], Allowed("'max', 'min' or 'auto'")]
    min_delta: NotNegative
    baseline: Annotated[_Finite | None, Allowed("a number, or None")]


class ModelCheckpoint(TypedDict, total=False):
    """How often to save."""

    every_n_epoch: Count
    every_n_iteration: Count


class TensorBoard(TypedDict, total=False):
    """Where TensorBoard's events go."""

    log_dir: PathOrNone
    comment: Text


class Profile(TypedDict, total=False):
    """Which iterations to profile, and what of them: the arguments of a ProfileHook."""

    wait: CountOrZero
    warmup: Count
    active: Count
    repeat: CountOrZero
    record_shapes: YesNo
    profile_memory: YesNo
    with_stack: YesNo
    with_flops: YesNo
    num_rows: CountOrZero
    all_ranks: YesNo


_KEYS = "a dict with some of the keys {}, or None"
EarlyStoppingOrNone = Annotated[
    EarlyStopping | None, Allowed(_KEYS.format("monitor, patience, mode, min_delta and baseline"))
]
ModelCheckpointOrNone = Annotated[
    ModelCheckpoint | None, Allowed('{"every_n_epoch": n}, {"every_n_iteration": n} or None')
]
TensorBoardOrNone = Annotated[TensorBoard | None, Allowed(_KEYS.format("log_dir and comment"))]
ProfileOrNone = Annotated[
    Profile | None, Allowed(f"True, False, {_KEYS.format('wait, warmup, active, repeat and others of a ProfileHook')}")
]
PARTS: dict[str, Any] = {
    "early_stopping": EarlyStopping,
    "model_checkpoint": ModelCheckpoint,
    "tensorboard": TensorBoard,
    "profile": Profile,
}
