"""Sequence labeling: label the names in a line of Python: functions, parameters, calls, and so on.

    python examples/tasks/label_tokens.py [--quick]

The model sees only tokens; the labels come from the syntax tree of the complete file. Training and evaluation use lines
of different files. Needs pip install '.[texts,metrics]' in a clone.
"""

import argparse
import json
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch
from stdlib_sources import read_source, write_splits
from token_labels import labeled_lines

from trainwright import Trainer, TrainerConfig
from trainwright.data import Dataset, TextTokenizer
from trainwright.evaluation import build_metric
from trainwright.models import BertSequenceLabeling, BertSequenceLabelingConfig

OUTPUT = Path("output", "label_tokens")
TRAIN = "argparse difflib doctest inspect optparse pdb shutil statistics subprocess tarfile threading typing"
TEST = "configparser ftplib imaplib smtplib tempfile"
SIZES = range(3, 33)  # tokens per line
TEST_LINES = 150  # per file

Row = dict[str, list[str]]


def rows_of(modules: str, count: int) -> list[Row]:
    """The first ``count`` lines of each file."""
    rows = []
    for module in modules.split():
        fitting = (row for row in labeled_lines(read_source(f"{module}.py")) if len(row["tokens"]) in SIZES)
        rows += [row for row, _ in zip(fitting, range(count), strict=False)]
    return rows


def prepare(folder: Path, count: int) -> None:
    """Write ``train.jsonl`` and ``test.jsonl``, with rows ``{"tokens", "labels"}``; none is in both."""
    train = rows_of(TRAIN, count)
    known = {tuple(row["tokens"]) for row in train}
    test = [row for row in rows_of(TEST, 2 * TEST_LINES) if tuple(row["tokens"]) not in known]
    write_splits(folder, {"train": train, "test": test[: TEST_LINES * len(TEST.split())]})


def commonest_labels(train: list[Row], test: list[Row]) -> list[list[str]]:
    """Baseline: each token has its most frequent label in the training data, "O" if it did not occur."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in train:
        for token, label in zip(row["tokens"], row["labels"], strict=True):
            counts[token][label] += 1
    return [[counts[t].most_common(1)[0][0] if t in counts else "O" for t in row["tokens"]] for row in test]


def main(quick: bool) -> None:
    prepare(OUTPUT / "data", 120 if quick else 380)
    began = time.perf_counter()

    train_dataset = Dataset.load(OUTPUT / "data", split="train")
    eval_dataset = Dataset.load(OUTPUT / "data", split="test")
    # A name that occurs once is unknown, so that the model learns to label unknown names by context.
    tokenizer = TextTokenizer.train((row["tokens"] for row in train_dataset.data), min_frequency=2)
    torch.set_num_threads(1)  # layers this small do not gain from more threads, and lose on a busy machine
    torch.manual_seed(0)
    model = BertSequenceLabeling(
        BertSequenceLabelingConfig(
            id2label=train_dataset.config.id2label,
            vocab_size=tokenizer.vocab_size,
            max_position_embeddings=64,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
        )
    )
    config = TrainerConfig(
        output_dir=OUTPUT / "run",
        task="sequence_labeling",
        device="cpu",
        num_epochs=8 if quick else 14,
        batch_size=32,
        eval_batch_size=100,
        learning_rate=3e-3,
        optimizer="adamw",
        lr_scheduler_type="linear",
        metrics=["seqeval"],
        metric_for_best_model="f1",
        num_dataloader_workers=0,
    )
    trainer = Trainer(model, config, train_dataset, eval_dataset, preprocessor=tokenizer)
    results = trainer.train()

    true = [row["labels"] for row in eval_dataset.data]
    found = [output.labels for batch in trainer.eval_dataloader for output in trainer.model.predict(batch)]
    with open(OUTPUT / "predictions.jsonl", "w", encoding="utf-8") as file:
        for row, labels in zip(eval_dataset.data, found, strict=True):
            file.write(json.dumps({**row, "predicted": labels}) + "\n")
    commonest = build_metric("seqeval").compute(commonest_labels(train_dataset.data, eval_dataset.data), true)
    for line in ("def area(width, height = None):", "area = numpy.linalg.norm(sides, axis = 0)"):
        print(marked(tokenizer.split(line), trainer.model.predict(line)[0].labels))
    print(f"f1: {results['f1']:.3f} (baseline: most frequent label: {commonest['f1']:.3f})")
    print(f"precision: {results['precision']:.3f}, recall: {results['recall']:.3f}")
    print(f"accuracy: {results['accuracy']:.3f} (baseline: most frequent label: {commonest['accuracy']:.3f})")
    print(f"time: {time.perf_counter() - began:.0f} s")


def marked(tokens: list[str], labels: list[str]) -> str:
    return " ".join(t if label == "O" else f"{t}/{label}" for t, label in zip(tokens, labels, strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer lines and epochs")
    main(parser.parse_args().quick)
