"""What can be wrong with a checkpoint or with the state that should go into one."""

from trainwright.config.errors import UserError


class CheckpointError(UserError, ValueError):
    """A checkpoint that cannot be written, is not whole, or does not fit what it is loaded into."""


class CheckpointTypeError(CheckpointError, TypeError):
    """State of a type that has no place in a checkpoint."""
