"""If torch's private tree functions change, nested batches are flattened without them."""

import pytest

from tests._torch_compat.conftest import CHANGES, change_torch
from trainwright._torch_compat import (
    batch_tree,
)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["tree_flatten", "tree_unflatten"])
def test_nested_batches(
    name: str, change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="trainwright")
    change_torch(monkeypatch, batch_tree, f"utils._pytree.{name}", change, lambda *args: ([], None))
    batch = {"a": (1, 2)}
    leaves, structure = batch_tree.flatten(batch)
    assert leaves == [batch]
    assert batch_tree.unflatten(leaves, structure) == batch
    assert len(caplog.records) == 1
