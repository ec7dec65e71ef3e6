"""Checkpoints of the Python API: named by step, with links named by epoch; loading, and upload to the hub."""

import csv
import logging
import tempfile
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from trainwright.base.dist import broadcast_object, is_main_process, raised_together
from trainwright.base.errors import ConfigError, MissingFileError
from trainwright.base.files import has_links, point_at
from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.checkpoint.folder import is_checkpoint, keep_newest
from trainwright.engine.run import TrainerRun
from trainwright.events.writers.rows import sync_files
from trainwright.parallel.faults import meet
from trainwright.trainer.model_card import RunCard
from trainwright.trainer.start import Periods

logger = logging.getLogger("trainwright.engine")

FINAL_EPOCH = "final_epoch"
_OF_WEIGHTS = (".pt", ".pth", ".bin", ".safetensors", ".ckpt")


class Saving:
    """Saves and loads the checkpoints of a run.

    Attributes:
        late: saves that were requested within an update; they are made when it is complete.
    """

    def __init__(self, run: TrainerRun, periods: Periods, card: RunCard) -> None:
        self._run, self._periods, self._card = weakref.proxy(run), periods, card
        self._checkpointer, self._state, self._folder = run.checkpointer, run.state, run.folder
        self.late: list[Callable[[], object]] = []

    def save(self, path: str | Path, *, overwrite: bool) -> None:
        meet("Trainer.save")
        path = Path(path).expanduser()
        if broadcast_object(path.exists()) and not overwrite:
            raise FileExistsError(f"{path}: exists already; pass another path, or overwrite=True.")
        if path.suffix.lower() in _OF_WEIGHTS and is_main_process():  # no error: it may be the only save of a training
            logger.warning(
                "Trainer.save: %s is a folder, a checkpoint with the complete state. Its file model.safetensors has"
                " the weights alone; of a sharded one, trainwright checkpoint export writes it.", path,
            )  # fmt: skip
        if self._state.is_within_update and not self._run.trainer.has_failed:
            self.late.append(partial(self._save, path))
        else:
            self._save(path)

    def _save(self, path: Path) -> None:
        there = self._checkpointer.in_folder(path.parent, asynchronous=False)
        there.save(path.name, tag_last=False, iteration=max(0, self._run.trainer.iterations_done - 1))

    def load(self, path: str | Path) -> None:
        path = Path(path).expanduser()
        if path.is_file():
            raise ConfigError(
                f"Trainer.load: {path} is a file, which holds weights alone; it takes a checkpoint folder. Load weights"
                " with trainwright.models.init_weights(model, path), before the Trainer is built."
            )
        self._checkpointer.load(path)
        self._run.best_weights.forget()

    def continue_from(self, path: str | Path) -> None:
        """Continue the run of the output folder, if ``path`` is in it: a checkpoint, or the folder of all of them.

        A checkpoint becomes the one to resume from with the first step, so a kill does not bring back later ones.
        """
        if not self._folder.contains(path):
            return
        self._folder.resume = True
        checkpoint = Path(path).expanduser().resolve()
        if checkpoint.parent == Path(self._checkpointer.save_dir).resolve() and not checkpoint.name.startswith("."):
            self._folder.on_open = partial(self._checkpointer.tag_last_checkpoint, checkpoint.name)

    def push_to_hub(self, repo_id: str, *, commit_message: str | None, private: bool) -> str:
        """Upload a checkpoint of the current state; return the URL of the repository."""
        from trainwright.checkpoint.hub import upload_folder

        url = ""
        with tempfile.TemporaryDirectory() as folder, raised_together():
            upload = Path(folder, "upload")
            self._save(upload)
            if is_main_process():
                self._card.add_curves(upload)
                message = commit_message or "Upload model"
                url = upload_folder(upload, repo_id, commit_message=message, private=private)
        return broadcast_object(url)

    # Called by hooks.

    def save_step(self, checkpointer: Checkpointer | None = None, *, keep_trained: bool = False) -> None:
        """Save the current training state, named by its last step, by the run's checkpointer or another one."""
        own, name = self._checkpointer, self.step_name()
        calls: dict[str, Any] = {}
        if checkpointer in (None, own):
            links, max_to_keep = (
                [self._folder.path / link for link in self._links_to_this()],
                self._run.spec.max_to_keep,
            )
            calls["on_commit"] = partial(_link, Path(own.save_dir), name, links)
            if max_to_keep is not None:
                calls["prune"] = partial(_prune, max_to_keep)
        iteration = self._state.updates_done - 1
        (checkpointer or own).save(name, iteration=iteration, keep_trained=keep_trained, **calls)

    def step_name(self) -> str:
        """The latest step, with as many digits as the last one has."""
        return f"{self._state.global_step:0{len(str(self._state.plan.total_steps))}d}"

    def _links_to_this(self) -> Iterator[str]:
        if self._periods.is_linked_epoch_end():
            yield f"epoch_{self._state.epoch}"
        if self._run.trainer.iter >= self._run.trainer.max_iter:
            yield FINAL_EPOCH


def _link(folder: Path, name: str, links: list[Path]) -> None:
    """Point links at a committed checkpoint."""
    for link in links:
        if link.is_symlink() or not link.exists() or (is_checkpoint(link) and not has_links(link.parent)):
            point_at(link, folder / name)
        else:
            logger.warning("%s: not a link, so it is kept; it would have pointed at %s.", link, folder / name)


def _prune(max_to_keep: int, folder: Path) -> None:
    """Delete checkpoints beyond ``max_to_keep`` and the links to them."""
    try:
        keep_newest(folder, "", max_to_keep, links=folder.parent.glob("epoch_*"))
    except OSError as error:  # the next save tries again; an extra checkpoint does no harm
        logger.warning("%s: an older checkpoint could not be deleted (%s).", folder, error)


def read_csv_logs(path: Path) -> dict[str, list[float | None]]:
    """The columns of a ``metrics.csv`` by name, with None for empty cells."""
    sync_files()
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file; training writes it.")
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = list(rows[0]) if rows else []
    return {name: [float(row[name]) if row[name] else None for row in rows] for name in names}
