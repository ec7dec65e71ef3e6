"""Checks of the training step: it runs, it trains every parameter, it can learn."""

import math
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainwright.engine.out_of_memory import byte_size
from trainwright.engine.run import Run
from trainwright.inspect.check.finding import Finding, Skipped, passed, problem, undecided
from trainwright.inspect.check.observed import NUM_UPDATES, Observed, SetUp, at_initial_values, depends_on_mode
from trainwright.inspect.report.text import duration
from trainwright.models.adapters import is_peft_model
from trainwright.optim.named import each_optimizer

_MOST_RATES = 20_000  # updates of a simulated schedule
_SMALL_RATE = 0.0099  # of the highest; two steps by 0.1 are not below it
_GROWTH = 7  # times the first loss


def check_steps(setup: SetUp) -> Finding:
    """A few updates and an evaluation run, and the losses are finite."""
    seen = setup.observed
    wrong = [number for number, loss in enumerate(seen.losses, start=1) if not math.isfinite(loss)]
    values = {"updates": len(seen.seconds), "losses": seen.losses}
    if wrong:
        return problem(
            f"The loss is {seen.losses[wrong[0] - 1]} in update {wrong[0]}.",
            "Lower the learning rate, clip the gradients, or look for a division by zero or log(0).", values,
        )  # fmt: skip
    if _grows(seen.losses) and not _grows(_losses_at_small_rate(setup)):  # a contrastive loss grows at any rate
        text = f"The loss grows from {seen.losses[0]:.4g} to {seen.losses[-1]:.4g} in {len(seen.losses)} updates,"
        text += " and does not with a thousandth of the learning rate."
        advice = "Lower the learning rate, add warm-up, or clip the gradients."
        return undecided(text, advice, values) if setup.has_own_step else problem(text, advice, values)
    if not seen.num_steps:
        return problem(
            f"No optimizer has made a step in {len(seen.seconds)} updates.",
            "Your step must call self.backward(loss) and self.step(optimizer).", values,
        )  # fmt: skip
    loss = f", loss {seen.losses[0]:.4g} to {seen.losses[-1]:.4g}" if seen.losses else ""
    return passed(f"{len(seen.seconds)} updates{loss}.", values=values)


def _grows(losses: list[float]) -> bool:
    return len(losses) > 5 and min(losses[-3:]) > _GROWTH * losses[0] > 0


def _losses_at_small_rate(setup: SetUp) -> list[float]:
    new = setup.make(constant_rate=True)
    for group in (group for one in new.optimizers for group in one.param_groups if "lr" in group):
        group["lr"] = 1e-3 * group["lr"]
    losses: list[float] = []
    new.train(NUM_UPDATES, after=lambda: losses.append(new.step_loss() or math.nan), needed=1)
    return losses


def check_learning_rate(setup: SetUp) -> Finding:
    """The learning rate is not zero, now and over the schedule of the run."""
    new = setup.make()
    groups = [group for one in new.optimizers for group in one.param_groups]
    if not all("lr" in group for group in groups):
        raise Skipped("the optimizer has no learning rate")
    base = [float(group.get("initial_lr", group["lr"])) for group in groups]
    rates = _rates(new.run, groups)
    highest = [max(row) for row in rates]
    zero = [number for number, rate in enumerate(highest) if rate == 0]
    values = {"highest": highest, "first": [row[0] for row in rates], "last": [row[-1] for row in rates]}
    if len(zero) == len(groups):
        cause = "the schedule makes it 0" if any(base) else "it is set to 0"
        return problem(
            f"The learning rate is 0 in every update: {cause}.",
            "Set a learning rate above 0, and a schedule that reaches it within the run.", values,
        )  # fmt: skip
    if fault := _fault_of_schedule(rates[0], base[0]):
        return problem(*fault, values)
    note = f" Groups with a rate of 0: {', '.join(map(str, zero))}." if zero else ""
    text = f"{rates[0][0]:.3g} at the start, at most {max(highest):.3g}, {rates[0][-1]:.3g} at the end.{note}"
    return passed(text, values=values)


def _fault_of_schedule(rates: list[float], base: float) -> tuple[str, str] | None:
    """What is wrong with the rates of a run's schedule, and what mends it."""
    below = [sum(rate <= least for rate in rates) / len(rates) for least in (0, _SMALL_RATE * max(rates))]
    if below[1] > 0.5 and len(rates) > 2:
        level, share = ("0", below[0]) if below[0] > 0.5 else ("below 1 % of its highest value", below[1])
        text = f"The learning rate is {level} in {share:.0%} of the {len(rates)} steps of the schedule."
        return text, "Give the schedule the length of the run."
    if len(rates) > 4 and rates[-2] < rates[-1] < base and all(a <= b for a, b in pairwise(rates)):
        text = (
            f"The learning rate rises in all {len(rates)} steps of the schedule and ends at {rates[-1]:.3g}, below"
            f" {base:.3g}: the warm-up is longer than the run."
        )
        return text, "Shorten the warm-up."
    return None


def _rates(run: Run, groups: list[dict[str, Any]]) -> list[list[float]]:
    """The learning rates of each group in the steps of its schedule."""
    rates = [[float(group["lr"])] for group in groups]
    simulated = [one for one in run.schedules() if not isinstance(one, ReduceLROnPlateau)]
    steps = run.schedule_length(simulated[0]) if simulated else 0
    for _ in range(min(steps, _MOST_RATES) - 1):
        for schedule in simulated:
            schedule.step()
        for row, group in zip(rates, groups, strict=True):
            row.append(float(group["lr"]))
    return rates


def check_parameters(setup: SetUp) -> Finding:
    """Every parameter gets a gradient, belongs to an optimizer and changes; none is frozen at a random value."""
    seen, number = setup.observed, f"{len(setup.observed.seconds)} updates"
    names = {name: one for name, one in setup.run.model.named_parameters() if one.numel()}
    trainable = {name for name, one in names.items() if one.requires_grad}
    is_later = setup.run.spec.unfreeze is not None
    unseen, zeros, frozen = _untrained([*names], trainable, seen, has_late_gradients=is_later)
    values: dict[str, Any] = {
        "parameters": len(names),
        "without_gradient": unseen,
        "zero_gradient": zeros,
        "not_trained": frozen,
    }
    if seen.optimized.intersection(unseen):
        return problem(
            f"{_listed(unseen)} of {len(names)} parameters got no gradient in {number}.",
            "Use them in the forward pass (look for detach() and no_grad()), or set requires_grad=False.", values,
        )  # fmt: skip
    if frozen and not is_later and not is_peft_model(setup.run.model):
        values["random"] = random = at_initial_values(setup, frozen)
        if random:
            return problem(
                f"{_listed(random)} of {len(names)} parameters are not trained, and have random initial"
                " values.", "Unfreeze them or give them to the optimizer; load weights; or make them buffers.", values,
            )  # fmt: skip
    moving = trainable & seen.with_gradient
    groups = [group for one in each_optimizer(setup.run.optimizer) for group in one.param_groups]
    has_rates = all(group.get("lr", 1) for group in groups)
    if moving and moving <= seen.optimized - seen.changed and has_rates:
        return problem(
            f"No parameter changed in {number}, although all have gradients.",
            "The updates are below the precision of the weights: raise the learning rate, or use float32.", values,
        )  # fmt: skip
    if zeros:
        return undecided(
            f"The gradient of {_listed(zeros)} was 0 in {number}.",
            "Units may be dead (ReLU), or inputs always 0; a longer run shows whether it stays so.", values,
        )  # fmt: skip
    text = f"{len(names) - len(frozen)} of {len(names)} parameters are trained"
    text += f"; not trained: {_listed(frozen)}." if frozen else "; all have gradients."
    return passed(text, values=values)


def _untrained(
    names: list[str], trainable: set[str], seen: Observed, *, has_late_gradients: bool
) -> tuple[list[str], list[str], list[str]]:
    """Names of parameters without a gradient, with gradients of zeros only, and that nothing trains."""
    without: set[str] = set() if has_late_gradients else trainable - seen.with_gradient
    unseen = [name for name in names if name in without and name not in seen.with_zero_gradient]
    zeros = [name for name in names if name in without and name in seen.with_zero_gradient]
    trained = (trainable & seen.optimized).union(seen.changed, unseen)
    return unseen, zeros, [name for name in names if name not in trained]


def check_modes(setup: SetUp) -> Finding:
    """Dropout and batch normalization are in training mode in the steps, before and after an evaluation."""
    seen, model = setup.observed, setup.run.model
    modules = dict(model.named_modules())
    asked = [name for name, module in modules.items() if depends_on_mode(module)]
    if not asked:
        return passed("No module depends on the mode (no dropout, no batch normalization).")
    wrong = [name for name in sorted(seen.first_modes | seen.later_modes) if not _stays_off(model, name)]
    values = {"modules": len(asked), "off": wrong}
    if wrong:
        when = "" if set(wrong) & seen.first_modes else " after an evaluation"
        kinds = ", ".join(sorted({type(modules[name]).__name__ for name in wrong}))
        return problem(
            f"{kinds} of {_listed(wrong)} is in evaluation mode in training steps{when}.",
            "Remove the call of eval(), or call model.train() after your own evaluation.", values,
        )  # fmt: skip
    note = f"; deliberately in evaluation mode: {_listed(sorted(seen.first_modes))}" if seen.first_modes else ""
    return passed(f"{len(asked)} modules depend on the mode, and have the right one{note}.", values=values)


def _stays_off(model: nn.Module, name: str) -> bool:
    """Whether a module is in evaluation mode deliberately: frozen, or its mode is fixed by its own ``train``."""
    parts = name.split(".")
    parents = [model.get_submodule(".".join(parts[:number])) for number in range(len(parts) + 1)]
    if any("train" in vars(module) or type(module).train is not nn.Module.train for module in parents):
        return True
    near = next((module for module in reversed(parents) if any(True for _ in module.parameters())), None)
    return near is not None and not any(one.requires_grad for one in near.parameters())


def check_zero_grad(setup: SetUp) -> Finding:
    """An update does not depend on the gradients of an earlier one: in one of two runs they are set to None between."""
    if not setup.has_own_step:
        return passed("The step is the library's, which sets gradients to None.")
    seen = setup.observed
    if not seen.num_steps:
        raise Skipped("no optimizer makes a step")
    plain = _weights_after(setup, clears=False)
    again, cleared = _weights_after(setup, clears=False), _weights_after(setup, clears=True)
    noise, difference = _distance(plain, again), _distance(plain, cleared)
    values = {"difference": difference, "noise": noise}
    if difference > 10 * noise:
        return problem(
            "The weights depend on gradients that an earlier update left (relative difference"
            f" {difference:.2g}).", "Call self.step(optimizer), which sets gradients to None, or zero_grad().", values,
        )  # fmt: skip
    return passed("Gradients of an earlier update have no effect.", values=values)


def _weights_after(setup: SetUp, *, clears: bool, updates: int = 6) -> list[Tensor]:
    new = setup.make()
    stepped: list[Any] = []
    own = {id(one) for one in new.model.parameters()}

    def clear() -> None:
        for optimizer in stepped if clears else ():
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                if id(parameter) in own:
                    parameter.grad = None
        stepped.clear()

    with register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer)):
        new.train(updates, before=clear)
    return [parameter.detach() for parameter in new.model.parameters()]


def _distance(first: Iterable[Tensor], second: Iterable[Tensor]) -> float:
    """The relative distance of two lists of tensors; 0 if they are bitwise equal."""
    pairs = [(a.double(), b.double()) for a, b in zip(first, second, strict=True)]
    total = sum(float((a - b).square().sum()) for a, b in pairs)
    size = sum(float(a.square().sum()) for a, _ in pairs)
    return math.sqrt(total / size) if size else 0.0


def check_one_batch(setup: SetUp) -> Finding:
    """The model can overfit one batch, with the configured optimizer at its base learning rate."""
    if len(each_optimizer(setup.run.optimizer)) > 1:
        raise Skipped("several optimizers have losses that may compete")
    new = setup.make(constant_rate=True)
    (batch,) = new.run.batches.first(1)
    new.run.batches.repeat([batch])
    with dropout_off(new.model):
        losses: list[float] = []

        def read() -> None:
            if (loss := new.step_loss()) is not None:
                losses.append(loss)
            if len(losses) > 10 and is_fitted(losses):
                new.stop()

        affordable = min(300, int(0.25 * setup.seconds_left() / max(setup.step_seconds, 1e-6)))
        if affordable < 20:
            raise Skipped("no time was left for 20 updates")
        new.train(affordable, after=read, needed=20)
    if len(losses) < 20 and not is_fitted(losses):
        raise Skipped("the step reports no loss")
    first, last = losses[0], fmean(losses[-3:])
    values = {"first": first, "last": last, "updates": len(losses)}
    text = f"The loss of one batch changed from {first:.4g} to {last:.4g} in {len(losses)} updates"
    if not math.isfinite(last):
        return problem(f"{text}.", "Lower the learning rate.", values)
    if is_fitted(losses):
        return passed(f"{text}.", values=values)
    spread = _spread(losses[-10:]) + _spread(losses[:10])
    if last < first - 3 * spread and last < first:
        advice = "It learns slowly or has a floor (noise in the loss, label smoothing): compare with a higher rate."
        return passed(f"{text}.", "", values) if last < 0.8 * first else undecided(f"{text}.", advice, values)
    if setup.has_own_loss:
        return undecided(f"{text}: your loss may depend on more than the batch.", "", values)
    if last > first + 3 * spread or (spread < 1e-3 * abs(first) and last > 0.99 * first):
        fix = "Check the sign of the loss, that it depends on the model's outputs, and the learning rate."
        return problem(f"{text}: it does not fall.", fix, values)
    return undecided(f"{text}: noise hides whether it falls.", "", values)


def is_fitted(losses: list[float]) -> bool:
    """Whether a loss fell to a tenth of its first value."""
    return losses[0] > 0 and fmean(losses[-3:]) <= 0.1 * losses[0]


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """A context in which dropout of a model has no effect; the modules stay in their modes."""
    rates = [(one, one.p) for one in model.modules() if isinstance(one, nn.modules.dropout._DropoutNd)]
    for module, _ in rates:
        module.p = 0.0
    try:
        yield
    finally:
        for module, rate in rates:
            module.p = rate


def check_forecast(setup: SetUp) -> Finding:
    """The time of the run, the memory of a step, and the disk that checkpoints need."""
    seen, trainer = setup.observed, setup.run.trainer
    seconds = setup.step_seconds * trainer.max_iter
    checkpoint, memory = seen.checkpoint_bytes, seen.memory_bytes
    folder = Path(setup.output_dir).absolute()
    free = shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free
    samples = trainer.samples_per_iter or 0
    rate = f", {samples / setup.step_seconds:,.0f} samples/s" if samples else ""
    values = {
        "seconds_per_update": setup.step_seconds, "updates": trainer.max_iter, "run_seconds": seconds,
        "memory_bytes": memory, "checkpoint_bytes": checkpoint, "free_bytes": free,
    }  # fmt: skip
    text = (
        f"{trainer.max_iter:,} updates of {setup.step_seconds:.3g} s{rate}: about {duration(seconds)} without"
        f" evaluations; {byte_size(memory)} of tensors, {byte_size(checkpoint)} for each checkpoint."
    )
    if checkpoint > free:
        return problem(f"{text} Only {byte_size(free)} of disk are free.", "Free some, or save less.", values)
    return passed(text, values=values)


def _spread(values: list[float]) -> float:
    """The standard deviation of the differences of neighbors: noise without the trend."""
    return pstdev(b - a for a, b in pairwise(values))


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} ({shown})"
