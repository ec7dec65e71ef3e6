"""The local values of shared parameters, and their gradients, are those of torch's ``to_local``."""

from typing import Any

import pytest
import torch

from tests._torch_compat.conftest import CHANGES, probe_messages
from tests.ranks import on_ranks

CASES = (
    "both used",
    "one gradient",
    "one used",
    "one frozen",
    "both frozen",
    "transposed",
    "no gradients",
    "tied",
)


def gradients_of(case: str, is_direct: bool) -> tuple[list[Any], list[bool]]:
    """The gradients of two parameters, and which of the local values need one."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    from trainwright._torch_compat.local_values import local_values, to_local

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    parameters = [
        torch.nn.Parameter(distribute_tensor(torch.randn(3, 4), mesh, [Replicate()], src_data_rank=None))
        for _ in range(2)
    ]
    for number, parameter in enumerate(parameters):
        parameter.requires_grad_(case != "both frozen" and (number == 0 or case != "one frozen"))
    values_of = local_values(mesh) if is_direct else to_local
    with torch.set_grad_enabled(case != "no gradients"):
        first, second = values_of(parameters[0], parameters[0] if case == "tied" else parameters[1])
        if case == "transposed":
            first = first.t().contiguous()  # whose gradient is a transposed view
        if case == "one gradient":  # the same tensor for both
            first = second = first + second
        loss = (first * first).sum() + (0 if case == "one used" else (second * second * second).sum())
    if case == "second order":
        (slope,) = torch.autograd.grad(loss, parameters[1], create_graph=True)
        loss = slope.to_local().square().sum()  # type: ignore[attr-defined]
    if loss.requires_grad:
        loss.backward()
    found: list[Any] = []
    for parameter in parameters:
        gradient: Any = parameter.grad
        assert gradient is None or isinstance(gradient, DTensor)
        if gradient is None:
            found.append(None)
        else:
            found.append((gradient.to_local().tolist(), gradient.placements, gradient.device_mesh == mesh))
            assert torch.equal((gradient + gradient).full_tensor(), 2 * gradient.to_local())  # operations of torch's
    return found, [first.requires_grad, second.requires_grad]


@pytest.mark.parametrize("case", CASES)
def test_equal_those_of_to_local(case: str) -> None:
    assert on_ranks(gradients_of, case, True) == on_ranks(gradients_of, case, False)


def test_the_gradient_of_a_gradient() -> None:
    """Torch's function has none before torch 2.12. The slope of b ** 3 is 3 b ** 2, that of its square 36 b ** 3."""
    torch.manual_seed(0)
    _, b = torch.randn(3, 4), torch.randn(3, 4)
    for (_, (gradient, *_)), _ in on_ranks(gradients_of, "second order", True):
        torch.testing.assert_close(torch.tensor(gradient), 36 * b**3)


def function_after(change: str) -> tuple[bool, list[str]]:
    """Whether torch's function is used if its class of shared tensors has changed, and the messages."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from trainwright._torch_compat import local_values

    messages = probe_messages()
    torchs: Any = local_values.DTensor

    class Changed:
        from_local = torchs.from_local

        def __new__(cls, gradient: Any, spec: Any, *, requires_grad: bool) -> Any:
            if change == "missing":
                raise AttributeError("_dtensor__new__")
            if change == "other signature":
                return torchs(gradient)
            if change == "other result":
                return torchs(2 * gradient, spec, requires_grad=requires_grad)
            raise RuntimeError("not on this machine")

    if change != "none":
        local_values.DTensor = Changed  # type: ignore[misc,assignment]
    state = torch.get_rng_state()
    mesh = init_device_mesh("cpu", (2,))
    found = [local_values.local_values(mesh) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)  # a resume probes at another step
    return found == [local_values.to_local] * 2, messages


@pytest.mark.parametrize("change", CHANGES)
def test_torchs_function_is_used_if_its_class_has_changed(change: str) -> None:
    for is_torchs, messages in on_ranks(function_after, change):
        assert is_torchs
        (message,) = messages
        assert "using the public API for the local values of shared parameters" in message


def test_it_is_used_where_torch_is_as_expected() -> None:
    for is_torchs, messages in on_ranks(function_after, "none"):
        assert (is_torchs, messages) == (False, [])


def accumulated(split: str) -> list[Any]:
    """The gradients after two backward passes, and in between, of parameters whose gradients are one tensor."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from trainwright.parallel.tensor import shard_tensors

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.a + self.b)

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = One(), One()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.a() + self.b())

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> torch.Tensor:
            return self.weight

    model = Held() if split == "one module" else Apart()
    shard_tensors(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), {})
    found: list[Any] = []
    for _ in range(2):
        model(torch.full((1, 3), 2.0)).sum().backward()
        gradients: list[Any] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append([gradient.to_local().tolist() for gradient in gradients])
    return found


@pytest.mark.parametrize("split", ["one module", "two modules"])
def test_a_gradient_of_two_parameters_is_accumulated_for_each(split: str) -> None:
    once, twice = [[2.0] * 3] * 2, [[4.0] * 3] * 2
    assert on_ranks(accumulated, split) == [[once, twice]] * 2


def error_of_a_change_in_place() -> str:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from trainwright.parallel.tensor import shard_tensors

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight
            weight += x
            return weight

    model = Changing()
    shard_tensors(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), {})
    try:
        model(torch.ones(3))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_parameter_changed_in_place_is_an_error_as_in_one_process() -> None:
    for message in on_ranks(error_of_a_change_in_place):
        assert "modified inplace" in message
