"""A snapshot keeps the values of its moment, and cannot be changed."""

import pytest
import torch

from trainwright.config.errors import ConfigError
from trainwright.events import EventStorage
from trainwright.events.snapshot import StorageView, take_snapshot


def test_a_view_shows_the_moment_of_its_snapshot() -> None:
    storage = EventStorage()
    storage.put_scalar("loss", torch.tensor(1.0))
    storage.put_text("answer", "yes")
    snapshot, view = take_snapshot(storage), StorageView(storage)
    storage.step()
    storage.put_scalar("loss", 2.0)
    storage.put_text("answer", "no")
    view.show(snapshot)
    assert (view.iter, view.latest()) == (0, {"loss": (1.0, 0)})
    assert len(view.media()) == 1
    view.show(take_snapshot(storage))
    assert (view.iter, view.latest()) == (1, {"loss": (2.0, 1)})
    assert len(view.media()) == 2


def test_nothing_can_be_put_into_a_view() -> None:
    view = StorageView(EventStorage())
    for put in (
        lambda: view.put_scalar("loss", 1.0),
        lambda: view.put_text("answer", "yes"),
        lambda: view.put_image("image", torch.zeros(1, 4, 4)),
        lambda: view.put_histogram("weights", torch.zeros(4)),
    ):
        with pytest.raises(ConfigError, match="a writer runs in a background thread"):
            put()
