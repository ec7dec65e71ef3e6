"""Checkpoints are folders that are complete or absent: write beside, sync, list and hash, rename. Never pickle."""

from typing import TYPE_CHECKING

from trainwright.checkpoint.errors import CheckpointError, CheckpointTypeError
from trainwright.checkpoint.hub import local_folder, upload_folder
from trainwright.checkpoint.retention import keep_newest
from trainwright.checkpoint.verify import verify

if TYPE_CHECKING:
    from trainwright.checkpoint.checkpointer import Checkpointer

__all__ = [
    "Checkpointer",
    "CheckpointError",
    "CheckpointTypeError",
    "keep_newest",
    "verify",
    "local_folder",
    "upload_folder",
]


def __getattr__(name: str) -> object:
    if name != "Checkpointer":  # the one name that needs torch, which a look at a checkpoint does not
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainwright.checkpoint.checkpointer import Checkpointer

    globals()[name] = Checkpointer
    return Checkpointer
