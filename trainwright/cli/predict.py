"""Predictions for files with a trained model and its preprocessor: ``trainwright predict RUN FILE ...``."""

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.base.errors import ConfigError, MissingFileError, missing_path
from trainwright.base.terminal import print_line
from trainwright.config.arguments import TrainingArgumentParser, whole_number
from trainwright.inspect.report.text import cell, shown, table

if TYPE_CHECKING:
    from trainwright.models import Model

_EPILOG = """\
examples:
  trainwright predict output/run image.png other.png
  trainwright predict output/run texts.txt                  a prediction for each line
  echo "a text" | trainwright predict output/run - --json
  trainwright predict my-model images/*.png --output predictions.csv

The model is one of trainwright.models, or a Model of yours, with a preprocessor: a folder of Model.save, or a run that
trained it, whose checkpoints hold both. `trainwright eval RUN --predictions FILE` works for every model.
"""


def parser() -> argparse.ArgumentParser:
    parser = TrainingArgumentParser(prog="trainwright predict", epilog=_EPILOG)
    parser.add_argument("run", metavar="RUN|MODEL", help="a run's folder, one of its checkpoints, or a model's folder")
    parser.add_argument("files", nargs="+", metavar="FILE", help="images, recordings or text files; -: standard input")
    parser.add_argument("--checkpoint", metavar="NAME", help="of the run; default: model_best, else the last")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE|FILE.py",
                        help="where a model of your own is registered; may be given several times")  # fmt: skip
    parser.add_argument("--batch-size", type=whole_number(1), default=32, metavar="N", help="default: 32")
    parser.add_argument("--device", help="such as cuda; default: cpu")
    parser.add_argument("--output", metavar="FILE", type=Path, help="write them: .jsonl, .csv or .parquet")
    parser.add_argument("--json", action="store_true", help="print JSON lines, for programs")
    return parser


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    folder = model_folder(Path(args.run).expanduser(), args.checkpoint)
    for file in args.files:
        if file != "-" and not Path(file).is_file():
            raise missing_path(Path(file), "no such file.")
    from trainwright.evaluation.prediction_table import check_table_file, write_rows

    if args.output is not None:
        check_table_file(args.output)
    print_line(f"Model: {shown(folder)}", file=sys.stderr)
    with redirect_stdout(sys.stderr):  # what the user's modules print
        model = _model(folder, args)
        rows = list(_rows(model, args))
    if args.output is not None:
        write_rows(args.output, rows)
        print_line(f"{len(rows)} predictions in {args.output}")
    elif args.json:
        print("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    else:
        names = list(dict.fromkeys(name for row in rows for name in row))
        values = ((row.get(name) for name in names) for row in rows)
        cells = ([f"{one:.4g}" if isinstance(one, float) else cell(one) for one in row] for row in values)
        print("\n".join(table([names, *cells])))
    return 0


def model_folder(path: Path, checkpoint: str | None) -> Path:
    """The folder with a model: ``path`` itself, or a checkpoint of the run in it."""
    from trainwright.cli.run_checkpoint import find_checkpoint, find_target
    from trainwright.models.config import CONFIG_NAME

    if (path / CONFIG_NAME).is_file() and checkpoint is None:
        return path
    target = find_target(str(path))
    if target.run is None:
        raise ConfigError(
            f"{path}: is a file; pass the folder of a run, one of its checkpoints, or the folder of model.save()."
            " `trainwright runs` lists the runs below a folder."
        )
    found = target.checkpoint or find_checkpoint(target.run, checkpoint)
    if not (found / CONFIG_NAME).is_file():
        raise ConfigError(
            f"{found}: has the weights, but not what builds the model and reads files ({CONFIG_NAME}, preprocessor)."
            " Those are saved with a trainwright.models.Model that has a preprocessor. For another model:"
            f" dataloader.test of its config file names the data, and `trainwright eval {shown(path)} --predictions"
            " OUT.csv` writes OUT.csv; or predict() of the Trainer in Python."
        )
    return found


def _model(folder: Path, args: argparse.Namespace) -> "Model":
    from trainwright.config.lazy.allowlist import use_project
    from trainwright.models.config import CONFIG_NAME

    use_project(folder / CONFIG_NAME)  # modules of the working folder, unless that is in the model's
    for name in args.imports:
        path = Path(name)
        if path.suffix == ".py":
            if not path.is_file():
                raise MissingFileError(f"--import: {name}: no such file.")
            sys.path.insert(0, str(path.parent.resolve()))
        try:
            importlib.import_module(path.stem if path.suffix == ".py" else name)
        except ImportError as error:
            raise ConfigError(f"--import: {name}: {error}") from error
    from trainwright.base.errors import ConfigKeyError
    from trainwright.models import Model

    try:
        model = Model.load(folder, device=args.device)
    except ConfigKeyError as error:
        error.add_note("A model of your own is registered when its module is imported: --import FILE.py")
        raise
    except RuntimeError as error:  # torch: no such device
        raise ConfigError(f"--device: got {args.device!r}: {str(error).splitlines()[0]}") from error
    if model.preprocessor is None:
        raise ConfigError(f"{folder}: the model has no preprocessor, which reads files; save it with one.")
    return model


def _rows(model: "Model", args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each input: its file, and line if it is a text, and the fields of the model's output."""
    from trainwright.config.yaml_file import plain

    parts = model.preprocessor.values() if isinstance(model.preprocessor, dict) else [model.preprocessor]
    kinds = {getattr(part, "kind", "") for part in parts} - {""}
    kind = model.preprocessor_kind or next(iter(kinds), "")
    inputs = list(_inputs(args.files, is_text=kind == "tokenizer"))
    for first in range(0, len(inputs), args.batch_size):
        batch = inputs[first : first + args.batch_size]
        outputs = model.predict([value for _, value in batch])
        for (name, _), output in zip(batch, outputs, strict=True):
            fields = output if isinstance(output, dict) else {"output": output}
            yield {"input": name, **plain(fields, others_as_text=True)}


def _inputs(files: Sequence[str], *, is_text: bool) -> Iterator[tuple[str, str]]:
    """The name of each input, and what the preprocessor reads: a line of a text file, or the path of another file."""
    for file in files:
        if not is_text:
            if file == "-":
                raise ConfigError("-: this model reads files, not text; name files.")
            yield file, file
            continue
        try:
            lines = (sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")).splitlines()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: is no text in UTF-8; this model reads a text in each line.") from error
        yield from ((f"{file}:{number}", line) for number, line in enumerate(lines, 1) if line.strip())
