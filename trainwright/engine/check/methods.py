"""Methods of the trainers of both APIs that try a set-up out without changing it."""

from typing import TYPE_CHECKING, Any, Self

from trainwright.engine.loop import TrainerBase

if TYPE_CHECKING:
    from trainwright.engine.check.finding import Report


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
