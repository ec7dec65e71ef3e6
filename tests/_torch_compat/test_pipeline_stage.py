"""Stages of torch's pipelines."""

import torch
from torch import nn

from trainwright._torch_compat.pipeline_stage import TimedStage
from trainwright.inspect.simulation.process import simulated_process


def test_the_loss_of_the_last_stage_may_be_of_any_type() -> None:
    """Torch 2.11 compares it with the type of the example; newer ones do not ask."""
    with simulated_process(1, 2):
        shapes = torch.empty(2, device="meta"), torch.empty((), device="meta")
        stage = TimedStage(nn.Linear(2, 2), 1, 2, torch.device("cpu"), *shapes)
        stage._validate_fwd_outputs((torch.zeros((), dtype=torch.float64),))


def test_a_stage_exchanges_nothing_with_its_own_process_at_first() -> None:
    with simulated_process(1, 2):
        shape = torch.empty(2, device="meta")
        stage = TimedStage(nn.Linear(2, 2), 1, 4, torch.device("cpu"), shape, shape)
        stage.stage_index_to_group_rank = {0: 0, 1: 1, 2: 1, 3: 0}  # of ZBVZeroBubble
        assert [operation.peer for operation in stage._get_init_p2p_neighbors_ops()] == [0, 0]
