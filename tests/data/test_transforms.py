import numpy as np
import pytest
import torch

from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data import transforms


def picture(*shape, dtype=np.uint8):
    return np.random.default_rng(0).integers(0, 256, shape).astype(dtype)


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 3)])
def test_pictures_become_channels_first_in_zero_to_one(shape):
    image = picture(*shape)
    tensor = transforms.ToTensor()(image)
    expected = (image.reshape(4, 5, -1).transpose(2, 0, 1) / 255).astype(np.float32)
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    np.testing.assert_array_equal(tensor.numpy(), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_other_types_keep_type_and_values_and_share_no_memory(dtype):
    image = picture(4, 5, 3, dtype=dtype)
    tensor = transforms.ToTensor()(image)
    assert tensor.numpy().dtype == dtype
    np.testing.assert_array_equal(tensor.numpy(), image.transpose(2, 0, 1))
    before = image.copy()
    tensor.zero_()
    np.testing.assert_array_equal(image, before)


def test_pictures_are_normalized_and_transforms_composed():
    image_module = pytest.importorskip("PIL.Image")
    image = picture(4, 5, 3)
    assert torch.equal(transforms.ToTensor()(image_module.fromarray(image)), transforms.ToTensor()(image))

    image = torch.rand(2, 3, 4, 5)
    before = image.clone()
    result = transforms.Normalize([0.5, 0.4, 0.3], [0.1, 0.2, 0.4])(image)
    assert torch.equal(image, before)
    for channel, (mean, std) in enumerate([(0.5, 0.1), (0.4, 0.2), (0.3, 0.4)]):
        torch.testing.assert_close(result[:, channel], (image[:, channel] - mean) / std)

    compose = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5], [0.5])])
    assert compose(np.full((2, 2), 255, np.uint8)).unique().tolist() == [1.0]
    assert repr(compose) == "Compose([ToTensor(), Normalize(mean=[0.5], std=[0.5])])"


def test_wrong_input_is_answered_by_what_is_wanted():
    with pytest.raises(ConfigTypeError, match="ToTensor: got Tensor; it must be a numpy array"):
        transforms.ToTensor()(torch.zeros(2, 2))
    with pytest.raises(ConfigError, match=r"shape \(4,\); it must be \(H, W\)"):
        transforms.ToTensor()(np.zeros(4))
    with pytest.raises(ConfigTypeError, match=r"Normalize: got torch.uint8.*Put ToTensor\(\) before it"):
        transforms.Normalize([0.5], [0.5])(torch.zeros(1, 2, 2, dtype=torch.uint8))
    with pytest.raises(ConfigError, match=r"Normalize.std: got \[0.0\]"):
        transforms.Normalize([0.5], [0.0])
