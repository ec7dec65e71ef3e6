"""Names of torch."""

import logging

import pytest
import torch

from trainwright import TrainingConfig
from trainwright.config import ConfigError
from trainwright.config.torch_names import find_device, torch_dtype, warn_missing


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
