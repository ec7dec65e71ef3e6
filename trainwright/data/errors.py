"""Errors about the data themselves: empty, ragged or broken."""

from trainwright.config.errors import UserError


class DataError(UserError, ValueError):
    """Data that cannot be trained on."""
