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


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_parallelism_that_is_not_there_is_a_clear_error(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.dist\.{name}: got 2"):
        setup_dist_util({name: 2})
