"""Errors of checkpoints and of the state to save."""

from trainwright.base.errors import UserError


class CheckpointError(UserError, ValueError):
    """A checkpoint that cannot be written, is incomplete, or does not match the objects that load it."""


class CheckpointTypeError(CheckpointError, TypeError):
    """A state of a type that a checkpoint cannot store."""


class PartialWeightsError(CheckpointError):
    """Initial weights that lack some of the model, apart from a new head."""


class NewerFormatError(CheckpointError):
    """A checkpoint that a newer version of the library has written."""
