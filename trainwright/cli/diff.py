"""Compare two runs: ``trainwright diff A B``."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from trainwright.base.errors import ConfigError
from trainwright.config.arguments import TrainingArgumentParser
from trainwright.inspect.report.text import cell, shown, table

if TYPE_CHECKING:
    from trainwright.inspect.diff import Losses, Section

EQUAL, DIFFERENT = 0, 1

_EPILOG = """\
The losses of each update are compared bit by bit. A setting that differs is listed; the folder of the run is none.
exit code: 0 nothing differs, 1 something differs, 2 wrong path or argument
"""


def parser() -> argparse.ArgumentParser:
    parser = TrainingArgumentParser(
        prog="trainwright diff",
        description="What two runs differ in: losses, configuration, data, code, versions, machine.",
        epilog=_EPILOG,
    )
    parser.add_argument("a", metavar="A", help="the output folder of a run")
    parser.add_argument("b", metavar="B", help="the output folder of another")
    parser.add_common("json")
    return parser


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    from trainwright.config.secrets import redact
    from trainwright.inspect.diff import compare
    from trainwright.inspect.report.run_data import RunData, find_runs, short_names

    found = [find_runs([path]) for path in (args.a, args.b)]
    for path, runs in zip((args.a, args.b), found, strict=True):
        if len(runs) > 1:
            names = ", ".join(run.name for run in runs[:3])
            raise ConfigError(f"{path}: has {len(runs)} runs ({names} …); pass the folder of one.")
    folders = [runs[0].folder for runs in found]
    a, b = (RunData(folder, name) for folder, name in zip(folders, short_names(folders), strict=True))
    losses, sections = compare(a, b)
    if args.json:
        facts = [asdict(section) for section in sections]
        print(redact(json.dumps({"losses": asdict(losses), "sections": facts}, indent=1, default=str)))
    else:
        print(redact("\n".join(_lines([a.name, b.name], losses, sections))))
    is_equal = losses.first is None and not losses.fault and not any(section.differing for section in sections)
    return EQUAL if is_equal else DIFFERENT


def _lines(names: list[str], losses: "Losses", sections: "list[Section]") -> list[str]:
    lines = [f"Losses: {_about(losses)}"]
    for section in sections:
        differing = [
            [shown(name), *("–" if value is None else cell(value) for value in pair)]
            for name, pair in section.differing.items()
        ]
        if differing:
            title = f"{section.title}: {len(differing)} of {len(differing) + section.num_equal} differ"
            lines += ["", title, *table([["", *map(shown, names)], *differing]), ""]
        elif section.num_equal:
            lines.append(f"{section.title}: equal")
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip().split("\n")


def _about(losses: "Losses") -> str:
    if losses.fault:
        return f"not compared: {shown(losses.fault)}"
    if losses.first is None or losses.values is None:
        return f"equal by bits in all {losses.num_common:,} updates that both have"
    before = f"equal by bits until update {losses.first - 1:,}; " if losses.first > 1 else ""
    x, y = losses.values
    return (
        f"{before}update {losses.first:,} is the first that differs: {x!r} and {y!r}"
        f" ({losses.num_differing:,} of {losses.num_common:,} differ)"
    )
