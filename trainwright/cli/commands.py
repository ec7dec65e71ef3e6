"""The table of the commands: a command is a row, and a module with ``parser()`` and ``main(argv)``."""

GROUPS = {
    "train": {
        "new": "a new project that trains at once",
        "train": "train from a configuration file; --resume continues a run",
        "launch": "run a command or a script in several processes, or on a cluster",
    },
    "use a trained model": {
        "eval": "evaluate a checkpoint; metrics and predictions to files",
        "predict": "predictions for files: images, texts, recordings",
    },
    "prepare": {
        "check": "try a configuration out: can it learn, are the data right",
        "find": "a learning rate, or the largest batch that fits into the memory",
        "estimate": "memory and traffic of a run, and the layouts that fit",
        "config": "show a configuration, compare two, JSON schema for editors",
        "doctor": "check this machine, or all hosts and their network",
    },
    "look at runs": {
        "runs": "table of the runs in a folder: state, progress, best metric",
        "report": "one HTML page about runs: curves, settings, machine",
        "diff": "what two runs differ in, and the first update that does",
        "replay": "run one update again, bitwise, and look inside",
        "checkpoint": "list, show, verify or export the checkpoints of a run",
    },
    "set up": {
        "completion": "completion of commands in bash, zsh and fish",
    },
}

COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}


def module_of(name: str) -> str:
    return "trainwright.inspect.doctor.command" if name == "doctor" else f"trainwright.cli.{name}"
