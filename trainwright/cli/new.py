"""A new project that trains at once: ``trainwright new PROJECT``."""

import argparse
import importlib.util
import keyword
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from trainwright.base.errors import ConfigError, MissingFileError
from trainwright.config.arguments import TrainingArgumentParser

_EPILOG = """\
examples:
  trainwright new my-project                 a config file, a model, data, a README and a test
  trainwright new my-project --api python    with a script that uses the Trainer

The project trains at once, on points that it draws. An existing folder is never changed.
"""


def parser() -> argparse.ArgumentParser:
    parser = TrainingArgumentParser(prog="trainwright new", epilog=_EPILOG)
    parser.add_argument("project", metavar="PROJECT", help="a new folder; its name is that of the project")
    parser.add_argument(
        "--api", choices=["config", "python"], default="config", help="config files (default) or the Python API"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    folder = Path(args.project).expanduser()
    if folder.is_symlink() or folder.exists():
        raise ConfigError(f"{folder}: exists already, and is not changed. Choose another name.")
    package = package_name(folder.name)
    if not folder.parent.is_dir():
        raise MissingFileError(f"{folder}: there is no folder {folder.parent}.")
    from trainwright.cli.project_files import project_files

    files = project_files(folder.name, package, args.api)
    folder.mkdir()  # fails if another process has made it meanwhile
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    print(f"{folder}: {', '.join(files)}\n")
    start = "trainwright train config.py" if args.api == "config" else "python train.py"
    print(f"  cd {shlex.quote(str(folder))}\n  {start}")
    return 0


def package_name(project: str) -> str:
    """The Python package of a project: ``my-project`` has ``my_project``.

    Raises:
        ConfigError: the name is not allowed, or that of an installed package.
    """
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,59}", project) is None:
        raise ConfigError(
            f"new: got {project!r}; a project's name has letters of English, digits, - and _, at most 60, and begins"
            " with a letter."
        )
    package = project.lower().replace("-", "_")
    if keyword.iskeyword(package):
        raise ConfigError(f"new: got {project!r}; {package} is a word of Python. Choose another name.")
    is_taken = package in sys.stdlib_module_names or package in ("tests", "output", "config", "train")
    if is_taken or importlib.util.find_spec(package) is not None:
        raise ConfigError(
            f"new: got {project!r}; there is a Python module {package} already, which the project's would hide. For"
            f" example: trainwright new my-{package.replace('_', '-')}"
        )
    return package
