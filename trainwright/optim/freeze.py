"""Freezing: parameters that get no gradient, and normalization layers whose running statistics stay.

A step gets no extra work and no module is wrapped: a frozen parameter has ``requires_grad`` False, and the ``train``
method of a frozen normalization layer keeps it in evaluation mode. The names in a state dict stay the same.
"""

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainwright._torch_compat.norm_layers import BATCH_NORMS, RUNNING_NORMS
from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError, did_you_mean
from trainwright.parallel.pipeline import outline_of
from trainwright.parallel.wrappers import from_outside_in

Part = nn.Module | nn.Parameter

NO_PARAMETERS = "has no parameters: assign its layers in __init__, several of them as an nn.ModuleList, not as a list."


class LayerIndexError(ConfigError, IndexError):
    """A layer's index that the model does not have."""


class LayerFreezer:
    """Freeze layers of ``model``, or unfreeze them with ``freeze=False``.

    A frozen layer's parameters get no gradient, so no optimizer changes them, not by weight decay or momentum either.
    The running statistics of its normalization layers stay, also after ``model.train()``. Its dropout stays active.
    For a parameter or a layer that is used in two places, the last call decides.

    The layers are those of ``model.named_children()`` as they are at each call, of the model inside DataParallel,
    DistributedDataParallel and ``torch.compile``. A call that raises changes nothing. Checkpoints do not record
    what is frozen: freeze again before resuming.

    Attributes:
        model: the model, without such wrappers.

    Raises:
        ConfigError: the model has no layers.

    >>> freezer = LayerFreezer(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> freezer.by_idx([0, -2])
    >>> freezer.show_frozen_layers()
    ['0']
    >>> freezer.status(-1)
    layer -1: unfrozen, unfrozen
    ['unfrozen', 'unfrozen']
    """

    def __init__(self, model: nn.Module) -> None:
        _check_is_module(model, "LayerFreezer")
        *wrappers, self.model = from_outside_in(model)
        self._exchange = next((w for w in wrappers if isinstance(w, DistributedDataParallel)), None)
        if not self.layer_names:
            raise ConfigError(
                f"LayerFreezer.model: {type(self.model).__name__} has no layers (it holds no other modules). "
                "Call requires_grad_(False) on those of its parameters that should stay."
            )

    def __repr__(self) -> str:
        return f"LayerFreezer({type(self.model).__name__}(...))"

    @property
    def layer_names(self) -> list[str]:
        """The names of the layers, in the model's order."""
        return [name for name, _ in self.model.named_children()]

    @property
    def layer_count(self) -> int:
        """How many layers there are."""
        return len(self.layer_names)

    def status(self, layer: str | int) -> list[str]:
        """``"frozen"`` or ``"unfrozen"`` for each parameter of a layer, by name or index. Also prints them."""
        found = self._by_indices([layer]) if isinstance(layer, int) else self._by_names([layer], "status")
        statuses = ["unfrozen" if parameter.requires_grad else "frozen" for parameter in _parameters(found)]
        print(f"layer {layer}: {', '.join(statuses) or 'no parameters'}")
        return statuses

    def show_frozen_layers(self) -> list[str]:
        """The names of the layers that have a frozen parameter."""
        layers = self.model.named_children()
        return [name for name, layer in layers if not all(p.requires_grad for p in _parameters([layer]))]

    def by_names(self, names: Iterable[str], freeze: bool = True) -> None:
        """Freeze layers by name. Names of inner layers (``"blocks.0.attn"``) and of parameters are accepted, too.

        Raises:
            ConfigKeyError: the model has no such layer.
        """
        self._set(self._by_names([names] if isinstance(names, str) else names, "by_names"), freeze)

    def by_idx(self, idx: Iterable[int], freeze: bool = True) -> None:
        """Freeze layers by index; negative ones count from the end.

        Raises:
            LayerIndexError: an index is out of range.
        """
        self._set(self._by_indices([idx] if isinstance(idx, int) else idx), freeze)

    def set_all(self, freeze: bool = True) -> None:
        """Freeze the complete model, including parameters outside of any layer."""
        self._set([self.model], freeze)

    def set_slice(self, slice_num: int, freeze: bool = True) -> None:
        """Freeze the first ``slice_num`` layers; a negative number leaves this many at the end.

        Raises:
            ConfigError: that is none of the layers.
        """
        _check_is_index(slice_num, "set_slice")
        layers = list(self.model.children())[:slice_num]
        if not layers:
            raise ConfigError(
                f"LayerFreezer.set_slice: got {slice_num}, which is none of the {self.layer_count} layers; "
                f"give 1 to {self.layer_count} for the first ones, or -1 for all but the last."
            )
        self._set(layers, freeze)

    def _by_names(self, names: Iterable[str], method: str) -> list[Part]:
        known: dict[str, Part | None] = dict.fromkeys(outline_of(self.model)[0])  # also those of other pipeline stages
        known |= dict(self.model.named_parameters(remove_duplicate=False))
        known |= dict(self.model.named_modules(remove_duplicate=False))
        del known[""]  # the model itself
        names, faults = list(names), []
        for name in names:
            if not isinstance(name, str):
                raise ConfigTypeError(f"LayerFreezer.{method}: got {name!r}; it must be the name of a layer.")
            if name not in known:
                near = [other for other in known if "." in name or "." not in other]
                faults.append(
                    f"LayerFreezer.{method}: {type(self.model).__name__} has no layer {name!r}. "
                    f"{did_you_mean(name, near)}"
                )
        if faults:
            raise ConfigKeyError("\n".join(faults))
        return [part for name in names if (part := known[name]) is not None]

    def _by_indices(self, indices: Iterable[int]) -> list[Part]:
        layers, indices = list(self.model.children()), list(indices)
        for index in indices:
            _check_is_index(index, "by_idx")
        wrong = [index for index in indices if not -len(layers) <= index < len(layers)]
        if wrong:
            raise LayerIndexError(
                f"LayerFreezer: {type(self.model).__name__} has no layer {', '.join(map(str, wrong))}; it has "
                f"{len(layers)}: give 0 to {len(layers) - 1}, or -1 to -{len(layers)} counted from the end."
            )
        return [layers[index] for index in indices]

    def _set(self, parts: Iterable[Part], freeze: bool) -> None:
        parts = list(parts)
        # Whole numbers, as in quantized layers, have no gradient.
        learning = [p for p in _parameters(parts) if p.is_floating_point() or p.is_complex()]
        changing = [p for p in learning if p.requires_grad == freeze]
        self._check_exchange(len(changing), freeze)
        for parameter in changing:
            parameter.requires_grad = not freeze
            parameter.grad = None  # an existing gradient would still be used
        for layer in _layers_of(parts, RUNNING_NORMS):
            _hold(layer, "layer") if freeze else _release(layer, "layer", mode=self.model.training)
        for part in parts if changing and not freeze else ():
            if isinstance(part, nn.Module):
                part.train(self.model.training)  # a frozen part may have stayed in evaluation mode

    def _check_exchange(self, count: int, freeze: bool) -> None:
        """Raise if DistributedDataParallel would silently not synchronize gradients after the change."""
        if self._exchange is None or not count:
            return
        if freeze and self._exchange.find_unused_parameters and not self._exchange.static_graph:
            return
        fixed = "DistributedDataParallel fixes the set of synchronized gradients when it is created"
        do, other = ("Freeze", ", or create it with find_unused_parameters=True") if freeze else ("Unfreeze", "")
        raise ConfigError(
            f"LayerFreezer: {fixed}, and {count} parameters would {'leave' if freeze else 'join'} it. "
            f"{do} before wrapping (LayerFreezer(model.module), then wrap the module again){other}."
        )


def freeze_bn(model: nn.Module, freeze: bool = True) -> int:
    """Freeze the running statistics of every BatchNorm in ``model``, or unfreeze them with ``freeze=False``.

    The layers then normalize by these statistics, as in evaluation, also after ``model.train()``. Their scale and shift
    stay trainable (:class:`LayerFreezer` freezes those); their names in the state dict do not change.
    Convert to SyncBatchNorm before: that makes new layers. Returns the number of BatchNorm layers.
    """
    _check_is_module(model, "freeze_bn")
    layers = list(_layers_of([model], BATCH_NORMS))
    for layer in layers:
        _hold(layer, "batch norm") if freeze else _release(layer, "batch norm", mode=model.training)
    return len(layers)


class _StaysInEvaluation:
    """Replaces ``layer.train``: the layer itself stays in evaluation mode.

    A class at module level, so that the model can be copied and pickled.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self.reasons: set[str] = set()  # a layer that is frozen for two reasons stays so until both are released

    def __call__(self, mode: bool = True) -> nn.Module:
        type(self._layer).train(self._layer, mode)  # layers inside it, as some activations are, follow the mode
        self._layer.training = False
        return self._layer


def _hold(layer: nn.Module, reason: str) -> None:
    held = layer.__dict__.get("train")
    if not isinstance(held, _StaysInEvaluation):
        held = layer.__dict__["train"] = _StaysInEvaluation(layer)
    held.reasons.add(reason)
    layer.training = False


def _release(layer: nn.Module, reason: str, *, mode: bool) -> None:
    held = layer.__dict__.get("train")
    if not isinstance(held, _StaysInEvaluation):
        return
    held.reasons.discard(reason)
    if not held.reasons:
        del layer.__dict__["train"]
        layer.train(mode)


def _parameters(parts: Iterable[Part]) -> list[nn.Parameter]:
    """Those of ``parts``, each once."""
    found = ([part] if isinstance(part, nn.Parameter) else part.parameters() for part in parts)
    return list({id(parameter): parameter for some in found for parameter in some}.values())


def _layers_of(parts: Iterable[Part], kind: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    for part in parts:
        if isinstance(part, nn.Module):
            yield from (module for module in part.modules() if isinstance(module, kind))


def _check_is_module(model: object, where: str) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"{where}.model: got {type(model).__name__}; it must be a torch.nn.Module.")


def _check_is_index(value: object, method: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigTypeError(f"LayerFreezer.{method}: got {value!r}; it must be a whole number.")
