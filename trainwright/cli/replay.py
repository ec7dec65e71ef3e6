"""Run one update of a run again: ``trainwright replay RUN --step N``."""

import argparse
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.base.errors import ConfigError
from trainwright.cli.run_checkpoint import warn_of_other_trainer
from trainwright.config.arguments import TrainingArgumentParser, whole_number
from trainwright.inspect.report.run_state import CONFIGS, config_file
from trainwright.inspect.report.text import print_found, shown, table

if TYPE_CHECKING:
    from trainwright.inspect.replay import Replay

EQUAL, DIFFERENT = 0, 1
_MAX_SAMPLES, _MAX_LAYERS = 10, 20

_EPILOG = """\
The update is run again from the nearest checkpoint before it. Nothing is written. It shows the samples with the largest
losses, the gradient norms of the layers, and the first operation with a result that is not finite.
A run of N processes: trainwright launch -n N replay RUN --step S.
A run of the Python API is built by its own program: call trainer.replay(N) there instead of trainer.train().
exit code: 0 as in the run, 1 the loss differs by bits or the step failed, 2 wrong path or argument
"""


def parser() -> argparse.ArgumentParser:
    parser = TrainingArgumentParser(prog="trainwright replay", epilog=_EPILOG)
    parser.add_argument("run", metavar="RUN", help="the output folder of a run of a config file")
    parser.add_argument("--step", type=whole_number(1), required=True, metavar="N", help="the update, counted from 1")
    parser.add_argument("--break", action="store_true", dest="stops", help="stop in your code, with Python's debugger")
    parser.add_common("json", "allow-module", "trust-folder")
    return parser


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    folder = Path(args.run)
    config = config_file(folder)
    if config is None:
        above = next((one for one in list(folder.parents)[:2] if config_file(one) is not None), Path())
        run = f": {above}" if above != Path() else ""
        raise ConfigError(f"{folder}: no config.yaml; pass the output folder of a run{run}.")
    if config.name != CONFIGS[0]:
        raise ConfigError(
            f"{folder}: a run of the Python API, which its own program builds. Call trainer.replay({args.step}) there"
            " instead of trainer.train()."
        )
    from trainwright.base.dist import is_main_process

    warn_of_other_trainer(folder)
    trainer = _build(config, args)
    found = trainer.replay(args.step, stops=args.stops)
    if is_main_process():
        print_found(asdict(found), lines_of(found), as_json=args.json)
    return DIFFERENT if found.error or found.is_equal is False else EQUAL


def _build(config: Path, args: argparse.Namespace) -> Any:
    from trainwright.cli.train import load
    from trainwright.engine import DefaultTrainer

    logging.getLogger("trainwright").setLevel(logging.WARNING)  # how the run is built is in its log
    args.config_file, args.opts, args.fast_dev_run = str(config), [], False
    cfg = load(args)
    cfg.train.update({"output_dir": str(config.parent), "resume": False})
    return DefaultTrainer(cfg)


def lines_of(found: "Replay") -> list[str]:
    start = f"from checkpoint {found.checkpoint}" if found.checkpoint else "from the beginning of the run"
    lines = [f"Update {found.step:,}, {start}", f"Loss: {_loss(found)}"]
    if found.changes:
        lines += [
            f"  {shown(name)}: {shown(str(old))}, now {shown(str(new))}"
            for name, (old, new) in list(found.changes.items())[:_MAX_SAMPLES]
        ]
    elif found.is_equal is False:
        lines.append("  Data, versions, git state and machine are those of the run: is the step deterministic?")
    facts, bad = found.facts, found.facts.non_finite
    if bad is not None:
        where = f" of module {bad.module}" if bad.module else ""
        lines += [
            f"First operation with a result that is not finite: {bad.operation}{shown(where)}, {bad.phase}"
            f" ({bad.num_values:,} values)",
            *([f"  {shown(bad.place)}"] if bad.place else []),
        ]
    elif facts.gradient_norms:
        lines.append("All values of the step are finite.")
    if found.error:
        lines.append(f"The step failed: {shown(found.error)}")
    lines += _samples(found)
    norms = layer_norms(facts.gradient_norms)
    if norms:
        rows = [[shown(name), f"{norm:.4g}"] for name, norm in list(norms.items())[:_MAX_LAYERS]]
        more = f", the {_MAX_LAYERS} largest of {len(norms)}" if len(norms) > _MAX_LAYERS else ""
        lines += ["", f"Gradient norms of the layers, before clipping{more}", *table(rows, right={1})]
    return lines


def layer_norms(norms: dict[str, float]) -> dict[str, float]:
    """Norms of the modules that have the parameters, the largest first.

    >>> layer_norms({"a.weight": 3.0, "a.bias": 4.0, "b.weight": 6.0})
    {'b': 6.0, 'a': 5.0}
    """
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        layer = name.rpartition(".")[0] or name
        squares[layer] = squares.get(layer, 0.0) + norm**2
    order = sorted(squares.items(), key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1], reverse=True)
    return {name: math.sqrt(square) for name, square in order}


def _loss(found: "Replay") -> str:
    if found.loss is None:
        return "none"
    if found.recorded_loss is None:
        return f"{found.loss!r} (the run has not recorded its own)"
    verdict = "equal by bits to that of the run" if found.is_equal else f"the run had {found.recorded_loss!r}"
    return f"{found.loss!r}, {verdict}"


def _samples(found: "Replay") -> list[str]:
    losses = found.facts.sample_losses
    ids = found.samples or []
    known = [
        (loss, ids[batch][place] if batch < len(ids) and place < len(ids[batch]) else place, batch)
        for batch, values in enumerate(losses)
        if values is not None
        for place, loss in enumerate(values)
    ]
    if not known:
        flat = [_named(found, index) for batch in ids for index in batch]
        return (
            ["", f"Samples: {', '.join(flat[: 4 * _MAX_SAMPLES])}{' …' if len(flat) > 4 * _MAX_SAMPLES else ''}"]
            if flat
            else []
        )
    known.sort(key=lambda one: math.inf if math.isnan(one[0]) else one[0], reverse=True)
    rows = [["sample" if ids else "place in the batch", "loss"]]
    rows += [[_named(found, index) if ids else str(index), f"{loss:.6g}"] for loss, index, _ in known[:_MAX_SAMPLES]]
    right = {1} if found.names else {0, 1}
    return ["", f"Samples with the largest losses, of {len(known)}", *table(rows, right=right)]


def _named(found: "Replay", index: int) -> str:
    return f"{index} ({shown(found.names[index])})" if index in found.names else str(index)
