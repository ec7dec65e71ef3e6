"""Names in configurations: enums of setting values; and torch's optimizers, losses, schedules, dtypes and devices.

A member of an enum is equal to its string, and either can be used. Torch is imported by the first lookup.
"""

import inspect
import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, get_args

from trainwright.base.errors import ConfigError, did_you_mean
from trainwright.base.signatures import read_signature
from trainwright.config.foreign_names import value_hint

if TYPE_CHECKING:
    import torch


CUSTOM = "custom_"  # the name of an optimizer or a loss that the user passed as an object


class GivenName(str):
    """The user's name of an optimizer or a loss that is an object. Files contain ``custom_`` instead."""


class _Word(StrEnum):
    """A string enum. An unknown string is a ConfigError with the nearest name; known misspellings are accepted."""

    @classmethod
    def _missing_(cls, value: object) -> "_Word":
        word = MISSPELLED.get(str(value))
        if word in cls.words():
            return cls(word)
        raise ConfigError(f"{cls.__name__}: got {value!r}. {did_you_mean(str(value), cls.words())}")

    @classmethod
    def words(cls) -> list[str]:
        """All values as plain strings."""
        return [member.value for member in cls]


class TaskType(_Word):
    """The task of a model. It determines the metrics and how outputs are compared with labels."""

    AUDIO_CLASSIFICATION = "audio_classification"
    BACKBONE = "backbone"
    IMAGE2TEXT = "image2text"
    LANGUAGE_MODELING = "language_modeling"
    MASK_FILLING = "mask_filling"
    SEQUENCE_LABELING = "sequence_labeling"
    SPEECH_RECOGNITION = "speech_recognition"
    TEXT_CLASSIFICATION = "text_classification"
    TEXT_DETECTION = "text_detection"
    TEXT_GENERATION = "text_generation"


class OptimizerType(_Word):
    """Common optimizers. Others of ``torch.optim`` are selected by their class name."""

    ADAM = "adam"
    ADAMW = "adamw"
    SGD = "sgd"
    SDG = "sgd"  # the spelling of older configurations


class LRSchedulerType(_Word):
    """Short names of the schedules of ``torch.optim.lr_scheduler``."""

    CONSTANT = "constant"
    LAMBDA = "lambda"
    STEP = "step"
    REDUCE_ON_PLATEAU = "reduce_on_plateau"
    MULTI_STEP = "multi_step"
    ONE_CYCLE = "one_cycle"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"
    CYCLIC = "cyclic"
    SEQUENTIAL = "sequential"
    POLYNOMIAL = "polynomial"
    COSINE_ANNEALING = "cosine_annealing"
    COSINE_ANEALING = "cosine_annealing"  # the spelling of older configurations

    @property
    def torch_name(self) -> str:
        """The class of ``torch.optim.lr_scheduler``.

        >>> LRSchedulerType.REDUCE_ON_PLATEAU.torch_name
        'ReduceLROnPlateau'
        """
        if self is LRSchedulerType.REDUCE_ON_PLATEAU:
            return "ReduceLROnPlateau"
        return self.value.title().replace("_", "") + "LR"


class PrecisionType(_Word):
    """The precision of forward passes."""

    NO = "no"
    FULL = "no"
    FP16 = "fp16"
    BF16 = "bf16"


# Schedules with warm-up, which are not torch's.
WarmupSchedule = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]
WARMUP_SCHEDULES: tuple[str, ...] = get_args(WarmupSchedule)
MISSPELLED = {"sdg": "sgd", "cosine_anealing": "cosine_annealing", "full": "no"}


logger = logging.getLogger("trainwright.config")


_MORE_ARGUMENTS = {"Muon": ("adamw",)}  # of the optimizers that a Trainer completes
LOSS_DTYPE = "dtype"  # the key of a loss for that of its tensors, which a file has as lists
_LOSS_DTYPES = ("float16", "bfloat16", "float32", "float64")
_OF_ADAMW = ("betas", "amsgrad")  # arguments that Muon does not have
_SET_BY_TRAINER = {"optimizer": ("params",), "loss": (), "lr_scheduler": ("optimizer", "last_epoch")}


def split_name(value: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of ``"Adam"`` or ``{"name_": "Adam", "eps": 1e-6}``."""
    if isinstance(value, str):
        return value, {}
    return str(value.get("name_", "")), {key: item for key, item in value.items() if key != "name_"}


def find_torch_class(kind: str, value: str | Mapping[str, Any]) -> tuple[type[Any] | None, str | None]:
    """The class that ``value`` names, or the text of an error. ``kind``: "optimizer", "loss", "lr_scheduler".

    Schedules also have the names in ``LRSchedulerType``.
    """
    name, _ = split_name(value)
    classes = _classes(kind)
    short = LRSchedulerType.words() if kind == "lr_scheduler" else []
    torch_name = LRSchedulerType(name).torch_name if name in short else name
    found = next((known for known in classes if known.lower() == torch_name.lower()), None)
    if found is None:
        if kind == "lr_scheduler" and isinstance(value, str) and value in WARMUP_SCHEDULES:
            return None, f"got {value!r}, which is a value of lr_scheduler_type: lr_scheduler_type={name!r}."
        return None, f"got {value!r}. {value_hint(kind, name) or did_you_mean(name, [*classes, *short])}"
    return classes[found], None


def arguments_fault(kind: str, found: type[Any], arguments: Mapping[str, Any]) -> str | None:
    """The text of an error in the arguments of a class, or None. Schedules need all required arguments."""
    parameters = read_signature(found).parameters
    allowed = [name for name in parameters if name not in _SET_BY_TRAINER[kind]]
    more = _MORE_ARGUMENTS.get(found.__name__, ()) if kind == "optimizer" else (LOSS_DTYPE,) if kind == "loss" else ()
    for name, value in arguments.items():
        if "adamw" in more and name in _OF_ADAMW and name not in allowed:
            return f"Muon has no argument {name!r}. Of its part for other parameters: 'adamw': {{{name!r}: {value!r}}}."
        if name not in allowed and name not in more:
            return f"{found.__name__} has no argument {name!r}. {did_you_mean(str(name), [*allowed, *more])}"
    missing = [n for n in allowed if parameters[n].default is inspect.Parameter.empty and n not in arguments]
    if kind == "lr_scheduler" and missing:
        items = {"name_": repr(found.__name__), **{key: repr(value) for key, value in arguments.items()}}
        line = ", ".join(f"{key!r}: {value}" for key, value in {**items, **dict.fromkeys(missing, "...")}.items())
        return f"{found.__name__} needs {', '.join(missing)}. Write {kind}={{{line}}}."
    if kind == "loss" and (dtype := arguments.get(LOSS_DTYPE, "float32")) not in _LOSS_DTYPES:
        return f"got {LOSS_DTYPE}={dtype!r}. {did_you_mean(str(dtype), _LOSS_DTYPES)}"
    if arguments.get("reduction", "mean") != "mean":
        return f"got reduction={arguments['reduction']!r}; the loss of a batch must be the mean over it."
    return None


def described_loss(loss: Any) -> dict[str, Any] | None:
    """The name and the arguments of a loss of ``torch.nn``, as a configuration has them; None for other objects.

    >>> import torch
    >>> described_loss(torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])))
    {'name_': 'CrossEntropyLoss', 'weight': [1.0, 2.0]}
    """
    kind = type(loss)
    if kind.__module__ != "torch.nn.modules.loss":
        return None
    found: dict[str, Any] = {"name_": kind.__name__}
    for name, parameter in read_signature(kind).parameters.items():
        if name in ("size_average", "reduce"):  # names of earlier releases of torch for reduction
            continue
        value = getattr(loss, name, parameter.default)
        is_tensor = hasattr(value, "tolist")
        if not (is_tensor or isinstance(value, bool | int | float | str | list | None)):
            return None
        if is_tensor or value != parameter.default:
            found[name] = value
    return with_lists(found)


def with_lists(loss: Mapping[str, Any]) -> dict[str, Any]:
    """The name and the arguments of a loss with its tensors as lists, and their dtype if it is not float32.

    Values of NumPy, which are float64 by default, get the dtype of the model's outputs, as lists of numbers do.

    >>> import torch
    >>> with_lists({"name_": "CrossEntropyLoss", "weight": torch.ones(2, dtype=torch.float64)})
    {'name_': 'CrossEntropyLoss', 'weight': [1.0, 1.0], 'dtype': 'float64'}
    """
    tensors = {name: value for name, value in loss.items() if hasattr(value, "tolist") and hasattr(value, "dtype")}
    of_torch = {str(value.dtype) for value in tensors.values()}
    dtypes = {name for name in _LOSS_DTYPES if f"torch.{name}" in of_torch}
    named = {LOSS_DTYPE: dtypes.pop()} if len(dtypes) == 1 and dtypes != {"float32"} else {}
    return {**loss, **{name: value.tolist() for name, value in tensors.items()}, **named}


def torch_dtype(name: str) -> "torch.dtype":
    """The dtype ``torch.<name>``. A saved configuration uses it for dtypes."""
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        known = [key for key, value in vars(torch).items() if isinstance(value, torch.dtype)]
        raise ConfigError(f"torch_dtype: got {name!r}; it must be a torch.dtype. {did_you_mean(str(name), known)}")
    return found


def _classes(kind: str) -> dict[str, type[Any]]:
    import torch

    schedules: Any = torch.optim.lr_scheduler
    losses: Any = torch.nn.modules.loss
    module, base = {
        "optimizer": (torch.optim, torch.optim.Optimizer),
        "lr_scheduler": (schedules, schedules.LRScheduler),
        "loss": (losses, losses._Loss),
    }[kind]
    found = {name: value for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)}
    return {n: value for n, value in found.items() if value is not base and n[0] != "_" and n != "ChainedScheduler"}
