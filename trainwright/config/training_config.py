"""The run settings of the objects door: one flat object, checked as a whole when it is made and at every change."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainwright.checkpoint.files import atomic_write
from trainwright.config.errors import ConfigError, ConfigKeyError, did_you_mean
from trainwright.config.secrets import warn_of_hidden, without_secrets
from trainwright.config.torch_names import arguments_fault, find_torch_class
from trainwright.config.yaml_file import load_yaml

if TYPE_CHECKING:
    import torch

# The documents' other spellings, and the one field where each is kept. This table is the only one of this door.
ALIASES = {
    "epoch_num": "num_epochs",
    "train_epoch": "num_epochs",
    "train_micro_batch_size": "batch_size",
    "train_batch_size": "batch_size",
    "val_batch_size": "eval_batch_size",
    "test_micro_batch_size": "eval_batch_size",
    "lr": "learning_rate",
    "num_accumulation_steps": "gradient_accumulation_steps",
    "amp": "mixed_precision",
    "num_dataloader_workers": "dataloader_num_workers",
    "log_period": "log_steps",
    "device": "device_str",  # read as `device` it is a torch.device
    "load_weight": "init_weights_from",
}
_SAID_AS = {"device_str": "device"}  # the name that a message uses

Schedule = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]
_WITHOUT_WARMUP = (None, "constant")
# Spellings of values, by field.
_VALUES: dict[str, dict[Any, Any]] = {
    "mixed_precision": {True: "bf16", False: "no"},
    "eval_strategy": {"steps": "step", None: "no", False: "no", "null": "no", "None": "no"},
    "eval_batch_size": {-1: None},
}

Count = Annotated[int, Field(ge=1, description="a whole number >= 1")]
CountOrNone = Annotated[Annotated[int, Field(ge=1)] | None, Field(description="a whole number >= 1, or None")]
CountOrZero = Annotated[int, Field(ge=0, description="a whole number >= 0")]
YesNo = Annotated[bool, Field(description="True or False")]
Named = Annotated[str | dict[str, Any], Field(description='a name, or {"name_": name, ...} with its arguments')]
PathOrNone = Annotated[str | Path | None, Field(description="a path, or None")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, description="a number > 0")]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, description="a number >= 0")]
Ratio = Annotated[float, Field(ge=0, le=1, description="a number in [0, 1]")]


class TrainingConfig(BaseModel):
    """How a :class:`~trainwright.Trainer` trains.

    Each setting has one name and may have others from older configurations, which are read and written alike:
    ``config.lr`` is ``config.learning_rate``. Steps are micro-batches: one call of the trainer's ``training_step``.

    Raises:
        ConfigError: something is wrong; the message lists every fault.

    >>> config = TrainingConfig(batch_size=4, lr=1e-3)
    >>> config.learning_rate, config.eval_batch_size
    (0.001, 4)
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    output_dir: Annotated[str | Path, Field(description="a path")] = "./output_dir"
    eval_strategy: Annotated[Literal["epoch", "step", "no"], Field(description="'epoch', 'step' or 'no'")] = "epoch"
    eval_steps: CountOrNone = None  # with eval_strategy="step"
    batch_size: Count = 8
    eval_batch_size: CountOrNone = None  # None, -1: batch_size; read, it is the number
    seed: Annotated[int, Field(ge=0, lt=2**63, description="a whole number in [0, 2**63)")] = 42
    num_epochs: Count = 2
    max_steps: CountOrNone = None  # ends the training before the last epoch does
    dataloader_shuffle: YesNo = True  # training data only
    dataloader_drop_last: YesNo = True  # the last batch of an epoch, if it is shorter; training data only
    dataloader_num_workers: CountOrZero = 0  # never more than the CPUs there are
    learning_rate: Positive = 5e-5
    weight_decay: NotNegative = 0.0
    optimizer: Named = "Adam"  # of torch.optim, upper or lower case
    loss: Named = "CrossEntropyLoss"  # of torch.nn; used where the model has no loss of its own
    lr_scheduler_type: Annotated[
        Schedule | None, Field(description=f"None or one of {', '.join(Schedule.__args__)}")
    ] = "linear"
    warmup_ratio: Ratio = 0.0  # of all updates
    warmup_steps: CountOrZero = 0  # in updates; wins over warmup_ratio
    gradient_accumulation_steps: Count = 1
    mixed_precision: Annotated[Literal["no", "bf16"] | None, Field(description="None, 'no' or 'bf16'")] = None
    log_steps: Count = 50
    non_finite: Annotated[Literal["stop", "skip", "warn"], Field(description="'stop', 'skip' or 'warn'")] = (
        "stop"  # where a loss or the gradients become NaN or infinite
    )
    save_steps: Annotated[
        Annotated[int, Field(ge=0)] | None,
        Field(
            description="None (at the ends of epochs), 0 (only at the end) or a number of steps (and at epochs' ends)"
        ),
    ] = None
    save_freq: CountOrZero = 1  # save at the end of every save_freq-th epoch; 0: of none
    graph: YesNo = False  # compile the model
    device_str: Annotated[str | None, Field(description="None or a device such as 'cpu' or 'cuda:0'")] = None
    resume_from_checkpoint: Annotated[
        bool | str | Path | None, Field(description="None, False, True (the newest one) or a path")
    ] = None
    init_weights_from: PathOrNone = None  # weights alone; a run that is resumed has its own
    progress_bar: YesNo = True  # on a terminal; log lines tell the same everywhere

    def __init__(self, **values: Any) -> None:
        fields, faults = _by_field(values)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            faults += _as_faults(error)
        else:
            faults += self._cross_faults(fields)
        if faults:
            raise _error(faults)
        self.__dict__["_given"] = dict(fields)

    def _cross_faults(self, given: dict[str, Any]) -> list[str]:
        """What does not fit together; also fills in what follows from other fields."""
        faults = []
        data = self.__dict__
        for name in ("output_dir", "init_weights_from", "resume_from_checkpoint"):
            if isinstance(data[name], str | Path):
                data[name] = os.path.expanduser(data[name])
        if data["eval_batch_size"] is None:
            data["eval_batch_size"] = self.batch_size
        for name, field in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
            inner = self.optimizer.get(name) if isinstance(self.optimizer, dict) else None
            if inner is None:
                continue
            if field in given and given[field] not in (inner, type(self).model_fields[field].default):
                faults.append(
                    f"TrainingConfig.{field}: got {given[field]!r}, but optimizer has {name}={inner!r}: these are two"
                    " names of one setting. Give one of them."
                )
            data[field] = inner
        for field in ("optimizer", "loss"):
            _, fault = find_torch_class(field, data[field])
            faults += [
                f"TrainingConfig.{field}: {text}" for text in (fault or arguments_fault(field, data[field]),) if text
            ]
        if self.lr_scheduler_type in _WITHOUT_WARMUP and (self.warmup_steps or self.warmup_ratio):
            faults.append(
                f"TrainingConfig.lr_scheduler_type: got {self.lr_scheduler_type!r} with a warm-up; a schedule that has"
                " one is needed, for example 'constant_with_warmup'."
            )
        if (self.eval_strategy == "step") != (self.eval_steps is not None):
            faults.append(
                f"TrainingConfig.eval_steps: got {self.eval_steps} with eval_strategy={self.eval_strategy!r};"
                " eval_steps goes with eval_strategy='step', and only with that."
            )
        if self.device_str is not None and (fault := _device_fault(self.device_str)):
            faults.append(f"TrainingConfig.device: got {self.device_str!r}; {fault}")
        return faults

    @property
    def device(self) -> "torch.device":
        """Where to train: the device asked for if it is there; else the accelerator if there is one; else the CPU."""
        import torch

        there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        asked = None if self.device_str is None else torch.device(self.device_str)
        if asked is not None and (asked.type == "cpu" or (there is not None and asked.type == there.type)):
            return asked
        return torch.device("cpu") if asked is not None or there is None else torch.device(there.type, 0)

    def to_dict(self) -> dict[str, Any]:
        """Every setting by its name, as plain values: ``TrainingConfig(**config.to_dict())`` is this one again."""
        return {_SAID_AS.get(name, name): getattr(self, name) for name in type(self).model_fields}

    def save_to_yaml(self, path: str | Path) -> None:
        """Write :meth:`to_dict` as YAML, with ``???`` for what looks secret and one warning that names it."""
        plain, hidden = without_secrets(self.to_dict())
        atomic_write(path, yaml.safe_dump(plain, sort_keys=False).encode())
        warn_of_hidden(hidden, path)

    @classmethod
    def load_from_yaml(cls, path: str | Path) -> "TrainingConfig":
        """The settings of a YAML file; those that it does not have are the defaults.

        Raises:
            MissingFileError: there is no such file.
            ConfigError: it is no YAML of plain values, or one of them is ``???``, still to be given.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        cfg = load_yaml(path)  # data: it reads 5e-5 as a number, as people do, and runs nothing
        try:
            content = OmegaConf.to_container(cfg, resolve=True)
            missing = sorted(OmegaConf.missing_keys(cfg))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from error
        if missing:
            raise ConfigError(
                f"{path}: {', '.join(missing)}: no value yet (it is '???', as is what looked secret when the file was"
                " written). Write it in, or make the TrainingConfig in Python."
            )
        assert isinstance(content, dict), "load_yaml gives a mapping"
        return cls(**{str(name): value for name, value in content.items()})

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(self, ALIASES[name]) if name in ALIASES else super().__getattr__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            field = ALIASES.get(name, name)
            given = {k: v for k, v in self.__dict__["_given"].items() if k != field}
            self.__dict__.update(type(self)(**{**given, name: value}).__dict__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainingConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # it can be changed


def _by_field(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values by the fields' own names, and what is wrong with the names."""
    fields: dict[str, Any] = {}
    said: dict[str, str] = {}
    faults = []
    known = {*TrainingConfig.model_fields, *ALIASES}
    for name, value in values.items():
        if name not in known:
            faults.append(f"TrainingConfig.{name}: no such setting. {did_you_mean(name, known)}")
            continue
        field = ALIASES.get(name, name)
        value = _spelled(field, value)
        if field in fields and fields[field] != value:
            faults.append(
                f"TrainingConfig.{name}: got {value!r}, and {said[field]}={fields[field]!r}: these are two names of one"
                " setting. Give one of them."
            )
        fields[field] = value
        said[field] = name
    return fields, faults


def _spelled(field: str, value: Any) -> Any:
    """The field's own word for a value that has several."""
    for word, meaning in _VALUES.get(field, {}).items():
        if value is word or (type(value) is type(word) and value == word):
            return meaning
    if field == "device_str" and value is not None and type(value).__name__ == "device":  # a torch.device
        return str(value)
    return value


def _as_faults(error: ValidationError) -> list[str]:
    faults: dict[str, str] = {}
    for entry in error.errors():
        field = str(entry["loc"][0])
        value = entry["input"]
        allowed = TrainingConfig.model_fields[field].description
        name = _SAID_AS.get(field, field)
        # One sentence for a field, though pydantic has one for each alternative of its type.
        faults.setdefault(name, f"TrainingConfig.{name}: got {value!r} ({type(value).__name__}); it must be {allowed}.")
    return list(faults.values())


def _device_fault(name: str) -> str | None:
    import torch

    try:
        torch.device(name)
    except RuntimeError as error:
        return f"it must be a device such as 'cpu' or 'cuda:0' ({str(error).splitlines()[0]})"
    return None


def _error(faults: list[str]) -> ConfigError:
    kind = ConfigKeyError if all("no such setting" in fault for fault in faults) else ConfigError
    return kind("\n".join(faults))
