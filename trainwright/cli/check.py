"""Check a set-up before it is trained: ``trainwright check CONFIG``."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.base.terminal import print_line
from trainwright.config.arguments import TrainingArgumentParser, positive_number, split_config

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainwright.config_trainer.default_trainer import DefaultTrainer

DONE, HAS_PROBLEM, IS_UNDECIDED = 0, 1, 3

_EPILOG = """\
The checks train copies for a few updates; nothing is written to the output folder. docs/checks.md describes them.
Exit code 0: no problem; 1: there is a problem; 2: the configuration is wrong; 3: no problem, but a check is undecided.
"""


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    return with_trainer(args, lambda trainer, folder: _check(trainer, folder, args))


def parser() -> argparse.ArgumentParser:
    usage = "CONFIG [--max-seconds 60] [--only NAME,NAME] [--json] [key=value ...]"
    found = config_parser("trainwright check", usage, _EPILOG)
    found.add_argument(
        "--max-seconds", type=positive_number, default=60.0, metavar="S", help="time for all checks (default: 60)"
    )
    found.add_argument("--only", metavar="NAME,NAME", help="the checks to make (default: all)")
    return found


def _check(trainer: "DefaultTrainer", folder: str, args: argparse.Namespace) -> int:
    from rich.console import Console

    from trainwright.inspect.check.run import check_run

    only = args.only.split(",") if args.only else None
    with Console(stderr=True).status("") as status:  # a line with the check that runs, on a terminal

        def show(name: str) -> None:
            status.update(f"check {name} …")

        report = check_run(trainer.run, max_seconds=args.max_seconds, only=only, output_dir=folder, on_start=show)
    if args.json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        report.print()
    if report.problems:
        return HAS_PROBLEM
    return IS_UNDECIDED if report.undecided else DONE


# Shared by the commands that try a configuration.


def config_parser(prog: str, usage: str, epilog: str) -> TrainingArgumentParser:
    found = TrainingArgumentParser(prog=prog, usage=f"{prog} {usage}", epilog=epilog)
    found.add_common("json", "allow-module", "trust-folder", "traceback", "opts")
    found.set_defaults(fast_dev_run=False, prog=prog)
    return found


def with_config(args: argparse.Namespace, use: "Callable[[DictConfig], int]") -> int:
    """``use(cfg)`` with the configuration of the arguments; errors of the user are printed."""
    from trainwright.cli.run_checkpoint import warn_of_other_trainer
    from trainwright.cli.train import caused_by_the_user, load, print_error
    from trainwright.config.lazy.lazy_config import try_get_key
    from trainwright.config.unread import warn_of_names

    try:
        args.config_file, args.opts = split_config(args.opts)
        cfg = load(args)
        print_line(f"{args.prog}: builds a DefaultTrainer of {args.config_file}", file=sys.stderr)
        if output_dir := try_get_key(cfg, "train.output_dir"):
            warn_of_other_trainer(Path(output_dir))
        warn_of_names(cfg, args.config_file)
        return use(cfg)
    except caused_by_the_user() as error:
        return print_error(error, args)


def with_trainer(args: argparse.Namespace, use: "Callable[[DefaultTrainer, str], int]") -> int:
    """``use(trainer, output_dir)`` with the trainer of the configuration, which writes into a temporary folder."""

    def build_and_use(cfg: "DictConfig") -> int:
        from trainwright.config.config_file.sections import complete
        from trainwright.engine import DefaultTrainer
        from trainwright.inspect.check.copies import quiet

        with tempfile.TemporaryDirectory() as folder:
            cfg = complete(cfg)
            output_dir = cfg.train.output_dir
            cfg.train.update({"output_dir": folder, "resume": False})
            with quiet():
                trainer = DefaultTrainer(cfg)
            return use(trainer, output_dir)

    return with_config(args, build_and_use)
