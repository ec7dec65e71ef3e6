"""Torch's warning about the norm of gradients that are divided along two dimensions of a mesh: nothing to act on.

The norm is one number for each process, which torch adds up along one dimension after the other. It warns of that with
the names of its placements and asks for a flattened mesh, which other layouts of the same run do not have.
"""

import logging

_LOGGER = "torch.distributed.tensor._redistribute"
_NORM_PLACEMENT = "_NormPartial"


def silence_norm_warning() -> None:
    """Drop the warning; those about other tensors stay. Calling it again has no effect."""
    logging.getLogger(_LOGGER).addFilter(_is_other_warning)


def _is_other_warning(record: logging.LogRecord) -> bool:
    return _NORM_PLACEMENT not in record.getMessage()
