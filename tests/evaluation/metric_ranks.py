"""One rank that computes metrics, as a program: run by test_ranks.py once alone and once as two processes.

Rank r takes the r-th batch of each round; the last round may be short or have no batch for a rank. Prints JSON.
"""

import json
import os
from itertools import pairwise

import torch

from trainwright.evaluation import (
    Image2TextMetricHandler,
    MetricsHandler,
    TextClassificationMetricsHandler,
    TextGenerationMetricsHandler,
    TMMetrics,
    TorchMetricsHandler,
)
from trainwright.parallel.data_parallel import shut_down
from trainwright.parallel.layout import Layout
from trainwright.parallel.mesh import use_layout

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
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
    for start, stop in batches[RANK::WORLD_SIZE]:
        handler.update(predictions[start:stop], targets[start:stop])
    return handler.compute()


def results_of_all(handler) -> dict:
    handler.update(LOGITS, CLASSES)
    return handler.compute()


def main() -> None:
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("gloo")
    found = LOGITS.argmax(dim=1)
    said: dict = {}
    for name, cuts in CUTS.items():
        names = ["accuracy", "f1", "precision", "recall"]
        said[name] = {
            "classes": results_of(TextClassificationMetricsHandler(names), LOGITS, CLASSES, cuts),
            "texts": results_of(Image2TextMetricHandler(["cer", "wer"]), READ, TEXTS, cuts),
            "generated": results_of(TextGenerationMetricsHandler(["rouge", "bleu"]), READ, TEXTS, cuts),
            "own": results_of(Own(), LOGITS, CLASSES, cuts),
            "torch": results_of(TorchMetricsHandler(["Accuracy", "F1Score", "AUROC"]), LOGITS, CLASSES, cuts),
            "indices": results_of(TorchMetricsHandler({"name": "F1", "average": "macro"}), found, CLASSES, cuts),
            "numbers": results_of(
                TorchMetricsHandler(["MeanSquaredError", "PearsonCorrCoef"]), NUMBERS, LOGITS[:, 0], cuts
            ),
            "default that does not fit": results_of(TorchMetricsHandler(is_default=True), NUMBERS, LOGITS[:, 0], cuts),
        }
    half = torch.cat([CLASSES[:5].float(), NUMBERS[5:]])  # fits only the first batch: two processes do not both see it
    said["default that fits one rank"] = results_of(TorchMetricsHandler(is_default=True), NUMBERS, half % 2, (0, 5, 9))
    copy = TorchMetricsHandler("Accuracy").train_copy()
    if RANK == 0:  # read by one rank alone
        copy.update(LOGITS, CLASSES)
        said["train copy"] = copy.compute()
    try:
        TMMetrics("Accuracy").compute()
    except ValueError as error:
        said["empty"] = str(error)
    if WORLD_SIZE > 1:
        use_layout(Layout(data=1, tensor=2), "cpu")  # both have the same batches
    counts = TMMetrics("StatScores", task="multiclass", num_classes=4, average="micro")
    counts.update(LOGITS, CLASSES)
    said["tensor ranks"] = {"counts": counts.compute().tolist(), "own": results_of_all(Own())}
    print(json.dumps(said))
    if WORLD_SIZE > 1:
        shut_down()


if __name__ == "__main__":
    main()
