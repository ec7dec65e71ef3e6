"""The table of targets in ``docs/performance.md``: ``python -m benchmarks.table results/*.json``.

It reads the ``--json`` files of the other benchmarks and prints a row for each measured target. ``--details`` prints
all metrics of all files instead.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rounds import OURS, PASSED, PEERS, TITLES, base_of, ratios, spread, values

Results = Sequence[Mapping[str, Any]]
Measured = Mapping[str, Mapping[str, Any]]  # the files, by benchmark and case: "step tiny"
NOT_MEASURED = "-"
MACHINE = ("cpu", "cores", "python", "torch", "date")
MARKS = ("<!-- table -->", "<!-- end of table -->")


@dataclass(frozen=True)
class Target:
    """A row: the file of its results, the target, and functions that format our result and the best peer's."""

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
        return f"| {' | '.join(cells)} | {self.source} |"


def same_optimizer(*names: str) -> Callable[[Results], str]:
    """The ratio of each API to the plain loop with the same optimizer."""
    return lambda results: _join({name: ratios(results, name, "us", base_of(name)) for name in names}, 2)


def api_ratios(metric: str = "us", *names: str, digits: int = 2) -> Callable[[Results], str]:
    """The ratio to the plain loop with torch's Adam for each API."""

    def cell(results: Results) -> str:
        return _join({name: ratios(results, name, metric) for name in names or OURS}, digits)

    return cell


def metric_values(metric: str, *names: str, digits: int = 2) -> Callable[[Results], str]:
    """The metric itself, for each of ``names``."""
    return lambda results: _join({name: values(results, name, metric) for name in names}, digits)


def best(metric: str = "us", *, as_ratio: bool = True, digits: int = 2) -> Callable[[Results], str]:
    """The peer with the smallest median, and its value."""

    def cell(results: Results) -> str:
        get = ratios if as_ratio else values
        found = {peer: get(results, peer, metric) for peer in PEERS}
        found = {peer: numbers for peer, numbers in found.items() if numbers}
        if not found:
            return NOT_MEASURED
        peer = min(found, key=lambda name: statistics.median(found[name]))
        return f"{peer} {spread(found[peer], digits)}"

    return cell


def over(base: str, metric: str, *names: str) -> Callable[[Results], str]:
    """The difference to ``base`` in the same round."""

    def cell(results: Results) -> str:
        of_base = values(results, base, metric)
        return _join(
            {name: [a - b for a, b in zip(values(results, name, metric), of_base, strict=True)] for name in names}, 2
        )

    return cell


def mode(name: str) -> Callable[[Results], str]:
    """Python calls per step of both APIs, with one kind of data."""

    def cell(results: Results) -> str:
        return _join({api: values([r for r in results if r["mode"] == name], api, "calls") for api in OURS}, 0)

    return cell


def nothing(results: Results) -> str:
    return NOT_MEASURED


def _join(by_name: Mapping[str, Sequence[float]], digits: int) -> str:
    parts = [f"{TITLES.get(name, name)} {spread(numbers, digits)}" for name, numbers in by_name.items() if numbers]
    return "<br>".join(parts) or NOT_MEASURED


GRAPHS = ("objects:graph", "config:graph")
TARGETS = [
    Target(
        "eager, any data set with `__getitem__`, the plain loop's optimizer in both",
        "step tiny",
        "<= 1.00",
        same_optimizer(*PASSED),
        best(),
    ),
    Target("… fused Adam in both", "step tiny", "<= 0.90", same_optimizer(*OURS), nothing),
    Target("… fused Adam for us alone", "step tiny", NOT_MEASURED, api_ratios(), nothing),
    Target("… read in complete batches (`__getitems__`)", "step batches", "<= 0.60", api_ratios(), nothing),
    Target("… `TensorDataset`", "step tensors", "<= 0.40", api_ratios(), nothing),
    Target("… tensors by name (`ColumnDataset`)", "step columns", "<= 0.40", api_ratios(), nothing),
    Target(
        "… own `train_step`, callback, train metric, the same optimizer in both",
        "step own_step",
        "<= 1.00",
        same_optimizer(PASSED[0], OURS[0]),
        nothing,
    ),
    Target("progress bar, logger, checkpoints on", "step features", "<= 3 % more", api_ratios(), best()),
    Target(
        "… the mean, saves and lines included", "step features", NOT_MEASURED, api_ratios("mean_us"), best("mean_us")
    ),
    Target("graph mode", "step graph", "<= 0.25", api_ratios("us", *GRAPHS), nothing),
    Target("graph mode, tensors by name", "step graph_columns", "<= 0.25", api_ratios("us", *GRAPHS), nothing),
    Target("gradient accumulation 4", "step accumulation", "<= 0.75", api_ratios(), best()),
    Target("… tensors by name", "step accumulation_columns", "<= 0.75", api_ratios(), nothing),
    Target("bfloat16 autocast", "step bf16", "<= 0.75", api_ratios(), best()),
    Target("… tensors by name", "step bf16_columns", "<= 0.75", api_ratios(), nothing),
    Target(
        "GPT of 10 million parameters, the same optimizer in both",
        "step gpt",
        NOT_MEASURED,
        same_optimizer(*PASSED, *OURS),
        nothing,
    ),
    Target("… fused Adam for us alone", "step gpt", "<= 0.96", api_ratios(), best()),
    Target("… bfloat16 autocast", "step gpt_bf16", "<= 1.00", api_ratios(), nothing),
    Target("… bfloat16 in matrix products", "step gpt_medium", "0.60", api_ratios(), nothing),
    Target("two processes", "step ranks", "<= 1.00", api_ratios(), nothing),
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
    Target("`trainwright --help`, seconds", "start", "< 0.3", metric_values("s", "trainwright --help"), nothing),
    Target(
        "process to the end of the first step",
        "start",
        "<= 0.60",
        lambda results: _join(
            {api: ratios(results, f"first step: {api}", "s", "first step: plain") for api in OURS}, 2
        ),
        lambda results: best()(
            [r | {"name": r["name"].removeprefix("first step: "), "us": r["s"]} for r in results if "s" in r]
        ),
    ),
    Target(
        "stall per save, 1.2 GB, seconds",
        "checkpoint cpu",
        "<= 0.25",
        metric_values("stall_s", "asynchronous"),
        nothing,
    ),
    Target("… load and verify", "checkpoint cpu", "<= 0.5", metric_values("load_s", "ours: verify and load"), nothing),
    Target(
        "resume at 75 % of 2 million samples, seconds",
        "resume",
        "<= 0.15",
        metric_values("s", *OURS),
        best("s", as_ratio=False),
    ),
    Target(
        "… samples read",
        "resume",
        "64",
        metric_values("read", *OURS, digits=0),
        best("read", as_ratio=False, digits=0),
    ),
    Target(
        "peak memory, tiny, MiB",
        "step tiny",
        "plain + 20",
        metric_values("peak_mib", "plain", *OURS, digits=0),
        best("peak_mib", as_ratio=False, digits=0),
    ),
    Target(
        "peak memory, GPT, MiB",
        "step gpt",
        "plain + 20",
        metric_values("peak_mib", "plain", *OURS, digits=0),
        best("peak_mib", as_ratio=False, digits=0),
    ),
]


def read(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The files by benchmark and case; a later file replaces an earlier one."""
    files = [json.loads(path.read_text()) for path in paths]
    return {f"{file['benchmark']} {file['case']}".strip(): file for file in files}


def targets(measured: Measured) -> str:
    """The table, in Markdown."""
    rows = [target.row(measured) for target in TARGETS]
    return "\n".join(["| | target | ours | best peer | benchmark |", "|---|--:|---|---|---|", *filter(None, rows)])


def machines(measured: Measured) -> str:
    """The machines, versions and dates of all files."""
    facts = {name: sorted({str(file["machine"].get(name)) for file in measured.values()}) for name in MACHINE}
    return "; ".join(f"{name} {', '.join(values)}" for name, values in facts.items())


def put_into(page: Path, text: str) -> None:
    """Replace the text between the two markers of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (begin and end):
        raise SystemExit(f"{page}: the lines {MARKS[0]} and {MARKS[1]} are missing; add them where the table belongs.")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def print_details(measured: Measured) -> None:
    for name, file in measured.items():
        machine = ", ".join(f"{key} {value}" for key, value in file["machine"].items())
        print(f"\n{name}: `{file['command']}` ({machine})\n\n| | metric | |\n|---|---|--:|")
        results = file["results"]
        for row in dict.fromkeys(result["name"] for result in results):
            plain = [key for key, value in results[0].items() if isinstance(value, float | int) and key != "round"]
            for metric in plain:
                print(f"| {row} | {metric} | {spread(values(results, row, metric), 3)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--details", action="store_true")
    parser.add_argument("--into", type=Path, help="a page in which to replace the table between the two markers")
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
