"""Connectionist temporal classification (Graves et al. 2006): loss, greedy decoding, and the base of models with it.

B batch, T time steps, C characters with the blank, L labels (padded).
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.base.errors import ConfigTypeError
from trainwright.data.errors import DataError
from trainwright.models.config import ModelConfig
from trainwright.models.model import Model, ModelOutput
from trainwright.tasks.labels import characters_of_model

logger = logging.getLogger("trainwright.models")


def ctc_loss(log_probs_BTC: Tensor, labels_BL: Tensor, input_lengths_B: Tensor | None = None, *, blank: int) -> Tensor:
    """Mean over the batch of each text's negative log probability per character: float32 scalar.

    A text with more characters than time steps has no alignment; its loss is 0, with one warning.

    Args:
        labels_BL: ids; the blank and negative ones are padding.
        input_lengths_B: how many time steps are real; None means all.
    """
    batch_size, num_steps, num_classes = log_probs_BTC.shape
    is_label = (labels_BL != blank) & (labels_BL >= 0)
    # Labels first, then padding, wherever it was.
    order = torch.argsort((~is_label).to(torch.uint8), dim=1, stable=True)
    targets_BL = labels_BL.clamp(min=0).gather(1, order)
    if input_lengths_B is None:
        input_lengths_B = torch.full((batch_size,), num_steps, device=labels_BL.device)
    # The loss needs the lengths on the host in any case: one transfer for them and for the check.
    highest = targets_BL.amax(dim=1) if targets_BL.shape[1] else torch.zeros_like(input_lengths_B)
    lengths, steps, ids = torch.stack([is_label.sum(dim=1), input_lengths_B.long(), highest.long()]).cpu()
    if int(ids.max()) >= num_classes:
        # Torch would read memory behind the scores.
        raise DataError(
            f"labels: got the id {int(ids.max())}; the model has the characters 0 to {num_classes - 1}. "
            "Give the model the id2label of the dataset."
        )
    if bool((lengths > steps).any()):
        row = int((lengths - steps).argmax())
        _warn_of_long_text(int(lengths[row]), int(steps[row]))
    log_probs_TBC = log_probs_BTC.float().transpose(0, 1)
    return F.ctc_loss(log_probs_TBC, targets_BL, steps, lengths, blank=blank, zero_infinity=True)


@functools.cache  # once per process for each pair of lengths
def _warn_of_long_text(length: int, num_steps: int) -> None:
    logger.warning(
        "A text of %d characters has only %d time steps to be read in: nothing is learned of it. Make the inputs wider "
        "or leave such texts out (max_length of the dataset).",
        length,
        num_steps,
    )


def ctc_greedy_decode(log_probs_BTC: Tensor, *, blank: int) -> Tensor:
    """The ids of the best path, repeats merged, blanks left out: int64, (B, longest), padded with the blank."""
    best_BT = log_probs_BTC.argmax(dim=-1)
    is_new = torch.ones_like(best_BT, dtype=torch.bool)
    is_new[:, 1:] = best_BT[:, 1:] != best_BT[:, :-1]
    is_read = is_new & (best_BT != blank)
    order = torch.argsort((~is_read).to(torch.uint8), dim=1, stable=True)
    ids_BT = best_BT.masked_fill(~is_read, blank).gather(1, order)
    return ids_BT[:, : int(is_read.sum(dim=1).amax())] if len(ids_BT) else ids_BT


def ids_of(outputs: Any, *, blank: int) -> Tensor:
    """Ids of characters, from the outputs of a model with CTC (``logits``), from generated ids, or from labels."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits", outputs.get("generated_ids"))
    if not isinstance(outputs, Tensor):
        outputs = torch.as_tensor(outputs) if isinstance(outputs, list) else outputs
    if isinstance(outputs, Tensor) and outputs.is_floating_point() and outputs.dim() == 3:
        return ctc_greedy_decode(outputs, blank=blank)
    if isinstance(outputs, Tensor) and not outputs.is_floating_point() and outputs.dim() == 2:
        return outputs
    got = f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"{type(outputs).__name__}"
    raise ConfigTypeError(
        f"post_process: got {got}; it takes the model's outputs with 'logits' (B, T, C), or ids of characters (B, L)."
    )


def read_characters(ids_BL: Tensor, id2label: Mapping[int, str], *, blank: int) -> list[str]:
    """The text of each row of ids. The blank and negative ids (padding) are omitted."""
    return ["".join(id2label[i] for i in row if i >= 0 and i != blank) for row in ids_BL.tolist()]


def init_for_ctc(module: nn.Module) -> None:
    """Initialize one layer, for ``model.apply``; layers of other types are unchanged.

    With torch's defaults the outputs hardly depend on the inputs, and a model with CTC predicts only blanks for long.

    Convolutions, which a ReLU follows: He et al. 2015. Linear layers and the inputs of LSTMs: Glorot and Bengio 2010,
    each gate for itself. Recurrent weights are orthogonal (Saxe et al. 2014), the bias of forget gates is 1
    (Jozefowicz et al. 2015), all others are 0.
    """
    if isinstance(module, nn.LSTM):
        _init_lstm(module)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


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


@dataclass
class CTCConfig(ModelConfig):
    id2label: Mapping[int, str] | Sequence[str] | None = None
    blank_id: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id2label = characters_of_model(self.id2label, self.blank_id, "blank_id", type(self).__name__)


class CTCModel(Model):
    loss_type = "ForCTC"

    def compute_loss(self, logits: Tensor, labels: Tensor, logit_lengths: Tensor | None = None) -> Tensor:
        """CTC's loss of `ctc_loss`; ``labels`` (B, L) are padded with the blank's id, or with negative numbers."""
        return ctc_loss(logits, labels, logit_lengths, blank=self.config.blank_id)

    def post_process(self, outputs: Tensor | Mapping[str, Tensor]) -> list[ModelOutput]:
        """``text`` for each input, from the model's outputs, from ids, or from labels."""
        blank = self.config.blank_id
        texts = read_characters(ids_of(outputs, blank=blank), self.config.id2label, blank=blank)
        return [ModelOutput(text=self.spelled(text)) for text in texts]

    def spelled(self, text: str) -> str:
        return text
