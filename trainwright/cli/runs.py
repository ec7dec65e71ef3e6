"""Table of the runs below a folder: ``trainwright runs [FOLDER]``."""

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from trainwright.base.errors import (
    ConfigError,
    ConfigKeyError,
    MissingFileError,
    did_you_mean,
    missing_path,
    nearest_name,
)
from trainwright.base.terminal import is_terminal
from trainwright.cli.run_folder import Run, read_runs, settings_of
from trainwright.config.arguments import TrainingArgumentParser
from trainwright.inspect.report.run_state import STATES
from trainwright.inspect.report.text import cell, counted, local_time, print_found, shown, table

_EPILOG = """\
examples:
  trainwright runs output --sort best
  trainwright runs output --state failed,interrupted
  trainwright runs sweep --show optim.lr --where 'optim.lr>1e-3' --where 'best>90'

states: running (a process holds the folder), finished, interrupted (by a signal, max_time, or killed), failed
"""


def parser() -> argparse.ArgumentParser:
    parser = TrainingArgumentParser(prog="trainwright runs", epilog=_EPILOG)
    parser.usage = "trainwright runs [FOLDER] [--sort KEY] [--state STATE] [--where KEY=VALUE] [--show KEY] [--json]"
    parser.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="default: the working folder")
    parser.add_argument("--sort", default="started", metavar="KEY", help=f"{', '.join(_KEYS)}; default: started")
    parser.add_argument("--reverse", action="store_true", help="reverse the order")
    parser.add_argument("--state", metavar="STATE", help=f"only these: {', '.join(STATES)}; several with commas")
    parser.add_argument(
        "--where", action="append", default=[], metavar="KEY=VALUE", help="a column or a setting; also != < > <= >="
    )
    parser.add_argument("--show", action="append", default=[], metavar="KEY", help="add a column with a setting")
    parser.add_argument("--all", action="store_true", help="also earlier runs, which newer ones moved aside")
    parser.add_common("json")
    return parser


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    folder, states = Path(args.folder), args.state.split(",") if args.state else STATES
    _check(folder, args.sort, states)
    all_runs = read_runs(folder, earlier=args.all)
    conditions = [_condition(text, all_runs) for text in args.where]
    for key in args.show:
        _check_setting(key, all_runs, "--show")
    runs = [run for run in all_runs if run.state in states and all(condition(run) for condition in conditions)]
    runs = _sorted(runs, args.sort, reverse=args.reverse)
    facts = [asdict(run) for run in runs]
    for of_run in facts if args.show else ():
        of_run["settings"] = {key: settings_of(of_run["path"]).get(key) for key in args.show}
    left_out = f" of {len(all_runs)}" if len(runs) < len(all_runs) else ""
    lines = [*_lines(runs, args.show), f"{len(runs)}{left_out} runs" if len(all_runs) != 1 else "1 run"]
    if not runs:
        found = f"none of {counted(len(all_runs), 'run', 'runs')} fits." if all_runs else "no runs."
        lines = [f"{folder}: {found}"]
    print_found(facts, lines, as_json=args.json)
    return 0


def _check(folder: Path, sort: str, states: Sequence[str]) -> None:
    if folder.is_file():
        raise MissingFileError(f"{folder}: is a file; pass a folder that has runs.")
    if not folder.is_dir():
        raise missing_path(folder, "no such folder.")
    if sort not in _KEYS:
        raise ConfigKeyError(f"--sort: no column {sort!r}. {did_you_mean(sort, _KEYS)}")
    if wrong := [state for state in states if state not in STATES]:
        raise ConfigError(f"--state: got {wrong[0]!r}. {did_you_mean(wrong[0], STATES)}")


_KEYS: dict[str, Callable[[Run], Any]] = {
    "name": lambda run: run.name,
    "state": lambda run: STATES.index(run.state),
    "progress": lambda run: run.progress,
    "best": lambda run: None if run.best is None else run.best if run.is_higher_better is False else -run.best,
    "loss": lambda run: run.loss,
    "started": lambda run: run.started and datetime.fromisoformat(run.started).timestamp(),
    "duration": lambda run: run.seconds,
    "commit": lambda run: run.commit,
}


def _sorted(runs: Sequence[Run], key: str, *, reverse: bool) -> list[Run]:
    """By a column, the best metric first; runs without a value at the end."""
    value = _KEYS[key]
    known = sorted((run for run in runs if value(run) is not None), key=value, reverse=reverse)
    return [*known, *(run for run in runs if value(run) is None)]


_VALUES: dict[str, Callable[[Run], Any]] = {**_KEYS, "state": lambda run: run.state, "best": lambda run: run.best}
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: a == b, "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b, ">": lambda a, b: a > b, "<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b,
}  # fmt: skip


def _check_setting(key: str, runs: Sequence[Run], option: str) -> None:
    """Raise if no run has the setting: a wrong name would look like a run without a value."""
    names = {name for run in runs for name in settings_of(run.path)}
    if runs and key not in names:
        from trainwright.config.key_hints import key_hint  # here: loads pydantic

        near = next((name for name in re.findall(r"'([\w.]+)'", key_hint(key)) if name in names), None)
        hint = nearest_name(key, {*names, *_KEYS}) if near is None else f" Did you mean {near!r}?"
        raise ConfigKeyError(f"{option}: no run has a setting {key!r}.{hint}")


def _condition(text: str, runs: Sequence[Run]) -> Callable[[Run], bool]:
    match = re.fullmatch(r"\s*([\w.@/-]+?)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*", text)
    if match is None:
        raise ConfigError(
            f"--where: got {text!r}; it must be KEY=VALUE, or KEY<VALUE with one of != < > <= >=. A shell reads < and >"
            " itself, so quote them: --where 'optim.lr>0.005'."
        )
    key, compare, wanted = match[1], _COMPARED[match[2].replace("==", "=")], _number(match[3])
    if key not in _VALUES:
        _check_setting(key, runs, "--where")

    def is_met(run: Run) -> bool:
        value = _VALUES[key](run) if key in _VALUES else settings_of(run.path).get(key)
        if isinstance(value, bool):  # as YAML or as Python spells it
            return compare(str(value).lower(), str(wanted).lower())
        value = _number(value)
        if isinstance(value, float) != isinstance(wanted, float):
            return match[2] == "!="
        return compare(value if isinstance(value, float) else str(value), wanted)

    return is_met


def _number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _columns(settings: Sequence[str]) -> dict[str, Callable[[Run], str]]:
    return {
        "name": lambda run: shown(run.name),
        "state": lambda run: run.state,
        "progress": lambda run: "?" if run.progress is None else f"{100 * min(1.0, run.progress):.0f} %",
        "best": lambda run: "" if run.best is None else f"{shown(run.metric)} {run.best:.4g}",
        "loss": lambda run: "" if run.loss is None else f"{run.loss:.4g}",
        **{shown(key): lambda run, key=key: _text(settings_of(run.path).get(key)) for key in settings},  # type: ignore[misc]
        "duration": lambda run: "?" if run.seconds is None else str(timedelta(seconds=round(run.seconds))),
        "started": lambda run: local_time(datetime.fromisoformat(run.started))[:16] if run.started else "?",
        "commit": lambda run: "" if run.commit is None else run.commit[:8],
    }


def _lines(runs: Sequence[Run], settings: Sequence[str]) -> list[str]:
    """The table; on a narrow terminal without its last columns. Errors stay, and are cut."""
    columns = _columns(settings)
    if not any(run.commit for run in runs):
        del columns["commit"]

    def lines() -> list[str]:
        right = [number for number, name in enumerate(columns) if name in ("progress", "loss", "duration")]
        return table([list(columns), *([text(run) for text in columns.values()] for run in runs)], right=right)

    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
    while width is not None and max(map(len, lines())) > width and len(columns) > 4:
        del columns[next(reversed(columns))]
    if not any(run.error for run in runs):
        return lines()
    columns["error"] = lambda run: shown(run.error or "")
    return lines() if width is None else [cell(line, width) for line in lines()]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else shown(value)
