"""Text classification: predict the package of Python's standard library of a piece of code.

    python examples/tasks/classify_text.py [--quick]

Training and evaluation use pieces of different files.
Needs pip install 'trainwright[texts]'.
"""

import argparse
import re
import time
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import torch
from stdlib_sources import read_source, write_splits

from trainwright import Trainer, TrainerConfig
from trainwright.data import Dataset, TextTokenizer
from trainwright.models import BertTextClassification, BertTextClassificationConfig

OUTPUT = Path("output", "classify_text")
FILES = {  # per package: for training, for evaluation
    "asyncio": ("base_events events selector_events sslproto streams", "tasks unix_events proactor_events locks"),
    "email": (
        "_header_value_parser charset generator header message",
        "contentmanager feedparser headerregistry utils",
    ),
    "multiprocessing": ("connection managers pool queues synchronize", "context process shared_memory util"),
    "unittest": ("case loader main mock runner", "async_case result suite util"),
    "xml": (
        "dom/expatbuilder dom/minidom etree/ElementTree sax/expatreader sax/xmlreader",
        "dom/pulldom dom/xmlbuilder etree/ElementPath sax/saxutils",
    ),
}
NUM_LINES = 10
TEST_PIECES = 70  # per package


def pieces(package: str, modules: str, count: int) -> list[dict[str, str]]:
    """``count`` rows, alternating between the files, without the package's own name, which would be too easy."""
    files = []
    for module in modules.split():
        text = re.sub(package, "", read_source(f"{package}/{module}.py"), flags=re.IGNORECASE)
        lines = [line for line in text.splitlines() if line.strip()]
        files.append(["\n".join(lines[start : start + NUM_LINES]) for start in range(0, len(lines), NUM_LINES)])
    in_turn = [text for texts in zip_longest(*files) for text in texts if text is not None]
    return [{"text": text, "label": package} for text in in_turn[:count]]


def prepare(folder: Path, count: int) -> None:
    """Write ``train.jsonl`` and ``test.jsonl``, with rows ``{"text", "label"}``."""
    train = [row for package, (modules, _) in FILES.items() for row in pieces(package, modules, count)]
    test = [row for package, (_, modules) in FILES.items() for row in pieces(package, modules, TEST_PIECES)]
    write_splits(folder, {"train": train, "test": test})


def main(quick: bool) -> None:
    prepare(OUTPUT / "data", 250 if quick else 350)
    began = time.perf_counter()

    train_dataset = Dataset.load(OUTPUT / "data", split="train", max_length=128)
    eval_dataset = Dataset.load(OUTPUT / "data", split="test", max_length=128)
    tokenizer = TextTokenizer.train((row["text"] for row in train_dataset.data), vocab_size=6000, lowercase=True)
    torch.set_num_threads(1)  # layers this small do not gain from more threads, and lose on a busy machine
    torch.manual_seed(0)
    model = BertTextClassification(
        BertTextClassificationConfig(
            id2label=train_dataset.config.id2label,
            vocab_size=tokenizer.vocab_size,
            max_position_embeddings=128,
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=128,
        )
    )
    config = TrainerConfig(
        output_dir=OUTPUT / "run",
        task="text_classification",
        device="cpu",
        num_epochs=6 if quick else 10,
        batch_size=32,
        eval_batch_size=100,
        learning_rate=1e-3,
        optimizer="adamw",
        metrics=["accuracy", "f1"],
        metric_for_best_model="f1",
        num_dataloader_workers=0,
    )
    trainer = Trainer(model, config, train_dataset, eval_dataset, preprocessor=tokenizer)
    results = trainer.train()

    labels = Counter(row["label"] for row in eval_dataset.data)
    text = "async def main():\n    await sleep(1)\n    return await gather(*tasks)"
    print(f"{text}\n-> {trainer.model.predict(text)[0]}")
    print(f"accuracy: {results['accuracy']:.3f} (most common class: {max(labels.values()) / len(eval_dataset):.3f})")
    print(f"f1: {results['f1']:.3f}")
    print(f"time: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer pieces and epochs")
    main(parser.parse_args().quick)
