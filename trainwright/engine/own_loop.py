"""A training loop of the user's own, with data, metrics, hooks and checkpoints of this library."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.base.batch import to_batch
from trainwright.base.dist import get_data_parallel_size, is_main_process
from trainwright.base.files import make_folders
from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.checkpoint.folder import numbered_name
from trainwright.data.batches import Batches
from trainwright.data.loaders import set_position
from trainwright.engine.loaders import warn_of_unsharded
from trainwright.engine.logs import log_to_console
from trainwright.engine.loop import TrainerBase
from trainwright.engine.state import TrainingState
from trainwright.events.writers import default_writers
from trainwright.hooks import HookBase, Interruptions, IterationTimer, PeriodicCheckpointer, PeriodicWriter
from trainwright.parallel.data_parallel import unwrap_model


class TrainingLoop(TrainerBase):
    """``for batch in TrainingLoop(...)``: the body of the loop is an iteration.

    It yields the loader's batches on the model's device, over as many epochs as ``max_iter`` iterations take. Between
    two iterations it runs the hooks: checkpoints, metrics files and log lines, signals. After a ``break`` the same loop
    continues with the next iteration, or with the same one if the optimizer has not stepped in it. If ``output_dir``
    has a checkpoint, the loop continues there, exactly: with the position in the data, all random generators, and the
    states of the model and of ``states``. It must be built after the objects that it saves.

    The body computes gradients, steps the optimizer, and may put metrics into ``loop.storage``.

    Args:
        model: may be in a DistributedDataParallel.
        data_loader: one of ours, which is set to its position; another one, see ``docs/data.md``.
        save_period, log_period: iterations between two checkpoints, and between two rows of metrics.
        mirror: a URL of fsspec, as ``checkpoint_mirror`` of a ``Trainer``: checkpoints are copied there, and a loop
            without a checkpoint in ``output_dir`` continues from there. Metrics files are not.
        hooks: further hooks, called before those that save and write.
        prepare_batch: applied to each item of the loader; by default its tensors are moved to the model's device.
        states: further objects with ``state_dict`` and ``load_state_dict``, by name: ``lr_scheduler=…``,
            ``grad_scaler=…``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data_loader: Any,
        *,
        max_iter: int,
        output_dir: str | Path,
        save_period: int = 1000,
        log_period: int = 20,
        max_to_keep: int | None = None,
        mirror: str | None = None,
        hooks: Iterable[HookBase] = (),
        prepare_batch: Callable[[Any], Any] | None = None,
        **states: Any,
    ) -> None:
        super().__init__()
        log_to_console()
        self._has_stepped, me = False, weakref.proxy(self)
        optimizer.register_step_post_hook(lambda *_: setattr(me, "_has_stepped", True))
        self.model, self.optimizer, self.data_loader = unwrap_model(model), optimizer, data_loader
        self.max_iter = max_iter
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.batches = Batches(
            data_loader,
            prepare=prepare_batch or (lambda batch: to_batch(batch, self.device)),
            prefetches_to=self.device,
            may_change=lambda: True,
        )
        sampler = getattr(data_loader, "batch_sampler", None)
        size = getattr(sampler, "micro_batch_size", None) or getattr(data_loader, "batch_size", None) or 0
        self.samples_per_iter = size * get_data_parallel_size()
        self._state = TrainingState(self)
        parts = self._state.with_parts(optimizer, states.pop("lr_scheduler", None), states.pop("grad_scaler", None))
        self.checkpointer = Checkpointer(self.model, output_dir, mirror=mirror, **parts, **states)
        self.checkpointer.resume_or_load("", resume=True)
        self.register_hooks([IterationTimer(), *hooks])
        self.register_hooks([PeriodicCheckpointer(self.checkpointer, save_period, max_to_keep=max_to_keep)])
        if is_main_process():
            folder = Path(self.checkpointer.save_dir)
            make_folders(folder)
            writers = default_writers(folder, max_iter, batch_size=self.samples_per_iter)
            self.register_hooks([PeriodicWriter(writers, log_period)])
        self.register_hooks([Interruptions(self.checkpointer, self._save)])

    def __iter__(self) -> Iterator[Any]:
        self.checkpointer.check_newest()
        with self._training():
            is_positioned = set_position(self.data_loader, self.start_iter * self.samples_per_iter)
            keeps = True if not is_positioned else None
            self.batches.start(self.start_iter, is_positioned=is_positioned, keeps_generators=keeps)
            for _ in self._iterations():
                self._has_stepped = False
                try:
                    yield self.batches.next()
                except GeneratorExit as end:  # the body has ended the loop
                    if self._has_stepped:
                        self._end_iteration()
                    self.stop("the loop was left", error=end)

    def _end_iteration(self) -> None:
        """Count an iteration whose update was made, as the loop does behind its body."""
        self.iterations_done = self.iter + 1
        self.samples_done += self.samples_per_iter
        self.storage.samples = self.samples_done
        self.after_step()
        self.iter += 1

    def run_step(self) -> None:
        raise NotImplementedError("TrainingLoop: the body of the loop is the step: for batch in loop: ...")

    def _before_first_step(self) -> None:
        self._state.restore()
        warn_of_unsharded(self.data_loader, "TrainingLoop.data_loader")

    def _is_end_pending(self) -> bool:
        return self._state.is_end_pending

    def after_train(self) -> None:
        try:
            super().after_train()
        finally:
            self.checkpointer.close()
            self.start_iter = self.iterations_done

    def _save(self) -> None:
        iteration = self.iterations_done - 1
        self.checkpointer.save(numbered_name(iteration), iteration=iteration)
