"""Run one update of an earlier run again, bitwise: from the nearest checkpoint before it, with a look inside."""

import bdb
import json
import logging
import pdb
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from trainwright.base.dist import (
    gather_over_data,
    get_averaging_size,
    get_data_parallel_rank,
    get_data_parallel_size,
    get_world_size,
)
from trainwright.base.errors import ConfigError
from trainwright.checkpoint.verify import inspect_folders
from trainwright.data.sample_names import sample_name
from trainwright.engine.run import Run
from trainwright.events.formats import LOSSES_NAME, RECORD_NAME, check_formats, read_starts
from trainwright.events.storage import EventStorage
from trainwright.inspect.diff import compare_starts
from trainwright.inspect.report.run_data import LOSS, read_loss_table
from trainwright.inspect.step_probe import StepFacts, probed_step, user_frame
from trainwright.parallel.data_parallel import unwrap_model

logger = logging.getLogger("trainwright.engine")

_OF_LIBRARIES = ["torch", "torch.*", "trainwright", "trainwright.*", "contextlib", "importlib*"]


@dataclass
class Replay:
    """An update that was run again.

    Attributes:
        step: its number, counted from 1.
        checkpoint: where the replay started; "" is the beginning of the run.
        samples: for each micro-batch the indices of its samples in the data set; None if the loader does not show them.
            Several processes: the micro-batches of all of them, rank by rank, and so the losses in ``facts``.
        names: the data set's names of these samples by index, where it has names.
        loss, recorded_loss: of the replay and of the run. They are equal by bits, unless the code, the data or the
            machine is another one. None: not recorded, or the step failed before.
        facts: losses of samples, gradient norms, and the first operation with a value that is not finite.
        error: of the step.
        changes: where the loss differs: what of ``run.json`` is another value now, by name: (of the run, now).
    """

    step: int
    checkpoint: str
    samples: list[list[int]] | None = None
    names: dict[int, str] = field(default_factory=dict)
    loss: float | None = None
    recorded_loss: float | None = None
    facts: StepFacts = field(default_factory=StepFacts)
    error: str = ""
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool | None:
        """Whether the loss is that of the run by bits; None: unknown."""
        if self.loss is None or self.recorded_loss is None:
            return None
        return repr(self.loss) == repr(self.recorded_loss)


def replay(run: Run, step: int, *, stops: bool = False) -> Replay:
    """Run update ``step`` of the run in the output folder again, with a new trainer of that run. Nothing is written.

    ``stops``: start the debugger of Python in the user's code, at the first operation with a result that is not finite,
    after an error, or else in the model's ``forward``.

    Raises:
        ConfigError: the run has no such update, or the trainer has already trained.
    """
    trainer, folder = run.trainer, run.folder.path
    if stops and get_world_size() > 1:
        raise ConfigError("replay: the debugger needs the terminal of one process; leave out --break (stops=True).")
    table = read_loss_table(folder / LOSSES_NAME)
    # With epochs that have become longer, the run has made more updates than were planned at its start.
    done = 0 if table is None else int(max(table[:, 0], default=-1)) + 1
    _check(run, step, last=max(run.trainer.max_iter, done))
    checkpoint = nearest_checkpoint(folder, step)
    with _without_effects(run):
        if checkpoint is not None:
            run.checkpointer.load(checkpoint)
            run.use_loaded_plan()
            run.set_position()
        losses = [] if table is None else table[table[:, 0] == step - 1, 1].tolist()
        found = Replay(step, "" if checkpoint is None else checkpoint.name, recorded_loss=next(reversed(losses), None))
        trainer.iter = trainer.iterations_done = trainer.start_iter
        with EventStorage(trainer.start_iter) as trainer.storage:
            try:
                _run(run, found, stops=stops)
            finally:
                for hook in run.hooks:
                    if hook.changes_process:
                        hook.after_train()
                run.close_data()
                run.checkpointer.close()
        _join_processes(found)
    if found.is_equal is False:
        found.changes = _changes(run, step)
    return found


def _changes(run: Run, step: int) -> dict[str, tuple[Any, Any]]:
    described = next(filter(None, (hook.described_start() for hook in run.hooks)), None)
    starts = [start for start in read_starts(run.folder.path / RECORD_NAME) if start.get("first_iteration", 1) <= step]
    if described is None or not starts:
        return {}
    now = json.loads(json.dumps(described, default=str))
    sections = compare_starts(starts[-1], now)
    return {f"{one.title}: {name}": pair for one in sections for name, pair in one.differing.items()}


def nearest_checkpoint(folder: Path, step: int) -> Path | None:
    """The last complete checkpoint from before update ``step``; None: the replay starts at the beginning."""
    before = [
        (entry.manifest.iteration, entry)
        for place in inspect_folders(folder, contents=False)
        for entry in place.found
        if entry.manifest is not None and entry.manifest.iteration is not None and entry.manifest.iteration + 1 < step
    ]
    for _, entry in sorted(before, key=lambda pair: pair[0], reverse=True):
        if entry.is_complete:
            return entry.path
        logger.warning("replay: checkpoint %s: %s; starting from an earlier one.", entry.path.name, entry.faults[0])
    return None


def _check(run: Run, step: int, *, last: int) -> None:
    if not 1 <= step <= last:
        raise _no_such_update(step, last)
    if run.trainer.has_trained:
        raise ConfigError("replay: this trainer has trained already; call it on a new one, in place of train().")
    check_formats(run.folder.path / RECORD_NAME)
    starts = read_starts(run.folder.path / RECORD_NAME)
    if starts and starts[-1].get("processes", 1) != get_world_size():
        raise ConfigError(
            f"replay: the run had {starts[-1]['processes']} processes, this one has {get_world_size()}; bits are equal"
            f" for the same number only. Start the replay with `trainwright launch -n {starts[-1]['processes']}`."
        )


def _no_such_update(step: int, last: int) -> ConfigError:
    return ConfigError(f"replay: got step {step}; the run has the updates 1 to {last}.")


def _run(run: Run, found: Replay, *, stops: bool) -> None:
    for hook in run.hooks:
        hook.before_train()
    trainer, last = run.trainer, found.step - 1

    def size(place: int) -> int:  # when the batch is read: an epoch that begins with it may have another length
        sizes = [len(batch) for batch in _own_sample_ids(run, found.step) or ()]
        return sizes[place] if place < len(sizes) else 0

    for run_step in trainer.steps_before(found.step):
        if trainer.iter < last:
            run_step()
            continue
        model = unwrap_model(run.model)
        # A compiled program has no inside to look at.
        is_graph = run.spec.graph
        probe = nullcontext(StepFacts()) if is_graph else probed_step(model, size, _debug if stops else None)
        with probe as found.facts, ExitStack() as undo:
            if stops:  # at the next line of the user's code, once

                def stop(module: nn.Module, inputs: Any) -> None:
                    undo.close()
                    pdb.Pdb(skip=_OF_LIBRARIES).set_trace(sys._getframe())

                undo.callback(model.register_forward_pre_hook(stop).remove)
            try:
                run_step()
            except bdb.BdbQuit:  # the user has left the debugger
                raise KeyboardInterrupt from None
            except Exception as error:
                if get_world_size() > 1:
                    raise  # the other processes wait for this one
                found.error = f"{type(error).__name__}: {error}"
                if stops:
                    pdb.post_mortem(error.__traceback__)
        found.samples = _own_sample_ids(run, found.step)
        indices = chain.from_iterable(found.samples or ())
        named = ((index, sample_name(run.batches.loader.dataset, index)) for index in indices)
        found.names = {index: name for index, name in named if name is not None}
        if found.error:
            return
        run.storage.reduce()
        value = run.storage.latest().get(LOSS)
        found.loss = None if value is None else value[0]
    if trainer.iterations_done < found.step and not found.error:  # these settings end before
        raise _no_such_update(found.step, trainer.max_iter)


def _join_processes(found: Replay) -> None:
    """Add what the other processes have seen; each must call this."""
    ranks = gather_over_data(found)
    if len(ranks) == 1:
        return
    context = get_averaging_size() // get_data_parallel_size()  # ranks with parts of the same samples
    samples = [one.samples for one in ranks[::context]]
    found.samples = [batch for one in samples for batch in one or ()] if all(samples) else None
    found.names = {index: name for one in ranks for index, name in one.names.items()}
    found.facts.sample_losses = [losses for one in ranks for losses in one.facts.sample_losses if context == 1]
    found.facts.non_finite = next((bad for one in ranks if (bad := one.facts.non_finite)), None)


@contextmanager
def _without_effects(run: Run) -> Iterator[None]:
    library = logging.getLogger("trainwright")
    before, saves, level = [*run.hooks], run.checkpointer.save_to_disk, library.level
    # The others may change what a step computes.
    run.hooks[:] = [hook for hook in before if hook.in_copies and not hook.ends_run]
    run.checkpointer.save_to_disk = False  # a callback may ask for a checkpoint
    library.setLevel(logging.ERROR)  # the lines of the training are in its log
    try:
        yield
    finally:
        run.hooks[:], run.checkpointer.save_to_disk = before, saves
        library.setLevel(level)


def _debug() -> None:
    """Stop in the user's frame that has called the operation."""
    pdb.Pdb(skip=_OF_LIBRARIES).set_trace(user_frame() or sys._getframe())


def _own_sample_ids(run: Run, update: int) -> list[list[int]] | None:
    """The samples of this process: its consecutive share of each micro-batch, as the samplers deal them out."""
    trainer: Any = run.trainer
    batches, rank, size = trainer.sample_ids(update), get_data_parallel_rank(), get_data_parallel_size()
    if batches is None:
        return None
    shares = []
    for batch in batches:
        each, more = divmod(len(batch), size)
        first = rank * each + min(rank, more)
        shares.append(batch[first : first + each + (rank < more)])
    return shares
