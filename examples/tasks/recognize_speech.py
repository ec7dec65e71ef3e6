"""Shows how to write down what is heard: a folder of sounds and a CSV, and a small network with CTC learns it.

    python examples/tasks/recognize_speech.py [--quick]

The sounds are words spoken in tones, written into ``output/recognize_speech/data``; the model is saved beside them.
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
    torch.set_num_threads(1)  # layers so narrow gain nothing by more, and lose by them on a busy machine
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
        num_epochs=20 if quick else 15,
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
        print(f"{Path(row['audio_path']).name}: {row['text']!r}, heard as {heard!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sounds")
    main(parser.parse_args().quick)
