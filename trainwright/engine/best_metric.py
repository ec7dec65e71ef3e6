"""The metric that selects the best checkpoint, and the monitor of early stopping: storage keys and modes."""

import copy
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trainwright.base.errors import ConfigError, ConfigKeyError, did_you_mean, nearest_of
from trainwright.config.spec import RunSpec
from trainwright.evaluation.evaluator import flatten_results_dict
from trainwright.evaluation.objective import MODES, find_objective, objective_by_user
from trainwright.hooks.callbacks.base import Callback, TrainerControl
from trainwright.hooks.callbacks.early_stopping import EarlyStoppingCallback

logger = logging.getLogger("trainwright.engine")

FOR_EVALUATIONS = {
    "Python": "Pass an eval_dataset (and no eval_strategy='no')",
    "config file": "Set dataloader.test (and train.evaluation.enabled=True)",
}
_MORE_RESULTS = {
    "Python": "Add it to metrics, or pass a metrics_handler.",
    "config file": "Another evaluator is set as train.evaluation.evaluator, or several in a list.",
}


class BestMetric:
    """``spec.metric_for_best_model``, and other names of metrics in the settings, as the run stores them.

    ``train.x`` is the training metric x. ``evaluation.x``, ``eval_x`` and x are the evaluation metric x if the run
    evaluates. A mode is "max" or "min".

    ``handler`` returns the object that computes the metrics of evaluations. ``datasets``: the names of the evaluation
    data sets, if results have them. ``has_own_results``: whether the user's own methods return the results. ``prefix``:
    of the results in the storage.
    """

    def __init__(
        self,
        spec: RunSpec,
        handler: Callable[[], Any],
        datasets: Iterable[str],
        *,
        evaluates: bool,
        has_own_results: Callable[[], bool],
        prefix: str = "eval_",
    ) -> None:
        self._spec, self._name, self._handler = spec, spec.metric_for_best_model, handler
        self._setting, self._is_higher_better = "metric_for_best_model", spec.greater_is_better
        self._datasets, self._evaluates, self._has_own_results = list(datasets), evaluates, has_own_results
        self._prefix = prefix

    def others(self) -> "list[BestMetric]":
        """Those of the setting ``save_best``, except for this one."""
        found = {self.key: self}
        for name, mode in _directions_of(self._spec.save_best).items():
            one = copy.copy(self)
            one._name, one._setting = name, "save_best"
            one._is_higher_better = None if mode is None else mode == "max"
            where = self._spec.where("save_best")
            if one.key == self.key and mode not in (None, self.mode()):
                raise ConfigError(
                    f"{where}: got {name!r}: {mode!r}, but it is {self.mode()!r} as the metric of the best model."
                )
            first = next((each for each in [*found.values()][1:] if each.file_name == one.file_name), None)
            if first is not None and first.key != one.key:
                raise ConfigError(f"{where}: {first.key!r} and {one.key!r} have the same file name, {one.file_name}.")
            found.setdefault(one.key, one)
        return [*found.values()][1:]

    @property
    def key(self) -> str:
        """Its storage key."""
        return self._key(self._prefix)

    @property
    def is_of_training(self) -> bool:
        """Whether it needs no evaluation."""
        return self._name.startswith("train.") or self.key == "total_loss"

    @property
    def file_name(self) -> str:
        """That of its best checkpoint, for a metric of ``save_best``."""
        name = re.sub(r"[^\w.@-]", "_", self.key.removeprefix("eval_"))  # such as clean/accuracy
        return f"model_{name}_best"

    def mode(self) -> str:
        return self._mode_of_best(self._split(self._name, evaluates=self._evaluates)[1])

    def check_mode(self) -> None:
        """Warn of a mode that is not that of the metric."""
        if self._is_higher_better is not None:
            setting = "save_best" if self._setting == "save_best" else "greater_is_better"
            key = self._split(self._name, evaluates=True)[1]
            self._warn_of_mode(setting, "max" if self._is_higher_better else "min", key)

    def check_results(self, *, is_put_by_user: bool) -> None:
        """Check that the evaluation computes it, if the results are known in advance.

        ``is_put_by_user``: as for :meth:`check_monitor`.

        Raises:
            ConfigError: nothing of this run computes it.
        """
        if (text := self.unknown_result()) is None:
            return
        if not is_put_by_user or "'train.train_loss'" in text:
            raise ConfigError(text)
        logger.warning("%s Unless your code logs it, the run ends with an error after its first evaluation.", text)

    def unknown_result(self) -> str | None:
        """The text of an error if the user names a metric that is not among the results; None if these are unknown."""
        prefix, key = self._split(self._name, evaluates=True)
        name, _, key = key.rpartition("/")
        known = self._known_results()
        # The model may return it, or name parts of it.
        is_loss = "loss" in key and not key.endswith("_PPL") and key != "train_loss"
        if prefix != "evaluation" or is_loss or known is None or not self._spec.is_set(self._setting):
            return None
        names = self._datasets if name else []
        results = [f"{one}.{result}" for one in names for result in ["loss", *known]] or ["loss", *known]
        if not {self._name, key, re.sub(r"_\d+$", "", key)}.isdisjoint(known):  # there may be a result for each class
            return None
        near = did_you_mean(f"{name}.{key}" if name else key, results)
        hint = f"{near} {_MORE_RESULTS[self._spec.api]}"
        if key == "train_loss":
            hint = "Did you mean 'train.loss'? A value of this name that your code logs is 'train.train_loss'."
        return (
            f"{self._spec.where(self._setting)}: got {self._name!r}, which the evaluation does not"
            f" compute; its results are {', '.join(results)}. {hint}"
        )

    def raise_missing(self, results: Mapping[str, Any]) -> None:
        """Called if an evaluation with these ``results`` has not computed it."""
        spec, name = self._spec, self.key.removeprefix("eval_")
        is_loaded = self._setting == "metric_for_best_model" and spec.load_best_model_at_end
        use = f"which {spec.name_of('load_best_model_at_end')} needs" if is_loaded else "which selects a checkpoint"
        raise ConfigKeyError(
            f"{spec.where(self._setting)}: the evaluation computed no {name!r}, {use}."
            f" {did_you_mean(name, sorted(results))}"
        )

    def line_for(self, results: Mapping[str, Any]) -> str:
        """What to write to choose the best model by one of these ``results`` instead; empty if that is not known."""
        names, spec = [*flatten_results_dict(results)], self._spec
        if not names or self._setting == "save_best":
            return ""
        metrics = [name for name in names if "loss" not in name] or names
        name = nearest_of(self.key.removeprefix("eval_"), metrics) or metrics[0]
        values = ["'max'", "'min'"] if spec.api == "config file" else ["True", "False"]
        mode = f" and {spec.name_of('greater_is_better')}={' or '.join(values)}"
        return f"Write {spec.name_of(self._setting)}={name!r}{'' if self._mode_of(name) else mode}."

    def name_in_logs(self) -> str:
        key = self._key("eval_")
        return {"total_loss": "epoch_loss", self._first_key(""): "epoch_metric"}.get(key, key)

    def monitor(self, name: str, mode: str, *, is_put_by_user: bool) -> tuple[str, str]:
        """Name in the logs of callbacks and mode of a monitor, whose name may lack its data set.

        The mode "auto" is resolved, unless only the name can decide. If the monitor is also ``metric_for_best_model``,
        the settings of that metric apply. Another mode than the known one is a warning. ``is_put_by_user``: as for
        :meth:`check_monitor`.
        """
        where = self._spec.where("early_stopping")
        self.check_monitor(name, where, is_put_by_user=is_put_by_user)
        prefix, key = self._split(name, evaluates=name.startswith("eval"))
        if mode != "auto":
            if self._spec.api == "config file" or self._spec.greater_is_better is None:
                self._warn_of_mode("early_stopping", mode, key)
        elif (prefix, key) == self._split(self._name, evaluates=True):
            mode = self._mode_of_best(key)
        else:
            mode = self._mode_of(key) or "auto"
        is_complete = not self._datasets or name.startswith(("epoch_", "eval_epoch_"))
        return name if is_complete else f"eval_{self._split(name, evaluates=True)[1]}", mode

    def check_monitor(self, monitor: str, where: str, *, is_put_by_user: bool) -> None:
        """Check that the evaluation or the metrics of the run have a value that early stopping watches.

        ``is_put_by_user``: the user's code, such as a callback, may log the value, as a model may return a loss of
        another name: then an unknown name is a warning. ``where`` the monitor was set.

        Raises:
            ConfigKeyError: nothing of this run puts the value.
        """
        hint = self._hint_for(monitor)
        if not hint:
            return
        text = (
            f"{where}: got monitor={monitor!r}, which neither the evaluation nor the metrics of this run have. {hint}"
        )
        is_of_model = "loss" in monitor and not monitor.startswith("val")  # no results of an evaluation are called so
        if not (is_put_by_user or is_of_model):
            raise ConfigKeyError(text)
        logger.warning(
            "%s Unless the model returns it or your code logs it, the run ends with an error at its first evaluation or"
            " epoch.",
            text,
        )

    # Implementation.

    def _hint_for(self, monitor: str) -> str:
        """The nearest name for a monitor that the run does not have; empty if it has it, or may have it."""
        known = self._known_results()
        if known is None:
            return ""
        name = re.sub(r"^(eval_|val(id|idation)?_)?(epoch_|step_)?|_\d+$", "", monitor)
        if self._datasets:  # any of them may be named
            name = re.sub(r"_\d+$", "", self._with_dataset(name).rpartition("/")[2])
        is_known = name in {"loss", "metric", "lr", *known} and not monitor.startswith("val")
        return (
            ""
            if is_known or monitor in known
            else did_you_mean(f"eval_{name}", [f"eval_{n}" for n in ("loss", *known)])
        )

    def _key(self, prefix: str) -> str:
        kind, key = self._split(self._name, evaluates=self._evaluates)
        if kind == "evaluation":
            return prefix + key
        return "total_loss" if key == "loss" else key

    def _warn_of_mode(self, setting: str, mode: str, key: str) -> None:
        known = self._mode_of(key)
        if known is not None and mode in MODES.values() and mode != known:
            better = {"max": "higher", "min": "lower"}
            logger.warning(
                "%s: a %s %s counts as better here; a %s one is better.",
                self._spec.where(setting),
                better[mode],
                key,
                better[known],
            )

    def _known_results(self) -> Sequence[str] | None:
        """The results that an evaluation computes beside the loss; None if they are not known in advance."""
        if self._has_own_results():
            return None
        known: Sequence[str] | None = getattr(self._handler(), "known_results", lambda: None)()
        return known

    def _first_key(self, default: str) -> str:
        return getattr(getattr(self._handler(), "first", None), "key", default)

    def _split(self, name: str, *, evaluates: bool) -> tuple[str, str]:
        """Prefix (``"train"`` or ``"evaluation"``) and key of a metric name."""
        prefix, _, key = name.partition(".")
        if prefix not in ("train", "evaluation") or not key:
            prefix, key = "evaluation" if evaluates or name.startswith("eval_") else "train", name.removeprefix("eval_")
        if key in ("epoch_loss", "epoch_metric"):  # names used by callbacks
            key = "loss" if key == "epoch_loss" else self._first_key("metric")
        return prefix, self._as_result(self._with_dataset(key)) if prefix == "evaluation" else key

    def _as_result(self, key: str) -> str:
        """``key`` as the evaluation names it. As in ``metrics``, case and underscores do not matter."""
        known: Sequence[str] = getattr(self._handler(), "known_results", tuple)() or ()
        dataset, slash, name = key.rpartition("/")
        plain = {one.lower().replace("_", ""): one for one in known}
        return key if name in known else dataset + slash + plain.get(name.lower().replace("_", ""), name)

    def _with_dataset(self, key: str) -> str:
        """``key`` with the name of its data set, if there are several: ``clean.accuracy`` is ``clean/accuracy``.

        A key without a data set is of the first one.
        """
        for name in sorted(self._datasets, key=len, reverse=True):
            if re.match(f"{re.escape(name)}[./_].", key):
                return f"{name}/{key[len(name) + 1 :]}"
        return f"{self._datasets[0]}/{key}" if self._datasets else key

    def _mode_of_best(self, key: str) -> str:
        spec = self._spec
        if self._is_higher_better is not None:
            mode = "max" if self._is_higher_better else "min"
            by_user = objective_by_user(key.rpartition("/")[2], spec.metrics)
            if by_user is not None and MODES[by_user] != mode:
                is_of_list = self._setting == "save_best"
                where = spec.where("save_best" if is_of_list else "greater_is_better")
                got = f"{{{self._name!r}: {mode!r}}}" if is_of_list else self._is_higher_better
                raise ConfigError(
                    f"{where}: got {got}, but the MetricConfig of"
                    f" {key!r} has objective={by_user!r}. Set only one of them."
                )
            return mode
        known = self._mode_of(key)
        if known is None:
            fix = f"Set {spec.name_of('greater_is_better')}=True or {spec.name_of('greater_is_better')}=False."
            if self._setting == "save_best":
                fix = f"Set save_best={{{self._name!r}: 'max'}} or {{{self._name!r}: 'min'}}."
            if (text := self.unknown_result()) is not None:
                raise ConfigError(f"{text} If your code logs it: {fix}")
            raise ConfigError(
                f"{spec.where(self._setting)}: got {self._name!r}, and it is unknown whether higher is better. {fix}"
            )
        return known

    def _mode_of(self, key: str) -> str | None:
        """Mode of the result ``key`` by its MetricConfig, its metric or its name; None if unknown."""
        key = key.rpartition("/")[2]
        if key == "loss":
            return "min"
        objective = objective_by_user(key, self._spec.metrics) or find_objective(key, self._handler())
        return None if objective is None else MODES[objective]


def _directions_of(metrics: str | Sequence[str] | Mapping[str, str | None] | None) -> Mapping[str, str | None]:
    """The directions of the setting ``save_best`` by the names of the metrics; None for one that is not given."""
    if isinstance(metrics, Mapping):
        return metrics
    return dict.fromkeys([metrics] if isinstance(metrics, str) else metrics or ())


def early_stopping(
    spec: RunSpec, control: TrainerControl, best: BestMetric, *, evaluates: bool, is_put_by_user: bool
) -> list[Callback]:
    """The callback of the setting, if there is one: for the monitor that the user sets, or else the best metric."""
    if spec.early_stopping is None:
        return []
    given = spec.as_set["early_stopping"] if spec.is_set("early_stopping") else {}
    settings: dict[str, Any] = dict(spec.early_stopping)
    if (
        given
        and not evaluates
        and ("monitor" in given or not (spec.is_set("metric_for_best_model") and best.is_of_training))
    ):
        _warn_of_no_evaluation(spec, spec.where("early_stopping"), given.get("monitor"))
    if "monitor" in given:
        monitor, mode = best.monitor(settings["monitor"], settings["mode"], is_put_by_user=is_put_by_user)
        settings |= {"monitor": monitor, "mode": mode}
    elif evaluates or spec.is_set("metric_for_best_model"):
        settings |= {"monitor": best.name_in_logs(), "mode": given.get("mode", best.mode())}
    else:
        return []
    callback = EarlyStoppingCallback(control, **settings)
    # Config files have it only if it is set.
    callback.is_default = "monitor" not in given and spec.api == "Python"
    callback.turned_off_by = f"{spec.name_of('early_stopping')}=None turns it off"
    return [callback]


def _warn_of_no_evaluation(spec: RunSpec, where: str, monitor: object) -> None:
    """Log that nothing computes what an early stopping watches; ``monitor``: None if it is the best metric."""
    if monitor is None or str(monitor).startswith("eval"):
        logger.warning(
            "%s: watches %s, but nothing is evaluated, so it never stops the run. %s, or watch a training metric such"
            " as 'epoch_loss'.", where, monitor or "the result of an evaluation", FOR_EVALUATIONS[spec.api],
        )  # fmt: skip


def check_monitors(
    spec: RunSpec, callbacks: Iterable[Callback], best: BestMetric, *, evaluates: bool, is_put_by_user: bool
) -> None:
    """Check the monitor of each early stopping that the user has added."""
    for callback in callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            if not (evaluates or is_put_by_user):
                _warn_of_no_evaluation(spec, "EarlyStoppingCallback", callback.monitor)
            best.check_monitor(callback.monitor, "EarlyStoppingCallback", is_put_by_user=is_put_by_user)
