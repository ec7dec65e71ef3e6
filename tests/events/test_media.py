import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.base.errors import UserError
from trainwright.events import EventStorage
from trainwright.events.media import MediaBuffer


def only_figure(storage):
    (item,) = storage.media()
    return item


@pytest.mark.parametrize("seed", range(5))
def test_a_histogram_has_the_bins_of_numpy(seed):
    # Multiples of 1/64 in [0, 8): no value lies so near an edge of 16 bins that rounding could decide.
    values = torch.randint(0, 512, (1000,), generator=torch.Generator().manual_seed(seed)) / 64
    storage = EventStorage()
    storage.put_histogram("weights", values, bins=16)
    low, high, count, total, squares, *counts = only_figure(storage).content.tolist()
    expected, edges = np.histogram(values.numpy().astype(np.float64), bins=16)
    assert counts == expected.tolist()
    assert (low, high, count) == (edges[0], edges[-1], 1000)
    assert total == pytest.approx(values.double().sum().item())
    assert squares == pytest.approx(values.double().square().sum().item())


@pytest.mark.parametrize(
    ("values", "bins", "edges", "expected"),
    [
        ([1.0, math.nan, 2.0, math.inf, -math.inf], 2, (1, 2), [1, 1]),  # what is not finite is left out
        ([0.0] * 7, 3, (-0.5, 0.5), [0, 7, 0]),
    ],
)
def test_a_histogram_of_odd_values(values, bins, edges, expected):
    storage = EventStorage()
    storage.put_histogram("grads", torch.tensor(values), bins=bins)
    low, high, count, _, _, *counts = only_figure(storage).content.tolist()
    assert ((low, high), count, counts) == (edges, sum(expected), expected)


@pytest.mark.exhaustive
def test_a_histogram_is_taken_without_reading_the_device():
    class Reads(TorchDispatchMode):
        names = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names += (func.name(),)
            return func(*args, **(kwargs or {}))

    values = torch.randn(100)
    with Reads() as reads:
        EventStorage().put_histogram("w", values)
    assert len(reads.names) > 5
    assert not {"aten::_local_scalar_dense", "aten::nonzero", "aten::bincount"} & set(reads.names)


def test_a_picture_is_kept_as_it_was_when_put():
    storage = EventStorage(start_iter=4)
    pixels = torch.zeros(3, 2, 2, requires_grad=True)
    with storage.name_scope("batch"):
        storage.put_image("first", pixels)
    with torch.no_grad():
        pixels += 1
    item = only_figure(storage)
    assert (item.name, item.iteration) == ("batch/first", 4)
    assert not item.content.requires_grad
    assert item.content.sum() == 0


def test_pictures_and_histograms_of_other_shapes():
    storage = EventStorage()
    storage.put_image("grey", np.zeros((5, 4), dtype=np.uint8))
    assert only_figure(storage).content.shape == (1, 5, 4)
    for shape in ((8, 8, 3), (2, 3, 8, 8), (8,)):
        with pytest.raises(UserError, match=r"put_image\('x'\)(.|\n)*permute"):
            storage.put_image("x", torch.zeros(shape))
    with pytest.raises(UserError, match=r"put_histogram\('x'\): got 0 values"):
        storage.put_histogram("x", torch.zeros(0))


def test_old_figures_make_room_for_new_ones():
    media = MediaBuffer(max_bytes=100)
    for place in range(5):
        media.add("image", str(place), place, torch.zeros(1, 5, 8, dtype=torch.uint8))  # 40 bytes
    assert [item.name for item in media.after(0)] == ["3", "4"]
    media.add("image", "large", 5, torch.zeros(1, 50, 50))
    assert [item.name for item in media.after(0)] == ["large"]  # the newest stays, whatever its size
    assert media.after(6) == []
    assert media.after(5)[0].kind == "image"


def test_figures_until_now_leave_out_those_that_come_later_and_those_that_had_to_go():
    media = MediaBuffer(max_bytes=2 * 4 * 4)  # two pictures of 2 x 2 float32
    for name in ("a", "b"):
        media.add("image", name, 0, torch.zeros(1, 2, 2))
    then = media.until_now()
    assert [item.name for item in then.after(0)] == ["a", "b"]
    assert [item.name for item in then.after(1)] == ["b"]
    media.add("image", "c", 1, torch.zeros(1, 2, 2))
    assert [item.name for item in then.after(0)] == ["b"]
    assert [item.name for item in media.until_now().after(0)] == ["b", "c"]
