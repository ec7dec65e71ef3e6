"""Speech recognition: train a small network with CTC, from a folder with audio files and a CSV file.

    python examples/tasks/recognize_speech.py [--quick]

The recordings are words as tones, written to ``output/recognize_speech/data``; the model is saved next to them.
Needs pip install 'trainwright[metrics]'.
"""

import argparse
import time
from pathlib import Path

import torch
from tones import RATE, write_speech

from trainwright import Trainer, TrainerConfig
from trainwright.data import AudioFeatureExtractor, Dataset
from trainwright.models import CTCSpeechRecognition, CTCSpeechRecognitionConfig, Model

OUTPUT = Path("output", "recognize_speech")


def main(quick: bool) -> None:
    torch.set_num_threads(1)  # layers this narrow do not gain from more threads, and lose on a busy machine
    write_speech(OUTPUT / "data", {"train": 360, "test": 60} if quick else {"train": 1000, "test": 200})

    train_dataset = Dataset.load(OUTPUT / "data", split="train")
    eval_dataset = Dataset.load(OUTPUT / "data", split="test")
    preprocessor = AudioFeatureExtractor(sampling_rate=RATE, n_mels=40, n_fft=256, hop_length=120)  # 15 ms
    torch.manual_seed(0)
    model = CTCSpeechRecognition(
        CTCSpeechRecognitionConfig(
            id2label=train_dataset.config.id2label,
            num_features=preprocessor.config.num_features,
            hidden_size=64,
            num_hidden_layers=1,
        )
    )
    config = TrainerConfig(
        output_dir=OUTPUT / "run",
        task="speech_recognition",
        device="cpu",
        num_epochs=20 if quick else 11,
        batch_size=8,
        eval_batch_size=50,
        learning_rate=4e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
        metrics=["cer", "wer"],
        metric_for_best_model="wer",
        max_to_keep=1,
        num_dataloader_workers=0,
    )
    trainer = Trainer(
        model=model, config=config, train_dataset=train_dataset, eval_dataset=eval_dataset, preprocessor=preprocessor
    )
    start = time.perf_counter()
    trainer.train()
    print(f"Trained for {time.perf_counter() - start:.0f} seconds.")
    for name, dataset in (("training", train_dataset), ("new", eval_dataset)):
        results = trainer.evaluate(dataset)
        print(f"{len(dataset)} {name} sounds: CER {results['cer']:.4f}, WER {results['wer']:.4f}")

    model.save(OUTPUT / "model")
    listener = Model.load(OUTPUT / "model")
    for row in eval_dataset.data[:3]:
        heard = listener.predict(row["audio_path"])[0]["text"]
        print(f"{Path(row['audio_path']).name}: {row['text']!r}, predicted {heard!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sounds")
    main(parser.parse_args().quick)
