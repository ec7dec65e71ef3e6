"""The command ``trainwright``. Its help does not load torch.

A command is a row of ``commands.GROUPS`` and a module with ``parser()``, which returns its ArgumentParser, and
``main(argv)``, which returns an exit code. A command imports what is slow when it runs, and may raise a UserError,
which is printed here.
"""

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from trainwright.base.terminal import print_line
from trainwright.cli.commands import COMMANDS, GROUPS, line_for, module_of

DONE, FAILED, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_EXAMPLES = """\
examples:
  trainwright train config.py optim.lr=1e-3 train.train_epoch=5
  trainwright train config.py --resume
  trainwright launch -n 2 train config.py
  trainwright checkpoint list output/run

`trainwright COMMAND --help` shows the options of a command.
`trainwright --version` shows the version.
"""


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: trainwright COMMAND ...", ""]
    for title, group in GROUPS.items():
        lines += [f"{title}:", *(f"  {name.ljust(width)}  {text}" for name, text in group.items()), ""]
    return "\n".join([*lines, _EXAMPLES])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 2 wrong arguments or configuration, 130 Ctrl-C.

    As a program (``argv`` is None), Ctrl-C ends it by the signal itself.
    """
    code = _main(list(sys.argv[1:] if argv is None else argv))
    if code == INTERRUPTED and argv is None:
        from trainwright.base.signal_handlers import quiet_interrupt

        raise quiet_interrupt()
    return code


def _main(arguments: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:  # the shell asks how to complete a line
        from trainwright.cli.completion import complete

        complete()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            with contextlib.suppress(OSError):  # a pipe whose position is not known
                stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no error
    try:
        try:
            return _command(arguments)
        finally:
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()  # here, and not when the interpreter ends: an error of it is handled below
    except KeyboardInterrupt:
        print_line("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as in `... | head`
        return _without_output()
    except OSError as error:
        if error.filename is not None or error.errno not in _NO_SPACE:
            raise
        print_line(f"trainwright: the output cannot be written: {error.strerror}.", file=sys.stderr)
        return _without_output()


def _without_output() -> int:
    """Drop what is not printed yet: the interpreter would write it at its end, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


def _command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), end="")
        return DONE
    if arguments[0] in ("-V", "--version"):
        from trainwright import __version__

        print(f"trainwright {__version__}")
        return DONE
    if arguments[0] in COMMANDS:
        return _run(arguments)
    from trainwright.base.errors import did_you_mean

    name = arguments[0]
    if name.endswith((".py", ".yaml", ".yml")):
        print(f"trainwright: {name} is a file: trainwright train {name}", file=sys.stderr)
        return USAGE_ERROR
    if line := line_for(name, arguments[1:]):
        print(f"trainwright: no command {name!r}. Write: {line}", file=sys.stderr)
        return USAGE_ERROR
    kind, allowed = ("option", ["--help", "--version"]) if name.startswith("-") else ("command", list(COMMANDS))
    print(f"trainwright: no {kind} {name!r}. {did_you_mean(name, allowed)}", file=sys.stderr)
    return USAGE_ERROR


def _run(arguments: Sequence[str]) -> int:
    from trainwright.base.errors import UserError

    command = importlib.import_module(module_of(arguments[0])).main
    prog = {"prog": "trainwright train"} if arguments[0] == "train" else {}
    try:
        return int(command(arguments[1:], **prog))
    except UserError as error:
        from trainwright.cli.train import print_error

        return print_error(error)
    except OSError as error:
        if error.filename is None:
            raise
        print_line(f"trainwright: {error.filename}: {error.strerror}.", file=sys.stderr)
        return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
