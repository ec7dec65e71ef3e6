"""Whether more of a figure is better, told by its name."""

_WORDS = frozenset(["loss", "error", "errors", "divergence", "deviance", "disparity"])
_SHORT = frozenset(["cer", "wer", "mer", "ter", "eed", "eer", "mae", "mse", "rmse", "msle", "mape", "ppl"])
_LONG = frozenset(
    [
        "perplexity",
        "word_info_lost",
        "translation_edit_rate",
        "retrieval_fall_out",
        "spatial_distortion_index",
        "spectral_angle_mapper",
        "total_variation",
    ]
)


def objective_of_name(key: str) -> str:
    """Of losses, errors and distances "minimize", of anything else "maximize".

    >>> objective_of_name("evaluation.loss"), objective_of_name("mean_squared_error"), objective_of_name("f1")
    ('minimize', 'minimize', 'maximize')
    """
    name = key.rpartition(".")[2].lower()
    words = name.split("_")
    smaller = name in _LONG or name.endswith("distance") or not _SHORT.isdisjoint(words) or not _WORDS.isdisjoint(words)
    return "minimize" if smaller else "maximize"
