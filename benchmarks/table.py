"""The table in ``docs/performance.md``: ``python -m benchmarks.table results/*.json``.

It reads the ``--json`` files of the other benchmarks and prints a row for each case that was measured.
``--details`` prints all metrics of all files instead.
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
class Row:
    """A row: what it is about, the file of its results, and functions that format ours and the best peer's."""

    about: str
    source: str
    ours: Callable[[Results], str]
    best_peer: Callable[[Results], str]

    def text(self, measured: Measured) -> str | None:
        file = measured.get(self.source)
        if file is None:
            return None
        cells = [self.about, self.ours(file["results"]), self.best_peer(file["results"])]
        return f"| {' | '.join(cells)} | {self.source} |"


def same_optimizer(*names: str, metric: str = "us") -> Callable[[Results], str]:
    """The ratio to the plain loop with the same optimizer."""
    return lambda results: _join({name: ratios(results, name, metric, base_of(name)) for name in names}, 2)


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


def nothing(results: Results) -> str:
    return NOT_MEASURED


def _join(by_name: Mapping[str, Sequence[float]], digits: int) -> str:
    parts = [f"{TITLES.get(name, name)} {spread(numbers, digits)}" for name, numbers in by_name.items() if numbers]
    return "<br>".join(parts) or NOT_MEASURED


GRAPHS = ("objects:graph", "config:graph")
ROWS = [
    Row("any data set with `__getitem__`, torch's Adam in both", "step tiny", same_optimizer(*PASSED), best()),
    Row("… fused Adam in both", "step tiny", same_optimizer(*OURS), nothing),
    Row("… own `train_step`, callback, metric in both", "step own_step", same_optimizer(PASSED[0], OURS[0]), nothing),
    Row("… progress bar, logger, checkpoints", "step features", same_optimizer(*PASSED, *OURS), best()),
    Row(
        "… the mean, saves and lines included",
        "step features",
        same_optimizer(*PASSED, *OURS, metric="mean_us"),
        best("mean_us"),
    ),
    Row("… gradient accumulation 4", "step accumulation", same_optimizer(*OURS), nothing),
    Row("… bfloat16 autocast", "step bf16", same_optimizer(*OURS), nothing),
    Row("`TensorDataset`", "step tensors", same_optimizer(PASSED[0], OURS[0]), nothing),
    Row("tensors by name (`ColumnDataset`)", "step columns", same_optimizer(*OURS), nothing),
    Row("… graph mode", "step graph_columns", same_optimizer(*GRAPHS), nothing),
    Row("GPT of 10 million parameters", "step gpt", same_optimizer(*PASSED, *OURS), best()),
    Row("two processes", "step ranks", same_optimizer(*PASSED, *OURS), nothing),
    Row(
        "import, seconds over `import torch`",
        "start",
        over("import torch", "s", "from trainwright import Trainer"),
        nothing,
    ),
    Row(
        "process to the end of the first step",
        "start",
        lambda results: _join(
            {api: ratios(results, f"first step: {api}", "s", "first step: plain") for api in OURS}, 2
        ),
        lambda results: best()(
            [r | {"name": r["name"].removeprefix("first step: "), "us": r["s"]} for r in results if "s" in r]
        ),
    ),
    Row("stall per save, 1.2 GB, seconds", "checkpoint cpu", metric_values("stall_s", "asynchronous"), nothing),
    Row("… load and verify", "checkpoint cpu", metric_values("load_s", "ours: verify and load"), nothing),
    Row(
        "resume at 75 % of 2 million samples, seconds",
        "resume",
        metric_values("s", *OURS),
        best("s", as_ratio=False),
    ),
    Row(
        "peak memory, tiny, MiB",
        "step tiny",
        metric_values("peak_mib", "plain", *OURS, digits=0),
        best("peak_mib", as_ratio=False, digits=0),
    ),
    Row(
        "peak memory, GPT, MiB",
        "step gpt",
        metric_values("peak_mib", "plain", *OURS, digits=0),
        best("peak_mib", as_ratio=False, digits=0),
    ),
]


def read(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The files by benchmark and case; a later file replaces an earlier one."""
    files = [json.loads(path.read_text()) for path in paths]
    return {f"{file['benchmark']} {file['case']}".strip(): file for file in files}


def table(measured: Measured) -> str:
    """The table, in Markdown."""
    rows = [row.text(measured) for row in ROWS]
    return "\n".join(["| | ours | best peer | benchmark |", "|---|---|---|---|", *filter(None, rows)])


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
        put_into(args.into, f"{table(measured)}\n\n({machines(measured)})")
    else:
        print(table(measured))


if __name__ == "__main__":
    main()
