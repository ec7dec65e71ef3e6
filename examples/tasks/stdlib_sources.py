"""Text data without a network: the sources of Python's standard library."""

import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

STDLIB = Path(sysconfig.get_path("stdlib"))


def read_source(name: str) -> str:
    """The text of a file such as ``email/message.py``."""
    try:
        with tokenize.open(STDLIB / name) as file:  # uses the encoding that the file declares
            return file.read()
    except FileNotFoundError:
        sys.exit(f"{STDLIB / name}: this Python comes without its sources. Run the example with another one.")


def write_splits(folder: Path, splits: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Write each split as JSON lines, ``train.jsonl`` and so on, for ``Dataset.load``."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{folder / split}.jsonl: {len(lines):,} rows, such as {lines[0].strip()[:120]}")
