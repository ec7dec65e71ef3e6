"""Figures as lines to copy and as one flat dictionary."""

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("trainwright.evaluation")


def print_csv_format(results: Mapping[str, Any]) -> None:
    """Log figures as comma-separated lines, ready for a spreadsheet; each begins with ``copypaste:``.

    A dictionary in a dictionary is a task: its name, its figures' names and its figures are a line each.
    """
    plain = {key: value for key, value in results.items() if not isinstance(value, Mapping)}
    _log_table(plain)
    for task, figures in results.items():
        if isinstance(figures, Mapping):
            logger.info("copypaste: Task: %s", task)
            _log_table(flatten_results_dict(figures))


def flatten_results_dict(results: Mapping[str, Any]) -> dict[str, Any]:
    """Nested figures under names joined by ``/``.

    >>> flatten_results_dict({"val": {"Acc@1": 90.0}, "loss": 0.5})
    {'val/Acc@1': 90.0, 'loss': 0.5}
    """
    flat: dict[str, Any] = {}
    for key, value in results.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}/{inner}": figure for inner, figure in flatten_results_dict(value).items()})
        else:
            flat[key] = value
    return flat


def _log_table(figures: Mapping[str, Any]) -> None:
    if figures:
        logger.info("copypaste: %s", ",".join(map(str, figures)))
        logger.info("copypaste: %s", ",".join(map(_text, figures.values())))


def _text(value: Any) -> str:
    try:
        return f"{float(value):.4f}"
    except (TypeError, ValueError):
        return str(value)
