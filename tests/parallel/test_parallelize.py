"""A model is put on its process in place, with the settings of its run."""

from functools import partial

import torch
from torch import nn

from trainwright.parallel.parallelize import parallelize


def test_one_process_keeps_the_whole_model() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    names = list(model.state_dict())
    assert parallelize(model, torch.device("cpu"), recompute=True, autocast=autocast) == ["0", "1"]
    assert list(model.state_dict()) == names
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16
    assert parallelize(model, torch.device("cpu")) == []  # without autocast again
    assert model(torch.ones(1, 2)).dtype == torch.float32
