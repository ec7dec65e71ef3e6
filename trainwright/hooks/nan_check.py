"""Detect losses, gradients and weights that are NaN or infinite before anything is saved."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.optim import LBFGS

from trainwright._torch_compat.tensor_chunks import checksum
from trainwright.base.dist import all_gather_object, is_any, is_main_process
from trainwright.base.errors import ConfigError, UserError
from trainwright.events.smoothing import HistoryBuffer, median
from trainwright.hooks.base import HookBase
from trainwright.hooks.due import Condition, Moment, Period
from trainwright.optim.named import each_optimizer, parameters_of
from trainwright.parallel.mesh import current_mesh

logger = logging.getLogger("trainwright.hooks")

NonFinitePolicy: TypeAlias = Literal["stop", "skip", "warn"]
Found: TypeAlias = dict[int, dict[str, float]]  # by iteration, then by name

_MAX_SPIKES = 10  # in a training
WINDOW, MIN_VALUES = 100, 30  # values before a spike
_TIMES, _DEVIATIONS = 3.0, 20.0

_HELP = (
    "Try a smaller learning rate or gradient clipping, and check the data of that iteration; non_finite='skip'"
    " skips such updates. A resume keeps the learning rate: start a new run with a smaller one in another output_dir,"
    " from the weights of a checkpoint (init_weights_from; train.load_weight in a config file)."
    " Checkpoints are checked before they are saved, so the newest one, if there is one, is valid."
)
_COUNT = (
    "If all labels of that update are ignored, let the model return 'num_tokens', how many labels count: a batch of a"
    " stream or of a loader of your own cannot be read again to count them."
)


_MANY_ITERATIONS = 20  # a parameter may take part in some updates only
_MANY_UNCHANGED = 100  # an optimizer of the user's own may step seldom


class NonFiniteError(UserError, FloatingPointError):
    """A loss, a gradient or a weight is NaN or infinite. The exit code of the command line is 1."""

    exit_code = 1


class FiniteCheck(HookBase):
    """Check every training loss and gradient norm since the last check for non-finite values.

    Checks every ``period`` iterations, after the last one, and before each save: the stored values with
    ``smoothing_hint=True`` (so not the results of evaluations) whose name contains "loss" or is ``grad_norm``. Reading
    them is the one transfer per log period that the writers need anyway. All ranks check, and share what they find.

    ``policy``:

    * "stop": raise :class:`NonFiniteError` on every rank. Before a save the trainable parameters are checked too;
      buffers are not, since some may hold infinity.
    * "skip": report the updates that the trainer has skipped (``skipped_update``). Parameters are checked as above.
    * "warn": warn at the start of a sequence of such iterations.

    A loss of NaN is 0 / 0, and no fault, in an update whose labels are all ignored: such iterations are left out, with
    one warning, if no parameter is NaN or infinite.

    A loss far above those before it is reported as a warning (:func:`largest_spike`), and as the text
    ``loss_spikes`` of the storage; after ten of them no more. Both messages name the samples of the update, if the
    trainer knows them.

    The first check that finds the model in evaluation mode warns: without dropout, and with fixed running statistics.
    Trainers set training mode before the first step, so this finds a ``model.eval()`` in a user's step or callback.
    One warning, after 20 iterations or at the end, names trainable parameters that had no gradient in any of them.
    """

    slot = "check"
    ends_run = True

    def __init__(
        self,
        period: Period = 20,
        policy: NonFinitePolicy = "stop",
    ) -> None:
        if policy not in get_args(NonFinitePolicy):
            raise ConfigError(f"FiniteCheck.policy: got {policy!r}; it must be 'stop', 'skip' or 'warn'.")
        self._policy = policy
        self._is_due = Condition(period)
        self.due = (self._is_due, Moment.LAST)
        self._next = 0  # the first unchecked iteration
        self._last_bad = -2
        self._has_warned_of_mode = self._has_looked_for_gradients = False
        self._always_trainable: set[int] = set()
        self._trainable_before: set[int] = set()
        self._unchanged: dict[int, tuple[int, int]] = {}  # parameters that no optimizer holds: a sum, and since when
        self._num_spikes = 0
        self._without_targets: set[int] = set()  # the iterations that are left out

    def before_train(self) -> None:
        self._next = self.trainer.start_iter
        model = getattr(self.trainer, "model", None)
        trainable = () if model is None else model.parameters()
        self._trainable_before = {id(parameter) for parameter in trainable if parameter.requires_grad}
        # One that is unfrozen later may have had no update when they are looked at.
        self._always_trainable = set() if self._has_looked_for_gradients else {*self._trainable_before}

    def after_step(self) -> None:
        if self._is_due(self.trainer) or self.trainer.iter + 1 == self.trainer.max_iter:
            self.trainer.storage.reduce()  # here, since every process has this hook
            self._find_spikes()
            self._check_metrics()
            self._check_mode()
            self._check_unfrozen()
            self._check_gradients()

    def before_save(self) -> None:
        self.check()

    def check(self) -> None:
        """Check now what this rank has. Call it on all ranks, as a save does, which raises the error on all of them.

        Raises:
            NonFiniteError: a value is not finite and the policy is "stop", or a parameter is not finite and the policy
                is not "warn".
        """
        self.trainer.storage.reduce()
        if self._policy == "stop":
            self._stop_for(self._found_here())
        else:  # warns, of what all ranks have
            self._check_metrics()
        if self._policy != "warn" and (names := self._non_finite_parameters()):
            raise NonFiniteError(
                f"After iteration {self.trainer.iterations_done}: {_listed(names)} not finite, though every"
                f" checked loss was. Nothing was saved. {_HELP}"
            )

    def _non_finite_parameters(self) -> list[str]:
        model = getattr(self.trainer, "model", None)
        return [] if model is None else non_finite_parameters(model)

    def _stop_for(self, found: Found) -> None:
        if found:
            first = min(found)
            names = self._non_finite_parameters()
            now = f"Now {_listed(names)} not finite." if names else "All parameters are still finite."
            if not names and _is_mean(found[first]) and self._cannot_count(first):
                now += f" {_COUNT}"
            if bad := self._of_batch("non_finite_fields", first):
                place, fields = bad
                which = "first batch" if place == 1 else f"micro-batch {place}"
                now = (
                    f"Its {which} has NaN or infinity already, in {_few(fields)}: unless that is meant, as in"
                    f" a mask, look for a division by 0, a logarithm of 0 and missing values in the data. {now}"
                )
            raise NonFiniteError(f"{_iterations(found)}: {_values(found)}. {now}{self._samples(first)} {_HELP}")

    def _check_metrics(self) -> None:
        found = self._found_on_any_rank()
        if self._policy == "stop":
            self._stop_for(found)
        if found:
            skipped = {iteration for value, iteration in self._values_of("skipped_update") if value}
            self._warn({iteration: found[iteration] for iteration in found if iteration in skipped}, is_skipped=True)
            self._warn({iteration: found[iteration] for iteration in found if iteration not in skipped})
            self._last_bad = max(found)
        self._next = self.trainer.iterations_done

    def _found_here(self) -> Found:
        here: Found = {}
        hints = self.trainer.storage.smoothing_hints()
        for name in hints:
            if hints[name] and ("loss" in name or name == "grad_norm"):
                for value, iteration in self._values_of(name):
                    if not math.isfinite(value):
                        here.setdefault(iteration, {})[name] = value
        return here if self._policy == "skip" else self._with_targets(here)

    def _with_targets(self, found: Found) -> Found:
        """Those of ``found`` that are not the mean over no targets. After the first one all are kept."""
        new: list[int] = []
        for iteration, values in sorted(found.items()):
            has_none = _is_mean(values) and self._of_batch("num_targets", iteration) == 0
            if iteration not in self._without_targets and not has_none:
                break
            new += [] if iteration in self._without_targets else [iteration]
        if new and self._non_finite_parameters():
            return found
        if new and not self._without_targets:
            logger.warning(
                "%s: the loss is nan, as none of the labels counts: all are ignored. The gradient is 0, and the"
                " training continues; further such updates are not named.%s", _iterations(new), self._samples(new[0]),
            )  # fmt: skip
        self._without_targets.update(new)
        return {iteration: values for iteration, values in found.items() if iteration not in self._without_targets}

    def _of_batch(self, method: str, iteration: int) -> Any:
        """What a method of the run finds in the batch of an iteration; None: unknown."""
        run = getattr(self.trainer, "run", None)
        try:
            return None if run is None else getattr(run, method)(iteration + 1)
        except Exception as error:  # of the data set's own code: the message is about something else
            logger.debug("The batch of iteration %d could not be read again: %r", iteration + 1, error)
            return None

    def _cannot_count(self, iteration: int) -> bool:
        """Whether the run would count the targets of an update, and cannot read its batch again."""
        run = getattr(self.trainer, "run", None)
        is_of_one = run is not None and not run.update.is_weighed
        return (
            is_of_one
            and self._of_batch("num_targets", iteration) is None
            and self.trainer.sample_ids(iteration + 1) is None
        )

    def _found_on_any_rank(self) -> Found:
        here = self._found_here()
        if not is_any(bool(here)):
            return here
        together: Found = {}
        for found in all_gather_object(here):
            for iteration, values in found.items():
                together[iteration] = {**values, **together.get(iteration, {})}
        return together

    def _values_of(self, name: str) -> list[tuple[float, int]]:
        history = self.trainer.storage.histories().get(name)
        return [] if history is None else history.values_since(self._next)

    def _warn(self, found: Found, *, is_skipped: bool = False) -> None:
        # Of those that are not skipped, the start of a sequence.
        if found and (is_skipped or {iteration - 1 for iteration in found} - found.keys() - {self._last_bad}):
            then = "Skipped: no weight was changed."
            then = then if is_skipped else "Training continues, with weights that may be invalid."
            logger.warning("%s: %s. %s%s", _iterations(found), _values(found), then, self._samples(min(found)))

    def _find_spikes(self) -> None:
        history = self.trainer.storage.histories().get("total_loss")
        spike = None if history is None or self._num_spikes > _MAX_SPIKES else largest_spike(history, self._next)
        if spike is None or not is_main_process():
            return
        self._num_spikes += 1
        if self._num_spikes > _MAX_SPIKES:
            logger.warning("More losses are far above those before them; they are no longer reported.")
            return
        more = f" It is the largest of {spike.count} since the last check." if spike.count > 1 else ""
        text = f"Update {spike.iteration + 1}: total_loss is {spike}.{more}{self._samples(spike.iteration)}"
        logger.warning("%s", text)
        self.trainer.storage.put_text("loss_spikes", text)

    def _samples(self, iteration: int) -> str:
        """A sentence about the samples of an iteration, after a space; empty if they are unknown."""
        describe = getattr(self.trainer, "described_samples", None)
        text = "" if describe is None else describe(iteration + 1)
        return f" {text}" if text else ""

    def _check_mode(self) -> None:
        model = getattr(self.trainer, "model", None)
        if self._has_warned_of_mode or getattr(model, "training", True):
            return
        self._has_warned_of_mode = True
        logger.warning(
            "After iteration %d: %s is trained in evaluation mode (no dropout, fixed running statistics)."
            " Call model.train() before the training, and after every model.eval() of your own.",
            self.trainer.iter + 1, type(model).__name__,
        )  # fmt: skip

    def _check_unfrozen(self) -> None:
        """Warn of parameters that need gradients only since a later iteration, and that nothing changes."""
        model, optimizer = getattr(self.trainer, "model", None), getattr(self.trainer, "optimizer", None)
        if model is None or optimizer is None or current_mesh() is not None:
            return
        trainable = {n: p for n, p in model.named_parameters() if p.grad is not None and p.requires_grad}
        late = {n: p for n, p in trainable.items() if id(p) not in self._trainable_before}
        held = {id(parameter) for parameter in parameters_of(optimizer)} if late else set[int]()
        late = {n: p for n, p in late.items() if id(p) not in held}
        sums = {name: checksum(p) for name, p in late.items()}
        before, number = self._unchanged, self.trainer.iter + 1
        since = {n: before[id(p)][1] if before.get(id(p), (None,))[0] == sums[n] else number for n, p in late.items()}
        self._unchanged = {id(p): (sums[name], since[name]) for name, p in late.items()}
        if names := [name for name, first in since.items() if number - first >= _MANY_UNCHANGED]:
            self._trainable_before |= self._unchanged.keys()
            logger.warning(
                "After iteration %d: %s trainable since a later iteration than the first, and no optimizer changes %s."
                " The setting unfreeze trains frozen layers later; new layers belong in __init__ of the model.",
                number, _listed(names), "it" if len(names) == 1 else "them",
            )  # fmt: skip

    def _check_gradients(self) -> None:
        number, is_last = self.trainer.iter + 1, self.trainer.iter + 1 == self.trainer.max_iter
        model, optimizer = getattr(self.trainer, "model", None), getattr(self.trainer, "optimizer", None)
        if self._has_looked_for_gradients or model is None or not (is_last or number >= _MANY_ITERATIONS):
            return
        self._has_looked_for_gradients = True
        untouched = parameters_without_gradient(model, optimizer)
        if names := [name for name, parameter in untouched.items() if id(parameter) in self._always_trainable]:
            logger.warning(
                "After iteration %d: %s without a gradient in every update: no loss so far depends on %s. Look for"
                " detach(), torch.no_grad() and argmax() in the forward pass, or set requires_grad=False.",
                number, _listed(names), "it" if len(names) == 1 else "them",
            )  # fmt: skip


def parameters_without_gradient(model: nn.Module, optimizer: Any) -> dict[str, nn.Parameter]:
    """The trainable parameters, by name, that an optimizer of torch holds and has never changed.

    An optimizer of torch has a state for each parameter that had a gradient. Empty where that says nothing: without
    states (SGD without momentum), with LBFGS, and where each process has the states of a part.
    """
    if current_mesh() is not None:
        return {}
    untouched: set[int] = set()
    for one in each_optimizer(optimizer) if optimizer is not None else ():
        if type(one).__module__.startswith("torch.optim.") and not isinstance(one, LBFGS) and one.state:
            untouched |= {id(p) for p in parameters_of(one) if p.requires_grad and p not in one.state}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in untouched}


def _is_mean(values: dict[str, float]) -> bool:
    """Whether they may be means over nothing, 0 / 0, whose gradient is 0."""
    return "grad_norm" not in values and all(map(math.isnan, values.values()))


def non_finite_parameters(model: nn.Module) -> list[str]:
    """The names of the trainable parameters that contain NaN or infinity.

    Costs one read of the parameters and one transfer per device; one per parameter only if a value is not finite.
    """
    trainable = [(name, parameter.detach()) for name, parameter in model.named_parameters() if parameter.requires_grad]
    by_kind: dict[tuple[torch.device, torch.dtype, Any], list[Tensor]] = {}
    for _, parameter in trainable:
        mesh = getattr(parameter, "device_mesh", None)  # experts may be divided among other processes than the rest
        by_kind.setdefault((parameter.device, parameter.dtype, mesh), []).append(parameter)
    for (_, dtype, _), tensors in by_kind.items():
        # On a CPU as fast as a memory read (10 ms for 100 million values); isfinite().all() takes 16 times as long.
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        norms = [torch.linalg.vector_norm(tensor, dtype=wide) for tensor in tensors]
        if not torch.stack(norms).isfinite().all():  # a norm may also overflow, so each parameter is checked
            return [name for name, parameter in trainable if not parameter.isfinite().all()]
    return []


def _iterations(found: Iterable[int]) -> str:
    """``Iteration 3``, or ``Iterations 3, 5-8``, counted from 1."""
    rows = [
        [iteration + 1 for _, iteration in group]
        for _, group in groupby(enumerate(sorted(found)), lambda pair: pair[1] - pair[0])
    ]
    text = ", ".join(f"{row[0]}-{row[-1]}" if len(row) > 1 else str(row[0]) for row in rows)
    return f"Iterations {text}" if len(rows) > 1 or len(rows[0]) > 1 else f"Iteration {text}"


def _values(found: Found) -> str:
    """Of the first iteration."""
    first = min(found)
    values = ", ".join(f"{name} is {value}" for name, value in found[first].items())
    return values + (f" in iteration {first + 1}" if len(found) > 1 else "")


def _listed(names: list[str]) -> str:
    return f"{len(names)} parameter{'s' if len(names) > 1 else ''} ({_few(names)}) {'are' if len(names) > 1 else 'is'}"


def _few(names: list[str], at_most: int = 3) -> str:
    return ", ".join(names[:at_most]) + (f" and {len(names) - at_most} more" if len(names) > at_most else "")


@dataclass(frozen=True, slots=True)
class Spike:
    """The largest of ``count`` losses above the limit; ``typical`` is the median of the ``window`` values before."""

    iteration: int
    value: float
    typical: float
    window: int
    count: int

    def __str__(self) -> str:
        times = f"{self.value / self.typical:.3g} times " if self.typical > 0 else ""
        against = f"the median of the last {self.window}" + ("" if times else f" is {self.typical:.4g}")
        return f"{self.value:.4g}, {times}{against}"


def largest_spike(history: HistoryBuffer, first: int) -> Spike | None:
    """The largest of the values from iteration ``first`` on that is far above the 100 values before ``first``.

    Far above: above three times their median, and more than 20 standard deviations away from it, estimated as 1.4826
    times the median absolute deviation (Rousseeuw and Croux 1993), so that earlier spikes do not count. None, too, with
    fewer than 30 values before.
    """
    new = history.values_since(first)
    before = [value for value in history.last_values(len(new) + WINDOW)[: -len(new)] if math.isfinite(value)]
    if len(before) < MIN_VALUES:
        return None
    typical = median(before)
    deviation = 1.4826 * median([abs(value - typical) for value in before])
    limit = typical + max((_TIMES - 1) * abs(typical), _DEVIATIONS * deviation)
    found = [(value, at) for value, at in new if math.isfinite(value) and value > limit > typical]
    if not found:
        return None
    value, iteration = max(found)
    return Spike(iteration, value, typical, len(before), len(found))
