"""The manifest of a checkpoint lists all of its files; one that cannot be right is refused."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from xxhash import xxh3_128_hexdigest

from tests.checkpoint.conftest import look_with_every_command
from trainwright import checkpoint
from trainwright.checkpoint import CheckpointError, verify

# A save is on disk when it returns.
Checkpointer = partial(checkpoint.Checkpointer, asynchronous=False)


@pytest.mark.parametrize(
    "change",
    [
        {"saved_at": 5},
        {"saved_at": "yesterday"},
        {"world_size": "1"},
        {"iteration": "1"},
        {"iteration": [1]},
        {"files": {"model.safetensors": {"bytes": "5", "xxh3_128": "x"}}},
        {"files": {"model.safetensors": {"bytes": True, "xxh3_128": "x"}}},
        {"files": {"model.safetensors": None}},
        {"files": {"..": {"bytes": 5, "xxh3_128": "x"}}},
        {"files": {"": {"bytes": 5, "xxh3_128": "x"}}},
        {"files": {"a\0b": {"bytes": 5, "xxh3_128": "x"}}},
        {"files": {"\ud800": {"bytes": 5, "xxh3_128": "x"}}},
        {"files": {"/etc/passwd": {"bytes": 5, "xxh3_128": "x"}}},
        {"files": []},
    ],
    ids=repr,
)
def test_a_manifest_of_somebody_elses_making_is_refused_and_named(change: dict[str, Any], tmp_path: Path) -> None:
    checkpointer = Checkpointer(nn.Linear(2, 2), tmp_path)
    checkpointer.save("model_0000001", iteration=1)
    path = tmp_path / "model_0000001" / "manifest.json"
    content = {**json.loads(path.read_bytes()), **change}
    del content["manifest_xxh3_128"]
    text = json.dumps(content, indent=1) + "\n"
    signed = {**content, "manifest_xxh3_128": xxh3_128_hexdigest(text.encode())}
    path.write_text(json.dumps(signed, indent=1) + "\n")
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpointer.resume_or_load("")
    look_with_every_command(path.parent)


def test_the_manifest_lists_size_and_checksum_of_every_file(checkpoint):
    content = json.loads((checkpoint / "manifest.json").read_text())
    assert content["iteration"] == 9
    assert content["world_size"] == 1
    assert set(content["files"]) == set(os.listdir(checkpoint)) - {"manifest.json"}
    for name, entry in content["files"].items():
        data = (checkpoint / name).read_bytes()
        assert entry == {"bytes": len(data), "xxh3_128": xxh3_128_hexdigest(data)}


def test_no_manifest_is_an_error_that_says_what_to_do(checkpoint):
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json.*To load only its weights"):
        verify(checkpoint)


def test_a_format_of_the_future_is_named(checkpoint):
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 3'))
    with pytest.raises(CheckpointError, match=r"format 3; this version .* reads 1 and 2\. .*update trainwright"):
        verify(checkpoint)
