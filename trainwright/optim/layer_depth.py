"""The depth of each parameter of a model, in layers: for learning rates that decrease towards the input."""

import logging
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from trainwright.base.signatures import read_signature
from trainwright.parallel.adapters import without_adapters
from trainwright.parallel.pipeline import Outline, outline_of

logger = logging.getLogger("trainwright.optim")


def layer_depths(model: nn.Module, outline: Outline | None = None) -> dict[str, int]:
    """The layer of each parameter, by its name: 0 for embeddings and stem, 1 to n for n blocks, n + 1 for what follows.

    For models of timm the layers are timm's own (``group_matcher``). For others the blocks are the children of each
    ``nn.ModuleList`` and ``nn.Sequential`` that hold parameters (the outermost ones), in the order of the model;
    without such containers they are the children of the model. Of a model that is cut into pipeline stages, those of
    all stages, under each name of a tied weight. ``outline``: of the model, if it is a part of one that is cut.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> layer_depths(model)
    {'0.weight': 1, '0.bias': 1, '2.weight': 2, '2.bias': 2}
    """
    first, modules = outline or outline_of(model)
    names = list(dict.fromkeys(first.values()))
    if callable(matcher := getattr(model, "group_matcher", None)):
        from timm.models import group_parameters  # a model with this method is timm's

        named = ((name, None) for name in names)
        complete: Any = SimpleNamespace(named_parameters=lambda: named)  # all that timm reads
        found = group_parameters(complete, matcher(coarse=False), reverse=True)
        return {name: int(found[name]) for name in names}
    containers = [name for name, kind in modules.items() if issubclass(kind, nn.ModuleList | nn.Sequential)]
    block_of = {name: _block(name, containers) for name in names}
    if not any(block_of.values()):
        block_of = {name: name.partition(".")[0] if "." in name else None for name in names}
    order = list(dict.fromkeys(block for block in block_of.values() if block is not None))
    depths, num_seen = {}, 0
    for name in names:
        block = block_of[name]
        if block is not None:
            num_seen = max(num_seen, order.index(block) + 1)
        is_after = block is None and 0 < num_seen == len(order)
        depths[name] = order.index(block) + 1 if block is not None else num_seen + is_after
    return {name: depths[of] for name, of in first.items()}


def head_names(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Those of ``names`` that belong to the head of a model, which is another one for a new task.

    Of a model with ``base_model_prefix``, as in transformers, the head is what is outside of the base model, and the
    pooler of a base model that can be built without it (``add_pooling_layer``). Of other models, and models of
    transformers for a task (``...For...``) whose base is no module of its own, it is the last layer, as `layer_depths`
    counts, and the complete last child if that is an ``nn.Sequential``.

    >>> model = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)), "head": nn.Linear(3, 1)})
    >>> sorted(head_names(model, model.state_dict()))
    ['head.bias', 'head.weight']
    """
    inner, adapter = without_adapters(model)
    if adapter:  # a model of peft, which has the attributes of the one within it
        own = [name.removeprefix(f"{adapter}.") for name in names if name.startswith(f"{adapter}.")]
        return {f"{adapter}.{name}" for name in head_names(inner, own)}
    prefix = getattr(model, "base_model_prefix", "")
    base: Any = getattr(model, prefix, None) if isinstance(prefix, str) and prefix else None
    if prefix and (isinstance(base, nn.Module) or "For" not in type(model).__name__):
        base, beginning = (base, f"{prefix}.") if isinstance(base, nn.Module) else (model, "")
        poolers = (
            (f"{beginning}pooler.",) if "add_pooling_layer" in read_signature(type(base).__init__).parameters else ()
        )
        head = {name for name in names if not name.startswith(beginning) or name.startswith(poolers)}
        if hasattr(base, "group_matcher"):  # a complete model of timm
            own = [name.removeprefix(beginning) for name in names if name.startswith(beginning)]
            head |= {beginning + name for name in _last_layer(base, own)}
        return head
    return _last_layer(model, names)


def _last_layer(model: nn.Module, names: Iterable[str]) -> set[str]:
    outline = outline_of(model)
    depths = layer_depths(model, outline)
    last = {name.rpartition(".")[0] for name, depth in depths.items() if depth == max(depths.values())}
    children = list(dict.fromkeys(name.partition(".")[0] for name in outline[0]))
    kind = outline[1].get(children[-1]) if children else None
    ending = f"{children[-1]}." if len(children) > 1 and kind is nn.Sequential else None
    return {name for name in names if name.rpartition(".")[0] in last or (ending and name.startswith(ending))}


def log_layer_rates(groups: Iterable[Mapping[str, Any]], layer_decay: float) -> None:
    """Log the learning rate and the number of tensors of each layer."""
    rows: dict[int, list[float]] = {}
    for group in groups:
        row = rows.setdefault(group["layer"], [group["lr"], 0])
        row[1] += len(group["params"])
    lines = [f"layer {layer}: lr {lr:.3g}, {num:.0f} parameters" for layer, (lr, num) in sorted(rows.items())]
    logger.info("layer_decay=%g: %d layers.\n  %s", layer_decay, len(rows), "\n  ".join(lines))


def _block(name: str, containers: Iterable[str]) -> str | None:
    """The name of the outermost block that holds a parameter."""
    for container in containers:  # outer ones first
        prefix = f"{container}." if container else ""
        if name.startswith(prefix) and "." in name[len(prefix) :]:
            return prefix + name[len(prefix) :].partition(".")[0]
    return None
