"""Reads a run's folder without the library: the checkpoints, whether each is complete, and the newest one."""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

_STEP = re.compile(r"model_\d{7}")
_HIDDEN = re.compile(r"\.model_[a-z0-9]+-\d{7}(-\d+)?")
_TIMES = ("time", "data_time")  # of metrics: what no two runs have alike


@dataclass
class Snapshot:
    """The content of a folder at one moment at which no process wrote.

    Attributes:
        committed: the checkpoint that a resume must take, and its iteration; ("", -1) if there is none.
        steps: the numbered checkpoints, first to last.
        links: what the links point at.
        temporary: the hidden entries that a save writes before it gives them their name.
        faults: entries with a final name that are not complete.
    """

    committed: tuple[str, int] = ("", -1)
    steps: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def look(folder: Path) -> Snapshot:
    found = Snapshot()
    if not folder.is_dir():
        return found
    found.names = sorted(os.listdir(folder))
    manifests: dict[str, dict[str, Any]] = {}
    for name in found.names:
        path = folder / name
        if name.startswith(".tmp-"):
            found.temporary.append(name)
        elif path.is_symlink():
            found.links[name] = os.readlink(path)
        elif _STEP.fullmatch(name) or _HIDDEN.fullmatch(name):
            (found.steps if name[0] != "." else found.hidden).append(name)
            manifests[name] = read_checkpoint(path, found.faults)
    for name, target in found.links.items():
        if os.sep in target or target not in manifests:
            found.faults.append(f"{name} points at {target!r}, which is no checkpoint here")
    found.committed = _committed(folder, found, manifests)
    return found


def _committed(folder: Path, found: Snapshot, manifests: dict[str, dict[str, Any]]) -> tuple[str, int]:
    """What last_checkpoint names, or a newer one that a kill kept from being named there."""
    pointer = folder / "last_checkpoint"
    names = {real: name for name, real in found.links.items()}
    numbered = [
        (manifest.get("sequence", 0), names.get(real, real), manifest)
        for real, manifest in manifests.items()
        if real in names or real in found.steps
    ]
    if pointer.exists():
        name = pointer.read_text()
        real = found.links.get(name, name)
        if real not in manifests:
            found.faults.append(f"last_checkpoint names {name!r}, which is no checkpoint here")
            return name, -1
        last = (manifests[real].get("sequence", 0), name, manifests[real])
        newer = [
            entry
            for entry in numbered
            if entry[0] > last[0] and entry[2].get("previous") == name and entry[2].get("tag_last")
        ]
    else:
        last, newer = (-1, "", {}), [entry for entry in numbered if entry[2].get("tag_last")]
    _, name, manifest = max([last, *newer], key=lambda entry: entry[0])
    return name, manifest.get("iteration", -1)


def read_checkpoint(path: Path, faults: list[str]) -> dict[str, Any]:
    """The manifest of a checkpoint, each file of which is as it says; adds to ``faults`` what is not."""
    try:
        text = (path / "manifest.json").read_text()
        manifest: dict[str, Any] = json.loads(text)
        own = manifest.pop("manifest_xxh3_128")
        if own != xxhash.xxh3_128_hexdigest((json.dumps(manifest, indent=1) + "\n").encode()):
            faults.append(f"{path.name}/manifest.json does not match its checksum")
        files = manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        faults.append(f"{path.name}: no readable manifest ({type(error).__name__}: {error})")
        return {}
    there = set(os.listdir(path)) - {"manifest.json"}
    if there != set(files):
        faults.append(f"{path.name} holds {sorted(there)}, its manifest lists {sorted(files)}")
    for name in there & set(files):
        content = (path / name).read_bytes()
        if (len(content), xxhash.xxh3_128_hexdigest(content)) != (files[name]["bytes"], files[name]["xxh3_128"]):
            faults.append(f"{path.name}/{name} is not what its manifest says")
    return manifest


def metrics(folder: Path) -> tuple[list[dict[str, Any]], bool]:
    """The rows of metrics.json without times, and whether its last line is incomplete.

    Raises:
        ValueError: a line before the last one is no JSON.
    """
    path = folder / "metrics.json"
    if not path.exists():
        return [], False
    *lines, rest = path.read_bytes().split(b"\n")
    rows = [json.loads(line) for line in lines]
    return [{name: value for name, value in row.items() if name not in _TIMES} for row in rows], rest != b""


def trace(path: Path) -> list[dict[str, Any]]:
    """The lines of a project's history."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
