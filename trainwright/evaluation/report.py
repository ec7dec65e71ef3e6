"""Metrics as lines to copy and as one flat dictionary."""

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("trainwright.evaluation")


def print_csv_format(results: Mapping[str, Any]) -> None:
    """Log metrics as comma-separated lines for a spreadsheet; each line begins with ``copypaste:``.

    A nested dictionary is a task: its name, the names of its metrics and their values are one line each.
    """
    plain = {key: value for key, value in results.items() if not isinstance(value, Mapping)}
    _log_table(plain)
    for task, metrics in results.items():
        if isinstance(metrics, Mapping):
            logger.info("copypaste: Task: %s", task)
            _log_table(flatten_results_dict(metrics))


def flatten_results_dict(results: Mapping[str, Any]) -> dict[str, Any]:
    """Nested metrics as a flat dictionary, with names joined by ``/``.

    >>> flatten_results_dict({"val": {"Acc@1": 90.0}, "loss": 0.5})
    {'val/Acc@1': 90.0, 'loss': 0.5}
    """
    flat: dict[str, Any] = {}
    for key, value in results.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}/{inner}": metric for inner, metric in flatten_results_dict(value).items()})
        else:
            flat[key] = value
    return flat


def _log_table(metrics: Mapping[str, Any]) -> None:
    if metrics:
        logger.info("copypaste: %s", ",".join(map(str, metrics)))
        logger.info("copypaste: %s", ",".join(map(_text, metrics.values())))


def _text(value: Any) -> str:
    try:
        return f"{float(value):.4f}"
    except (TypeError, ValueError):
        return str(value)
