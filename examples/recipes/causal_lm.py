"""A small GPT-2 of transformers, from scratch, on the source code of Python's standard library: one token is one byte.

python examples/recipes/causal_lm.py
"""

import textwrap
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from trainwright import Trainer, TrainingConfig
from trainwright.data import ColumnDataset

BLOCK = 64  # bytes of a sample


def source_code() -> Tensor:
    """Blocks (N, L) of the text of some modules."""
    text = b"".join((Path(textwrap.__file__).parent / name).read_bytes() for name in ("textwrap.py", "heapq.py"))
    return torch.tensor(list(text[: len(text) // BLOCK * BLOCK])).view(-1, BLOCK)


def main(folder: str = "output/recipes/causal_lm", num_epochs: int = 3) -> Trainer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": BLOCK, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    blocks = source_code()
    config = TrainingConfig(
        output_dir=folder,
        num_epochs=num_epochs,
        batch_size=16,
        optimizer="AdamW",
        learning_rate=3e-3,
        warmup_ratio=0.1,
        max_grad_norm=1.0,
        log_steps=20,
    )
    train_data = ColumnDataset(input_ids=blocks[:-64], labels=blocks[:-64])
    eval_data = ColumnDataset(input_ids=blocks[-64:], labels=blocks[-64:])
    trainer = Trainer(model, config, train_data, eval_data)
    print(trainer.train())  # the loss, and the accuracy of the next byte
    return trainer


if __name__ == "__main__":
    main()
