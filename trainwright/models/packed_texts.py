"""Packed texts: whether a model keeps the texts of a row apart, found before the first step.

A model that does not would train on texts that see each other, without any other sign. What a model declares does not
tell it for all: many take ``position_ids`` and have no mask by them. So a row of two texts is tried.
"""

import sys
import weakref
from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from trainwright.base.batch import IGNORED, parameter_names
from trainwright.base.errors import ConfigError
from trainwright.data.packed import PackedDataset
from trainwright.data.seeding import kept_generators
from trainwright.data.wrapped import with_inner
from trainwright.models.eval_mode import evaluation_mode
from trainwright.models.outputs import predictions_of
from trainwright.parallel.context import POSITIONS, mixing_layers
from trainwright.parallel.pipeline import pipeline_of
from trainwright.parallel.sharding import reshard
from trainwright.parallel.simulated import simulation
from trainwright.parallel.wrappers import unwrap

_OF_TRANSFORMERS = "DataCollatorWithFlattening"  # a batch is one row
_WITH_MASKS = ("sdpa", "eager", "flex_attention")  # kinds of attention that transformers gives a mask of the texts
_LENGTH = 16  # tokens of each of the two texts, at most; a number that tensor ranks divide
_MAX_CHANGE = 1e-4  # of the scores of a text by another one, in those of that one
_tried: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # models that keep texts apart


def check_packed_texts(model: nn.Module, loader: Any) -> None:
    """Check that ``model`` keeps packed texts of a loader apart. Other loaders are not looked at.

    What a model declares may change, and is looked at each time; it is tried once. Every rank must call this.

    Raises:
        ConfigError: it does not, with what to change.
    """
    collators = sys.modules.get("transformers.data.data_collator")  # a collator of it has imported it
    kind = () if collators is None else collators.DataCollatorWithFlattening
    is_flattened = isinstance(getattr(loader, "collate_fn", None), kind)
    packed = next((one for one in with_inner(getattr(loader, "dataset", None)) if isinstance(one, PackedDataset)), None)
    model = unwrap(model)
    if packed is None and not is_flattened:
        return
    source = _OF_TRANSFORMERS if is_flattened else "PackedDataset"
    faults = _declared_faults(model, is_flattened=is_flattened)
    if not faults and model not in _tried and simulation() is None and pipeline_of(model) is None:
        row = _row_of(loader.dataset) if packed is None else packed[0]
        found = None if row is None else _tried_faults(model, row)
        faults = found or []
        if found == []:
            _tried.add(model)
    if faults:
        raise ConfigError("\n".join(f"{source}: packed texts would see each other. {fault}" for fault in faults))


def _declared_faults(model: nn.Module, *, is_flattened: bool) -> list[str]:
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
    return faults


def _row_of(dataset: Any) -> dict[str, Tensor] | None:
    """The tokens of a text that the collator of transformers gets; None of a stream, which is not read before."""
    if isinstance(dataset, IterableDataset):
        return None
    with kept_generators():
        return {"input_ids": torch.as_tensor(dataset[0]["input_ids"])}


def _tried_faults(model: nn.Module, row: Mapping[str, Tensor]) -> list[str] | None:
    """Compare the scores of one of two texts in a row before and after the other one is changed; None: it cannot be."""
    name = next(name for name in row if name in ("input_ids", "token_ids"))
    tokens = torch.unique(row[name]).tolist()
    if len(tokens) < 2:
        return None
    length = max(2, min(_LENGTH, len(row[name]) // 2))
    text, changed = ([*islice(cycle(tokens[start:] + tokens[:start]), length)] for start in (0, 1))
    rows_BL = torch.tensor([text + text, changed + text, text + changed])
    labels_BL = rows_BL.clone()
    labels_BL[:, ::length] = IGNORED
    batch = {key: value[:1].expand(rows_BL.shape).clone() for key, value in row.items()}
    batch |= {name: rows_BL, "labels": labels_BL, POSITIONS: torch.arange(length).repeat(2).expand(rows_BL.shape)}
    names, device = parameter_names(model.forward), next((one.device for one in model.parameters()), None)
    batch = {key: value.to(device) for key, value in batch.items() if names is None or key in names}
    with evaluation_mode(model), kept_generators(in_checkpoints=True):
        # One after another: some kinds of attention know the texts only in a batch of one row.
        rows = [{key: value[place : place + 1] for key, value in batch.items()} for place in range(len(rows_BL))]
        found = [predictions_of(model(**one)) for one in rows]
    reshard(model)
    if any(not isinstance(one, Tensor) or one.shape[:2] != (1, 2 * length) for one in found):
        return None
    scores = torch.cat(found).float()
    first, second = scores[:, :length], scores[:, length:]
    own = torch.stack([(first[1] - first[0]).abs().max(), (second[2] - second[0]).abs().max()])
    other = torch.stack([(second[1] - second[0]).abs().max(), (first[2] - first[0]).abs().max()])
    if bool((other <= _MAX_CHANGE * own).all()):
        return []
    return [
        f"Tried with a row of two texts: a change of one changes the scores of the other in {type(model).__name__}. Use"
        " a model for causal language modeling whose attention makes its mask by position_ids, or texts that are not"
        " packed."
    ]
