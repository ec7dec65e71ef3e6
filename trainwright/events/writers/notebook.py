"""The progress of a training in a notebook: a bar, a table with a row per epoch, a small picture of the losses."""

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from trainwright.base.notebook import BLUE, GREEN, RED, CellOutput, curves, table

if TYPE_CHECKING:
    from trainwright.events.storage import EventStorage

_CURVES = {"total_loss": "training loss", "eval_loss": "evaluation loss"}
_MAX_POINTS = 200  # of a curve
_MAX_ROWS, _MAX_COLUMNS = 50, 12  # of the table, so that a saved notebook stays small


class Content(NamedTuple):
    """What a progress bar shows. ``done`` and ``total``: of the epoch."""

    label: str
    done: int
    total: int
    times: list[str]
    metrics: list[str]
    activity: str  # besides steps
    notice: str
    end: str  # "interrupted", "failed: ValueError", …; empty: it has not ended


class MeanCurve:
    """Values by iterations, as the means of at most 200 equal ranges."""

    def __init__(self) -> None:
        self.next = 0  # the iteration after the last one
        self._width = 1
        self._sums: dict[int, tuple[float, int]] = {}

    def extend(self, values: Iterable[tuple[float, int]]) -> None:
        """Add ``(value, iteration)``. Values that are not finite are left out."""
        for value, iteration in values:
            self.next = max(self.next, iteration + 1)
            if math.isfinite(value):
                self._add(iteration // self._width, value, 1)
        while len(self._sums) > _MAX_POINTS:
            before, self._sums, self._width = self._sums, {}, 2 * self._width
            for place, (total, number) in before.items():
                self._add(place // 2, total, number)

    def _add(self, place: int, total: float, number: int) -> None:
        before = self._sums.get(place, (0.0, 0))
        self._sums[place] = (before[0] + total, before[1] + number)

    def points(self, done: float = math.inf) -> list[tuple[float, float]]:
        """The middle of each range, as a number of iterations and at most ``done``, and its mean."""
        half = (self._width + 1) / 2
        sums = sorted(self._sums.items())
        return [(min(done, place * self._width + half), total / number) for place, (total, number) in sums]


class LossPicture:
    """The losses of a training and of its evaluations as a small picture; each value is read once."""

    def __init__(self) -> None:
        self._curves = {name: MeanCurve() for name in _CURVES}

    def html(self, storage: "EventStorage") -> str:
        histories = storage.histories_so_far()
        for name, curve in self._curves.items():
            if name in histories:
                curve.extend(histories[name].values_since(curve.next))
        done = storage.iter + (not storage.is_over)  # the final evaluation has the number of the next iteration
        return curves({_CURVES[name]: curve.points(done) for name, curve in self._curves.items()})


class NotebookDisplay:
    """One output of a cell, replaced in place; ``storage`` has the losses of the picture."""

    def __init__(self, storage: "EventStorage | None") -> None:
        self._storage = storage
        self._output = CellOutput()
        self._rows: list[dict[str, str]] = []
        self._picture = LossPicture()

    def add_row(self, row: Mapping[str, str]) -> None:
        """A row of the table: values by the names of columns; a star in place of ``(best)``."""
        best = " (best)"
        self._rows.append({k: f"★ {v.removesuffix(best)}" if v.endswith(best) else v for k, v in row.items()})

    def show(self, content: Content) -> None:
        words = [content.label, f"{content.done}/{content.total}", *content.times, *content.metrics, content.end]
        self._output.show(self._html(content), "  ".join(filter(None, words)))

    def clear(self) -> None:
        """Show nothing from now on."""
        self._output.show("", "")

    def _html(self, content: Content) -> str:
        colour = RED if content.end[:6] in ("interr", "failed") else GREEN if content.end == "finished" else BLUE
        share = 100 * min(1.0, content.done / max(1, content.total))
        round_ = "display:inline-block;height:9px;border-radius:5px"
        bar = (
            f'<span role="progressbar" aria-valuenow="{share:.0f}" style="{round_};width:240px;max-width:40%;'
            f'margin:0 10px;overflow:hidden;background:rgba(128,128,128,.28)">'
            f'<span style="{round_};vertical-align:top;width:{share:.1f}%;background:{colour}"></span></span>'
        )
        end = f' <b style="color:{colour}">{escape(content.end)}</b>' if content.end else ""
        times = escape("  ".join([f"{content.done}/{content.total}", *content.times]))
        lines = [f"<b>{escape(content.label)}</b>{bar}{times}{end}", escape("  ".join(content.metrics))]
        lines += [f"<i>{escape(text)}</i>" for text in (content.activity, content.notice) if text]
        shown = "".join(f"<div>{line}</div>" for line in lines if line)
        picture = "" if self._storage is None else self._picture.html(self._storage)
        below = "".join(f'<div style="overflow-x:auto">{part}</div>' for part in (self._table(), picture) if part)
        style = "white-space:pre-wrap;line-height:1.6;font-variant-numeric:tabular-nums"
        beside = "display:flex;flex-wrap:wrap;gap:8px 28px;align-items:flex-start;margin-top:4px"
        return f'<div style="{style}">{shown}</div><div style="{beside}">{below}</div>'

    def _table(self) -> str:
        if not self._rows:
            return ""
        names = list(dict.fromkeys(name for row in self._rows for name in row))[:_MAX_COLUMNS]
        left_out = len(self._rows) - _MAX_ROWS
        rows = [[row.get(name, "") for name in names] for row in self._rows[-_MAX_ROWS:]]
        return table([[f"… {left_out} earlier"], *rows] if left_out > 0 else rows, head=names)
