"""The other names of settings, and the other spellings of values, that the documents use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from trainwright.config.torch_names import MISSPELLED
from trainwright.config.training.metric_config import MetricConfig
from trainwright.config.validation import WARMUP_SCHEDULES
from trainwright.config.yaml_file import plain

UNSPECIFIED = object()  # the value of an alias that does not determine its field


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of ``field``, whose value may have another form."""

    field: str
    read: Callable[[Any], Any] = _same  # the value of the field as that of the alias
    write: Callable[[Any], Any] = _same  # the inverse, or UNSPECIFIED. Raises ValueError with the allowed values.
    accepts: Callable[[Any], bool] = lambda value: True  # of the field, if the alias does not determine it
    note: str = ""  # how the two differ, for the reference

    @property
    def is_plain(self) -> bool:
        """Whether the values have the same form."""
        return self.write is _same


def _checkpoint_of_epochs(count: Any) -> dict[str, Any] | None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError("a whole number >= 0")
    return {"every_n_epoch": count} if count else None


def _evaluates(eval_strategy: Any) -> bool:
    return bool(eval_strategy != "no")


def _is_off(value: Any) -> bool:
    return not _yes_or_no(value)


def _yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


ALIASES: dict[str, Alias] = {
    "epoch_num": Alias("num_epochs"),
    "train_epoch": Alias("num_epochs"),
    "train_micro_batch_size": Alias("batch_size"),
    "train_batch_size": Alias("batch_size"),
    "val_batch_size": Alias("eval_batch_size"),
    "test_micro_batch_size": Alias("eval_batch_size"),
    "lr": Alias("learning_rate"),
    "num_accumulation_steps": Alias("gradient_accumulation_steps"),
    "amp": Alias("mixed_precision"),
    "num_dataloader_workers": Alias("dataloader_num_workers"),
    "log_period": Alias("log_steps"),
    "load_weight": Alias("init_weights_from"),
    "eval_metric": Alias("metric_for_best_model"),
    "save_total_limit": Alias("max_to_keep"),
    "num_train_epochs": Alias("num_epochs"),
    "max_epochs": Alias("num_epochs"),
    "epochs": Alias("num_epochs"),
    "per_device_train_batch_size": Alias("batch_size"),
    "per_device_eval_batch_size": Alias("eval_batch_size"),
    "accumulate_grad_batches": Alias("gradient_accumulation_steps"),
    "gradient_clip_val": Alias("max_grad_norm"),
    "clip_grad_norm": Alias("max_grad_norm"),
    "evaluation_strategy": Alias("eval_strategy"),
    "logging_steps": Alias("log_steps"),
    "log_every_n_steps": Alias("log_steps"),
    "limit_val_batches": Alias("limit_eval_batches"),
    "group_by_length": Alias("bucket_by_length"),
    "device": Alias("device_str", note="reads as a torch.device"),
    "metric": Alias(
        "metrics",
        read=lambda metrics: metrics[0] if isinstance(metrics, list) and metrics else None,
        write=lambda metric: [] if metric is None else [metric],
        note="the first, or None",
    ),
    "save_freq": Alias(
        "model_checkpoint",
        read=lambda periods: periods.get("every_n_epoch", 0) if isinstance(periods, dict) else 0,
        write=_checkpoint_of_epochs,
        note="its every_n_epoch; 0: None",
    ),
    "filter_bias_and_bn": Alias("decay_norm_and_bias", _is_off, _is_off, note="False: True"),
    "do_evaluate": Alias(
        "eval_strategy",
        read=_evaluates,
        write=lambda value: UNSPECIFIED if _yes_or_no(value) else "no",
        accepts=_evaluates,
        note="False: 'no'",
    ),
    "use_cpu": Alias(
        "device_str",
        read=lambda device: isinstance(device, str) and device.partition(":")[0] == "cpu",
        write=lambda value: "cpu" if _yes_or_no(value) else UNSPECIFIED,
        note="True: 'cpu'",
    ),
}

_NO = {"no": None, "null": None, "None": None, False: None}
# Other spellings of values, by field.
VALUES: dict[str, dict[Any, Any]] = {
    "mixed_precision": {True: "bf16", False: "no", "full": "no"},
    "eval_strategy": {"steps": "step", None: "no", False: "no", "null": "no", "None": "no"},
    "eval_batch_size": {-1: None},
    "early_stopping": _NO,
    "model_checkpoint": _NO,
    "tensorboard": _NO,
    "trackers": _NO,
    "profile": _NO | {True: {}},
    "ema": _NO | {True: {}},
    "overfit_batches": {0: None},
}
_NAMED = ("optimizer", "lr_scheduler", "lr_scheduler_type")


def field_of(name: str) -> str:
    """The field that has this name or alias."""
    return ALIASES[name].field if name in ALIASES else name


def canonical(field: str, value: Any) -> Any:
    """The value of a field in plain types and in its canonical spelling.

    Raises:
        ConfigError: the settings of a metric are wrong.
    """
    if field == "metrics" and isinstance(value, list | tuple):
        return [_metric(item) for item in value]
    if field == "max_time":
        return _seconds(value)
    value = plain(value)
    for word, meaning in VALUES.get(field, {}).items():
        if type(value) is type(word) and value == word:
            return meaning
    if field in _NAMED:
        return _named(field, value)
    return value


def _named(field: str, value: Any) -> Any:
    if isinstance(value, dict) and "name_" in value:
        name = _named(field, value["name_"])
        is_alone = field == "lr_scheduler_type" and len(value) == 1 and name in WARMUP_SCHEDULES
        return name if is_alone else {**value, "name_": name}
    return MISSPELLED.get(value, value) if isinstance(value, str) else value


def _seconds(value: Any) -> Any:
    """A timedelta, or the dict of its arguments, as seconds."""
    if isinstance(value, Mapping):
        try:
            value = timedelta(**{str(unit): amount for unit, amount in value.items()})
        except TypeError as error:
            raise ValueError("a timedelta, or its arguments, such as {'hours': 12}") from error
    return value.total_seconds() if isinstance(value, timedelta) else plain(value)


def _metric(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MetricConfig(**{str(key): item for key, item in value.items()})
    return value if isinstance(value, MetricConfig) else plain(value)
