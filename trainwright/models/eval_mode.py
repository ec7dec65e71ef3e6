"""Evaluation mode that restores the mode of each submodule, and training mode that respects frozen ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """``model.eval()`` without gradients; afterwards, also after an exception, each submodule has its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        # Not inference_mode: a tensor that a model creates here and keeps, such as a table of positions, could then
        # never be used in training.
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def set_training_mode(model: nn.Module) -> None:
    """``model.train()``; a frozen part of a model in training mode that is in evaluation mode stays so.

    ``backbone.requires_grad_(False).eval()`` is on purpose: its running statistics and its dropout stay off. In a model
    that is in evaluation mode itself, as pretrained ones are, the mode of a part means nothing.
    """
    modes = [(module, module.training) for module in kept_in_evaluation(model)]
    model.train()
    for module, training in modes:
        module.training = training


def kept_in_evaluation(model: nn.Module) -> list[nn.Module]:
    """The modules that :func:`set_training_mode` leaves in their modes."""
    parts = _frozen_in_evaluation(model) if model.training else ()
    return [module for part in parts for module in part.modules()]


def _frozen_in_evaluation(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost parts in evaluation mode, if they have parameters and all of these are frozen."""
    for child in module.children():
        if child.training:
            yield from _frozen_in_evaluation(child)
        elif (trainable := [parameter.requires_grad for parameter in child.parameters()]) and not any(trainable):
            yield child
