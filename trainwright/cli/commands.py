"""The table of the commands: a command is a row, and a module with ``parser()`` and ``main(argv)``."""

from typing import NamedTuple


class Command(NamedTuple):
    """``module`` runs it; ``text`` is its line of the help."""

    module: str
    text: str


GROUPS = {
    "train": {
        "new": Command("trainwright.cli.new", "a new project that trains at once"),
        "train": Command("trainwright.cli.train", "train from a configuration file; --resume continues a run"),
        "launch": Command("trainwright.cli.launch", "run a command or a script in several processes, or on a cluster"),
    },
    "use a trained model": {
        "eval": Command("trainwright.cli.eval", "evaluate a checkpoint; metrics and predictions to files"),
        "predict": Command("trainwright.cli.predict", "predictions for files: images, texts, recordings"),
    },
    "prepare": {
        "check": Command("trainwright.cli.check", "try a configuration out: can it learn, are the data right"),
        "find": Command("trainwright.cli.find", "a learning rate, or the largest batch that fits into the memory"),
        "estimate": Command("trainwright.cli.estimate", "memory and traffic of a run, and the layouts that fit"),
        "config": Command("trainwright.cli.config", "show a configuration, compare two, JSON schema for editors"),
        "doctor": Command("trainwright.inspect.doctor.command", "check this machine, or all hosts and their network"),
    },
    "look at runs": {
        "runs": Command("trainwright.cli.runs", "table of the runs in a folder: state, progress, best metric"),
        "report": Command("trainwright.cli.report", "one HTML page about runs: curves, settings, machine"),
        "diff": Command("trainwright.cli.diff", "what two runs differ in, and the first update that does"),
        "replay": Command("trainwright.cli.replay", "run one update again, bitwise, and look inside"),
        "checkpoint": Command("trainwright.cli.checkpoint", "list, show, verify or export the checkpoints of a run"),
    },
    "set up": {
        "completion": Command("trainwright.cli.completion", "completion of commands in bash, zsh and fish"),
    },
}

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
