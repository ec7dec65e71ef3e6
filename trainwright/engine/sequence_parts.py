"""Context parallel: the part of each sequence of a batch that a process trains on.

B batch, L tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.base.batch import IGNORED, fields, mapped
from trainwright.base.dist import all_gather_object
from trainwright.base.errors import ConfigError
from trainwright.parallel.batch_comparison import check_same
from trainwright.parallel.context import POSITIONS, SHIFTED, longest_texts
from trainwright.parallel.mesh import Mesh, current_mesh
from trainwright.parallel.simulated import simulation

_LABELS, _MASK = "labels", "attention_mask"


def sequence_parts(model: nn.Module) -> Callable[[Any], Any] | None:
    """What makes of each batch this process's part of its sequences; None: the processes divide no sequence."""
    mesh = current_mesh()
    if mesh is None or mesh.layout.context == 1:
        return None
    return _SequenceParts(mesh, longest_texts(model))


class _SequenceParts:
    """Each rank has equally many consecutive tokens, padded at the end, where causal attention does not look.

    Labels are shifted before: the last token of a part predicts the first one of the next. Positions of packed texts
    stay those of all ranks: the attention of each one needs them.
    """

    def __init__(self, mesh: Mesh, longest: Mapping[str, int]) -> None:
        self._mesh, self._longest, self._is_first = mesh, longest, True

    def __call__(self, batch: Any) -> dict[str, Any]:
        has_values = simulation() is None
        if self._is_first and has_values:
            self._is_first = False
            group = self._mesh.context_mesh.get_group()  # type: ignore[union-attr]  # of several context ranks
            check_same([batch], lambda value: all_gather_object(value, group), "Context ranks")
        named = _checked_fields(batch)
        labels, positions = named[_LABELS], named.pop(POSITIONS, None)
        targets_BL = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        mask = named.pop(_MASK, None)
        if mask is not None and has_values:
            _check_padding(mask, targets_BL)
        length, ranks = labels.shape[1], self._mesh.layout.context
        size = max(2, -(-length // ranks))  # attention of a single token is not causal for some models
        for name, longest in self._longest.items():
            if size * ranks > longest:
                raise ConfigError(
                    f"context_parallel_size: a text of {length} tokens, padded to {size * ranks} for {ranks} processes,"
                    f" is longer than {name}={longest} of the model's config."
                )
        places_L = torch.arange(size, device=labels.device) + self._mesh.context_rank * size
        tokens_L = places_L.clamp(max=length - 1)  # padding repeats the last token, which predicts nothing
        for name, value in named.items():
            if isinstance(value, Tensor) and value.shape[:2] == labels.shape:
                named[name] = value[:, tokens_L]
        named[_LABELS] = named[SHIFTED] = targets_BL[:, tokens_L]
        if positions is None:
            positions = places_L.expand(len(labels), -1)
        else:
            # Each token of padding is a text.
            positions = F.pad(positions, (0, size * ranks - length)).view(-1, ranks, size)
        named[POSITIONS] = positions
        return named


def _checked_fields(batch: Any) -> dict[str, Any]:
    """The fields of a batch, in a new dict.

    Raises:
        ConfigError: there are no labels of tokens, or other fields that cannot be divided.
    """
    named: dict[str, Any] = {} if fields(batch) is None else mapped(lambda value: value, batch)
    labels, positions = named.get(_LABELS), named.get(POSITIONS)
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        raise ConfigError(f"context_parallel_size: batches need fields by name, with {_LABELS!r} of (B, L) tokens.")
    if SHIFTED in named:
        raise ConfigError(
            f"context_parallel_size: the data have {SHIFTED!r}, which cannot be divided. Remove the field, and let"
            " labels be those of complete texts."
        )
    if positions is not None and (positions.shape != labels.shape or _MASK in named):
        mask = f", with {_MASK!r}" if _MASK in named else ""
        raise ConfigError(
            f"context_parallel_size: the data have {POSITIONS!r} {tuple(positions.shape)}{mask}. Packed texts have"
            f" those of each token, here {tuple(labels.shape)}, and no mask; other data have none."
        )
    return named


def _check_padding(mask_BL: Tensor, targets_BL: Tensor) -> None:
    """Raise unless causal attention without the mask has the same values wherever a token is predicted."""
    if mask_BL.shape == targets_BL.shape:
        lengths_B1 = mask_BL.bool().sum(dim=1, keepdim=True)
        is_padding = torch.arange(mask_BL.shape[1], device=mask_BL.device) >= lengths_B1
        if bool((mask_BL.bool() != is_padding).all() & (targets_BL[is_padding] == IGNORED).all()):
            return
    raise ConfigError(
        f"context_parallel_size: {_MASK!r} must have the shape of the labels, with padding only at the end of a text,"
        f" where labels are {IGNORED}."
    )
