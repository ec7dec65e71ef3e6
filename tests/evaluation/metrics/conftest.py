"""Outputs of a classification and its labels, for metrics over uneven batches."""

from itertools import pairwise

import torch

from trainwright.evaluation import TMMetrics

CUTS = (0, 1, 8, 24, 25, 57, 90)  # uneven batches of 90 samples
N, C, L = CUTS[-1], 5, 4


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fed(name, predictions, targets, cuts=CUTS, **arguments):
    metric = TMMetrics(name, **arguments)
    for start, stop in pairwise(cuts):
        metric.update(predictions[start:stop], targets[start:stop])
    return metric


LOGITS, CLASSES = torch.randn(N, C, generator=rng()) * 3, torch.randint(C, (N,), generator=rng(1))
SCORES, BINARY = torch.rand(N, generator=rng(2)), torch.randint(2, (N,), generator=rng(3))
LABEL_SCORES, LABELS = torch.rand(N, L, generator=rng(4)), torch.randint(2, (N, L), generator=rng(5))
FOUND = LOGITS.argmax(dim=1)
