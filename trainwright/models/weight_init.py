"""Weights to begin with, for networks of convolutions and LSTMs that learn by CTC.

By torch's own defaults what such a network says hardly depends on what it sees, and CTC keeps to all blanks for long.
"""

from torch import Tensor, nn


def init_for_ctc(module: nn.Module) -> None:
    """Draw the weights of one layer, for ``model.apply``: layers of other kinds are left alone.

    Convolutions, which a ReLU follows: He et al. 2015. Linear layers and the inputs of LSTMs: Glorot and Bengio 2010,
    each gate for itself. Recurrent weights are orthogonal (Saxe et al. 2014), the bias of forget gates is 1
    (Jozefowicz et al. 2015), all others are 0.
    """
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        _zero(module.bias)
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        _zero(module.bias)
    elif isinstance(module, nn.LSTM):
        _init_lstm(module)


def _init_lstm(lstm: nn.LSTM) -> None:
    for name, parameter in lstm.named_parameters():
        if name.startswith("bias"):
            nn.init.zeros_(parameter)
            if name.startswith("bias_ih"):  # torch adds two biases: one of them is enough
                nn.init.ones_(parameter.data[lstm.hidden_size : 2 * lstm.hidden_size])  # gates: input, forget, ...
            continue
        for gate in parameter.data.chunk(4):
            if name.startswith("weight_ih"):
                nn.init.xavier_uniform_(gate)
            else:
                nn.init.orthogonal_(gate)


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        nn.init.zeros_(bias)
