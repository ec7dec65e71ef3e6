"""The way to a figure that torchmetrics computes. Imported when it is first needed: it is slow to load."""

import importlib
from collections.abc import Callable
from typing import Any

from trainwright.config.errors import UserError


def torchmetrics_function(domain: str, name: str) -> Callable[..., Any]:
    """``torchmetrics.functional.<domain>.<name>``."""
    try:
        functions = importlib.import_module(f"torchmetrics.functional.{domain}")
    except ImportError as error:
        raise UserError(f"This evaluator needs torchmetrics: pip install torchmetrics ({error}).") from error
    function: Callable[..., Any] = getattr(functions, name)
    return function
