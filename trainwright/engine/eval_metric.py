"""The metric of the best checkpoint in config files: which way it is better, and whether there is one."""

from typing import Any

from omegaconf import DictConfig

from trainwright.config.errors import ConfigError, did_you_mean
from trainwright.config.lazy.lookup import try_get_key
from trainwright.config.lazy.provenance import is_set
from trainwright.evaluation.evaluator import DatasetEvaluator
from trainwright.evaluation.metrics.objective import objective_of_name
from trainwright.hooks.overrides import is_overridden


def resolve_eval_mode(cfg: DictConfig) -> None:
    """Set ``train.evaluation.eval_mode`` in a whole configuration, where the user has not, by the name of the metric.

    Raises:
        ConfigError: the name does not tell.
    """
    evaluation = cfg.train.evaluation
    if is_set(evaluation, "eval_mode"):
        return
    objective = objective_of_name(evaluation.eval_metric)
    if objective is not None:
        evaluation.eval_mode = "max" if objective == "maximize" else "min"
    elif evaluation.enabled and try_get_key(cfg, "dataloader.test"):
        raise ConfigError(
            f"train.evaluation.eval_metric: got {evaluation.eval_metric!r}, and whether more of it is better is not"
            " known. Set train.evaluation.eval_mode='max' or 'min'."
        )


def check_eval_metric(trainer: Any, evaluator: DatasetEvaluator) -> None:
    """Refuse a metric of the best checkpoint that the user names and the evaluator does not give.

    A ``test`` of the user's own may give more.

    Raises:
        ConfigError: as said.
    """
    evaluation = trainer.cfg.train.evaluation
    known = None if is_overridden(trainer, "test") else evaluator.known_results()
    name = str(evaluation.eval_metric)
    # Of several data sets the results stand under the names of these.
    if is_set(evaluation, "eval_metric") and known is not None and name.rpartition("/")[2] not in known:
        raise ConfigError(
            f"train.evaluation.eval_metric: got {name!r}, which {evaluator!r} does not give."
            f" {did_you_mean(name, known)}"
        )
