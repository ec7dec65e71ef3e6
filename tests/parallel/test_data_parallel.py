"""The device is the accelerator if there is one; one that is missing is a warning, not an error."""

import logging

import pytest
import torch

from trainwright.config.errors import ConfigError
from trainwright.config.torch_names import warn_missing
from trainwright.parallel.data_parallel import pick_device, setup_dist_util

has_accelerator = torch.accelerator.is_available()


def test_the_cpu_may_be_asked_for() -> None:
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(has_accelerator, reason="this machine has an accelerator, so none is missing")
def test_a_missing_accelerator_is_one_warning_and_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    warn_missing.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert pick_device("cuda") == torch.device("cpu")
        assert pick_device("cuda:1") == torch.device("cpu")
        assert pick_device(None) == torch.device("cpu")
    assert len([r for r in caplog.records if "cuda" in r.message]) == 1


def test_a_layout_has_no_effect_in_one_process(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert setup_dist_util({"tensor_parallel_size": 2, "device_type": "cpu"}) == torch.device("cpu")
    assert "train.dist.tensor_parallel_size=2 has no effect: there is only one process" in caplog.text


def test_a_layout_that_does_not_fit_is_refused_before_the_processes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")  # without MASTER_ADDR: joining them would fail
    with pytest.raises(ConfigError, match=r"train\.dist\.tensor_parallel_size=4 .*multiple of 4 processes.*but 6 were"):
        setup_dist_util({"tensor_parallel_size": 4})
