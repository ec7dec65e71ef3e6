"""What several tests of checkpoints use."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from xxhash import xxh3_128_hexdigest

from trainwright.checkpoint import Checkpointer
from trainwright.checkpoint.manifest import FileEntry, Manifest, read_manifest
from trainwright.checkpoint.safetensors_file import TensorFile
from trainwright.checkpoint.state_files import decode_state, encode_state
from trainwright.cli.main import main


def put(folder: Path, name: str, content: bytes, *, signed: bool) -> None:
    """Put a file into a checkpoint; ``signed`` as an attacker does it, who makes the manifest fit."""
    (folder / name).write_bytes(content)
    if signed and name != "manifest.json":
        manifest = read_manifest(folder)
        files = {**manifest.files, name: FileEntry(len(content), xxh3_128_hexdigest(content))}
        new = Manifest(files, manifest.iteration, manifest.world_size, manifest.saved_at)
        (folder / "manifest.json").write_bytes(new.to_bytes())


def look_with_every_command(folder: Path) -> None:
    for command in (["list"], ["list", "--verify"], ["verify"], ["verify", "--deep"], ["verify", "--json"]):
        assert main(["checkpoint", *command, str(folder.parent)]) in (0, 1)
    assert main(["checkpoint", "show", str(folder)]) in (0, 1)
    assert main(["checkpoint", "show", str(folder), "--json"]) in (0, 1)


def through_files(state, tmp_path):
    """State -> text and a safetensors file -> state."""
    text, tensors = encode_state(state, "state")
    with open(tmp_path / "state.safetensors", "wb") as file:
        TensorFile(tensors)(file)
    return decode_state(text, load_file(tmp_path / "state.safetensors"), "state.json")


@pytest.fixture
def checkpoint(tmp_path):
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Checkpointer(model, tmp_path, optimizer=optimizer, asynchronous=False).save("model_0000009", iteration=9)
    return tmp_path / "model_0000009"


LARGE = 300


class Training:
    """A model with dropout's sibling, batch norm, and an optimizer with state."""

    def __init__(self, optimizer=torch.optim.Adam, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(LARGE, LARGE), nn.BatchNorm1d(LARGE))
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(8, LARGE)).square().mean().backward()
        self.optimizer.step()

    def state(self):
        tensors = [*self.model.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return [tensor.clone() for tensor in tensors]

    def checkpointer(self, path, **options):
        return Checkpointer(self.model, path, optimizer=self.optimizer, **options)
