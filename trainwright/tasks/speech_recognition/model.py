"""A small Deep Speech 2 (Amodei et al. 2015): convolutions over a spectrogram, a bidirectional LSTM, and CTC.

B batch, T frames (padded), F features of a frame, S time steps (T / 2), C characters with the blank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from trainwright.base.errors import ConfigError
from trainwright.config.yaml_config import check_positive
from trainwright.models.model import register_model
from trainwright.tasks.ctc import CTCConfig, CTCModel, ctc_greedy_decode, init_for_ctc
from trainwright.tasks.sizes import check_share


@dataclass
class CTCSpeechRecognitionConfig(CTCConfig):
    """Sizes and settings of a `CTCSpeechRecognition`.

    Args:
        id2label: the characters by id; the blank's is "".
        blank_id: CTC's blank.
        num_features: features of a frame, such as mel bins.
        hidden_size: outputs of the convolutions, and width of each direction of the LSTM.
        num_hidden_layers: layers of the LSTM.
        hidden_dropout_prob: before the LSTM, between its layers, and before the classifier.

    Raises:
        ConfigError, ConfigTypeError: a value that no network can have.
    """

    name = "ctc_speech_recognition"

    num_features: int = 80
    hidden_size: int = 256
    num_hidden_layers: int = 2
    hidden_dropout_prob: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "num_features", "hidden_size", "num_hidden_layers")
        check_share(self, "hidden_dropout_prob")


@register_model("ctc_speech_recognition", config_class=CTCSpeechRecognitionConfig)
class CTCSpeechRecognition(CTCModel):
    """Reads speech: ``input_features`` (B, T, F) to ``logits`` (B, T / 2, C), log probabilities.

    The outputs of a recording do not depend on the padding of the batch: at padding the blank has probability 1.
    """

    preprocessor_kind = "audio_feature_extractor"

    def __init__(self, config: CTCSpeechRecognitionConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        config = self.config
        size, p = config.hidden_size, config.hidden_dropout_prob
        self.conv1 = nn.Conv1d(config.num_features, size, kernel_size=5, padding=2)
        self.conv2 = nn.Conv1d(size, size, kernel_size=5, stride=2, padding=2)
        self.norm = nn.LayerNorm(size)
        between = p if config.num_hidden_layers > 1 else 0.0
        self.rnn = nn.LSTM(size, size, config.num_hidden_layers, batch_first=True, dropout=between, bidirectional=True)
        self.dropout = nn.Dropout(p)
        self.classifier = nn.Linear(2 * size, len(config.id2label or ()))
        self.apply(init_for_ctc)

    def forward(self, input_features: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        """``logits``, and ``logit_lengths`` (B,): the number of time steps of each recording.

        Args:
            attention_mask: (B, T), 1 for frames and 0 for padding, which is at the end; None means no padding.

        Raises:
            ConfigError: frames have another number of features.
        """
        self._check(input_features)
        batch_size, num_frames, _ = input_features.shape
        if attention_mask is None:
            attention_mask = input_features.new_ones(batch_size, num_frames)
        lengths_B = attention_mask.sum(dim=1).long()
        # Padding is zero before each convolution, as for a recording alone in a batch.
        x_BFT = (input_features * attention_mask[..., None]).transpose(1, 2)
        x_BFT = F.relu(self.conv1(x_BFT)) * attention_mask[:, None, :]
        x_BSF = self.dropout(self.norm(F.relu(self.conv2(x_BFT)).transpose(1, 2)))
        steps_B = (lengths_B + 1) // 2
        if torch.compiler.is_exporting():  # which cannot trace packed sequences
            hidden_BSF = _both_directions(self.rnn, x_BSF, steps_B)
        else:
            packed = pack_padded_sequence(x_BSF, steps_B.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
            hidden_BSF, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x_BSF.shape[1])
        logits_BSC = self.classifier(self.dropout(hidden_BSF)).float().log_softmax(dim=-1)
        is_padding = torch.arange(logits_BSC.shape[1], device=logits_BSC.device) >= steps_B[:, None]
        is_blank_C = torch.arange(logits_BSC.shape[2], device=logits_BSC.device) == self.config.blank_id
        blank_C = torch.where(is_blank_C, 0.0, -1e4)  # finite: infinity times zero is not a number
        return {"logits": torch.where(is_padding[..., None], blank_C, logits_BSC), "logit_lengths": steps_B}

    def generate(self, input_features: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The decoded ids (B, longest), padded with the blank's."""
        return ctc_greedy_decode(self(input_features, attention_mask)["logits"], blank=self.config.blank_id)

    def _check(self, input_features: Tensor) -> None:
        shape, wanted = tuple(input_features.shape), self.config.num_features
        if len(shape) != 3 or shape[2] != wanted:
            raise ConfigError(
                f"input_features: got the shape {shape}; it must be (batch, frames, features), with "
                f"num_features={wanted} features, as many as the feature extractor gives."
            )


def _both_directions(rnn: nn.LSTM, x_BSF: Tensor, steps_B: Tensor) -> Tensor:
    """The outputs of a bidirectional LSTM for sequences with padding at their ends, in evaluation.

    The backward direction reads each sequence reversed within its length, so that padding comes last there, too.
    """
    places_S = torch.arange(x_BSF.shape[1], device=x_BSF.device)
    reversed_BS = torch.where(places_S < steps_B[:, None], steps_B[:, None] - 1 - places_S, places_S)

    def turned(y_BSF: Tensor) -> Tensor:
        return y_BSF.gather(1, reversed_BS[..., None].expand_as(y_BSF))

    zero = x_BSF.new_zeros(1, x_BSF.shape[0], rnn.hidden_size)
    for layer in range(rnn.num_layers):
        outputs = []
        for direction in ("", "_reverse"):
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            weights = [getattr(rnn, f"{name}_l{layer}{direction}") for name in names]
            given = turned(x_BSF) if direction else x_BSF
            found = torch.lstm(given, (zero, zero), weights, True, 1, 0.0, False, False, True)[0]
            outputs.append(turned(found) if direction else found)
        x_BSF = torch.cat(outputs, dim=-1)
    return x_BSF
