"""Names of torch."""

import pytest

from trainwright.config import ConfigError
from trainwright.config.torch_names import torch_dtype


def test_a_dtype_is_found_by_its_name_and_nothing_else_is():
    torch = pytest.importorskip("torch")
    assert torch_dtype("bfloat16") is torch.bfloat16
    for name in ("load", "float61", "os", ""):
        with pytest.raises(ConfigError, match=r"must be a torch\.dtype"):
            torch_dtype(name)
