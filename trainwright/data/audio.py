"""Sounds from files: wave files by Python's own library, others by soundfile where that is installed."""

import math
import os
import wave
from typing import Any

import numpy as np

from trainwright.data.errors import DataError

Waveform = np.ndarray[Any, np.dtype[np.float32]]


def read_waveform(path: str | os.PathLike[str]) -> tuple[Waveform, int]:
    """A file's samples as float32 (n,) in [-1, 1], the mean of its channels, and their number per second.

    Raises:
        DataError: it cannot be read, or is empty; names the file and says what to do.
    """
    if not os.path.isfile(path):
        raise DataError(f"{path}: there is no such sound file.")
    try:
        with wave.open(os.fspath(path), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            content = file.readframes(file.getnframes())
    except (wave.Error, EOFError):  # no wave file, or of floating-point numbers, which that library cannot
        samples, rate = _by_soundfile(path)
    else:
        usable = len(content) // (width * channels) * width * channels  # a file that was cut off ends in half a sample
        samples = _mixed(_decoded(content[:usable], width).reshape(-1, channels))
    if not len(samples):
        raise DataError(f"{path}: has no sound in it. Take its row out.")
    return samples, rate


def resampled(waveform: Waveform, rate: int, wanted: int, source: str = "sound") -> Waveform:
    """The same sound with ``wanted`` samples per second.

    Raises:
        DataError: the rates differ and scipy, which converts them, is not there.
    """
    if rate == wanted:
        return waveform
    try:
        from scipy.signal import resample_poly  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise DataError(
            f"{source}: has {rate} samples per second; the feature extractor takes sampling_rate={wanted}. Convert the "
            "files, set sampling_rate to theirs, or install scipy (pip install scipy), which then converts them."
        ) from error
    common = math.gcd(rate, wanted)
    converted: Waveform = resample_poly(waveform, wanted // common, rate // common).astype(np.float32)
    return converted


def _mixed(samples: np.ndarray[Any, Any]) -> Waveform:
    """(n, channels) to (n,)."""
    mean: Waveform = samples.mean(axis=1, dtype=np.float32)
    return mean


def _decoded(content: bytes, width: int) -> Waveform:
    """PCM of ``width`` bytes a sample, little-endian; of one byte it is unsigned."""
    if width == 1:
        return ((np.frombuffer(content, dtype=np.uint8).astype(np.float32) - 128) / 128).astype(np.float32)
    if width == 3:
        parts = np.frombuffer(content, dtype=np.uint8).reshape(-1, 3)
        widened = np.zeros((len(parts), 4), dtype=np.uint8)
        widened[:, 1:] = parts  # the three upper bytes: the sign comes right by itself
        return (widened.view("<i4")[:, 0] / 2**31).astype(np.float32)
    return (np.frombuffer(content, dtype=f"<i{width}") / 2.0 ** (8 * width - 1)).astype(np.float32)


def _by_soundfile(path: str | os.PathLike[str]) -> tuple[Waveform, int]:
    try:
        import soundfile  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise DataError(
            f"{path}: is no wave file of whole numbers (PCM), which is what is read without further packages. "
            "Convert it, or install soundfile (pip install soundfile), which reads flac, ogg and others."
        ) from error
    try:
        samples, rate = soundfile.read(os.fspath(path), dtype="float32", always_2d=True)
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as a sound ({error}). Replace the file, or take its row out."
        ) from error
    return _mixed(samples), int(rate)
