"""Optimizers and schedules that are attributes of the user's own trainer class, such as the second one of a GAN.

Checkpoints hold their state, and the parameters in them that the model does not hold.
"""

import logging
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.engine.extra_parameters import load_outside_state, outside_state

logger = logging.getLogger("trainwright.engine")


def extra_optimizers(trainer: Any) -> dict[str, Any]:
    """By the name of the attribute; those of the inner trainer of a ``DefaultTrainer``, too."""
    known = {id(trainer.optimizer), id(getattr(trainer, "lr_scheduler", None))}
    attributes = {**vars(getattr(trainer, "_trainer", trainer)), **vars(trainer)}
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, (Optimizer, LRScheduler)) and id(value) not in known
    }


def extra_state(trainer: Any) -> dict[str, dict[str, Any]]:
    """What a checkpoint holds of them, by the name of the attribute."""
    return {name: _state_of(trainer, part) for name, part in extra_optimizers(trainer).items()}


def load_extra_state(saved: Mapping[str, Mapping[str, Any]], trainer: Any) -> None:
    """Load what a checkpoint holds; one warning lists what is only there or only here."""
    here = extra_optimizers(trainer)
    for name, part in here.items():
        if name not in saved:
            continue
        try:
            part.load_state_dict(saved[name]["state"])
            load_outside_state(
                saved[name]["outside"], trainer.model, part if isinstance(part, Optimizer) else None, None
            )
        except Exception as error:
            error.add_note(f"While loading the state of {type(trainer).__name__}.{name}.")
            raise
    unused, fresh = saved.keys() - here.keys(), here.keys() - saved.keys()
    if unused or fresh:
        logger.warning(
            "Resumed with other optimizers or schedules in %s than the checkpoint's. Saved state that is not used: %s."
            " Without saved state: %s.",
            type(trainer).__name__, ", ".join(sorted(unused)) or "none", ", ".join(sorted(fresh)) or "none",
        )  # fmt: skip


def _state_of(trainer: Any, part: Any) -> dict[str, Any]:
    optimizer = part if isinstance(part, Optimizer) else None
    return {"state": part.state_dict(), "outside": outside_state(trainer.model, optimizer)}
