"""Whether a larger or a smaller value of a result is better, inferred from its name."""

import re
from functools import cache

_SMALLER = frozenset([
    "loss", "losses", "err", "error", "errors", "divergence", "deviance", "disparity", "distance",
    "perplexity", "ppl", "eed", "cer", "wer", "mer", "ter", "eer", "mae", "mse", "rmse", "msle", "mape",
])  # fmt: skip
_LARGER = frozenset([
    "acc", "accuracy", "auc", "auroc", "f1", "fbeta", "precision", "recall", "sensitivity", "specificity",
    "dice", "iou", "union", "jaccard", "map", "ndcg", "bleu", "r2", "pearson", "spearman", "corr", "correlation",
    "psnr", "ssim",
])  # fmt: skip
_LARGER_BEGINNINGS = ("rouge",)  # rouge1, rougeLsum
# Of torchmetrics, which is imported only for names that are not listed here: that takes seconds.
_SMALLER_NAMES = frozenset(
    [
        "word_info_lost",
        "translation_edit_rate",
        "retrieval_fall_out",
        "spatial_distortion_index",
        "spectral_angle_mapper",
        "total_variation",
    ]
)


def objective_of_name(key: str) -> str | None:
    """ "minimize" for losses, errors and distances, "maximize" for accuracies and known scores; None if unknown.

    Names of torchmetrics' metrics have the direction that torchmetrics defines.

    >>> objective_of_name("evaluation.loss"), objective_of_name("mean_squared_error"), objective_of_name("Acc@1")
    ('minimize', 'minimize', 'maximize')
    """
    name = re.split(r"[./]", key)[-1]
    words = re.findall(r"[a-z]+\d*", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    words += [word.rstrip("0123456789") for word in words]  # acc5
    is_smaller = name.lower() in _SMALLER_NAMES or not _SMALLER.isdisjoint(words)
    is_larger = not _LARGER.isdisjoint(words) or any(word.startswith(_LARGER_BEGINNINGS) for word in words)
    if is_smaller != is_larger:
        return "minimize" if is_smaller else "maximize"
    return _objectives_of_torchmetrics().get(name.lower())


@cache
def _objectives_of_torchmetrics() -> dict[str, str]:
    """The directions of torchmetrics' classes, by the names of their results."""
    from trainwright.evaluation.metrics.names import higher_is_better, key_of, metric_classes

    known = {key_of(name): higher_is_better(kind) for name, kind in metric_classes().items()}
    return {key: "maximize" if better else "minimize" for key, better in known.items() if better is not None}
