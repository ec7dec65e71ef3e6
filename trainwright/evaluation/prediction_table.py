"""Predictions as a table with a row for each sample, and its file: JSON lines, CSV or Parquet.

B samples, C classes.
"""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.base.batch import fields, is_label, num_rows, pair
from trainwright.base.errors import ConfigError, import_optional, nearest_name
from trainwright.base.files import atomic_write
from trainwright.data.sample_names import index_of_place, sample_name
from trainwright.evaluation.evaluator import DatasetEvaluator
from trainwright.models.outputs import named_outputs

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".csv", ".parquet")
_SCORES = ("prediction_scores", "logits", "scores")
ID_FIELDS = ("id", "ids", "sample_id", "sample_ids", "path", "paths", "file", "files")
_MAX_VALUES = 100  # of one sample in one field: larger outputs, such as images, are no columns


def prediction_rows(inputs: Any, outputs: Any, first: int = 0) -> list[Row]:
    """A row for each sample of a batch: its number from ``first`` on, its id and labels, and the model's outputs.

    ``prediction`` is the class with the highest score, if the model returns scores (B, C). Outputs of more than 100
    values for each sample, and those without a value for each, such as a loss, are left out.
    """
    batch = fields(inputs) or {}
    found = named_outputs(outputs)
    if found is None:
        found = {"scores" if isinstance(outputs, Tensor) and outputs.ndim == 2 else "output": outputs}
    sizes = (_length(value) for value in found.values())
    number = num_rows(batch) or next((size for size in sizes if size), 0)
    columns: dict[str, list[Any]] = {}
    for name, value in batch.items():
        if name in ID_FIELDS or is_label(name):
            _add(columns, name, value, number)
    for name, value in found.items():
        if name in _SCORES and "prediction" not in found and _are_scores_of_classes(value, number):
            columns["prediction"] = value.argmax(1).tolist()
        _add(columns, name if name not in columns else f"output_{name}", value, number)
    return [{"sample": first + at, **{name: values[at] for name, values in columns.items()}} for at in range(number)]


def _are_scores_of_classes(value: Any, number: int) -> bool:
    """Whether ``value`` has a score of each class (B, C) for ``number`` samples."""
    if not isinstance(value, Tensor) or value.ndim != 2 or not value.is_floating_point():
        return False
    return len(value) == number and value.shape[1] > 1


def with_names(rows: Sequence[Row], loader: Any) -> list[Row]:
    """``rows`` of an evaluation of ``loader``, with the indices and the names of the samples in its data set."""
    index_of, dataset = index_of_place(loader)
    return list(rows) if index_of is None else [_named(row, dataset, index_of(row["sample"]), {}) for row in rows]


def with_facts(rows: Sequence[Row], dataset: Any) -> list[Row]:
    """``rows`` with the names, ids and labels of the samples of ``dataset``, each of which is read; in its order.

    They are the fields of a mapping, or the second item of a pair.
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or len(dataset) != len(rows):
        return list(rows)
    return [_named(row, dataset, index, _facts(dataset[index])) for index, row in enumerate(rows)]


def _named(row: Row, dataset: Any, index: int, facts: Row) -> Row:
    """A row with the index and the name of its sample, and ``facts`` of it."""
    name = sample_name(dataset, index)
    own = {"sample": index, **({} if name is None else {"name": name}), **facts}
    return own | {n if n not in own else f"output_{n}": value for n, value in row.items() if n != "sample"}


def _facts(sample: Any) -> Row:
    both, facts = pair(sample), Row()
    named = (fields(sample) or {}) if both is None else {"label": both[1]}
    for field, value in named.items():
        value = torch.as_tensor(value) if isinstance(value, np.ndarray | np.generic) else value
        if (field in ID_FIELDS or is_label(field)) and _num_values(value) <= _MAX_VALUES:
            facts[field] = _plain(value)
    return facts


def _num_values(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else len(value) if isinstance(value, list | tuple) else 1


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) or (isinstance(value, Tensor) and value.ndim) else 0


def _add(columns: dict[str, list[Any]], name: str, value: Any, number: int) -> None:
    if not number or _length(value) != number:
        return
    if isinstance(value, Tensor):
        if value[0].numel() > _MAX_VALUES or value.is_complex():
            return
        value = (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).tolist()
    columns[name] = [_plain(item) for item in value]


def _plain(value: Any) -> Any:
    from trainwright.config.yaml_file import plain  # here: loads yaml

    return plain(value, others_as_text=True)


class PredictionRecorder(DatasetEvaluator):
    """Keeps a row for each sample, on rank 0: ``tables`` has the rows of each data set. It computes no metric."""

    def __init__(self) -> None:
        self.tables: list[list[Row]] = []

    def reset(self) -> None:
        self.tables.append([])

    def process(self, inputs: Any, outputs: Any) -> None:
        self.tables[-1] += prediction_rows(inputs, outputs, len(self.tables[-1]))

    def evaluate(self) -> dict[str, Any]:
        return {}

    def known_results(self) -> list[str]:
        return []


def check_table_file(path: Path) -> None:
    """Raise if :func:`write_rows` cannot write this kind of file."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: the name must end in {', '.join(SUFFIXES)}.{nearest_name(path.suffix, SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}.")
    if path.suffix == ".parquet":
        import_optional("pyarrow", f"{path}: Parquet needs pyarrow: pip install pyarrow", ConfigError)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a file, atomically. Lists and dicts are JSON texts in CSV."""
    check_table_file(path)
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        buffer = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), buffer)
        atomic_write(path, buffer.getvalue())
        return
    if path.suffix == ".jsonl":
        atomic_write(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        return
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    for row in rows:
        writer.writerow({name: json.dumps(v) if isinstance(v, list | dict) else v for name, v in row.items()})
    atomic_write(path, text.getvalue().encode())
