"""Which points of a curve a picture needs, and which metrics share a chart."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.inspect.report.run_data import LOSS, Array, Curve, RunData

_TITLES = {
    "loss": "Loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "throughput": "Throughput",
    "data_time": "Waiting for data, per iteration",
    "skipped_update": "Skipped updates",
}
_LAST = ("lr", "throughput", "grad_norm", "data_time")  # behind the results
_HIDDEN = ("eta_seconds", "time")  # the time is shown as throughput
_MAX_POINTS, _MIN_POINTS, _MAX_TOTAL = 4000, 400, 200_000


@dataclass(frozen=True)
class Line:
    """A metric of a run in a chart."""

    run: int
    metric: str
    is_evaluation: bool
    curve: Curve


@dataclass(frozen=True)
class Chart:
    key: str
    title: str
    unit: str
    lines: list[Line]


def charts_of(runs: list[RunData]) -> list[Chart]:
    """The charts of the runs: results first, a metric of the training together with the same one of evaluations."""
    charts: dict[str, list[Line]] = {}
    rates = [one.latest.get("samples_per_iteration") or 0 for one in runs]
    for number, run in enumerate(runs):
        for metric, curve in run.curves.items():
            if metric == "time":
                per_iteration = rates[number] if all(rates) else 1
                curve = Curve(curve.x, per_iteration / np.maximum(curve.y, 1e-9))
                charts.setdefault("throughput", []).append(Line(number, "throughput", False, curve))
            elif metric == "data_time":
                charts.setdefault(metric, []).append(
                    Line(number, metric, False, Curve(curve.x, curve.y * 1000, curve.num_bad))
                )
            elif metric not in _HIDDEN:
                key = "loss" if metric == LOSS else metric.removeprefix("eval_")
                charts.setdefault(key, []).append(Line(number, metric, metric in run.evaluated, curve))

    def place(key: str) -> tuple[int, list[tuple[str, int]]]:
        parts = [
            (text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d{0,15})", key.lower())
        ]  # 2 before 10
        return (0 if key == "loss" else 2 + _LAST.index(key) if key in _LAST else 1, parts)

    return [Chart(key, title_of(key), _unit(key, all(rates)), charts[key]) for key in sorted(charts, key=place)]


def title_of(key: str) -> str:
    """A readable name.

    >>> title_of("grad_norm"), title_of("f1"), title_of("clean/word_error_rate"), title_of("Acc@1")
    ('Gradient norm', 'F1', 'Word error rate (clean)', 'Acc@1')
    """
    if key in _TITLES:
        return _TITLES[key]
    prefix, _, name = key.rpartition("/")
    words = _TITLES.get(name) or name.replace("_", " ").strip()
    words = words[:1].upper() + words[1:]
    return f"{words} ({prefix})" if prefix else words


def unit_of(metric: str) -> str:
    """Top-k accuracies, ``Acc@k``, are in percent."""
    return "%" if metric.rpartition("/")[2].startswith("Acc@") else ""


def max_points(num_curves: int) -> int:
    """How many points of each curve a page has, so that it opens quickly."""
    return max(_MIN_POINTS, min(_MAX_POINTS, _MAX_TOTAL // max(1, num_curves)))


def thinned(curve: Curve, most: int) -> dict[str, Any]:
    """At most ``most`` points of a curve: of each of equal ranges of x the smallest and the largest value.

    They are measured points, so extremes are exact. ``mx``, ``my`` and ``mc`` are the middle, the mean and the number
    of points of each range, from which the page computes smoothed curves; without them, all points are there.
    """
    x, y = curve.x, curve.y
    if len(x) <= most:
        return {"bad": curve.num_bad, "x": _numbers(x), "y": _numbers(y)}
    bounds = np.unique(np.searchsorted(x, np.linspace(x[0], x[-1], most // 2, endpoint=False)))
    counts = np.diff(np.append(bounds, len(x)))
    kept = np.unique(np.concatenate([_arg(y, bounds, -1), _arg(y, bounds, 1), [0, len(x) - 1]]))
    return {
        "bad": curve.num_bad,
        "x": _numbers(x[kept]),
        "y": _numbers(y[kept]),
        "mx": _numbers(np.add.reduceat(x, bounds) / counts),
        "my": _numbers(np.add.reduceat(y, bounds) / counts),
        "mc": counts.tolist(),
    }


def smoothed(curve: Curve, share: float) -> Array:
    """The mean over ``share`` of the x range, around each point."""
    x, y = curve.x, curve.y
    if len(x) < 3:
        return y
    half = share * (x[-1] - x[0]) / 2
    sums = np.concatenate([[0.0], np.cumsum(y)])
    first, end = np.searchsorted(x, x - half), np.searchsorted(x, x + half, side="right")
    means: Array = (sums[end] - sums[first]) / (end - first)
    return means


def _arg(y: Array, bounds: npt.NDArray[np.intp], sign: int) -> npt.NDArray[np.intp]:
    """The place of the largest value (``sign`` 1) or the smallest (-1) of each range."""
    group = np.repeat(np.arange(len(bounds)), np.diff(np.append(bounds, len(y))))
    order: npt.NDArray[np.intp] = np.lexsort((sign * y, group))
    places: npt.NDArray[np.intp] = order[np.append(bounds[1:], len(y)) - 1]
    return places


def _unit(key: str, has_samples: bool) -> str:
    if key == "throughput":
        return "samples/s" if has_samples else "iterations/s"
    return "ms" if key == "data_time" else unit_of(key)


def _numbers(values: Array) -> list[float]:
    """As short as JSON allows without a difference for float32: nine digits."""
    return [int(value) if value == int(value) and abs(value) < 1e9 else float(f"{value:.9g}") for value in values]
