"""What a run trains outside its model: parameters that only the optimizer or the loss holds, and further optimizers.

The further optimizers and schedules are attributes of the user's own trainer class, such as the second one of a GAN.
"""

import logging
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright._torch_compat.norm_layers import BATCH_NORMS
from trainwright.base.dist import gather_over_pipeline
from trainwright.base.errors import ConfigError
from trainwright.config.spec import RunSpec
from trainwright.engine.gradient_sync import average_gradients
from trainwright.models.eval_mode import kept_in_evaluation
from trainwright.optim.named import each_optimizer, load_state, parameters_of
from trainwright.parallel.mesh import current_mesh
from trainwright.parallel.parallelize import share_tensors
from trainwright.parallel.simulated import simulation
from trainwright.parallel.wrappers import plain_name, unwrap

logger = logging.getLogger("trainwright.engine")

_MANY_ITEMS = 1000  # looked at, of a list that a module has
_CONSTANTS_OF = "torch.nn.modules.loss"  # buffers of torch's losses are settings, such as class weights


def outside_parameters(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Parameters of the optimizer that the model does not hold, by group and index: ``"0.3"``."""
    if optimizer is None:
        return {}
    own = {id(parameter) for parameter in model.parameters()}
    return {
        f"{number}.{place}": parameter
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if id(parameter) not in own
    }


def check_replaced(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
    """Raise if an optimizer was built before the model was spread over processes: its parameters are not used."""
    for name, optimizer in optimizers.items() if current_mesh() is not None else ():
        outside = outside_parameters(model, optimizer)
        if outside and len(outside) == sum(len(group["params"]) for group in optimizer.param_groups):
            raise ConfigError(
                f"{name}: it holds no parameter of the model, whose parameters were replaced when it was spread over"
                " the processes. Build the optimizer after the trainer, or pass it to the Trainer."
            )


def outside_state(model: nn.Module, optimizer: Optimizer | None, loss: Any = None) -> dict[str, dict[str, Tensor]]:
    """Their state in a checkpoint: ``parameters`` of the optimizer, and other tensors of a user's loss."""
    parameters = outside_parameters(model, optimizer)
    known = {id(tensor) for tensor in (*model.state_dict(keep_vars=True).values(), *parameters.values())}
    state = {"parameters": parameters, "loss": {n: t for n, t in _state_of(loss).items() if id(t) not in known}}
    return {name: {key: tensor.detach() for key, tensor in part.items()} for name, part in state.items()}


def load_outside_state(state: Mapping[str, Mapping[str, Tensor]], model: nn.Module, optimizer: Any, loss: Any) -> None:
    """Copy saved values into the user's tensors."""
    here = outside_state(model, optimizer, loss)
    whats = {"parameters": "parameters of the optimizer that the model does not hold", "loss": "tensors of the loss"}
    for name, what in whats.items():
        there = {key: list(tensor.shape) for key, tensor in state.get(name, {}).items()}
        ours = {key: list(tensor.shape) for key, tensor in here[name].items()}
        if there != ours:
            raise ConfigError(
                f"The checkpoint holds {_shown(there)} as {what}; this run has {_shown(ours)}. Use the same ones in"
                " the same order to resume, or start a new run with the model's weights only."
            )
    with torch.no_grad():
        for name in whats:
            for key, tensor in here[name].items():
                tensor.copy_(state[name][key])


def open_gradients(model: nn.Module, optimizer: Optimizer | None, loss: Any = None) -> dict[str, Tensor]:
    """The gradients that are there between two updates, because a step of the user's own leaves them to a later one."""
    found = _trainable_parameters(model, optimizer, loss).items()
    return {name: parameter.grad for name, parameter in found if parameter.grad is not None}


def load_gradients(state: Mapping[str, Tensor], model: nn.Module, optimizer: Any, loss: Any) -> None:
    """Give parameters the gradients that were saved."""
    for name, parameter in _trainable_parameters(model, optimizer, loss).items():
        if name in state:
            parameter.grad = state[name].to(parameter.device)


def _trainable_parameters(model: nn.Module, optimizer: Optimizer | None, loss: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {f"model.{plain_name(n)}": p for n, p in unwrap(model).named_parameters()}
    found |= {f"optimizer.{name}": parameter for name, parameter in outside_parameters(model, optimizer).items()}
    found |= {f"loss.{n}": p for n, p in loss.named_parameters()} if isinstance(loss, nn.Module) else {}
    return {name: parameter for name, parameter in found.items() if parameter.requires_grad}


def synchronized(model: nn.Module, optimizer: Optimizer, finish: Callable[[], None]) -> Callable[[], None]:
    """``finish`` for wrapped models' gradients, followed by averaging the gradients of outside parameters.

    Outside parameters start with the values of rank 0.
    """
    parameters = list(outside_parameters(model, optimizer).values())
    share_tensors(parameters)

    def finish_all() -> None:
        finish()
        average_gradients(parameters)

    return finish_all if parameters else finish


def warn_of_untrained(
    model: nn.Module, optimizer: Optimizer | None, others: Mapping[str, Any], loss: Any = None
) -> list[nn.Parameter]:
    """Warn of the trainable parameters of model and loss that are in no group of an optimizer; returns the model's.

    ``others``: those of :func:`extra_optimizers`.

    Raises:
        ConfigError: the optimizer holds none of the model's.
    """
    if optimizer is None:
        return []
    trained = {id(parameter) for parameter in parameters_of(optimizer)}
    further = [part for part in others.values() if isinstance(part, Optimizer)]
    known = trained.union(id(parameter) for part in further for parameter in parameters_of(part))
    untrained = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in known}
    own = {id(parameter) for parameter in model.parameters()}
    holds_any = not own.isdisjoint(trained)
    if simulation() is None:  # else there are no other pipeline stages to ask
        holds_any = any(gather_over_pipeline(holds_any))
    if untrained and not holds_any:
        raise ConfigError(
            f"The optimizer {type(optimizer).__name__} holds none of the model's parameters, so no step would change"
            " them. Build it with model.parameters() of this model, after the model is complete."
        )
    of_loss = _trainable_of(loss)
    _warn_of_unregistered(model, known | own)
    if untrained:
        _warn_of_left_out([*untrained], holds_others=not trained <= own.union(map(id, of_loss)))
    if of_loss_only := [p for p in of_loss if id(p) not in known and id(p) not in own]:
        logger.warning(
            "The loss %s has %d trainable parameters that the optimizer does not hold: they are not trained. Pass an"
            " optimizer of the parameters of both, or set requires_grad=False on these.",
            type(loss).__name__, len(of_loss_only),
        )  # fmt: skip
    return [*untrained.values()]


def _warn_of_left_out(names: list[str], *, holds_others: bool) -> None:
    """Warn of the model's parameters that the optimizer does not hold; it may hold others instead."""
    logger.warning(
        "The optimizer holds no %s of the model: it does not train %s.%s",
        f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}",
        "it" if len(names) == 1 else f"these {len(names)} parameters",
        " It holds others: build optimizer and trainer after the model has been changed." if holds_others
        else " Their gradients are computed, and set to None after each update; requires_grad=False saves them.",
    )  # fmt: skip


def _warn_of_unregistered(model: nn.Module, known: set[int]) -> None:
    """Warn of layers and parameters in a list, tuple or dict of a module, where torch does not find them."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not isinstance(value, list | tuple | dict):
                continue
            inside = [*islice(value.values() if isinstance(value, dict) else value, _MANY_ITEMS)]
            found = [p for one in inside if isinstance(one, nn.Module) for p in one.parameters()]
            found += [one for one in inside if isinstance(one, nn.Parameter)]
            if number := len({id(p) for p in found if p.requires_grad and id(p) not in known}):
                kind, parts = (
                    ("Dict" if isinstance(value, dict) else "List"),
                    any(isinstance(i, nn.Module) for i in inside),
                )
                logger.warning(
                    "%s is a %s, in which torch finds no %s: its %d parameters are not trained, saved or moved to the"
                    " device. Use an nn.%s%s; requires_grad=False on them says that it is meant.",
                    f"{name}.{attribute}" if name else f"{type(module).__name__}.{attribute}", type(value).__name__,
                    "layers" if parts else "parameters", number, "Module" if parts else "Parameter", kind,
                )  # fmt: skip


def _trainable_of(loss: Any) -> list[Tensor]:
    return [p for p in loss.parameters() if p.requires_grad] if isinstance(loss, nn.Module) else []


_SETS_MODES = {"Python": "set_train_mode", "config file": "the method train of the model"}


def log_modes(model: nn.Module, spec: RunSpec) -> None:
    """Log layers of a model in training mode that are in evaluation mode: the training sets all to training mode."""
    kept = {*kept_in_evaluation(model)}
    leaves = [(n, m) for n, m in model.named_modules() if not next(m.children(), None)]
    layers = [(n, m) for n, m in leaves if not m.training and m not in kept]
    layers = [(n, m) for n, m in layers if not (spec.freeze_bn and isinstance(m, BATCH_NORMS))]
    if model.training and layers:
        logger.warning(
            "%s (%s) is in evaluation mode, and is trained in training mode, as all layers are. %s=True keeps"
            " the statistics of batch normalization; for another layer override %s.",
            layers[0][0], type(layers[0][1]).__name__, spec.name_of("freeze_bn"), _SETS_MODES[spec.api],
        )  # fmt: skip


def _state_of(loss: Any) -> dict[str, Tensor]:
    is_own = isinstance(loss, nn.Module) and type(loss).__module__ != _CONSTANTS_OF
    return {n: t for n, t in loss.state_dict(keep_vars=True).items() if isinstance(t, Tensor)} if is_own else {}


def _shown(shapes: Mapping[str, list[int]]) -> str:
    return ", ".join(f"{key} {tuple(shape)}" for key, shape in shapes.items()) or "none"


def extra_optimizers(trainer: Any) -> dict[str, Any]:
    """By the name of the attribute; those of the inner trainer of a ``DefaultTrainer``, too."""
    known = {id(trainer.optimizer), id(getattr(trainer, "lr_scheduler", None))}
    known |= {id(part) for part in each_optimizer(trainer.optimizer)}
    known |= {id(part) for part in getattr(trainer, "lr_schedulers", {}).values()}
    attributes = {**vars(getattr(trainer, "_trainer", trainer)), **vars(trainer)}
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, (Optimizer, LRScheduler)) and id(value) not in known
    }


def extra_state(optimizers: Mapping[str, Any], model: nn.Module) -> dict[str, dict[str, Any]]:
    """What a checkpoint holds of them, by the name of the attribute."""
    return {
        name: {
            "state": part.state_dict(),
            "outside": outside_state(model, part if isinstance(part, Optimizer) else None),
        }
        for name, part in optimizers.items()
    }


def load_extra_state(
    saved: Mapping[str, Mapping[str, Any]], here: Mapping[str, Any], model: nn.Module, owner: str
) -> None:
    """Load what a checkpoint holds; one warning lists what is only there or only here. ``owner``: for messages."""
    for name, part in here.items():
        if name not in saved:
            continue
        try:
            state = saved[name]["state"]
            load_state(part, state) if isinstance(part, Optimizer) else part.load_state_dict(state)
            load_outside_state(saved[name]["outside"], model, part if isinstance(part, Optimizer) else None, None)
        except Exception as error:
            error.add_note(f"While loading the state of {owner}.{name}.")
            raise
    unused, fresh = saved.keys() - here.keys(), here.keys() - saved.keys()
    if unused or fresh:
        logger.warning(
            "Resumed with other optimizers or schedules in %s than the checkpoint's. Saved state that is not used: %s."
            " Without saved state: %s.",
            owner, ", ".join(sorted(unused)) or "none", ", ".join(sorted(fresh)) or "none",
        )  # fmt: skip
