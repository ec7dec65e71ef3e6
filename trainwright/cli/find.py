"""Find a learning rate or a batch size: ``trainwright find lr CONFIG``, ``trainwright find batch-size CONFIG``."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from trainwright.base.errors import ConfigError, did_you_mean
from trainwright.cli.check import config_parser, with_trainer
from trainwright.config.arguments import positive_number, whole_number
from trainwright.inspect.report.text import print_found, table

if TYPE_CHECKING:
    from trainwright.engine import DefaultTrainer
    from trainwright.inspect.find.batch_size import BatchSizes
    from trainwright.inspect.find.learning_rate import RateCurve

DONE, NOT_FOUND = 0, 1

_EPILOG = """\
find lr: trains a copy with a growing rate, and suggests the one where the loss falls fastest.
find batch-size: doubles the micro-batch until an update does not fit into the memory.
Nothing is written to the output folder. docs/checks.md describes both. Exit code 1: nothing was found.
"""


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    kind, args.opts = (args.opts[0], args.opts[1:]) if args.opts else ("", [])
    if kind not in _KINDS:
        raise ConfigError(f"trainwright find: got {kind!r}. {did_you_mean(kind, _KINDS)}")
    return with_trainer(args, lambda trainer, _: _KINDS[kind](trainer, args))


def parser() -> argparse.ArgumentParser:
    usage = "lr|batch-size CONFIG [options] [key=value ...]"
    found = config_parser("trainwright find", usage, _EPILOG)
    add = found.add_argument_group("find lr").add_argument
    add("--plot", metavar="FILE", help="write a picture of the curve (needs matplotlib)")
    add("--lowest", type=positive_number, default=1e-7, metavar="LR", help="the first rate (default: 1e-7)")
    add("--highest", type=positive_number, default=10.0, metavar="LR", help="the last rate (default: 10)")
    add("--updates", type=whole_number(20), default=100, metavar="N", help="updates in all (default: 100)")
    add = found.add_argument_group("find batch-size").add_argument
    add("--memory", metavar="SIZE", help="of another device, as 24GiB (default: this device)")
    add("--max-size", type=whole_number(1), metavar="N", help="the largest batch to try")
    return found


def _find_lr(trainer: "DefaultTrainer", args: argparse.Namespace) -> int:
    curve = trainer.find_lr(lowest=args.lowest, highest=args.highest, updates=args.updates, plot=args.plot)
    print_found(curve.to_dict(), lines_of_curve(curve, args), as_json=args.json)
    return DONE if curve.suggestion is not None else NOT_FOUND


def lines_of_curve(curve: "RateCurve", args: argparse.Namespace) -> list[str]:
    places = range(0, len(curve.rates), max(1, len(curve.rates) // 12))
    rows = [["rate", "loss", "smoothed"]]
    rows += [[f"{curve.rates[n]:.2e}", f"{curve.losses[n]:.4g}", f"{curve.smoothed[n]:.4g}"] for n in places]
    lines = table(rows, right=range(3))
    if not math.isfinite(curve.losses[0]):
        bad = f"The loss of the first update is {curve.losses[0]}, at a rate of {curve.rates[0]:.2g}"
        return [*lines, f"{bad}: `trainwright check` may show why."]
    if curve.diverged:
        lines.append(f"The loss diverges at a rate of {curve.rates[-1]:.2g}.")
    if args.plot:
        lines.append(f"Picture: {args.plot}")
    if curve.suggestion is None:
        return [*lines, "The loss does not fall at any of these rates: `trainwright check` may show why."]
    lines.append(f"The loss falls fastest at {curve.suggestion:.2g}:")
    return [*lines, f"  trainwright train {args.config_file} optim.lr={curve.suggestion:g}"]


def _find_batch_size(trainer: "DefaultTrainer", args: argparse.Namespace) -> int:
    from trainwright.cli.estimate import num_bytes

    memory = None if args.memory is None else num_bytes(args.memory)
    if memory is None and trainer.device.type == "cpu" and args.max_size is None:
        raise ConfigError(
            "find batch-size: a CPU takes memory until the machine swaps. Give --memory 24GiB (tensors are counted), or"
            " --max-size N."
        )
    found = trainer.find_batch_size(memory=memory, max_size=args.max_size)
    print_found(asdict(found), lines_of_sizes(found, args.config_file), as_json=args.json)
    return DONE if found.largest else NOT_FOUND


def lines_of_sizes(found: "BatchSizes", config_file: str) -> list[str]:
    from trainwright.engine.out_of_memory import byte_size

    rows = [["samples", "memory", ""]]
    for size, needed in found.trials.items():
        rows.append([str(size), *(("", "does not fit") if needed is None else (byte_size(needed), "fits"))])
    lines = table(rows, right={0, 1})
    if not found.largest:
        return [*lines, "Not even one sample fits: `trainwright estimate` shows layouts for several processes."]
    limits = {"memory": "", "data": " (all samples)", "max_size": " (the largest allowed)", "time": " (no more time)"}
    settings = " ".join(f"{name}={value}" for name, value in found.settings.items())
    lines.append(f"The largest micro-batch: {found.largest} samples{limits[found.limited_by]}.")
    return [*lines, f"  trainwright train {config_file} {settings}"]


_KINDS = {"lr": _find_lr, "batch-size": _find_batch_size}
