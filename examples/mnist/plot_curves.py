"""Plot the metrics of a run from its metrics.json: ``python plot_curves.py OUTPUT_DIR [PLOT.png]``."""

import json
import sys
from pathlib import Path


def main(output_dir: str, plot: str | None = None) -> None:
    try:
        import matplotlib
    except ImportError:
        sys.exit("This script needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(Path(output_dir) / "metrics.json", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]

    figure, (loss, accuracy, rate) = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    for axes, name, title in (
        (loss, "total_loss", "training loss"),
        (accuracy, "Acc@1", "test accuracy, %"),
        (rate, "lr", "learning rate"),
    ):
        points = [(row["iteration"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), marker="." if name == "Acc@1" else None, color="#1f5fa8")
        axes.set_title(title)
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
    loss.set_yscale("log")
    final = [row["Acc@1"] for row in rows if "Acc@1" in row][-1]
    accuracy.annotate(
        f"{final:.1f} %", (rows[-1]["iteration"], final), xytext=(-8, -18), ha="right", textcoords="offset points"
    )

    place = Path(plot) if plot else Path(output_dir) / "curves.png"
    figure.savefig(place, dpi=110)
    print(f"{place}: plotted {len(rows)} logged iterations.")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
