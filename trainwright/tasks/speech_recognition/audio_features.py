"""AudioFeatureExtractor: features of audio, from wave files or arrays, one row per frame.

B recordings, N samples, T frames, F features.
"""

import functools
import math
import os
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trainwright.base.errors import ConfigError, import_optional
from trainwright.config.yaml_config import check_positive
from trainwright.data.errors import DataError
from trainwright.tasks.padding import pad, pad_mask
from trainwright.tasks.preprocessor import Preprocessor, PreprocessorConfig, register_preprocessor

_KINDS = ("log_mel", "log_spectrum")
_SMALLEST = 1e-10  # of a power, before its logarithm
# Decoders and filters overshoot 1; 16-bit numbers as floats are far above.
_LARGEST = 10.0
_MOST_CHANNELS = 16
Waveform = np.ndarray[Any, np.dtype[np.float32]]


@dataclass
class AudioFeatureExtractorConfig(PreprocessorConfig):
    """Settings of an `AudioFeatureExtractor`.

    Fields:
        sampling_rate: samples per second; files with another rate are converted to it.
        features: "log_mel" (n_mels of them) or "log_spectrum" (n_fft / 2 + 1).
        n_fft, hop_length: number of samples of a frame, and between the starts of two frames.
        n_mels: number of triangular filters, evenly spaced on the mel scale of HTK, 0 Hz to half the sampling rate.
        normalize: each feature gets mean 0 and variance 1 over the frames of a recording.
    """

    name = "audio_feature_extractor"
    filename = "feature_extractor_config.yaml"

    sampling_rate: int = 16000
    features: str = "log_mel"
    n_fft: int = 400
    hop_length: int = 160
    n_mels: int = 80
    normalize: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        where = type(self).__name__
        check_positive(self, "sampling_rate", "n_fft", "hop_length", "n_mels")
        if self.features not in _KINDS:
            raise ConfigError(f"{where}.features: got {self.features!r}; {' or '.join(_KINDS)} is allowed.")
        if self.features == "log_mel":
            filters = mel_filters(self.n_mels, self.n_fft, self.sampling_rate)
            if empty := int((filters.sum(dim=0) == 0).sum()):
                raise ConfigError(
                    f"{where}.n_mels: {empty} of {self.n_mels} filters fall between the {self.n_fft // 2 + 1} "
                    f"frequencies of n_fft={self.n_fft}, and would always be 0. Set fewer n_mels or a larger n_fft."
                )

    @property
    def num_features(self) -> int:
        """F, the number of features."""
        return self.n_mels if self.features == "log_mel" else self.n_fft // 2 + 1


@register_preprocessor("audio_feature_extractor", config_class=AudioFeatureExtractorConfig)
class AudioFeatureExtractor(Preprocessor):
    """``extractor(audio, return_tensors="torch")`` gives ``input_features`` (B, T, F), ``attention_mask`` (B, T)."""

    kind = "audio_feature_extractor"

    def __call__(
        self,
        sounds: Any,
        *,
        sampling_rate: int | None = None,
        return_tensors: Literal["torch", "pt"] | None = None,
    ) -> dict[str, Any]:
        """One recording or several: paths of files, or samples (N,) in [-1, 1] as arrays, tensors or lists of floats.

        Samples with their own rate are ``{"array": (N,), "sampling_rate": ...}``, as datasets has them.

        Args:
            sampling_rate: of given samples; None means the config's. Files contain theirs.
            return_tensors: "torch" pads to the longest recording with 0; None gives a list of tensors (T, F).
        """
        if return_tensors not in (None, "torch", "pt"):
            raise ConfigError(f"return_tensors: got {return_tensors!r}; 'torch' or None is allowed.")
        rows = [self.features_of(sound, sampling_rate) for sound in _as_list(sounds)]
        if return_tensors is None:
            return {"input_features": rows}
        return {"input_features": pad(rows, 0.0), "attention_mask": pad_mask(rows)}

    def features_of(self, sound: Any, sampling_rate: int | None = None) -> Tensor:
        """The features of one recording, float32 (T, F), where T = 1 + N // hop_length."""
        config = self.config
        rate, source = sampling_rate or config.sampling_rate, "audio"
        if isinstance(sound, str | os.PathLike):
            source = os.fspath(sound)
            sound, rate = read_waveform(sound)
        elif isinstance(sound, Mapping):
            if missing := {"array", "sampling_rate"} - sound.keys():
                raise DataError(
                    f"{source}: got a mapping with {[*sound]}; it must have {' and '.join(sorted(missing))}."
                )
            sound, rate = sound["array"], int(sound["sampling_rate"])
        samples_N = _checked(np.asarray(sound), source)
        waveform_N = torch.from_numpy(resampled(samples_N, rate, config.sampling_rate, source))
        spectrum_FT = torch.stft(
            waveform_N,
            config.n_fft,
            hop_length=config.hop_length,
            window=torch.hann_window(config.n_fft),
            pad_mode="constant",  # reflection needs at least half a frame
            return_complex=True,
        )
        features_TF = spectrum_FT.abs().square().T
        if config.features == "log_mel":
            features_TF = features_TF @ mel_filters(config.n_mels, config.n_fft, config.sampling_rate)
        features_TF = features_TF.clamp_min(_SMALLEST).log()
        if not config.normalize:
            return features_TF
        variance_F, mean_F = torch.var_mean(features_TF, dim=0, correction=0)
        return (features_TF - mean_F) / (variance_F + 1e-7).sqrt()


@functools.lru_cache(maxsize=8)
def mel_filters(n_mels: int, n_fft: int, sampling_rate: int) -> Tensor:
    """Triangles (n_fft // 2 + 1, n_mels) with peaks of 1, evenly spaced on HTK's mel scale, 2595 log10(1 + f / 700)."""
    frequencies = torch.linspace(0, sampling_rate / 2, n_fft // 2 + 1, dtype=torch.float64)
    highest = 2595 * math.log10(1 + sampling_rate / 2 / 700)
    corners = 700 * (10 ** (torch.linspace(0, highest, n_mels + 2, dtype=torch.float64) / 2595) - 1)
    low, peak, high = corners[:-2], corners[1:-1], corners[2:]
    rising = (frequencies[:, None] - low) / (peak - low)
    falling = (high - frequencies[:, None]) / (high - peak)
    return torch.minimum(rising, falling).clamp_min(0).float()


def _as_list(audio: Any) -> list[Any]:
    if isinstance(audio, str | os.PathLike):
        return [audio]
    if isinstance(audio, Tensor | np.ndarray):
        is_one = audio.ndim == 1 or audio.shape[-1] <= _MOST_CHANNELS  # the last dimension is that of channels
        return [audio] if is_one else list(audio)
    if isinstance(audio, Sequence) and audio and not isinstance(audio[0], int | float):
        return list(audio)
    return [audio]


def _checked(samples: np.ndarray[Any, Any], source: str) -> Waveform:
    """The samples of a recording as float32 (N,)."""
    if samples.ndim != 1 or not len(samples):
        channels = " Average the channels first, for example samples.mean(axis=1)." if samples.ndim == 2 else ""
        raise DataError(
            f"{source}: got samples of shape {samples.shape}; it must be (number of samples,), with at least one."
            f"{channels}"
        )
    waveform = samples.astype(np.float32)
    largest = np.abs(waveform).max()
    if samples.dtype.kind != "f" or not largest <= _LARGEST:  # NaN is not
        scale = "" if np.isnan(largest) else " Divide 16-bit numbers (PCM) by 32768."
        raise DataError(
            f"{source}: got {samples.dtype} samples from {samples.min()} to {samples.max()}; they must be finite "
            f"floating-point numbers in -1 to 1.{scale}"
        )
    return waveform


def read_waveform(path: str | os.PathLike[str]) -> tuple[Waveform, int]:
    """The samples of a file as float32 (n,) in [-1, 1], averaged over its channels, and the sampling rate."""
    if not os.path.isfile(path):
        raise DataError(f"{path}: there is no such audio file.")
    try:
        with wave.open(os.fspath(path), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            content = file.readframes(file.getnframes())
    except (wave.Error, EOFError):  # not a wave file, or one of floating-point numbers
        samples, rate = _by_soundfile(path)
    else:
        usable = len(content) // (width * channels) * width * channels  # a truncated file may end within a sample
        samples = _decoded(content[:usable], width).reshape(-1, channels).mean(axis=1, dtype=np.float32)
    if not len(samples):
        raise DataError(f"{path}: is empty. Remove its row.")
    return samples, rate


def resampled(waveform: Waveform, rate: int, wanted: int, source: str = "audio") -> Waveform:
    if rate == wanted:
        return waveform
    message = (
        f"{source}: has {rate} samples per second; the feature extractor has sampling_rate={wanted}. Convert the "
        "files, set sampling_rate to theirs, or install scipy, which converts them: pip install scipy."
    )
    signal = import_optional("scipy.signal", message, DataError)
    common = math.gcd(rate, wanted)
    converted: Waveform = signal.resample_poly(waveform, wanted // common, rate // common).astype(np.float32)
    return converted


def _decoded(content: bytes, width: int) -> Waveform:
    """PCM with ``width`` bytes per sample, little-endian; one byte is unsigned."""
    if width == 1:
        return ((np.frombuffer(content, dtype=np.uint8).astype(np.float32) - 128) / 128).astype(np.float32)
    if width == 3:
        parts = np.frombuffer(content, dtype=np.uint8).reshape(-1, 3)
        widened = np.zeros((len(parts), 4), dtype=np.uint8)
        widened[:, 1:] = parts  # the three upper bytes, which keep the sign
        return (widened.view("<i4")[:, 0] / 2**31).astype(np.float32)
    return (np.frombuffer(content, dtype=f"<i{width}") / 2.0 ** (8 * width - 1)).astype(np.float32)


def _by_soundfile(path: str | os.PathLike[str]) -> tuple[Waveform, int]:
    message = (
        f"{path}: is not a wave file of whole numbers (PCM), the only format that needs no other package. "
        "Convert it, or install soundfile, which reads flac, ogg and others: pip install soundfile."
    )
    soundfile = import_optional("soundfile", message, DataError)
    try:
        samples, rate = soundfile.read(os.fspath(path), dtype="float32", always_2d=True)
    except (RuntimeError, OSError) as error:
        raise DataError(f"{path}: cannot be read as audio ({error}). Replace the file, or remove its row.") from error
    return samples.mean(axis=1, dtype=np.float32), int(rate)
