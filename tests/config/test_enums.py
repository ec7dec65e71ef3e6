"""Enum members and their strings are the same; unknown words come with the nearest."""

import pytest
import torch

from trainwright.config import ConfigError, LRSchedulerType, OptimizerType, PrecisionType, TaskType
from trainwright.config.torch_names import find_torch_class


def test_the_tasks_are_those_of_the_page() -> None:
    assert TaskType.words() == [
        "audio_classification", "backbone", "image2text", "language_modeling", "mask_filling", "sequence_labeling",
        "speech_recognition", "text_classification", "text_detection", "text_generation",
    ]  # fmt: skip


def test_a_member_is_its_string() -> None:
    assert TaskType.IMAGE2TEXT == "image2text"
    assert f"{TaskType.IMAGE2TEXT}" == "image2text"
    assert TaskType("image2text") is TaskType.IMAGE2TEXT


def test_misspellings_of_older_configurations_are_understood() -> None:
    assert OptimizerType("sdg") is OptimizerType.SDG is OptimizerType.SGD
    assert LRSchedulerType("cosine_anealing") is LRSchedulerType.COSINE_ANEALING is LRSchedulerType.COSINE_ANNEALING
    assert PrecisionType("full") is PrecisionType.NO


def test_an_unknown_word_comes_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"TaskType: got 'image2txt'. Did you mean 'image2text'\?"):
        TaskType("image2txt")
    with pytest.raises(ConfigError, match=r"OptimizerType: got 'full'"):
        OptimizerType("full")


@pytest.mark.parametrize("kind", list(LRSchedulerType))
def test_every_schedule_is_a_class_of_torchs(kind: LRSchedulerType) -> None:
    found = getattr(torch.optim.lr_scheduler, kind.torch_name)
    assert issubclass(found, torch.optim.lr_scheduler.LRScheduler)
    assert find_torch_class("lr_scheduler", str(kind)) == (found, None)
    assert find_torch_class("lr_scheduler", {"name_": kind.torch_name, "x": 1}) == (found, None)


@pytest.mark.parametrize("kind", list(OptimizerType))
def test_every_optimizer_is_a_class_of_torchs(kind: OptimizerType) -> None:
    assert find_torch_class("optimizer", kind)[0] in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
