"""The learning-rate range test (Smith 2017): the loss while the rate grows exponentially."""

import math
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainwright.base.errors import ConfigError, ConfigImportError, import_optional
from trainwright.data.seeding import kept_generators
from trainwright.engine.run import Run
from trainwright.inspect.check.copies import Copies, quiet
from trainwright.optim.named import each_optimizer

_SMOOTHING = 0.9  # of the moving average of the losses
_DIVERGED = 4  # times the lowest smoothed loss


@dataclass(frozen=True)
class RateCurve:
    """The result of a range test.

    Attributes:
        rates: one for each update, growing.
        losses: of these updates.
        smoothed: their moving average.
        suggestion: the rate where the smoothed loss falls fastest; None: it does not fall.
        diverged: whether the test ended because the loss grew.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float | None
    diverged: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON values; a loss that is not finite is None."""
        found = asdict(self)
        finite = {name: [x if math.isfinite(x) else None for x in found[name]] for name in ("losses", "smoothed")}
        return found | finite

    def plot(self, path: str | Path) -> Path:
        """Write a picture of the curve, in the format of the file's suffix. Raises as :func:`new_figure`."""
        figure = new_figure(path)
        axes = figure.subplots()
        axes.plot(self.rates, self.losses, color="tab:blue", alpha=0.3, label="loss")
        axes.plot(self.rates, self.smoothed, color="tab:blue", label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="tab:red", linestyle="--", label=f"fastest fall: {self.suggestion:.2g}")
        top = max(self.smoothed[0], *self.smoothed[: max(1, len(self.smoothed) - 3)])
        low = min(self.smoothed)
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss", title="Learning-rate range test")
        if math.isfinite(low) and math.isfinite(top):
            axes.set_ylim(low - 0.1 * (top - low or 1), top + 0.3 * (top - low or 1))
        axes.legend()
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=120)
        return target


def new_figure(path: str | Path) -> Any:
    """An empty figure of matplotlib that can be written to ``path``.

    Raises:
        ConfigImportError: matplotlib is not installed.
        ConfigError: the format is unknown, or ``path`` is a folder.
    """
    message = "A picture of the curve needs matplotlib: pip install matplotlib"
    module = import_optional("matplotlib.figure", message, ConfigImportError)  # no pyplot: no window, no global state
    figure = module.Figure(figsize=(7, 4), layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    ending = Path(path).suffix.lower().removeprefix(".")
    if Path(path).is_dir() or (ending and ending not in formats):
        raise ConfigError(
            f"plot: got {str(path)!r}; it must be a file that ends in one of: {', '.join(sorted(formats))}."
        )
    return figure


def find_learning_rate(
    run: Run,
    *,
    lowest: float = 1e-7,
    highest: float = 10.0,
    updates: int = 100,
    max_seconds: float = 300.0,
    plot: str | Path | None = None,
) -> RateCurve:
    """Train a copy of the trainer of ``run`` with a rate that grows from ``lowest`` to ``highest``.

    The test ends early if the loss diverges. Groups with rates of their own keep their ratio. ``plot``: a file for a
    picture of the curve.

    Raises:
        ConfigError: an argument is out of range, the optimizer has no learning rate, or there are several optimizers.
    """
    if plot is not None:
        new_figure(plot)  # a wrong path is refused before the updates
    if not 0 < lowest < highest:
        raise ConfigError(f"find_lr: got lowest={lowest:g} and highest={highest:g}; it must be 0 < lowest < highest.")
    if updates < 20:
        raise ConfigError(f"find_lr: got updates={updates}; it must be a whole number >= 20.")
    if len(each_optimizer(run.optimizer)) > 1:
        raise ConfigError("find_lr: this run has several optimizers, whose losses do not have one curve.")
    if not all("lr" in group for group in run.optimizer.param_groups):
        raise ConfigError(f"find_lr: {type(run.optimizer).__name__} has no learning rate.")
    rates: list[float] = []
    losses: list[float] = []
    factor = (highest / lowest) ** (1 / (updates - 1))
    with tempfile.TemporaryDirectory() as folder, kept_generators(), quiet():
        copies = Copies(run, Path(folder), end=time.perf_counter() + max_seconds)
        new = copies.make(constant_rate=True, non_finite="warn")  # a loss that is not finite ends the test
        (optimizer,) = new.optimizers
        groups = optimizer.param_groups
        largest = max(float(group["lr"]) for group in groups) or 1.0
        shares = [float(group["lr"]) / largest or 1.0 for group in groups]
        smoothed: list[float] = []
        mean, diverged = 0.0, False

        def grow() -> None:
            rates.append(lowest * factor ** len(rates))
            for group, share in zip(groups, shares, strict=True):
                group["lr"] = share * rates[-1]

        def read() -> None:
            nonlocal mean, diverged
            if (loss := new.step_loss()) is None:
                raise ConfigError("find_lr: the step records no loss. A train_step must return it as 'step_loss'.")
            losses.append(loss)
            if math.isfinite(loss):
                mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
                smoothed.append(mean / (1 - _SMOOTHING ** len(losses)))  # without the bias of its start
                low = min(smoothed)
                diverged = len(smoothed) > 10 and loss > low + (_DIVERGED - 1) * max(abs(low), 1e-6)
            else:
                smoothed.append(smoothed[-1] if smoothed else loss)
                diverged = True
            if diverged:
                new.stop()

        new.train(updates, before=grow, after=read, needed=1)
    curve = RateCurve(rates, losses, smoothed, _steepest(rates, smoothed), diverged)
    if plot is not None:
        curve.plot(plot)
    return curve


def use_learning_rate(run: Run, rate: float) -> None:
    """Set the base rate of the optimizer and its schedule; groups with rates of their own keep their ratio."""
    groups = run.optimizer.param_groups
    base = max(float(group.get("initial_lr", group["lr"])) for group in groups)
    for group in groups:
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = float(group[name]) * rate / base if base else rate
    for schedule in run.schedules():
        if hasattr(schedule, "base_lrs"):
            schedule.base_lrs = [float(one) * rate / base if base else rate for one in schedule.base_lrs]
    run.use_learning_rate(rate)
    run.set_checkpoint_parts()  # their options are those now


def _steepest(rates: list[float], smoothed: list[float]) -> float | None:
    """The rate where the loss falls fastest by the logarithm of the rate; None: it falls nowhere."""
    width = 3  # updates on each side: a slope between neighbors is noise
    places = range(width, len(smoothed) - width)
    slopes = {place: smoothed[place + width] - smoothed[place - width] for place in places}
    if not slopes or smoothed[0] - min(smoothed) < 0.02 * abs(smoothed[0]):
        return None
    place = min(slopes, key=slopes.__getitem__)
    return float(f"{rates[place]:.2g}") if slopes[place] < 0 else None
