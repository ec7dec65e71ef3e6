"""The built-in evaluators: accuracy, correlation, BLEU and perplexity.

B batch, C classes, K the largest k asked for.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from operator import add, mul
from typing import Any, Self

import torch
from torch import Tensor

from trainwright.base.batch import IGNORED, described
from trainwright.base.errors import ConfigError
from trainwright.data.sample_count import SampleCounter
from trainwright.evaluation.evaluator import DatasetEvaluator, EvaluationError, required
from trainwright.evaluation.metrics.metric import load_package
from trainwright.evaluation.metrics.task_inference import most_probable_classes
from trainwright.evaluation.rank_exchange import in_data_order
from trainwright.models.outputs import scalars_of

logger = logging.getLogger("trainwright.evaluation")


class ClsEvaluator(DatasetEvaluator):
    """``{"Acc@1": percent, "Acc@5": percent}``: how often the label is among the k best scored classes.

    Reads ``outputs["prediction_scores"]`` (B, C) and ``inputs["labels"]``: (B) of any integer type, or class
    probabilities (B, C), such as one-hot floats, of which the most probable class counts. Samples are counted, so
    batches of unequal size do not bias the value; labels of ``ignore_index`` are left out. Where there are fewer than k
    classes all of them are taken.
    """

    def __init__(self, topk: int | Sequence[int] = (1, 5), *, ignore_index: int = IGNORED) -> None:
        self.ignore_index = ignore_index
        self.topk = (topk,) if isinstance(topk, int) else tuple(topk)
        if not self.topk or any(not isinstance(k, int) or k < 1 for k in self.topk):
            raise ConfigError(f"ClsEvaluator.topk: got {topk!r}; it must be one or several whole numbers >= 1.")
        self._capped = False
        self.reset()

    def __repr__(self) -> str:
        ignored = "" if self.ignore_index == IGNORED else f", ignore_index={self.ignore_index}"
        return f"ClsEvaluator(topk={self.topk}{ignored})"

    def reset(self) -> None:
        self._num_correct: Tensor | int = 0  # one count per k, on the device until evaluate()
        self._num_samples: Tensor | int = 0
        self._labels: Tensor | None = None  # the smallest and the largest
        self._num_classes = 0

    def process(self, inputs: Any, outputs: Any) -> None:
        scores_BC: Tensor = required(outputs, "prediction_scores", evaluator=self, where="what the model returns")
        labels_B: Tensor = required(inputs, "labels", evaluator=self, where="the batch")
        labels_B = most_probable_classes(scores_BC, labels_B)
        _check(scores_BC, labels_B)
        num_classes = scores_BC.shape[1]
        if not self._capped and max(self.topk) > num_classes:
            self._capped = True
            names = ", ".join(f"Acc@{k}" for k in self.topk if k > num_classes)
            text = "%s: there are only %d classes, so all of them count and it is always 100. topk=[1] leaves it"
            text += " out (train.topk in a config file)."
            logger.warning(text, names, num_classes)

        best_BK = scores_BC.topk(min(max(self.topk), num_classes), dim=1).indices
        labels_B = labels_B.to(best_BK.device, torch.int64)
        is_counted_B = labels_B != self.ignore_index
        labels_B = labels_B.where(is_counted_B, IGNORED)
        correct_BK = best_BK == labels_B.unsqueeze(1)
        self._num_correct = self._num_correct + torch.stack([correct_BK[:, :k].sum() for k in self.topk])
        self._num_samples = self._num_samples + is_counted_B.sum()
        self._add_range(labels_B.where(is_counted_B, 0), num_classes)
        if labels_B.device.type == "cpu":  # of another device, the values are read at the end
            self._check_range()

    def merge_state(self, others: Sequence[Self]) -> None:
        self._num_correct = sum((other._num_correct for other in others), self._num_correct)
        self._num_samples = sum((other._num_samples for other in others), self._num_samples)
        for other in others:
            if other._labels is not None:
                self._add_range(other._labels, other._num_classes)

    def evaluate(self) -> dict[str, float]:
        num_samples = int(self._num_samples)
        if not num_samples:
            raise EvaluationError("ClsEvaluator has seen no samples.")
        self._check_range()
        num_correct = torch.as_tensor(self._num_correct).tolist()
        return {f"Acc@{k}": 100 * count / num_samples for k, count in zip(self.topk, num_correct, strict=True)}

    def known_results(self) -> list[str]:
        return [f"Acc@{k}" for k in self.topk]

    def _check_range(self) -> None:
        found = [] if self._labels is None else self._labels.tolist()
        wrong = [one for one in found if not 0 <= one < self._num_classes]
        if wrong:
            raise EvaluationError(
                f"ClsEvaluator: labels hold {' and '.join(map(str, wrong))}, but there are {self._num_classes} classes,"
                f" from 0 on. Labels of {self.ignore_index} are left out, which ClsEvaluator(ignore_index=...) sets."
            )

    def _add_range(self, labels: Tensor, num_classes: int) -> None:
        before = labels.new_zeros(1) if self._labels is None else self._labels.to(labels.device)
        self._labels = torch.stack(torch.cat([before, labels]).aminmax())
        self._num_classes = max(self._num_classes, num_classes)


def _check(scores_BC: Tensor, labels_B: Tensor) -> None:
    if scores_BC.ndim != 2 or labels_B.ndim != 1 or len(scores_BC) != len(labels_B):
        raise EvaluationError(
            f"ClsEvaluator: prediction_scores has shape {tuple(scores_BC.shape)} and labels {tuple(labels_B.shape)}; "
            "they must be (batch, classes) and (batch,), or both (batch, classes) if labels are class probabilities."
        )
    if labels_B.is_floating_point() or labels_B.is_complex():
        raise EvaluationError(
            f"ClsEvaluator: labels have type {labels_B.dtype}; they must be whole numbers, one class each."
        )


class RegEvaluator(DatasetEvaluator):
    """``{"pearson", "spearman", "corr"}``, each in [-1, 1]; ``corr`` is the mean of the other two.

    Reads one number per sample from ``outputs["prediction_scores"]`` and ``inputs["labels"]``, shape (B) or (B, 1).
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._batches: list[tuple[Tensor, Tensor]] = []  # predictions and labels

    def process(self, inputs: Any, outputs: Any) -> None:
        predictions: Tensor = required(outputs, "prediction_scores", evaluator=self, where="what the model returns")
        labels: Tensor = required(inputs, "labels", evaluator=self, where="the batch")
        if predictions.numel() != labels.numel() or labels.numel() != labels.shape[:1].numel():
            raise EvaluationError(
                f"RegEvaluator: prediction_scores has shape {tuple(predictions.shape)} and labels "
                f"{tuple(labels.shape)}; both must be (batch,) or (batch, 1)."
            )
        self._batches.append((predictions.detach().flatten(), labels.detach().flatten()))

    def merge_state(self, others: Sequence[Self]) -> None:
        self._batches = in_data_order([one._batches for one in (self, *others)])

    def known_results(self) -> list[str]:
        return ["pearson", "spearman", "corr"]

    def evaluate(self) -> dict[str, float]:
        # In double precision on the host: ranks and products of many samples lose digits in float32.
        num_samples = sum(len(labels) for _, labels in self._batches)
        if num_samples < 2:
            raise EvaluationError(f"RegEvaluator has seen {num_samples} samples; a correlation needs at least two.")
        predictions, labels = (torch.cat(parts).cpu().double() for parts in zip(*self._batches, strict=True))
        functions = load_package("torchmetrics.functional.regression", "RegEvaluator")
        pearson = float(functions.pearson_corrcoef(predictions, labels))
        spearman = float(functions.spearman_corrcoef(predictions, labels))
        return {"pearson": pearson, "spearman": spearman, "corr": (pearson + spearman) / 2}


class BLEUEvaluator(DatasetEvaluator):
    """``{"bleu_score"}`` in [0, 1], over the whole data set (not a mean over sentences).

    Reads ``outputs["candidate"]``, a list of texts, and ``inputs["reference"]``, for each of them a text or a list of
    texts that would all be right. Words are what stands between blanks; with ``tokenize`` (``"13a"``, ``"intl"``,
    ``"char"``, ``"zh"`` …) they are those of SacreBLEU's tokenizer, whose scores can be compared between papers.
    """

    def __init__(self, n_gram: int = 4, smooth: bool = False, tokenize: str | None = None) -> None:
        self.n_gram, self.smooth, self.tokenize = n_gram, smooth, tokenize
        self.reset()

    def __repr__(self) -> str:
        return f"BLEUEvaluator(n_gram={self.n_gram}, smooth={self.smooth}, tokenize={self.tokenize!r})"

    def reset(self) -> None:
        self._metric: Any = None  # torchmetrics' count of n-grams and words, built with the first batch
        self._num_samples = 0

    def process(self, inputs: Any, outputs: Any) -> None:
        candidates: Sequence[str] = required(outputs, "candidate", evaluator=self, where="what the model returns")
        references: Sequence[Any] = required(inputs, "reference", evaluator=self, where="the batch")
        if isinstance(candidates, str) or isinstance(references, str) or len(candidates) != len(references):
            raise EvaluationError(
                "BLEUEvaluator: candidate and reference must be lists with one entry per sample, "
                f"but got {_length(candidates)} and {_length(references)}."
            )
        if self._metric is None:
            text = load_package("torchmetrics.text", "BLEUEvaluator")
            settings: dict[str, Any] = {"n_gram": self.n_gram, "smooth": self.smooth, "sync_on_compute": False}
            sacre = partial(text.SacreBLEUScore, tokenize=self.tokenize)
            self._metric = (text.BLEUScore if self.tokenize is None else sacre)(**settings)
        self._metric.update(candidates, [[one] if isinstance(one, str) else list(one) for one in references])
        self._num_samples += len(candidates)

    def merge_state(self, others: Sequence[Self]) -> None:
        for other in others:
            self._num_samples += other._num_samples
            if self._metric is None:
                self._metric = other._metric
            elif other._metric is not None:
                for name, count in other._metric.metric_state.items():
                    setattr(self._metric, name, getattr(self._metric, name) + count)

    def known_results(self) -> list[str]:
        return ["bleu_score"]

    def evaluate(self) -> dict[str, float]:
        if not self._num_samples:
            raise EvaluationError("BLEUEvaluator has seen no samples.")
        return {"bleu_score": float(self._metric.compute())}


def _length(values: Sequence[Any]) -> str:
    return "one text" if isinstance(values, str) else f"{len(values)} entries"


# e**20 is half a billion: a model that knows nothing. Beyond it the figure would only overflow.
HIGHEST_LOSS = 20.0


class PPLEvaluator(DatasetEvaluator):
    """``{"lm_loss_PPL": perplexity}`` for each scalar that the model returns: exp of its mean over all samples.

    A model that returns a bare scalar gets ``loss_PPL``. A batch counts by its number of samples, and the mean loss is
    cut at 20 before exp.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._batches: list[tuple[dict[str, Tensor], int]] = []  # losses, on the device until evaluate(); samples
        self._count = SampleCounter(None)

    def process(self, inputs: Any, outputs: Any) -> None:
        losses = {"loss": outputs} if isinstance(outputs, Tensor) else outputs
        losses = losses if isinstance(losses, Mapping) else {}
        losses = {n: v for n, v in scalars_of(losses).items() if isinstance(v, Tensor) and v.is_floating_point()}
        if not losses:
            raise EvaluationError(
                "PPLEvaluator needs a loss (a tensor of one element) in what the model returns in evaluation, "
                f"but got {described(outputs)}."
            )
        # MPS has no float64.
        dtypes = {name: torch.float32 if loss.device.type == "mps" else torch.float64 for name, loss in losses.items()}
        wide = {name: loss.detach().reshape(()).to(dtypes[name], copy=True) for name, loss in losses.items()}
        samples = self._count(inputs, None) if self.batch_samples is None else self.batch_samples
        self._batches.append((wide, samples))

    def merge_state(self, others: Sequence[Self]) -> None:
        self._batches = in_data_order([one._batches for one in (self, *others)])  # summed in the order of a single rank

    def evaluate(self) -> dict[str, float]:
        if not self._batches:
            raise EvaluationError("PPLEvaluator has seen no samples.")
        means: dict[str, float] = {}
        for name in dict.fromkeys(name for losses, _ in self._batches for name in losses):
            sizes = [size for losses, size in self._batches if name in losses]
            column = torch.stack([losses[name] for losses, _ in self._batches if name in losses]).tolist()
            means[name] = reduce(add, map(mul, column, sizes)) / sum(sizes)
        # The mean comes first: min() then lets NaN through instead of turning it into the limit.
        return {f"{name}_PPL": math.exp(min(mean, HIGHEST_LOSS)) for name, mean in means.items()}
