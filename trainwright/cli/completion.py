"""Completion of commands, options, files and settings in a shell, by argcomplete: ``trainwright completion bash``."""

import argparse
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainwright.base.errors import ConfigError, import_optional
from trainwright.cli.commands import COMMANDS, module_of
from trainwright.config.arguments import TrainingArgumentParser

SHELLS = ("bash", "zsh", "fish")
_EPILOG = """\
set up, once:
  bash   echo 'eval "$(trainwright completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(trainwright completion zsh)"' >> ~/.zshrc
  fish   trainwright completion fish > ~/.config/fish/completions/trainwright.fish

Completes commands, options, files, the settings of config files (train.lo<TAB>) and checkpoints.
Needs argcomplete: pip install argcomplete
"""


def parser() -> argparse.ArgumentParser:
    parser = TrainingArgumentParser(prog="trainwright completion", epilog=_EPILOG)
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the code that the shell evaluates, and return the exit code."""
    args = parser().parse_args(argv)
    print(_argcomplete().shellcode(["trainwright"], shell=args.shell))
    return 0


def complete() -> None:
    """Answer a request of the shell, which is in the environment, and end the process."""
    _argcomplete().autocomplete(_tree(os.environ.get("COMP_LINE", "")), always_complete_options="long")


def _argcomplete() -> Any:
    message = "completion: needs argcomplete: pip install argcomplete"
    return import_optional("argcomplete", message, ConfigError)


def _tree(line: str) -> argparse.ArgumentParser:
    """The commands, and the options of the one in the line: the modules of the others are not imported."""
    root = argparse.ArgumentParser(prog="trainwright")
    root.add_argument("--version", action="store_true")
    commands = root.add_subparsers()
    for name, text in COMMANDS.items():
        parents = [importlib.import_module(module_of(name)).parser()] if name in line.split()[1:2] else []
        for action in (action for parent in parents for action in parent._actions):
            _add_completer(action)
        commands.add_parser(name, parents=parents, add_help=not parents, help=text)
    return root


def _add_completer(action: argparse.Action) -> None:
    from argcomplete.completers import FilesCompleter

    if isinstance(action, argparse._SubParsersAction):
        for inner in (inner for parser in action.choices.values() for inner in parser._actions):
            _add_completer(inner)
    elif action.dest == "checkpoint":
        action.completer = _checkpoints  # type: ignore[attr-defined]
    elif action.dest == "opts":
        files = FilesCompleter()

        def settings_or_files(prefix: str, **context: Any) -> list[str]:
            return [*files(prefix, **context), *_settings(prefix)]

        action.completer = settings_or_files  # type: ignore[attr-defined]


def _settings(prefix: str) -> Iterator[str]:
    """The settings of config files, a section at a time."""
    from omegaconf import DictConfig

    from trainwright.config.lazy.lazy_config import get_config, try_get_key
    from trainwright.config.lazy.provenance import raw_children

    above, dot, _ = prefix.rpartition(".")
    defaults = get_config("common/defaults.py")
    section = try_get_key(defaults, above) if dot else defaults
    for key, value in raw_children(section).items() if isinstance(section, DictConfig) else ():
        yield f"{above}{dot}{key}{'.' if isinstance(value, DictConfig) else '='}"


def _checkpoints(prefix: str, parsed_args: argparse.Namespace, **context: Any) -> list[str]:
    from trainwright.checkpoint.verify import checkpoint_paths

    given = [getattr(parsed_args, "run", None), *(getattr(parsed_args, "opts", None) or [])]
    names = []
    for place in given:
        with suppress(OSError):
            names += [path.name for path in checkpoint_paths(Path(place))] if place and Path(place).is_dir() else []
    return names
