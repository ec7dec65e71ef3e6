"""The training state of a run, and what its checkpoints store of it."""

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from trainwright.base.dist import (
    get_averaging_rank,
    get_data_parallel_rank,
    get_data_parallel_size,
    get_rank,
    get_world_size,
    mesh_in_use,
)
from trainwright.base.errors import ConfigError
from trainwright.checkpoint.errors import NewerFormatError
from trainwright.checkpoint.optimizer_state import inner_optimizers
from trainwright.checkpoint.state_files import TRAINING_WEIGHTS, Stateful
from trainwright.config.foreign_names import attribute_hint
from trainwright.data.batches import Batches
from trainwright.data.seeding import random_state, set_random_state
from trainwright.engine.extra_parameters import (
    extra_optimizers,
    extra_state,
    load_extra_state,
    load_gradients,
    load_outside_state,
    open_gradients,
    outside_state,
)
from trainwright.engine.loop import TrainerBase
from trainwright.engine.resumed_settings import KEPT, differences, log_changes, options_of
from trainwright.engine.step_plan import NO_STEPS, StepPlan
from trainwright.events.epoch_means import RunningMean
from trainwright.events.storage import mean_so_far
from trainwright.hooks.due import NEVER, Recurring
from trainwright.optim.named import NamedOptimizers

logger = logging.getLogger("trainwright.engine")

STATE_FORMAT = 1  # of the training state in a checkpoint; a later version also reads earlier ones


class TrainingState:
    """The trainer's position, random state, the state of hooks and the metrics' windows, as one state.

    Under "rank" it has what belongs to this process: its random state, the place in its data, and hooks of its own.
    Loading sets ``trainer.start_iter`` at once. Random state, hooks and metrics are set by :meth:`restore`, which the
    trainer calls right before the first step, since building its parts draws random numbers.
    """

    def __init__(self, trainer: TrainerBase) -> None:
        self._trainer = trainer
        self._options: dict[str, Any] = {}  # of optimizers and schedules: as they were built, or as a resume keeps them
        self._classes: dict[str, str] = {}
        self._loaded: dict[str, Any] | None = None
        self._outside: dict[str, Any] | None = None  # loaded, but not copied yet
        self._has_warned = False  # of gradients that are not saved

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Called for missing attributes only: the message says what the trainer calls them."""
            trainer = vars(self).get("_trainer")
            here = None if trainer is None else attribute_hint(name, trainer)
            if here is None:
                return super().__getattribute__(name)  # the usual error
            text = f"{type(self).__name__} has no attribute {name!r}. Here it is: trainer.{here}."
            raise AttributeError(text, name=name, obj=self)

    def with_parts(self, optimizer: Any, lr_scheduler: Any, grad_scaler: Any, average: Any = None) -> dict[str, Any]:
        """What a checkpoint holds beside the model, by name; parts that are None are left out.

        Of several optimizers and schedules by name: ``optimizer_g``, ``lr_scheduler_g``.

        A resume requires the same classes. With an ``average`` of the weights, the model's file holds it. The
        training state is first: it decides whether the others can be restored.
        """
        parts = {
            **_by_name("optimizer", optimizer.optimizers if isinstance(optimizer, NamedOptimizers) else optimizer),
            **_by_name("lr_scheduler", lr_scheduler),
            "grad_scaler": grad_scaler,
        }
        there = {name: part for name, part in parts.items() if part is not None}
        there |= {key: one for name, part in parts.items() for key, one in inner_optimizers(name, part).items()}
        self._classes = {name: type(part).__name__ for name, part in there.items()}
        self._options = {key: value for name, part in there.items() for key, value in options_of(name, part).items()}
        return {"trainer": self, **there, **({} if average is None else {TRAINING_WEIGHTS: average})}

    def before_save(self) -> None:
        """Called by the checkpointer on every process, before states are read."""
        for hook in self._trainer.hooks:
            hook.before_save()

    def rehearse(self) -> None:
        """Called by the checkpointer at the first save: compare the next batch with that of a resume."""
        if self._position() is not None:
            self._part("batches").rehearse()

    def state_dict(self) -> dict[str, Any]:
        hooks, own = list[dict[str, Any]](), dict[str, Any]()
        for hook in self._trainer.hooks:
            if isinstance(hook, Stateful) and not hook.is_idle:
                state = hook.state_dict()
                if hook.is_state_of_rank:
                    own[str(len(hooks))], state = state, {}
                hooks.append({"class": type(hook).__name__, "state": state})
        return {
            "format": STATE_FORMAT,
            "rank": {"random": random_state(), "data": self._position(), "hooks": own},
            # Not the storage's iteration, which is the next one already when a checkpoint is saved.
            "iterations_done": self._trainer.iterations_done,
            "is_ended": self._trainer.is_ended,
            "consumed_samples": self._trainer.samples_done,
            "classes": self._classes,
            "settings": self._settings(),
            "options": self._options,
            "layout": _layout(),
            "hooks": hooks,
            "called_hooks": None if self._is_in_step else self._trainer.called_hooks,
            "unfinished_stop": self._trainer.unfinished_stop,
            "metrics": self._trainer.storage.state_dict(),
            "outside": outside_state(*self._trained()),
            "optimizers": extra_state(extra_optimizers(self._trainer), self._trained()[0]),
            **({"gradients": gradients} if (gradients := self._gradients()) else {}),
        }

    def ranks_to_load(self, state: dict[str, Any], count: int) -> list[int]:
        """The processes that have saved what this one loads under "rank"."""
        return sorted({rank for rank in _sources(state["layout"]).values() if rank is not None})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (found := state.get("format")) != STATE_FORMAT:
            raise NewerFormatError(
                f"The state of the training has format {found}; this version of trainwright reads {STATE_FORMAT}."
                " Another version has written it: use that one, or start a new run with the weights only."
            )
        for name, there in state["classes"].items():
            if (here := self._classes.get(name)) not in (None, there):
                raise ConfigError(
                    f"The checkpoint has the state of {name} {there}; this run has {here}, which cannot load it."
                    f" Use {there}, or start a new run with the weights only."
                )
        self._compare_settings(state["settings"], state["options"])
        self._loaded, self._outside = state, state.get("outside", {})
        with suppress(ConfigError):  # the optimizer or loss may be set later; restore() raises it
            self._load_outside()
        self._trainer.start_iter = self._trainer.iterations_done = state["iterations_done"]
        self._trainer.called_hooks = state.get("called_hooks")
        self._trainer.unfinished_stop = state.get("unfinished_stop")
        self._trainer.samples_done = state["consumed_samples"]

    def _settings(self) -> dict[str, Any]:
        run = getattr(self._trainer, "run", None)  # None: a loop of the user's own
        return {} if run is None else run.recorded_settings()

    def _compare_settings(self, settings: dict[str, Any], options: dict[str, Any]) -> None:
        """Warn of settings that differ from those of the checkpoint, and use those that its states keep."""
        now, kept = {**self._settings(), **self._options}, differences(options, self._options)
        effects = dict.fromkeys(kept, KEPT)
        if settings:
            effects |= self._trainer.run.resume_with(settings)  # type: ignore[attr-defined]
        self._options = {**self._options, **{name: options[name] for name in kept if name in options}}
        log_changes({**settings, **options}, now, effects)

    def continue_here(self) -> bool:
        """Continue after an earlier ``train()`` as a resume from its checkpoint; returns whether steps are left."""
        is_over = self._trainer.start_iter >= self._trainer.max_iter
        if self._loaded is not None or (is_over and self._trainer.is_ended):
            return False
        state = self.state_dict()
        self.load_state_dict({**state, "rank": {get_rank(): state["rank"]}})
        return True

    @property
    def is_end_pending(self) -> bool:
        """Whether the loaded state was saved before the end of its run was complete."""
        return self._loaded is not None and not self._loaded.get("is_ended", False)

    def restore(self, *, in_place: bool = True) -> None:
        """Restore, for a resumed training, the state that only applies from its first step on.

        ``in_place``: the run continues in its own folder, whose metrics files are completed.
        """
        state, self._loaded = self._loaded, None
        if state is None:
            return
        self._load_outside()
        here, model, owner = extra_optimizers(self._trainer), self._trained()[0], type(self._trainer).__name__
        load_extra_state(state.get("optimizers", {}), here, model, owner)
        rows = {what: state["rank"].get(rank, {}) for what, rank in _sources(state["layout"]).items()}
        own = rows["hooks"].get("hooks", {})
        self._restore_hooks(
            [{**entry, "state": own.get(str(n), entry["state"])} for n, entry in enumerate(state["hooks"])]
        )
        if (position := rows["data"]["data"]) is not None:
            self._part("batches").load_state(position)
        if get_world_size() == 1:
            load_gradients(state.get("gradients", {}), *self._trained())
        self._trainer.storage.load_state_dict(state["metrics"])
        if state.get("is_ended", False) and self._trainer.start_iter < self._trainer.max_iter:
            is_evaluated = self._move_final_values()
            for hook in self._trainer.hooks if in_place else ():
                hook.before_longer_run(is_evaluated=is_evaluated)
        if rows["random"]:
            set_random_state(rows["random"]["random"])

    @property
    def is_complete(self) -> bool:
        """Whether no update is under way, also none that has failed."""
        return not self._trainer.has_failed or self._trainer.iterations_done > self._trainer.iter

    @property
    def _is_in_step(self) -> bool:
        return self._trainer.is_training and not self._trainer.has_failed

    def _gradients(self) -> dict[str, Any]:
        """Those that a step of the user's own leaves to a later one."""
        if not self.is_complete:
            return {}
        there = open_gradients(*self._trained())
        saved = {name: one for name, one in there.items() if get_world_size() == 1 and one.layout is torch.strided}
        if len(saved) < len(there) and not self._has_warned:
            self._has_warned = True
            name = next(name for name in there if name not in saved)
            logger.warning(
                "The step leaves gradients to later ones (%s), and a checkpoint has them in a run of one process only,"
                " where they are dense: after a resume the next update lacks them, unless it sets them to None first.",
                name,
            )
        return saved

    def _trained(self) -> tuple[Any, Any, Any]:
        trainer: Any = self._trainer
        return trainer.model, trainer.optimizer, getattr(trainer, "loss", None)

    def _part(self, name: str) -> Any:
        """A part of the run, or of a loop of the user's own; None: it has none."""
        return getattr(getattr(self._trainer, "run", self._trainer), name, None)

    def _position(self) -> dict[str, Any] | None:
        """That of this rank in a loader with a state, after the latest step."""
        batches = self._part("batches")
        # Before the first step a loader of torchdata would draw its order now.
        return batches.state() if isinstance(batches, Batches) and self._trainer.iterations_done else None

    def _load_outside(self) -> None:
        if self._outside is not None:
            load_outside_state(self._outside, *self._trained())
            self._outside = None

    def _move_final_values(self) -> bool:
        """Move the values of a shorter run's end, such as its final evaluation, to its last iteration.

        A longer run records them there. Returns whether there were any.
        """
        storage = self._trainer.storage
        first = self._trainer.start_iter
        moved = [history.move_last(first, first - 1) for history in storage.histories().values()]
        if any(moved):
            storage.first_unwritten = min(storage.first_unwritten, first - 1)
            storage.last_row = storage.written_before if storage.written == first - 1 else storage.written
        return any(moved)

    def _restore_hooks(self, saved: list[dict[str, Any]]) -> None:
        """Load each hook's state: the n-th hook of a class gets the n-th saved state of that class."""
        unused, fresh = list(saved), []
        for hook in self._trainer.hooks:
            if not isinstance(hook, Stateful) or hook.is_idle:
                continue
            name = type(hook).__name__
            entry = next((entry for entry in unused if entry["class"] == name), None)
            if entry is None:
                fresh.append(name)
                continue
            unused.remove(entry)
            hook.load_state_dict(entry["state"])
        if unused or fresh:
            logger.warning(
                "Resumed with other hooks than the checkpoint's. Saved state that is not used: %s. Hooks without saved"
                " state: %s.", ", ".join(entry["class"] for entry in unused) or "none", ", ".join(fresh) or "none",
            )  # fmt: skip


class TrainerState(TrainingState):
    """The run's position in steps: ``global_step`` of the run, ``epoch`` (from 1), ``epoch_step`` in the epoch.

    A running step is already counted. A checkpoint also stores the state of the base class.
    """

    def __init__(self, trainer: TrainerBase, *, is_elastic: bool) -> None:
        """``is_elastic``: a checkpoint of other sizes of batches, with the same samples per update, may be loaded."""
        super().__init__(trainer)
        self.plan, self._is_elastic = NO_STEPS, is_elastic
        self._mean_loss = RunningMean()
        self.global_step = 0
        self.is_opening = False  # whether the loader of an epoch that begins is created
        self.step_before = 0  # global_step before the latest update

    def mean_loss(self) -> float:
        """The mean of the updates' losses since the run started; NaN before the first."""
        return mean_so_far(self._trainer.storage, "total_loss", self._mean_loss)

    @property
    def epoch(self) -> int:
        """The epoch of the latest step, 1 before the first; while a loader is created, the epoch that it is for."""
        return self.plan.epoch_at(max(0, self.global_step - (not self.is_opening)))[0] + 1

    @property
    def epoch_step(self) -> int:
        """Steps of this epoch."""
        return self.global_step - self.plan.end_of_epoch(self.epoch - 1)

    @property
    def updates_done(self) -> int:
        """The number of updates in ``global_step`` steps."""
        return self.plan.updates(self.global_step)

    def has_passed(self, period: int) -> bool:
        """Whether the latest update has reached or crossed a multiple of ``period`` steps."""
        return self.num_passed(period) > 0

    def num_passed(self, period: int) -> int:
        """The number of multiples of ``period`` steps that the latest update has reached or crossed."""
        return self.global_step // period - self.step_before // period

    @property
    def is_within_update(self) -> bool:
        """Whether a micro-batch of an update has been read that is not complete."""
        return self.updates_done != self._trainer.iterations_done

    @property
    def is_complete(self) -> bool:
        return super().is_complete and not self.is_within_update

    def is_epoch_end(self) -> bool:
        """Whether the latest step is the last of its epoch."""
        return (self.global_step - self.plan.start.step) % self.plan.steps_per_epoch == 0

    def passes(self, period: Callable[[], int], otherwise: Recurring = NEVER) -> Recurring:
        """Over where :meth:`has_passed`; ``otherwise``, if the period is 0."""
        return Recurring(
            lambda: self.has_passed(period()) if period() else otherwise(),
            lambda done: self.plan.next_passing(period(), done) if period() else otherwise.next_end(done),
        )

    def epoch_ends(self, every: Callable[[], int] = lambda: 1) -> Recurring:
        """Over at the end of each ``every`` epochs; 0: never."""
        return Recurring(
            lambda: bool(every()) and self.is_epoch_end() and self.epoch % every() == 0,
            lambda done: self.plan.next_epoch_end(every(), done) if every() else sys.maxsize,
        )

    def epoch_at(self, steps: int) -> tuple[int, int]:
        """As that of the plan; of the current epoch without a further call, since callbacks ask in each step."""
        start, length = self.plan.start, self.plan.steps_per_epoch
        if steps < start.step:
            return self.plan.epoch_at(steps)
        epochs, rest = divmod(steps - start.step, length)
        return start.epoch + epochs, steps - rest

    def __repr__(self) -> str:
        return f"TrainerState(global_step={self.global_step}, epoch={self.epoch}, epoch_step={self.epoch_step})"

    def state_dict(self) -> dict[str, Any]:
        if not self.is_within_update:
            return self._state()
        step, self.global_step = self.global_step, self.plan.steps(self._trainer.iterations_done)
        try:  # the micro-batches of the update are read again
            return {name: part for name, part in self._state().items() if name != "gradients"}
        finally:
            self.global_step = step

    def _state(self) -> dict[str, Any]:
        self.mean_loss()  # adds the newest values
        return {
            **super().state_dict(),
            "consumed_samples": self.plan.samples(self.global_step),
            "iterations_done": self.updates_done,
            "global_step": self.global_step,
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "steps_per_epoch": self.plan.steps_per_epoch,
            "gradient_accumulation_steps": self.plan.windows.setting,
            "batch_size": self.plan.batch_size,
            "samples_per_epoch": self.plan.samples_per_epoch,
            "epochs": self.plan.lengths(),
            "mean_loss": self._mean_loss.state_dict(),
            "is_loss_of_model": self._part("steps").loss.source.is_model,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        plan, step, state = self._plan_of(state)
        if faults := _faults(state, plan, step):
            raise ConfigError(
                f"The run cannot be resumed: {'; '.join(faults)}. Use the same data, gradient_accumulation_steps and"
                " batch_size (with another number of processes, the same total batch size, or"
                " TrainingConfig(elastic=True), which derives the accumulation),"
                " or start a new run with TrainingConfig.init_weights_from."
            )
        super().load_state_dict(state)
        self._mean_loss.load_state_dict(state["mean_loss"])
        self._part("steps").loss.source.is_model = state.get("is_loss_of_model")
        self.global_step = step
        self.step_before = plan.steps(max(0, plan.updates(step) - 1))
        if plan != self.plan:
            self.plan = plan
            self._trainer.plan_end(plan.num_updates)

    def _plan_of(self, state: dict[str, Any]) -> tuple[StepPlan, int, dict[str, Any]]:
        """The plan that continues ``state``, the steps done by it, and the state by its sizes of batches."""
        plan, step, epochs = self.plan, state["global_step"], state.get("epochs", [])
        if _has_sizes_of(plan, state) and plan.has_epochs and epochs:
            # The length of the next epoch is asked when it is opened, perhaps by a callback that changes it.
            if len(epochs) > 1 or state["epoch_step"] == state["steps_per_epoch"]:
                plan = plan.with_lengths(epochs)
        elif (
            self._is_elastic
            and len(epochs) < 2
            and plan.batch_size  # 0: unknown
            and _samples_per_update(state) == plan.batch_size * plan.windows.at(0)
        ):
            step = plan.steps(state["iterations_done"])
            here: dict[str, Any] = {
                "gradient_accumulation_steps": plan.windows.setting,
                "steps_per_epoch": plan.steps_per_epoch,
            }
            state = {**state, **here}
        return plan, step, state


class PlannedEpochs:
    """Where the epochs of a run are, by the plan that it has then."""

    def __init__(self, state: TrainerState) -> None:
        self._state = state

    def at(self, iteration: int) -> int:
        plan = self._state.plan
        return plan.epoch_at(plan.steps(iteration))[0]

    def first(self, epoch: int) -> int:
        plan = self._state.plan
        return plan.updates(plan.end_of_epoch(epoch))


def _has_sizes_of(plan: StepPlan, state: Mapping[str, Any]) -> bool:
    sizes = state["gradient_accumulation_steps"], state.get("batch_size", 0)
    return sizes == (plan.windows.setting, plan.batch_size)


def _samples_per_update(state: Mapping[str, Any]) -> int:
    """Those of a checkpoint's run; 0: it had a schedule of them, or they are unknown."""
    steps = state["gradient_accumulation_steps"]
    return state.get("batch_size", 0) * steps if isinstance(steps, int) else 0


def _faults(state: Mapping[str, Any], plan: StepPlan, step: int) -> list[str]:
    """Why a run of ``plan`` cannot continue ``state``, of which ``step`` steps are done: the first kind of fault."""
    now: dict[str, Any] = {"steps_per_epoch": plan.steps_per_epoch} if plan.has_epochs else {}
    now["gradient_accumulation_steps"] = plan.windows.setting
    faults = [f"{name} was {state[name]} and is {value} now" for name, value in now.items() if state[name] != value]
    if faults:
        return [*_causes(state, plan), *faults] if plan.has_epochs else faults
    samples = state.get("samples_per_epoch")
    is_planned = _has_sizes_of(plan, state) and plan.has_epochs
    if is_planned and samples not in (None, 0, plan.samples_per_epoch):
        # Another order within an epoch that has begun.
        return [f"the samples of an epoch were {samples} and are {plan.samples_per_epoch} now"]
    if step < plan.total_steps and plan.steps(plan.updates(step)) != step:
        return [f"max_steps ended it within an accumulation window, at step {step}"]
    taken, planned = state["consumed_samples"], plan.samples(step)
    if taken != planned:
        return [f"its {state['global_step']} steps took {taken} samples, but would take {planned} now"]
    return []


def _causes(state: Mapping[str, Any], plan: StepPlan) -> list[str]:
    causes = {"batch_size": "the batch of all processes", "samples_per_epoch": "the number of samples of an epoch"}
    known = [(what, state.get(name), getattr(plan, name)) for name, what in causes.items()]
    return [f"{what} was {then} and is {now} now" for what, then, now in known if then not in (None, now)]


def _layout() -> list[int]:
    """The sizes that determine what each rank computes."""
    mesh = mesh_in_use()
    layout = None if mesh is None else mesh.layout
    if layout is None:
        return [get_world_size()]
    context = [layout.context] if layout.context > 1 else []
    return [get_world_size(), layout.pipeline, layout.replicate, layout.tensor, *context]


def _sources(layout: list[int]) -> dict[str, int | None]:
    """The rank among those of ``layout`` whose random state, place in the data and hooks this process continues with.

    In another layout all tensor-parallel ranks of a place get the same random state: they must draw the same numbers.
    A place that was not there keeps its seed. With another number of shares there is no exact place in the data.
    """
    if layout == _layout():
        return dict.fromkeys(("random", "data", "hooks"), get_rank())
    world_size, stages, _, parts, context = (*layout, 1, 1, 1, 1)[:5]
    places = world_size // (stages * parts)
    is_same = places == get_data_parallel_size() * context
    return {
        "random": get_averaging_rank() * parts if get_averaging_rank() < places else None,
        "data": get_data_parallel_rank() * context * parts if is_same else 0,
        "hooks": get_rank() if world_size == get_world_size() else None,
    }


def _by_name(kind: str, part: Any) -> dict[str, Any]:
    return {f"{kind}_{name}": one for name, one in part.items()} if isinstance(part, Mapping) else {kind: part}
