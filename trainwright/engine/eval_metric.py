"""The metric that selects the best checkpoint in config files: its mode, and whether the evaluator computes it."""

from typing import Any

from omegaconf import DictConfig

from trainwright.config.errors import ConfigError, did_you_mean
from trainwright.config.lazy.lazy_config import try_get_key
from trainwright.config.lazy.provenance import is_set
from trainwright.evaluation.evaluator import DatasetEvaluator
from trainwright.evaluation.metrics.objective import objective_of_name
from trainwright.hooks.overrides import is_overridden


def resolve_eval_mode(cfg: DictConfig) -> None:
    """Set ``train.evaluation.eval_mode`` in a complete configuration by the metric's name, unless the user has set it.

    Raises:
        ConfigError: the mode of the metric is unknown.
    """
    evaluation = cfg.train.evaluation
    if is_set(evaluation, "eval_mode"):
        return
    objective = objective_of_name(evaluation.eval_metric)
    if objective is not None:
        evaluation.eval_mode = "max" if objective == "maximize" else "min"
    elif evaluation.enabled and try_get_key(cfg, "dataloader.test"):
        raise ConfigError(
            f"train.evaluation.eval_metric: got {evaluation.eval_metric!r}, and it is unknown whether higher is"
            " better. Set train.evaluation.eval_mode='max' or 'min'."
        )


def check_eval_metric(trainer: Any, evaluator: DatasetEvaluator) -> None:
    """Check that the evaluator computes the ``eval_metric`` that the user sets.

    A user's ``test`` may return more results, so it is not checked.

    Raises:
        ConfigError: the evaluator does not compute it.
    """
    evaluation = trainer.cfg.train.evaluation
    known = None if is_overridden(trainer, "test") else evaluator.known_results()
    name = str(evaluation.eval_metric)
    # With several data sets, results are named after them.
    if is_set(evaluation, "eval_metric") and known is not None and name.rpartition("/")[2] not in known:
        raise ConfigError(
            f"train.evaluation.eval_metric: got {name!r}, which {evaluator!r} does not compute."
            f" {did_you_mean(name, known)}"
        )
