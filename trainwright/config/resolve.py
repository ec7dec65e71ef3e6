"""What settings read as: those that stand for something else, such as None for "as many as the other", as that."""

import os
from collections.abc import Mapping
from typing import Any

_MOST_WORKERS = 8


def resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting as it reads."""
    found = dict(settings)
    for name in ("output_dir", "init_weights_from", "resume_from_checkpoint"):
        if isinstance(found[name], str):
            found[name] = os.path.expanduser(found[name])
    if found["eval_batch_size"] is None:
        found["eval_batch_size"] = found["batch_size"]
    if found["dataloader_num_workers"] == -1:
        found["dataloader_num_workers"] = min(os.cpu_count() or 1, found["batch_size"], _MOST_WORKERS)
    if found["early_stopping"] is not None:
        found["early_stopping"] = _whole_early_stopping(found["early_stopping"])
    if found["tensorboard"] is not None:
        found["tensorboard"] = {"log_dir": None, "comment": "", **found["tensorboard"]}
    if found["profile"] is not None:
        found["profile"] = {"wait": 10, "warmup": 2, "active": 3, "repeat": 1, **found["profile"]}
    return found


def _whole_early_stopping(given: Mapping[str, Any]) -> dict[str, Any]:
    # Whether more is better depends on the monitor: that of another than the default is told by its name.
    mode = "auto" if "monitor" in given else "max"
    return {"monitor": "eval_epoch_metric", "patience": 4, "mode": mode, **given}
