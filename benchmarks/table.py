"""The table of targets in ``docs/performance.md``: ``python -m benchmarks.table results/*.json``.

It reads what the other benchmarks have written with ``--json`` and prints a row for each target, as far as it was
measured. ``--details`` prints every figure of every file instead.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rounds import PEERS, TITLES, ratios, spread, values

Results = Sequence[Mapping[str, Any]]
Measured = Mapping[str, Mapping[str, Any]]  # the files, by benchmark and case: "step tiny"
DOORS = ("objects", "config")
NOT_MEASURED = "-"
MACHINE = ("cpu", "cores", "python", "torch", "date")
MARKS = ("<!-- table -->", "<!-- end of table -->")


@dataclass(frozen=True)
class Target:
    """A row: where its figures are, the goal, and how to tell ours and the best peer's."""

    about: str
    source: str
    goal: str
    ours: Callable[[Results], str]
    best_peer: Callable[[Results], str]

    def row(self, measured: Measured) -> str | None:
        file = measured.get(self.source)
        if file is None:
            return None
        cells = [self.about, self.goal, self.ours(file["results"]), self.best_peer(file["results"])]
        return f"| {' | '.join(cells)} | `{file['command']}` |"


def doors(figure: str = "us", *names: str, digits: int = 2) -> Callable[[Results], str]:
    """The ratio to the plain loop for each door."""

    def tell(results: Results) -> str:
        told = {name: ratios(results, name, figure) for name in names or DOORS}
        return _join(told, digits)

    return tell


def figures(figure: str, *names: str, digits: int = 2) -> Callable[[Results], str]:
    """The figure itself, for each of ``names``."""
    return lambda results: _join({name: values(results, name, figure) for name in names}, digits)


def best(figure: str = "us", *, as_ratio: bool = True, digits: int = 2) -> Callable[[Results], str]:
    """The peer with the smallest median, and its figure."""

    def tell(results: Results) -> str:
        get = ratios if as_ratio else values
        found = {peer: get(results, peer, figure) for peer in PEERS}
        found = {peer: numbers for peer, numbers in found.items() if numbers}
        if not found:
            return NOT_MEASURED
        peer = min(found, key=lambda name: statistics.median(found[name]))
        return f"{peer} {spread(found[peer], digits)}"

    return tell


def over(base: str, figure: str, *names: str) -> Callable[[Results], str]:
    """How much more than ``base`` in the same round."""

    def tell(results: Results) -> str:
        of_base = values(results, base, figure)
        return _join(
            {name: [a - b for a, b in zip(values(results, name, figure), of_base, strict=True)] for name in names}, 2
        )

    return tell


def mode(name: str) -> Callable[[Results], str]:
    """Calls a step of both doors, with one kind of data."""

    def tell(results: Results) -> str:
        return _join({door: values([r for r in results if r["mode"] == name], door, "calls") for door in DOORS}, 0)

    return tell


def nothing(results: Results) -> str:
    return NOT_MEASURED


def _join(told: Mapping[str, Sequence[float]], digits: int) -> str:
    parts = [f"{TITLES.get(name, name)} {spread(numbers, digits)}" for name, numbers in told.items() if numbers]
    return "<br>".join(parts) or NOT_MEASURED


GRAPHS = ("objects:graph", "config:graph")
TARGETS = [
    Target("eager, any data set with `__getitem__`", "step tiny", "<= 0.78", doors(), best()),
    Target("… read by whole batches (`__getitems__`)", "step batches", "<= 0.60", doors(), nothing),
    Target("… `TensorDataset`", "step tensors", "<= 0.40", doors(), nothing),
    Target("… tensors by name (`ColumnDataset`)", "step columns", "<= 0.40", doors(), nothing),
    Target("… own `train_step`, callback, train metric", "step own_step", "<= 1.00", doors(), nothing),
    Target("progress bar, logger, checkpoints on", "step features", "<= 3 % more", doors(), best()),
    Target("… the mean, saves and lines included", "step features", NOT_MEASURED, doors("mean_us"), best("mean_us")),
    Target("graph mode", "step graph", "<= 0.25", doors("us", *GRAPHS), nothing),
    Target("graph mode, tensors by name", "step graph_columns", "<= 0.25", doors("us", *GRAPHS), nothing),
    Target("gradient accumulation 4", "step accumulation", "<= 0.75", doors(), best()),
    Target("… tensors by name", "step accumulation_columns", "<= 0.75", doors(), nothing),
    Target("bfloat16 autocast", "step bf16", "<= 0.75", doors(), best()),
    Target("… tensors by name", "step bf16_columns", "<= 0.75", doors(), nothing),
    Target("GPT of 10 million parameters", "step gpt", "<= 0.96", doors(), best()),
    Target("… bfloat16 autocast", "step gpt_bf16", "<= 1.00", doors(), nothing),
    Target("… bfloat16 in matrix products", "step gpt_medium", "0.60", doors(), nothing),
    Target("two processes", "step ranks", "<= 1.00", doors(), nothing),
    Target("Python calls a step, tensors by name", "calls", "<= 120", mode("columns"), nothing),
    Target("… `TensorDataset`", "calls", "<= 120", mode("TensorDataset"), nothing),
    Target("… any data set", "calls", "plain loop's", mode("any data set"), best("calls", as_ratio=False, digits=0)),
    Target(
        "import, seconds over `import torch`",
        "start",
        "<= 0.10",
        over("import torch", "s", "from trainwright import Trainer"),
        nothing,
    ),
    Target("`trainwright --help`, seconds", "start", "< 0.3", figures("s", "trainwright --help"), nothing),
    Target(
        "process to the end of the first step",
        "start",
        "<= 0.60",
        lambda results: _join(
            {door: ratios(results, f"first step: {door}", "s", "first step: plain") for door in DOORS}, 2
        ),
        lambda results: best()(
            [r | {"name": r["name"].removeprefix("first step: "), "us": r["s"]} for r in results if "s" in r]
        ),
    ),
    Target("stall per save, 1.2 GB, seconds", "checkpoint cpu", "<= 0.25", figures("stall_s", "asynchronous"), nothing),
    Target("… load and verify", "checkpoint cpu", "<= 0.5", figures("load_s", "ours: verify and load"), nothing),
    Target(
        "resume at 75 % of 2 million samples, seconds",
        "resume",
        "<= 0.15",
        figures("s", *DOORS),
        best("s", as_ratio=False),
    ),
    Target(
        "… samples read",
        "resume",
        "64",
        figures("read", *DOORS, digits=0),
        best("read", as_ratio=False, digits=0),
    ),
    Target(
        "peak memory, tiny, MiB",
        "step tiny",
        "plain + 20",
        figures("peak_mib", "plain", *DOORS, digits=0),
        best("peak_mib", as_ratio=False, digits=0),
    ),
    Target(
        "peak memory, GPT, MiB",
        "step gpt",
        "plain + 20",
        figures("peak_mib", "plain", *DOORS, digits=0),
        best("peak_mib", as_ratio=False, digits=0),
    ),
]


def read(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The files by benchmark and case; a later one goes before an earlier one."""
    files = [json.loads(path.read_text()) for path in paths]
    return {f"{file['benchmark']} {file['case']}".strip(): file for file in files}


def targets(measured: Measured) -> str:
    """The table, in Markdown."""
    rows = [target.row(measured) for target in TARGETS]
    return "\n".join(["| | target | ours | best peer | command |", "|---|--:|---|---|---|", *filter(None, rows)])


def machines(measured: Measured) -> str:
    """On what it was measured: the machines, versions and dates of all files."""
    told = {name: sorted({str(file["machine"].get(name)) for file in measured.values()}) for name in MACHINE}
    return "; ".join(f"{name} {', '.join(values)}" for name, values in told.items())


def put_into(page: Path, text: str) -> None:
    """Replace what stands between the two marks of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (begin and end):
        raise SystemExit(f"{page}: has not the lines {MARKS[0]} and {MARKS[1]}, between which the table belongs.")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def print_details(measured: Measured) -> None:
    for name, file in measured.items():
        machine = ", ".join(f"{key} {value}" for key, value in file["machine"].items())
        print(f"\n{name}: `{file['command']}` ({machine})\n\n| | figure | |\n|---|---|--:|")
        results = file["results"]
        for row in dict.fromkeys(result["name"] for result in results):
            plain = [key for key, value in results[0].items() if isinstance(value, float | int) and key != "round"]
            for figure in plain:
                print(f"| {row} | {figure} | {spread(values(results, row, figure), 3)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--details", action="store_true")
    parser.add_argument("--into", type=Path, help="a page to put the table into, between its two marks")
    args = parser.parse_args()
    measured = read(args.files)
    if args.details:
        print_details(measured)
    elif args.into:
        put_into(args.into, f"{targets(measured)}\n\n({machines(measured)})")
    else:
        print(targets(measured))


if __name__ == "__main__":
    main()
