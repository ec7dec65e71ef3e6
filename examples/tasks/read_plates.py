"""OCR: train a CRNN to read text in images, from a folder with images and a CSV file.

    python examples/tasks/read_plates.py [--quick]

Plates are drawn into ``output/read_plates/data``; the model is saved next to them and then reads image files.
Needs pip install 'trainwright[examples,images,metrics]'.
"""

import argparse
import time
from pathlib import Path

import torch
from plates import write_plates

from trainwright import Trainer, TrainerConfig
from trainwright.data import Dataset, ImageProcessor, ImageProcessorConfig
from trainwright.models import CRNNImage2Text, CRNNImage2TextConfig, Model

OUTPUT = Path("output", "read_plates")


def main(quick: bool) -> None:
    torch.set_num_threads(1)  # layers this narrow do not gain from more threads, and lose on a busy machine
    write_plates(OUTPUT / "data", {"train": 256, "test": 64} if quick else {"train": 1000, "test": 200})

    train_dataset = Dataset.load(OUTPUT / "data", split="train")
    eval_dataset = Dataset.load(OUTPUT / "data", split="test")
    preprocessor = ImageProcessor(ImageProcessorConfig(size=(192, 24), gray_scale=True, mean=0.5, std=0.5))
    torch.manual_seed(0)
    model = CRNNImage2Text(
        CRNNImage2TextConfig(
            id2label=train_dataset.config.id2label,
            image_height=24,
            image_width=192,
            channels=(16, 32, 48, 48, 64, 64, 64),  # at most a quarter of the default: trains on a CPU
            batch_norm_blocks=tuple(range(7)),
            rnn_dim=64,
        )
    )
    config = TrainerConfig(
        output_dir=OUTPUT / "run",
        task="image2text",
        device="cpu",
        num_epochs=24 if quick else 8,
        batch_size=8,
        eval_batch_size=64,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
        metrics=["cer"],
        metric_for_best_model="cer",
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
        print(f"{len(dataset)} {name} plates: CER {trainer.evaluate(dataset)['cer']:.4f}")

    model.save(OUTPUT / "model")
    reader = Model.load(OUTPUT / "model")
    for row in eval_dataset.data[:3]:
        print(
            f"{Path(row['image_path']).name}: {row['label']}, predicted {reader.predict(row['image_path'])[0]['text']}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer plates")
    main(parser.parse_args().quick)
