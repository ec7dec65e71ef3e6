"""Sounds as features: transformers' audio functions and scipy are the references."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from trainwright.data import AudioFeatureExtractor, DataError
from trainwright.tasks.speech_recognition.audio_features import read_waveform, resampled

RATE = 8000


def tone(frequency: float, seconds: float = 0.5, rate: int = RATE) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * frequency * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def test_as_transformers_does_it() -> None:
    reference = pytest.importorskip("transformers.audio_utils")
    waveform = np.random.default_rng(0).normal(size=3000).astype(np.float32) / 10
    filters = reference.mel_filter_bank(129, 20, 0, RATE / 2, RATE, norm=None, mel_scale="htk")
    wanted = reference.spectrogram(
        waveform, reference.window_function(256, "hann"), 256, 100, power=2.0, pad_mode="constant",
        mel_filters=filters, mel_floor=1e-10, log_mel="log",
    )  # fmt: skip
    extractor = AudioFeatureExtractor(sampling_rate=RATE, n_fft=256, hop_length=100, n_mels=20, normalize=False)
    got = extractor(waveform, return_tensors="torch")["input_features"]
    assert got.shape == (1, 31, 20)
    torch.testing.assert_close(got[0], torch.from_numpy(wanted.T).float(), rtol=1e-3, atol=1e-3)


def test_a_tone_is_where_it_belongs() -> None:
    extractor = AudioFeatureExtractor(
        sampling_rate=RATE, n_fft=400, hop_length=200, features="log_spectrum", normalize=False
    )
    features_TF = extractor.features_of(tone(1000))
    assert features_TF.shape == (21, 201) == (21, extractor.config.num_features)
    assert (features_TF[2:-2].argmax(dim=1) == 50).all()  # 20 Hz each
    # Features are normalized over the frames.
    features_TF = AudioFeatureExtractor(n_mels=40)(tone(440, rate=16000), return_tensors="torch")["input_features"][0]
    assert features_TF.mean(dim=0).abs().amax() < 1e-4
    assert (features_TF.std(dim=0, correction=0) - 1).abs().amax() < 1e-2
    assert AudioFeatureExtractor(n_mels=40).features_of(np.zeros(100)).isfinite().all()


def test_a_batch_is_padded_and_masked() -> None:
    extractor = AudioFeatureExtractor(sampling_rate=RATE, n_mels=20, n_fft=256, hop_length=100)
    sounds = [tone(440, 0.1), torch.from_numpy(tone(440, 0.2)), tone(300, 0.05).tolist()]
    batch = extractor(sounds, return_tensors="torch")
    assert batch["input_features"].shape == (3, 17, 20)
    assert batch["attention_mask"].sum(dim=1).tolist() == [9, 17, 5]
    assert (batch["input_features"][0, 9:] == 0).all()
    assert [len(row) for row in extractor(sounds)["input_features"]] == [9, 17, 5]


@pytest.mark.parametrize(("width", "error"), [(1, 1 / 100), (2, 1e-4), (3, 1e-6), (4, 1e-6)])
def test_wave_files_of_all_widths(width: int, error: float, tmp_path: Path, make: Callable) -> None:
    waveform = tone(440)
    waveform[:2] = [-1.0, 0.25]
    found, rate = read_waveform(make("wave", tmp_path / "a.wav", waveform, width=width))
    assert rate == RATE
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, waveform, atol=error)


def test_channels_are_mixed(tmp_path: Path, make: Callable) -> None:
    stereo = np.stack([tone(440), np.zeros_like(tone(440))], axis=1)
    found, _ = read_waveform(make("wave", tmp_path / "a.wav", stereo, channels=2))
    np.testing.assert_allclose(found, tone(440) / 2, atol=1e-4)


def test_another_rate_is_converted(tmp_path: Path, make: Callable) -> None:
    pytest.importorskip("scipy")
    converted = resampled(tone(440, rate=22050), 22050, RATE)
    assert converted.dtype == np.float32
    assert len(converted) == 4000
    np.testing.assert_allclose(converted[100:-100], tone(440)[100 : 4000 - 100], atol=2e-2)
    path = make("wave", tmp_path / "a.wav", tone(440, rate=16000), rate=16000)
    extractor = AudioFeatureExtractor(sampling_rate=RATE, n_mels=20, n_fft=256, hop_length=100)
    wanted = extractor.features_of(resampled(tone(440, rate=16000), 16000, RATE))
    torch.testing.assert_close(extractor.features_of(str(path)), wanted, rtol=0.1, atol=0.1)


def test_files_that_cannot_be_read_are_named(tmp_path: Path, make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.wav").write_text("no sound")
    with pytest.raises(DataError, match=r"text\.wav: (is not a wave file|cannot be read)"):
        read_waveform(tmp_path / "text.wav")
    with pytest.raises(DataError, match=r"absent\.wav: there is no such audio file"):
        read_waveform(tmp_path / "absent.wav")
    with pytest.raises(DataError, match=r"empty\.wav: is empty"):
        read_waveform(make("wave", tmp_path / "empty.wav", np.zeros(0)))
    with pytest.raises(DataError, match=r"shape \(2, 2, 3\)|shape \(2, 3\)"):
        AudioFeatureExtractor()(np.zeros((2, 2, 3)))
    # Another rate without scipy is reported.
    monkeypatch.setitem(sys.modules, "scipy.signal", None)
    with pytest.raises(DataError, match=r"a\.wav: .*22050 .*sampling_rate=8000.*\n?.*scipy"):
        resampled(tone(440), 22050, RATE, "a.wav")
    # Floating point waves need soundfile.
    wavfile = pytest.importorskip("scipy.io.wavfile")
    wavfile.write(tmp_path / "float.wav", RATE, tone(440))
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DataError, match=r"float\.wav: .*\n?.*pip install soundfile"):
        read_waveform(tmp_path / "float.wav")


def test_samples_with_their_own_rate() -> None:
    pytest.importorskip("scipy")
    extractor = AudioFeatureExtractor(sampling_rate=RATE, n_mels=20, n_fft=256, hop_length=100)
    sound = {"array": tone(440, rate=16000), "sampling_rate": 16000, "path": None}
    wanted = extractor(tone(440, rate=16000), sampling_rate=16000)["input_features"][0]
    assert torch.equal(extractor(sound)["input_features"][0], wanted)
    assert torch.equal(extractor([sound, tone(300)])["input_features"][0], wanted)
    with pytest.raises(DataError, match="must have sampling_rate"):
        extractor({"array": tone(440)})


@pytest.mark.parametrize(
    ("samples", "match"),
    [
        ((tone(440) * 32767).astype(np.int16), r"int16 samples from -\d+ to \d+; .* by 32768"),
        (tone(440) * 32767, r"float32 samples from .* by 32768"),
        ([1, 0, -1], "int64 samples from -1 to 1"),
        (np.array([0.5, np.nan, 0]), "float64 samples from nan to nan; they must be finite"),
        (np.array([0.5, np.inf, 0]), "must be finite"),
        (np.stack([tone(440), tone(300)], axis=1), r"shape \(4000, 2\); .*Average the channels"),
        (torch.zeros(4000, 1), r"shape \(4000, 1\)"),
    ],
)
def test_samples_that_are_no_recording_are_refused(samples: object, match: str) -> None:
    extractor = AudioFeatureExtractor(sampling_rate=RATE, n_mels=20, n_fft=256)
    for sounds in (samples, [tone(440), samples], {"array": samples, "sampling_rate": RATE}):
        with pytest.raises(DataError, match=match):
            extractor(sounds)


def test_a_little_above_the_range_is_what_decoders_give() -> None:
    loud = AudioFeatureExtractor(sampling_rate=RATE, n_mels=20, n_fft=256).features_of(tone(440) * 2.2)
    assert loud.isfinite().all()
