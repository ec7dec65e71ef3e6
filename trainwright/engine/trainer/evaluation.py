"""Evaluation in the Python API: exact means over samples, and the methods that a user may override."""

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.data.collate import add_batch_note, to_batch
from trainwright.engine.comparison import Comparison, find_comparison, predictions_of, shifted
from trainwright.engine.eval_loss import MeanLoss, batch_size, reduce_own_results, weight_of
from trainwright.engine.gradient_sync import share_state
from trainwright.engine.loss_fn import losses_of, target_of
from trainwright.engine.trainer import optim, parts
from trainwright.engine.trainer.base import STEP_METHODS, TrainerShared
from trainwright.evaluation.preserve_rng import evaluation_mode, kept_randomness
from trainwright.hooks.overrides import install, is_overridden, uninstall
from trainwright.parallel.dist import all_gather_object, get_world_size

logger = logging.getLogger("trainwright.engine")


class EvaluatingTrainer(TrainerShared):
    """The evaluation loop."""

    _is_watched = False  # whether callbacks see its batches
    _is_refusal_logged = False  # the reason for computing no metric
    _comparison: Comparison | None = None  # of this evaluation; None until its first batch
    _weight: Any = None  # number of items that the batch's loss averages, if evaluation_step knows it

    def evaluate(self, dataset: Any = None, logs: MutableMapping[str, Any] | None = None) -> dict[str, Any]:
        """``loss``, the mean over all samples, and each metric, over the evaluation data or ``dataset``.

        ``dataset`` may be a loader. Training state, modes and random state are unchanged afterwards. ``loss`` is absent
        if the model returns no loss in evaluation mode. Nothing is logged or written. Every process must call it; they
        share the samples.

        ``evaluate(model, logs)`` evaluates ``model``, which may differ from the trainer's, on the evaluation data and
        returns ``logs`` with ``eval_epoch_loss`` and ``eval_epoch_metric`` added.

        Raises:
            ConfigError: there is no evaluation data.
        """
        is_by_model = isinstance(dataset, nn.Module)
        if isinstance(dataset, str):
            raise ConfigTypeError(f"Trainer.evaluate: got {dataset!r}; it must be a dataset, a loader or a model.")
        if logs is not None and not isinstance(logs, MutableMapping):
            raise ConfigTypeError(
                f"Trainer.evaluate: logs: got {type(logs).__name__}; it must be a dict. evaluate(model) and"
                " evaluate(model, logs) use the eval_dataset of the Trainer."
            )
        loader = self.eval_dataloader if dataset is None or is_by_model else dataset
        if loader is None:
            raise ConfigError("Trainer.evaluate: there is no eval_dataset; pass one here or to the Trainer.")
        if loader is dataset and parts.is_dataset(dataset):
            parts.give_preprocessor(getattr(self, "preprocessor", None), self.model, dataset)
            loader = self.create_eval_dataloader(dataset)
        with self._replaced_model(dataset if is_by_model else self.model):
            results = self._score(loader)
        if not is_by_model and logs is None:
            return results
        if logs is None:
            logs = {}
        logs.update(self.named_results(results))
        return logs  # type: ignore[return-value]  # the caller's own mapping

    def create_eval_dataloader(self, dataset: Any) -> Any:
        """The loader over evaluation data: every sample once, in order."""
        return parts.eval_loader(dataset, self.config, self._collator)

    def evaluate_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        """Evaluate one batch: returns ``eval_step_loss``, and updates the metrics with :meth:`evaluation_step`."""
        with self._replaced_model(model):
            outputs = self.evaluation_step(inputs)
            self._count(inputs, outputs)
        return {"eval_step_loss": outputs.get("loss")}

    def evaluation_step(self, batch: Any) -> dict[str, Any]:
        """The model's outputs for one batch as a dict: its own entries or ``logits``, and ``loss`` if there is one.

        With ``evaluate_with_generate`` the ``logits`` of a generative model are the result of its ``generate``.
        """
        seen: list[Any] = []
        # The hook sees the outputs however compute_loss calls the model: no second forward pass.
        hook = self.model.register_forward_hook(lambda module, arguments, outputs: seen.append(outputs))
        try:
            loss = self.compute_loss(self.model, batch)
        finally:
            hook.remove()
        last = seen[-1] if seen else None
        if last is None or isinstance(last, Mapping):
            outputs = dict(last or {})
        else:
            scores = last if losses_of(last) is None else predictions_of(last)
            outputs = {} if scores is None else {"logits": scores}
        ignored = getattr(self.loss, "ignore_index", -100)
        if self._comparison is None or not self._comparison.is_final:
            self._comparison = self._find_comparison(last, batch, loss)
        # Before ``logits`` is replaced below: the weight belongs to the loss.
        self._weight = weight_of(outputs, batch, ignored, is_shifted=self._comparison.is_shifted)
        if self._generates():
            outputs["logits"] = _generated(self.model, batch)
        outputs.pop("loss", None)
        return outputs if loss is None else {**outputs, "loss": loss.detach() if isinstance(loss, Tensor) else loss}

    def compute_metric(self, model: Any, inputs: Any) -> float:
        """The first metric over the batches passed so far and this one: a forward pass in evaluation mode.

        Training calls this method only if it is overridden; otherwise it reuses the outputs of the step.
        """
        with evaluation_mode(model):
            outputs = _forward(model, inputs)
        scores, labels = predictions_of(outputs), target_of(inputs)
        if self._find_comparison_in_training(outputs, inputs, None).is_shifted:
            scores, labels = shifted(scores, labels)
        self.metrics_handler.update(scores, labels)
        return next(iter(self.metrics_handler.compute().values()), float("nan"))

    def predict(self, inputs: Any) -> Any:
        """The model's outputs for one batch of inputs, in evaluation mode and without gradients."""
        inputs = to_batch(inputs, self.device)
        with evaluation_mode(self.model):
            return (
                self.model(**_arguments_for(self.model.forward, inputs))
                if isinstance(inputs, Mapping)
                else self.model(inputs)
            )

    @property
    def metric(self) -> Any:
        """The first metric of ``metrics_handler``; None if there is none."""
        return getattr(self.metrics_handler, "first", None)

    def named_results(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Evaluation results under the names that callbacks and ``evaluate(model, logs)`` use."""
        named = {f"eval_{name}": value for name, value in results.items()}
        metric = next((name for name in results if name != "loss"), None)
        if "loss" in results:
            named["eval_epoch_loss"] = results["loss"]
        return named if metric is None else named | {"eval_epoch_metric": results[metric]}

    # Implementation.

    @contextmanager
    def _replaced_model(self, model: Any) -> Iterator[None]:
        """Evaluate ``model`` in place of the trainer's own, on the run's device and in its precision."""
        is_torchs = type(model).__module__.startswith("torch.")  # DistributedDataParallel and others
        if model is self.model or (is_torchs and getattr(model, "module", None) is self.model):
            yield
            return
        replaced = ("model", "_step_model", "_contract", "_criterion", "_own_loss", "_records_outputs")
        own = {name: vars(self)[name] for name in replaced if name in vars(self)}
        is_bound = "compute_loss" in vars(self).get("_installed", {})
        uninstall(self, "compute_loss")
        place = next((parameter.device for parameter in model.parameters()), self.device)
        self.model = self._step_model = model.to(self.device)
        self._contract, self._records_outputs = None, False
        own_loss = getattr(model, "compute_loss", None)
        self._criterion, self._own_loss = optim.losses(self.loss, own_loss, self._autocast)
        try:
            with self._autocast() if self._autocast else nullcontext():
                yield
        finally:
            vars(self).pop("_records_outputs")
            vars(self).update(own)
            if is_bound:
                install(self, "compute_loss", own["_contract"].compute_loss)
            model.to(place)

    def _evaluate_in_training(self) -> dict[str, Any]:
        """Evaluate with callbacks seeing each batch."""
        self._is_watched = True
        try:
            self._evaluated_step = self.state.global_step
            return self._call_evaluate()
        finally:
            self._is_watched = False

    def _call_evaluate(self) -> dict[str, Any]:
        """Call ``evaluate`` with the arguments that its signature takes: ``(model, logs)``, ``(dataset)`` or none."""
        if not is_overridden(self, "evaluate"):
            return self._score(self.eval_dataloader)
        parameters = inspect.signature(self.evaluate).parameters
        needed = [p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(needed) == 2 or ("logs" in parameters and "dataset" not in parameters):
            return _results_in(self.evaluate(self.model, {"global_step": self.iterations_done}) or {})
        return self.evaluate(self.eval_dataset) if needed else self.evaluate()

    def _score(self, loader: Iterable[Any]) -> dict[str, Any]:
        self._mean_loss, self._own_results, self._num_seen, self._comparison = MeanLoss(), dict[str, Any](), 0, None
        self._has_metrics, has_batches = True, False
        self.metrics_handler.reset()
        share_state(self.model, buffers_only=True)  # running statistics differ between processes
        watched = self._run_callbacks.eval_batches if self._is_watched else iter
        with evaluation_mode(self.model), kept_randomness(self.device):
            for inputs in watched(map(self.prepare_input_batch, self._share_of(loader))):
                self._is_counted, self._weight = False, None
                self._num_seen += batch_size(inputs)
                try:
                    logs = self.evaluate_step(self.model, inputs)
                except Exception as error:
                    add_batch_note(error, inputs)
                    raise
                if self._is_watched:
                    self._run_callbacks.record({name: value for name, value in logs.items() if value is not None})
                if not self._is_counted:
                    self._add_own_results(logs, inputs)
                elif self._is_watched:
                    self._update_running_results()
                has_batches = True
        if not any(all_gather_object(has_batches)):
            raise ConfigError(
                f"Trainer.evaluate: {type(loader).__name__} yielded no batch. Pass data with at least one sample; an"
                " iterator or a generator can be iterated only once: pass a list, a data set or a loader."
            )
        if self._is_watched:
            self._remove_running_metric()
        results: dict[str, Any] = self._mean_loss.results()
        if all(all_gather_object(self._has_metrics)):
            results |= self.metrics_handler.compute()
        return results | reduce_own_results(self._own_results, self._num_seen)

    def _update_running_results(self) -> None:
        """Update the logs of callbacks with the means so far; a metric is computed when it is read."""
        logs, loss = self._run_callbacks.logs, self._mean_loss.so_far()
        if loss is not None:
            logs["eval_epoch_loss"] = loss
        self._remove_running_metric()
        if self._has_metrics and get_world_size() == 1:  # several processes reduce it together, at the end
            logs.defer("eval_epoch_metric", lambda: next(iter(self.metrics_handler.compute().values()), math.nan))

    def _remove_running_metric(self) -> None:
        logs = self._run_callbacks.logs
        if "eval_epoch_metric" in logs:
            del logs["eval_epoch_metric"]

    def _count(self, inputs: Any, outputs: Mapping[str, Any]) -> None:
        """Add a batch to the loss and the metrics."""
        self._is_counted = True
        self._mean_loss.add(outputs.get("loss"), batch_size(inputs) if self._weight is None else self._weight)
        if is_overridden(self, "compute_metric"):
            self._has_metrics = False
            self._own_results["metric"] = self.compute_metric(self.model, inputs)
            return
        predictions, labels = predictions_of(outputs), target_of(inputs)
        if self._comparison is None:
            self._comparison = self._find_comparison(outputs, inputs, outputs.get("loss"))
        comparison = self._for_handler(self._comparison)
        if predictions is None or labels is None:
            self._has_metrics = False
        elif comparison.refusal is not None:
            self._has_metrics = False
            self._log_refusal(comparison.refusal)
        else:
            if comparison.is_shifted:
                predictions, labels = shifted(predictions, labels)
            rest = {**(inputs if isinstance(inputs, Mapping) else {}), **outputs}
            taken = ("logits", "prediction_scores", "labels", "loss", "predictions")
            more = {name: value for name, value in rest.items() if name not in taken}
            self.metrics_handler.update(predictions, labels, **more)

    def _add_own_results(self, logs: Mapping[str, Any], inputs: Any) -> None:
        """Use only the values that a user's ``evaluate_step`` returns."""
        self._has_metrics = False
        loss = logs.get("eval_step_loss")
        self._mean_loss.add(None if loss is None else torch.as_tensor(loss), batch_size(inputs))
        names = {"loss": "eval_epoch_loss", "metric": "eval_epoch_metric"}
        self._own_results |= {name: float(logs[key]) for name, key in names.items() if logs.get(key) is not None}

    def _find_comparison(self, outputs: Any, inputs: Any, loss: Any) -> Comparison:
        """How to compare the model's outputs for a batch with its labels."""
        own_code = hasattr(self.model, "compute_loss") or any(is_overridden(self, name) for name in STEP_METHODS)
        return find_comparison(
            self.model, outputs, inputs, loss,
            criterion=self.loss, has_own_loss=own_code or losses_of(outputs) is not None,
        )  # fmt: skip

    def _find_comparison_in_training(self, outputs: Any, inputs: Any, loss: Any) -> Comparison:
        return self._for_handler(self._find_comparison(outputs, inputs, loss))

    def _for_handler(self, comparison: Comparison) -> Comparison:
        """The parts that apply to this handler: a metric that the user requests is always computed."""
        handler = self.metrics_handler
        return Comparison(
            is_shifted=comparison.is_shifted and getattr(handler, "shifts_labels", False),
            refusal=comparison.refusal if getattr(handler, "is_default", False) else None,
            is_final=comparison.is_final,
        )

    def _log_refusal(self, why: str) -> None:
        if not self._is_refusal_logged:
            self._is_refusal_logged = True
            logger.info(
                "No accuracy is computed: %s. Set suitable metrics, for example metrics=['MeanSquaredError'], or None.",
                why,
            )

    def _generates(self) -> bool:
        return bool(self.config.evaluate_with_generate and getattr(self.model, "is_generative", False))


def _results_in(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The results in the logs that an ``evaluate(model, logs)`` returns: ``loss``, ``metric``, and others by name."""
    names = {"loss": "eval_epoch_loss", "metric": "eval_epoch_metric"}
    results = {name: logs[key] for name, key in names.items() if key in logs}
    others = {key: value for key, value in logs.items() if key not in (*names.values(), "eval_global_step")}
    for key, value in others.items():
        if key.startswith("eval_") and isinstance(value, int | float | Tensor):
            results.setdefault(key.removeprefix("eval_"), value)
    return results


def _arguments_for(function: Callable[..., Any], batch: Any) -> dict[str, Any]:
    """The fields of a batch that a function accepts, by name."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in batch.items() if takes_all or name in parameters}


def _forward(model: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**_arguments_for(model.forward, batch))
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


def _generated(model: Any, batch: Any) -> Any:
    outputs = model.generate(**_arguments_for(model.generate, batch))
    return outputs.get("generated_ids", outputs) if isinstance(outputs, Mapping) else outputs
