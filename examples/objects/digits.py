"""Handwritten digits for these examples: 1,797 images of 8 x 8 pixels, from scikit-learn."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and evaluation data: pairs of 64 pixels in [0, 1] and a digit."""
    images, labels = load_digits(return_X_y=True)
    pixels, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return TensorDataset(pixels[:1400], labels[:1400]), TensorDataset(pixels[1400:], labels[1400:])
