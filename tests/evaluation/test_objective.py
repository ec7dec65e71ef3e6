"""Whether more of a result is better."""

import pytest

from trainwright.base.errors import ConfigError
from trainwright.config.training.metric_config import MetricConfig
from trainwright.evaluation import TextGenerationMetricsHandler, TorchMetricsHandler, build_metric, objective_of
from trainwright.evaluation.metrics.torchmetrics_factory import key_of, metric_classes

# Known from the class only, not from its name.
BY_THE_CLASS_ONLY = {
    "BinaryFairness",
    "BinaryGroupStatRates",
    "ContinuousRankedProbabilityScore",
    "DeepImageStructureAndTextureSimilarity",
    "LearnedPerceptualImagePatchSimilarity",
    "WordInfoPreserved",  # torchmetrics 1.9 has it the wrong way round
}


@pytest.mark.parametrize(
    ("key", "objective"),
    [("loss", "minimize"), ("evaluation.loss", "minimize"), ("train.accuracy", "maximize"), ("cer", "minimize"),
     ("evaluation.wer", "minimize"), ("f1", "maximize"), ("rougeLsum", "maximize"), ("val_loss", "minimize"),
     ("Acc@1", "maximize"), ("val/acc5", "maximize"), ("1_PPL", "minimize"), ("mean_absolute_error", "minimize"),
     ("hamming_distance", "minimize"), ("cohen_kappa", "maximize"), ("bleu_score", "maximize")],
)  # fmt: skip
def test_a_name_tells(key, objective):
    assert objective_of(key) == objective


@pytest.mark.parametrize("key", ["my_metric", "nll", "fid", "time", "accuracy_loss"])
def test_the_direction_of_an_unknown_name_is_not_guessed(key):
    with pytest.raises(ConfigError, match=f"{key}.*unknown.*objective="):
        objective_of(key)
    assert objective_of(key, [MetricConfig(key, objective="minimize")]) == "minimize"


def test_names_tell_what_torchmetrics_tells():
    wrong = {
        name
        for name, kind in metric_classes().items()
        if isinstance(kind.higher_is_better, bool)
        and (objective_of(key_of(name)) == "maximize") is not kind.higher_is_better
    }
    assert wrong <= BY_THE_CLASS_ONLY


def test_what_the_user_says_comes_first():
    assert objective_of("rouge1", [MetricConfig("rouge", objective="minimize", output_keys=["rouge1"])]) == "minimize"
    handler = TextGenerationMetricsHandler([MetricConfig("bleu", objective="minimize"), "rouge"])
    assert objective_of("evaluation.bleu", handler) == "minimize"
    assert objective_of("rougeL", handler) == "maximize"
    assert objective_of("loss", handler) == "minimize"
    handler = TorchMetricsHandler([MetricConfig("Accuracy", objective="minimize"), "WordInfoPreserved", "MeanMetric"])
    assert objective_of("accuracy", handler) == "minimize"
    assert objective_of("word_info_preserved", handler) == "maximize"
    with pytest.raises(ConfigError, match="mean_metric"):
        objective_of("mean_metric", handler)
    assert objective_of("wer", build_metric("wer")) == "minimize"
