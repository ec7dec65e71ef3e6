"""Checkpoints are folders that are complete or absent: write beside, sync, list and hash, rename. Never pickle."""

from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.checkpoint.errors import CheckpointError, CheckpointTypeError
from trainwright.checkpoint.retention import keep_newest
from trainwright.checkpoint.verify import verify

__all__ = ["Checkpointer", "CheckpointError", "CheckpointTypeError", "keep_newest", "verify"]
