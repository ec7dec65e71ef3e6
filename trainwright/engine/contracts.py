"""How a batch becomes a loss in the objects door: three contracts, one of which is settled for a whole run.

* The model returns its losses: a mapping whose entries named "loss" are summed.
* The model has ``compute_loss``: it is called with those of the model's outputs and the batch that it names.
* A criterion, on the model's output and the target: the second of a pair, or the labels of a named batch.

Each is an object with ``compute_loss(model, inputs)`` that calls the model itself: no frame stands between.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.engine.objective import sum_losses, write_forward_help

TARGETS = ("labels", "label", "targets", "target")


class Contract(Protocol):
    """What a batch and its model agree on."""

    def compute_loss(self, model: Any, inputs: Any) -> Tensor: ...


def contract_for(
    model: nn.Module, inputs: Any, criterion: Callable[..., Tensor], own_loss: Callable[..., Tensor] | None,
    settle: Callable[[Contract], None],
) -> Contract:
    """The contract of ``model`` and batches like ``inputs``.

    ``own_loss`` is the model's ``compute_loss``, if it has one. For a batch with names the model's first output in
    training tells; ``settle`` is then called with what it was.

    Raises:
        ConfigTypeError: a batch of this type cannot be trained on.
    """
    if isinstance(inputs, tuple | list):
        if len(inputs) != 2:
            raise ConfigTypeError(
                f"The loader gives {type(inputs).__name__}s of {len(inputs)}; the Trainer takes pairs (inputs, target),"
                " or batches with names. For anything else override compute_loss(model, inputs)."
            )
        return PairContract(criterion if own_loss is None else own_loss)
    if not isinstance(inputs, Mapping):
        raise ConfigTypeError(
            f"The loader gives {type(inputs).__name__}; the Trainer takes pairs (inputs, target), or batches with"
            " names, a dict or an Instance. For anything else override compute_loss(model, inputs)."
        )
    names = _taken_names(model, inputs)
    if own_loss is not None:
        return OwnLoss(names, own_loss)
    return _Undecided(names, criterion, settle)


class PairContract:
    """``criterion(model(inputs), target)``, or the model's own ``compute_loss`` in its place."""

    def __init__(self, criterion: Callable[..., Tensor]) -> None:
        self._criterion = criterion

    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        return self._criterion(logits_of(model(inputs[0])), inputs[1])


class ReturnsLosses:
    """The model returns its losses by name."""

    def __init__(self, names: tuple[str, ...] | None) -> None:
        self._names = names

    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        taken = inputs if self._names is None else {name: inputs[name] for name in self._names if name in inputs}
        try:
            outputs = model(**taken)
        except TypeError as error:
            write_forward_help(error, model, inputs)
            raise
        return loss_of(outputs)


class OwnLoss:
    """``model.compute_loss`` of the outputs and the batch, each argument by its name."""

    def __init__(self, names: tuple[str, ...] | None, own_loss: Callable[..., Tensor]) -> None:
        self._names = names
        self._own_loss = own_loss
        parameters = inspect.signature(own_loss).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._wanted = None if takes_all else frozenset(parameters)

    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        taken = inputs if self._names is None else {name: inputs[name] for name in self._names if name in inputs}
        try:
            outputs = model(**taken)
        except TypeError as error:
            write_forward_help(error, model, inputs)
            raise
        known = {**inputs, **(outputs if isinstance(outputs, Mapping) else {"logits": outputs})}
        if self._wanted is not None:
            known = {name: value for name, value in known.items() if name in self._wanted}
        return self._own_loss(**known)


class NamedCriterion:
    """A criterion of the model's logits and the labels of a batch with names."""

    def __init__(self, names: tuple[str, ...] | None, criterion: Callable[..., Tensor], target: str) -> None:
        self._names = names
        self._criterion = criterion
        self._target = target

    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        taken = inputs if self._names is None else {name: inputs[name] for name in self._names if name in inputs}
        try:
            outputs = model(**taken)
        except TypeError as error:
            write_forward_help(error, model, inputs)
            raise
        return self._criterion(logits_of(outputs), inputs[self._target])


class _Undecided:
    """Whether the model returns losses shows in what it returns. The first batch of a training decides for all."""

    def __init__(
        self, names: tuple[str, ...] | None, criterion: Callable[..., Tensor], settle: Callable[[Contract], None]
    ) -> None:
        self._names = names
        self._criterion = criterion
        self._settle = settle

    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        taken = inputs if self._names is None else {name: inputs[name] for name in self._names if name in inputs}
        try:
            outputs = model(**taken)
        except TypeError as error:
            write_forward_help(error, model, inputs)
            raise
        target = target_name(inputs)
        if target is None or (isinstance(outputs, Mapping) and any("loss" in name for name in outputs)):
            settled: Contract = ReturnsLosses(self._names)
            loss = loss_of(outputs)
        else:
            settled = NamedCriterion(self._names, self._criterion, target)
            loss = self._criterion(logits_of(outputs), inputs[target])
        if torch.is_grad_enabled():  # what a model returns in evaluation may be less
            self._settle(settled)
        return loss


def loss_of(outputs: Any) -> Tensor:
    """The sum of the losses that a model returned."""
    return sum_losses(outputs)


def logits_of(outputs: Any) -> Any:
    """What a criterion compares: the output itself, or its entry ``logits``."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        if "logits" in outputs:
            return outputs["logits"]
        raise ConfigError(
            f"The model's forward returned {', '.join(map(repr, outputs)) or 'an empty dict'}; the Trainer needs a loss"
            " (a name that contains 'loss'), or 'logits' for the criterion of TrainingConfig.loss."
        )
    raise ConfigTypeError(
        f"The model's forward returned {type(outputs).__name__}; it must return a tensor, or a dict with its losses or"
        " 'logits'. For anything else override compute_loss(model, inputs)."
    )


def target_name(inputs: Mapping[str, Any]) -> str | None:
    """Under which name the labels of a batch are."""
    return next((name for name in TARGETS if name in inputs), None)


def _taken_names(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Those of the batch's names that the model's forward takes; None if it takes all."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    names = tuple(name for name in inputs if name in parameters)
    return None if len(names) == len(inputs) else names
