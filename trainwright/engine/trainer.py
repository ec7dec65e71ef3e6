"""The objects door: a trainer for a model, data sets and settings."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.config.errors import ConfigError
from trainwright.data.collate import to_batch
from trainwright.engine import trainer_parts as parts
from trainwright.engine.contracts import Contract, contract_for
from trainwright.engine.gradients import noted, plain_backward, recorded_norm, recorded_step
from trainwright.engine.loop import TrainerBase
from trainwright.engine.randomness import seed_everything
from trainwright.engine.run_folder import OpenRunFolder
from trainwright.engine.scoring import score_batches
from trainwright.engine.setup import log_to_console
from trainwright.engine.step_plan import batches_from, make_plan
from trainwright.engine.trainer_hooks import Evaluate, SaveSteps, TrainerFolder, WriteSteps
from trainwright.engine.trainer_state import TrainerState
from trainwright.engine.window import WindowMean, weighted_mean
from trainwright.evaluation.untouched import evaluation_mode
from trainwright.events.storage import EventStorage
from trainwright.events.writers import EventWriter, default_writers
from trainwright.hooks import FiniteCheck, HookBase, Interruptions, IterationTimer
from trainwright.hooks import LRScheduler as StepSchedule
from trainwright.optim.clip import gradient_clipper, gradient_norm
from trainwright.optim.skip import SkipNonFinite
from trainwright.parallel.device import pick_device

if TYPE_CHECKING:
    from trainwright.config.training_config import TrainingConfig

logger = logging.getLogger("trainwright.engine")


class Trainer(TrainerBase):
    """Train ``model`` on ``train_dataset``: ``Trainer(model, config, train_dataset=data).train()``.

    Override ``train_step(model, inputs)``, ``training_step(batch)``, ``optimization_step()`` or
    ``compute_loss(model, inputs)`` to change a step; ``prepare_input_batch(batch)`` to change its batch.

    Args:
        data_collator: makes a batch of a list of samples; the data set's own ``data_collator`` by default.
        train_dataloader, eval_dataloader: loaders to be used as they are, in place of ours over the data sets.

    Attributes:
        state: ``global_step``, ``epoch`` and ``epoch_step``, counted in calls of ``training_step``.
        total_steps: what ``state.global_step`` is at the end.
    """

    def __init__(
        self,
        model: nn.Module,
        config: "TrainingConfig",
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        data_collator: Callable[[list[Any]], Any] | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        train_dataloader: Any = None,
        eval_dataloader: Any = None,
    ) -> None:
        super().__init__()
        has_data = [data is not None for data in (train_dataset, train_dataloader, eval_dataset, eval_dataloader)]
        parts.check_parts(model, config, any(has_data[:2]), any(has_data[2:]))
        parts.check_given(config, optimizer, lr_scheduler)
        log_to_console()
        self.config = config
        self.device = pick_device(config.device_str)
        self.model = model.to(self.device)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._collator = data_collator
        self._is_own_loader = train_dataloader is None
        self.train_dataloader = (
            parts.train_loader(train_dataset, config, data_collator) if self._is_own_loader else train_dataloader
        )
        self.eval_dataloader = eval_dataloader
        if eval_dataloader is None and eval_dataset is not None:
            self.eval_dataloader = parts.eval_loader(eval_dataset, config, data_collator)
        self._plan = make_plan(
            self.train_dataloader,
            num_epochs=config.num_epochs,
            max_steps=config.max_steps,
            accumulation=config.gradient_accumulation_steps,
        )
        self.total_steps, self.max_iter = self._plan.total_steps, self._plan.num_updates

        self.optimizer = optimizer or parts.build_optimizer(config, model)
        self.lr_scheduler = lr_scheduler or parts.build_lr_scheduler(config, self.optimizer, self.max_iter)
        self._settle_step()
        self.storage = EventStorage()
        made = {"optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}
        self.state = TrainerState(self, self._plan, made, lr=config.learning_rate, seed=config.seed)
        self._states: dict[str, Any] = {"trainer": self.state, **made}
        self.checkpointer = Checkpointer(model, Path(config.output_dir, parts.CHECKPOINTS), **self._states)
        source = parts.resume(config, model, self._states)
        is_same_run = source is not None and Path(config.output_dir).resolve() in source.resolve().parents
        self._folder = TrainerFolder(config.output_dir, resume=is_same_run)
        # What no list of hooks may forget: around the user's own.
        is_due = partial(self.state.has_passed, config.log_steps)
        self.register_hooks([OpenRunFolder(self._folder), FiniteCheck(policy=config.non_finite, is_due=is_due)])
        self.register_hooks([*self.build_hooks(), Interruptions(self.checkpointer, self._save_step)])

    @property
    def configs(self) -> "TrainingConfig":
        """Another name of ``config``."""
        return self.config

    @property
    def epoch(self) -> int:
        """The epoch of the newest step, from 1 on."""
        return self.state.epoch

    @property
    def consumed_samples(self) -> int:
        """Training samples used so far; 0 where a loader of the user's does not tell."""
        return self._plan.samples(self.state.global_step)

    # The way of a batch.

    def run_step(self) -> None:
        """One update of the weights: ``train_step`` for each micro-batch of its window."""
        state, end = self.state, self._plan.steps(self.iter + 1)
        state.step_before = state.global_step
        self._begin_window(end - state.global_step)
        losses, data_time = list[Any](), 0.0
        while state.global_step < end:
            start = time.perf_counter()
            inputs = next(self._batches)
            data_time += time.perf_counter() - start

            state.global_step += 1
            self._is_window_end = state.global_step == end
            losses.append(self.train_step(self._step_model, inputs).get("step_loss"))
        self._put_metrics(losses, data_time)

    def prepare_input_batch(self, batch: Any) -> Any:
        """What a step gets for a batch of the loader: by default its tensors on the device."""
        return to_batch(batch, self.device)

    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        """One micro-batch: forward and backward, and at the end of an accumulation window the update.

        Returns ``step_loss``, a tensor without gradient that nobody has waited for.
        """
        loss = self.training_step(inputs)
        if self._is_window_end:
            self.optimization_step()
        return {"step_loss": loss}

    def training_step(self, batch: Any) -> Tensor:
        """Forward and backward of one micro-batch; returns its loss without gradient. Changes no weight."""
        loss = self.compute_loss(self._step_model, batch)
        self._backward(loss, batch)
        step_loss: Tensor = loss.detach()
        return step_loss

    def optimization_step(self) -> None:
        """Use the gradients and set them to None. Called at the end of each accumulation window."""
        self._step_optimizer(self._clip_gradients())
        self.optimizer.zero_grad()

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        """The mean loss of a batch, by what model and batch agree on (see ``docs/trainer.md``)."""
        # Reached by overrides and before the first batch; otherwise the contract's own method stands here.
        return self._settled(inputs).compute_loss(model, inputs)

    # Using the model.

    def evaluate(self, dataset: Any = None) -> dict[str, Any]:
        """``loss``, the mean over all samples, and for classes ``accuracy``; of ``dataset`` or the eval data.

        ``dataset`` may be a loader. Training state, modes and randomness are afterwards as they were. A model that
        returns no loss in evaluation mode gives none.
        """
        loader = self.eval_dataloader if dataset is None else dataset
        if loader is None:
            raise ConfigError("Trainer.evaluate: there is no eval_dataset; give one here or to the Trainer.")
        if dataset is not None and hasattr(dataset, "__getitem__") and not isinstance(dataset, list):
            loader = parts.eval_loader(dataset, self.config, self._collator)
        batches = map(self.prepare_input_batch, loader)
        return score_batches(self.model, batches, self.compute_loss, self.device)

    def predict(self, inputs: Any) -> Any:
        """What the model gives for one batch of inputs, in evaluation mode and without gradients."""
        inputs = self.prepare_input_batch(inputs)
        with evaluation_mode(self.model):
            return self.model(**inputs) if isinstance(inputs, Mapping) else self.model(inputs)

    def save(self, path: str | Path, overwrite: bool = True) -> None:
        """Write the whole state of the run as the checkpoint folder ``path``."""
        path = Path(path).expanduser()
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path}: exists already; give another path, or overwrite=True.")
        saver = Checkpointer(self.model, path.parent, asynchronous=False, **self._states)
        saver.save(path.name, tag_last=False, iteration=max(0, self.state.updates_done - 1))

    def load(self, path: str | Path) -> None:
        """Take the whole state of the run from a checkpoint; ``train`` then goes on from there."""
        self.checkpointer.load(Path(path).expanduser())

    # What happens around the steps.

    def build_hooks(self) -> list[HookBase | None]:
        """The hooks, in the order of their calls."""
        config, state = self.config, self.state
        eval_is_due = partial(state.has_passed, config.eval_steps) if config.eval_steps else state.is_epoch_end
        evaluates = config.eval_strategy != "no" and self.eval_dataloader is not None
        return [
            IterationTimer(),
            StepSchedule() if self.lr_scheduler is not None else None,
            SaveSteps(self.checkpointer, self._save_is_due, self._save_step),  # before the last evaluation
            Evaluate(eval_is_due, lambda: self.evaluate()) if evaluates else None,
            WriteSteps(partial(state.has_passed, config.log_steps), self.build_writers()),
        ]

    def build_writers(self) -> list[EventWriter]:
        """Where metrics go: the console, a progress bar, ``metrics.json``, ``metrics.csv``, TensorBoard."""
        config, samples = self.config, self._plan.samples(self._plan.steps(1))
        return default_writers(
            config.output_dir, self.max_iter, batch_size=samples, progress_bar=config.progress_bar, table=True
        )

    def before_train(self) -> None:
        self._folder.prepare(self.config)
        self._folder.lock()
        super().before_train()

    def after_train(self) -> None:
        self.state.global_step = self._plan.steps(self.iter)  # an update that failed leaves steps that do not count
        try:
            super().after_train()
        finally:
            self.start_iter = self.iter  # a further train() goes on from here
            self._folder.close()

    def _before_first_step(self) -> None:
        if self.start_iter == 0:
            seed_everything(self.config.seed)
        self.state.restore()
        self.model.train()
        self.optimizer.zero_grad()
        self._set_batches()

    def _set_batches(self) -> None:
        """Begin the stream of batches where the run is, and let its first one settle how a batch becomes a loss."""
        done = self.state.global_step
        if self._is_own_loader:
            self.train_dataloader.batch_sampler.set_batches_done(done)
            batches: Iterator[Any] = iter(self.train_dataloader)
        else:
            batches = batches_from(self.train_dataloader, done, self._plan.steps_per_epoch)
            if done % self._plan.steps_per_epoch:
                logger.warning("The given loader goes on in the middle of an epoch; if it shuffles, in another order.")
        prepared = map(self.prepare_input_batch, batches)
        first = next(prepared)
        self._batches = chain([first], prepared)
        points = ("train_step", "training_step", "compute_loss")
        if all(getattr(type(self), name) is getattr(Trainer, name) for name in points):  # else the user's own decide
            self.compute_loss = self._settled(first).compute_loss  # type: ignore[method-assign]

    def _settle_step(self) -> None:
        """What a step needs to know of the configuration, settled once."""
        config, model = self.config, self.model
        self._contract: Contract | None = None
        self._criterion, self._own_loss = parts.losses(config, model, self.device)
        # Inductor has random numbers of its own; the fallback draws torch's, so that eager and graph agree.
        self._step_model: Any = torch.compile(model, options={"fallback_random": True}) if config.graph else model
        self._is_window_end = True
        accumulates = config.gradient_accumulation_steps > 1
        self._mean = WindowMean(self.optimizer, self._samples_of_step if self._is_own_loader else None)
        self._note_outputs = self._mean.note if accumulates else None
        self._begin_window: Callable[[int], None] = self._mean.begin
        self._backward: Callable[[Tensor, Any], None] = self._mean.backward if accumulates else plain_backward
        self._clip_gradients = recorded_norm(gradient_clipper(self.optimizer))
        if config.non_finite == "skip":
            skip = SkipNonFinite(self.optimizer, model.buffers())
            self._begin_window, self._backward = noted(skip, self._begin_window, self._backward)
            self._clip_gradients = recorded_norm(gradient_norm(self.optimizer))
            self._step_optimizer = recorded_step(skip)  # type: ignore[method-assign, assignment]

    def _step_optimizer(self, norm: Any) -> None:
        """Change the weights. ``norm`` is that of the gradients, where it is known."""
        self.optimizer.step()

    def _samples_of_step(self, batch: Any) -> int:
        return self._plan.samples(self.state.global_step) - self._plan.samples(self.state.global_step - 1)

    def _settled(self, inputs: Any) -> Contract:
        if self._contract is None:
            self._contract = contract_for(self.model, inputs, self._criterion, self._own_loss, self._note_outputs)
        return self._contract

    def _put_metrics(self, losses: list[Any], data_time: float) -> None:
        self.storage.put_scalar("data_time", data_time)
        losses = [loss for loss in losses if loss is not None]
        if losses:
            self.storage.put_scalar("total_loss", weighted_mean(losses, self._mean.weights))

    def _save_is_due(self) -> bool:
        config = self.config
        if config.save_steps == 0:
            return False
        if config.save_steps is not None and self.state.has_passed(config.save_steps):
            return True
        return bool(config.save_freq) and self.state.is_epoch_end() and self.epoch % config.save_freq == 0

    def _save_step(self) -> None:
        name = f"{self.state.global_step:0{len(str(self.total_steps))}d}"
        self.checkpointer.save(name, iteration=self.state.updates_done - 1)
