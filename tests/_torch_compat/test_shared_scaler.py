"""A fused optimizer steps, or skips an update, on all processes alike."""

import pytest

from tests.ranks import on_ranks


def step_with(fused: bool, *infinite: int) -> list[float]:
    """``infinite``: the ranks whose second gradient is infinite."""
    import torch

    from trainwright._torch_compat.shared_scaler import SharedGradScaler

    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    scaler = SharedGradScaler("cpu", process_group=torch.distributed.group.WORLD)
    values = []
    for gradient in (1.0, float("inf") if torch.distributed.get_rank() in infinite else 1.0):
        scaler.scale((weight * gradient).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        values += [weight[0].item(), scaler.get_scale()]
    return values


@pytest.mark.parametrize("infinite", [(1,), (0, 1)])
@pytest.mark.parametrize("fused", [True, False])
def test_all_processes_step_or_skip_together(fused: bool, infinite: tuple[int, ...]) -> None:
    first, second = on_ranks(step_with, fused, *infinite)
    assert first == second
    assert first[0] == first[2] < 0  # the second update is skipped
    assert (first[1], first[3]) == (65536.0, 32768.0)
