"""Names of torch."""

import logging

import pytest
import torch

from trainwright import TrainingConfig
from trainwright.base.devices import find_device, warn_missing
from trainwright.config import ConfigError, LRSchedulerType, OptimizerType, PrecisionType, TaskType
from trainwright.config.torch_names import find_torch_class, torch_dtype


def test_a_dtype_is_found_by_its_name_and_nothing_else_is():
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
def test_a_gpu_that_is_there_is_found(
    name: str | None, found: str, two_gpus: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_device(name) == torch.device(found)
    assert (f"no {name} device" in caplog.text) == (name in ("cuda:2", "mps"))
    assert TrainingConfig(use_cpu=True).device == torch.device("cpu")


def test_words_have_other_spellings_and_an_unknown_one_comes_with_the_nearest() -> None:
    assert "image2text" in TaskType.words()
    assert TaskType("image2text") is TaskType.IMAGE2TEXT == "image2text" == f"{TaskType.IMAGE2TEXT}"
    assert OptimizerType("sdg") is OptimizerType.SDG is OptimizerType.SGD
    assert LRSchedulerType("cosine_anealing") is LRSchedulerType.COSINE_ANEALING is LRSchedulerType.COSINE_ANNEALING
    assert PrecisionType("full") is PrecisionType.NO
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
