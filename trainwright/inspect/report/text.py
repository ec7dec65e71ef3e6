"""Text of the commands: tables, sizes, times."""

import json
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime


def shown(text: object) -> str:
    """``text`` on one line, without terminal control sequences.

    >>> shown("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in str(text))


def cell(value: object, width: int = 60) -> str:
    """A value of a table, on one line of at most ``width`` characters.

    >>> cell(0.123456), cell({"a": [1]}), cell("x" * 70, 10)
    ('0.123456', '{"a": [1]}', 'xxxxxxxxx…')
    """
    text = shown(value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False))
    return text if len(text) <= width else f"{text[: width - 1]}…"


def size(num_bytes: int | None) -> str:
    """
    >>> size(999), size(1_000), size(1_234_567), size(None)
    ('999 B', '1.0 kB', '1.2 MB', '?')
    """
    if num_bytes is None:
        return "?"
    power = next((power for power in range(4) if num_bytes < 999.95 * 1000**power), 4)
    return f"{num_bytes} B" if not power else f"{num_bytes / 1000**power:,.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def local_time(moment: datetime | None) -> str:
    """To the second, in the local time zone."""
    if moment is None:
        return "?"
    try:
        return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError):  # at the ends of the calendar
        return moment.isoformat(timespec="seconds")


def duration(seconds: float) -> str:
    """
    >>> duration(3.87), duration(75), duration(7380), duration(200000)
    ('3.9 s', '1 min 15 s', '2 h 03 min', '2 d 7 h')
    """
    whole = round(seconds)
    if seconds < 59.5:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def print_found(facts: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print what a command has found: ``facts`` for programs, or ``lines`` for people."""
    print(json.dumps(facts, indent=1, default=str) if as_json else "\n".join(lines))


def counted(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def table(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Lines of aligned columns; the columns in ``right`` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
