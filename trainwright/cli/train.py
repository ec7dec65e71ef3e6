"""Train from a configuration file: ``trainwright train CONFIG`` and ``tools/train_net.py --config-file CONFIG``."""

import argparse
import errno
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from trainwright.base.error_file import is_reported
from trainwright.base.errors import (
    ConfigError,
    ConfigKeyError,
    ConfigTypeError,
    MissingFileError,
    UserError,
    nearest_name,
)
from trainwright.base.signal_handlers import end_by_sigint, quiet_interrupt, restore_handler, set_handler
from trainwright.base.terminal import guarded, open_standard_streams, print_line, shortened
from trainwright.config.arguments import default_argument_parser, folder_of_run, split_config, whole_number
from trainwright.config.secrets import redact, with_short_errors

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch import nn

    from trainwright.engine import DefaultTrainer

logger = logging.getLogger("trainwright.config")

T = TypeVar("T")

DONE, FAILED, USAGE_ERROR = 0, 1, 2
INTERRUPTED = 130  # the shells' code for Ctrl-C
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)  # not a program's fault


def caused_by_the_user() -> tuple[type[Exception], ...]:
    """Errors that come from the configuration or the data while a run is built, not from a fault in a program."""
    from omegaconf.errors import OmegaConfBaseException  # for example a missing value of the configuration

    errors = (UserError, ValueError, TypeError, LookupError, AttributeError, ImportError, SyntaxError, OSError)
    return (*errors, OmegaConfBaseException)


def parser(prog: str | None = "trainwright train") -> argparse.ArgumentParser:
    """``prog=None``: of a training script, which takes the file as --config-file only."""
    parser = default_argument_parser(prog=prog)
    if prog is not None:
        parser.usage = f"{prog} CONFIG [--resume] [--eval-only] [--fast-dev-run] [--sweep] [key=value ...]"
    add = parser.add_argument_group("several runs").add_argument
    add(
        "--sweep",
        "-m",
        "--multirun",
        action="store_true",
        help="a run for each combination of values: optim.lr=0.1,0.01 --sweep",
    )
    text = "a search: N runs whose values are drawn: optim.lr=log(1e-4,1e-1); needs --metric"
    add("--trials", type=whole_number(1), metavar="N", help=text)
    add("--jobs", type=whole_number(1), metavar="N", help="how many of the runs train at a time (default: 1)")
    add("--metric", metavar="NAME", help="what is compared, such as eval_loss: the best value of each run")
    text = "which values of --metric are better, if its name does not say it"
    add("--direction", choices=("minimize", "maximize"), help=text)
    text = "how a search draws: by earlier results (default), or at random"
    add("--sampler", choices=("tpe", "random"), help=text)
    return parser


def main(
    argv: Sequence[str] | None = None, *, trainer_class: "type[DefaultTrainer] | None" = None, prog: str | None = None
) -> int:
    """Train or evaluate from the command line, with ``trainer_class`` (a DefaultTrainer) if it is given.

    Returns the exit code: 0, 1 (failed), 2 (wrong arguments or configuration) or 130 (stopped by Ctrl-C; without
    ``argv`` the process ends by the signal itself). SIGTERM in a training ends the process with 143, after a save.
    """
    if isinstance(argv, type) or not isinstance(trainer_class, type | None):
        given = argv if isinstance(argv, type) else type(trainer_class)
        raise ConfigTypeError(f"main: the trainer is a class, passed by name: main(trainer_class={given.__name__}).")
    args = parser(prog).parse_args(argv)
    if not args.config_file:  # `trainwright train CONFIG …`, in any position among the overrides
        args.config_file, args.opts = split_config(args.opts)
    if args.sweep or args.trials:
        if trainer_class is not None and argv is not None:
            parser(prog).error("--sweep: its runs start this script again; call main(trainer_class=...) without argv.")
        from trainwright.cli.sweep.command import Sweep
        from trainwright.cli.sweep.processes import command_of_runs

        sweep = Sweep(args, command_of_runs(is_script=argv is None), trainer_class)
        code = run(args, lambda: load(sweep.arguments()), sweep.prepare) or sweep.code
    else:
        code = run(args, lambda: _load_one(args), lambda cfg: _prepare(cfg, args, trainer_class))
    if code == INTERRUPTED and argv is None:
        raise quiet_interrupt()
    return code


def run(args: argparse.Namespace, load: Callable[[], T], prepare: Callable[[T], Callable[[], object]]) -> int:
    """Load a user's program, prepare its run, and call what ``prepare`` returns; returns the exit code.

    Errors are printed: without a traceback, unless one comes from the run itself and is no UserError.
    """
    open_standard_streams()
    try:
        with _early_signals():
            return _run(args, load, prepare)
    finally:
        if "torch" in sys.modules:
            from trainwright.parallel.data_parallel import shut_down

            shut_down()
        guarded(sys.stdout).flush()  # otherwise the exit fails after a closed pipe


def _run(args: argparse.Namespace, load: Callable[[], T], prepare: Callable[[T], Callable[[], object]]) -> int:
    try:
        loaded = load()
    except Exception as error:  # a configuration file is the user's program
        return print_error(error, args)
    try:
        start = prepare(loaded)
    except caused_by_the_user() as error:
        return print_error(error, args)
    try:
        start()
    except UserError as error:
        from trainwright.parallel.stack_places import place_below  # loads torch, as the run has done

        if (place := place_below(error.__traceback__)) is not None:
            error.add_note(f"The error came from {place}; --traceback shows all calls.")
        return print_error(error, args)
    except KeyboardInterrupt:
        print_line("Interrupted.", file=sys.stderr)  # the log says how to continue
        return INTERRUPTED
    except OSError as error:
        print_error(error, args, with_traceback=error.errno not in _OF_THE_DISK)
        return FAILED
    except Exception as error:
        print_error(error, args, with_traceback=True)
        return FAILED
    return DONE


def _prepare(
    cfg: "DictConfig", args: argparse.Namespace, trainer_class: "type[DefaultTrainer] | None"
) -> Callable[[], object]:
    """Run everything before the first step; return the rest."""
    from trainwright.config.unread import warn_of_names
    from trainwright.engine import DefaultTrainer, default_setup  # here: a wrong key is reported before torch is loaded

    default_setup(cfg, args)
    if trainer_class is None:  # one of the user's own may read any name
        warn_of_names(cfg, args.config_file)
    trainer_class = trainer_class or DefaultTrainer
    if args.eval_only:
        return _evaluation(cfg, args, trainer_class)
    return trainer_class(cfg).train


def _load_one(args: argparse.Namespace) -> "DictConfig":
    if option := next((name for name in ("jobs", "metric", "direction", "sampler") if getattr(args, name)), None):
        raise ConfigError(f"--{option}: is for several runs. Add --sweep, or --trials N for a search.")
    return load(args)


def load(args: argparse.Namespace) -> "DictConfig":
    from trainwright.config.lazy.allowlist import allow_module, use_project
    from trainwright.config.lazy.lazy_config import LazyConfig, try_get_key
    from trainwright.config.yaml_file import regular_file

    if not args.config_file:
        raise ConfigError(
            "No configuration file. For example: trainwright train config.py (`trainwright new PROJECT` writes one)"
        )
    regular_file(args.config_file)
    for name in args.allow_module:
        allow_module(name)
    if Path(args.config_file).suffix == ".py":
        _refuse_program(args.config_file)
        use_project(args.config_file)
        cfg = LazyConfig.load(args.config_file)
    else:
        cfg = LazyConfig.load(args.config_file)
        trusts_folder = getattr(args, "trust_folder", False)
        roots = use_project(args.config_file, cfg, trusts_folder=trusts_folder)  # a saved config.yaml names its project
        if trusts_folder:
            print_line(
                f"trainwright: --trust-folder imports modules from {', '.join(map(str, roots))}", file=sys.stderr
            )
    _refuse_unread(cfg, args.opts, args.config_file)
    cfg = LazyConfig.apply_overrides(cfg, args.opts)
    if args.fast_dev_run and not try_get_key(cfg, "train.fast_dev_run", default=False):
        LazyConfig.apply_overrides(cfg, ["train.fast_dev_run=true"])
    return cfg


def _refuse_program(file: str) -> None:
    """Raise for a program of the Python API, before it runs."""
    from trainwright.cli.python_program import program_sign

    if sign := program_sign(Path(file)):
        raise ConfigError(
            f"{file}: is a program, not a config file ({sign}), and has not been run. Run it: python {file}; on several"
            f" processes: trainwright launch -n 2 {file}. A config file sets model and dataloader; `trainwright new"
            " PROJECT` writes one."
        )


def _refuse_unread(cfg: "DictConfig", overrides: Sequence[str], file: str) -> None:
    """Raise for an override without a value, or that would add a key at the top level, which nothing reads."""
    from trainwright.config.key_hints import key_hint
    from trainwright.config.lazy.provenance import SECTIONS

    unread: list[str] = []
    for text, following in zip(overrides, [*overrides, "="][1:], strict=True):
        if text.endswith((".py", ".yaml", ".yml")) and "=" not in text:
            raise ConfigError(f"two configuration files, {file} and {text}; a run has one. Overrides are key=value.")
        if "=" not in text and (os.sep in text or os.path.isdir(text)):
            if (Path(text) / "manifest.json").is_file():
                raise ConfigError(
                    f"{text}: a folder is no override, and --resume takes none: it continues the newest checkpoint of"
                    f" train.output_dir={Path(text).parent}. `trainwright eval {text}` evaluates this one;"
                    f" train.load_weight={text} starts another training from its weights."
                )
            raise ConfigError(
                f"{text}: a folder is no override, and --resume takes none: train.output_dir={folder_of_run(text)} is"
                " the folder of the run, and --resume continues its newest checkpoint."
            )
        if "=" not in text and not text.startswith("~"):
            example = "" if "=" in following or following.startswith("~") else f": {text}={following}"
            if (parts := re.fullmatch(r"([\w.]+)(:=?)(.+)", text)) is not None:
                example = f": {parts[1]}={parts[3]}"
            raise ConfigError(
                f"override {text!r}: has no value. An override is written key=value, without spaces{example}"
            )
        key = text.lstrip("+~").partition("=")[0]
        top = key.partition(".")[0]
        if text.startswith(("+", "~")) or top in SECTIONS or top in cfg:
            continue
        hint = "" if top.lower() not in cfg else f"Did you mean {key.lower()!r}?"
        hint = hint or key_hint(key) or nearest_name(top, [*SECTIONS, *cfg]).strip()
        unread.append(
            f"override {text!r}: {file} has no key {top!r}, and nothing reads it.{f' {hint}' if hint else ''}"
            f" (+{text} adds it, for a program of your own.)"
        )
    if unread:
        raise ConfigKeyError("\n  ".join(unread))


def _evaluation(
    cfg: "DictConfig", args: argparse.Namespace, trainer_class: "type[DefaultTrainer]"
) -> Callable[[], object]:
    if not cfg.train.load_weight and not args.resume:
        raise ConfigError(
            "train.load_weight: nothing to evaluate. Add train.load_weight=FOLDER (a checkpoint, for example"
            f" {cfg.train.output_dir.rstrip('/')}/model_best), or --resume for the latest checkpoint there."
        )
    from trainwright.config_trainer.own_methods import check_class_methods

    check_class_methods(trainer_class)
    model, loaders = build_evaluation(cfg, trainer_class, "" if args.resume else cfg.train.load_weight)
    return lambda: trainer_class.test(cfg, loaders, model)


def build_evaluation(
    cfg: "DictConfig", trainer_class: "type[DefaultTrainer]", weights: str = ""
) -> "tuple[nn.Module, list[Any]]":
    """The model with its weights, by default those of the latest checkpoint, and the test loaders."""
    from trainwright.checkpoint.checkpointer import Checkpointer
    from trainwright.config_trainer.setup import model_of_run_in_errors, started
    from trainwright.parallel.precision import apply_autocast

    cfg, device, _ = started(cfg)
    loaders = trainer_class.build_test_loader(cfg)
    if not loaders:
        raise ConfigError("dataloader.test: no loader to evaluate on; it must be a list with at least one.")
    model = trainer_class.build_model(cfg).to(device)
    checkpointer = Checkpointer(model, cfg.train.output_dir)
    weights = weights or checkpointer.get_checkpoint_file()
    if not weights:
        raise MissingFileError(f"{cfg.train.output_dir}: no checkpoint to evaluate.")
    with model_of_run_in_errors(cfg, lambda: weights):
        checkpointer.load(weights, checkpointables=[], strict=True)
    if cfg.train.amp.enabled and cfg.train.amp.get("evaluation", False):
        apply_autocast(model, device)  # as in the evaluations of the training, for equal results
    return model, loaders


@contextmanager
def _early_signals() -> Iterator[None]:
    """Handle signals while there is nothing to save: ignore SIGUSR1 (a request to save); SIGINT exits at once.

    A KeyboardInterrupt during an import may cause any error. A training installs its own handlers.
    """
    ours: dict[str, tuple[Any, Any]]
    ours = {"SIGINT": (signal.default_int_handler, _end_at_once), "SIGUSR1": (signal.SIG_DFL, lambda *_: None)}
    replaced = []
    if threading.current_thread() is threading.main_thread():
        for name, (default, handler) in ours.items():
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is default:
                set_handler(number, handler)
                replaced.append(number)
    try:
        yield
    finally:
        for number in replaced:
            restore_handler(number)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nInterrupted.\n")
    end_by_sigint()


def print_error(error: BaseException, args: argparse.Namespace | None = None, *, with_traceback: bool = False) -> int:
    """Print an error, or one line if it follows from the failure of another process; returns the exit code."""
    faults = sys.modules.get("trainwright.parallel.faults")  # not loaded: the processes have not met
    line = ("" if is_reported(error) else None) if faults is None else faults.line_for(error)
    if line == "":
        return getattr(error, "exit_code", USAGE_ERROR)
    if line is not None:
        print_line(line, file=sys.stderr)
        return FAILED
    message = shortened(redact(str(error))) or type(error).__name__
    if not isinstance(error, UserError):  # the message of another library's error needs its type
        message = f"{type(error).__name__}: {message}"
    text = "\n  ".join([f"trainwright: {message}", *getattr(error, "__notes__", ())])
    if with_traceback or getattr(args, "traceback", False):
        text = with_short_errors("".join(traceback.format_exception(error)).rstrip(), error)
    print_line(redact(text), file=sys.stderr)
    if faults is not None:
        faults.mark_reported()
    return getattr(error, "exit_code", USAGE_ERROR)
