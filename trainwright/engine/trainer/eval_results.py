"""The results of an evaluation: the mean loss, and metrics or the values of the user's own code."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.data.batch import count_samples
from trainwright.engine.label_alignment import Comparison
from trainwright.engine.loss_fn import predictions_of, target_of
from trainwright.parallel.dist import all_gather_object

logger = logging.getLogger("trainwright.engine")


class MeanLoss:
    """Mean over all samples (or labels) of per-batch mean losses, accumulated on the device and read once."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._weight: Tensor | None = None

    def add(self, loss: Tensor | None, weight: int | Tensor) -> None:
        """Add a batch whose loss is the mean over ``weight`` samples or labels; None if the model returned no loss."""
        if loss is None:
            return
        loss = loss.detach()
        wide = loss.double() if loss.device.type != "mps" else loss
        weight = torch.as_tensor(weight, device=loss.device)
        weighted = torch.where(weight > 0, wide * weight, torch.zeros_like(wide))  # the mean of zero items is NaN
        self._total = weighted if self._total is None else self._total + weighted
        self._weight = weight if self._weight is None else self._weight + weight

    def so_far(self) -> Tensor | None:
        """The mean on this rank so far, on its device; None before the first batch."""
        return None if self._total is None or self._weight is None else self._total / self._weight

    def total_and_weight(self) -> tuple[float, float]:
        """Of this rank; (0, 0) without a loss."""
        if self._total is None or self._weight is None or not self._weight.item():
            return 0.0, 0
        return self._total.item(), self._weight.item()


class EvalResults:
    """The mean loss of an evaluation, and the metrics or the values that the user's own code returns.

    Attributes:
        comparison: how metrics compare scores with labels; None until the first batch.
        loss_weight: the number of items that the current batch's loss averages; None: its samples.
        is_counted: whether the current batch is counted.
        has_metrics: whether each batch so far could be passed to the metrics.
    """

    comparison: Comparison | None
    loss_weight: int | Tensor | None
    _is_refusal_logged = False  # the reason for computing no metric

    def __init__(self, handler: Any) -> None:
        """``handler`` computes the metrics."""
        self.reset(handler)

    def reset(self, handler: Any) -> None:
        """Start an evaluation."""
        handler.reset()
        self._handler = handler
        self.has_metrics, self.comparison = True, None
        self._loss = MeanLoss()
        self._own: dict[str, float] = {}
        self._num_samples = 0
        self.is_counted, self.loss_weight = False, None

    def begin_batch(self, batch: Any) -> None:
        self.is_counted, self.loss_weight = False, None
        self._num_samples += count_samples(batch, unknown=1)

    def add_loss(self, loss: Tensor | None, batch: Any) -> None:
        self.is_counted = True
        self._loss.add(loss, count_samples(batch, unknown=1) if self.loss_weight is None else self.loss_weight)

    def add_metrics(self, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Update the metrics, if they can compare the outputs with the labels of the batch."""
        assert self.comparison is not None
        predictions, labels = predictions_of(outputs), target_of(batch)
        comparison = self.comparison.for_handler(self._handler)
        if predictions is None or labels is None:
            self.has_metrics = False
        elif comparison.refusal is not None:
            self.has_metrics = False
            self._log_refusal(comparison.refusal)
        else:
            predictions, labels = comparison.aligned(predictions, labels)
            rest = {**(batch if isinstance(batch, Mapping) else {}), **outputs}
            taken = ("logits", "prediction_scores", "labels", "loss", "predictions")
            self._handler.update(predictions, labels, **{k: v for k, v in rest.items() if k not in taken})

    def set_own_metric(self, value: float) -> None:
        """Use the latest value of the user's ``compute_metric`` in place of metrics."""
        self.has_metrics = False
        self._own["metric"] = value

    def add_own(self, logs: Mapping[str, Any], batch: Any) -> None:
        """Use only the values that a user's ``evaluate_step`` returns."""
        self.has_metrics = False
        loss = logs.get("eval_step_loss")
        self._loss.add(None if loss is None else torch.as_tensor(loss), count_samples(batch, unknown=1))
        names = {"loss": "eval_epoch_loss", "metric": "eval_epoch_metric"}
        self._own |= {name: float(logs[key]) for name, key in names.items() if logs.get(key) is not None}

    def loss_so_far(self) -> Tensor | None:
        """The mean loss of this rank, on its device."""
        return self._loss.so_far()

    def compute(self) -> dict[str, Any]:
        """The results over all ranks, which must all call this."""
        mine = (*self._loss.total_and_weight(), self.has_metrics, self._own, self._num_samples)
        totals, weights, has_metrics, own, sizes = zip(*all_gather_object(mine), strict=True)
        results: dict[str, Any] = {"loss": sum(totals) / sum(weights)} if sum(weights) else {}
        if all(has_metrics):
            results |= self._handler.compute()
        return results | _weighted_means(own, sizes)

    def _log_refusal(self, why: str) -> None:
        if not self._is_refusal_logged:
            self._is_refusal_logged = True
            logger.info(
                "No accuracy is computed: %s. Set suitable metrics, for example metrics=['MeanSquaredError'], or None.",
                why,
            )


def _weighted_means(ranks: Sequence[Mapping[str, float]], sizes: Sequence[int]) -> dict[str, float]:
    """The means of the values of all ranks by their samples; a single rank's own values are unchanged."""
    shares = [(values, size) for values, size in zip(ranks, sizes, strict=True) if size] or [(ranks[0], 1)]
    if len(shares) == 1:
        return dict(shares[0][0])
    names = [name for name in shares[0][0] if all(name in values for values, _ in shares)]
    total = sum(size for _, size in shares)
    return {name: sum(values[name] * size for values, size in shares) / total for name in names}


def results_of_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The results in the logs that an ``evaluate(model, logs)`` returns: ``loss``, ``metric``, and others by name."""
    names = {"loss": "eval_epoch_loss", "metric": "eval_epoch_metric"}
    results = {name: logs[key] for name, key in names.items() if key in logs}
    others = {key: value for key, value in logs.items() if key not in (*names.values(), "eval_global_step")}
    for key, value in others.items():
        if key.startswith("eval_") and isinstance(value, int | float | Tensor):
            results.setdefault(key.removeprefix("eval_"), value)
    return results
