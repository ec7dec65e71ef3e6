"""One setting, one field. All other names of settings and of values that the documents use stand in these tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.config.enums import MISSPELLED
from trainwright.config.training.metric_config import MetricConfig, plain
from trainwright.config.types import WARMUP_SCHEDULES

NO_OPINION = object()  # what a synonym may say of its field: whatever it is without it


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Synonym:
    """Another name of ``field``, which may show it in another form.

    Args:
        read: what the other name reads where the field has this value.
        write: the field's value for one that the other name is given, or ``NO_OPINION``. Raises ValueError, with what
            is allowed, for a value that cannot be.
        admits: whether the field may have this value where the other name has no opinion.
        note: how the two differ, for the reference.
    """

    field: str
    read: Callable[[Any], Any] = _same
    write: Callable[[Any], Any] = _same
    admits: Callable[[Any], bool] = lambda value: True
    note: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether it is only a name."""
        return self.write is _same


def _first_metric(metrics: Any) -> Any:
    return metrics[0] if isinstance(metrics, list) and metrics else None


def _epochs_to_checkpoint(model_checkpoint: Any) -> Any:
    return model_checkpoint.get("every_n_epoch", 0) if isinstance(model_checkpoint, dict) else 0


def _checkpoint_of_epochs(count: Any) -> dict[str, Any] | None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError("a whole number >= 0")
    return {"every_n_epoch": count} if count else None


def _is_cpu(device: Any) -> bool:
    return isinstance(device, str) and device.partition(":")[0] == "cpu"


def _evaluates(eval_strategy: Any) -> bool:
    return bool(eval_strategy != "no")


def _strategy_of(do_evaluate: Any) -> Any:
    return NO_OPINION if _yes_or_no(do_evaluate) else "no"


def _device_of(use_cpu: Any) -> Any:
    return "cpu" if _yes_or_no(use_cpu) else NO_OPINION


def _yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


SYNONYMS: dict[str, Synonym] = {
    "epoch_num": Synonym("num_epochs"),
    "train_epoch": Synonym("num_epochs"),
    "train_micro_batch_size": Synonym("batch_size"),
    "train_batch_size": Synonym("batch_size"),
    "val_batch_size": Synonym("eval_batch_size"),
    "test_micro_batch_size": Synonym("eval_batch_size"),
    "lr": Synonym("learning_rate"),
    "num_accumulation_steps": Synonym("gradient_accumulation_steps"),
    "amp": Synonym("mixed_precision"),
    "num_dataloader_workers": Synonym("dataloader_num_workers"),
    "log_period": Synonym("log_steps"),
    "load_weight": Synonym("init_weights_from"),
    "eval_metric": Synonym("metric_for_best_model"),
    "save_total_limit": Synonym("max_to_keep"),
    "device": Synonym("device_str", note="reads as a torch.device"),
    "metric": Synonym(
        "metrics", _first_metric, lambda value: [] if value is None else [value], note="the first, or None"
    ),
    "save_freq": Synonym(
        "model_checkpoint", _epochs_to_checkpoint, _checkpoint_of_epochs, note="its every_n_epoch; 0: None"
    ),
    "do_evaluate": Synonym("eval_strategy", _evaluates, _strategy_of, _evaluates, note="False: 'no'"),
    "use_cpu": Synonym("device_str", _is_cpu, _device_of, note="True: 'cpu'"),
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
    "profile": _NO | {True: {}},
}
_NAMED = ("optimizer", "lr_scheduler", "lr_scheduler_type")


def field_of(name: str) -> str:
    """The field that a name stands for."""
    return SYNONYMS[name].field if name in SYNONYMS else name


def canonical(field: str, value: Any) -> Any:
    """A field's value in plain types and in the field's own words.

    Raises:
        ConfigError: a metric's settings cannot be.
    """
    if field == "metrics" and isinstance(value, list | tuple):
        return [_metric(item) for item in value]
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


def _metric(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MetricConfig(**{str(key): item for key, item in value.items()})
    return value if isinstance(value, MetricConfig) else plain(value)


# What other libraries call a setting, and what to write here: for messages, not accepted.
FOREIGN = {
    "bf16": "mixed_precision='bf16'",
    "fp16": "mixed_precision='fp16'",
    "precision": "mixed_precision='bf16' or 'fp16'",
    "per_device_train_batch_size": "batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "num_train_epochs": "num_epochs",
    "max_epochs": "num_epochs",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "gradient_clip_val": "max_grad_norm",
    "evaluation_strategy": "eval_strategy",
    "logging_steps": "log_steps",
    "logging_dir": "logs_dir, or tensorboard={'log_dir': ...}",
    "save_strategy": "model_checkpoint={'every_n_epoch': 1}, or save_steps",
    "greater_is_better": "nothing, it follows from the metric; or metrics=[MetricConfig(name, objective='maximize')]",
    "report_to": "tensorboard={'log_dir': ...}, or None",
    "optim": "optimizer",
    "callbacks": "Trainer(..., callbacks=[...])",
    "compute_metrics": "metrics=[...], or Trainer(..., metrics_handler=...)",
    "early_stopping_patience": "early_stopping={'monitor': 'eval_loss', 'patience': 3, 'mode': 'min'}",
}
