"""``AUC``: the area under a curve that is given by its points; torchmetrics has only the function left."""

from functools import cache
from typing import Any

from torch import Tensor

from trainwright.evaluation.metrics.packages import load_package


@cache
def area_under_curve() -> type[Any]:
    """The class ``AUC(reorder=False)``: ``update(x, y)`` takes points of one curve, ``compute`` gives the area."""
    torchmetrics = load_package("torchmetrics", "AUC", "pip install torchmetrics")
    compute = load_package("torchmetrics.utilities.compute", "AUC", "pip install torchmetrics")
    data = load_package("torchmetrics.utilities.data", "AUC", "pip install torchmetrics")

    class AUC(torchmetrics.Metric):  # type: ignore[name-defined, misc]  # the package is loaded only when it is used
        """Trapezoidal area; the points must run in one direction of x unless ``reorder``."""

        is_differentiable = False
        higher_is_better = None
        full_state_update = False

        def __init__(self, reorder: bool = False, **settings: Any) -> None:
            super().__init__(**settings)
            self.reorder = reorder
            self.add_state("x", default=[], dist_reduce_fx="cat")
            self.add_state("y", default=[], dist_reduce_fx="cat")

        def update(self, preds: Tensor, target: Tensor) -> None:
            self.x.append(preds.flatten())
            self.y.append(target.flatten())

        def compute(self) -> Any:
            return compute.auc(data.dim_zero_cat(self.x), data.dim_zero_cat(self.y), reorder=self.reorder)

    return AUC
