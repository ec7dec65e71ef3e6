"""Evaluate a checkpoint on the evaluation data of its run: ``trainwright eval CONFIG|RUN``."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.base.errors import ConfigError
from trainwright.base.terminal import print_line
from trainwright.cli.run_checkpoint import Target, find_checkpoint, find_target, load_trainer, warn_of_other_trainer
from trainwright.config.arguments import TrainingArgumentParser, split_config
from trainwright.inspect.report.text import shown, table

if TYPE_CHECKING:
    from trainwright.engine import Trainer
    from trainwright.evaluation.prediction_table import Row

Results = tuple[dict[str, Any], "list[Row] | None"]

_EPILOG = """\
examples:
  trainwright eval output/run                                    the best checkpoint, else the last
  trainwright eval output/run --checkpoint model_final --predictions predictions.csv
  trainwright eval config.py train.test_micro_batch_size=64      the run in its train.output_dir
  trainwright eval output/run --trainer train.py:build_trainer   a run of the Python API

Predictions have a row for each sample: its number, its name, id and labels, if the data has them, and the outputs.
The run's folder is not changed. Log lines go to standard error.
"""


def parser() -> argparse.ArgumentParser:
    parser = TrainingArgumentParser(prog="trainwright eval", epilog=_EPILOG)
    parser.usage = (
        "trainwright eval CONFIG|RUN [--checkpoint NAME] [--predictions FILE] [--metrics FILE] [key=value ...]"
    )
    parser.add_argument("opts", nargs="*", metavar="CONFIG|RUN [key=value ...]", help="a config file, a run's folder or"
                        " one of its checkpoints; overrides of the configuration")  # fmt: skip
    parser.add_argument("--predictions", metavar="FILE", type=Path, help="write them: .jsonl, .csv or .parquet")
    parser.add_argument("--metrics", metavar="FILE", type=Path, help="write the metrics as JSON")
    parser.add_argument("--checkpoint", metavar="NAME", help="of the run; default: model_best, else the last")
    parser.add_argument(
        "--trainer", metavar="FILE.py:NAME", help="Python API: a function that returns the Trainer (build_trainer)"
    )
    parser.add_common("json", "allow-module", "trust-folder", "traceback")
    parser.set_defaults(fast_dev_run=False, eval_only=True, resume=False)
    return parser


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    target = _target(args)
    if args.predictions is not None:
        from trainwright.evaluation.prediction_table import check_table_file

        check_table_file(args.predictions)
        _refuse_other_file(args.predictions)
    if args.metrics is not None and not args.metrics.parent.is_dir():
        raise ConfigError(f"--metrics: there is no folder {args.metrics.parent}.")
    from trainwright.cli.train import load, run

    args.stdout = sys.stdout
    with redirect_stdout(sys.stderr):  # log lines, and what the user's program prints
        if target.config is None:
            return run(args, lambda: load_trainer(args.trainer), lambda trainer: _of_trainer(trainer, target, args))
        return run(args, lambda: load(args), lambda cfg: _of_config(cfg, target, args))


def _target(args: argparse.Namespace) -> Target:
    config, args.opts = split_config(args.opts)
    if not config:
        raise ConfigError("eval: nothing to evaluate. For example: trainwright eval output/run")
    if other := next((one for one in args.opts if "=" not in one and Path(one).is_dir()), None):
        raise ConfigError(f"eval: got {config} and {other}; it evaluates one: trainwright eval {other}")
    target = find_target(config)
    if target.config is not None:
        if args.trainer is not None:
            raise ConfigError(
                f"--trainer: is for runs of the Python API; {target.run or target.config} is of a config file."
            )
        from trainwright.config.lazy.overrides import parse_override  # here: loads omegaconf

        other = next((one for one in args.opts if one.startswith("train.output_dir=")), None)
        folder = None if other is None else str(parse_override(other).value())
        if target.run is not None and folder is not None and not _is_same(folder, target.run):
            another = f" For another: trainwright eval {folder}" if Path(folder).expanduser().is_dir() else ""
            raise ConfigError(f"{other}: the run is {target.run}.{another or ' Leave it out.'}")
        args.config_file = str(target.config)
        return target
    if args.opts:
        raise ConfigError(f"eval: {args.opts[0]}: overrides are for config files; {target.run} is of the Python API.")
    if args.trainer is None:
        checkpoint = target.checkpoint or find_checkpoint(target.run, args.checkpoint)  # type: ignore[arg-type]
        raise ConfigError(
            f"{target.run}: a run of the Python API. It has the settings and the weights, but not the code of the model"
            " and the data. Name a function of your script that returns the Trainer:"
            f" trainwright eval {target.run} --trainer train.py:build_trainer. Or in the script, instead of training:"
            f" trainer.load({str(checkpoint)!r}); print(trainer.evaluate())"
        )
    return target


def _refuse_other_file(path: Path) -> None:
    """Raise for a file that holds something else than predictions of this command, which it would replace."""
    if not path.is_file() or not path.stat().st_size:
        return
    if path.suffix == ".parquet":
        from pyarrow import ArrowInvalid, parquet

        try:
            names = parquet.read_schema(path).names
        except ArrowInvalid:
            names = []
    else:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline().strip()
        names = ["sample"] if not first else re.findall(r"[\w.]+", first)
    if "sample" not in names:
        raise ConfigError(
            f"--predictions: {path} exists, and has no predictions of this command, which would replace it. Give"
            " another name."
        )


def _is_same(text: str, folder: Path) -> bool:
    return Path(text).expanduser().resolve() == folder.resolve()


def _of_config(cfg: Any, target: Target, args: argparse.Namespace) -> Callable[[], object]:
    from trainwright.cli.train import build_evaluation
    from trainwright.config.lazy.lazy_config import try_get_key
    from trainwright.engine import DefaultTrainer, default_setup
    from trainwright.evaluation.evaluator import DatasetEvaluators
    from trainwright.evaluation.prediction_table import PredictionRecorder, with_names

    if try_get_key(cfg, "train.train_micro_batch_size") is not None:  # no training: any number of processes evaluates
        cfg.train.update({"global_batch_size": None, "num_accumulation_steps": None})
    default_setup(cfg, args)
    run = target.run or Path(cfg.train.output_dir)
    warn_of_other_trainer(run)
    checkpoint = target.checkpoint or find_checkpoint(run, args.checkpoint)
    model, loaders = build_evaluation(cfg, DefaultTrainer, str(checkpoint))
    recorder = PredictionRecorder()
    evaluator = DefaultTrainer.build_evaluator(cfg)
    if args.predictions is not None:
        evaluator = DatasetEvaluators([evaluator, recorder])

    def evaluate() -> Results:
        results = DefaultTrainer.test(cfg, loaders, model, evaluator)
        tables = [with_names(rows, loader) for rows, loader in zip(recorder.tables, loaders, strict=False)]
        if len(loaders) == 1:
            return results, tables[0] if tables else []
        named = zip(results, tables, strict=False)
        return results, [{"dataset": name, **row} for name, rows in named for row in rows]

    return lambda: _evaluate(evaluate, checkpoint, args)


def _of_trainer(trainer: "Trainer", target: Target, args: argparse.Namespace) -> Callable[[], object]:
    from trainwright.base.dist import is_main_process
    from trainwright.evaluation.prediction_table import prediction_rows, with_facts

    assert target.run is not None, "without a config file it is a run"
    checkpoint = target.checkpoint or find_checkpoint(target.run, args.checkpoint)
    trainer.load(checkpoint)

    def evaluate() -> Results:
        results = trainer.evaluate()
        rows = [] if args.predictions is None else prediction_rows({}, trainer.predict(trainer.eval_dataset))
        return results, with_facts(rows, trainer.eval_dataset) if is_main_process() else rows

    return lambda: _evaluate(evaluate, checkpoint, args)


def _evaluate(evaluate: Callable[[], Results], checkpoint: Path, args: argparse.Namespace) -> None:
    from trainwright.base.dist import is_main_process
    from trainwright.base.files import atomic_write
    from trainwright.checkpoint.verify import inspect_checkpoint
    from trainwright.config.yaml_file import plain
    from trainwright.evaluation.prediction_table import write_rows

    results, rows = evaluate()
    if not is_main_process():
        return
    saved = inspect_checkpoint(checkpoint, contents=False).manifest
    iteration = None if saved is None or saved.iteration is None else saved.iteration + 1
    facts = {"checkpoint": str(checkpoint), "iteration": iteration, "metrics": plain(results)}
    text = json.dumps(facts, indent=1)
    if args.metrics is not None:
        atomic_write(args.metrics, text.encode() + b"\n")
    if args.predictions is not None:
        write_rows(args.predictions, rows or [])
    print_line(text if args.json else "\n".join(lines_of(facts)), file=args.stdout)
    if args.predictions is not None and not args.json:
        print_line(f"{len(rows or [])} predictions in {shown(args.predictions)}", file=args.stdout)


def lines_of(facts: Mapping[str, Any]) -> list[str]:
    """The metrics as a table; of several data sets with a column for each."""
    from trainwright.events.writers.progress import unit_of

    found = facts["metrics"]
    several = {name: value for name, value in found.items() if isinstance(value, Mapping)}
    columns = several or {"value": found}
    names = list(dict.fromkeys(name for metrics in columns.values() for name in metrics))
    rows = [["metric", *map(shown, columns)]]
    for name in names:
        values = (metrics.get(name) for metrics in columns.values())
        texts = (f"{value:.5g}" if isinstance(value, int | float) else shown(value or "") for value in values)
        rows.append([shown(name), *(text + unit_of(name) if text else "" for text in texts)])
    at = "" if facts["iteration"] is None else f" (after {facts['iteration']} iterations)"
    return [f"{shown(facts['checkpoint'])}{at}", *table(rows, right=range(1, len(columns) + 1))]
