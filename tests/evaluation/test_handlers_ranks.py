"""Metrics of two processes equal those of one, also if one of them has fewer batches or none."""

from itertools import pairwise

import pytest
import torch

from tests.ranks import on_ranks
from trainwright.base.dist import get_rank, get_world_size
from trainwright.evaluation import (
    Image2TextMetricHandler,
    MetricsHandler,
    TextClassificationMetricsHandler,
    TextGenerationMetricsHandler,
    TMMetrics,
    TorchMetricsHandler,
)
from trainwright.parallel.layout import Layout
from trainwright.parallel.mesh import use_layout

CUTS = {"uneven": (0, 5, 9, 10, 23, 30), "one batch": (0, 30)}  # with one batch the second rank has none
GENERATOR = torch.Generator().manual_seed(0)
LOGITS, CLASSES = torch.randn(30, 4, generator=GENERATOR), torch.randint(4, (30,), generator=GENERATOR)
NUMBERS = torch.randn(30, generator=GENERATOR)
TEXTS = [f"{'ab' * (i % 5)} sample {i}" for i in range(30)]
READ = [text[: 3 + i % 7] + text[4 + i % 7 :] for i, text in enumerate(TEXTS)]


class Own(MetricsHandler):
    """Sees the order of the whole data set."""

    def compute_metrics(self, predictions, labels, **batch):
        assert predictions.shape == (30, 4)
        return {"checked": float((predictions[:, 0] * torch.arange(30)).sum()), "labels": labels.sum()}


def results_of(handler, predictions, targets, cuts) -> dict:
    batches = list(pairwise(cuts))
    for start, stop in batches[get_rank() :: get_world_size()]:
        handler.update(predictions[start:stop], targets[start:stop])
    return handler.compute()


def results_of_all(handler) -> dict:
    handler.update(LOGITS, CLASSES)
    return handler.compute()


def results_of_rank() -> dict:
    found = LOGITS.argmax(dim=1)
    said: dict = {}
    for name, cuts in CUTS.items():
        names = ["accuracy", "f1", "precision", "recall"]
        said[name] = {
            "classes": results_of(TextClassificationMetricsHandler(names), LOGITS, CLASSES, cuts),
            "texts": results_of(Image2TextMetricHandler(["cer", "wer"]), READ, TEXTS, cuts),
            "generated": results_of(TextGenerationMetricsHandler(["rouge", "bleu"]), READ, TEXTS, cuts),
            "own": results_of(Own(), LOGITS, CLASSES, cuts),
            "torch": results_of(
                TorchMetricsHandler(["Accuracy", "F1Score", {"name": "AUROC", "from_logits": True}]),
                LOGITS,
                CLASSES,
                cuts,
            ),
            "indices": results_of(TorchMetricsHandler({"name": "F1", "average": "macro"}), found, CLASSES, cuts),
            "numbers": results_of(
                TorchMetricsHandler(["MeanSquaredError", "PearsonCorrCoef"]), NUMBERS, LOGITS[:, 0], cuts
            ),
            "default that does not fit": results_of(TorchMetricsHandler(is_default=True), NUMBERS, LOGITS[:, 0], cuts),
        }
    half = torch.cat([CLASSES[:5].float(), NUMBERS[5:]])  # fits only the first batch: two processes do not both see it
    said["default that fits one rank"] = results_of(TorchMetricsHandler(is_default=True), NUMBERS, half % 2, (0, 5, 9))
    copy = TorchMetricsHandler("Accuracy").train_copy()
    if get_rank() == 0:  # read by one rank alone
        copy.update(LOGITS, CLASSES)
        said["train copy"] = copy.compute()
    try:
        TMMetrics("Accuracy").compute()
    except ValueError as error:
        said["empty"] = str(error)
    if get_world_size() > 1:
        use_layout(Layout(data=1, tensor=2), "cpu")  # both have the same batches
    counts = TMMetrics("StatScores", task="multiclass", num_classes=4, average="micro")
    counts.update(LOGITS, CLASSES)
    said["tensor ranks"] = {"counts": counts.compute().tolist(), "own": results_of_all(Own())}
    return said


@pytest.fixture(scope="module")
def said() -> tuple[dict, list[dict]]:
    """The results of one process, and of each of two."""
    return results_of_rank(), on_ranks(results_of_rank)


@pytest.mark.parametrize("cuts", ["uneven", "one batch"])
@pytest.mark.parametrize("kind", ["classes", "texts", "generated", "own", "torch", "indices", "numbers"])
def test_handlers_have_one_value_on_any_number_of_ranks(said, cuts, kind):
    alone, ranks = said
    expected = alone["one batch"][kind]  # equal, bit by bit: the order is that of the data set
    if kind in ("torch", "indices", "numbers"):
        expected = pytest.approx(expected, rel=1e-5)  # torchmetrics sums in float32, in an order of the ranks
    for rank in ranks:
        assert rank[cuts][kind] == expected


def test_ranks_agree_where_there_is_no_value(said):
    assert all(
        one[cuts]["default that does not fit"] == {} for one in (said[0], *said[1]) for cuts in ("uneven", "one batch")
    )
    # A default that fits the batches of one rank only is off on both.
    assert {str(one["default that fits one rank"]) for one in (said[0], *said[1])} == {"{}"}
    # A train copy is read by one rank without the other.
    assert said[1][0]["train copy"] == said[0]["train copy"]
    # No samples on any rank are an error on all.
    assert {one["empty"] for one in (said[0], *said[1])} == {"metric Accuracy has seen no samples."}


def test_samples_of_tensor_parallel_ranks_count_once(said):
    alone, ranks = said
    assert alone["tensor ranks"]["counts"][-1] == 30
    assert [rank["tensor ranks"] for rank in ranks] == [alone["tensor ranks"]] * 2
