"""Evaluation and prediction in the Python API."""

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainwright.base.batch import arguments, parameter_names, to_batch
from trainwright.base.dist import (
    get_averaging_size,
    get_world_size,
)
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.base.signatures import read_signature
from trainwright.data.errors import batch_in_errors, data_fault
from trainwright.data.instance import Instance
from trainwright.data.sampler import refuse_empty
from trainwright.engine import loaders
from trainwright.engine.loss_fn import forward, used_loss
from trainwright.engine.run import TrainerRun
from trainwright.evaluation.comparison import Comparison, Comparisons
from trainwright.evaluation.loop import evaluate_batches, watched_batches
from trainwright.evaluation.results import EvaluationResults
from trainwright.hooks.callbacks import RunCallbacks
from trainwright.hooks.callbacks.bridge import named_results
from trainwright.models.eval_mode import evaluation_mode
from trainwright.models.outputs import losses_of, named_outputs, predictions_of
from trainwright.models.targets import target_of
from trainwright.parallel.faults import meet
from trainwright.parallel.mesh import current_mesh
from trainwright.parallel.pipeline import pipeline_of
from trainwright.parallel.sharding import computes_together, gathered
from trainwright.trainer import checks, parts

logger = logging.getLogger("trainwright.engine")

_OWN_LOGS = {"loss": "eval_epoch_loss", "metric": "eval_epoch_metric"}  # results by what callbacks call them


class Evaluation:
    """Evaluates the model, and predicts, with the methods that the user has overridden in place of its own.

    ``handler`` returns the current metrics. ``default_collator`` is that of samples in a list. ``replaced_model`` is
    entered while another model is evaluated in place of the run's.
    """

    def __init__(
        self,
        run: TrainerRun,
        *,
        handler: Callable[[], Any],
        compute_loss: Callable[[Any, Any], Any],
        preprocessor: Any,
        collator: Callable[[list[Any]], Any] | None,
        default_collator: Callable[[list[Any]], Any] | None,
        replaced_model: Callable[[Any], AbstractContextManager[None]],
    ) -> None:
        self._run, self._overrides = weakref.proxy(run), run.overrides
        self._handler, self._own_compute_loss, self._replaced_model = handler, compute_loss, replaced_model
        self._preprocessor, self._collator, self._default_collator = preprocessor, collator, default_collator
        self._watching: RunCallbacks | None = None  # callbacks that see the batches
        self._has_checked_calls = False
        own = weakref.proxy(run)
        self.comparisons = Comparisons(
            lambda: own.model,
            lambda batch: own.declared_criterion(used_loss(getattr(own.model, "compute_loss", None), batch)),
            label_names=run.spec.label_names,
            loss_ignores=run.spec.loss_ignores,
        )

    # Data.

    def loaders_of(self, data: Any) -> Any:
        """The loader of a data set, or of each data set of a dict; loaders are returned unchanged."""
        if isinstance(data, Mapping):
            checks.check_named_data(data, "eval_dataset")
            return {name: self.loaders_of(one) for name, one in data.items()}
        if not loaders.is_dataset(data):
            return data
        parts.give_preprocessor(self._preprocessor, self._run.model, data)
        return self.loader_of(data)

    def loader_of(self, dataset: Any) -> Any:
        """The loader over one data set, by the user's method if there is one."""
        return self._overrides.of("create_eval_dataloader", self.create_loader)(dataset)

    def create_loader(self, dataset: Any) -> Any:
        collator = self._collator
        if collator is None and isinstance(dataset, list):  # of samples like those of the training data
            collator = self._default_collator
        return loaders.eval_loader(dataset, self._run.spec, collator)

    def prepare(self, batch: Any) -> Any:
        return self._overrides.of("prepare_input_batch", partial(to_batch, device=self._run.device))(batch)

    # Evaluation.

    def evaluate(self, given: Any, logs: MutableMapping[str, Any] | None, loader: Any) -> dict[str, Any]:
        """``Trainer.evaluate(given, logs)``, of a run with the evaluation data ``loader``."""
        is_by_model = isinstance(given, nn.Module)
        if isinstance(given, str):
            raise ConfigTypeError(f"Trainer.evaluate: got {given!r}; it must be a dataset, a loader or a model.")
        if logs is not None and not isinstance(logs, MutableMapping):
            raise ConfigTypeError(
                f"Trainer.evaluate: logs: got {type(logs).__name__}; it must be a dict. evaluate(model) and"
                " evaluate(model, logs) use the eval_dataset of the Trainer."
            )
        if not (is_by_model or isinstance(given, Mapping)):
            fault = checks.several_fault(given, checks.SEVERAL_TO_EVALUATE) or data_fault(given)
            if fault is not None:
                raise ConfigTypeError(f"Trainer.evaluate: {fault}")
        if given is not None and not is_by_model:
            loader = self.loaders_of(given)
            for one in loaders.each(loader):
                loaders.warn_of_left_out(one, "Trainer.evaluate: the loader")
                loaders.log_limit(one, self._run.spec)
        elif loader is None:
            raise ConfigError("Trainer.evaluate: there is no eval_dataset; pass one here or to the Trainer.")
        meet("Trainer.evaluate")
        with self._run.evaluated_weights(), self._replaced_model(given if is_by_model else self._run.model):
            results = self._score(loader)
        if not is_by_model and logs is None:
            return results
        if logs is None:
            logs = {}
        logs.update(named_results(results))
        return logs  # type: ignore[return-value]  # the caller's own mapping

    def evaluate_in_training(self, callbacks: RunCallbacks, dataset: Any, loader: Any) -> dict[str, Any]:
        """Evaluate with ``callbacks`` seeing each batch.

        A user's ``evaluate`` gets the arguments that its signature takes: ``(model, logs)``, ``(dataset)`` or none.
        """
        self._watching = callbacks
        try:
            with self._run.evaluated_weights(), watched_batches(callbacks.eval_batches):
                if not self._overrides.has("evaluate"):
                    return self._score(loader)
                evaluate = self._overrides.of("evaluate", self.evaluate)
                parameters = read_signature(evaluate).parameters
                needed = [p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
                if len(needed) == 2 or ("logs" in parameters and "dataset" not in parameters):
                    logs = {"global_step": callbacks.trainer.iterations_done}
                    return results_of_logs(evaluate(self._run.model, logs) or {})
                results: dict[str, Any] = evaluate(dataset) if needed else evaluate()
                return results
        finally:
            self._watching = None

    def evaluate_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        with self._replaced_model(model):
            outputs = self._overrides.of("evaluation_step", self.evaluation_step)(inputs)
            self._count(inputs, outputs)
        return {"eval_step_loss": outputs.get("loss")}

    def evaluation_step(self, batch: Any) -> dict[str, Any]:
        model, seen = self._run.model, list[Any]()
        # The hook sees the outputs however compute_loss calls the model: no second forward pass.
        hook = model.register_forward_hook(lambda module, arguments, outputs: seen.append(outputs))
        try:
            with hook:
                loss = self.compute_loss(model, batch)
        except (IndexError, TypeError) as error:
            criterion = self._run.criterion
            if self._has_own_loss(batch, "compute_loss") or criterion is None or target_of(batch) is not None:
                raise
            raise ConfigError(
                f"Trainer.eval_dataset: its samples have no target for the loss {type(criterion).__name__}, as those of"
                " the training data have. Give pairs (input, target), or the fields of the training data; predict()"
                " takes samples without targets."
            ) from error
        if len(seen) > 1 and not self._has_checked_calls:
            self._warn_of_calls(seen)
        last = seen[-1] if seen else None
        named = {} if last is None else named_outputs(last)
        if named is not None and ("logits" in named or not isinstance(last, tuple)):
            outputs = dict(named)
        else:
            scores = last if losses_of(last) is None else predictions_of(last)
            outputs = {} if scores is None else {"logits": scores}
        # Before ``logits`` is replaced below: the weight belongs to the loss.
        self._results.weigh(batch, last)
        if self.generates():
            outputs["logits"] = _generated(model, batch)
        outputs.pop("loss", None)
        return outputs if loss is None else {**outputs, "loss": loss.detach() if isinstance(loss, Tensor) else loss}

    def _warn_of_calls(self, outputs: list[Any]) -> None:
        """Warn once if metrics read one of several scores that the model returns for a batch."""
        self._has_checked_calls = True
        scores = [one for one in map(predictions_of, outputs) if isinstance(one, Tensor)]
        has_metrics = bool(getattr(self._handler(), "known_results", lambda: None)())
        is_read = has_metrics and not (self.generates() or self._overrides.has("evaluation_step", "compute_metric"))
        if is_read and not all(_are_equal(one, scores[-1]) for one in scores):
            logger.warning(
                "compute_loss calls the model %d times for a batch, and metrics read the scores of the last call."
                " Return others from evaluation_step(batch): {'loss': ..., 'logits': ...}.", len(outputs),
            )  # fmt: skip

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        """The mean loss of a batch, by the user's ``compute_loss`` if there is one."""
        return self._overrides.of("compute_loss", self._own_compute_loss)(model, inputs)

    def compute_metric(self, model: Any, inputs: Any) -> float:
        with evaluation_mode(model):
            outputs = forward(model, inputs)
        inputs, handler = self.comparisons.labelled(inputs), self._handler()
        comparison = self.find_comparison_in_training(outputs, inputs)
        comparison.declare_to(handler)
        handler.update(*comparison.aligned(predictions_of(outputs), target_of(inputs)))
        return next(iter(handler.compute().values()), float("nan"))

    def find_comparison_in_training(self, outputs: Any, inputs: Any) -> Comparison:
        """How metrics compare the model's outputs for a batch of the training with its labels."""
        self.comparisons.warn_of_tokens(outputs, inputs)
        return self.comparisons.find(outputs, inputs).for_handler(self._handler())

    # Prediction.

    def predict(self, data: Any, *, iterate: bool) -> Any:
        if data is None:
            raise ConfigTypeError("Trainer.predict: got None; pass a data set, a loader, or samples in a list.")
        step = self._overrides.of("predict_step", self.predict_step)
        is_single_pass = not self.generates() and not self._overrides.has("predict_step")
        if isinstance(data, Tensor | Mapping | tuple | Instance | np.ndarray) or hasattr(data, "to"):
            if type(data) is tuple and len(data) > 2:
                raise ConfigTypeError(
                    f"Trainer.predict: got a tuple of {len(data)} parts; a tuple is one batch (inputs, targets). Pass"
                    " samples in a list."
                )
            batch = to_batch(data, self._run.device)
            if current_mesh() is not None:
                meet("Trainer.predict")
            model = self._run.model
            # Ranks may call the model a different number of times.
            weights = gathered(model) if computes_together(model) and not is_single_pass else nullcontext()
            with self._run.evaluated_weights(), evaluation_mode(model), weights, batch_in_errors(batch):
                return step(batch)
        meet("Trainer.predict")
        loader = data
        if loaders.is_dataset(data):
            refuse_empty("Trainer.predict", data)
            loader = self.loaders_of(data)
        loaders.warn_of_predicted(loader, "Trainer.predict")

        def read_batches() -> Iterator[Any]:
            few = islice(loaders.batches_of_rank(loader), parts.dev_batches(self._run.spec))
            return map(self.prepare, few)

        num_batches = loaders.num_rounds(loader)
        return self._run.predict(
            read_batches, step, iterate=iterate, num_batches=num_batches, is_single_pass=is_single_pass
        )

    def predict_step(self, batch: Any) -> Any:
        if self.generates() and isinstance(batch, Mapping):
            return _generated(self._run.model, batch)
        return forward(self._run.model, batch)

    def generates(self) -> bool:
        """Whether evaluations call the model's ``generate``."""
        mesh = current_mesh()
        is_whole = pipeline_of(self._run.model) is None and (mesh is None or not mesh.layout.sequence_parallel)
        can = getattr(self._run.model, "is_generative", False) and is_whole
        return bool(self._run.spec.evaluate_with_generate and can)

    # Implementation.

    @cached_property
    def _results(self) -> EvaluationResults:
        """Those of the current evaluation, or of batches that the user evaluates one by one."""
        return self._new_results(None)

    def _new_results(self, loader: Any) -> EvaluationResults:
        return EvaluationResults(
            [self._handler()],
            self.comparisons,
            loaders.samples_of_rank(loader),
            is_joint=self._is_single_pass() and computes_together(self._run.model),
        )

    def _is_single_pass(self) -> bool:
        """Whether a step of an evaluation calls the model once."""
        return not self.generates() and not self._overrides.has("evaluate_step", "compute_metric")

    def _score(self, loader: Iterable[Any], name: str = "") -> dict[str, Any]:
        if isinstance(loader, Mapping):
            found = {name: self._score(one, name) for name, one in loader.items()}
            return {f"{name}/{key}": value for name, results in found.items() for key, value in results.items()}
        limit = loaders.eval_limit(loader, self._run.spec)
        results = self._results = self._new_results(loader)

        def read_batches() -> Iterable[Any]:
            return map(self.prepare, islice(loaders.batches_of_rank(loader), limit))

        try:
            return evaluate_batches(
                self._run.model,
                read_batches,
                self._evaluate_batch,
                results,
                forward=self._overrides.of("evaluation_step", self.evaluation_step) if self._is_single_pass() else None,
                num_samples=lambda _: results.num_samples * get_averaging_size(),
                num_batches=limit,
                loader=loader,
                name=name,
                without_batches=(
                    f"Trainer.evaluate: {type(loader).__name__} yielded no batch. Pass data with at least one sample;"
                    " an iterator or a generator can be iterated only once: pass a list, a data set or a loader."
                ),
            )
        finally:
            self._remove_running_metric()

    def _evaluate_batch(self, inputs: Any) -> None:
        results = self._results
        results.begin_batch(inputs)
        logs = self._overrides.of("evaluate_step", self.evaluate_step)(self._run.model, inputs)
        is_counted = results.is_counted
        if not is_counted:
            self._count_own(logs)
        if self._watching is not None:
            self._watching.record({name: value for name, value in logs.items() if value is not None})
            if is_counted:
                self._update_running_results(self._watching)

    def _count_own(self, logs: Mapping[str, Any]) -> None:
        """Use only the values that a user's ``evaluate_step`` returns."""
        loss = logs.get("eval_step_loss")
        self._results.add_loss(None if loss is None else torch.as_tensor(loss))
        self._results.use_own({n: float(logs[key]) for n, key in _OWN_LOGS.items() if logs.get(key) is not None})

    def _update_running_results(self, callbacks: RunCallbacks) -> None:
        """Update the logs of callbacks with the means so far; a metric is computed when it is read."""
        logs, loss = callbacks.logs, self._results.mean_loss()
        if loss is not None:
            logs["eval_epoch_loss"] = loss
        self._remove_running_metric()
        if self._results.has_metrics and get_world_size() == 1:  # several ranks reduce it together, at the end
            logs.defer("eval_epoch_metric", lambda: next(iter(self._handler().compute().values()), math.nan))

    def _remove_running_metric(self) -> None:
        if self._watching is not None and "eval_epoch_metric" in self._watching.logs:
            del self._watching.logs["eval_epoch_metric"]

    def _count(self, inputs: Any, outputs: Mapping[str, Any]) -> None:
        results, loss = self._results, outputs.get("loss")
        if not self._overrides.has("compute_metric"):
            results.update(inputs, outputs, loss)
            return
        results.add_loss(loss, outputs)
        metric = self._overrides.of("compute_metric", self.compute_metric)(self._run.model, inputs)
        results.use_own({"metric": metric})

    def _has_own_loss(self, batch: Any, *methods: str) -> bool:
        own_loss = used_loss(getattr(self._run.model, "compute_loss", None), batch)
        return own_loss is not None or self._overrides.has(*methods)


def _generated(model: Any, batch: Any) -> Any:
    outputs = model.generate(**arguments(batch, parameter_names(model.generate))[1])
    return outputs.get("generated_ids", outputs) if isinstance(outputs, Mapping) else outputs


def results_of_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The results in the logs that an ``evaluate(model, logs)`` returns: ``loss``, ``metric``, and others by name."""
    results = {name: logs[key] for name, key in _OWN_LOGS.items() if key in logs}
    others = {key: value for key, value in logs.items() if key not in (*_OWN_LOGS.values(), "eval_global_step")}
    for key, value in others.items():
        if key.startswith("eval_") and isinstance(value, int | float | Tensor):
            results.setdefault(key.removeprefix("eval_"), value)
    return results


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device) and torch.equal(one, other)
