"""The command ``trainwright``. Its help does not load torch."""

import importlib
import sys
from collections.abc import Sequence

USAGE = """\
usage: trainwright COMMAND ...

  trainwright train CONFIG [--resume] [--eval-only] [--fast-dev-run] [key=value ...]
        train from a configuration file; see `trainwright train --help`
  trainwright launch [--nproc-per-node N] [--nnodes A:B] COMMAND|SCRIPT ...
        run a command or a script in several processes, or write the job file of a cluster
  trainwright estimate CONFIG [--world N] [--memory 80GiB] [key=value ...]
        memory and traffic of a run on N processes, and which layouts fit into a memory
  trainwright doctor [--output-dir FOLDER]
        check this machine, or under `trainwright launch` all hosts and the network between them
  trainwright checkpoint list|show|verify PATH
        list, show or verify the checkpoints of a run
  trainwright --version
"""

COMMANDS = {
    "train": "trainwright.cli.train",
    "launch": "trainwright.cli.launch",
    "estimate": "trainwright.cli.estimate",
    "doctor": "trainwright.cli.doctor.command",
    "checkpoint": "trainwright.cli.checkpoint",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 2 wrong arguments or configuration."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if arguments[0] in ("-V", "--version"):
        from trainwright import __version__

        print(f"trainwright {__version__}")
        return 0
    if arguments[0] in COMMANDS:
        command = importlib.import_module(COMMANDS[arguments[0]]).main
        prog = {"prog": "trainwright train"} if arguments[0] == "train" else {}
        return int(command(arguments[1:], **prog))
    from trainwright.config.errors import did_you_mean

    print(f"trainwright: no command {arguments[0]!r}. {did_you_mean(arguments[0], COMMANDS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
