"""A language model on the bytes of Python's standard library, streamed from tar shards, with exact resume.

python examples/recipes/stream_language_model.py
"""

import io
import sys
import sysconfig
import tarfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright import Trainer, TrainingConfig
from trainwright.data import TarShards

LENGTH = 64  # L, bytes of a sample


def write_shards(folder: Path, num_shards: int = 4, num_files: int = 60) -> str:
    """Pieces of L + 1 bytes of the standard library's sources, in tar files; returns their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:num_files]
    for number in range(num_shards):
        with tarfile.open(folder / f"stdlib-{number}.tar", "w") as tar:
            for source in sources[number::num_shards]:
                text = source.read_bytes()[:20_000]
                for start in range(0, len(text) - LENGTH, LENGTH + 1):
                    piece = tarfile.TarInfo(f"{source.stem}-{start:06d}.bytes")
                    piece.size = LENGTH + 1
                    tar.addfile(piece, io.BytesIO(text[start : start + LENGTH + 1]))
    return str(folder / f"stdlib-{{0..{num_shards - 1}}}.tar")


def tokens(sample: dict[str, bytes]) -> dict[str, Tensor]:
    return {"tokens": torch.frombuffer(bytearray(sample["bytes"]), dtype=torch.uint8).long()}


class ByteModel(nn.Module):
    """B batch, L positions, D features, V = 256 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(128, 256)
        self.recurrent = nn.GRU(64, 128, batch_first=True)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        features_BLD, _ = self.recurrent(self.embedding(tokens[:, :-1]))
        return {"loss": F.cross_entropy(self.head(features_BLD).flatten(0, 1), tokens[:, 1:].flatten())}


def main(folder: str = "output/recipes/stream_language_model", max_steps: int = 120) -> Trainer:
    torch.manual_seed(0)
    data = TarShards(write_shards(Path(folder, "shards")), tokens, shuffle_shards=True)
    config = TrainingConfig(
        output_dir=f"{folder}/run", batch_size=16, lr=3e-3, lr_scheduler_type=None, max_steps=max_steps, save_steps=40,
        shuffle_buffer=512, resume_from_checkpoint=True, early_stopping=None,
    )  # fmt: skip
    trainer = Trainer(ByteModel(), config, train_dataset=data)
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:2])
