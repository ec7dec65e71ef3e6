import hashlib

import pytest

from trainwright.checkpoint import CheckpointError, verify
from trainwright.config.errors import MissingFileError


def test_a_whole_checkpoint_passes_also_through_a_link(checkpoint):
    assert verify(checkpoint).iteration == 9
    link = checkpoint.parent / "link"
    link.symlink_to(checkpoint.name)
    assert verify(str(link)).iteration == 9


def test_deep_verification_gives_the_sha256_of_each_file(checkpoint):
    for name, entry in verify(checkpoint, deep=True).files.items():
        assert entry.sha256 == hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()


def test_all_faults_are_said_at_once(checkpoint):
    (checkpoint / "extra.json").unlink()
    size = (checkpoint / "model.safetensors").stat().st_size
    with open(checkpoint / "model.safetensors", "ab") as file:
        file.write(bytes(1_048_576 - size))
    optimizer = checkpoint / "optimizer.json"
    optimizer.write_bytes(optimizer.read_bytes().replace(b"0.1", b"0.2"))
    with pytest.raises(CheckpointError) as raised:
        verify(checkpoint)
    message = str(raised.value)
    assert "extra.json is missing" in message
    assert f"model.safetensors has 1,048,576 bytes, the manifest says {size:,}" in message
    assert "optimizer.json has checksum" in message


def test_an_absent_folder_is_a_missing_file(tmp_path):
    with pytest.raises(MissingFileError, match="nowhere"):
        verify(tmp_path / "nowhere")


def test_files_that_the_manifest_does_not_list_are_no_fault(checkpoint):
    (checkpoint / "README.md").write_text("A model card.")
    verify(checkpoint)
