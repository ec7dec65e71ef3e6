"""Muon for the matrices of hidden layers, and AdamW for everything else, as one optimizer."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.base.dist import gather_over_pipeline
from trainwright.base.errors import ConfigError
from trainwright.optim.layer_depth import head_names

logger = logging.getLogger("trainwright.optim")

IS_HIDDEN = "is_hidden"  # of a group: its parameters are matrices of hidden layers
_NEVER_HIDDEN = "embed"  # in the name of a parameter


def matrices_of_hidden_layers(model: nn.Module) -> set[nn.Parameter]:
    """The weights with two dimensions (and more than one row and column) of the hidden layers of a model.

    Not those of embeddings, by their class or a name with "embed", and not those of the head, as
    :func:`~trainwright.optim.layer_depth.head_names` knows it; a weight that is tied to one of these is none, either.
    """
    named = [*model.named_parameters(remove_duplicate=False)]
    others = head_names(model, [name for name, _ in named]) | {name for name, _ in named if _NEVER_HIDDEN in name}
    excluded = {parameter for name, parameter in named if name in others}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            excluded.update(module.parameters(recurse=False))
    return {one for _, one in named if one.dim() == 2 and min(one.shape) > 1} - excluded


def _checked_groups(params: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the groups, which name the matrices of hidden layers; at least one process has such a matrix."""
    groups = [dict(group) if isinstance(group, Mapping) else {} for group in params]
    if not groups or any(IS_HIDDEN not in group for group in groups):
        raise ConfigError(
            "Muon.params: the groups do not say which parameters are matrices of hidden layers. Pass"
            " get_default_optimizer_params(model, hidden_matrices=True); the Trainer does it itself"
            " (optimizer='Muon')."
        )
    if not any(gather_over_pipeline(any(group[IS_HIDDEN] and group["params"] for group in groups))):
        raise ConfigError(
            "Muon: the model has no matrix of a hidden layer, and the AdamW for everything else would train all of"
            " it. Use AdamW. (Embeddings, the last layer, and tensors of one or of more than two dimensions are"
            " none.)"
        )
    return groups


class Muon(Optimizer):
    """torch's Muon for matrices of hidden layers, and torch's AdamW for embeddings, heads, norms and biases.

    Muon makes each update of a matrix (nearly) orthogonal (Jordan et al. 2024, "Muon: An optimizer for hidden layers").
    With the default ``adjust_lr_fn`` its updates are as large as those of AdamW, so that both have the same rate and
    weight decay, and rates found for AdamW may be kept (Liu et al. 2025, "Muon is scalable for LLM training").

    Args:
        params: groups of :func:`~trainwright.optim.get_default_optimizer_params` with ``hidden_matrices=True``.
        lr, weight_decay: of all groups that do not set theirs.
        adjust_lr_fn: "match_rms_adamw", or "original": the larger updates of the first paper, with a rate such as 0.02
            and ``adamw={"lr": 3e-4}``.
        momentum, nesterov, ns_steps, ...: the other arguments of ``torch.optim.Muon``.
        adamw: arguments of ``torch.optim.AdamW``, with a rate and weight decay of its own, for example.

    Raises:
        ConfigError: the groups do not say which are matrices of hidden layers, or there is none on any process.
    """

    def __init__(
        self,
        params: Iterable[Mapping[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        adjust_lr_fn: str | None = "match_rms_adamw",
        adamw: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        if adamw is not None and not isinstance(adamw, Mapping):
            raise ConfigError(f"Muon.adamw: got {adamw!r}; it must be a dict of arguments, such as {{'lr': 3e-4}}.")
        if not 0 < arguments.get("ns_steps", 5) < 100:  # torch refuses others at the first step
            raise ConfigError(f"Muon.ns_steps: got {arguments['ns_steps']}; it must be 1 to 99 (5 is usual).")
        groups = _checked_groups(params)
        empty: dict[str, Any] = {"params": []}  # of a pipeline stage without such parameters
        hidden = [group for group in groups if group[IS_HIDDEN]] or [{**empty, IS_HIDDEN: True}]
        others = [group for group in groups if not group[IS_HIDDEN]] or [{**empty, IS_HIDDEN: False}]
        given = {"lr": lr, "weight_decay": weight_decay, **(adamw or {})}
        for group in others:
            if "lr" in group:  # a rate of its layer, for example, which is a fraction of the optimizer's
                group["lr"] *= given["lr"] / lr
        self._parts: tuple[Optimizer, Optimizer] = (
            torch.optim.Muon(hidden, lr=lr, weight_decay=weight_decay, adjust_lr_fn=adjust_lr_fn, **arguments),
            torch.optim.AdamW(others, **given),
        )
        super().__init__([*self._parts[0].param_groups, *self._parts[1].param_groups], {})
        self._share()
        _log_sizes(hidden, others)

    def _share(self) -> None:
        """Let both parts have the groups and the state of this optimizer, which a load replaces."""
        for part, is_hidden in zip(self._parts, (True, False), strict=True):
            part.param_groups = [group for group in self.param_groups if group[IS_HIDDEN] is is_hidden]
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if any(param_group is group for part in self._parts for group in part.param_groups):
            return  # in the constructor
        part = self._parts[not param_group.setdefault(IS_HIDDEN, False)]
        for name, value in part.defaults.items():
            param_group.setdefault(name, value)
        self._share()

    def step(self) -> None:  # type: ignore[override]  # no closure: it needs no second pass
        """Update all parameters that have a gradient."""
        for part in self._parts:
            part.step()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}


def _log_sizes(hidden: Iterable[Mapping[str, Any]], others: Iterable[Mapping[str, Any]]) -> None:
    counts = []
    for groups in (hidden, others):
        parameters = [parameter for group in groups for parameter in group["params"]]
        counts.append((len(parameters), sum(parameter.numel() for parameter in parameters)))
    (matrices, numbers), (tensors, rest) = counts
    share = numbers / max(1, numbers + rest)
    logger.info(
        "Muon: %d matrices of hidden layers, %.1f %% of the parameters; AdamW: the other %d tensors.",
        matrices, 100 * share, tensors,
    )  # fmt: skip
