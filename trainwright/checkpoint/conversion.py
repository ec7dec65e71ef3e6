"""Weights in the form in which transformers stores them: its own conversion gives them the names of the model.

transformers 5 stores many models under other names than they have, and for example the weights of each expert of a
layer apart, where the model has one tensor. Its loader renames, stacks, joins and splits them. Here the same rules are
applied to tensors that are read one after another, so that a process keeps only what its part of the model needs.
"""

import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.shards import StoredTensor
from trainwright.parallel.sharding import class_before_sharding
from trainwright.parallel.wrappers import model_state

logger = logging.getLogger("trainwright.checkpoint")


def converted(module: nn.Module, weights: Mapping[str, Any], own: Mapping[str, Any], source: str) -> dict[str, Any]:
    """``weights`` with the names and shapes of a model that is one of transformers, or contains some.

    Each result is one of ``weights``, or a `StoredTensor` that is computed when it is read. Weights that the model does
    not have keep their names. Other models, and files with the names and shapes of the model, are returned unchanged.

    Args:
        module: the model, not wrapped; on a pipeline stage the part of the stage.
        own: the names and values of the model.
        source: where the weights come from, for messages.

    Raises:
        CheckpointError: the rules of transformers cannot be applied to these weights.
    """
    if all(name in own and getattr(own[name], "shape", None) == _shape(weight) for name, weight in weights.items()):
        return dict(weights)
    models = _models_of_transformers(module)
    if not models:
        return dict(weights)
    try:
        rules = _Rules.of(module, models)
    except (ImportError, AttributeError, TypeError) as error:  # another release of transformers has other functions
        return _by_from_pretrained(module, weights, error)
    return rules.apply(weights, own, source)


class _Rules(NamedTuple):
    """The rules of transformers for a model.

    Attributes:
        root: what they read of the model.
        renamings, converters: rules for names, and rules that compute tensors.
        rename: ``rename(name, ...)``: the name in the model, and the pattern of the converter that applies.
        order: the key by which names are sorted: expert 2 comes before expert 10.
    """

    root: Any
    renamings: Sequence[Any]
    converters: Sequence[Any]
    rename: Any
    order: Any

    @classmethod
    def of(cls, module: nn.Module, models: Mapping[str, nn.Module]) -> "_Rules":
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        root = SimpleNamespace(
            named_modules=lambda: iter(models.items()),
            base_model_prefix=getattr(module, "base_model_prefix", ""),
            config=getattr(module, "config", None) if "" in models else next(iter(models.values())).config,
            get_parameter=module.get_parameter,
        )
        rules = get_model_conversion_mapping(root)  # type: ignore[arg-type]  # it reads two attributes
        return cls(
            root,
            [rule for rule in rules if isinstance(rule, WeightRenaming)],
            [rule for rule in rules if isinstance(rule, WeightConverter)],
            rename_source_key,
            dot_natural_key,
        )

    def apply(self, weights: Mapping[str, Any], own: Mapping[str, Any], source: str) -> dict[str, Any]:
        known = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        prefix = self.root.base_model_prefix or None
        by_pattern = {pattern: rule for rule in self.converters for pattern in rule.source_patterns}
        found: dict[str, Any] = {}
        groups: dict[str, _Group] = {}
        for stored in sorted(weights, key=self.order):
            name, pattern = self.rename(stored, self.renamings, self.converters, prefix, known)
            if name not in known and stored in known:  # a rule for other files applies to a name of the model, too
                name, pattern = self.rename(stored, [], [], prefix, known)
            if name not in known:
                found[stored] = weights[stored]
            elif pattern is None:
                found[name] = weights[stored]
            else:
                group = groups.setdefault(name, _Group(name, deepcopy(by_pattern[pattern]), self.root))
                group.sources.append((pattern, stored, weights[stored]))
        for group in groups.values():
            try:
                found |= group.tensors()
            except Exception as error:  # an operation of transformers can raise any error
                names = ", ".join(stored for _, stored, _ in group.sources[:3])
                raise CheckpointError(
                    f"{source}: transformers cannot make {group.name} of the {len(group.sources)} weights {names} ...:"
                    f" {type(error).__name__}: {error}"
                ) from error
        return found


class _Group:
    """Stored weights of which one rule of transformers makes one or several tensors of the model.

    Attributes:
        name: of the first of these tensors.
        sources: (pattern of the rule, stored name, stored weight), in the order of the names.
    """

    def __init__(self, name: str, rule: Any, root: Any) -> None:
        self.name, self._rule, self._root = name, rule, root
        self.sources: list[tuple[str, str, Any]] = []
        self._computed: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, "_Computed"]:
        """The tensors of the model, by name. Nothing is read."""
        return {name: _Computed(self, name, value) for name, value in self._convert(_meta).items()}

    def read_rows(self, first: int, number: int) -> Tensor | None:
        """Some rows of the only tensor, of the stored weights that these are made of; None: all of them are needed.

        Stacked weights, such as those of experts, are one row each, and may then be joined along another dimension.
        """
        stacks, *joins = self._rule.operations
        kinds = [type(stacks).__name__, *(type(one).__name__ for one in joins)]
        if kinds not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]) or stacks.dim != 0:
            return None
        if any(one.dim < 1 for one in joins) or len(self._rule.target_patterns) != 1:
            return None
        rows = range(first, first + number)
        (value,) = self._convert(_whole, dict.fromkeys(self._rule.source_patterns, rows)).values()
        return value

    def read(self, name: str) -> Tensor:
        """One of the tensors, on the CPU. If there are others, they are kept until `release`."""
        if name not in self._computed:
            self._computed = self._convert(_whole)
        return self._computed[name] if len(self._computed) > 1 else self._computed.pop(name)

    def release(self) -> None:
        """Free the memory of what was read."""
        self._computed = {}
        for weight in {weight.reader for _, _, weight in self.sources if isinstance(weight, StoredTensor)}:
            weight.release()

    @torch.no_grad()
    def _convert(self, value_of: Any, only: Mapping[str, range] | None = None) -> dict[str, Tensor]:
        """``only``: the places of the weights to use, among those of each pattern."""
        rule = deepcopy(self._rule)  # it keeps what it is given
        places = Counter[str]()
        for pattern, stored, weight in self.sources:
            if only is None or places[pattern] in only[pattern]:
                rule.add_tensor(self.name, stored, pattern, value_of(weight))
            places[pattern] += 1
        values = rule.convert(self.name, model=self._root, config=self._root.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}


class _Computed(StoredTensor):
    """A tensor that a rule of transformers makes of stored ones, when it is read."""

    def __init__(self, group: _Group, name: str, like: Tensor) -> None:
        self.reader: Any = group
        self._name, self.shape, self.dtype = name, like.shape, like.dtype

    def open(self, own: Any) -> None:
        for _, _, weight in self.reader.sources:
            if isinstance(weight, StoredTensor):
                weight.open(None)

    def block(self, offset: tuple[int, ...], shape: tuple[int, ...], *, is_mapped: bool = False) -> Tensor:
        if shape and 0 < shape[0] < self.shape[0] and tuple(shape[1:]) == tuple(self.shape[1:]):
            rows: Tensor | None = self.reader.read_rows(offset[0], shape[0])
            if rows is not None:
                return rows
        complete: Tensor = self.reader.read(self._name)
        if tuple(shape) == tuple(complete.shape):
            return complete
        return complete[tuple(map(slice, offset, map(sum, zip(offset, shape, strict=True))))].clone()


def _meta(weight: Any) -> Tensor:
    return weight.meta() if isinstance(weight, StoredTensor) else torch.empty_like(weight, device="meta")


def _whole(weight: Any) -> Tensor:
    return weight.whole(is_mapped=True) if isinstance(weight, StoredTensor) else weight


def _shape(weight: Any) -> Any:
    return getattr(weight, "shape", None)


def _models_of_transformers(module: nn.Module) -> dict[str, nn.Module]:
    """The models of transformers in ``module``, by name; their classes are those before the model was divided."""
    library = sys.modules.get("transformers.modeling_utils")  # a model of it has imported it
    if library is None:
        return {}
    found: dict[str, nn.Module] = {}
    for name, inner in module.named_modules():
        if isinstance(inner, library.PreTrainedModel):
            kind = class_before_sharding(inner)
            if kind is not type(inner):  # rules belong to names of classes
                inner, state = kind.__new__(kind), vars(inner)
                vars(inner).update(state)
            found[name] = inner
    return found


def _by_from_pretrained(module: nn.Module, weights: Mapping[str, Any], error: Exception) -> dict[str, Any]:
    """The weights of a second model, which the ``from_pretrained`` of the model's class fills."""
    load = getattr(class_before_sharding(module), "from_pretrained", None)
    if load is None:
        return dict(weights)
    logger.warning(
        "This release of transformers converts weights in another way (%s: %s), so each process loads a complete second"
        " model for it.", type(error).__name__, error,
    )  # fmt: skip
    state = {name: weight.whole() if isinstance(weight, StoredTensor) else weight for name, weight in weights.items()}
    other, report = load(None, config=deepcopy(module.config), state_dict=state, output_loading_info=True)
    missing, unexpected = set(report["missing_keys"]), report["unexpected_keys"]
    loaded = {name: value for name, value in model_state(other).items() if name not in missing}
    return loaded | {name: weights[name] for name in unexpected if name in weights}
