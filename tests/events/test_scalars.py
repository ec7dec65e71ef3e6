"""Tensors and other numbers become floats, in their order."""

import pytest
import torch

from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.events.scalars import as_number, copied_scalar, to_numbers


def test_a_copy_is_not_changed_by_a_later_write() -> None:
    value = torch.tensor([2.0], requires_grad=True)
    copy = copied_scalar("loss", value)
    with torch.no_grad():
        value.zero_()
    assert (copy.shape, copy.item(), copy.requires_grad) == ((), 2.0, False)


def test_values_of_several_types_keep_their_order_and_precision() -> None:
    exact = 1.0 + 2**-40
    values = [1.5, torch.tensor(2.5), torch.tensor(exact, dtype=torch.float64), torch.tensor(7), 0.25]
    assert to_numbers(values) == [1.5, 2.5, exact, 7.0, 0.25]
    assert to_numbers([]) == []


def test_what_is_no_single_number_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"put_scalar\('loss'\): got a tensor of shape \(2,\)"):
        copied_scalar("loss", torch.zeros(2))
    with pytest.raises(ConfigTypeError, match=r"put_scalar\('loss'\): got '3' \(str\)"):
        as_number("loss", "3")  # type: ignore[arg-type]
    assert as_number("loss", True) == 1.0
