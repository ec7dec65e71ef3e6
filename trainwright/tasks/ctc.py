"""Models that read by connectionist temporal classification (Graves et al. 2006), and its loss and greedy decoding.

CRNN (Shi et al. 2015) reads a line of text in an image; the speech model is a small Deep Speech 2 (Amodei et al. 2015):
convolutions over a spectrogram, then a bidirectional LSTM.

B batch, H and W height and width in pixels, F features of a frame, T time steps (W / 4) or frames (padded), S time
steps of speech (T / 2), C characters with the blank, L labels (padded).
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.config.yaml_config import check_positive
from trainwright.data.errors import DataError
from trainwright.models.config import ModelConfig, check_share, checked_characters
from trainwright.models.model import Model, ModelOutput, register_model
from trainwright.tasks.labels import reverse_digits

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


# After which convolution the picture is halved: in both directions, or in height alone, which keeps the time steps.
_POOLS = {0: (2, 2), 1: (2, 2), 3: (2, 1), 5: (2, 1)}

_HEIGHT_RATIO = 16

_NUM_BLOCKS = 7


@dataclass
class _CTCConfig(ModelConfig):
    id2label: Mapping[int, str] | Sequence[str] | None = None
    blank_id: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id2label = checked_characters(self.id2label, self.blank_id, "blank_id", type(self).__name__)


class _CTCModel(Model):
    def compute_loss(self, logits: Tensor, labels: Tensor, logit_lengths: Tensor | None = None) -> Tensor:
        """CTC's loss of `ctc_loss`; ``labels`` (B, L) are padded with the blank's id, or with negative numbers."""
        return ctc_loss(logits, labels, logit_lengths, blank=self.config.blank_id)

    def post_process(self, outputs: Tensor | Mapping[str, Tensor]) -> list[ModelOutput]:
        """``text`` for each input, from the model's outputs, from ids, or from labels."""
        blank = self.config.blank_id
        texts = read_characters(ids_of(outputs, blank=blank), self.config.id2label, blank=blank)
        return [ModelOutput(text=self._spelled(text)) for text in texts]

    def _spelled(self, text: str) -> str:
        return text


@dataclass
class CRNNImage2TextConfig(_CTCConfig):
    """Sizes and settings of a `CRNNImage2Text`.

    Args:
        id2label: the characters by id; the blank's is "".
        blank_id: CTC's blank, and the padding of labels.
        n_channels: 1 for gray pictures, 3 for colours.
        image_height, image_width: size of the pictures in pixels. Other sizes are possible: rows of features are
            then averaged, or repeated, to the number that belongs to this height.
        map2seq_in_dim: features of a time step, rows times the last of ``channels``; None derives it from
            ``image_height``: 2048 for 64, 1024 for 32.
        map2seq_out_dim: the number of features that they are mapped to.
        rnn_dim: width of each direction of the two LSTM layers.
        channels: outputs of the seven convolutions. Smaller ones train on a CPU.
        batch_norm_blocks: which of them (0 to 6) are followed by batch normalization. All of them (``tuple(range(7))``)
            learn sooner, above all from few pictures.
        dropout: between the two LSTM layers and before the classifier.
        reverse_prediction_text: reverse each text, for scripts that are read from right to left.
        reverse_output_digits: reverse each number in a text.

    Raises:
        ConfigError, ConfigTypeError: a value that no network can have.
    """

    name = "crnn_image2text"

    n_channels: int = 1
    image_height: int = 64
    image_width: int = 256
    map2seq_in_dim: int | None = None
    map2seq_out_dim: int = 64
    rnn_dim: int = 256
    channels: tuple[int, ...] = (64, 128, 256, 256, 512, 512, 512)
    batch_norm_blocks: tuple[int, ...] = (4, 5)
    dropout: float = 0.0
    reverse_prediction_text: bool = False
    reverse_output_digits: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "n_channels", "image_height", "image_width", "map2seq_out_dim", "rnn_dim")
        check_share(self, "dropout")
        where = type(self).__name__
        if len(self.channels) != _NUM_BLOCKS or not all(type(n) is int and n >= 1 for n in self.channels):
            raise ConfigError(f"{where}.channels: got {self.channels!r}; it must be {_NUM_BLOCKS} whole numbers >= 1.")
        if not set(self.batch_norm_blocks) <= set(range(_NUM_BLOCKS)):
            raise ConfigError(f"{where}.batch_norm_blocks: got {self.batch_norm_blocks!r}; blocks are 0 to 6.")
        if self.map2seq_in_dim is None:
            if self.image_height < _HEIGHT_RATIO:
                raise ConfigError(
                    f"{where}.image_height: got {self.image_height}; it must be at least {_HEIGHT_RATIO}."
                )
        elif self.map2seq_in_dim < 1 or self.map2seq_in_dim % self.channels[-1]:
            raise ConfigError(
                f"{where}.map2seq_in_dim: got {self.map2seq_in_dim}; it must be a multiple of the last of channels, "
                f"{self.channels[-1]}. Leave it out: it follows from image_height."
            )

    @property
    def num_rows(self) -> int:
        """Rows of features that are put together into a time step."""
        if self.map2seq_in_dim is not None:
            return self.map2seq_in_dim // self.channels[-1]
        return self.image_height // _HEIGHT_RATIO


@register_model("crnn_image2text", config_class=CRNNImage2TextConfig)
class CRNNImage2Text(_CTCModel):
    """Reads the text in pictures of one line: ``pixel_values`` (B, channels, H, W) to ``logits`` (B, W / 4, C).

    ``logits`` are log probabilities. ``post_process`` decodes them greedily, so that evaluation needs no second
    forward pass; ``generate`` returns the ids.
    """

    preprocessor_kind = "image_processor"

    def __init__(self, config: CRNNImage2TextConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        config = self.config
        self.cnn = nn.Sequential(*_layers(config))
        self.map2seq = nn.Linear(config.num_rows * config.channels[-1], config.map2seq_out_dim)
        self.rnn1 = nn.LSTM(config.map2seq_out_dim, config.rnn_dim, bidirectional=True, batch_first=True)
        self.rnn2 = nn.LSTM(2 * config.rnn_dim, config.rnn_dim, bidirectional=True, batch_first=True)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(2 * config.rnn_dim, len(config.id2label or ()))
        self.apply(init_for_ctc)
        # Weights of other origin have normalization in every block, also where it is not used.
        blocks = [number for number, layer in enumerate(self.cnn) if isinstance(layer, _ConvBlock)]
        self.skip_keys_on_load = [f"cnn.{n}.bn" for i, n in enumerate(blocks) if i not in config.batch_norm_blocks]

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Log probabilities of the characters at each time step, from left to right.

        Raises:
            ConfigError: the pictures have another shape or number of channels, or are too small.
        """
        self._check(pixel_values)
        features_BFRT = self.cnn(pixel_values)
        rows = self.config.num_rows
        if features_BFRT.shape[2] != rows:
            features_BFRT = F.adaptive_avg_pool2d(features_BFRT, (rows, features_BFRT.shape[3]))
        sequence_BTF = self.map2seq(features_BFRT.flatten(1, 2).transpose(1, 2))
        hidden_BTF, _ = self.rnn1(sequence_BTF)
        hidden_BTF, _ = self.rnn2(self.dropout(hidden_BTF))
        return {"logits": self.classifier(self.dropout(hidden_BTF)).float().log_softmax(dim=-1)}

    def generate(self, pixel_values: Tensor) -> Tensor:
        """The ids that are read (B, longest), padded with the blank's."""
        return ctc_greedy_decode(self(pixel_values)["logits"], blank=self.config.blank_id)

    def _spelled(self, text: str) -> str:
        text = text[::-1] if self.config.reverse_prediction_text else text
        return reverse_digits(text) if self.config.reverse_output_digits else text

    def _check(self, pixel_values: Tensor) -> None:
        shape = tuple(pixel_values.shape)
        if len(shape) != 4:
            raise ConfigError(f"pixel_values: got the shape {shape}; it must be (batch, channels, height, width).")
        if shape[1] != self.config.n_channels:
            fix = f"gray_scale={self.config.n_channels == 1} in the ImageProcessorConfig"
            raise ConfigError(
                f"pixel_values: pictures have {shape[1]} channels, the model takes n_channels={self.config.n_channels}."
                f" Set {fix}, or n_channels={shape[1]} in the {type(self.config).__name__}."
            )
        if shape[2] < _HEIGHT_RATIO or shape[3] < 4:
            raise ConfigError(
                f"pixel_values: pictures are {shape[2]} high and {shape[3]} wide; they must be at least "
                f"{_HEIGHT_RATIO} high and 4 wide, and 4 pixels wide for each character to be read."
            )


class _ConvBlock(nn.Module):
    """Convolution that keeps the size, normalization if wanted, ReLU."""

    def __init__(self, in_channels: int, out_channels: int, has_norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1)
        self.bn = nn.BatchNorm2d(out_channels) if has_norm else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.bn is not None:
            x = self.bn(x)
        return F.relu(x, inplace=True)


def _layers(config: CRNNImage2TextConfig) -> list[nn.Module]:
    layers: list[nn.Module] = []
    in_channels = config.n_channels
    for number, out_channels in enumerate(config.channels):
        layers.append(_ConvBlock(in_channels, out_channels, number in config.batch_norm_blocks))
        if number in _POOLS:
            layers.append(nn.MaxPool2d(_POOLS[number]))
        in_channels = out_channels
    return layers


@dataclass
class CTCSpeechRecognitionConfig(_CTCConfig):
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
class CTCSpeechRecognition(_CTCModel):
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
        packed = pack_padded_sequence(x_BSF, steps_B.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
        hidden_BSF, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x_BSF.shape[1])
        logits_BSC = self.classifier(self.dropout(hidden_BSF)).float().log_softmax(dim=-1)
        return {"logits": self._blank_at_padding(logits_BSC, steps_B), "logit_lengths": steps_B}

    def generate(self, input_features: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The decoded ids (B, longest), padded with the blank's."""
        return ctc_greedy_decode(self(input_features, attention_mask)["logits"], blank=self.config.blank_id)

    def _blank_at_padding(self, logits_BSC: Tensor, steps_B: Tensor) -> Tensor:
        is_padding = torch.arange(logits_BSC.shape[1], device=logits_BSC.device) >= steps_B[:, None]
        certain_C = logits_BSC.new_full(logits_BSC.shape[2:], -1e4)  # finite: infinity times zero is not a number
        certain_C[self.config.blank_id] = 0
        return torch.where(is_padding[..., None], certain_C, logits_BSC)

    def _check(self, input_features: Tensor) -> None:
        shape, wanted = tuple(input_features.shape), self.config.num_features
        if len(shape) != 3 or shape[2] != wanted:
            raise ConfigError(
                f"input_features: got the shape {shape}; it must be (batch, frames, features), with "
                f"num_features={wanted} features, as many as the feature extractor gives."
            )
