"""The metric that selects the best checkpoint: its key in the storage and its mode. Early stopping uses it too."""

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainwright.config.errors import ConfigError, ConfigKeyError, did_you_mean
from trainwright.evaluation.objective import find_objective, objective_by_user
from trainwright.hooks.method_overrides import is_overridden

if TYPE_CHECKING:
    from trainwright.config.training.training_config import TrainingConfig

logger = logging.getLogger("trainwright.engine")

_OBJECTIVES = {"max": "maximize", "min": "minimize"}
_MODES = {objective: mode for mode, objective in _OBJECTIVES.items()}


def metric_for_best(config: "TrainingConfig", trainer: Any, *, evaluates: bool) -> tuple[str, str]:
    """Storage key and mode ("max" or "min") of ``config.metric_for_best_model``.

    ``train.x`` is the training metric x. ``evaluation.x``, ``eval_x`` and x are the evaluation metric x if the run
    evaluates.

    Raises:
        ConfigError: the mode of the metric is unknown.
    """
    key = storage_key_of_best(config, trainer, evaluates=evaluates)
    return key, _mode_of_best(_split(config.metric_for_best_model, trainer, evaluates=evaluates)[1], config, trainer)


def storage_key_of_best(config: "TrainingConfig", trainer: Any, *, evaluates: bool) -> str:
    """Storage key of ``config.metric_for_best_model``."""
    prefix, key = _split(config.metric_for_best_model, trainer, evaluates=evaluates)
    if prefix == "evaluation":
        return f"evaluation/{key}"
    return "total_loss" if key == "loss" else key


def key_of_monitor(monitor: str, trainer: Any) -> str:
    """Storage key of a callback's monitor of an evaluation of several data sets."""
    return f"evaluation/{_split(monitor, trainer, evaluates=True)[1]}"


def mode_of_monitor(monitor: str, config: "TrainingConfig", trainer: Any) -> str:
    """Mode of a callback's monitor: "max", "min", or "auto" if only its name can decide.

    If the monitor is also ``metric_for_best_model``, the settings of that metric apply.
    """
    prefix, key = _split(monitor, trainer, evaluates=monitor.startswith("eval"))
    if (prefix, key) == _split(config.metric_for_best_model, trainer, evaluates=True):
        return _mode_of_best(key, config, trainer)
    return _mode_of(key, config, trainer) or "auto"


def check_best_metric(config: "TrainingConfig", trainer: Any) -> None:
    """Check that the evaluation computes ``metric_for_best_model``, if the results are known in advance.

    Raises:
        ConfigError: no evaluation computes it.
    """
    prefix, key = _split(config.metric_for_best_model, trainer, evaluates=True)
    known = getattr(trainer.metrics_handler, "known_results", lambda: None)()
    is_of_user = any(is_overridden(trainer, name) for name in ("evaluate", "evaluate_step", "compute_metric"))
    name, _, key = key.rpartition("/")
    if prefix != "evaluation" or key == "loss" or known is None or is_of_user:
        return
    names = list(trainer.eval_dataloader) if name else []
    results = [f"{one}.{result}" for one in names for result in ["loss", *known]] or ["loss", *known]
    if key not in known and re.sub(r"_\d+$", "", key) not in known:  # per-class results
        raise ConfigError(
            f"TrainingConfig.metric_for_best_model: got {config.metric_for_best_model!r}, which the evaluation does not"
            f" compute; its results are {', '.join(results)}. {did_you_mean(config.metric_for_best_model, results)}"
            " Add it to metrics, or pass a metrics_handler."
        )


def warn_of_unknown_monitor(monitor: str, trainer: Any) -> None:
    """Log a warning if neither the evaluation nor the metrics of the run have a value that early stopping watches.

    It is no error yet: the model, or a callback, may put the value.
    """
    known = getattr(trainer.metrics_handler, "known_results", lambda: None)()
    is_of_user = any(is_overridden(trainer, name) for name in ("evaluate", "evaluate_step", "compute_metric"))
    if known is None or is_of_user or isinstance(trainer.eval_dataloader, Mapping):
        return
    name = re.sub(r"_\d+$", "", monitor.removeprefix("eval_").removeprefix("epoch_").removeprefix("step_"))
    if name not in {"loss", "metric", "lr", *known} and monitor not in known:
        logger.warning(
            "TrainingConfig.early_stopping: got monitor=%r, which neither the evaluation nor the metrics of this run"
            " have. %s Unless the model or a callback puts it, the run ends with an error after its first epoch.",
            monitor, did_you_mean(monitor, ["eval_loss", *(f"eval_{one}" for one in known)]),
        )  # fmt: skip


def raise_missing(key: str, trainer: Any) -> None:
    """Called if an evaluation has not computed the metric with this storage key.

    Raises:
        ConfigKeyError: always, because load_best_model_at_end needs it.
    """
    name = key.removeprefix("evaluation/")
    raise ConfigKeyError(
        f"TrainingConfig.metric_for_best_model: the evaluation computed no {name!r}, which load_best_model_at_end"
        f" needs. {did_you_mean(name, sorted(trainer.last_eval_results))}"
    )


def _split(name: str, trainer: Any, *, evaluates: bool) -> tuple[str, str]:
    """Prefix (``"train"`` or ``"evaluation"``) and key of a metric name."""
    prefix, _, key = name.partition(".")
    if prefix not in ("train", "evaluation") or not key:
        prefix, key = "evaluation" if evaluates or name.startswith("eval_") else "train", name.removeprefix("eval_")
    if key in ("epoch_loss", "epoch_metric"):  # names used by callbacks
        first = getattr(trainer.metrics_handler, "first", None) if key == "epoch_metric" else None
        key = "loss" if key == "epoch_loss" else getattr(first, "key", "metric")
    return prefix, _as_result(_with_dataset(key, trainer), trainer) if prefix == "evaluation" else key


def _as_result(key: str, trainer: Any) -> str:
    """``key`` as the evaluation names it. As in ``metrics``, case and underscores do not matter."""
    known = getattr(trainer.metrics_handler, "known_results", lambda: None)() or ()
    dataset, slash, name = key.rpartition("/")
    plain = {one.lower().replace("_", ""): one for one in known}
    return key if name in known else dataset + slash + plain.get(name.lower().replace("_", ""), name)


def _with_dataset(key: str, trainer: Any) -> str:
    """``key`` with the name of its data set, if there are several: ``clean.accuracy`` is ``clean/accuracy``.

    A key without a data set is of the first one.
    """
    names = list(trainer.eval_dataloader) if isinstance(trainer.eval_dataloader, Mapping) else []
    for name in sorted(names, key=len, reverse=True):
        if re.match(f"{re.escape(name)}[./_].", key):
            return f"{name}/{key[len(name) + 1 :]}"
    return f"{names[0]}/{key}" if names else key


def _mode_of_best(key: str, config: "TrainingConfig", trainer: Any) -> str:
    if config.greater_is_better is not None:
        mode = "max" if config.greater_is_better else "min"
        by_user = objective_by_user(key.rpartition("/")[2], config.metrics)
        if by_user not in (None, _OBJECTIVES[mode]):
            raise ConfigError(
                f"TrainingConfig.greater_is_better: got {config.greater_is_better}, but the MetricConfig of {key!r} has"
                f" objective={by_user!r}. Set only one of them."
            )
        return mode
    known = _mode_of(key, config, trainer)
    if known is None:
        raise ConfigError(
            f"TrainingConfig.metric_for_best_model: got {config.metric_for_best_model!r}, and it is unknown whether"
            " higher is better. Set greater_is_better=True or greater_is_better=False."
        )
    return known


def _mode_of(key: str, config: "TrainingConfig", trainer: Any) -> str | None:
    """Mode of the result ``key`` by its MetricConfig, its metric or its name; None if unknown."""
    key = key.rpartition("/")[2]
    if key == "loss":
        return "min"
    objective = objective_by_user(key, config.metrics) or find_objective(key, trainer.metrics_handler)
    return None if objective is None else _MODES[objective]
