import numpy as np
import pytest
import torch

from trainwright.config.errors import ConfigError
from trainwright.data import transforms
from trainwright.data.datasets import FakeData


def test_a_sample_is_a_function_of_its_index_alone():
    data, twin = FakeData(20, (3, 4, 5)), FakeData(100, (3, 4, 5))
    state = torch.get_rng_state()
    legacy = np.random.get_state()[1].copy()
    later = [twin[index] for index in reversed(range(20))][::-1]
    for index in range(20):
        np.testing.assert_array_equal(data[index][0], later[index][0])
        assert data[index][1] == later[index][1]
    assert torch.equal(state, torch.get_rng_state())
    assert np.array_equal(legacy, np.random.get_state()[1])


def test_samples_differ_and_an_offset_shifts_them():
    data = FakeData(10, (1, 4, 4))
    assert len({data[index][0].tobytes() for index in range(10)}) == 10
    np.testing.assert_array_equal(FakeData(10, (1, 4, 4), random_offset=3)[2][0], data[5][0])


def test_shapes_types_and_classes_are_those_asked_for():
    image, label = FakeData(5, (3, 6, 7), num_classes=4)[0]
    assert (image.shape, image.dtype, type(label)) == ((6, 7, 3), np.uint8, int)
    assert FakeData(5, (1, 6, 7))[0][0].shape == (6, 7)
    assert FakeData(5, (3, 6, 7), transform=transforms.ToTensor())[0][0].shape == (3, 6, 7)
    assert {FakeData(200, (1, 1, 1), num_classes=4)[index][1] for index in range(200)} == {0, 1, 2, 3}


def test_the_end_is_an_index_error_so_that_a_plain_loop_ends():
    assert len(list(FakeData(5, (1, 2, 2)))) == 5


def test_wrong_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"FakeData\.size: got 0"):
        FakeData(0)
    with pytest.raises(ConfigError, match=r"FakeData.image_size: got \(28, 28\)"):
        FakeData(5, (28, 28))
