"""The targets that count: which labels of a batch its mean loss averages, as declared.

The order is that of :func:`declared_targets`. Nothing is inferred from the values of a loss.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.base.batch import IGNORED, LABEL_NAMES
from trainwright.base.devices import wide_dtype
from trainwright.base.signatures import read_signature
from trainwright.models.outputs import losses_of
from trainwright.parallel.adapters import without_adapters
from trainwright.parallel.context import SHIFTED
from trainwright.parallel.simulated import simulation
from trainwright.parallel.wrappers import unwrap

LossIgnores = int | Sequence[int] | Literal["declared"] | None
_FORWARDS = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)  # a subclass may compute another loss
_POSITIONS = ("start_positions", "end_positions")  # of an answer in a text


def target_of(inputs: Any, label_names: Sequence[str] = ()) -> Any:
    """The labels of a batch: the second item of a pair, or the field of a label name; None if there are none.

    ``label_names``: the fields that the user has named, several as a tuple.
    """
    if isinstance(inputs, Mapping):
        if label_names:
            named = tuple(inputs.get(name) for name in label_names)
            return None if any(one is None for one in named) else named[0] if len(named) == 1 else named
        return next((inputs[name] for name in LABEL_NAMES if name in inputs), None)
    return inputs[1] if isinstance(inputs, tuple | list) and len(inputs) == 2 else None


def loss_inside(criterion: Any) -> Any:
    """The criterion without decorators and the wrappers of ``torch.compile``."""
    criterion = inspect.unwrap(criterion)
    return unwrap(criterion) if isinstance(criterion, nn.Module) else criterion


@dataclass(frozen=True, slots=True)
class Targets:
    """Which labels of a batch count: those that are not ``ignored``; each with the weight of its class, if it has one.

    ``is_shifted``: the first label of each sequence is predicted by nothing, so it does not count.
    """

    ignored: tuple[int, ...] = (IGNORED,)
    is_shifted: bool = False
    class_weights: Tensor | None = None

    def count(self, labels: Tensor) -> int | float | Tensor:
        """Their number, or the sum of their weights; of labels on the CPU as a number of Python."""
        labels = labels.long()  # in uint8 class 156 would equal -100
        labels = labels[..., 1:] if self.is_shifted else labels
        is_counted = labels != self.ignored[0] if self.ignored else torch.ones_like(labels, dtype=torch.bool)
        for one in self.ignored[1:]:
            is_counted &= labels != one
        if self.class_weights is not None:
            found = self.class_weights.to(labels.device)[labels[is_counted]].sum()
        else:
            found = is_counted.sum()
        return found.item() if found.device.type == "cpu" else found.to(wide_dtype(found.device))

    def count_in(self, batch: Any, fields: Sequence[str] = ()) -> int | float | Tensor | None:
        """Their number in a batch, whose labels are in ``fields``; None: it has no labels that are classes."""
        if isinstance(batch, Mapping) and SHIFTED in batch:  # the labels of the next tokens, which the loss then uses
            return (replace(self, is_shifted=False) if self.is_shifted else self).count(batch[SHIFTED])
        labels = class_labels(batch, fields)
        return None if labels is None else self.count(labels)


# What the losses of transformers average, by the end of a model's `loss_type`, which models of users may have as well.
# None: samples. A name that is missing says nothing.
_NEXT_TOKENS = Targets(is_shifted=True)
_BY_LOSS_TYPE: dict[str, Targets | None] = {
    "ForCausalLM": _NEXT_TOKENS,
    "ForConditionalGeneration": _NEXT_TOKENS,  # of a decoder alone: see `_targets_of_type`
    "ForMaskedLM": Targets(),
    "ForTokenClassification": Targets(),
    "ForSemanticSegmentation": Targets((255,)),
    **dict.fromkeys(
        (
            "ForSequenceClassification", "ForImageClassification", "ForVideoClassification", "ForAudioClassification",
            "ForQuestionAnswering", "ForCTC", "ForRNNT", "ForTDT",
            "ForObjectDetection", "ForSegmentation", "ForInstanceSegmentation",
        )
    ),
}  # fmt: skip


def declared_targets(model: nn.Module, criterion: Any = None, loss_ignores: LossIgnores = "declared") -> Targets | None:
    """The targets that the mean loss of a batch is over; None: its samples.

    In this order: the setting ``loss_ignores`` (classes, or None: samples); the ``criterion`` of torch, if it computes
    the loss; the ``loss_type`` of a model that computes it itself. Else the labels that are integers, without those of
    -100. The ``num_tokens`` that a model returns precede all of these.
    """
    if loss_ignores is None:
        return None
    targets: Targets | None = Targets()
    if criterion is not None:
        targets = targets_of_criterion(criterion)
    elif (kind := loss_type_of(model)) is not None:
        targets = _targets_of_type(model, kind)
    if loss_ignores == "declared":
        return targets
    ignored = (loss_ignores,) if isinstance(loss_ignores, int) else tuple(loss_ignores)
    return replace(targets or Targets(), ignored=ignored)


def targets_of_criterion(criterion: Any) -> Targets | None:
    """The targets that a loss of torch averages; None: samples.

    Of a loss that is not torch's the labels that are integers count, without those of -100.
    """
    loss, given = loss_inside(criterion), dict[str, Any]()
    if isinstance(criterion, functools.partial) and not criterion.args:
        loss, given = criterion.func, criterion.keywords
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and type(loss).forward in _FORWARDS:
        given = {"reduction": loss.reduction, "ignore_index": loss.ignore_index, "weight": loss.weight}
    elif loss not in (F.cross_entropy, F.nll_loss):
        return None if _is_of_torch(loss) else Targets()
    if given.get("reduction", "mean") != "mean":
        return None
    return Targets((given.get("ignore_index", IGNORED),), class_weights=given.get("weight"))


def _is_of_torch(loss: Any) -> bool:
    """Whether a loss is one of torch's other ones, which are means over samples or over numbers."""
    holder = loss if inspect.isfunction(loss) or inspect.isbuiltin(loss) else type(loss)
    return str(getattr(holder, "__module__", None)).startswith("torch.")


def loss_type_of(model: nn.Module) -> str | None:
    """The name that transformers gives to the loss that a model computes; None: it says nothing."""
    model = unwrap(model)
    kind = getattr(model, "loss_type", None)
    if isinstance(kind, str):  # which may mean something else in a model of the user's own
        return kind if kind.endswith(tuple(_BY_LOSS_TYPE)) else None
    # Older classes of transformers, and adapters around them, compute the loss of the next tokens without saying so.
    names = [
        one.__name__
        for part in (model, without_adapters(model)[0])
        for one in type(part).__mro__
        if one.__module__.startswith(("transformers.", "peft."))
    ]
    is_of_next_tokens = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    return "ForCausalLM" if is_of_next_tokens and not any(name.endswith("WithLMHeadModel") for name in names) else None


def _targets_of_type(model: nn.Module, loss_type: str) -> Targets | None:
    name = next(name for name in _BY_LOSS_TYPE if loss_type.endswith(name))
    targets, config = _BY_LOSS_TYPE[name], getattr(unwrap(model), "config", None)
    if targets is _NEXT_TOKENS and getattr(config, "is_encoder_decoder", False):
        return Targets()  # the decoder's input is shifted already
    if name == "ForSemanticSegmentation":
        return Targets((getattr(config, "semantic_loss_ignore_index", 255),))
    return targets


def label_fields(model: nn.Module, batch: Any, names: Sequence[str] | None) -> Sequence[str]:
    """The fields of a batch that are its labels: ``names``, or those that ``forward`` takes as labels.

    Empty: the labels are where :func:`target_of` finds them, if there are any.
    """
    if not isinstance(batch, Mapping):
        return ()
    if names is None and target_of(batch) is None:
        parameters = read_signature(without_adapters(unwrap(model))[0].forward).parameters
        names = [name for name in batch if name in parameters and ("label" in name or name in _POSITIONS)]
    return names if names and all(name in batch for name in names) else ()


def class_labels(batch: Any, fields: Sequence[str] = ()) -> Tensor | None:
    """The labels of a batch, if they are classes in one field. ``fields``: those of :func:`label_fields`."""
    labels: Any = batch[fields[0]] if len(fields) == 1 else None if fields else target_of(batch)
    is_of_classes = isinstance(labels, Tensor) and labels.dim() > 0 and not labels.is_floating_point()
    return labels if is_of_classes and labels.dtype is not torch.bool else None


class TargetCounter:
    """How much each micro-batch weighs in the mean loss of an update: by its targets, or else by its samples.

    The declaration is read after the first forward pass, which shows whether the model computes the loss or the
    ``criterion`` does. ``share`` is called with what this process found, and returns that of all that share the data.

    Attributes:
        targets: those that count; None: samples do.
        fields: the fields of a batch with the labels; empty: :func:`target_of` finds them.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Callable[[], Any] = lambda: None,
        share: Callable[[Any], list[Any]] = lambda found: [found],
        label_names: Sequence[str] | None = None,
        loss_ignores: LossIgnores = "declared",
    ) -> None:
        self._model, self._criterion, self._share = model, criterion, share
        self._label_names, self._loss_ignores = label_names, loss_ignores
        self.fields: Sequence[str] = ()
        self.targets: Targets | None = None
        self.is_decided = False

    def decide(self, outputs: Any, batch: Any) -> None:
        """Read the declaration. ``outputs`` are those of the model for a batch; None: unknown."""
        self.is_decided = True
        if simulation() is not None:  # labels have no values: an estimate weights by samples
            return
        is_of_model = outputs is not None and losses_of(outputs) is not None
        criterion = None if is_of_model else self._criterion()
        is_named = self._label_names is not None or criterion is None  # a criterion reads no parameters of forward
        self.fields = label_fields(self._model, batch, self._label_names) if is_named else ()
        targets = declared_targets(self._model, criterion, self._loss_ignores)
        has_classes = targets is not None and targets.count_in(batch, self.fields) is not None
        self.targets = targets if any(self._share(has_classes)) else None

    def forget(self) -> None:
        """Read the declaration again: the loss has changed."""
        self.is_decided, self.targets = False, None

    def count(self, batch: Any, samples: int) -> int | float | Tensor:
        """The weight of a batch; ``samples``: its number of samples, 0 for a padding batch."""
        if not samples or self.targets is None:
            return samples
        number = self.targets.count_in(batch, self.fields)
        return samples if number is None else number
