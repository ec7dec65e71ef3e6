"""Curves with few points keep their extremes; related metrics share a chart."""

from pathlib import Path

import numpy as np
import pytest

from trainwright.inspect.report.curves import charts_of, max_points, smoothed, thinned
from trainwright.inspect.report.run_data import Curve, find_runs


@pytest.mark.slow
def test_a_million_points_keep_their_extremes_and_their_means() -> None:
    noise = np.random.default_rng(0).normal(size=1_000_000)
    noise[777_776], noise[12] = 9.25, -8.5
    curve = Curve(np.arange(1.0, 1_000_001), noise)
    found = thinned(curve, 4000)
    assert 3000 < len(found["x"]) <= 4002
    points = dict(zip(found["x"], found["y"], strict=True))
    assert points[777_777] == 9.25 == max(found["y"])
    assert points[13] == -8.5 == min(found["y"])
    assert (found["x"][0], found["x"][-1]) == (1, 1_000_000)
    assert sum(found["mc"]) == 1_000_000
    assert np.average(found["my"], weights=found["mc"]) == pytest.approx(noise.mean(), abs=1e-8)
    assert all(noise[int(x) - 1] == pytest.approx(y, rel=1e-8) for x, y in points.items())


def test_gaps_between_points_make_no_empty_range() -> None:
    x = np.concatenate([np.arange(5000.0), [1e7]])
    found = thinned(Curve(x, x), 1000)
    assert found["x"][-1] == 10_000_000
    assert min(found["mc"]) >= 1
    few = thinned(Curve(np.array([1.0, 2.0]), np.array([0.125, 3.0]), 2), 400)
    assert few == {"bad": 2, "x": [1, 2], "y": [0.125, 3]}  # all of them
    assert [max_points(curves) for curves in (6, 100, 10_000)] == [4000, 2000, 400]


def test_smoothing_is_the_mean_around_a_point() -> None:
    curve = Curve(np.arange(11.0), np.arange(11.0) % 2)
    assert smoothed(curve, 0.2)[1:-1].tolist() == pytest.approx([1 / 3, 2 / 3] * 4 + [1 / 3])
    assert smoothed(curve, 0.0).tolist() == curve.y.tolist()


def test_a_metric_of_training_and_evaluation_shares_a_chart(runs_folder: Path) -> None:
    charts = charts_of(find_runs([str(runs_folder / "objects")]))
    assert [chart.title for chart in charts] == [
        *("Loss", "Accuracy", "Learning rate", "Throughput", "Waiting for data, per iteration")
    ]
    for chart in charts[:2]:
        assert [line.is_evaluation for line in chart.lines] == [False, True] or chart.key == "loss"
        assert {line.is_evaluation for line in chart.lines} == {False, True}
    throughput = next(chart for chart in charts if chart.key == "throughput")
    assert throughput.unit == "samples/s"
    assert throughput.lines[0].curve.y.max() < 1e6
