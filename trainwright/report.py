"""The results of a run in a notebook: ``Run("output")``. Loads on first use."""

from typing import TYPE_CHECKING

from trainwright.lazy_names import on_first_use

if TYPE_CHECKING:
    from trainwright.inspect.report.page import Run as Run

__all__ = ["Run"]
__getattr__ = on_first_use(__name__, {"trainwright.inspect.report.page": "Run"})
