"""Real text without a network: the sources of Python's standard library, which lie on every machine that runs this."""

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
        with tokenize.open(STDLIB / name) as file:  # heeds the file's own declaration of its encoding
            return file.read()
    except FileNotFoundError:
        sys.exit(f"{STDLIB / name}: this Python comes without its sources. Run the example with another one.")


def write_splits(folder: Path, splits: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Each split as a file of one JSON object per line, ``train.jsonl`` and so on: what ``Dataset.load`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{folder / split}.jsonl: {len(lines):,} rows, such as {lines[0].strip()[:120]}")
