"""LoRA: adapters of peft on a frozen language model of transformers, which learns to write Python.

The base is a small GPT-2 with weights from a seed; with the network it is ``GPT2LMHeadModel.from_pretrained("gpt2")``.
"""

import argparse
import inspect
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from trainwright import Trainer, TrainingConfig
from trainwright.data import ColumnDataset

LENGTH, BATCH, EPOCHS = 32, 8, 2


def data() -> ColumnDataset:
    """Characters of the sources of argparse, in pieces of LENGTH."""
    text = inspect.getsource(argparse).encode("ascii", "replace")[: 64 * LENGTH]
    tokens = torch.tensor(list(text)).view(-1, LENGTH)
    return ColumnDataset(input_ids=tokens, labels=tokens)


def make_base() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def add_adapters(base: GPT2LMHeadModel) -> PeftModel:
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))


def main(folder: str = "output/recipes/finetune_lora") -> Trainer:
    config = TrainingConfig(
        output_dir=folder, num_epochs=EPOCHS, batch_size=BATCH, optimizer="AdamW", lr=1e-2, weight_decay=0.01,
        max_grad_norm=1.0, metrics=[], lr_scheduler_type=None, save_trainable_only=True, device="cpu",
    )  # fmt: skip
    trainer = Trainer(add_adapters(make_base()), config, train_dataset=data())
    trainer.train()
    # The adapters alone, as peft loads them.
    PeftModel.from_pretrained(make_base(), f"{folder}/final_epoch")
    return trainer


if __name__ == "__main__":
    main()
