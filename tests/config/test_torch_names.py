"""Names of torch."""

import logging

import pytest
import torch

from trainwright import TrainingConfig
from trainwright.config import ConfigError, LRSchedulerType, OptimizerType, PrecisionType, TaskType
from trainwright.config.torch_names import find_device, find_torch_class, torch_dtype, warn_missing


def test_a_dtype_is_found_by_its_name_and_nothing_else_is():
    torch = pytest.importorskip("torch")
    assert torch_dtype("bfloat16") is torch.bfloat16
    for name in ("load", "float61", "os", ""):
        with pytest.raises(ConfigError, match=r"must be a torch\.dtype"):
            torch_dtype(name)


# A device by name; one that is not there is one warning and the CPU.


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    warn_missing.cache_clear()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    warn_missing.cache_clear()


def test_the_property_is_a_torch_device(no_gpu: None) -> None:
    assert TrainingConfig().device == torch.device("cpu")
    assert TrainingConfig(device="cpu").device == torch.device("cpu")
    assert TrainingConfig(use_cpu=True).device == torch.device("cpu")


def test_a_missing_gpu_is_one_warning_and_the_cpu(no_gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for name in ("cuda", "cuda", "cuda:0", "cuda:2"):
            config = TrainingConfig(device=name)
            assert config.device == torch.device("cpu")
            assert config.device_str == name
    assert len(caplog.records) == 1
    assert "no cuda device" in caplog.text


@pytest.mark.parametrize(
    ("name", "found"),
    [(None, "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu"), ("cuda:2", "cpu"), ("mps", "cpu")],
)
def test_a_gpu_that_is_there_is_found(name: str | None, found: str, two_gpus: None) -> None:
    assert find_device(name) == torch.device(found)


def test_use_cpu_is_the_cpu_where_there_is_a_gpu(two_gpus: None) -> None:
    assert TrainingConfig(use_cpu=True).device == torch.device("cpu")


def test_a_gpu_number_that_is_not_there_is_named(two_gpus: None, caplog: pytest.LogCaptureFixture) -> None:
    find_device("cuda:2")
    assert "no cuda:2 device" in caplog.text


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
