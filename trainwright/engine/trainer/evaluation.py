"""Evaluation in the Python API: the methods that a user may call and override."""

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.data.batch import count_samples, to_batch
from trainwright.data.instance import Instance
from trainwright.engine.label_alignment import Comparison, find_comparison, predictions_of
from trainwright.engine.loss_fn import losses_of, target_of, write_forward_help
from trainwright.engine.trainer import checks, loaders, optim, parts
from trainwright.engine.trainer.base import STEP_METHODS, TrainerShared
from trainwright.engine.trainer.eval_results import EvalResults, named_results, results_of_logs
from trainwright.evaluation.loop import run_evaluation
from trainwright.hooks.method_overrides import is_overridden
from trainwright.models.eval_mode import evaluation_mode
from trainwright.models.outputs import named_outputs
from trainwright.parallel.dist import (
    get_data_parallel_size,
    get_tensor_parallel_rank,
    get_world_size,
)
from trainwright.parallel.faults import meet
from trainwright.parallel.mesh import current_mesh

logger = logging.getLogger("trainwright.engine")


class EvaluatingTrainer(TrainerShared):
    """Evaluation, with :func:`~trainwright.evaluation.loop.run_evaluation`."""

    _is_watched = False  # whether callbacks see its batches

    def evaluate(self, dataset: Any = None, logs: MutableMapping[str, Any] | None = None) -> dict[str, Any]:
        """``loss``, the mean over all samples, and each metric, over the evaluation data or ``dataset``.

        ``dataset`` may be a loader. Of several data sets, a dict by name, the results are named after them:
        ``clean/loss``, ``clean/accuracy``, ``noisy/loss`` …

        Training state, modes and random state are unchanged afterwards. ``loss`` is absent if the model returns no loss
        in evaluation mode. No metric is logged or written. Every process must call it; each evaluates its share of the
        samples.

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
        if loader is dataset:
            loader = self._eval_loaders(dataset)
        meet("Trainer.evaluate")
        with self._evaluated_weights(), self._replaced_model(dataset if is_by_model else self.model):
            results = self._score(loader)
        if not is_by_model and logs is None:
            return results
        if logs is None:
            logs = {}
        logs.update(named_results(results))
        return logs  # type: ignore[return-value]  # the caller's own mapping

    def create_eval_dataloader(self, dataset: Any) -> Any:
        """The loader over evaluation data: every sample once, in order."""
        collator = self._collator
        if collator is None and isinstance(dataset, list):  # of samples like those of the training data
            collator = getattr(self.train_dataset, "data_collator", None)
        return loaders.eval_loader(dataset, self.config, collator)

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
        except (IndexError, TypeError) as error:
            self._explain_missing_target(error, batch)
            raise
        finally:
            hook.remove()
        last = seen[-1] if seen else None
        named = {} if last is None else named_outputs(last)
        if named is not None and ("logits" in named or not isinstance(last, tuple)):
            outputs = dict(named)
        else:
            scores = last if losses_of(last) is None else predictions_of(last)
            outputs = {} if scores is None else {"logits": scores}
        ignored = getattr(self.loss, "ignore_index", -100)
        results = self._eval_results
        if results.comparison is None or not results.comparison.is_final:
            results.comparison = self._find_comparison(last, batch, loss)
        # Before ``logits`` is replaced below: the weight belongs to the loss.
        is_by_criterion = losses_of(last) is None and not hasattr(self.model, "compute_loss")
        is_by_criterion = is_by_criterion and not is_overridden(self, "compute_loss")
        is_weighted = is_by_criterion and isinstance(self.loss, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss)
        class_weights = self.loss.weight if is_weighted else None
        results.loss_weight = results.comparison.loss_weight(outputs, batch, ignored, class_weights)
        if self._generates():
            outputs["logits"] = _generated(self.model, batch)
        outputs.pop("loss", None)
        return outputs if loss is None else {**outputs, "loss": loss.detach() if isinstance(loss, Tensor) else loss}

    def _explain_missing_target(self, error: Exception, batch: Any) -> None:
        is_own_code = hasattr(self.model, "compute_loss") or is_overridden(self, "compute_loss")
        if is_own_code or self.loss is None or target_of(batch) is not None:
            return
        raise ConfigError(
            f"Trainer.eval_dataset: its samples have no target for the loss {type(self.loss).__name__}, as those of the"
            " training data have. Give pairs (input, target), or the fields of the training data; predict() takes"
            " samples without targets."
        ) from error

    def compute_metric(self, model: Any, inputs: Any) -> float:
        """The first metric over the batches passed so far and this one: a forward pass in evaluation mode.

        Training calls this method only if it is overridden; otherwise it reuses the outputs of the step.
        """
        with evaluation_mode(model):
            outputs = forward(model, inputs)
        comparison = self._find_comparison_in_training(outputs, inputs, None)
        self.metrics_handler.update(*comparison.aligned(predictions_of(outputs), target_of(inputs)))
        return next(iter(self.metrics_handler.compute().values()), float("nan"))

    def predict(self, data: Any, *, iterate: bool = False) -> Any:
        """The model's outputs for a data set, a loader or a list of samples, on the CPU, in the order of the samples.

        Tensors are concatenated, dicts and tuples by item. Tensors of unequal sizes become a list with one for each
        sample. Items with no value for each sample, such as a loss, are left out. Samples need no labels. Training
        state, modes and random state are unchanged. Every process must call it; each computes its share of the batches
        and returns all outputs.

        ``iterate``: return an iterator over the outputs of each batch instead, for data whose outputs exceed the
        memory.

        For one batch of inputs, a tensor, a dict or a tuple, it returns the model's outputs unchanged, on the device.
        """
        if isinstance(data, Tensor | Mapping | tuple | Instance | np.ndarray) or hasattr(data, "to"):
            batch = to_batch(data, self.device)
            if current_mesh() is not None:
                meet("Trainer.predict")
            with self._evaluated_weights(), evaluation_mode(self.model):
                return self.predict_step(batch)
        meet("Trainer.predict")
        loader = data
        if loaders.is_dataset(data):
            parts.give_preprocessor(getattr(self, "preprocessor", None), self.model, data)
            loader = self.create_eval_dataloader(data)

        def read_batches() -> Iterator[Any]:
            few = islice(loaders.batches_of_rank(loader), parts.dev_batches(self.config))
            return map(self.prepare_input_batch, few)

        is_single = not self._generates() and not is_overridden(self, "predict_step")
        rounds = loaders.num_rounds(loader)
        return self._predict(
            read_batches, self.predict_step, iterate=iterate, num_batches=rounds, is_single_pass=is_single
        )

    def predict_step(self, batch: Any) -> Any:
        """The outputs of :meth:`predict` for one batch: those of the model, or of its ``generate``, as in evaluations.

        The model gets the fields that it takes, or the first item of a pair.
        """
        if self._generates() and isinstance(batch, Mapping):
            return _generated(self.model, batch)
        return forward(self.model, batch)

    @property
    def metric(self) -> Any:
        """The first metric of ``metrics_handler``; None if there is none."""
        return getattr(self.metrics_handler, "first", None)

    # Implementation.

    def _example_batches(self) -> Iterable[Any]:
        dataset = self.train_dataset if self.eval_dataset is None else self.eval_dataset
        data = next(iter(dataset.values())) if isinstance(dataset, Mapping) else dataset
        return loaders.batches_of_rank(self.create_eval_dataloader(data) if loaders.is_dataset(data) else data)

    def _prepare_batch(self, batch: Any) -> Any:
        return self.prepare_input_batch(batch)

    def _loss_of(self, batch: Any) -> Tensor:
        loss: Tensor = self.compute_loss(self.model, batch)
        return loss

    def _evaluate_weights(self) -> dict[str, Any]:
        return self.evaluate()

    def _forward(self, batch: Any) -> Any:
        return forward(self.model, batch)

    def _eval_loaders(self, data: Any) -> Any:
        """The loader of a data set, or of each data set of a dict; loaders are returned unchanged."""
        if isinstance(data, Mapping):
            checks.check_named_data(data, "eval_dataset")
            return {name: self._eval_loaders(one) for name, one in data.items()}
        if not loaders.is_dataset(data):
            return data
        parts.give_preprocessor(getattr(self, "preprocessor", None), self.model, data)
        return self.create_eval_dataloader(data)

    @contextmanager
    def _replaced_model(self, model: Any) -> Iterator[None]:
        """Evaluate ``model`` in place of the trainer's own, on the run's device and in its precision."""
        is_torchs = type(model).__module__.startswith("torch.")  # DistributedDataParallel and others
        if model is self.model or (is_torchs and getattr(model, "module", None) is self.model):
            yield
            return
        replaced = ("model", "_step_model", "_contract", "_criterion", "_own_loss", "_records_outputs")
        own = {name: vars(self)[name] for name in replaced if name in vars(self)}
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
            model.to(place)

    def _evaluate_in_training(self) -> dict[str, Any]:
        """Evaluate with callbacks seeing each batch."""
        self.storage.reduce()  # writers write a row for the evaluation
        self._is_watched = True
        try:
            self._evaluated_step = self.state.global_step
            with self._evaluated_weights(), self._watching_hardest():
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
            return results_of_logs(self.evaluate(self.model, {"global_step": self.iterations_done}) or {})
        return self.evaluate(self.eval_dataset) if needed else self.evaluate()

    @cached_property
    def _eval_results(self) -> EvalResults:
        return EvalResults(self.metrics_handler)

    def _score(self, loader: Iterable[Any], name: str = "") -> dict[str, Any]:
        if isinstance(loader, Mapping):
            found = {name: self._score(one, name) for name, one in loader.items()}
            return {f"{name}/{key}": value for name, results in found.items() for key, value in results.items()}
        limit = loaders.eval_limit(loader, self.config)

        def read_batches() -> Iterable[Any]:
            self._eval_results.reset(self.metrics_handler)
            batches = map(self.prepare_input_batch, islice(loaders.batches_of_rank(loader), limit))
            return self._run_callbacks.eval_batches(batches) if self._is_watched else batches

        def results() -> dict[str, Any]:
            self._remove_running_metric()
            if get_tensor_parallel_rank() > 0:
                self._eval_results.reset(self.metrics_handler)  # the first of these ranks has the same
            return self._eval_results.compute()

        return run_evaluation(
            self.model,
            read_batches,
            self._evaluate_batch,
            results,
            device=self.device,
            num_samples=lambda batch: count_samples(batch, unknown=1) * get_data_parallel_size(),
            num_batches=limit,
            loader=loader,
            name=name,
            without_batches=(
                f"Trainer.evaluate: {type(loader).__name__} yielded no batch. Pass data with at least one sample; an"
                " iterator or a generator can be iterated only once: pass a list, a data set or a loader."
            ),
            pad=self.evaluation_step if self._evaluates_in_one_pass() else None,
        )

    def _evaluates_in_one_pass(self) -> bool:
        """Whether each batch of an evaluation is one call of ``evaluation_step`` that calls the model once."""
        own = ("evaluate_step", "compute_metric")
        return not self._generates() and not any(is_overridden(self, name) for name in own)

    def _evaluate_batch(self, inputs: Any) -> None:
        results = self._eval_results
        results.begin_batch(inputs)
        logs = self.evaluate_step(self.model, inputs)
        if not results.is_counted:
            results.add_own(logs, inputs)
        if self._is_watched:
            self._run_callbacks.record({name: value for name, value in logs.items() if value is not None})
            if results.is_counted:
                self._update_running_results()

    def _update_running_results(self) -> None:
        """Update the logs of callbacks with the means so far; a metric is computed when it is read."""
        logs, loss = self._run_callbacks.logs, self._eval_results.loss_so_far()
        if loss is not None:
            logs["eval_epoch_loss"] = loss
        self._remove_running_metric()
        if self._eval_results.has_metrics and get_world_size() == 1:  # several ranks reduce it together, at the end
            logs.defer("eval_epoch_metric", lambda: next(iter(self.metrics_handler.compute().values()), math.nan))

    def _remove_running_metric(self) -> None:
        if self._is_watched and "eval_epoch_metric" in self._run_callbacks.logs:
            del self._run_callbacks.logs["eval_epoch_metric"]

    def _count(self, inputs: Any, outputs: Mapping[str, Any]) -> None:
        """Add a batch to the loss and the metrics."""
        results = self._eval_results
        results.add_loss(outputs.get("loss"), inputs)
        if is_overridden(self, "compute_metric"):
            results.set_own_metric(self.compute_metric(self.model, inputs))
            return
        if results.comparison is None:
            results.comparison = self._find_comparison(outputs, inputs, outputs.get("loss"))
        results.add_metrics(inputs, outputs)

    def _find_comparison(self, outputs: Any, inputs: Any, loss: Any) -> Comparison:
        """How to compare the model's outputs for a batch with its labels."""
        own_code = hasattr(self.model, "compute_loss") or any(is_overridden(self, name) for name in STEP_METHODS)
        return find_comparison(
            self.model, outputs, inputs, loss,
            criterion=self.loss, has_own_loss=own_code or losses_of(outputs) is not None,
        )  # fmt: skip

    def _find_comparison_in_training(self, outputs: Any, inputs: Any, loss: Any) -> Comparison:
        return self._find_comparison(outputs, inputs, loss).for_handler(self.metrics_handler)

    def _generates(self) -> bool:
        mesh = current_mesh()
        is_whole = self._pipeline is None and (mesh is None or not mesh.layout.sequence_parallel)
        can = getattr(self.model, "is_generative", False) and is_whole
        return bool(self.config.evaluate_with_generate and can)


def _arguments_for(function: Callable[..., Any], batch: Any) -> dict[str, Any]:
    """The fields of a batch that a function accepts, by name."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in batch.items() if takes_all or name in parameters}


def forward(model: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        taken = _arguments_for(model.forward, batch)
        try:
            return model(**taken)
        except TypeError as error:
            write_forward_help(error, model, taken, list(batch))
            raise
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


def _generated(model: Any, batch: Any) -> Any:
    outputs = model.generate(**_arguments_for(model.generate, batch))
    return outputs.get("generated_ids", outputs) if isinstance(outputs, Mapping) else outputs
