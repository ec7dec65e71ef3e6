"""The report as one HTML page: its tables and the points of its curves, with plotly's JavaScript inside."""

import html
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib import resources
from itertools import chain
from typing import Any

from trainwright.base.errors import ConfigError, import_optional
from trainwright.base.notebook import curves, summary
from trainwright.checkpoint.verify import with_other_names
from trainwright.config.secrets import redact
from trainwright.inspect.report.curves import Line, charts_of, max_points, thinned, unit_of
from trainwright.inspect.report.run_data import LOSS, RunData, find_runs
from trainwright.inspect.report.samples import read_samples
from trainwright.inspect.report.text import duration, local_time, size

_NONE = "–"
_MANY = 40  # rows that are shown on demand
_MOST_IN_OVERVIEW = 6  # settings


class Run(RunData):
    """The folder of a run; a notebook shows its results: ``Run("output")``.

    Raises:
        MissingFileError: there is no run. ConfigError: there are several.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        found = find_runs([os.fspath(folder)])
        if len(found) > 1:
            raise ConfigError(f"Run: {folder} has {len(found)} runs: {', '.join(run.name for run in found)}. Name one.")
        super().__init__(found[0].folder, found[0].folder.resolve().name)

    def _repr_html_(self) -> str:
        shown = {name: pair for name, pair in _results(self).items() if pair[0] != _NONE}
        results = {name: value + (f" ({note})" if note else "") for name, (value, note) in shown.items()}
        lines = [line for chart in charts_of([self]) if chart.key == "loss" for line in chart.lines]
        lines.sort(key=lambda one: one.is_evaluation)
        picture = curves({f"{'evaluation' if one.is_evaluation else 'training'} loss": _means(one) for one in lines})
        return summary(self.name, {**results, "Folder": str(self.folder)}, picture)


def _means(line: Line) -> list[tuple[float, float]]:
    points = thinned(line.curve, 400)
    x, y = ("mx", "my") if "mx" in points else ("x", "y")
    return list(zip(points[x], points[y], strict=True))


def plotly_script() -> str:
    """The JavaScript of plotly; ConfigError if it is not installed."""
    message = "the package plotly is not installed. Install it with `pip install plotly`."
    return str(import_optional("plotly.offline", f"trainwright report: {message}", ConfigError).get_plotlyjs())


def page(runs: list[RunData], *, is_live: bool = False) -> str:
    """The complete page. A live one asks its server for new content; the other needs nothing else."""
    assets = resources.files("trainwright.inspect.report") / "assets"
    title = ", ".join(run.name for run in runs[:3]) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
    parts = {
        "TITLE": _escaped(title),
        "STYLE": (assets / "page.css").read_text(encoding="utf-8"),
        "PLOTLY": plotly_script(),
        "SCRIPT": (assets / "page.js").read_text(encoding="utf-8"),
        "CONTENT": _in_script(content(runs)),
        "LIVE": "true" if is_live else "false",
    }
    text = (assets / "page.html").read_text(encoding="utf-8")
    head, *rest = text.split("{{")  # one pass: a name in a value is not replaced
    return head + "".join(parts[name] + after for name, after in (piece.split("}}", 1) for piece in rest))


def content(runs: list[RunData]) -> dict[str, Any]:
    """What changes during a run: tables as HTML, curves as points."""
    charts = charts_of(runs)
    most = max_points(sum(len(chart.lines) for chart in charts))

    def points(line: Line) -> dict[str, Any]:
        about = {"run": line.run, "eval": line.is_evaluation, "name": redact(line.metric)}
        return about | thinned(line.curve, most)

    return {
        "runs": [redact(run.name) for run in runs],
        "samples": [run.latest.get("samples_per_iteration") or 0 for run in runs],
        "charts": [
            {"key": redact(one.key), "title": redact(one.title), "unit": one.unit, "lines": [*map(points, one.lines)]}
            for one in charts
        ],
        "phases": [_phases(run) for run in runs],
        "overview": overview(runs),
        "details": details(runs),
    }


def overview(runs: list[RunData]) -> str:
    """The results of each run: tiles for one, a table for several."""
    facts = [_results(run) for run in runs]
    if len(runs) == 1:
        tiles = [
            f'<div class="tile"><div class="name">{_escaped(name)}</div><div class="value">{_escaped(value)}</div>'
            f'<div class="note">{_escaped(note)}</div></div>'
            for name, (value, note) in facts[0].items()
            if value != _NONE
        ]
        return f'<div class="tiles">{"".join(tiles)}</div>'
    absent = (_NONE, "")
    settings = _differing_settings(runs)
    facts = [
        {key: (_text(run.settings.get(key, _NONE)), "") for key in settings} | fact
        for run, fact in zip(runs, facts, strict=True)
    ]
    names = [name for name in dict.fromkeys(chain(*facts)) if any(fact.get(name, absent)[0] != _NONE for fact in facts)]
    rows = [
        [run.name, *(value + (f" ({note})" if note else "") for value, note in (fact.get(n, absent) for n in names))]
        for run, fact in zip(runs, facts, strict=True)
    ]
    return _table(["Run", *names], rows, colours=True)


def _differing_settings(runs: list[RunData]) -> list[str]:
    """Settings of several runs that differ, if they are few enough for the first table; not where each writes."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    found = [key for key in keys if len({_text(run.settings.get(key, _NONE)) for run in runs}) > 1]
    found = [key for key in found if key.rpartition(".")[2] != "output_dir"]
    return found if len(found) <= _MOST_IN_OVERVIEW else []


def _results(run: RunData) -> dict[str, tuple[str, str]]:
    start, loss, absent = run.latest, run.curves.get(LOSS), (_NONE, "")
    best, model = start.get("best"), start.get("model")
    done = int(loss.x[-1]) if loss is not None and len(loss.x) else start.get("iterations_done", 0)
    seconds, planned = sum(one.get("seconds") or 0 for one in run.starts), start.get("last_iteration")
    place = "main memory" if start.get("device") == "cpu" else str(start.get("device", ""))
    found = {"Status": (run.status, _status_note(run))}
    if best:
        value = f"{_number(best['value'])} {unit_of(best['metric'])}".strip()
        found[f"Best {best['metric'].replace('/', ' ')}"] = (value, f"iteration {best['iteration']:,}")
    return found | {
        "Training loss": (_number(last[0]), last[1]) if (last := run.last_loss) is not None else absent,
        "Evaluated": (str(weights), "") if (weights := start.get("evaluated_weights")) else absent,
        "Iterations": (f"{done:,}", f"of {planned:,}" if planned and planned != done else ""),
        "Time": (duration(seconds), "") if seconds else absent,
        "Throughput": _throughput(run) or absent,
        "Peak memory": (_size(start.get("peak_memory_bytes")), place),
        "Parameters": (f"{model['parameters']:,}", model.get("class", "")) if model else absent,
    }


def _throughput(run: RunData) -> tuple[str, str] | None:
    """By the median time of an iteration."""
    time, samples = run.curves.get("time"), run.latest.get("samples_per_iteration") or 0
    if time is None or not len(time.y):
        return None
    typical = float(sorted(time.y)[len(time.y) // 2])
    return (_number((samples or 1) / typical), "samples/s" if samples else "iterations/s") if typical else None


def _status_note(run: RunData) -> str:
    """What has ended it, how often it was resumed, and when a killed run wrote for the last time."""
    resumed, last = len(run.starts) - 1, run.last_sign
    notes = [reason] if (reason := run.latest.get("reason")) else []
    notes += [f"resumed {resumed} {'time' if resumed == 1 else 'times'}"] if resumed > 0 else []
    notes += [f"no end; last sign of life {local_time(datetime.fromtimestamp(last).astimezone())}"] if last else []
    return "; ".join(notes)


def details(runs: list[RunData]) -> str:
    """Checkpoints, samples, configuration, environment, data and warnings of the runs."""
    of_data = [(run.latest.get("data") or {}).items() for run in runs]
    data = [
        {f"{name}: {key}": one for name, facts in sets for key, one in facts.items() if one is not None}
        for sets in of_data
    ]
    configuration = ("Configuration", _compared([run.settings for run in runs], runs))
    sections = [
        *([configuration] if len(runs) > 1 else []),
        ("Predictions and samples", "".join(map(_samples, runs))),
        ("Hardest samples", "".join(_hardest(run, many=len(runs) > 1) for run in runs)),
        ("Checkpoints", _checkpoints(runs)),
        ("Data", _compared(data, runs)),
        ("Environment", _compared([_environment(run) for run in runs], runs)),
        *([configuration] if len(runs) == 1 else []),
        ("Warnings", "".join(_warnings(run, many=len(runs) > 1) for run in runs)),
    ]
    return "".join(
        f'<section id="{title.split()[0].lower()}"><h2>{title}</h2>{inside}</section>'
        for title, inside in sections
        if inside
    )


def _checkpoints(runs: list[RunData]) -> str:
    rows = []
    for run in runs:
        for entry, links in with_other_names(run.checkpoints):
            iteration = None if entry.manifest is None else entry.manifest.iteration
            at = _NONE if iteration is None else f"{iteration + 1:,}"
            saved = "" if entry.saved_at is None else local_time(entry.saved_at)
            fault = "" if entry.is_complete else entry.faults[0]
            names = ", ".join(one.path.name for one in (entry, *links))
            rows.append([run.name, names, at, saved, _size(entry.size_bytes), fault])
    first, last = 0 if len(runs) > 1 else 1, 6 if any(row[-1] for row in rows) else 5
    columns = ["Run", "Name", "Iteration", "Saved", "Size", "Fault"]
    return _table(columns[first:last], [row[first:last] for row in rows])


def _environment(run: RunData) -> dict[str, Any]:
    start = run.latest
    git, machine = start.get("git") or {}, start.get("machine") or {}
    changed = git.get("num_changed")
    found = {
        "command": start.get("command"),
        "working folder": start.get("working_folder"),
        "started": start.get("started") and local_time(datetime.fromisoformat(start["started"])),
        "git commit": git.get("commit") and f"{git['commit'][:12]} ({git.get('branch', '?')})",
        "git changes": f"{changed} files: {', '.join(git.get('changed', ()))}" if changed else "none" if git else None,
        "device": start.get("device"),
        "precision": start.get("precision"),
        "processes": start.get("processes"),
        **{key.replace("_bytes", ""): value for key, value in machine.items() if not isinstance(value, list)},
        "accelerators": ", ".join(one["name"] for one in machine.get("accelerators", ())) or None,
        **{name.replace("_", " "): value for name, value in (start.get("numerics") or {}).items()},
        **(start.get("versions") or {}),
    }
    if isinstance(found.get("memory"), int):
        found["memory"] = _size(found["memory"])
    return {name: value for name, value in found.items() if value is not None}


def _hardest(run: RunData, *, many: bool) -> str:
    """The samples with the largest losses of the latest evaluation of each data set."""
    tables = []
    for dataset in dict.fromkeys(row["dataset"] for row in run.hardest):
        rows = [row for row in run.hardest if row["dataset"] == dataset]
        evaluations = sorted({int(row["iteration"]) for row in rows})
        often = Counter((row["sample"], row["name"]) for row in rows)
        latest = [row for row in rows if int(row["iteration"]) == evaluations[-1]]
        cells = [
            [
                " ".join(part for part in (row["sample"], row["name"]) if part) or _NONE,
                _number(float(row["loss"])),
                row["label"] or _NONE,
                row["prediction"] or _NONE,
                f"{often[row['sample'], row['name']]} of {len(evaluations)} evaluations",
            ]
            for row in latest
        ]
        title = ": ".join(part for part in (run.name if many else "", dataset) if part)
        tables.append(f"<h3>{_escaped(title)}</h3>" if title else "")
        tables.append(_table(["Sample", "Loss", "Label", "Prediction", "Among the hardest in"], cells))
    return "".join(tables)


def _warnings(run: RunData, *, many: bool) -> str:
    if not run.warnings:
        return ""
    title = f"<h3>{_escaped(run.name)}</h3>" if many else ""
    return f"{title}<pre>{_escaped(chr(10).join(run.warnings))}</pre>"


def _samples(run: RunData) -> str:
    found = read_samples(run.folder)
    pictures = [
        f'<figure><img alt="{_escaped(one.name)}" src="{one.uri}"><figcaption>{_escaped(one.name)}'
        f" <span>iteration {one.iteration + 1:,}</span></figcaption></figure>"
        for one in found
        if one.uri
    ]
    texts = [
        f'<div class="text"><div class="name">{_escaped(one.name)} <span>iteration {one.iteration + 1:,}</span></div>'
        f"<pre>{_escaped(one.text)}</pre></div>"
        for one in found
        if not one.uri
    ]
    return (f'<div class="pictures">{"".join(pictures)}</div>' if pictures else "") + "".join(texts)


def _compared(found: Sequence[dict[str, Any]], runs: list[RunData]) -> str:
    """Values of the runs side by side; those that differ first."""
    names = list(dict.fromkeys(name for one in found for name in one))
    rows = [[name, *(_text(one.get(name, _NONE)) for one in found)] for name in names]
    if len(runs) == 1:
        shown = _table(["", ""], rows, css="facts") if rows else ""
        return f"<details><summary>{len(rows)} settings</summary>{shown}</details>" if len(rows) > _MANY else shown
    differing = [row for row in rows if len(set(row[1:])) > 1]
    equal = [row[:2] for row in rows if len(set(row[1:])) == 1]
    shown = _table(["", *(run.name for run in runs)], differing, css="facts") if differing else ""
    if equal:
        shown += f"<details><summary>{len(equal)} equal</summary>{_table(['', ''], equal, css='facts')}</details>"
    return shown


def _table(names: list[str], rows: Iterable[list[str]], *, css: str = "", colours: bool = False) -> str:
    body = [
        "<tr>"
        + "".join(
            f'<td><span class="dot" data-run="{number}"></span>{_escaped(cell)}</td>'
            if colours and place == 0
            else f"<td>{_escaped(cell)}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for number, row in enumerate(rows)
    ]
    if not body:
        return ""
    head = f"<thead><tr>{''.join(f'<th>{_escaped(name)}</th>' for name in names)}</tr></thead>" if any(names) else ""
    return f'<div class="wide"><table class="{css}">{head}<tbody>{"".join(body)}</tbody></table></div>'


def _phases(run: RunData) -> dict[str, float]:
    """Seconds of each phase over all starts; ``other`` is in none."""
    if not any(start.get("phases") for start in run.starts):
        return {}
    found = dict.fromkeys(("hooks", "evaluation", "save", "imports"), 0.0)
    for start in run.starts:
        for name, seconds in start.get("phases", {}).items():
            found[name] = found.get(name, 0.0) + seconds
    found["hooks"] -= found["evaluation"] + found["save"] + found["imports"]
    found["other"] = sum(start.get("seconds", 0.0) for start in run.starts) - sum(found.values())
    return {name: round(seconds, 4) for name, seconds in found.items() if seconds > 0}


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _size(num_bytes: int | None) -> str:
    return size(num_bytes) if num_bytes else _NONE


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _escaped(text: str) -> str:
    """Text for HTML, without secrets."""
    return html.escape(redact(text))


def _in_script(value: Any) -> str:
    """JSON that ends no script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
