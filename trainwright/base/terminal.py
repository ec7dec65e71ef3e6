"""Standard output and standard error: they may be closed, full, or a pipe whose reader has ended (``| head -1``).

Imports nothing of ours and nothing slow, so every package may import it.
"""

import errno
import os
import re
import sys
from typing import Any, TextIO, cast

MAX_ERROR, _END_OF_ERROR = 10_000, 2_000  # characters
_ENDED = (errno.EPIPE, errno.EIO, errno.EBADF)  # nothing more can be written there: no reader, no terminal, closed
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """``text`` with backslash sequences for control characters, and for bytes of a file's name that are no text.

    >>> printable("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return _COMMANDS.sub(lambda mark: mark[0].encode("unicode_escape").decode(), text)


def shortened(text: str) -> str:
    """The text of an error without its middle, if it has more than 10,000 characters, such as a printed tensor."""
    left_out = len(text) - MAX_ERROR
    if left_out <= 0:
        return text
    return f"{text[: MAX_ERROR - _END_OF_ERROR]}\n… ({left_out:,} characters are left out) …\n{text[-_END_OF_ERROR:]}"


def guarded(stream: TextIO) -> TextIO:
    """``stream`` for parts that write and flush: it raises nothing, what cannot be written is lost."""
    return cast(TextIO, _Guarded(stream))


class _Guarded:
    """Equal to the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self._wrapped = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._wrapped == getattr(other, "_wrapped", other))

    def __hash__(self) -> int:
        return hash(self._wrapped)

    def write(self, text: str) -> int:
        stream = self._wrapped
        try:
            try:
                return stream.write(text)
            except UnicodeEncodeError:
                encoding = stream.encoding or "ascii"
                return stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except (OSError, ValueError) as error:  # ValueError: the program has closed it
            _give_up(stream, error)
            return len(text)

    def flush(self) -> None:
        try:
            self._wrapped.flush()
        except (OSError, ValueError) as error:
            _give_up(self._wrapped, error)


def print_line(text: str, *, file: TextIO | None = None) -> None:
    """As ``print``, on standard output by default; a stream that takes nothing ends no program."""
    stream = sys.stdout if file is None else file
    if stream is not None:
        quiet = guarded(stream)
        quiet.write(printable(text) + "\n")
        quiet.flush()


def is_terminal(stream: TextIO | None) -> bool:
    """Whether lines written there are read from a screen."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def shows_live_text(stream: TextIO | None) -> bool:
    """Whether it is a terminal that can replace lines."""
    return is_terminal(stream) and os.environ.get("TERM", "") not in ("dumb", "unknown")


def columns_of(stream: TextIO | None) -> int:
    """The width of a terminal; 120 where lines go into a pipe or a file."""
    if not is_terminal(stream):
        return 120
    try:
        return int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(cast(TextIO, stream).fileno()).columns or 80
    except (AttributeError, OSError, ValueError):
        return 80


def fitted(text: str, width: int, indent: int) -> str:
    """``text`` in lines of at most ``width`` characters, broken between fields, where it has them, or between words.

    >>> print(fitted("Epoch 1/2  total_loss 0.25  lr 1.00e-03", 28, indent=2))
    Epoch 1/2  total_loss 0.25
      lr 1.00e-03
    """
    between = "  " if "  " in text else " "
    lines: list[str] = []
    for part in text.split(between):
        if lines and len(lines[-1]) + len(between) + len(part) <= width:
            lines[-1] += between + part
        else:
            lines.append(" " * indent * bool(lines) + part)
    return "\n".join(lines)


def coloured(text: str, colour: int, stream: TextIO) -> str:
    """``text`` in a colour of ANSI (31 red, 33 yellow) on a terminal, unless ``NO_COLOR`` is set."""
    if not shows_live_text(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def open_standard_streams() -> None:
    """Lead closed standard streams to nowhere.

    A file that is opened later would get the descriptor of a closed one, and with it what libraries print.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            if os.open(os.devnull, os.O_RDWR) == descriptor:  # the lowest that is free
                os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 - to the end


def _give_up(stream: TextIO, error: Exception) -> None:
    """Where nothing more can be written, lead the stream to nowhere: also what the program itself prints."""
    if not isinstance(error, OSError) or error.errno not in _ENDED:
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError, AttributeError):  # a stream of the program's own, without a descriptor
        return
