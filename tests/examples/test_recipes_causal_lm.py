"""The recipe of a language model has the losses and weights of a plain loop."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

from trainwright.data.seeding import permutation

RECIPE = runpy.run_path(str(Path(__file__).parents[2] / "examples/recipes/causal_lm.py"))


def by_hand(num_epochs: int) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model, losses = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)), []
    blocks = RECIPE["source_code"]()[:-64]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, fused=True)
    num_updates = num_epochs * (len(blocks) // 16)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, -(-num_updates // 10), num_updates)
    torch.manual_seed(42)
    model.train()
    for epoch in range(num_epochs):
        for rows in permutation(len(blocks), 42, epoch)[: len(blocks) // 16 * 16].split(16):
            loss = model(input_ids=blocks[rows], labels=blocks[rows]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
            losses.append(loss.item())
    return model, losses


@pytest.mark.exhaustive
def test_losses_and_weights_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    trainer = RECIPE["main"](str(tmp_path), 1)
    model, losses = by_hand(1)
    assert [value for value, _ in trainer.storage.history("total_loss").values()] == losses
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert losses[-1] < losses[0] / 1.5
