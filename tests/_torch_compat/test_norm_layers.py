"""Normalization layers are found by the class that torch derives them from, or by their own."""

import pytest
from torch import nn

from trainwright._torch_compat import norm_layers
from trainwright._torch_compat.norm_layers import BATCH_NORMS, RUNNING_NORMS


def test_all_of_torchs_are_found() -> None:
    for name in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "LazyBatchNorm1d"):
        assert issubclass(getattr(nn, name), BATCH_NORMS)
        assert issubclass(getattr(nn, name), RUNNING_NORMS)
    assert issubclass(nn.InstanceNorm1d, RUNNING_NORMS)
    for other in (nn.InstanceNorm1d, nn.LayerNorm, nn.Module):
        assert not issubclass(other, BATCH_NORMS)


def test_where_torch_has_no_such_class_the_layers_themselves_count() -> None:
    assert norm_layers._base("_Another", (nn.BatchNorm1d, nn.BatchNorm2d)) == (nn.BatchNorm1d, nn.BatchNorm2d)
    assert norm_layers._base("Module", (nn.BatchNorm1d,)) == (nn.Module,)


@pytest.mark.parametrize("kinds", [BATCH_NORMS, RUNNING_NORMS])
def test_a_layer_that_derives_from_them_is_one(kinds: tuple[type[nn.Module], ...]) -> None:
    class Other(nn.BatchNorm2d):
        pass

    assert isinstance(Other(3), kinds)
