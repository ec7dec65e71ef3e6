"""Whether parameters have the random values of their initialization."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.data.seeding import seed_everything
from trainwright.engine.check.observed import SetUp

_FEWEST = 256  # values of a parameter that can be judged by their distribution
_LEVEL = 0.01  # a distribution less likely than this is another one


def at_initial_values(setup: SetUp, names: Sequence[str]) -> list[str]:
    """Those of the parameters whose values are random: no weights were loaded, and nothing has trained them.

    Config files: a model that is built with another seed has other values there. Objects: the distribution of the
    values is the one that ``reset_parameters`` of the module gives; parameters with few values are not judged.
    """
    if setup.is_config_file:
        return _differ_by_seed(setup, names)
    judged = {name: _has_initial_distribution(setup.trainer.model, name) for name in names}
    loaded = {name.rpartition(".")[0] for name, is_random in judged.items() if is_random is False}
    return [name for name, is_random in judged.items() if is_random and name.rpartition(".")[0] not in loaded]


def _differ_by_seed(setup: SetUp, names: Sequence[str]) -> list[str]:
    models = []
    for seed in (1, 2):
        seed_everything(seed)
        models.append(dict(setup.trainer.build_model(setup.trainer.cfg).named_parameters()))
    first, second = models
    return [name for name in names if name in first and not torch.equal(first[name], second[name])]


def _has_initial_distribution(model: nn.Module, name: str) -> bool | None:
    """None: it cannot be judged."""
    path, _, last = name.rpartition(".")
    module: Any = model.get_submodule(path)
    value = getattr(module, last)
    if value.numel() < _FEWEST or not callable(getattr(module, "reset_parameters", None)):
        return None
    fresh = copy.deepcopy(module)
    fresh.reset_parameters()
    other = getattr(fresh, last).detach()
    if not float(other.float().std()) or torch.equal(other, value):  # all values are one constant
        return None
    return same_distribution(value.detach(), other)


def same_distribution(first: Tensor, second: Tensor) -> bool:
    """Whether two samples may be of one distribution: the test of Kolmogorov and Smirnov.

    >>> torch.manual_seed(0) and same_distribution(torch.randn(500), torch.randn(500))
    True
    >>> same_distribution(torch.randn(500), 2 * torch.randn(500))
    False
    """
    first, second = (one.flatten().double().cpu()[:100_000].sort().values for one in (first, second))
    values = torch.cat([first, second])
    shares = [torch.searchsorted(one, values, right=True) / len(one) for one in (first, second)]
    distance = float((shares[0] - shares[1]).abs().max())
    number = len(first) * len(second) / (len(first) + len(second))
    level = 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * number * distance**2) for k in range(1, 50))
    return level > _LEVEL or distance == 0
