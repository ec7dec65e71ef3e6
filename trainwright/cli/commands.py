"""The table of the commands: a command is a row, and a module with ``parser()`` and ``main(argv)``."""

import os
import re
import shlex
from collections.abc import Sequence

GROUPS = {
    "train": {
        "new": "a new project that trains at once",
        "train": "train from a configuration file; --resume continues a run",
        "launch": "run a command or a script in several processes or on several hosts",
    },
    "use a trained model": {
        "eval": "evaluate a checkpoint; metrics and predictions to files",
        "predict": "predictions for files: images, texts, recordings",
    },
    "prepare": {
        "check": "check a configuration in seconds: can it learn, are the data right",
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

# What other programs call a command, with the line to write. Braces: the user's own arguments, if there are some.
_TRAIN, _EVAL, _PREDICT = "trainwright train {CONFIG}", "trainwright eval {RUN}", "trainwright predict {RUN FILE...}"
_SWEEP = "trainwright train {CONFIG optim.lr=0.1,0.01} --sweep"
_LAUNCH = "trainwright launch -n 2 {train CONFIG}"
_EXPORT = "trainwright checkpoint export {RUN} (ONNX and torch.export: trainer.export(path) in Python)"
_HUB = "trainer.push_to_hub(repository) in Python"
MEANINGS = {
    **dict.fromkeys(("fit", "run", "start", "training", "main", "learn"), _TRAIN),
    **dict.fromkeys(("resume", "continue", "restart"), _TRAIN + " --resume"),
    **dict.fromkeys(("finetune", "fine-tune", "fine_tune"), _TRAIN + " train.load_weight=CHECKPOINT"),
    **dict.fromkeys(("test", "evaluate", "evaluation", "validate", "val", "valid", "score"), _EVAL),
    **dict.fromkeys(("infer", "inference", "generate", "prediction", "classify"), _PREDICT),
    **dict.fromkeys(
        ("init", "create", "quickstart", "scaffold", "startproject", "template"), "trainwright new {PROJECT}"
    ),
    **dict.fromkeys(("export", "convert", "onnx"), _EXPORT),
    **dict.fromkeys(("push", "upload"), _HUB),
    **dict.fromkeys(("sweep", "search", "tune", "hpo", "multirun", "grid"), _SWEEP),
    **dict.fromkeys(("lr-find", "lr_find", "lr_finder", "find-lr", "find_lr"), "trainwright find lr {CONFIG}"),
    **dict.fromkeys(("batch-size", "find-batch-size", "scale_batch_size"), "trainwright find batch-size {CONFIG}"),
    **dict.fromkeys(("torchrun", "distributed", "deepspeed", "accelerate", "ddp", "multi-gpu"), _LAUNCH),
    **dict.fromkeys(("checkpoints", "ckpt", "ckpts"), "trainwright checkpoint list {RUN}"),
    **dict.fromkeys(("ls", "list", "status", "ps", "history", "experiments", "show"), "trainwright runs"),
    **dict.fromkeys(("plot", "curves", "dashboard", "ui", "visualize"), "trainwright report {RUN}"),
    **dict.fromkeys(("tensorboard", "board", "tb"), "tensorboard --logdir {RUN}"),
    **dict.fromkeys(("compare",), "trainwright diff {A B}"),
    **dict.fromkeys(("debug", "dry-run", "dryrun", "sanity", "lint"), "trainwright check {CONFIG}"),
    **dict.fromkeys(("settings", "print-config", "print_config"), "trainwright config show {CONFIG}"),
    **dict.fromkeys(("schema",), "trainwright config schema"),
    **dict.fromkeys(("env", "info", "collect_env"), "trainwright doctor"),
    **dict.fromkeys(("memory", "profile-memory"), "trainwright estimate {CONFIG}"),
    **dict.fromkeys(("--config-file", "--config", "-c"), "trainwright train {CONFIG}"),
    **dict.fromkeys(("--resume",), _TRAIN + " --resume"),
    **dict.fromkeys(("-n", "--nproc-per-node"), "trainwright launch -n {2 train CONFIG}"),
    "profile": _TRAIN + " train.profile=true",
    "help": "trainwright {COMMAND} --help",
    "version": "trainwright --version",
}

COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}


def line_for(name: str, arguments: Sequence[str]) -> str | None:
    """The line to write in place of an unknown command; None: its name has no known meaning."""
    line = MEANINGS.get(name.lower())
    if line is None:
        return None
    given = [*arguments]
    if "{CONFIG}" in line and given and os.path.isdir(given[0]):  # a run
        given[0] = os.path.join(given[0], "config.yaml")
    return re.sub(r"\{(.*?)\}", lambda place: shlex.join(given) or place[1], line)


def module_of(name: str) -> str:
    return "trainwright.inspect.doctor.command" if name == "doctor" else f"trainwright.cli.{name}"
