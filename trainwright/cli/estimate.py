"""Estimate memory and traffic: ``trainwright estimate CONFIG``. Builds the run on tensors without data."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainwright.base.errors import ConfigError
from trainwright.cli.check import config_parser, with_config
from trainwright.config.arguments import whole_number
from trainwright.inspect.report.text import counted, print_found, table

if TYPE_CHECKING:
    from trainwright.inspect.estimate import Candidate, Estimate

DONE, DOES_NOT_FIT = 0, 1

_EPILOG = """\
Nothing is trained, and no process is started: the model has no data in it, so that it needs no memory. One batch is
read from dataloader.train. With --memory, layouts are examined until three fit; exit code 1: none fits.
Bytes are those of tensors; an accelerator also needs 1 to 2 GiB for its context, and its allocator about 10 % more.
"""

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    return with_config(args, lambda cfg: _run(cfg, args))


def parser() -> argparse.ArgumentParser:
    usage = "CONFIG [--world N] [--memory 80GiB] [--json] [key=value ...]"
    parser = config_parser("trainwright estimate", usage, _EPILOG)
    parser.add_argument(
        "--world", type=whole_number(1), default=1, metavar="N", help="number of processes (default: 1)"
    )
    parser.add_argument("--memory", metavar="SIZE", help="of each process, as 80GiB: which layouts fit into it")
    return parser


def _run(cfg: Any, args: argparse.Namespace) -> int:
    memory = None if args.memory is None else num_bytes(args.memory)
    from trainwright.engine import DefaultTrainer, estimate, fitting_layouts

    if memory is None:
        found = estimate(DefaultTrainer, cfg, world_size=args.world)
        print_found(facts(found), lines_of(found), as_json=args.json)
        return DONE
    candidates = fitting_layouts(DefaultTrainer, cfg, world_size=args.world, memory=memory)
    rows = [
        {
            **({"layout": asdict(one.layout)} if one.estimate is None else facts(one.estimate)),
            "state_bytes": one.state_bytes, "fits": one.fits(memory), "fault": one.fault,
        }
        for one in candidates
    ]  # fmt: skip
    print_found(rows, table_of(candidates, memory), as_json=args.json)
    return DONE if any(candidate.fits(memory) for candidate in candidates) else DOES_NOT_FIT


def num_bytes(text: str) -> int:
    """
    >>> num_bytes("80GiB"), num_bytes("80 GB"), num_bytes("512M"), num_bytes("80000000000")
    (85899345920, 80000000000, 536870912, 80000000000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", text.strip().lower())
    if match is None or not float(match[1]):
        raise ConfigError(f"--memory: got {text!r}; it must be a size such as 80GiB, 24GB or 512MiB.")
    if not match[2] and not match[3] and float(match[1]) < 2**20:
        raise ConfigError(f"--memory: got {text!r}, which is a number of bytes. Give a unit: {text}GiB.")
    base = 1000 if match[3] == "b" else 1024
    return int(float(match[1]) * base ** _UNITS[match[2]])


def lines_of(found: "Estimate") -> list[str]:
    from trainwright.engine.out_of_memory import byte_size

    size = found.layout.world_size
    stages = "" if found.layout.pipeline == 1 else " (first stage, last stage)" if len(found.costs) == 2 else ""
    costs, kinds = found.costs.values(), ("parameters", "gradients", "optimizer", "activations", "peak", "start")
    rows = [["memory at the peak", *(f"rank {rank}" for rank in found.costs)]]
    rows += [[kind, *(byte_size(getattr(cost, kind)) for cost in costs)] for kind in kinds]
    traffic = dict.fromkeys(kind for cost in costs for kind in cost.traffic)
    rows += [["exchanged per update", *("" for _ in costs)]] if traffic else []
    rows += [[kind, *(byte_size(cost.traffic.get(kind, 0)) for cost in costs)] for kind in traffic]
    processes = "1 process" if size == 1 else f"{size} processes: {found.layout}"
    return [f"{processes}{stages}", *table(rows, right=range(1, len(found.costs) + 1))]


def table_of(candidates: "Sequence[Candidate]", memory: int) -> list[str]:
    from trainwright.engine.out_of_memory import byte_size

    rows = [["layout", "peak", "of the memory", "exchanged per update", ""]]
    for candidate in candidates:
        found = candidate.estimate
        if found is not None:
            share, verdict = f"{found.peak / memory:.0%}", "fits" if candidate.fits(memory) else "does not fit"
            sizes = [byte_size(found.peak), share, byte_size(found.traffic), verdict]
        elif candidate.fault:
            sizes = ["", "", "", candidate.fault]
        else:
            needed, verdict = candidate.state_bytes, "does not fit: parameters and states alone"
            sizes = [f"> {byte_size(needed)}", f"> {needed / memory:.0%}", "", verdict]
        rows.append([str(candidate.layout), *sizes])
    world = candidates[0].layout.world_size
    first = f"{counted(world, 'process', 'processes')} with {byte_size(memory)} each, best layout first"
    return [first, *table(rows, right={1, 2, 3})]


def facts(found: "Estimate") -> dict[str, Any]:
    """The estimate as JSON values, in bytes."""
    costs = [{"rank": rank, **asdict(cost), "peak": cost.peak} for rank, cost in found.costs.items()]
    return {"layout": asdict(found.layout), "peak": found.peak, "ranks": costs}
