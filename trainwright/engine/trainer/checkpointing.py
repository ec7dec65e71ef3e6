"""Checkpointing in the Python API: checkpoints named by step, links named by epoch, upload to the hub."""

import csv
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.checkpoint.files import replace_link
from trainwright.checkpoint.folder import keep_newest
from trainwright.config.errors import MissingFileError
from trainwright.engine.folder.formats import CSV_NAME, CURVES_NAME
from trainwright.engine.trainer.base import TrainerShared
from trainwright.events.writers.writer_thread import sync_files
from trainwright.models.adapters import is_peft_model
from trainwright.models.checkpoint_files import class_name
from trainwright.parallel.dist import broadcast_object, is_main_process, mesh_in_use, raised_together
from trainwright.parallel.faults import meet

logger = logging.getLogger("trainwright.engine")

BEST = "model_best"
FINAL_EPOCH = "final_epoch"


class SavingTrainer(TrainerShared):
    """Saving and loading."""

    _last_trained: Path | None = None  # the checkpoint of the training's last step, if the model has the best weights

    def save(self, path: str | Path, overwrite: bool = True) -> None:
        """Save the complete training state to the checkpoint folder ``path``, with its model card ``README.md``.

        Every process must call it; the main process writes.

        Raises:
            FileExistsError: ``path`` exists, and ``overwrite`` is False.
        """
        meet("Trainer.save")
        path = Path(path).expanduser()
        if broadcast_object(path.exists()) and not overwrite:
            raise FileExistsError(f"{path}: exists already; pass another path, or overwrite=True.")
        self._checkpointer_for(path).save(path.name, tag_last=False, iteration=max(0, self.state.updates_done - 1))

    def load(self, path: str | Path) -> None:
        """Restore the complete training state from a checkpoint. ``train`` continues from there."""
        self.checkpointer.load(Path(path).expanduser())
        self._last_trained = None

    def _continue_from(self, path: str | Path) -> None:
        """Continue the run of the output folder from ``path``, a checkpoint or the folder of all of them.

        A checkpoint becomes the one to resume from with the first step, so a kill does not bring back later ones.
        """
        self._folder.resume = True
        checkpoint = Path(path).expanduser().resolve()
        if checkpoint.parent == Path(self.checkpointer.save_dir).resolve() and not checkpoint.name.startswith("."):
            self._folder.on_open = partial(self.checkpointer.tag_last_checkpoint, checkpoint.name)

    def push_to_hub(self, repo_id: str, *, commit_message: str | None = None, private: bool = False) -> str:
        """Upload the model, its config, preprocessor, card and training state; return the URL of the repository.

        The card shows ``curves.png``, if the run has one.

        Raises:
            MissingFileError: the hub cannot be reached, or rejects the upload.
        """
        from trainwright.checkpoint.hub import upload_folder

        url = ""
        with tempfile.TemporaryDirectory() as folder, raised_together():
            self.save(Path(folder, "upload"))
            if is_main_process():
                self._add_curves(Path(folder, "upload"))
                message = commit_message or "Upload model"
                url = upload_folder(Path(folder, "upload"), repo_id, commit_message=message, private=private)
        return broadcast_object(url)

    def load_csv_logs(self, logs_dir: str | Path | None = None) -> dict[str, list[float | None]]:
        """The columns of ``metrics.csv`` by name, with None for empty cells.

        With a ``TrainerConfig`` also ``step`` (steps done), ``train.loss`` and ``evaluation.<metric>``.

        Raises:
            MissingFileError: the file does not exist.
        """
        from trainwright.config.training.training_config import TrainerConfig

        sync_files()
        folder = self.output_dir / self.config.logs_dir if logs_dir is None else Path(logs_dir)
        path = folder / CSV_NAME
        if not path.is_file():
            raise MissingFileError(f"{path}: no such file; training writes it.")
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        names = list(rows[0]) if rows else []
        columns = {name: [float(row[name]) if row[name] else None for row in rows] for name in names}
        return self._alias_columns(columns) | columns if isinstance(self.config, TrainerConfig) else columns

    def _alias_columns(self, columns: Mapping[str, list[float | None]]) -> dict[str, list[float | None]]:
        """The columns under the names that ``TrainerConfig`` documents."""
        plan, first = self._plan, "evaluation/"
        named = {f"evaluation.{name.removeprefix(first)}": columns[name] for name in columns if name.startswith(first)}
        if "total_loss" in columns:
            named["train.loss"] = columns["total_loss"]
        steps = [float(min(plan.steps(int(at or 0) + 1), self.total_steps)) for at in columns.get("iteration", [])]
        return {"step": [*steps], **named}

    # Called by hooks.

    def _save(self, *, keep_trained: bool = False) -> None:
        """Save the current training state, named by its last step."""
        self._save_by(self.checkpointer, keep_trained=keep_trained)

    def _save_by(self, checkpointer: Checkpointer, *, keep_trained: bool = False) -> None:
        state = self.state
        name = self._step_number()
        links = [self.output_dir / link for link in self._links_to_this()]
        is_own = checkpointer is self.checkpointer
        on_commit = partial(_link_and_prune, Path(checkpointer.save_dir), name, links, self.config.max_to_keep)
        settings: dict[str, Any] = {"on_commit": on_commit if is_own else None, "keep_trained": keep_trained}
        checkpointer.save(name, iteration=state.updates_done - 1, **settings)

    def _step_number(self) -> str:
        return f"{self.state.global_step:0{len(str(self.total_steps))}d}"

    def _links_to_this(self) -> Iterator[str]:
        if self._periods.is_linked_epoch_end():
            yield f"epoch_{self.state.epoch}"
        if self.iter >= self.max_iter:
            yield FINAL_EPOCH

    def _load_best(self) -> None:
        """Load the weights of the best checkpoint, if there is one."""
        self.checkpointer.wait()
        best = Path(self.checkpointer.save_dir, BEST)
        if not best.exists():
            logger.warning(
                "There is no best checkpoint to load: no evaluation computed %r.", self.config.metric_for_best_model
            )
            return
        loaded = self.checkpointer.loaded_from
        self._last_trained = Path(self.checkpointer.get_checkpoint_file()) if loaded is None else loaded[0]
        self._load_weights(best)
        logger.info("Loaded the weights of the best checkpoint, %s.", best)

    def _load_weights(self, checkpoint: Path) -> None:
        Checkpointer(self.model, only=self.checkpointer.only).load(checkpoint, checkpointables=[], strict=True)

    def _keeps_best(self) -> bool:
        evaluates = self.eval_dataloader is not None and self.config.eval_strategy != "no"
        return evaluates and self.config.save_enabled

    def _load_final_results(self) -> None:
        """For a run that was already finished: restore its last results, and its best weights if requested."""
        self.last_eval_results = self._folder.last_results("evaluation/")
        if self.config.load_best_model_at_end:
            self._load_best()

    def _checkpointer_for(self, path: Path) -> Checkpointer:
        return Checkpointer(
            self.model,
            path.parent,
            asynchronous=False,
            attachments=self._attachments,
            weights=self._saved_model,
            only=self.checkpointer.only,
            **dict[str, Any](self.checkpointer.checkpointables),
        )

    def _attachments(self) -> Mapping[str, bytes]:
        """Those of every run, and the model's card."""
        return {"README.md": self._card().encode(), **super()._attachments()}

    def _usage(self) -> str | None:
        only, average = self.checkpointer.only, self._average
        lines = []
        if only is None or is_peft_model(self.model):
            lines.append(_usage_of_model(self.model))
        if mesh_in_use() is not None:
            lines.append("Each process has written its part: `trainwright checkpoint export` makes one folder of all.")
        if only is not None:
            lines.append("`model.safetensors` has the trained weights only; the model needs the original ones, too.")
        if average is not None and average.num_averaged:
            lines.append(
                "The weights are an average over the training; those of the last update are in"
                " `training_weights.safetensors`."
            )
        return " ".join(filter(None, lines)) or None

    def _write_card(self) -> None:
        """Write the model card of the run, with the results of its last evaluation."""
        has_curves = (self.output_dir / CURVES_NAME).is_file() and self.model_card is None
        self._folder.write_card(_with_curves(self._card()) if has_curves else self._card())

    def _add_curves(self, folder: Path) -> None:
        """Show the run's picture of its curves in the model card in ``folder``."""
        picture, card = self.output_dir / CURVES_NAME, folder / "README.md"
        if picture.is_file() and self.model_card is None:
            shutil.copy(picture, folder)
            card.write_text(_with_curves(card.read_text(encoding="utf-8")), encoding="utf-8")

    def _current_results(self) -> dict[str, Any]:
        """The results of an evaluation of the current weights, if there was one."""
        return dict(self.last_eval_results) if self._evaluated_step == self.state.global_step else {}

    def _card(self) -> str:
        from trainwright.models.card import ModelCard

        name = self.output_dir.name
        card = self.model_card or ModelCard(
            model_name=name,
            model_architecture=class_name(self.model),
            tasks=[str(self.config.task)] if self.config.task else None,
            training_summary={"steps": self.state.global_step, "epoch": self.state.epoch},
            training_config=_without_paths({**self.config.to_dict(), "output_dir": name}),
            eval_results=self._current_results() or None,
            usage=self._usage(),
        )
        return str(card.to_text())


def _with_curves(card: str) -> str:
    """The text of a model card that shows the picture beside it."""
    return card.replace("\n## ", f"\n![Curves of the training]({CURVES_NAME})\n\n## ", 1)


def _usage_of_model(model: nn.Module) -> str:
    """The call that loads a checkpoint's weights for use."""
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


def _link_and_prune(folder: Path, name: str, links: list[Path], max_to_keep: int | None) -> None:
    """Point links at a committed checkpoint; then delete checkpoints beyond ``max_to_keep`` and the links to them."""
    for link in links:
        if link.is_symlink() or not link.exists():
            replace_link(link, folder / name)
        else:
            logger.warning("%s: not a link, so it is kept; it would have pointed at %s.", link, folder / name)
    if max_to_keep is None:
        return
    try:
        keep_newest(folder, "", max_to_keep, links=folder.parent.glob("epoch_*"))
    except OSError as error:  # the next save tries again; an extra checkpoint does no harm
        logger.warning("%s: an older checkpoint could not be deleted (%s).", folder, error)
