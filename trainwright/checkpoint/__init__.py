"""Checkpoints are folders, committed atomically: write a temporary folder, hash, sync, rename. Never pickle."""

from typing import TYPE_CHECKING

from trainwright.base.lazy_names import on_first_use
from trainwright.checkpoint.errors import CheckpointError, CheckpointTypeError
from trainwright.checkpoint.folder import keep_newest
from trainwright.checkpoint.hub import local_folder, upload_folder
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

# The only name that needs torch: inspecting a checkpoint does not import it.
if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __getattr__ = on_first_use(__name__, {"Checkpointer": "trainwright.checkpoint.checkpointer"})
