"""Text generation: a small GPT reads a name in CamelCase and writes its words - GetEventLoop, "get event loop".

    python examples/tasks/generate_text.py [--quick]

The words come from names with underscores in the sources of Python's standard library. Training and evaluation use
different names. Needs pip install '.[texts,metrics]' in a clone.
"""

import argparse
import math
import random
import re
import time
from pathlib import Path

import torch
from stdlib_sources import read_source, write_splits

from trainwright import Trainer, TrainerConfig
from trainwright.data import Dataset, TextTokenizer
from trainwright.evaluation import build_metric
from trainwright.models import GPTTextGeneration, GPTTextGenerationConfig

OUTPUT = Path("output", "generate_text")
MODULES = """
argparse ast bdb calendar codecs configparser contextlib csv difflib dis doctest enum ftplib functools gettext imaplib
inspect ipaddress locale mailbox mimetypes optparse os pdb pickle pickletools platform plistlib pprint pstats pydoc
random selectors shutil smtplib socket socketserver ssl statistics subprocess tarfile tempfile textwrap threading
tokenize trace traceback turtle typing uuid warnings weakref webbrowser asyncio/base_events asyncio/events
asyncio/selector_events asyncio/sslproto asyncio/streams asyncio/tasks asyncio/unix_events email/_header_value_parser
email/feedparser email/generator email/header email/message email/policy email/utils http/client http/cookiejar
http/server importlib/_bootstrap importlib/_bootstrap_external json/decoder json/encoder logging/__init__
logging/config logging/handlers multiprocessing/connection multiprocessing/managers multiprocessing/pool unittest/case
unittest/mock urllib/parse urllib/request xml/dom/minidom xml/etree/ElementTree
"""
LONGEST = 14  # characters
NUM_TEST, NUM_TRAIN = 200, 2600
BLEU = {"name": "bleu", "tokenize": "char"}  # of characters: most names have fewer words than BLEU needs


def prepare(folder: Path) -> None:
    """Write ``train.jsonl`` and ``test.jsonl``, with rows ``{"source", "target"}``; without common names."""
    texts = [read_source(f"{module}.py") for module in MODULES.split()]
    names = {name for text in texts for name in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text) if len(name) <= LONGEST}
    words = [name.split("_") for name in sorted(names)]
    answers = {"".join(map(str.capitalize, some)): " ".join(some) for some in words}
    rows = [{"source": name, "target": answer} for name, answer in answers.items()]
    random.Random(0).shuffle(rows)
    write_splits(folder, {"train": rows[NUM_TEST : NUM_TEST + NUM_TRAIN], "test": rows[:NUM_TEST]})


def answer_of_nearest(name: str, train: list[dict[str, str]]) -> str:
    """Baseline: the answer for the training name with the longest common prefix."""

    def num_equal(row: dict[str, str]) -> int:
        return [*(one == other for one, other in zip(row["source"], name, strict=False)), False].index(False)

    return max(train, key=num_equal)["target"]


def main(quick: bool) -> None:
    prepare(OUTPUT / "data")
    began = time.perf_counter()

    train_dataset = Dataset.load(OUTPUT / "data", split="train")
    eval_dataset = Dataset.load(OUTPUT / "data", split="test")
    texts = (row["source"] + train_dataset.config.separator + row["target"] for row in train_dataset.data)
    tokenizer = TextTokenizer.train(texts, level="char", add_eos=False)  # the dataset adds the end token
    torch.set_num_threads(1)  # layers this small do not gain from more threads, and lose on a busy machine
    torch.manual_seed(0)
    model = GPTTextGeneration(
        GPTTextGenerationConfig(
            vocab_size=tokenizer.vocab_size,
            eos_token_id=tokenizer.eos_token_id,
            max_position_embeddings=64,
            hidden_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=192,
            hidden_dropout_prob=0.0,
            max_new_tokens=LONGEST + 6,
        )
    )
    config = TrainerConfig(
        output_dir=OUTPUT / "run",
        task="text_generation",
        device="cpu",
        num_epochs=10 if quick else 22,
        batch_size=32,
        eval_batch_size=100,
        learning_rate=4e-3,
        optimizer="adamw",
        lr_scheduler_type="cosine",
        warmup_ratio=0.05,
        evaluate_with_generate=True,
        metrics=["rouge", BLEU],
        metric_for_best_model="rougeL",
        num_dataloader_workers=0,
    )
    trainer = Trainer(model, config, train_dataset, eval_dataset, preprocessor=tokenizer)
    before = trainer.evaluate()
    results = trainer.train()

    prompts = [row["source"] + train_dataset.config.separator for row in eval_dataset.data]
    answers = [output.text for output in trainer.model.predict(prompts)]
    true = [row["target"] for row in eval_dataset.data]
    for row, answer in zip(eval_dataset.data[:5], answers, strict=False):
        print(f"{row['source']} -> {answer}")
    nearest = [answer_of_nearest(row["source"], train_dataset.data) for row in eval_dataset.data]
    rouge, bleu = (
        build_metric("rouge").compute(nearest, true),
        build_metric("bleu", tokenize="char").compute(nearest, true),
    )
    print(f"rougeL: {results['rougeL']:.3f} (baseline: nearest training name: {rouge['rougeL']:.3f})")
    print(f"bleu: {results['bleu']:.3f} (baseline: nearest training name: {bleu['bleu']:.3f})")
    exact = sum(answer == text for answer, text in zip(answers, true, strict=True)) / len(true)
    print(f"exact match: {exact:.3f}")
    print(f"perplexity: {math.exp(results['loss']):.3f} (before training: {math.exp(before['loss']):.1f})")
    print(f"time: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer epochs")
    main(parser.parse_args().quick)
