"""The recipe of a streamed language model: the losses of a plain loop over the same batches, and an exact resume."""

import random
import runpy
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainwright.data.seeding import ORDER_STREAM, mixed_seed

RECIPE = runpy.run_path(str(Path(__file__).parents[2] / "examples/recipes/stream_language_model.py"))
STEPS = 12


def batches(folder: Path) -> Iterator[torch.Tensor]:
    """Shards in the order of the seed, samples shuffled in blocks of 512, 16 a batch: by tarfile and random alone."""
    shards = sorted(folder.glob("*.tar"))
    random.Random(mixed_seed(0, ORDER_STREAM, 0)).shuffle(shards)
    pieces = []
    for shard in shards:
        with tarfile.open(shard) as tar:
            pieces += [tar.extractfile(member).read() for member in tar]  # type: ignore[union-attr]
    order = list(range(512))
    random.Random(mixed_seed(mixed_seed(42, ORDER_STREAM, 0, 0), ORDER_STREAM, 0, 0)).shuffle(order)
    for start in range(0, 16 * STEPS, 16):
        yield torch.tensor([list(pieces[number]) for number in order[start : start + 16]])


def test_the_losses_are_those_of_a_plain_loop_and_a_resume_is_exact(tmp_path: Path) -> None:
    trainer = RECIPE["main"](str(tmp_path / "whole"), STEPS)
    torch.manual_seed(0)
    model = RECIPE["ByteModel"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    for tokens in batches(tmp_path / "whole" / "shards"):
        model(tokens)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(trainer.model, model)

    def cut(steps: int) -> Any:
        return RECIPE["main"](str(tmp_path / "cut"), steps).model

    cut(5)
    assert_equal(cut(STEPS), model)


def assert_equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, value), (_, expected) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(value, expected), name
