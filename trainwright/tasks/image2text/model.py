"""CRNN (Shi et al. 2015): reads a line of text in an image, with connectionist temporal classification.

B batch, H and W height and width in pixels, T time steps (W / 4), C characters with the blank.
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.base.errors import ConfigError
from trainwright.config.yaml_config import check_positive
from trainwright.models.model import register_model
from trainwright.tasks.ctc import CTCConfig, CTCModel, ctc_greedy_decode, init_for_ctc
from trainwright.tasks.labels import reverse_digits
from trainwright.tasks.sizes import check_share

# After which convolution the picture is halved: in both directions, or in height alone, which keeps the time steps.
_POOLS = {0: (2, 2), 1: (2, 2), 3: (2, 1), 5: (2, 1)}
_HEIGHT_RATIO = 16
_NUM_BLOCKS = 7


@dataclass
class CRNNImage2TextConfig(CTCConfig):
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
class CRNNImage2Text(CTCModel):
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

    def spelled(self, text: str) -> str:
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
