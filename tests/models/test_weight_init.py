"""What networks with CTC begin with: layers that let through what they see."""

from typing import Any

import pytest
import torch
from torch import nn

from trainwright.models.tasks.crnn import CRNNImage2Text, CRNNImage2TextConfig
from trainwright.models.tasks.speech import CTCSpeechRecognition, CTCSpeechRecognitionConfig
from trainwright.models.weight_init import init_for_ctc


def test_recurrent_weights_keep_lengths_and_forget_gates_are_open() -> None:
    lstm = nn.LSTM(6, 8, num_layers=2, bidirectional=True)
    lstm.apply(init_for_ctc)
    for end in ("l0", "l0_reverse", "l1", "l1_reverse"):
        for gate in getattr(lstm, f"weight_hh_{end}").chunk(4):
            torch.testing.assert_close(gate @ gate.T, torch.eye(8))
        biases = getattr(lstm, f"bias_ih_{end}") + getattr(lstm, f"bias_hh_{end}")
        assert biases.tolist() == [0] * 8 + [1] * 8 + [0] * 16


@pytest.mark.parametrize("convolution", [nn.Conv1d, nn.Conv2d])
def test_convolutions_with_relu_keep_the_size_of_their_inputs(convolution: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64, *[32] * (1 if convolution is nn.Conv1d else 2))
    layers = nn.Sequential(*[m for _ in range(6) for m in (convolution(64, 64, 3, padding=1), nn.ReLU())])
    default = layers(x).square().mean()
    layers.apply(init_for_ctc)
    assert 0.2 < layers(x).square().mean() < 2  # the zeros of the padding cost some
    assert default < 0.02


@pytest.mark.parametrize(
    "model",
    [
        CRNNImage2Text(CRNNImage2TextConfig(id2label=["", "a"], channels=(4,) * 7, rnn_dim=8, map2seq_out_dim=8)),
        CTCSpeechRecognition(CTCSpeechRecognitionConfig(id2label=["", "a"], num_features=8, hidden_size=8)),
    ],
    ids=["crnn", "speech"],
)
def test_models_with_ctc_begin_so(model: nn.Module) -> None:
    lstms = [module for module in model.modules() if isinstance(module, nn.LSTM)]
    assert lstms
    for lstm in lstms:
        for gate in lstm.weight_hh_l0.chunk(4):
            torch.testing.assert_close(gate @ gate.T, torch.eye(8))
