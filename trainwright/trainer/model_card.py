"""The model card of a run: the ``README.md`` of its checkpoints and of its folder."""

import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from trainwright.base.dist import mesh_in_use
from trainwright.base.files import Content
from trainwright.engine.run import TrainerRun
from trainwright.events.formats import CURVES_NAME
from trainwright.models.adapters import is_peft_model
from trainwright.models.checkpoint_files import class_name


class RunCard:
    """The card that the user has passed, or one of the model, its settings and the results of the current weights.

    Args:
        given: the user's card, or None.
        results: returns the results of an evaluation of the current weights, if there was one.
    """

    def __init__(self, run: TrainerRun, given: Any, results: Callable[[], Mapping[str, Any]]) -> None:
        self._run, self._given, self._results = weakref.proxy(run), given, results
        self._settings_of: Mapping[str, Any] | None = None  # what the text of the settings is made of
        self._settings = ""

    def text(self) -> str:
        """The card with the numbers of the current weights."""
        return str(self._card().to_text())

    def file(self) -> Content:
        """The same as the content of a file, which is rendered when the file is written."""
        card = self._card()
        return str(card.to_text()).encode() if card is self._given else lambda: str(card.to_text()).encode()

    def _card(self) -> Any:
        if self._given is not None:
            return self._given
        from trainwright.models.card import ModelCard, settings_text

        config, name, steps = self._run.config, self._run.folder.path.name, self._run.state
        if self._settings_of is not self._run.spec.as_set:  # most of the work, and the same for each checkpoint
            self._settings_of = self._run.spec.as_set
            self._settings = settings_text(_without_paths({**config.to_dict(), "output_dir": name}))
        return ModelCard(
            model_name=name,
            model_architecture=class_name(self._run.model),
            tasks=[str(config.task)] if config.task else None,
            training_summary={"steps": steps.global_step, "epoch": steps.epoch},
            training_config=self._settings,
            eval_results=dict(self._results()) or None,
            usage=self._usage(),
        )

    def text_of_run(self) -> str:
        """The card of the run's folder, with the picture of its curves, if there is one."""
        return _with_curves(self.text()) if self._has_curves else self.text()

    def add_curves(self, folder: Path) -> None:
        """Show the picture of the run's curves in the card in ``folder``."""
        if self._has_curves:
            shutil.copy(self._run.folder.path / CURVES_NAME, folder)
            card = folder / "README.md"
            card.write_text(_with_curves(card.read_text(encoding="utf-8")), encoding="utf-8")

    @property
    def _has_curves(self) -> bool:
        return self._given is None and (self._run.folder.path / CURVES_NAME).is_file()

    def _usage(self) -> str | None:
        model, only, average = self._run.model, self._run.checkpointer.only, self._run.average
        is_averaged, mesh = average is not None and average.num_averaged, mesh_in_use()
        lines = {
            _usage_of_model(model): only is None or is_peft_model(model),
            "Each process has written its part: `trainwright checkpoint export` makes one folder of all.": mesh,
            "`model.safetensors` has the trained weights only; the model needs the original ones, too.": only,
            "The weights are an average over the training; those of the last update are in"
            " `training_weights.safetensors`.": is_averaged,
        }
        return " ".join(line for line, is_shown in lines.items() if line and is_shown) or None


def _with_curves(card: str) -> str:
    return card.replace("\n## ", f"\n![Curves of the training]({CURVES_NAME})\n\n## ", 1)


def _usage_of_model(model: nn.Module) -> str:
    name = class_name(model)
    if is_peft_model(model):
        base = type(model.get_base_model()).__name__  # type: ignore[operator]  # of peft
        return f"`peft.PeftModel.from_pretrained(base, folder)` adds the adapters to `base`, the original {base}."
    if hasattr(getattr(model, "config", None), "to_json_string"):
        return f"`{name}.from_pretrained(folder)` of transformers loads the model."
    if not hasattr(model, "save"):  # not a model of this library
        return (
            "`trainwright.models.init_weights(model, folder)` loads the weights into a model of the same architecture."
        )
    return ""


def _without_paths(value: Any) -> Any:
    """Settings for publication: absolute paths are reduced to their last component."""
    if isinstance(value, Mapping):
        return {key: _without_paths(item) for key, item in value.items()}
    return os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else value
