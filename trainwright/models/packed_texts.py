"""Packed texts: whether a model keeps the texts of a row apart, found before the first step.

A model that does not would train on texts that see each other, without any other sign.
"""

from typing import Any

from torch import nn

from trainwright.base.batch import parameter_names
from trainwright.base.errors import ConfigError
from trainwright.data.packed import PackedDataset
from trainwright.data.wrapped import with_inner
from trainwright.parallel.context import POSITIONS, mixing_layers
from trainwright.parallel.wrappers import unwrap

_OF_TRANSFORMERS = "DataCollatorWithFlattening"  # a batch is one row
_WITH_MASKS = ("sdpa", "eager", "flex_attention")  # kinds of attention that transformers gives a mask of the texts


def check_packed_texts(model: nn.Module, loader: Any) -> None:
    """Check that ``model`` keeps packed texts of a loader apart. Other loaders are not looked at.

    Raises:
        ConfigError: it does not, with what to change.
    """
    is_flattened = type(getattr(loader, "collate_fn", None)).__name__ == _OF_TRANSFORMERS
    packed = any(isinstance(one, PackedDataset) for one in with_inner(getattr(loader, "dataset", None)))
    if not (packed or is_flattened):
        return
    model = unwrap(model)
    config, name = getattr(model, "config", None), type(model).__name__
    names = parameter_names(model.forward)
    kind = getattr(config, "_attn_implementation", None)
    faults = []
    if names is not None and POSITIONS not in names:
        faults.append(f"{name}.forward takes no {POSITIONS!r}, by which a model knows the texts of a row.")
    if layers := mixing_layers(model):
        faults.append(f"{name} has layers that combine tokens otherwise than by attention: {', '.join(layers)}.")
    if getattr(config, "model_type", None) is not None and getattr(config, "use_cache", False):
        faults.append("With its cache, transformers gives packed texts no mask. Set model.config.use_cache = False.")
    if kind is not None and kind not in _WITH_MASKS and not is_flattened:
        faults.append(
            f"attn_implementation={kind!r} knows the texts only in a batch of one row: use 'sdpa' or 'flex_attention',"
            f" or {_OF_TRANSFORMERS} of transformers as data_collator, without PackedDataset."
        )
    if faults:
        source = _OF_TRANSFORMERS if is_flattened else "PackedDataset"
        raise ConfigError("\n".join(f"{source}: packed texts would see each other. {fault}" for fault in faults))
