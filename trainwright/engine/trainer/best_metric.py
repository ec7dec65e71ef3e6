"""The metric of the best checkpoint: where it stands, and which way it is better. Early stopping uses it, too."""

import re
from typing import TYPE_CHECKING, Any

from trainwright.config.errors import ConfigError, did_you_mean
from trainwright.evaluation.objective import find_objective, objective_by_user
from trainwright.hooks.overrides import is_overridden

if TYPE_CHECKING:
    from trainwright.config.training.training_config import TrainingConfig

_OBJECTIVES = {"max": "maximize", "min": "minimize"}
_MODES = {objective: mode for mode, objective in _OBJECTIVES.items()}


def metric_for_best(config: "TrainingConfig", trainer: Any, *, evaluates: bool) -> tuple[str, str]:
    """Where the metric that ``config.metric_for_best_model`` names stands in the storage; and "max" or "min".

    ``train.x`` is x of training, ``evaluation.x``, ``eval_x`` or x that of the evaluation, if there is one.

    Raises:
        ConfigError: whether more of it is better is not known.
    """
    place = place_of_best(config, trainer, evaluates=evaluates)
    return place, _mode_of_best(_split(config.metric_for_best_model, trainer, evaluates=evaluates)[1], config, trainer)


def place_of_best(config: "TrainingConfig", trainer: Any, *, evaluates: bool) -> str:
    """Where that metric stands in the storage."""
    prefix, key = _split(config.metric_for_best_model, trainer, evaluates=evaluates)
    if prefix == "evaluation":
        return f"evaluation/{key}"
    return "total_loss" if key == "loss" else key


def mode_of_monitor(monitor: str, config: "TrainingConfig", trainer: Any) -> str:
    """ "max" or "min" for what a callback watches; "auto" where only its name can tell.

    What the configuration says of the metric of the best checkpoint counts for a monitor that is the same metric.
    """
    prefix, key = _split(monitor, trainer, evaluates=monitor.startswith("eval"))
    if (prefix, key) == _split(config.metric_for_best_model, trainer, evaluates=True):
        return _mode_of_best(key, config, trainer)
    return _mode_of(key, config, trainer) or "auto"


def check_best_metric(config: "TrainingConfig", trainer: Any) -> None:
    """Refuse a metric of the best checkpoint that no evaluation gives, as far as that is known before the first one.

    Raises:
        ConfigError: as said.
    """
    prefix, key = _split(config.metric_for_best_model, trainer, evaluates=True)
    known = getattr(trainer.metrics_handler, "known_results", lambda: None)()
    is_of_user = any(is_overridden(trainer, name) for name in ("evaluate", "evaluate_step", "compute_metric"))
    if prefix != "evaluation" or key == "loss" or known is None or is_of_user:
        return
    if key not in known and re.sub(r"_\d+$", "", key) not in known:  # a result for each class
        raise ConfigError(
            f"TrainingConfig.metric_for_best_model: got {config.metric_for_best_model!r}, which no evaluation gives: it"
            f" gives {', '.join(['loss', *known])}. {did_you_mean(key, ['loss', *known])}"
            " Name it in metrics, or give a metrics_handler."
        )


def _split(name: str, trainer: Any, *, evaluates: bool) -> tuple[str, str]:
    """``"train"`` or ``"evaluation"``, and the key of the metric there."""
    prefix, _, key = name.partition(".")
    if prefix not in ("train", "evaluation") or not key:
        prefix, key = "evaluation" if evaluates or name.startswith("eval_") else "train", name.removeprefix("eval_")
    if key in ("epoch_loss", "epoch_metric"):  # what callbacks call them
        first = getattr(trainer.metrics_handler, "first", None) if key == "epoch_metric" else None
        key = "loss" if key == "epoch_loss" else getattr(first, "key", "metric")
    return prefix, key


def _mode_of_best(key: str, config: "TrainingConfig", trainer: Any) -> str:
    if config.greater_is_better is not None:
        mode, by_user = "max" if config.greater_is_better else "min", objective_by_user(key, config.metrics)
        if by_user not in (None, _OBJECTIVES[mode]):
            raise ConfigError(
                f"TrainingConfig.greater_is_better: got {config.greater_is_better}, but the MetricConfig of {key!r} has"
                f" objective={by_user!r}. Give one of them."
            )
        return mode
    known = _mode_of(key, config, trainer)
    if known is None:
        raise ConfigError(
            f"TrainingConfig.metric_for_best_model: got {config.metric_for_best_model!r}, and whether more of it is"
            " better is not known. Set greater_is_better=True or greater_is_better=False."
        )
    return known


def _mode_of(key: str, config: "TrainingConfig", trainer: Any) -> str | None:
    """Which way the result ``key`` is better: by its MetricConfig, its metric, its name. None if these say nothing."""
    if key == "loss":
        return "min"
    objective = objective_by_user(key, config.metrics) or find_objective(key, trainer.metrics_handler)
    return None if objective is None else _MODES[objective]
