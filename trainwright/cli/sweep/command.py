"""The runs of a sweep, from its command line to its table."""

import argparse
import copy
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.base.errors import ConfigError, nearest_name
from trainwright.base.files import atomic_write
from trainwright.base.terminal import print_line
from trainwright.cli.run_folder import SWEEP_TABLE
from trainwright.cli.sweep.processes import Processes
from trainwright.cli.sweep.results import (
    NOT_STARTED,
    FirstEvaluation,
    Result,
    counts,
    is_misspelt,
    lines_of,
    read_result,
    sorted_results,
    write_report,
    write_table,
)
from trainwright.cli.sweep.source import Grid, PlannedRun, Search, Source
from trainwright.cli.sweep.values import folder_name, read_values, short_keys
from trainwright.events.formats import METRICS_NAME
from trainwright.inspect.report.run_state import flat
from trainwright.inspect.report.text import cell, counted, duration, shown

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainwright.engine import DefaultTrainer

DONE, FAILED = 0, 1
RECORD = "sweep.json"  # in the folder of the sweep: what its runs have in common
FORMAT = 1  # of this file
_KEPT = ("finished", "running")
_OF_TRAINING = ("total_loss", "grad_norm", "lr")  # results of a run without evaluations
_OF_RESULTS = ("build_test_loader", "test", "build_hooks", "train_step", "run_step")  # methods of a trainer


class Sweep:
    """A run for each combination of values. ``command`` trains one. Everything is checked before the first begins.

    ``trainer_class``: that of the runs; None: `DefaultTrainer`.

    ``code`` is the exit code. 0: all runs are complete. 1: some are not. 128 + n: stopped by signal n.
    """

    def __init__(
        self, args: argparse.Namespace, command: Sequence[str], trainer_class: "type[DefaultTrainer] | None" = None
    ) -> None:
        self._args, self._command, self._trainer_class = args, command, trainer_class
        self._direction: str | None = None
        self._first_evaluation = FirstEvaluation(args.metric, is_own=args.direction is not None)
        self._shown_errors: set[str] = set()  # the names of their runs
        self.code = DONE

    def arguments(self) -> argparse.Namespace:
        """The arguments with the overrides that have one value."""
        args = self._args
        _check_options(args)
        self._values = values = read_values(args.opts)
        if not values.keys:
            text = next((opt for opt in args.opts if re.search(r"=(['\"]).*,.*\1$|=\[.*,.*\]$", opt)), None)
            one = "" if text is None else f" {text} is one value: leave out the quotes or brackets around several."
            raise ConfigError(
                f"--sweep: no setting has several values.{one} Write optim.lr=0.1,0.01 for a grid, or"
                " optim.lr=log(1e-4,1e-1) with --trials N for a search."
            )
        if values.ranges and not args.trials:
            key, range_ = next(iter(values.ranges.items()))
            raise ConfigError(f"{key}={range_}: a range is searched: add --trials N --metric NAME.")
        return argparse.Namespace(**{**vars(args), "opts": list(values.fixed)})

    def prepare(self, cfg: "DictConfig") -> Callable[[], None]:
        """Check the configuration of each run; return what trains them."""
        args, base = self._args, self._checked(cfg)
        if args.metric:
            _check_metric(args, base, self._trainer_class)
            self._direction = _direction(args, base)
        names = "_".join(["search" if args.trials else "sweep", *short_keys(self._values.keys).values()])
        self._folder = Path(base.train.output_dir) / folder_name(names, self._values.keys)
        self._record = self._new_record(base)
        self._seed = int(base.train.seed)
        self._has_mirror = bool(base.train.checkpointer.get("mirror"))
        return self._train

    def _checked(self, cfg: "DictConfig") -> "DictConfig":
        """The complete configuration without the values of the sweep, with which it is checked."""
        from trainwright.config.lazy.lazy_config import LazyConfig
        from trainwright.config_trainer.setup import checked

        values = self._values
        if any(key.lstrip("+") == "train.output_dir" for key in values.keys):
            raise ConfigError("train.output_dir: each run of a sweep has a folder of its own; give one value.")
        for texts in values.examples() if self._args.trials else values.grid():
            one = LazyConfig.apply_overrides(copy.deepcopy(cfg), [f"{key}={text}" for key, text in texts.items()])
            checked(one, source=self._args.config_file)
        return checked(one, source=self._args.config_file)

    def _new_record(self, base: "DictConfig") -> dict[str, Any]:
        from trainwright.config.lazy.serialization import to_plain
        from trainwright.config.secrets import redact_command, without_secrets

        swept = [key.lstrip("+") for key in self._values.keys]
        settings = {
            key: value
            for key, value in flat(without_secrets(to_plain(base)[0])[0])
            if not any(f"{key}.".startswith(f"{one}.") for one in [*swept, "train.output_dir"])
        }
        record: dict[str, Any] = {"format": FORMAT, "config": self._args.config_file}
        record |= {"overrides": redact_command(self._values.fixed)}
        record |= {"values": {key: list(texts) for key, texts in self._values.choices.items()}}
        if self._args.trials:
            ranges = {key: str(range_) for key, range_ in self._values.ranges.items()}
            record |= {"ranges": ranges, "metric": self._args.metric, "direction": self._direction}
            record |= {"sampler": self._args.sampler or "tpe"}
        record["settings"] = settings
        plain: dict[str, Any] = json.loads(json.dumps(record, default=str))
        return plain

    def _train(self) -> None:
        with _held(self._folder):
            self._train_all()

    def _train_all(self) -> None:
        source = self._source()
        results = {run.name: self._result(run) for run in source.known()}
        num_kept = sum(one.state == "finished" for one in results.values())
        jobs, folder = self._args.jobs or 1, shown(self._folder)
        print_line(
            f"{counted(source.total, 'run', 'runs')} of {shown(self._values)}, {jobs} at a time, in {folder}"
            + (f"; {num_kept} complete" if num_kept else "")
        )
        print_line(
            f"Ctrl-C saves and stops; the same command continues. `trainwright runs {folder}` shows the progress."
        )
        planned = self._to_train(source, results)
        with Processes(jobs) as processes:
            while True:
                while not processes.received and not processes.is_full and (run := next(planned, None)) is not None:
                    results[run.name] = Result(run, NOT_STARTED)
                    self._write_table(results)
                    verb = "continued" if _has_checkpoint(self._folder / run.name) else "started"
                    processes.start(run.name, self._command_of(run), self._folder / run.name)
                    print_line(f"{_place(run, results, source)} {shown(run.name)}  {verb}{self._shown_values(run)}")
                if processes.is_idle:
                    break
                name, code = processes.wait(
                    lambda: self._first_evaluation.look(self._folder / one for one in processes.names)
                )
                result = results[name] = self._result(results[name].run, code)
                if result.state in ("finished", "failed"):
                    source.end(result.run, result.value)
                print_line(f"{_place(result.run, results, source)} {shown(name)}  {_text_of(result)}")
                self._shown_errors.add(name)
                self._write_table(results)
            received = [*processes.received]
        self.code = self._end(list(results.values()), source.total, received)

    def _source(self) -> Source:
        self._folder.mkdir(parents=True, exist_ok=True)
        begins = self._check_record()
        atomic_write(self._folder / RECORD, json.dumps(self._record, indent=1).encode() + b"\n")
        if not self._args.trials:
            return Grid(self._values)
        return Search(
            self._values,
            self._folder,
            self._args.trials,
            direction=str(self._direction),
            sampler=self._record["sampler"],
            seed=self._seed,
            begins=begins,
        )

    def _check_record(self) -> bool:
        """Whether no run of the folder counts; an error if its runs have other settings than this command."""
        before = _read_record(self._folder / RECORD)
        trained = [one for one in self._folder.iterdir() if (one / "metrics.json").is_file()]
        if before is None or not trained:
            return True
        parts = ("settings", "values", "ranges", "sampler") if self._args.trials else ("settings",)
        is_other_metric = any(before.get(name) != self._record.get(name) for name in ("metric", "direction"))
        old, new = (
            {key: value for part in parts for key, value in flat({part: record.get(part, {})})}
            for record in (before, self._record)
        )
        different = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        if self._args.trials and is_other_metric and _has_results(self._folder):
            different.insert(0, "metric")
            old["metric"], new["metric"] = before.get("metric"), self._record.get("metric")
        if different:
            shown_ = [
                f"{key.removeprefix('settings.')}: {cell(old.get(key))} before, {cell(new.get(key))} now"
                for key in different[:5]
            ]
            more = f"\n  … and {len(different) - 5} more" if len(different) > 5 else ""
            raise ConfigError(
                f"{self._folder}: its runs have other settings than this command, so they cannot be compared.\n  "
                + "\n  ".join(shown_)
                + f"{more}\n  Give another train.output_dir, or delete this folder."
            )
        return is_other_metric

    def _to_train(self, source: Source, results: dict[str, Result]) -> Iterator[PlannedRun]:
        for result in [*results.values()]:
            if result.state not in _KEPT:
                yield result.run
            elif result.state == "finished":
                source.end(result.run, result.value)
        yield from source.new()

    def _result(self, run: PlannedRun, code: int | None = None) -> Result:
        return read_result(run, self._folder, self._args.metric, self._direction, code)

    def _command_of(self, run: PlannedRun) -> list[str]:
        args = self._args
        path = self._folder / run.name
        folder = str(path).replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${")
        # A resume of a new folder would be a warning.
        resumes = self._has_mirror or (path / METRICS_NAME).is_file() or _has_checkpoint(path)
        options = [text for name in args.allow_module for text in ("--allow-module", name)]
        options += ["--trust-folder"] * args.trust_folder + ["--traceback"] * args.traceback
        values = [f"{key}={text}" for key, text in run.texts.items()]
        return [
            *self._command,
            *("--config-file", args.config_file, *(["--resume"] if resumes else []), *options),
            *(*self._values.fixed, *values, f"train.output_dir='{folder}'"),
        ]

    def _shown_values(self, run: PlannedRun) -> str:
        if not self._args.trials:
            return ""
        names = short_keys(run.texts)
        return ": " + ", ".join(f"{names[key]}={shown(text)}" for key, text in run.texts.items())

    def _write_table(self, results: Mapping[str, Result]) -> None:
        """The table of the runs that have ended, while others train."""
        ended = [one for one in results.values() if one.state not in (NOT_STARTED, "running")]
        write_table(sorted_results(ended), self._values.keys, self._folder)

    def _end(self, results: list[Result], total: int, received: Sequence[int]) -> int:
        ordered = sorted_results(results)
        write_table(ordered, self._values.keys, self._folder)
        print_line("")
        without_shown = [replace(one, error="") if one.run.name in self._shown_errors else one for one in ordered]
        for line in lines_of(without_shown, self._values.keys):
            print_line(line)
        summary = ", ".join(f"{number} {state}" for state, number in counts(results).items())
        left = total - len(results)
        print_line(f"{counted(total, 'run', 'runs')}: {summary}" + (f", {left} not drawn" if left else ""))
        if ordered[0].value is not None:
            print_line(f"Best: {self._folder / ordered[0].run.name} ({ordered[0].metric} {ordered[0].value:.6g})")
        print_line(f"Table: {self._folder / SWEEP_TABLE}")
        if received:
            print_line("Stopped; the same command continues.")
            return 128 + received[0]
        write_report(self._folder, [one.run.name for one in ordered])
        if all(one.state == "finished" for one in results):
            return DONE
        print_line("The same command tries the runs that are not complete again.")
        return FAILED


def _check_options(args: argparse.Namespace) -> None:
    for name in ("eval_only", "fast_dev_run"):
        if getattr(args, name):
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"--sweep: does not work with {option}, which is for one run.")
    if "RANK" in os.environ:
        raise ConfigError("--sweep: starts the processes of its runs itself; use it without a launcher.")
    if args.trials and not args.metric:
        raise ConfigError("--trials: needs --metric NAME, what the search improves, such as --metric eval_loss.")
    if args.sampler and not args.trials:
        raise ConfigError("--sampler: is for a search. Add --trials N --metric NAME.")
    if args.direction and not args.metric:
        raise ConfigError("--direction: needs --metric NAME, whose better values it names.")


def _check_metric(args: argparse.Namespace, base: "DictConfig", trainer_class: "type[DefaultTrainer] | None") -> None:
    """Raise for a ``--metric`` that the configuration does not declare, if it declares the results of a run."""
    has_data = base.get("dataloader", {}).get("test") or base.train.overfit_batches is not None
    evaluates = bool(base.train.evaluation.enabled and has_data)
    known = _declared_results(base, trainer_class, evaluates=evaluates)
    name = args.metric.rpartition("/")[2]  # without a data set
    key = name.removeprefix("eval_") if evaluates else name
    # The model may name parts of the loss, and there may be a result for each class.
    is_loss = "loss" in key and not key.startswith("eval_")
    if known is None or is_loss or not {args.metric, key, re.sub(r"_\d+$", "", key)}.isdisjoint(known):
        return
    if args.direction and not is_misspelt(key, known):
        return
    results = [*known, "eval_loss"] if evaluates else known
    which = "which the evaluation does not compute; its" if evaluates else "and no evaluation is configured; the"
    own = " For a value that the model or a callback logs, add --direction minimize or --direction maximize."
    fix = "" if evaluates else " To evaluate, set dataloader.test and train.evaluation.enabled=True."
    raise ConfigError(
        f"--metric: got {args.metric!r}, {which} results are {', '.join(results)}."
        f"{nearest_name(key, results)}{fix}{'' if args.direction else own}"
    )


def _declared_results(
    base: "DictConfig", trainer_class: "type[DefaultTrainer] | None", *, evaluates: bool
) -> Sequence[str] | None:
    """The results of evaluations beside the loss, or those of a training without; None if only a run shows them."""
    from trainwright.engine import DefaultTrainer

    kind = trainer_class or DefaultTrainer
    own = kind.__mro__[: kind.__mro__.index(DefaultTrainer)]
    if any(name in vars(one) for one in own for name in _OF_RESULTS):  # the user's method may give others
        return None
    if not evaluates:
        return _OF_TRAINING
    try:
        return kind.build_evaluator(base).known_results()
    except Exception:  # that of the first run has its place in the configuration
        return None


def _direction(args: argparse.Namespace, base: "DictConfig") -> str:
    """``--direction``, else that of the best checkpoint, else that of the metric, by its name."""
    from trainwright.evaluation.objective import objective_of_name

    if args.direction:
        return str(args.direction)
    evaluation = base.train.evaluation
    if args.metric.removeprefix("eval_") == evaluation.eval_metric.removeprefix("eval_") and evaluation.eval_mode:
        return "minimize" if evaluation.eval_mode == "min" else "maximize"
    found = objective_of_name(args.metric)
    if found is None:
        raise ConfigError(
            f"--metric: got {args.metric!r}, and it is unknown whether higher is better. Add --direction minimize or"
            " --direction maximize."
        )
    return found


def _read_record(file: Path) -> dict[str, Any] | None:
    """What the runs of a folder have in common; None for a new one."""
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        found = record.get("format", FORMAT)
    except (ValueError, AttributeError):  # no JSON, or no object
        raise ConfigError(
            f"{file}: it is damaged: the settings that its runs have in common cannot be read. Set another"
            " train.output_dir, or delete this file if you know that its runs have the settings of this command."
        ) from None
    if found != FORMAT:
        raise ConfigError(
            f"{file}: format {found!r}; this version of trainwright reads {FORMAT}. A newer version has written it:"
            " update trainwright, or set another train.output_dir."
        )
    return dict(record)


def _has_results(folder: Path) -> bool:
    """Whether a search has used results of its runs."""
    import optuna
    from optuna.trial import TrialState

    from trainwright.cli.sweep.source import STORAGE

    if not (folder / STORAGE).is_file():
        return False
    study = optuna.load_study(study_name=folder.name, storage=f"sqlite:///{folder / STORAGE}")
    return any(one.state == TrialState.COMPLETE for one in study.get_trials(deepcopy=False))


def _has_checkpoint(folder: Path) -> bool:
    from trainwright.checkpoint.folder import checkpoint_names

    return bool(checkpoint_names(folder))


def _place(run: PlannedRun, results: dict[str, Result], source: Source) -> str:
    return f"[{[*results].index(run.name) + 1}/{source.total}]"


def _text_of(result: Result) -> str:
    took = "" if result.seconds is None else f" ({duration(result.seconds)})"
    if result.error:
        return f"failed{took}: {result.error}"
    value = "" if result.value is None else f", {shown(result.metric)} {result.value:.4g}"
    return f"{result.state}{value}{took}"


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold the lock of the sweep's folder; an error if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY) if os.name == "posix" else None
    try:
        if descriptor is not None:
            import fcntl

            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{folder}: another process runs this sweep.") from None
            except OSError:  # a filesystem without locks
                pass
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
