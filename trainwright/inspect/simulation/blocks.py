"""Runs of equal blocks in a model, such as the layers of a transformer, and models with fewer of them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainwright.parallel.pipeline_cut import Absent, Stage

KEPT = 4  # units of a run: two at each end, as ZeRO gathers the first and last ones at other times than the rest
WORTHWHILE = 20  # units; fewer are traced in no more time

_MAX_PERIOD = 8


@dataclass(frozen=True)
class Run:
    """Equal units of a container: each is one block, or a sequence of ``period`` blocks that is repeated."""

    first: int
    period: int
    units: int


def keep_different(stage: Stage) -> None:
    """Keep one unit of each run of a pipeline stage."""
    container: Any = stage.model.get_submodule(layers_of(stage))
    for run in runs_of(container, stage.model, 2):
        remove(container, range(run.first + run.period, run.first + run.units * run.period), stage)


def layers_of(stage: Any) -> str:
    """The name of the container of a stage's layers."""
    return str(stage._run.__self__.layers)


def remove(container: Any, positions: Sequence[int], stage: Stage | None) -> None:
    """Remove blocks of a container; those of a stage are replaced by placeholders, as names must stay."""
    modules = container._modules
    names = [*modules]
    removed = [names[i] for i in positions]
    if stage is not None:
        for name in removed:
            container[int(name)] = Absent(name, modules[name], passes_input=True)
        stage.layers = tuple(name for name in stage.layers if name not in removed)
        return
    for name in removed:
        del modules[name]
    if names == [*map(str, range(len(names)))]:
        container._modules = {str(i): module for i, module in enumerate(modules.values())}


def containers_of(module: nn.Module, model: nn.Module, name: str = "") -> Iterator[tuple[str, Any]]:
    """The outermost containers with a run, by name."""
    if isinstance(module, nn.ModuleList | nn.Sequential) and runs_of(module, model):
        yield name, module
        return
    if any(map(_are_positions, vars(module).values())):  # of blocks whose outputs are kept, such as out_indices
        return
    for key, child in module.named_children():
        yield from containers_of(child, model, f"{name}.{key}".lstrip("."))


def _are_positions(value: Any) -> bool:
    if not isinstance(value, list | tuple | set | frozenset) or not all(type(one) is int for one in value):
        return False
    return max(value, default=0) >= KEPT - 1 and [*value] == sorted(set(value))


def runs_of(container: nn.Module, model: nn.Module, at_least: int | None = None) -> list[Run]:
    """The runs of the children of a container that have parameters, of ``WORTHWHILE`` units or ``at_least`` so many."""
    at_least = at_least or WORTHWHILE
    blocks = [*container.children()]
    if len(blocks) < at_least:
        return []
    uses = _uses(model)
    facts = [_facts(block, uses) for block in blocks]
    found, first = [], 0
    while first < len(blocks):
        runs = [Run(first, period, _units(facts[first:], period)) for period in range(1, _MAX_PERIOD + 1)]
        run = max(runs, key=lambda run: (run.units * run.period, -run.period))
        unit = blocks[first : first + run.period]
        is_run = run.units >= at_least and any(next(block.parameters(), None) is not None for block in unit)
        found += [run] if is_run else []
        first += run.units * run.period if is_run else 1
    return found


def _units(facts: Sequence[Mapping[str, Any]], period: int) -> int:
    """How often the first ``period`` blocks come in sequence."""
    number = period
    while number < len(facts) and _are_alike(facts[number - period], facts[number], period):
        number += 1
    return number // period


def _are_alike(one: Mapping[str, Any], other: Mapping[str, Any], distance: int) -> bool:
    """Whether two blocks differ in nothing but their position, or in rates of which neither is zero."""
    return one.keys() == other.keys() and all(
        value == (found := other[key])
        or (type(value) is type(found) is int and found - value == distance)
        or (type(value) is type(found) is float and bool(value) == bool(found))
        for key, value in one.items()
    )


def _facts(block: nn.Module, uses: Counter[int]) -> dict[str, Any]:
    """What the cost of a block depends on."""
    facts: dict[str, Any] = {}
    if any(uses[key] != number for key, number in _uses(block).items()):
        facts["shared"] = object()  # equals no other
    for name, module in block.named_modules():
        facts[name] = type(module)
        plain = {key: value for key, value in vars(module).items() if _is_plain(value)}
        facts |= {f"{name}.{key}": value for key, value in plain.items()}
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            facts[f"{name}.{key}"] = None if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad)
    return facts


def _is_plain(value: Any) -> bool:
    return (
        value is None or isinstance(value, str | int | float) or (type(value) is tuple and all(map(_is_plain, value)))
    )


def _uses(module: nn.Module) -> Counter[int]:
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
