"""The run and the checkpoint that a command names: ``RUN``, ``RUN/model_best``, ``CONFIG --checkpoint NAME``."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.base.errors import ConfigError, ConfigKeyError, MissingFileError, did_you_mean, missing_path
from trainwright.base.terminal import print_line
from trainwright.checkpoint.folder import is_checkpoint
from trainwright.checkpoint.verify import checkpoint_paths, inspect_folders
from trainwright.events.formats import RECORD_NAME, read_starts
from trainwright.inspect.report.run_state import CONFIGS, config_file
from trainwright.inspect.report.text import shown

if TYPE_CHECKING:
    from trainwright.engine import Trainer


@dataclass(frozen=True, slots=True)
class Target:
    """What a command works on. ``config``: a config file, None for a run of the Python API. ``run``: a run's folder."""

    config: Path | None
    run: Path | None
    checkpoint: Path | None = None


def find_target(text: str) -> Target:
    path = Path(text).expanduser()
    if path.is_file():
        is_saved = path.name == CONFIGS[0] and (path.parent / "metrics.json").is_file()
        return Target(path, path.parent if is_saved else None)
    if not path.is_dir():
        raise missing_path(path, "no such run or config file: has it been trained?")
    above = [path, path.parent, path.parent.parent] if is_checkpoint(path) else [path]
    for folder in above:
        if (config := config_file(folder)) is not None:
            return Target(config if config.name == CONFIGS[0] else None, folder, path if folder != path else None)
    raise ConfigError(
        f"{path}: is not a run: it has neither {CONFIGS[0]} (config files) nor {CONFIGS[1]} (Python API)."
        " `trainwright runs` lists the runs below a folder."
    )


def find_checkpoint(run: Path, name: str | None) -> Path:
    """The checkpoint ``name`` of a run (or its path); by default the best one, else that of a resume."""
    paths = checkpoint_paths(run)
    if name:
        named = [path for path in paths if path.name == name]
        for path in (*named, run / name, Path(name).expanduser()):
            if is_checkpoint(path):
                return path
        known = [path.name for path in paths]
        raise ConfigKeyError(f"--checkpoint: {run} has no checkpoint {name!r}. {did_you_mean(name, known)}")
    best = [path for path in paths if path.name == "model_best"]
    last = best or [place.resumed.path for place in inspect_folders(run, contents=False) if place.resumed]
    if not run.exists():
        raise missing_path(
            run, "there is no such folder: nothing was trained. Train first: `trainwright train CONFIG`."
        )
    if not last:
        raise MissingFileError(f"{run}: has no complete checkpoint.")
    return last[0]


def warn_of_other_trainer(run: Path) -> None:
    """Warn if a class of the user's own has trained the run: a command builds a DefaultTrainer."""
    start = next(iter(read_starts(run / RECORD_NAME)[-1:]), {})
    name = start.get("trainer")
    if name not in (None, "DefaultTrainer"):
        name, program = shown(str(name)), f" (`{shown(start['command'])}`)" if start.get("command") else ""
        print_line(
            f"trainwright: WARNING: {run} is of the trainer {name}{program}; this command builds a DefaultTrainer,"
            f" which may compute something else. Use the methods of {name} in your program.",
            file=sys.stderr,
        )


def load_trainer(text: str) -> "Trainer":
    """The Trainer that a function of a script returns: ``FILE.py:NAME``, by default ``build_trainer``."""
    import importlib.util

    file, _, name = text.rpartition(":") if not text.endswith(".py") else (text, "", "build_trainer")
    path = Path(file).expanduser()
    if not path.is_file() or path.suffix != ".py":
        raise MissingFileError(f"--trainer: {file or text}: no such Python file; for example train.py:build_trainer.")
    sys.path.insert(0, str(path.parent.resolve()))  # as Python does for a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # processes that load data find it
    spec.loader.exec_module(module)
    build: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(build):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigKeyError(f"--trainer: {path} has no function {name!r}. {did_you_mean(name, names)}")
    from trainwright import Trainer

    trainer = build()
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"--trainer: {path}:{name} returned a {type(trainer).__name__}; it must return a Trainer.")
    return trainer
