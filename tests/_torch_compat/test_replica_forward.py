"""Steps of several processes without torch's profiler label are those of torch's DistributedDataParallel."""

from typing import Any

import pytest

from tests._torch_compat.conftest import CHANGES, probe_messages
from tests.ranks import on_ranks


def trained_with(is_direct: bool, find_unused: bool) -> tuple[list[list[float]], list[float]]:
    """All state after ten steps, every second of which is not averaged, and the running means of this process."""
    import torch

    from trainwright._torch_compat.replica_forward import DirectReplica

    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    kind: Any = DirectReplica if is_direct else torch.nn.parallel.DistributedDataParallel
    replica = kind(model, find_unused_parameters=find_unused, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(10):
        replica.require_backward_grad_sync = step % 2 == 1
        replica(torch.randn(8, 3)).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [value.flatten().tolist() for value in model.state_dict().values()], model[1].running_mean.tolist()


@pytest.mark.parametrize("find_unused", [False, True])
def test_equals_torchs_class(find_unused: bool) -> None:
    first, second = on_ranks(trained_with, True, find_unused)
    expected, expected_of_second = on_ranks(trained_with, False, find_unused)
    assert (first, second) == (expected, expected_of_second)
    assert first[0][0] == second[0][0]  # the weights were averaged


def labels_in_profile(is_compiler_loaded: bool) -> list[str]:
    import sys

    import torch
    import torch._dynamo

    from trainwright._torch_compat.replica_forward import DirectReplica

    replica = DirectReplica(torch.nn.Linear(1, 1))
    marks: list[str] = []
    replica.module.register_forward_pre_hook(
        lambda *_: marks.append(str(type(DirectReplica._get_active_ddp_module()).__name__))
    )
    compiler = sys.modules["torch._dynamo"]
    if not is_compiler_loaded:
        del sys.modules["torch._dynamo"]
    replica(torch.ones(1, 1))  # type: ignore[no-untyped-call]
    sys.modules["torch._dynamo"] = compiler
    with torch.profiler.profile() as profile:
        replica(torch.ones(1, 1))  # type: ignore[no-untyped-call]
    found = {event.key for event in profile.key_averages()}  # type: ignore[no-untyped-call]
    return [*marks, *(found & {"DistributedDataParallel.forward"})]


@pytest.mark.parametrize("is_compiler_loaded", [False, True])
def test_a_profiler_and_the_compiler_find_their_marks(is_compiler_loaded: bool) -> None:
    for found in on_ranks(labels_in_profile, is_compiler_loaded):
        unprofiled = "DirectReplica" if is_compiler_loaded else "NoneType"
        assert found == [unprofiled, "DirectReplica", "DistributedDataParallel.forward"]


def class_after(change: str) -> tuple[str, list[str]]:
    """The class that is used if torch's method has changed, and the messages."""
    import torch

    from trainwright._torch_compat import replica_forward

    messages = probe_messages()
    kind: Any = torch.nn.parallel.DistributedDataParallel
    before = kind._pre_forward

    def changed(self: Any, *inputs: Any, **named: Any) -> Any:
        if change == "error":
            raise RuntimeError("not on this machine")
        if change == "other result":
            return before(self, *(2 * value for value in inputs), **named)
        return before(self, *inputs, **named)[0]  # without the named ones

    if change == "missing":
        del kind._pre_forward
    elif change != "none":
        kind._pre_forward = changed
    state = torch.get_rng_state()
    found = [replica_forward.replica_class(torch.device("cpu")) for _ in range(2)]
    assert found[0] is found[1]
    assert torch.equal(torch.get_rng_state(), state)  # a resume probes at another step
    return found[0].__name__, messages


@pytest.mark.parametrize("change", CHANGES)
def test_torchs_class_is_used_if_its_methods_have_changed(change: str) -> None:
    for name, messages in on_ranks(class_after, change):
        assert name == "DistributedDataParallel"
        (message,) = messages
        assert "using the public API for the forward pass of several processes" in message


def test_it_is_used_where_torch_is_as_expected() -> None:
    for name, messages in on_ranks(class_after, "none"):
        assert (name, messages) == ("DirectReplica", [])
