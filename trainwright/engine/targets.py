"""The targets that count: how many of a batch's labels its mean loss averages.

A criterion of torch says it by itself. Of a loss that the model or the user computes, the first batch tells: the value
of the loss is that of the mean over all labels, without those of an ignored class, or of the next tokens.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright._torch_compat.tensor_chunks import is_dtensor
from trainwright.config.errors import ConfigError
from trainwright.data.batch import arguments, count_samples, parameter_names
from trainwright.data.seeding import rng_state, set_random_state
from trainwright.engine.loss_fn import losses_of, predictions_of, target_of
from trainwright.events.media import wide_dtype
from trainwright.parallel.context import SHIFTED
from trainwright.parallel.simulated import simulation

logger = logging.getLogger("trainwright.engine")

IGNORED = -100  # the class that torch's losses, and models of transformers, ignore
_FORWARDS = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)  # a subclass may compute another loss
_POSITIONS = ("start_positions", "end_positions")  # of an answer in a text
_NUM_ITEMS = "num_items_in_batch"  # a parameter of a forward: the sum of the losses is divided by it


@dataclass(frozen=True, slots=True)
class Targets:
    """Which labels of a batch count: those that are not ``ignored``; each with the weight of its class, if it has one.

    ``is_shifted``: the first label of each sequence is predicted by nothing, so it does not count. ``num_classes``: all
    other values are ignored as well. ``per_sample``: how many targets a sample had in the first batch, which keeps the
    gradients of a window in the range of float16.
    """

    ignored: int = IGNORED
    is_shifted: bool = False
    class_weights: Tensor | None = None
    num_classes: int | None = None
    per_sample: float = 1.0

    def count(self, labels: Tensor) -> int | float | Tensor:
        """Their number, or the sum of their weights; of labels on the CPU as a number of Python."""
        labels = labels[..., 1:] if self.is_shifted else labels
        is_counted = labels != self.ignored
        if self.num_classes is not None:
            is_counted &= (labels >= 0) & (labels < self.num_classes)
        if self.class_weights is not None:
            found = self.class_weights.to(labels.device)[labels[is_counted].long()].sum()
        else:
            found = is_counted.sum()
        return found.item() if found.device.type == "cpu" else found.to(wide_dtype(found.device))


def label_fields(model: nn.Module, batch: Any, names: Sequence[str] | None) -> Sequence[str]:
    """The fields of a batch that are its labels: ``names``, or those that ``forward`` takes as labels.

    Empty: the labels are where :func:`target_of` finds them, if there are any.
    """
    if not isinstance(batch, Mapping):
        return ()
    if names is None and target_of(batch) is None:
        parameters = inspect.signature(model.forward).parameters
        names = [name for name in batch if name in parameters and ("label" in name or name in _POSITIONS)]
    return names if names and all(name in batch for name in names) else ()


def labels_of(batch: Any, fields: Sequence[str] = ()) -> Tensor | None:
    """The labels of a batch, if they are classes in one field. ``fields``: those of :func:`label_fields`."""
    labels: Any = batch[fields[0]] if len(fields) == 1 else None if fields else target_of(batch)
    is_of_classes = isinstance(labels, Tensor) and labels.dim() > 0 and not labels.is_floating_point()
    return labels if is_of_classes and labels.dtype is not torch.bool else None


def targets_of_criterion(criterion: Any) -> Targets | None:
    """The targets that a loss of torch averages for labels that are classes; None: another loss."""
    loss = inspect.unwrap(criterion)
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and type(loss).forward in _FORWARDS:
        return Targets(loss.ignore_index, class_weights=loss.weight) if loss.reduction == "mean" else None
    given: Mapping[str, Any] = {}
    if isinstance(criterion, functools.partial) and not criterion.args:
        loss, given = criterion.func, criterion.keywords
    if loss not in (F.cross_entropy, F.nll_loss) or given.get("reduction", "mean") != "mean":
        return None
    return Targets(given.get("ignore_index", IGNORED), class_weights=given.get("weight"))


def targets_of_model(model: nn.Module, outputs: Any, batch: Any, labels: Tensor, loss: Tensor) -> Targets | None:
    """The targets that ``loss``, of the model's ``outputs`` for a batch, averages; None: unknown."""
    if (found := targets_by_value(model, predictions_of(outputs), labels, loss)) is not None:
        return found
    if _NUM_ITEMS in inspect.signature(model.forward).parameters and isinstance(batch, Mapping):
        return _by_sum_and_mean(model, batch, labels)
    if hasattr(getattr(model, "config", None), "model_type"):  # of transformers: their losses ignore -100
        return Targets(is_shifted=predicts_next_token(model))
    return None


def targets_by_value(model: nn.Module, scores: Any, labels: Tensor, loss: Tensor) -> Targets | None:
    """The targets whose mean cross-entropy is the value of ``loss``; None: it is another loss, or has further terms."""
    if not (isinstance(scores, Tensor) and scores.is_floating_point() and scores.dim() == labels.dim() + 1):
        return None
    value, scores = float(loss), scores.full_tensor() if is_dtensor(scores) else scores  # type: ignore[attr-defined]
    faults = {one: abs(_mean_loss(one, scores.detach(), labels) - value) for one in _candidates(model, labels)}
    best = min(faults, key=faults.__getitem__)
    if not faults[best] <= 0.01 * max(1.0, value):  # also if it is NaN
        return None
    return replace(best, num_classes=scores.shape[-1 if scores.shape[:-1] == labels.shape else 1])


def predicts_next_token(model: nn.Module) -> bool:
    """Whether a model of transformers shifts its labels, by its name."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):  # the decoder's input is shifted already
        return False
    is_named = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return is_named or getattr(model, "loss_type", None) == "ForCausalLM"


def _candidates(model: nn.Module, labels: Tensor) -> Iterator[Targets]:
    """What a mean may be over, the most frequent kinds first."""
    config = getattr(model, "config", None)
    others = [getattr(config, name, None) for name in ("semantic_loss_ignore_index", "pad_token_id")]
    ignored = [one for one in dict.fromkeys((IGNORED, -1, *others, 255, 0)) if isinstance(one, int)]
    for one in ignored:
        if one == IGNORED or bool((labels == one).any()):
            yield Targets(one)
            if labels.dim() == 2 and labels.shape[1] > 1:
                yield Targets(one, is_shifted=True)


def empty_targets(model: nn.Module, labels: Tensor, loss: Tensor) -> list[Targets]:
    """Those of which a batch has none, if its loss is NaN as the mean over none of them is."""
    return [one for one in _candidates(model, labels) if not one.count(labels)] if bool(loss.isnan()) else []


def _mean_loss(targets: Targets, scores: Tensor, labels: Tensor) -> float:
    """The mean cross-entropy of scores (B, C, …) or (B, …, C), one sample at a time: large vocabularies need memory."""
    if scores.shape[:-1] == labels.shape:
        scores = scores.movedim(-1, 1) if labels.dim() > 1 else scores
    elif scores.shape[:1] + scores.shape[2:] != labels.shape:
        return float("inf")
    if targets.is_shifted:
        scores, labels = scores[..., :-1], labels[..., 1:]
    is_class = (labels != targets.ignored) & (labels >= 0) & (labels < scores.shape[1])
    if bool(((labels != targets.ignored) & ~is_class).any()):
        return float("inf")  # torch would raise
    chosen = labels.long().masked_fill(~is_class, IGNORED)
    rows = zip(scores[:, None], chosen[:, None], strict=True) if labels.dim() > 1 else [(scores, chosen)]
    total = sum(float(F.cross_entropy(s.float(), y, reduction="sum", ignore_index=IGNORED)) for s, y in rows)
    return total / max(1, int(is_class.sum()))


@torch.no_grad()
def _by_sum_and_mean(model: nn.Module, batch: Mapping[str, Any], labels: Tensor) -> Targets | None:
    """By the number of targets that a model itself counts: the sum of its losses divided by their mean."""
    state, buffers = rng_state(), [(buffer, buffer.clone()) for buffer in model.buffers()]
    _, fields = arguments(batch, parameter_names(model.forward))
    try:
        found = []
        for more in ({_NUM_ITEMS: 1}, {}):
            set_random_state(state)
            losses = losses_of(model(**fields, **more))
            found.append(float((losses or {}).get("loss", torch.nan)))
    finally:
        set_random_state(state)
        for buffer, value in buffers:  # running statistics count a batch once
            buffer.copy_(value)
    number = found[0] / found[1] if found[1] else 0.0
    return next((one for one in _candidates(model, labels) if abs(float(one.count(labels)) - number) < 0.5), None)


class TargetCounter:
    """How much each micro-batch weighs in the mean loss of an update: by its targets, or else by its samples.

    Decided with the first batch, for all processes.

    ``criterion`` returns the loss of outputs and labels, if the model computes none. ``share`` is called with the
    decision of this process, and returns that of all processes that share the data.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Callable[[], Any] = lambda: None,
        share: Callable[[Any], list[Any]] = lambda found: [found],
        label_names: Sequence[str] | None = None,
    ) -> None:
        self._model, self._criterion, self._share, self._label_names = model, criterion, share, label_names
        self._fields: Sequence[str] = ()
        self.targets: Targets | None = None
        self.is_decided = self._is_empty = self._is_logged = False
        self._empty: list[Targets] = []  # of the latest batch that had none
        self._is_of_criterion = False

    def decide(self, outputs: Any, batch: Any, loss: Tensor, samples: int) -> None:
        """Decide with the first batch that has a target. ``outputs`` are those of the model for it; None: unknown."""
        if simulation() is not None:  # labels and losses have no values: an estimate weights by samples
            self.is_decided = self._is_logged = True
            return
        is_of_model = outputs is not None and losses_of(outputs) is not None
        criterion = None if is_of_model else self._criterion()
        self._fields = () if criterion is not None else label_fields(self._model, batch, self._label_names)
        is_shifted = _has_shifted(batch)
        labels = batch[SHIFTED] if is_shifted else labels_of(batch, self._fields)
        self._is_of_criterion, self._is_empty = criterion is not None, False
        found = None if labels is None else self._found(outputs, batch, labels, loss, criterion)
        shared = self._share((_by_sample(found, labels, samples), self._is_empty))
        self.targets = next((one for one, _ in shared if one is not None), None)
        if is_shifted and self.targets is not None:  # of labels that are not
            self.targets = replace(self.targets, is_shifted=True)
        self.is_decided = self.targets is not None or not any(is_empty for _, is_empty in shared)

    def _found(self, outputs: Any, batch: Any, labels: Tensor, loss: Tensor, criterion: Any) -> Targets | None:
        """What counts among the labels of a batch; None: it is unknown, or the batch is empty."""
        found = None
        if criterion is not None:
            found = targets_of_criterion(criterion)
        elif _has_shifted(batch):
            value, scores = loss.detach(), predictions_of(outputs)
            found = targets_by_value(self._model, scores, labels, value) or Targets()
            if found.is_shifted and abs(_mean_loss(Targets(), scores.detach(), labels) - float(value)) > 1e-3:
                raise ConfigError(
                    f"The loss shifts the labels of a batch that has {SHIFTED!r}, those of the next tokens already, as"
                    " with context_parallel_size. Compare the scores of all tokens with these, where a batch has them."
                )
        if found is not None:
            return found
        empty = empty_targets(self._model, labels, loss.detach())
        if empty:
            self._is_empty, self._empty = len(empty) > 1, empty
            return None if self._is_empty else empty[0]
        if outputs is not None:
            found = targets_of_model(self._model, outputs, batch, labels, loss.detach())
        return found or next(iter(self._empty), None)  # a batch before has shown that they are ignored

    def state_dict(self) -> dict[str, Any]:
        """The decision, which a resumed run keeps: its first batch, of a trained model, might show another one."""
        targets = self.targets
        # The weights are those of a criterion, which decides again.
        is_kept = self.is_decided and (targets is None or targets.class_weights is None)
        shown = asdict(targets) if is_kept and targets is not None else None
        return {"is_decided": is_kept, "targets": shown, "fields": [*self._fields]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["is_decided"]:
            self.targets = None if state["targets"] is None else Targets(**state["targets"])
            self.is_decided, self._fields = True, state["fields"]

    def count(self, batch: Any, samples: int) -> int | float | Tensor:
        """The weight of a batch; ``samples``: its number of samples, 0 for a padding batch."""
        if not samples or (self._is_empty and self.targets is None):
            return 0
        if self.targets is not None and _has_shifted(batch):
            return replace(self.targets, is_shifted=False).count(batch[SHIFTED])
        labels = labels_of(batch, self._fields)
        if self.targets is not None:
            return samples if labels is None else self.targets.count(labels)
        if not self._is_logged and labels is not None and labels.device.type == "cpu" and (labels == IGNORED).any():
            self._is_logged = True
            by, of_model = self._criterion(), "the model's scores as 'logits' beside its loss, or 'num_tokens'"
            logger.warning(
                "The loss of %s cannot be counted: some labels are %d, which it may ignore. The micro-batches of an"
                " update, and processes, are weighted by samples. Return %s, the number of labels that it averages.",
                getattr(by, "__name__", type(by).__name__) if self._is_of_criterion else type(self._model).__name__,
                IGNORED,
                "'num_tokens' beside 'logits' from the model" if self._is_of_criterion else of_model,
            )
        return samples


def _has_shifted(batch: Any) -> bool:
    """Whether a batch also has the token after each, which the loss then uses."""
    return isinstance(batch, Mapping) and SHIFTED in batch


def _by_sample(found: Targets | None, labels: Tensor | None, samples: int) -> Targets | None:
    """``found`` with its number of targets per sample in a batch."""
    if found is None or labels is None or not samples:
        return found
    return replace(found, per_sample=float(found.count(labels)) / samples or 1.0)


_LOSSES_OF_CLASSES = (
    nn.CrossEntropyLoss,
    nn.NLLLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.MultiMarginLoss,
    nn.MultiLabelMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.SoftMarginLoss,
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How to compare scores with labels.

    Attributes:
        is_shifted: the score at token i is compared with the label of token i + 1.
        targets: the labels that the loss averages; None: all samples count the same.
        refusal: why the default metric, accuracy, is meaningless for this run; None if it is meaningful.
        is_final: False if the batch says nothing about shifted labels, because it has none that count.
        ignored: the class that the run's criterion ignores, which metrics ignore as well.
    """

    is_shifted: bool = False
    targets: Targets | None = None
    refusal: str | None = None
    is_final: bool = True
    ignored: int = IGNORED

    def for_handler(self, handler: Any) -> "Comparison":
        """The parts that apply to a metrics handler: a metric that the user requests is always computed."""
        return replace(
            self,
            is_shifted=self.is_shifted and getattr(handler, "shifts_labels", False),
            refusal=self.refusal if getattr(handler, "is_default", False) else None,
            ignored=self.ignored if getattr(handler, "ignores_label", False) else IGNORED,
        )

    def aligned(self, scores: Any, labels: Any) -> tuple[Any, Any]:
        """Scores and the labels that they predict: (B, L, C) and (B, L) of the next token if ``is_shifted``.

        Ignored labels are -100.
        """
        if self.ignored != IGNORED and isinstance(labels, Tensor) and not labels.is_floating_point():
            labels = labels.long().masked_fill(labels == self.ignored, IGNORED)
        return (
            (scores[:, :-1], labels[:, 1:]) if self.is_shifted and _are_of_tokens(scores, labels) else (scores, labels)
        )

    def loss_weight(self, outputs: Mapping[str, Any], batch: Any) -> int | float | Tensor:
        """The number of items that a batch's loss averages: as in the training, ``num_tokens``, targets or samples."""
        if "num_tokens" in outputs:
            tokens: int | float | Tensor = outputs["num_tokens"]
            return tokens
        labels = labels_of(batch)
        if labels is None or self.targets is None:
            return count_samples(batch, unknown=1)
        return self.targets.count(labels)


def find_comparison(
    model: nn.Module, outputs: Any, inputs: Any, loss: Any, *, criterion: Any, has_own_loss: bool
) -> Comparison:
    """The comparison for a run whose first batch is ``inputs``.

    ``has_own_loss``: the model or the user's code computes the loss, without the ``criterion``.
    """
    scores, labels = predictions_of(outputs), labels_of(inputs)
    criterion = None if has_own_loss else criterion
    targets = None if criterion is None else targets_of_criterion(criterion)
    ignored = IGNORED if targets is None else targets.ignored
    is_of_tokens, is_final = _are_of_tokens(scores, labels), True
    if targets is None and labels is not None and isinstance(loss, Tensor) and loss.numel() == 1:
        targets = targets_by_value(model, scores, labels, loss)
        if targets is None and (empty := empty_targets(model, labels, loss)):
            targets, is_final = empty[0], False
    if targets is None and _are_of_classes(scores, labels):
        targets = Targets(is_shifted=is_of_tokens and predicts_next_token(model) and not _has_shifted(inputs))
    return Comparison(
        is_shifted=targets is not None and targets.is_shifted,
        targets=targets,
        refusal=_refusal(scores, inputs, criterion=criterion),
        ignored=ignored,
        is_final=is_final and (labels is None or not is_of_tokens or bool((labels[:, 1:] >= 0).any())),
    )


def _refusal(scores: Any, inputs: Any, *, criterion: Any) -> str | None:
    if not isinstance(scores, Tensor):
        return "the model's output has no class scores"
    if criterion is not None:
        is_torchs = type(criterion).__module__ == "torch.nn.modules.loss"
        is_of_others = is_torchs and not isinstance(criterion, _LOSSES_OF_CLASSES)
        return f"{type(criterion).__name__} is not a classification loss" if is_of_others else None
    if _is_reconstruction(scores, inputs):
        return "the model's output has the shape of its input"
    return None


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
