"""Jupyter notebooks: outputs that are updated in place, and tables and curves as HTML.

The HTML needs no script and no kernel, and takes its colours from the page, so a saved notebook shows it in light and
dark themes. Imports nothing of ours and nothing slow, so every room may import it.
"""

import contextvars
import math
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

BLUE, ORANGE, RED, GREEN = "#4285f4", "#e8710a", "#e5484d", "#2da44e"  # on white and on black
_LINE = "rgba(128,128,128,.4)"
_COLOURS = (BLUE, ORANGE, GREEN, RED)
_WIDTH, _HEIGHT = 380, 150  # of a picture of curves, in pixels
_SHORT = 70  # characters of what is inside a closed list
_LOG_RATIO = 30  # largest to smallest value from which on the axis is logarithmic


def is_kernel() -> bool:
    """Whether this process shows HTML: it runs cells, and not below ``%%capture``, which would keep each update."""
    return runs_cells() and type(getattr(_shell(), "display_pub", None)).__name__ != "CapturingDisplayPublisher"


def runs_cells() -> bool:
    """Whether this process is the kernel of a notebook, in JupyterLab, VS Code, Colab and others.

    IPython's shell of a kernel has the attribute ``kernel``; that of a terminal has none. A fork of a kernel is none.
    """
    kernel = getattr(_shell(), "kernel", None)
    return kernel is not None and getattr(getattr(kernel, "session", None), "pid", None) in (None, os.getpid())


def show_type_as_html(module: str, name: str, to_html: Callable[[Any], str | None]) -> None:
    """Have IPython, if this process runs in it, show objects of a class of another package as HTML. None: as text."""
    shell = _shell()
    if shell is not None:
        shell.display_formatter.formatters["text/html"].for_type_by_name(module, name, to_html)


def at_end_of_cell(call: Callable[[BaseException | None], None]) -> Callable[[], None]:
    """Have ``call`` called with the error of the current cell, or None, when the cell ends. Returns what revokes it."""
    shell = _shell()
    if shell is None:
        return lambda: None

    def on_end(result: Any) -> None:
        call(result.error_in_exec)

    shell.events.register("post_run_cell", on_end)
    return lambda: shell.events.unregister("post_run_cell", on_end)


def _shell() -> Any:
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if find is None else find()


class CellOutput:
    """An output of the current cell, which any thread may replace."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._context = contextvars.copy_context()  # the kernel finds in it the cell of an output
        self._is_shown = False

    def show(self, html: str, text: str) -> None:
        """``text`` is for programs that show no HTML."""
        from IPython.display import display, update_display

        call, self._is_shown = update_display if self._is_shown else display, True
        data = {"text/html": html, "text/plain": text}
        self._context.copy().run(call, data, raw=True, display_id=self._id)


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Rows of text, the first column aligned to the left and, below a head, the others to the right."""
    side = "right" if head else "left"

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}{'' if n else left}>{escape(c)}</{tag}>" for n, c in enumerate(cells)) + "</tr>"

    left = ' style="text-align:left;white-space:nowrap"'
    top = f"<thead>{line(head, 'th')}</thead>" if head else ""
    body = "".join(line(row, "td") for row in rows)
    style = f"margin:0;border-collapse:collapse;border:0;text-align:{side};font-variant-numeric:tabular-nums"
    return f'<table cellpadding="4" style="{style}">{top}<tbody>{body}</tbody></table>'


def summary(title: str, rows: Mapping[str, object], below: str = "") -> str:
    """A title, and the rows that have a value; a list has an item a line. ``below``: HTML."""
    cells = []
    for name, value in rows.items():
        items = value if isinstance(value, list) else [value] if value else []
        cells += [("" if place else name, str(item)) for place, item in enumerate(items)]
    return f'<div style="line-height:1.4"><b>{escape(title)}</b>{table(cells) if cells else ""}{below}</div>'


def tree(value: Any, name: str = "", *, is_open: bool = True) -> str:
    """Nested dicts and lists as lists that open and close; a call of a config is named by its target."""
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        value = {f"[{place}]": item for place, item in enumerate(value)}
    if not isinstance(value, dict):
        return f"<div>{escape(name)} = {escape(repr(value))}</div>"
    inside = {str(key): item for key, item in value.items() if key != "_target_"}
    short = ", ".join(f"{key}=…" if isinstance(item, dict) else f"{key}={item!r}" for key, item in inside.items())
    short = short if len(short) <= _SHORT else short[:_SHORT] + "…"
    target = f"{value['_target_']}({short})" if "_target_" in value else short
    title = f'<b>{escape(name)}</b> <span style="opacity:.7">{escape(target)}</span>'
    if not inside:
        return f"<div>{title}</div>"
    rows = "".join(tree(item, key, is_open=is_open and len(inside) == 1) for key, item in inside.items())
    inner = f'<div style="margin-left:1.5em">{rows}</div>'
    state = ' open=""' if is_open else ""
    return f'<details style="line-height:1.4"{state}><summary>{title}</summary>{inner}</details>'


def curves(lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """A small picture (SVG) of named curves, by iterations; empty if they have fewer than two points."""
    lines = {name: points for name, points in lines.items() if points}
    values = [y for points in lines.values() for _, y in points]
    last = max((points[-1][0] for points in lines.values()), default=0)
    if len(values) < 2 or last <= 0:
        return ""
    low, high = min(values), max(values)
    is_log = low > 0 and high / low > _LOG_RATIO
    scale: Callable[[float], float] = math.log if is_log else float
    bottom, span = scale(low), (scale(high) - scale(low)) or 1.0
    left, top, width, height = 52, 22, _WIDTH - 60, _HEIGHT - 44

    def place(x: float, y: float) -> str:
        return f"{left + width * x / last:.1f},{top + height * (1 - (scale(y) - bottom) / span):.1f}"

    def text(x: float, y: float, words: str, anchor: str, colour: str = "currentColor") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'

    parts, at = [], float(left)
    for (name, points), colour in zip(lines.items(), _COLOURS, strict=False):
        shown = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline points="{shown}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if len(points) <= 20:
            spots = (place(x, y).split(",") for x, y in points)
            parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in spots]
        parts.append(text(at, 13, name, "start", colour))
        at += 9 + 6.5 * len(name)
    frame = f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="{_LINE}"/>'
    labels = [
        text(left - 5, top + 5, f"{high:.3g}", "end"),
        text(left - 5, top + height, f"{low:.3g}", "end"),
        text(left, top + height + 15, "0", "middle"),
        text(left + width, top + height + 15, f"{last:,.0f} iterations" + (", log scale" * is_log), "end"),
    ]
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' style="max-width:100%;font:11px sans-serif">{frame}{"".join(labels + parts)}</svg>'
    )
