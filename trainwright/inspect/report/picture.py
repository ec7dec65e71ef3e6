"""``curves.png``: the loss and the best metric of a run in one picture, for its folder and its model card."""

from io import BytesIO
from pathlib import Path
from typing import Any

from trainwright.base.files import atomic_write
from trainwright.events.formats import CURVES_NAME
from trainwright.inspect.report.curves import Line, charts_of, smoothed, thinned, title_of, unit_of
from trainwright.inspect.report.run_data import LOSS, Curve, RunData

_BLUE, _ORANGE, _GREY = "#2f6fed", "#e8710a", "#5d6878"
_MAX_POINTS = 4000


def draw_curves(folder: Path) -> Path | None:
    """Write ``curves.png`` into a run's folder, and return its path; None if the run has no loss.

    The left axis has the training loss, light, with its mean over 2 % of the run, and the loss of evaluations; beside
    it is the metric that selects the best checkpoint, with its best value marked.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display, and changes no setting of pyplot
    from matplotlib.figure import Figure

    run = RunData(folder, folder.resolve().name)
    charts = {chart.key: chart for chart in charts_of([run])}
    if LOSS not in run.curves:
        return None
    best = run.latest.get("best") or {}
    metric = str(best.get("metric", ""))
    is_loss = metric.removeprefix("eval_").rpartition("/")[2] == "loss"
    other = metric if metric in run.curves and not is_loss else None
    figure = Figure(figsize=(9 if other else 6.4, 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(run), fontsize=11)
    axes = figure.subplots(1, 2 if other else 1, squeeze=False)[0]
    for line in charts["loss"].lines:
        _draw(axes[0], line)
    _finish(axes[0], "Loss")
    if other is not None:
        key = other.removeprefix("eval_")
        for line in charts[key].lines:
            _draw(axes[1], line)
        _finish(axes[1], title_of(key) + (f" ({unit_of(key)})" if unit_of(key) else ""))
    if best and metric in run.curves:
        axis, value, at = axes[1 if other else 0], best["value"], best["iteration"]
        label = f"best {value:.4g} (iteration {at:,})"
        axis.plot([at], [value], marker="*", markersize=13, color=_ORANGE, mec="white", ls="", label=label, zorder=5)
    for axis in axes:
        axis.legend(frameon=False, fontsize=8)
    content = BytesIO()
    figure.savefig(content, format="png", metadata={"Software": "trainwright"})
    atomic_write(folder / CURVES_NAME, content.getvalue())
    return folder / CURVES_NAME


def _title(run: RunData) -> str:
    start, loss = run.latest, run.curves[LOSS]
    model = (start.get("model") or {}).get("class")
    done = f"{int(loss.x[-1]):,} iterations" if len(loss.x) else ""
    return ", ".join(filter(None, [run.name, model, done]))


def _finish(axis: Any, title: str) -> None:
    from matplotlib.ticker import EngFormatter

    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel("iterations", fontsize=9)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 80k
    axis.tick_params(labelsize=8, colors=_GREY)
    axis.grid(axis="y", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlim(left=0)


def _draw(axis: Any, line: Line) -> None:
    colour, name = (_ORANGE, "evaluation") if line.is_evaluation else (_BLUE, "training")
    is_noisy = not line.is_evaluation and len(line.curve.x) > 30
    points = thinned(line.curve, _MAX_POINTS)
    few = {"marker": "o", "markersize": 3.5} if len(points["x"]) <= 60 else {}
    if not is_noisy:
        axis.plot(points["x"], points["y"], color=colour, lw=1.5, label=name, **few)
        return
    axis.plot(points["x"], points["y"], color=colour, lw=0.7, alpha=0.3)
    mean = thinned(Curve(line.curve.x, smoothed(line.curve, 0.02)), _MAX_POINTS)
    axis.plot(mean["x"], mean["y"], color=colour, lw=1.6, label=name)
