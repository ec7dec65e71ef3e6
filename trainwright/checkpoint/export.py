"""The weights of a checkpoint as one file, written tensor by tensor, with the files that other programs read."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from trainwright.base.errors import ConfigError
from trainwright.base.files import clean_sibling, commit_folder, make_folders
from trainwright.checkpoint.folder import WEIGHTS_NAME
from trainwright.checkpoint.manifest import FOR_PEOPLE
from trainwright.checkpoint.safetensors_file import TensorFile, bytes_of
from trainwright.checkpoint.safetensors_header import TIED
from trainwright.checkpoint.shard_index import INDEX_NAME, state_of
from trainwright.checkpoint.shards import ShardReader, StoredTensor
from trainwright.checkpoint.state_files import EXTRA, MODEL, MODEL_EXTRA, OF_RANKS, state_names
from trainwright.checkpoint.verify import read_unchanged, verify


def export_weights(checkpoint: Path, folder: Path) -> dict[str, StoredTensor]:
    """Write ``model.safetensors`` and the attached files of a checkpoint, such as ``config.json``, to a new folder.

    One process reads a checkpoint of any layout; at most one tensor is in memory. Returns what was written.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists; export to a new folder.")
    make_folders(folder.parent)
    return read_unchanged(checkpoint, lambda found: _export(found, folder))


def _export(checkpoint: Path, folder: Path) -> dict[str, StoredTensor]:
    manifest = verify(checkpoint)
    reader = ShardReader(checkpoint, MODEL, manifest.files)
    tensors = {name: StoredTensor(reader, name, entry) for name, entry in reader.index.tensors.items()}
    copies = {name: first for name, first in reader.index.copies.items() if name in tensors and first in tensors}
    for name in copies:  # of a weight that several pipeline stages hold: other programs expect it once
        del tensors[name]
    tied = {name: copies.get(first, first) for name, first in reader.index.tied.items()} | copies
    metadata = {TIED: json.dumps(tied)} if tied else {}
    temporary = clean_sibling(folder)
    try:
        temporary.mkdir()
        with open(temporary / WEIGHTS_NAME, "xb") as file:
            _write(tensors, metadata, file)
        states = {MODEL, EXTRA, MODEL_EXTRA, *state_names(manifest)}
        states |= {f"{name}{OF_RANKS}" for name in states} | {os.path.splitext(INDEX_NAME)[0]}
        others = (n for n in manifest.files if os.path.splitext(n)[0] not in states and state_of(n) not in states)
        for name in (name for name in others if name not in FOR_PEOPLE or (checkpoint / name).is_file()):
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint / name, temporary / name)
        commit_folder(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return tensors


def _write(tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str], file: BinaryIO) -> None:
    metas = {name: stored.meta() for name, stored in tensors.items()}
    stored_of = {id(meta): tensors[name] for name, meta in metas.items()}
    layout = TensorFile(metas, metadata)
    file.write(layout.header)
    for meta, begin, end in layout.places:
        if begin < end:
            file.write(bytes_of(stored_of[id(meta)].whole()))
