"""The weights of the best checkpoint, at the end of a training."""

import json
import logging
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.base.errors import ConfigError
from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.engine.best_metric import FOR_EVALUATIONS
from trainwright.hooks.checkpoint import BestCheckpointer

if TYPE_CHECKING:
    from trainwright.engine.run import Run

logger = logging.getLogger("trainwright.engine")

BEST = "model_best"


class BestWeights:
    """The weights of the best checkpoint, which the model has between two trainings if the settings request it."""

    def __init__(self, run: "Run") -> None:
        self._run = weakref.proxy(run)
        self._last_trained: Path | None = None  # the last checkpoint, if the model has the best weights

    def check(self) -> None:
        """Raise if the settings request them, and there will be no best checkpoint."""
        spec = self._run.spec
        is_of_training = spec.is_set("metric_for_best_model") and self._run.best_metric.is_of_training
        if not spec.load_best_model_at_end or ((self._run.evaluates or is_of_training) and spec.save_enabled):
            return
        and_saved = ", and save_enabled=True" if spec.api == "Python" else ""
        raise ConfigError(
            f"{spec.where('load_best_model_at_end')}: got True, but nothing is evaluated or saved."
            f" {FOR_EVALUATIONS[spec.api]}{and_saved}."
        )

    def use(self) -> None:
        """Load them, if the settings request it and there are some; the results are those of their evaluation."""
        run = self._run
        if not run.spec.load_best_model_at_end:
            return
        run.checkpointer.wait()
        best = Path(run.checkpointer.save_dir, BEST)
        if not best.exists():
            name = run.spec.metric_for_best_model
            logger.warning("There is no best checkpoint to load: nothing computed a finite %r.", name)
            return
        loaded = run.checkpointer.loaded_from
        self._last_trained = Path(run.checkpointer.get_checkpoint_file()) if loaded is None else loaded[0]
        self._load(best)
        logger.info("Loaded the weights of the best checkpoint, %s.", best)
        hooks = json.loads((best / "trainer.json").read_text(encoding="utf-8"))["hooks"]
        found = [hook["state"].get("results") for hook in hooks if hook["class"] == BestCheckpointer.__name__]
        run.trainer.last_eval_results = next(filter(None, found), run.trainer.last_eval_results)

    def undo(self) -> None:
        """Load the latest weights again: the state of the optimizer belongs to them."""
        if self._last_trained is not None:
            self._load(self._last_trained)
            self._last_trained = None

    def forget(self) -> None:
        """After the user has loaded a checkpoint: its weights are the latest."""
        self._last_trained = None

    def _load(self, checkpoint: Path) -> None:
        own = self._run.checkpointer
        Checkpointer(own.model, only=own.only, mirror=own.mirror).load(checkpoint, checkpointables=[], strict=True)
