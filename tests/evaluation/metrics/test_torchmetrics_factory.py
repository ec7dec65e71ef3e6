"""torchmetrics' metrics by name, today's and those of torchmetrics 0.7."""

import pytest
import torch

from trainwright.base.errors import ConfigError
from trainwright.evaluation import TMMetrics, TorchMetricsHandler, get_metric_by_name, show_avaliable_metrics
from trainwright.evaluation.metrics.torchmetrics_factory import OF_TASKS, find_metric, metric_classes
from trainwright.tasks.metrics import metrics_handler_for

# As printed by TMMetrics.get_tm_avaliable_metrics() of Towhee 0.9 with torchmetrics 0.7.0.
PAGE = """
CatMetric MaxMetric MeanMetric MinMetric SumMetric PIT SDR SI_SDR SI_SNR SNR PermutationInvariantTraining
ScaleInvariantSignalDistortionRatio ScaleInvariantSignalNoiseRatio SignalDistortionRatio SignalNoiseRatio AUC AUROC F1
ROC Accuracy AveragePrecision BinnedAveragePrecision BinnedPrecisionRecallCurve BinnedRecallAtFixedPrecision
CalibrationError CohenKappa ConfusionMatrix F1Score FBeta FBetaScore HammingDistance Hinge HingeLoss IoU JaccardIndex
KLDivergence MatthewsCorrcoef MatthewsCorrCoef Precision PrecisionRecallCurve Recall Specificity PSNR SSIM
MultiScaleStructuralSimilarityIndexMeasure PeakSignalNoiseRatio StructuralSimilarityIndexMeasure CosineSimilarity
ExplainedVariance MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError MeanSquaredLogError PearsonCorrcoef
PearsonCorrCoef R2Score SpearmanCorrcoef SpearmanCorrCoef SymmetricMeanAbsolutePercentageError TweedieDevianceScore
RetrievalFallOut RetrievalHitRate RetrievalMAP RetrievalMRR RetrievalNormalizedDCG RetrievalPrecision RetrievalRecall
RetrievalRPrecision WER BLEUScore CharErrorRate CHRFScore ExtendedEditDistance MatchErrorRate SacreBLEUScore SQuAD
TranslationEditRate WordErrorRate WordInfoLost WordInfoPreserved MinMaxMetric MeanAveragePrecision
"""
OLD = PAGE.split()
NEEDS = {
    "PIT": {"metric_func": "scale_invariant_signal_noise_ratio"},
    "PermutationInvariantTraining": {"metric_func": "scale_invariant_signal_noise_ratio"},
    "BinnedRecallAtFixedPrecision": {"min_precision": 0.5},
    "PSNR": {"data_range": 1.0},
    "PeakSignalNoiseRatio": {"data_range": 1.0},
    "MinMaxMetric": {"base_metric": "Accuracy"},
}


def test_every_name_of_the_page_is_listed_and_so_is_what_is_new():
    names = TMMetrics.get_tm_avaliable_metrics()
    assert set(OLD) <= set(names)
    assert {"BinaryAUROC", "MulticlassF1Score", "ROUGEScore", "DiceScore", "ConcordanceCorrCoef"} <= set(names)
    assert names == sorted(names)
    assert not {"Metric", "MetricCollection", "CompositionalMetric", "BaseAggregator"} & set(names)


@pytest.mark.parametrize("name", [name for name in OLD if name != "MeanAveragePrecision"])
def test_every_name_of_the_page_can_be_made(name):
    assert TMMetrics(name, **NEEDS.get(name, {})).name == name


@pytest.mark.parametrize(
    ("name", "nearest"), [("Acuracy", "Accuracy"), ("F1_Scor", "F1Score"), ("MeanSquareError", "M")]
)
def test_an_unknown_name_is_an_error_with_the_nearest(name, nearest):
    with pytest.raises(ConfigError, match=f"torchmetrics has no {name!r}. Did you mean '{nearest}"):
        TMMetrics(name)


@pytest.mark.parametrize(
    ("name", "arguments", "facts"),
    [
        ("MeanAveragePrecision", {}, r"metric MeanAveragePrecision: .*pycocotools"),  # an absent package
        ("zzzzzzzzz", {}, "get_tm_avaliable_metrics"),
        ("ppl", {}, "Did you mean 'Perplexity'"),
        ("roc_auc", {}, "Did you mean 'AUROC'"),
        ("PSNR", {}, "metric PSNR: .*data_range"),
        ("Accuracy", {"topk": 3}, "metric Accuracy: .*'topk'.*'top_k'"),
        ("MeanSquaredError", {"nonsense": 1}, "metric MeanSquaredError: .*nonsense"),
        ("PIT", {"metric_func": "signal_noise_ration"}, "'signal_noise_ration'.*'signal_noise_ratio'"),
    ],
)
def test_what_cannot_be_made_is_named_at_once(name, arguments, facts):
    with pytest.raises(ConfigError, match=facts):
        TMMetrics(name, **arguments)


def test_usual_names_of_regression_are_names_of_results_too():
    predictions, targets = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 4.0, 8.0])  # errors 0, 2 and 4
    handler = TorchMetricsHandler(["mae", "MSE", "rmse", "r2"])
    handler.update(predictions, targets)
    expected = {
        "mae": 2,
        "mse": 20 / 3,
        "rmse": (20 / 3) ** 0.5,
        "r2": 1 - 20 / float((targets - 13 / 3).square().sum()),
    }
    assert handler.compute() == pytest.approx(expected)


def test_old_names_are_todays_classes_with_the_old_behaviour():
    assert find_metric("IoU")[0] is metric_classes()["JaccardIndex"]
    assert find_metric("BinnedAveragePrecision") == (metric_classes()["AveragePrecision"], {"thresholds": 100})
    assert find_metric("mean_squared_error")[0] is metric_classes()["MeanSquaredError"]


def test_metrics_by_name_and_their_list(capsys):
    assert repr(get_metric_by_name("Accuracy", top_k=2)) == "TMMetrics('Accuracy', top_k=2)"
    assert show_avaliable_metrics() == {"TMMetrics": TMMetrics.get_tm_avaliable_metrics()}
    assert "MeanSquaredError" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"metric_impl: got 'sklearn'"):
        get_metric_by_name("Accuracy", metric_impl="sklearn")


def test_a_metric_of_a_task_names_the_task() -> None:
    for name, task in OF_TASKS.items():
        with pytest.raises(ConfigError, match=f"It is of the task {task}"):
            find_metric(name)
        assert name in metrics_handler_for(task).valid_metrics
