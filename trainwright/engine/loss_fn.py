"""How a batch becomes a loss in the Python API: by one of three contracts, which the first batch chooses.

* The model returns its losses: a dict, a dataclass or a named tuple, whose entry ``loss`` is the total (without it, the
  entries with "loss" in their names are summed); a 0-dim tensor, or a tuple that starts with one.
* The model has ``compute_loss``: called with the model's outputs and fields of the batch, by parameter name.
* A criterion of the model's output and the target: the second item of a pair, or the labels of a mapping, by
  ``label_names`` or a usual name.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.base.batch import LABEL_NAMES, arguments, parameter_names, write_forward_help, write_pair_help
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.base.signatures import read_signature
from trainwright.data.errors import GRADIENTS_OFF, add_batch_note
from trainwright.models.outputs import TOKENS, losses_of, named_outputs, predictions_of, total_loss
from trainwright.models.targets import loss_inside, target_of
from trainwright.parallel.simulated import simulation

logger = logging.getLogger("trainwright.engine")


def sum_losses(outputs: Any, batch: Any = None) -> Tensor:
    """The :func:`total_loss` of outputs that a model returns in training, a 0-dim tensor.

    With ``num_tokens`` of 0 it is 0, without gradient. ``batch`` is ignored: only the weighting of micro-batches
    depends on it.
    """
    if type(outputs) is not dict and not isinstance(outputs, Mapping):
        raise ConfigTypeError(
            f"The model's forward returned {type(outputs).__name__}; in training it must return a dict, a dataclass or"
            ' a named tuple with its losses, for example {"loss": loss}, or a tuple that starts with the loss.'
        )
    total = total_loss(outputs)
    is_cut_off = torch.is_grad_enabled() and not getattr(total, "requires_grad", False)
    if not isinstance(total, Tensor) or total.numel() != 1 or is_cut_off:
        raise _refusal(outputs)
    if TOKENS in outputs:
        return without_empty_mean(total, outputs[TOKENS])
    return total


def warn_of_parts(outputs: Mapping[str, Any]) -> None:
    """Warn of losses that a model returned but does not train, or that its total contains twice."""
    losses = {name: value for name, value in outputs.items() if "loss" in name and isinstance(value, Tensor)}
    total = losses.pop("loss", None)
    if total is not None:
        left_out = [name for name, part in losses.items() if part.grad_fn is not None and not _is_part(part, total)]
        if left_out:
            logger.warning(
                "The model's %s is logged, not trained: add it to `loss`, which is the total and is not computed from"
                " it. If it is for the logs alone, return it detached.",
                _names(left_out),
            )
        return
    for name, total in losses.items():
        if parts := [other for other, part in losses.items() if other != name and _is_part(part, total)]:
            logger.warning(
                "The model returns %r beside %s, which it is computed from or equal to. Without an entry `loss`, all"
                " entries with 'loss' in their name are added up, so the latter count twice: return the total as"
                " `loss`.",
                name,
                _names(parts),
            )
            return
    detached = [name for name, part in losses.items() if part.grad_fn is None and simulation() is None and part.any()]
    if detached:
        logger.warning(
            "The model's %s has no gradient, and is added to the loss that is logged and evaluated. Without an entry"
            " `loss`, all entries with 'loss' in their name are added up: return the total as `loss`.",
            _names(detached),
        )


def _is_part(part: Tensor, total: Tensor) -> bool:
    if part.grad_fn is None:  # detached
        may_equal = total.grad_fn is not None and part.shape == total.shape and simulation() is None
        return may_equal and bool((part == total).all() and part.any())
    goal: Any = (part.grad_fn, part.output_nr)
    while goal[0].name() == "ToCopyBackward0":  # a wrapper of the model casts its outputs
        goal = goal[0].next_functions[0]
    if goal[0] is total.grad_fn:  # of a compiled model, which does not show how its outputs depend on each other
        return True
    seen: set[Any] = set()
    found: list[Any] = [(total.grad_fn, total.output_nr)]
    while found:
        node = found.pop()
        if node == goal:
            return True
        if node[0] is not None and node not in seen:
            seen.add(node)
            found.extend(node[0].next_functions)
    return False


def without_empty_mean(loss: Tensor, num_tokens: Any) -> Tensor:
    """The loss; 0 without gradient if it is the mean over no tokens, which is NaN."""
    if isinstance(num_tokens, Tensor):
        if num_tokens.numel() != 1:  # explained where gradients are weighted
            return loss
        return torch.where(num_tokens.to(loss.device).reshape(loss.shape) > 0, loss, torch.zeros_like(loss))
    return loss if num_tokens != 0 else torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)


def explain_forward(error: Exception, model: nn.Module, batch: Any) -> None:
    """Add the batch to an error of a step; raise a clear error if the batch does not fit the model."""
    if isinstance(error, TypeError):
        write_forward_help(error, model, batch)
    add_notes(error, batch, model)


def add_notes(error: BaseException, batch: Any, model: nn.Module) -> None:
    """Add the batch to an error of a step, and the labels that the model takes and the batch does not have."""
    if isinstance(error, ConfigError) and isinstance(batch, Mapping):
        taken = parameter_names(model.forward) or read_signature(model.forward).parameters  # beside **others
        for name in set(LABEL_NAMES).intersection(taken).difference(batch):
            error.add_note(f"The batch has no field {name!r}, which {type(model).__name__}.forward takes.")
    add_batch_note(error, batch)


def _refusal(outputs: Mapping[str, Any]) -> ConfigError | ConfigTypeError:
    losses = {name: value for name, value in outputs.items() if "loss" in name and value is not None}
    if not losses:
        return ConfigError(
            f"The model's forward returned {_names(outputs)}; in training at least one name must contain 'loss', such"
            ' as {"loss": torch.nn.functional.cross_entropy(scores, labels)}.'
            f" (self.training is True in training and False in evaluation.){_causal_fix(outputs)}"
        )
    total = {"loss": losses["loss"]} if "loss" in losses else losses
    for name, value in total.items():
        if not isinstance(value, Tensor):
            hint = " Return it as computed, without .item() or float()." if isinstance(value, int | float) else ""
            return ConfigTypeError(f"The model's {name!r} is {type(value).__name__}; a loss must be a tensor.{hint}")
        if value.numel() != 1:
            shape = tuple(value.shape)
            return ConfigError(f"The model's {name!r} has shape {shape}; a loss must be one number, e.g. its .mean().")
    if not torch.is_grad_enabled():
        return ConfigError(f"The model's {_names(total)} cannot be differentiated. {GRADIENTS_OFF}")
    others = [name for name in losses if name not in total]
    return ConfigError(
        f"The model's {_names(total)} cannot be differentiated: it depends on no trainable parameter"
        " (detached, computed without gradients, or everything is frozen)."
        + (f" It is the total; {_names(others)} beside it is for the logs only." if others else "")
    )


def _causal_fix(outputs: Any) -> str:
    """What to do if these outputs have no loss because a language model of transformers got no labels, or ""."""
    if "CausalLM" not in type(outputs).__name__:
        return ""
    return " The labels of a causal language model are its tokens: add labels=input_ids to each sample."


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "an empty dict"


_OVERRIDE_HELP = "For anything else override compute_loss(model, inputs)."

Loss = Callable[[Any, Any], Any]  # called with the model, or its outputs, and the batch


def contract_for(
    model: nn.Module,
    inputs: Any,
    criterion: Callable[..., Tensor] | None,
    own_loss: Callable[..., Tensor] | None,
    record_outputs: Callable[[Any], None] | None = None,
    record_scalars: Callable[[Mapping[str, Any]], None] | None = None,
    label_names: Sequence[str] | None = None,
    source: "LossSource | None" = None,
) -> tuple[Loss, tuple[str, ...] | None]:
    """``compute_loss(model, inputs)`` for batches like ``inputs``, and the fields that it reads; None: all of them.

    It returns None in evaluation if the model then returns no loss. ``own_loss`` is the model's ``compute_loss``, if
    any. ``record_outputs`` receives the model's outputs before the loss is computed, ``record_scalars`` in training
    those that have names and more than one entry. ``label_names``: the fields that the criterion compares with.
    ``source``: what the first training output has decided, also before a resume.
    """
    is_pair = isinstance(inputs, tuple | list) and len(inputs) == 2
    if not is_pair and not isinstance(inputs, Mapping):
        raise refused_batch(inputs)
    own_loss = used_loss(own_loss, inputs)
    criterion = _no_criterion if criterion is None else criterion  # one in the wrapper of torch.compile has no truth
    source = source or LossSource()
    undecided = _Undecided(criterion, record_scalars, label_names or (), source)
    loss: Loss = undecided if own_loss is None else _own(own_loss, record_scalars, of_pair=is_pair)
    takes_dicts = is_pair and own_loss is None and _is_list_of_dicts(inputs[1]) and _takes_two(model.forward)
    if is_pair and not takes_dicts:
        unused = _unused_loss(model, criterion, source) if own_loss is None else None
        return _of_pair(criterion if own_loss is None else own_loss, loss, record_outputs, unused, source), None
    loss = undecided.loss_of_detection if takes_dicts else loss
    if record_outputs is not None:
        loss = _with_recording(record_outputs, loss)
    if takes_dicts:  # as detection models expect; in evaluation they return predictions and no loss
        return lambda model, inputs: loss(model(*inputs), inputs), None
    names = tuple(arguments(inputs, parameter_names(model.forward))[1])
    if len(names) == len(inputs):
        return _of_names(None, loss), None
    of_loss = (*LABEL_NAMES, *(label_names or ())) if own_loss is None else parameter_names(own_loss)
    return _of_names(names, loss), None if of_loss is None else (*names, *of_loss)


def used_loss(own_loss: Callable[..., Tensor] | None, inputs: Any) -> Callable[..., Tensor] | None:
    """The model's ``compute_loss``; None if it has another use for batches like ``inputs``, as of detection models."""
    is_pair = isinstance(inputs, tuple | list) and len(inputs) == 2
    return None if own_loss is None or (is_pair and not _takes_two(own_loss)) else own_loss


def refused_batch(inputs: Any) -> ConfigTypeError:
    parts = f" of {len(inputs)} parts" if isinstance(inputs, tuple | list) else ""
    return ConfigTypeError(
        f"The loader yields {type(inputs).__name__}{parts}; the Trainer takes pairs (inputs, target), or batches"
        f" with names, a dict or an Instance. {_OVERRIDE_HELP}"
    )


def _is_list_of_dicts(target: Any) -> bool:
    return isinstance(target, tuple | list) and bool(target) and isinstance(target[0], Mapping)


def forward(model: Any, batch: Any, *, takes_all: bool = False) -> Any:
    """The model's outputs for the fields of a batch that its forward takes, or for the first item of a pair."""
    positional, taken = arguments(batch, None if takes_all else parameter_names(model.forward))
    try:
        return model(*positional, **taken)
    except TypeError as error:
        if positional:
            write_pair_help(error, model)
        else:
            write_forward_help(error, model, taken, list(batch))
        raise


def _unused_loss(model: nn.Module, criterion: Any, source: "LossSource") -> tuple[int, str] | None:
    """What to log of a loss of the model that a pair leaves out, with its level; None without one."""
    name, used = type(model).__name__, type(loss_inside(criterion)).__name__
    if (method := getattr(model, "compute_loss", None)) is not None:
        return logging.WARNING, (
            f"{name}.compute_loss{read_signature(method)} is not called: of a pair it would get two arguments, the"
            f" output and the target. The loss is {used}."
        )
    first, *others = [*(parameter_names(model.forward) or ()), ""]
    label = next((one for one in others if one in LABEL_NAMES), None)
    if label is None or not source.is_default:
        return None
    return logging.INFO, (  # it may return the same scores with labels
        f"{name}.forward gets the first item of a pair, without {label!r}, and the loss is {used} of what it returns."
        f" If the model computes its loss, give fields with names, such as ColumnDataset({first}=..., {label}=...); if"
        f" not, set loss={used!r}."
    )


def _of_pair(
    criterion: Callable[..., Tensor],
    loss: Loss,
    record_outputs: Callable[[Any], None] | None,
    unused: tuple[int, str] | None,
    source: "LossSource",
) -> Loss:
    """Calls the model with the first item of a pair. Scores that it returns go to the criterion.

    ``loss`` handles any other output: the model's own loss, or a dict with scores. ``unused``: what to
    log of another loss of the model.
    """
    is_checked = is_of_training = False

    def compute_loss(model: Any, inputs: Any) -> Any:
        nonlocal is_checked, is_of_training, unused
        try:
            outputs = model(inputs[0])
        except TypeError as error:
            write_pair_help(error, model)
            raise
        if record_outputs is not None:
            record_outputs(outputs)
        if unused is not None and not torch.compiler.is_compiling():
            if losses_of(outputs) is None:
                logger.log(*unused)
            unused = None
        if outputs.__class__ is Tensor and outputs.dim():
            # An evaluation before the training has no gradients, by which some checks tell outputs from targets.
            is_due = not is_checked or (torch.is_grad_enabled() and not is_of_training)
            if is_due and not torch.compiler.is_compiling():
                is_checked, is_of_training = True, torch.is_grad_enabled()
                with _checked(criterion, outputs, inputs[1] if len(inputs) == 2 else None, source):
                    return criterion(outputs, inputs[1])
            return criterion(outputs, inputs[1])
        # After scores, one number is no loss of the model. A model may return scores in evaluation, and its loss else.
        if is_checked and outputs.__class__ is Tensor and (is_of_training or not torch.is_grad_enabled()):
            raise ConfigError(
                f"{type(model).__name__} returned one number for a batch with inputs of shape"
                f" {_shape_of(inputs[0])}, and scores with a dimension of samples before. Does it call squeeze(), which"
                " removes that dimension from a batch of one sample? Use squeeze(-1), or set drop_last."
            )
        return loss(outputs, inputs)

    return compute_loss


def _shape_of(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        read_signature(function).bind(None, None)
    except TypeError:
        return False
    return True


def _of_names(names: tuple[str, ...] | None, loss: Loss) -> Loss:
    """Calls the model with the fields of these names, or all, and ``loss`` with the outputs."""

    def compute_loss(model: Any, inputs: Any) -> Any:
        taken = inputs if names is None else {name: inputs[name] for name in names if name in inputs}
        try:
            outputs = model(**taken)
        except TypeError as error:
            write_forward_help(error, model, taken, list(inputs))
            raise
        return loss(outputs, inputs)

    return compute_loss


@dataclass
class LossSource:
    """Whether the model returns its losses, as the first training output decides; None: there was none yet.

    ``is_default``: the user has not chosen the criterion.
    """

    is_model: bool | None = None
    is_default: bool = False


class _Undecided:
    """Decides with the first training output whether the model returns its losses."""

    def __init__(
        self,
        criterion: Callable[..., Tensor],
        record_scalars: Callable[[Mapping[str, Any]], None] | None,
        label_names: Sequence[str],
        source: LossSource,
    ) -> None:
        self._criterion, self._record_scalars, self._label_names = criterion, record_scalars, label_names
        self._source = source
        self._decided: Loss | None = None

    def __call__(self, outputs: Any, inputs: Any) -> Any:
        if self._decided is not None:
            return self._decided(outputs, inputs)
        is_of_model = losses_of(outputs) is not None or target_of(inputs, self._label_names) is None
        # In evaluation a model may return less, and a compiled program makes its own decision.
        if not torch.is_grad_enabled() and self._source.is_model is not None:  # an evaluation that a resume makes first
            is_of_model = self._source.is_model
        loss = self._loss_of_model if is_of_model else self._loss_of_criterion
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._decided, self._source.is_model = loss, is_of_model
            if not is_of_model:
                scores, target = logits_of(outputs), target_of(inputs, self._label_names)
                with _checked(self._criterion, scores, target, self._source):
                    return loss(outputs, inputs)
            if (losses := losses_of(outputs)) is not None:
                warn_of_parts(losses)
        return loss(outputs, inputs)

    def _loss_of_model(self, outputs: Any, inputs: Any) -> Any:
        losses = losses_of(outputs)
        if losses is not None:
            if len(losses) > 1 and self._record_scalars is not None and torch.is_grad_enabled():
                self._record_scalars(losses)
            return sum_losses(losses)
        if torch.is_grad_enabled():
            named = named_outputs(outputs)
            shown = "" if named is None else f" with {_names(named)}; a loss has the name 'loss', or 'loss' in its name"
            fix = _causal_fix(outputs) or f" Name the fields of its labels with label_names=[...]. {_OVERRIDE_HELP}"
            raise ConfigError(
                f"The model's forward returns no loss (it returned {type(outputs).__name__}{shown}), and there is no"
                f" target for TrainingConfig.loss: none of {', '.join(self._label_names or LABEL_NAMES)} is among the"
                f" batch's fields {', '.join(map(str, inputs)) if isinstance(inputs, Mapping) else ''}.{fix}"
            )
        return None

    def loss_of_detection(self, outputs: Any, inputs: Any) -> Any:
        """Of outputs that are losses without "loss" in their names, as those of some models of torchvision, too."""
        is_of_losses = type(outputs) is dict and losses_of(outputs) is None and outputs and torch.is_grad_enabled()
        if is_of_losses and all(isinstance(one, Tensor) and one.dim() == 0 for one in outputs.values()):
            outputs = {f"loss_{name}": value for name, value in outputs.items()}
        return self._loss_of_model(outputs, inputs)

    def _loss_of_criterion(self, outputs: Any, inputs: Any) -> Tensor:
        if self._record_scalars is not None and not isinstance(outputs, Tensor):
            record_named(self._record_scalars, outputs)
        return self._criterion(logits_of(outputs), target_of(inputs, self._label_names))


_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss)


def _checked(
    criterion: Callable[..., Tensor], outputs: Any, target: Any, source: LossSource
) -> AbstractContextManager[Any]:
    """Raise if torch's loss would give a number for outputs and targets that do not fit it.

    The context, in which the loss is computed, warns if another one compares each output with every target.
    """
    kind = loss_inside(criterion)
    if not (isinstance(outputs, Tensor) and isinstance(target, Tensor)):
        return nullcontext()
    if isinstance(kind, _ELEMENTWISE):
        _refuse_broadcast(type(kind).__name__, outputs, target)
    elif isinstance(kind, _OF_CLASSES):
        _refuse_scores(type(kind).__name__, outputs, target)
        if source.is_default and isinstance(kind, nn.CrossEntropyLoss):
            _refuse_several_labels(outputs, target)
    elif isinstance(kind, nn.BCEWithLogitsLoss):
        if _is_sigmoid(outputs):
            logger.warning(
                "TrainingConfig.loss: BCEWithLogitsLoss applies a sigmoid, and the model ends with one: no loss comes"
                " near to 0. Return the scores without sigmoid, or set loss='BCELoss'."
            )
    elif _column_fix(outputs, target) and len(outputs) == len(target) > 1:
        return _Broadcasts(getattr(kind, "__qualname__", type(kind).__name__), outputs, target)
    return nullcontext()


def _column_fix(outputs: Tensor, target: Tensor) -> str | None:
    """How to give both one shape, if one of them is a column and the other is flat."""
    by_dim = {outputs.dim(): outputs, target.dim(): target}
    if by_dim.keys() != {1, 2} or by_dim[2].shape[1] != 1:
        return None
    fix = "return outputs.squeeze(1) from the model" if outputs.dim() == 2 else "give targets.squeeze(1)"
    return f"Give both one shape: for example {fix}."


class _Broadcasts(TorchFunctionMode):
    """Logs, once, an operation that compares each output with every target."""

    def __init__(self, loss: str, outputs: Tensor, target: Tensor) -> None:
        super().__init__()
        self._shapes, self._size = {outputs.shape, target.shape}, len(outputs) * len(target)
        self._message: str | None = (
            f"The loss {loss} compares each output with every target: it gets outputs of the shape"
            f" {tuple(outputs.shape)} and targets of the shape {tuple(target.shape)}. {_column_fix(outputs, target)}"
        )

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():  # a loss in torch.compile, to be traced without this
            return result
        tensors = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, Tensor)]
        # Of two outputs or two targets, all pairs may be meant.
        are_both = {one.shape for one in tensors} == self._shapes and sum(one.requires_grad for one in tensors) == 1
        is_squared = isinstance(result, Tensor) and result.numel() == self._size
        is_compared = is_squared or (getattr(function, "__module__", "") == F.__name__ and "loss" in function.__name__)
        if self._message is not None and are_both and is_compared:
            logger.warning(self._message)
            self._message = None
        return result


def _refuse_broadcast(loss: str, outputs: Tensor, target: Tensor) -> None:
    """Raise if an elementwise loss would compare each output with every target."""
    if fix := _column_fix(outputs, target):
        raise ConfigError(
            f"TrainingConfig.loss: {loss} of outputs of the shape {tuple(outputs.shape)} and targets of the shape"
            f" {tuple(target.shape)} would compare {(len(outputs), len(target))}, each output with every target. {fix}"
        )
    if (outputs.dim(), target.dim()) == (2, 1):
        raise ConfigError(
            f"TrainingConfig.loss: {loss} compares each output with a target of its own, and gets outputs of the shape"
            f" {tuple(outputs.shape)} and targets of the shape {tuple(target.shape)}. For class labels set"
            " loss='CrossEntropyLoss'; for one number per sample return one output, outputs.squeeze(1)."
        )


def _refuse_scores(loss: str, outputs: Tensor, target: Tensor) -> None:
    """Raise if the outputs are no scores of classes as the loss takes them; warn of probabilities.

    A loss of classes of one score for each sample is 0, or that of one distribution over the batch.
    """
    is_flat = outputs.dim() == target.dim() == 1
    has_values = simulation() is None
    is_distribution = is_flat and target.is_floating_point() and (not has_values or abs(float(target.sum()) - 1) < 1e-3)
    if not outputs.is_floating_point():
        raise ConfigError(
            f"TrainingConfig.loss: {loss} takes scores, and the outputs are {str(outputs.dtype).removeprefix('torch.')}"
            f" of the shape {tuple(outputs.shape)}. Return the scores of all classes, without argmax or a comparison."
        )
    if (is_flat and not is_distribution) or (outputs.dim() > 1 and outputs.shape[1] == 1):
        raise ConfigError(
            f"TrainingConfig.loss: {loss} takes a score for each class, and the outputs have the shape"
            f" {tuple(outputs.shape)}, one score for each sample. For two classes return two scores, or set"
            " loss='BCEWithLogitsLoss' with labels of type float and the shape of the outputs; for numbers to predict"
            " set loss='MSELoss'."
        )
    if loss == "NLLLoss" and has_values and (largest := float(outputs.detach().max())) > 1e-3:
        raise ConfigError(
            "TrainingConfig.loss: NLLLoss takes logarithms of probabilities, which are at most 0, and the outputs go up"
            f" to {largest:.3g}. Use CrossEntropyLoss, or end the model with log_softmax(dim=1)."
        )
    if loss == "CrossEntropyLoss" and has_values and _are_probabilities(outputs):
        logger.warning(
            "TrainingConfig.loss: CrossEntropyLoss takes scores before softmax, and each row of the model's first"
            " outputs is >= 0 with the sum 1, as after softmax: gradients become small and training slow."
            " Return the scores without softmax, or set loss='NLLLoss' and end the model with log_softmax(dim=1)."
        )


def _refuse_several_labels(outputs: Tensor, target: Tensor) -> None:
    """Raise or warn if targets that the default cross-entropy takes as class probabilities do not sum to 1.

    0 is a sample that does not count.
    """
    if not target.is_floating_point() or target.shape != outputs.shape or target.dim() < 2 or simulation() is not None:
        return
    sums = target.detach().float().sum(1)
    if not bool((((sums - 1).abs() > 1e-2) & (sums != 0)).any()):
        return
    message = (
        "TrainingConfig.loss: CrossEntropyLoss takes targets of the shape of the outputs as the probabilities of"
        f" classes, which sum to 1, and those of a sample sum to {float(sums[(sums - 1).abs().argmax()]):.3g}. If a"
        " sample may have several labels, set loss='BCEWithLogitsLoss'; if this loss is meant, loss='CrossEntropyLoss'."
    )
    if bool(((target == 0) | (target == 1)).all()):
        raise ConfigError(message)
    logger.warning(message)


def _are_probabilities(outputs: Tensor) -> bool:
    """Whether the outputs of each sample are >= 0 and sum to 1, as scores before softmax do not."""
    if outputs.dim() < 2 or not outputs.numel() or not outputs.is_floating_point():
        return False
    scores = outputs.detach().float()
    return bool(((scores >= 0).all() & ((scores.sum(1) - 1).abs() < 1e-2).all()).item())


def _is_sigmoid(outputs: Tensor) -> bool:
    """Whether outputs were computed by a sigmoid, and had only their shape or type changed since."""
    node = outputs.grad_fn
    while node is not None and node.name().startswith(("Squeeze", "Unsqueeze", "View", "UnsafeView", "ToCopy")):
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith("Sigmoid")


def _no_criterion(*_: Any) -> Tensor:
    raise ConfigError(
        "TrainingConfig.loss: got None, but the model computes no loss: it returns none and has no compute_loss."
        " Set a loss of torch.nn, such as 'CrossEntropyLoss', or call trainer.set_loss(...)."
    )


def record_named(record: Callable[[Mapping[str, Any]], None], outputs: Any) -> None:
    """Call ``record`` with outputs that have names and more than one entry; not in evaluation."""
    named = named_outputs(outputs) if torch.is_grad_enabled() else None
    if named is not None and len(named) > 1:
        record(named)


def _own(
    own_loss: Callable[..., Tensor], record_scalars: Callable[[Mapping[str, Any]], None] | None, *, of_pair: bool
) -> Loss:
    """The model's ``compute_loss``: of a pair called with scores and target, else with what it takes, by name."""
    names = None if of_pair else parameter_names(own_loss)

    def loss(outputs: Any, inputs: Any) -> Tensor:
        named = named_outputs(outputs)
        if named is not None and record_scalars is not None:
            record_named(record_scalars, named)
        if of_pair:
            return own_loss(logits_of(outputs), inputs[1])
        known = {**inputs, **({"logits": outputs} if named is None else named)}
        return own_loss(**arguments(known, names)[1])

    return loss


def _with_recording(record_outputs: Callable[[Any], None], loss: Loss) -> Loss:
    def recorded_loss(outputs: Any, inputs: Any) -> Any:
        record_outputs(outputs)
        return loss(outputs, inputs)

    return recorded_loss


def logits_of(outputs: Any) -> Any:
    """The input of a criterion: the output itself, or its scores."""
    scores = outputs if isinstance(outputs, Tensor) else predictions_of(outputs)
    if scores is not None:
        return scores
    named = named_outputs(outputs)
    kind, shown = (ConfigTypeError, type(outputs).__name__) if named is None else (ConfigError, _names(named))
    hint = " Is a return missing in it?" if outputs is None else ""
    items = outputs if isinstance(outputs, tuple | list) else ()
    losses = [number for number, one in enumerate(items) if isinstance(one, Tensor) and not one.dim()]
    if losses:
        hint = f" Return a dict, {{'loss': outputs[{losses[0]}], 'logits': outputs[0]}}, or the loss first."
    elif items:
        hint = f" Return one of the {len(items)} from it, such as outputs[0], or a dict, {{'logits': outputs[0]}}."
    raise kind(
        f"The model's forward returned {shown}.{hint} The Trainer needs a tensor, a loss (a name with 'loss' in"
        f" it), or 'logits' for the criterion of TrainingConfig.loss. {_OVERRIDE_HELP}"
    )
