"""Optional packages of metrics, imported when a metric is first used."""

import importlib
from typing import Any  # the packages ship no types

from trainwright.config.errors import UserError


def load_package(name: str, needed_for: str, install: str = "pip install 'trainwright[metrics]'") -> Any:
    """The module ``name``.

    Raises:
        UserError: it is not installed; the message says what needs it and how to get it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"{needed_for} needs the package {package}: {install} ({error}).") from error
