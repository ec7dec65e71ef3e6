"""Torch's warning about the norm of gradients that are divided along two dimensions of a mesh: nothing to act on.

The norm is one number for each process, which torch adds up along one dimension after the other. It warns of that with
the names of its placements and asks for a flattened mesh, which other layouts of the same run do not have.
"""

import logging

_LOGGER = "torch.distributed.tensor._redistribute"
_OF_NORMS = "_NormPartial"  # the placement of a norm


def silence_norms() -> None:
    """Drop the warning; those about other tensors stay. Calling it again has no effect."""
    logging.getLogger(_LOGGER).addFilter(_is_of_others)


def _is_of_others(record: logging.LogRecord) -> bool:
    return _OF_NORMS not in record.getMessage()
