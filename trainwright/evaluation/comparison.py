"""How metrics compare a model's outputs with the labels of a batch, as declared.

Nothing is inferred from the values of scores, labels or losses.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.base.batch import IGNORED
from trainwright.base.errors import ConfigError, did_you_mean
from trainwright.models.outputs import TOKENS, losses_of, named_outputs, predictions_of
from trainwright.models.targets import (
    LossIgnores,
    Targets,
    class_labels,
    declared_targets,
    label_fields,
    loss_inside,
    loss_type_of,
    target_of,
)
from trainwright.parallel.context import SHIFTED
from trainwright.parallel.simulated import simulation

logger = logging.getLogger("trainwright.evaluation")

# Losses of classes by what they take: scores that are logits (or their logarithmic probabilities), or probabilities.
_OF_LOGITS = (
    nn.CrossEntropyLoss, nn.NLLLoss, nn.BCEWithLogitsLoss, nn.MultiMarginLoss, nn.MultiLabelMarginLoss,
    nn.MultiLabelSoftMarginLoss, nn.SoftMarginLoss,
)  # fmt: skip
_OF_PROBABILITIES = (nn.BCELoss,)
_OF_NUMBERS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)  # near labels of 0 and 1, as probabilities are
_OF_TOKENS = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration")
_FUNCTIONS: dict[Any, bool] = {
    **dict.fromkeys(
        (
            F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits, F.multi_margin_loss,
            F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.soft_margin_loss,
        ),
        True,
    ),
    **dict.fromkeys((F.binary_cross_entropy, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss), False),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """How to compare scores with labels.

    Attributes:
        is_shifted: the score at token i is compared with the label of token i + 1.
        targets: the labels that the loss averages; None: all samples count the same.
        refusal: why the default metric, accuracy, is meaningless for this run; None if it is meaningful.
        ignored: the classes that the loss ignores, which metrics ignore as well.
        are_logits: whether scores are logits or probabilities; None: unknown.
        is_classes_last: whether scores of several positions are (B, L, C), not (B, C, L); None: their shape shows it.
        takes_probabilities: whether targets of the shape of the scores are class probabilities, in dimension 1.
    """

    is_shifted: bool = False
    targets: Targets | None = None
    refusal: str | None = None
    ignored: tuple[int, ...] = ()
    are_logits: bool | None = None
    is_classes_last: bool | None = None
    takes_probabilities: bool = False

    def for_handler(self, handler: Any) -> "Comparison":
        """The parts that apply to a metrics handler: a metric that the user requests is always computed."""
        return replace(
            self,
            is_shifted=self.is_shifted and getattr(handler, "shifts_labels", False),
            refusal=self.refusal if getattr(handler, "is_default", False) else None,
            ignored=self.ignored if getattr(handler, "ignores_label", False) else (),
        )

    def declare_to(self, handler: Any) -> None:
        """Declare to a metrics handler what the scores and the targets are."""
        declare = getattr(handler, "declare_scores", None)
        if declare is not None:
            declare(are_logits=self.are_logits, is_classes_last=self.is_classes_last)
        declare_targets = getattr(handler, "declare_targets", None)
        if declare_targets is not None:
            declare_targets(are_probabilities=self.takes_probabilities)

    def aligned(self, scores: Any, labels: Any) -> tuple[Any, Any]:
        """Scores and the labels that they predict: (B, L, C) and (B, L) of the next token if ``is_shifted``.

        Ignored labels are -100.
        """
        for one in self.ignored if isinstance(labels, Tensor) and not labels.is_floating_point() else ():
            labels = labels.long().masked_fill(labels == one, IGNORED)
        return (
            (scores[:, :-1], labels[:, 1:]) if self.is_shifted and _are_of_tokens(scores, labels) else (scores, labels)
        )

    def loss_weight(self, outputs: Mapping[str, Any], batch: Any) -> int | float | Tensor | None:
        """The number of items that a batch's loss averages: ``num_tokens`` or targets; None: its samples."""
        if TOKENS in outputs:
            tokens: int | float | Tensor = outputs[TOKENS]
            return tokens
        return None if self.targets is None else self.targets.count_in(batch)


class Comparisons:
    """Finds the labels of batches, and how to compare them with a model's outputs, by what a run declares.

    Args:
        model: returns the model that is evaluated.
        criterion: returns the criterion that computes the loss of a batch; None: the model computes it, or user code.
        label_names: the fields of a batch that are its labels; None: those that the model takes as labels.
        loss_ignores: as of :func:`~trainwright.models.targets.declared_targets`.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        criterion: Callable[[Any], Any] = lambda batch: None,
        *,
        label_names: Sequence[str] | None = None,
        loss_ignores: LossIgnores = "declared",
    ) -> None:
        self._model, self._criterion = model, criterion
        self._label_names, self._loss_ignores = label_names, loss_ignores
        self._is_checked = False  # whether labels are the tokens of a batch
        self._has_looked = False  # at labels of an output
        self._current: Comparison | None = None

    def labelled(self, batch: Any, outputs: Mapping[str, Any] | None = None) -> Any:
        """The batch with its labels where :func:`target_of` finds them: those of the outputs, or of ``label_names``.

        By default those of the fields that ``forward`` takes as labels, if none has one of the usual names.

        Raises:
            ConfigError: there is no field of such a name.
        """
        labels = (outputs or {}).get("labels")
        if outputs is not None and labels is not None and not self._has_looked:
            self._has_looked = True
            self._warn_of_predicted(labels, outputs, batch)
        if labels is None and isinstance(batch, Mapping):
            if absent := [name for name in self._label_names or () if name not in batch]:
                raise ConfigError(
                    f"TrainingConfig.label_names: the batch has no field {absent[0]!r}."
                    f" {did_you_mean(absent[0], map(str, batch))}"
                )
            if names := label_fields(self._model(), batch, self._label_names):
                labels = batch[names[0]] if len(names) == 1 else tuple(batch[name] for name in names)
        if labels is None:
            return batch
        return {**batch, "labels": labels} if isinstance(batch, Mapping) else (batch, labels)

    def _warn_of_predicted(self, labels: Any, outputs: Mapping[str, Any], batch: Any) -> None:
        """Warn if an output ``labels`` has the most probable classes of the scores, and not the labels of the batch."""
        names, scores = label_fields(self._model(), batch, self._label_names), outputs.get("logits")
        own = batch[names[0]] if names else target_of(batch)
        if not (isinstance(scores, Tensor) and isinstance(labels, Tensor) and isinstance(own, Tensor)):
            return
        if _are_equal(labels, own):
            return
        if any(_are_equal(labels, scores.argmax(dim)) for dim in {min(1, scores.dim() - 1), scores.dim() - 1}):
            logger.warning(
                "%s returns its predicted classes as 'labels', with which metrics compare its scores. Give the output"
                " another name.", type(self._model()).__name__,
            )  # fmt: skip

    def forget(self) -> None:
        """Another evaluation begins, perhaps of other data."""
        self._current = None

    def current(self, outputs: Any, inputs: Any) -> Comparison:
        """The comparison of the evaluation, found with its first batch."""
        if self._current is None:
            self._current = self.find(outputs, inputs)
        return self._current

    def find(self, outputs: Any, inputs: Any) -> Comparison:
        """The comparison for batches like ``inputs``, which have their labels."""
        return find_comparison(
            self._model(),
            outputs,
            inputs,
            criterion=self._criterion(inputs),
            has_own_loss=losses_of(outputs) is not None,
            loss_ignores=self._loss_ignores,
        )

    def warn_of_tokens(self, outputs: Any, inputs: Any) -> None:
        """Warn, in the first batch, of labels that seem to be those of the next tokens, if nothing declares it."""
        if self._is_checked:
            return
        self._is_checked, model = True, self._model()
        if isinstance(inputs, Mapping) and are_labels_tokens(model, outputs, inputs):
            logger.warning(
                "The labels of a batch are its tokens, and metrics compare each with the scores of the same token. If"
                " %s predicts the next token, declare it: %s.loss_type = 'ForCausalLM'.",
                *[type(model).__name__] * 2,
            )


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.device == other.device and bool((one == other).all())


def find_comparison(
    model: nn.Module,
    outputs: Any,
    inputs: Any,
    *,
    criterion: Any,
    has_own_loss: bool,
    loss_ignores: LossIgnores = "declared",
) -> Comparison:
    """The comparison for a run with batches like ``inputs``.

    ``has_own_loss``: the model or the user's code computes the loss, without the ``criterion``.
    """
    criterion = None if has_own_loss else criterion
    targets = declared_targets(model, criterion, loss_ignores)
    by_loss = targets if loss_ignores is not None else declared_targets(model, criterion)
    has_shifted = isinstance(inputs, Mapping) and SHIFTED in inputs
    return Comparison(
        is_shifted=by_loss is not None and by_loss.is_shifted and not has_shifted,
        targets=targets,
        refusal=_refusal(predictions_of(outputs), inputs, criterion=criterion),
        ignored=() if targets is None else tuple(one for one in targets.ignored if one != IGNORED),
        are_logits=_are_logits(model, outputs, criterion),
        is_classes_last=_is_classes_last(model, criterion),
        takes_probabilities=_takes_probabilities(criterion),
    )


def are_labels_tokens(model: nn.Module, outputs: Any, inputs: Any) -> bool:
    """Whether labels are the tokens of the batch and the model does not say whether it predicts these or the next."""
    scores, labels = predictions_of(outputs), class_labels(inputs)
    if labels is None or loss_type_of(model) is not None or not _are_of_tokens(scores, labels):
        return False
    if simulation() is not None or SHIFTED in inputs or not bool((labels != IGNORED).any()):
        return False
    others = [one for name, one in inputs.items() if isinstance(one, Tensor) and one is not target_of(inputs)]
    alike = [one for one in others if one.shape == labels.shape and one.dtype == labels.dtype]
    return any(bool(((one == labels) | (labels == IGNORED)).all()) for one in alike)


def _are_logits(model: nn.Module, outputs: Any, criterion: Any) -> bool | None:
    """By the criterion of torch, or else by the model: its ``loss_type``, or an output ``logits``. None: unknown."""
    loss = _loss_of(criterion)
    if isinstance(loss, (*_OF_PROBABILITIES, *_OF_NUMBERS)) or _FUNCTIONS.get(loss) is False:
        return False
    named = named_outputs(outputs) or {}
    is_declared = criterion is None and loss_type_of(model) is not None
    return True if isinstance(loss, _OF_LOGITS) or loss in _FUNCTIONS or is_declared or "logits" in named else None


def _loss_of(criterion: Any) -> Any:
    return loss_inside(criterion.func if isinstance(criterion, functools.partial) else criterion)


def _takes_probabilities(criterion: Any) -> bool:
    """The cross-entropy of torch takes targets of the shape of the scores as class probabilities."""
    loss = _loss_of(criterion)
    return isinstance(loss, nn.CrossEntropyLoss) or loss is F.cross_entropy


def _is_classes_last(model: nn.Module, criterion: Any) -> bool | None:
    """The losses of torch take classes in dimension 1, those of tokens by ``loss_type`` in the last one."""
    if criterion is not None:
        loss = _loss_of(criterion)
        return False if isinstance(loss, _OF_LOGITS) or loss in _FUNCTIONS else None
    return True if str(loss_type_of(model)).endswith(_OF_TOKENS) else None


def _refusal(scores: Any, inputs: Any, *, criterion: Any) -> str | None:
    if not isinstance(scores, Tensor):
        return "the model's output has no class scores"
    if criterion is not None:
        return refusal_by_loss(criterion)
    if _is_reconstruction(scores, inputs):
        return "the model's output has the shape of its input"
    return None


def refusal_by_loss(criterion: Any) -> str | None:
    """Why accuracy is meaningless with this loss; None if it is meaningful, or the loss does not show it."""
    loss = loss_inside(criterion)
    is_torchs = type(loss).__module__ == "torch.nn.modules.loss"
    is_of_others = is_torchs and not isinstance(loss, (*_OF_LOGITS, *_OF_PROBABILITIES))
    return f"{type(loss).__name__} is not a classification loss" if is_of_others else None


def _is_reconstruction(scores: Tensor, inputs: Any) -> bool:
    """Whether the output has as many values per sample as an input. Two values may be two classes."""
    given = inputs.values() if isinstance(inputs, Mapping) else inputs[:1] if isinstance(inputs, tuple | list) else ()
    if scores.dim() < 2 or scores.shape[1:].numel() <= 2:
        return False
    return any(
        isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
        and value.shape[0] == scores.shape[0] and value.shape[1:].numel() == scores.shape[1:].numel()
        for value in given
    )  # fmt: skip


def _are_of_classes(scores: Any, labels: Any) -> bool:
    """Whether they have the shapes of a cross-entropy: scores (B, C, …) or (B, …, C)."""
    if not (isinstance(scores, Tensor) and isinstance(labels, Tensor) and scores.is_floating_point()):
        return False
    is_of_classes = not labels.is_floating_point() and scores.dim() == labels.dim() + 1
    return is_of_classes and labels.shape in (scores.shape[:-1], (scores.shape[0], *scores.shape[2:]))


def _are_of_tokens(scores: Any, labels: Any) -> bool:
    return _are_of_classes(scores, labels) and labels.dim() == 2 and labels.shape == scores.shape[:2]
