"""Write or serve a report about runs: ``trainwright report RUN...``."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.base.errors import ConfigError, import_optional
from trainwright.base.files import atomic_write, irregular
from trainwright.config.arguments import TrainingArgumentParser, whole_number

if TYPE_CHECKING:
    from trainwright.inspect.report.run_data import RunData

DONE = 0
_PORT = 6060
_PICTURES = (".png", ".jpg", ".jpeg", ".svg", ".pdf")
_OTHER_FILES = (*_PICTURES, ".csv", ".json", ".md", ".txt")


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    from trainwright.inspect.report.page import page, plotly_script
    from trainwright.inspect.report.run_data import find_runs

    if (suffix := Path(args.output or "").suffix.lower()) in _OTHER_FILES:
        picture = " --png writes curves.png into the folder of each run." if suffix in _PICTURES else ""
        raise ConfigError(f"--output: got {args.output!r}; the report is an HTML page: write NAME.html.{picture}")
    if args.png:
        _draw(find_runs(args.runs))
        return DONE
    if args.port is not None and not args.serve:
        raise ConfigError("--port: needs --serve.")
    plotly_script()  # before the runs are read, which may take seconds
    runs = find_runs(args.runs)
    if args.serve:
        _serve(lambda: find_runs(args.runs), args.port)
        return DONE
    file = Path(args.output) if args.output else (runs[0].folder if len(runs) == 1 else Path()) / "report.html"
    if file.is_dir():
        file = file / "report.html"
    text = page(runs)
    file.parent.mkdir(parents=True, exist_ok=True)
    if irregular(file) is not None:  # such as /dev/stdout
        file.write_text(text, encoding="utf-8")
    else:  # a link in the folder of the run, which may be another's, is replaced, and not followed
        atomic_write(file, text.encode())
    print(f"{file} ({len(text.encode()) / 1e6:.1f} MB): open it in a browser.")
    return DONE


def parser() -> argparse.ArgumentParser:
    parser = TrainingArgumentParser(
        prog="trainwright report",
        description="One HTML file with curves, settings, environment and checkpoints of runs.\nIt opens offline.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the output folder of a run, or a folder that has some")
    place = "default: report.html in the folder of the run, or here for several"
    parser.add_argument("-o", "--output", metavar="FILE", help=place)
    parser.add_argument("--png", action="store_true", help="instead, write curves.png into the folder of each run")
    parser.add_argument("--serve", action="store_true", help="serve it on this machine, and follow runs in progress")
    parser.add_argument(
        "--port", type=whole_number(0, 65535), metavar="N", help=f"of --serve; default: {_PORT}, or a free one"
    )
    return parser


def _draw(runs: "list[RunData]") -> None:
    from trainwright.inspect.report.picture import draw_curves

    message = "matplotlib is not installed. Install it with `pip install matplotlib`."
    import_optional("matplotlib", f"trainwright report --png: {message}", ConfigError)
    for run in runs:
        print(draw_curves(run.folder) or f"{run.folder}: no losses to draw.")


def _serve(find: "Callable[[], list[RunData]]", port: int | None) -> None:
    from trainwright.inspect.report.server import ReportServer

    try:
        server = ReportServer(find, _PORT if port is None else port)
    except ConfigError:
        if port is not None:
            raise
        server = ReportServer(find)
    print(f"{server.url} (Ctrl-C ends it)", flush=True)
    with server:
        server.serve_forever()
