"""Write words as tones: each letter is a chord of two frequencies (DTMF). Wave files, and a CSV file for each split."""

import csv
import random
import wave
from pathlib import Path

import numpy as np

LETTERS = "abcdefghijklmnop"
LOW, HIGH = (697, 770, 852, 941), (1209, 1336, 1477, 1633)  # hertz; a letter is one of each, as in ITU-T Q.23
RATE = 8000  # samples per second


def write_speech(folder: Path, sizes: dict[str, int], seed: int = 0) -> None:
    """Write ``sizes["train"]`` recordings, their ``train.csv``, and so on. No text occurs twice."""
    draw, used = random.Random(seed), set[str]()
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    for split, size in sizes.items():
        with open(folder / f"{split}.csv", "w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["audio_path", "text"])
            for number in range(size):
                text = next(t for t in iter(lambda: words(draw), "") if t not in used)
                used.add(text)
                write_wave(folder / "audio" / f"{split}_{number}.wav", speak(text, draw))
                rows.writerow([f"{split}_{number}.wav", text])


def words(draw: random.Random) -> str:
    """One to three words of one to four letters."""
    return " ".join("".join(draw.choices(LETTERS, k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3)))


def speak(text: str, draw: random.Random) -> np.ndarray:
    """Samples in [-1, 1]. Each letter lasts 50 to 120 ms, with random loudness and slight detuning."""
    noise = np.random.default_rng(draw.getrandbits(32))
    sounds = [np.zeros(int(RATE * draw.uniform(0.02, 0.15)))]
    for character in text:
        if character == " ":
            sounds.append(np.zeros(int(RATE * draw.uniform(0.10, 0.18))))
            continue
        seconds_N = np.arange(int(RATE * draw.uniform(0.05, 0.12))) / RATE
        row, column = divmod(LETTERS.index(character), len(HIGH))
        tune = draw.uniform(0.985, 1.015)
        chord_N = sum(
            np.sin(2 * np.pi * tune * f * seconds_N + draw.uniform(0, 6.28)) for f in (LOW[row], HIGH[column])
        )
        sounds += [chord_N * np.hanning(len(chord_N)) ** 0.5 * draw.uniform(0.15, 0.45)]
        sounds += [np.zeros(int(RATE * draw.uniform(0.02, 0.04)))]
    sounds.append(np.zeros(int(RATE * draw.uniform(0.02, 0.15))))
    samples_N = np.concatenate(sounds)
    return (samples_N + noise.normal(0, draw.uniform(0.002, 0.03), len(samples_N))).clip(-1, 1)


def write_wave(path: Path, samples_N: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)  # bytes: 16 bits
        file.setframerate(RATE)
        file.writeframes((samples_N * 32767).astype("<i2").tobytes())
