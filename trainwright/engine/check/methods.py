"""Methods of the trainers of both APIs that try a set-up out without changing it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trainwright.engine.loop import TrainerBase

if TYPE_CHECKING:
    from trainwright.engine.check.finding import Report
    from trainwright.engine.finders.batch_size import BatchSizes
    from trainwright.engine.finders.learning_rate import RateCurve


class SetUpMethods(TrainerBase):
    """A trainer that can be copied: ``check`` and the finders work on copies of it."""

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        new = super().__new__(cls)
        new._arguments = (arguments, named)  # those of a subclass, whatever it passes on
        return new

    def check(self, *, max_seconds: float = 60.0, only: "list[str] | None" = None) -> "Report":
        """Check on copies of this trainer whether it can learn, its data are right, it is exact (``docs/checks.md``).

        Nothing of this trainer is changed: weights, states, random generators, output folder. A check that does not fit
        into ``max_seconds`` is skipped and reported. The report is true if there is no problem.

        >>> report = trainer.check()  # doctest: +SKIP
        >>> report.print()  # doctest: +SKIP
        """
        from trainwright.engine.check.run import check_trainer

        return check_trainer(self, max_seconds=max_seconds, only=only)

    def find_lr(
        self,
        *,
        lowest: float = 1e-7,
        highest: float = 10.0,
        updates: int = 100,
        plot: "str | Path | None" = None,
        apply: bool = False,
    ) -> "RateCurve":
        """Learning-rate range test: train a copy with a growing rate; suggests the rate where the loss falls fastest.

        ``plot``: a file for a picture of the curve (needs matplotlib). ``apply``: train with the suggestion; otherwise
        nothing of this trainer is changed.
        """
        from trainwright.engine.finders.learning_rate import find_learning_rate, use_learning_rate

        curve = find_learning_rate(self, lowest=lowest, highest=highest, updates=updates)
        if plot is not None:
            curve.plot(plot)
        if apply and curve.suggestion is not None:
            use_learning_rate(self, curve.suggestion)
        return curve

    def find_batch_size(self, *, memory: int | None = None, max_size: int | None = None) -> "BatchSizes":
        """The largest micro-batch that fits into the memory, by updates of copies; this trainer is not changed.

        ``memory``: bytes that a step may use, in place of what this device has. The result has the settings for a new
        trainer.
        """
        from trainwright.engine.finders.batch_size import find_batch_size

        return find_batch_size(self, memory=memory, max_size=max_size)
