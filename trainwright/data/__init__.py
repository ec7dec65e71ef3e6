"""From samples to batches: data sets, the order of their samples on each rank, and how samples become one batch."""

from trainwright.data import datasets, transforms
from trainwright.data.collate import collate, to_batch
from trainwright.data.epochs import EpochSampler
from trainwright.data.errors import DataError
from trainwright.data.instance import DistTensorData, Instance
from trainwright.data.loaders import (
    build_image_test_loader,
    build_image_train_loader,
    build_nlp_test_loader,
    build_nlp_train_loader,
    build_nlp_train_val_test_loader,
)
from trainwright.data.sampler import CyclicSampler, RangedSampler, SingleRoundSampler

__all__ = [
    "Instance",
    "DistTensorData",
    "CyclicSampler",
    "EpochSampler",
    "SingleRoundSampler",
    "RangedSampler",
    "build_image_train_loader",
    "build_image_test_loader",
    "build_nlp_train_loader",
    "build_nlp_test_loader",
    "build_nlp_train_val_test_loader",
    "collate",
    "to_batch",
    "DataError",
    "datasets",
    "transforms",
]
