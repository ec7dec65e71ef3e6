"""Evaluate one model on several data sets."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainwright.evaluation.evaluator import DatasetEvaluator
from trainwright.evaluation.loop import inference_on_dataset
from trainwright.evaluation.report import print_csv_format
from trainwright.parallel.dist import is_main_process


def evaluate_loaders(
    model: nn.Module,
    loaders: Sequence[Any],
    evaluator: DatasetEvaluator,
    *,
    batch_size: int,
    eval_iter: float,
    get_batch: Callable[[Any, Any], Mapping[str, Any]],
) -> dict[str, Any]:
    """The evaluator's results on the only loader; on several, the results of each by the name of its data set's class.

    ``batch_size`` is that of all ranks together; at most ``eval_iter`` batches of each loader are evaluated.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    results: dict[str, Any] = {}
    for loader in loaders:
        name = _free_name(type(getattr(loader, "dataset", loader)).__name__, results)
        results[name] = inference_on_dataset(model, loader, batch_size, eval_iter, get_batch, device, evaluator)
        if is_main_process():
            print_csv_format(results[name])
    return next(iter(results.values())) if len(results) == 1 else results


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    """``name``, numbered where it is taken: two data sets of one class."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free
