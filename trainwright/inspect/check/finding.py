"""What the checks of a set-up have found, as a table, text or JSON."""

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

Result = Literal["passed", "problem", "undecided", "skipped"]

_MARKS: dict[str, str] = {"passed": "green", "problem": "bold red", "undecided": "yellow", "skipped": "dim"}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: the name of the check.
        result: ``problem`` is reported only if the evidence excludes chance; otherwise it is ``undecided``.
        evidence: what was measured, or why the check was skipped.
        suggestion: what to do about a problem.
        values: the measured values by name.
        seconds: the time that the check took.
    """

    check: str
    result: Result
    evidence: str
    suggestion: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


passed = partial(Finding, "", "passed")
problem = partial(Finding, "", "problem")
undecided = partial(Finding, "", "undecided")


class Skipped(Exception):  # noqa: N818  # not an error
    """Raised by a check that does not apply, or for which no time is left; the message is the reason."""


@dataclass(frozen=True)
class Report:
    """The findings of all checks, in their order. It is true if there is no problem."""

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.result == "problem"]

    @property
    def undecided(self) -> list[Finding]:
        """The findings that are neither a problem nor passed."""
        return [finding for finding in self.findings if finding.result == "undecided"]

    def __bool__(self) -> bool:
        return not self.problems

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __getitem__(self, check: str) -> Finding:
        return next(finding for finding in self.findings if finding.check == check)

    def to_dict(self) -> dict[str, Any]:
        findings = [asdict(finding) for finding in self.findings]
        return {"passed": not (self.problems or self.undecided), "findings": findings}

    def summary(self) -> str:
        """The number of findings of each result, and the names of those that are problems or undecided."""
        counts = {kind: sum(one.result == kind for one in self) for kind in _MARKS}
        problems = f"{counts['problem']} problem{'' if counts['problem'] == 1 else 's'}"
        rest = [f"{counts[kind]} {kind}" for kind in ("passed", "undecided", "skipped") if counts[kind]]
        text = ", ".join([problems, *rest]) + f" in {sum(one.seconds for one in self):.0f} s"
        for reason, kind in (("with a problem", self.problems), ("as the evidence is too weak", self.undecided)):
            if kind:
                text += f"\nNot passed, {reason}: {', '.join(one.check for one in kind)}."
        return text

    def print(self, file: Any = None) -> None:
        """Print a table, as wide as the terminal; colors on a terminal only."""
        from rich.console import Console
        from rich.text import Text

        console = Console(file=file or sys.stdout, highlight=False, soft_wrap=True)
        first = max([len("check"), *(len(one.check) for one in self)])
        second = max([len("result"), *(len(one.result) for one in self)])
        indent = " " * (first + second + 4)
        console.print(Text(f"{'check'.ljust(first)}  {'result'.ljust(second)}  evidence", style="bold"))
        for one in self.findings:
            text = one.evidence if not one.suggestion else f"{one.evidence}\n→ {one.suggestion}"
            evidence = f"\n{indent}".join(_wrapped(text, max(20, console.width - len(indent))))
            mark = (one.result.ljust(second), _MARKS[one.result])
            console.print(Text.assemble(f"{one.check.ljust(first)}  ", mark, f"  {evidence}"))
        console.print(Text(self.summary(), style="bold red" if self.problems else "bold"))


def _wrapped(text: str, width: int) -> list[str]:
    """The lines of a text, broken between words: a path stays in one piece, to be copied."""
    lines = [textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n")]
    return [line for wrapped in lines for line in wrapped or [""]]
