"""The command-line arguments of a training script."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainwright.base.errors import ConfigError, did_you_mean

_EPILOG = """\
overrides are key=value pairs in any position:
  optim.lr=1e-3  train.train_iter=100  model.layers=[1,2]  '~train.scheduler.alpha'  dataloader.test.0.num_workers=0
"""

_COMMON: dict[str, dict[str, Any]] = {
    "json": {"action": "store_true", "help": "print JSON, for programs"},
    "allow-module": {
        "action": "append",
        "default": [],
        "metavar": "NAME",
        "help": "let YAML files and overrides name targets of this module; may be given several times",
    },
    "trust-folder": {
        "action": "store_true",
        "help": "import modules also from the folder of the YAML file, and from the project root that it names",
    },
    "traceback": {"action": "store_true", "help": "show the complete traceback of an error"},
    "opts": {"nargs": "*", "metavar": "CONFIG key=value", "help": "a configuration file, and overrides of it"},
}


def folder_of_run(path: str) -> Path:
    """The folder of the run of a checkpoint; that of a run itself."""
    above = Path(path).parent
    return above if (above / "run.json").is_file() else Path(path)


class TrainingArgumentParser(argparse.ArgumentParser):
    """Accepts flags before, between and after the overrides; suggests the nearest flag for an unknown one."""

    def __init__(self, **settings: Any) -> None:
        kind = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"formatter_class": kind, "allow_abbrev": False, **settings})

    def add_common(self, *names: str) -> None:
        """Add arguments that several commands have, such as "json" and "allow-module"."""
        for name in names:
            self.add_argument(name if name == "opts" else f"--{name}", **_COMMON[name])

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = list(sys.argv[1:] if args is None else args)
        for text in given:
            if text[1:2] not in ("", "-") and f"-{text}" in self._option_string_actions:  # argparse reads -help as -h
                self.refuse(text)
            flag, sign, value = text.partition("=")
            action = self._option_string_actions.get(flag)
            if sign and action is not None and action.nargs == 0:
                is_folder = flag == "--resume" and value.lower() not in ("true", "false", "1", "0", "yes", "no", "auto")
                run = f" The run is train.output_dir={folder_of_run(value)}" if is_folder else ""
                self.error(f"{flag} takes no value, and got {value!r}.{run}")
        known, unknown = self.parse_known_intermixed_args(given, namespace)
        if unknown:
            self.refuse(*unknown, given=given)
        return known

    def refuse(self, *arguments: str, given: Sequence[str] = ()) -> NoReturn:
        """Exit with what each unknown argument is called here."""
        texts = [text for text in arguments if text.startswith("-")] or arguments
        self.error("\n  ".join(f"unrecognized argument {text!r}. {self._hint(text, given)}".rstrip() for text in texts))

    def _hint(self, argument: str, given: Sequence[str]) -> str:
        from trainwright.config.option_hints import option_hint, value_after

        flags = [option for option in self._option_string_actions if option.startswith("--")]
        name, command = argument.partition("=")[0], self.prog.split()[-1]
        has_overrides = any(action.dest == "opts" for action in self._actions)
        if not argument.startswith("-"):
            file = next((f" Did you mean {flag} {argument}?" for flag in ("--output",) if flag in flags), "")
            return f"`{self.prog} --help` shows what it takes.{file}"
        if f"-{name}" in flags:
            return f"Did you mean '-{name}'?"
        if "." in name and has_overrides:
            return f"An override has no dashes: {argument.lstrip('-')}{'' if '=' in argument else '=...'}"
        return option_hint(name, value_after(argument, given), command, flags, has_overrides=has_overrides)


class CommandsParser(TrainingArgumentParser):
    """A command with subcommands, each with its own parser; ``args.run`` is the function of the one that is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._commands = self.add_subparsers(parser_class=TrainingArgumentParser)

    def add_command(self, name: str, run: Callable[..., int], usage: str, text: str) -> TrainingArgumentParser:
        parser = self._commands.add_parser(name, description=text)
        parser.usage = f"{parser.prog} {usage}"
        parser.set_defaults(run=run)
        return parser

    def format_help(self) -> str:
        parts = (f"  {parser.usage}\n        {parser.description}" for parser in self._commands.choices.values())
        return "\n".join([f"usage: {self.prog} COMMAND ...\n", *parts, f"\n{self.epilog}\n"])

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        name, *rest = args or ["--help"]
        if name in ("-h", "--help"):
            self.print_help()
            self.exit()
        if name not in (parsers := self._commands.choices):
            raise ConfigError(f"{self.prog.split()[-1]}: no command {name!r}. {did_you_mean(name, parsers)}")
        return parsers[name].parse_args(rest, namespace)


def split_config(opts: Sequence[str]) -> tuple[str, list[str]]:
    """The configuration among overrides, in any position ("" if there is none), and the overrides.

    A file or folder whose path has a "=" is a configuration if it exists.

    >>> split_config(["seed=1", "config.py", "~optim"])
    ('config.py', ['seed=1', '~optim'])
    """
    place = next((n for n, text in enumerate(opts) if _is_config(text)), None)
    if place is None:  # a folder only then: those of sweeps are named by overrides
        place = next((n for n, text in enumerate(opts) if os.path.isdir(os.path.expanduser(text))), None)
    return ("", [*opts]) if place is None else (opts[place], [*opts[:place], *opts[place + 1 :]])


def _is_config(text: str) -> bool:
    if "=" not in text:
        return not text.startswith("~")
    return text.endswith((".py", ".yaml", ".yml")) and os.path.isfile(os.path.expanduser(text))


def whole_number(minimum: int = 0, maximum: int | None = None) -> Callable[[str], int]:
    """The type of an argument: a whole number from ``minimum`` to ``maximum``.

    >>> whole_number(1)("12")
    12
    """

    def parse(text: str) -> int:
        try:
            number: int | None = int(text)
        except ValueError:
            number = None
        if number is None or number < minimum or (maximum is not None and number > maximum):
            allowed = f">= {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise argparse.ArgumentTypeError(f"got {text!r}; it must be a whole number {allowed}.")
        return number

    return parse


def positive_number(text: str) -> float:
    """The type of an argument: a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}; it must be a number above 0.")
    return number


def default_argument_parser(epilog: str | None = None, *, prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of ``trainwright train`` and of training scripts.

    Its namespace has ``config_file, resume, eval_only, fast_dev_run, allow_module`` (a list), ``trust_folder``,
    ``traceback`` and ``opts``, the overrides.
    """
    parser = TrainingArgumentParser(prog=prog, epilog=_EPILOG if epilog is None else epilog)
    parser.add_argument(
        "--config-file", default="", metavar="FILE", help="configuration file (.py, or .yaml of an earlier run)"
    )
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in train.output_dir")
    parser.add_argument("--eval-only", action="store_true", help="evaluate the weights and stop")
    parser.add_argument("--fast-dev-run", action="store_true", help="a few iterations, to check that everything works")
    parser.add_common("allow-module", "trust-folder", "traceback", "opts")
    return parser
