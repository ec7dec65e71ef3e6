"""What is in one checkpoint: its manifest, files, states and extras, and the table of its weights."""

import json
import os
from pathlib import Path
from typing import Any

from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.folder import WEIGHTS_NAME
from trainwright.checkpoint.header import Header, read_header, tied_names
from trainwright.checkpoint.inventory import Found
from trainwright.checkpoint.manifest import MANIFEST_NAME
from trainwright.cli.tables import counted, local_time, shown, size, table

_EXTRA = "extra.json"
_NO_STATES = (_EXTRA, "model_extra.json", MANIFEST_NAME)
_MAX_EXTRA_BYTES = 1_000_000
_MAX_SHOWN = 100  # characters of one extra


def description(found: Found) -> dict[str, Any]:
    """Everything that `show` tells, as JSON can hold it. What cannot be read is None, with its fault."""
    faults = list(found.faults)
    header = _header(found.folder, faults)
    manifest = found.manifest
    sizes = _sizes(found)
    tensors = {} if header is None else header.tensors
    return {
        "path": str(found.path),
        "points_at": found.points_at,
        "iteration": None if manifest is None else manifest.iteration,
        "saved_at": None if manifest is None else manifest.saved_at,
        "world_size": None if manifest is None else manifest.world_size,
        "is_whole": not faults,
        "faults": faults,
        "files": sizes,
        "size_bytes": sum(sizes.values()),
        "states": [name.removesuffix(".json") for name in sizes if name.endswith(".json") and name not in _NO_STATES],
        "extras": _extras(found.folder, faults) if _EXTRA in sizes else None,
        "weights": [
            {"name": name, "shape": list(tensor.shape), "dtype": tensor.dtype} for name, tensor in tensors.items()
        ],
        "tied": {} if header is None else tied_names(header.metadata),
        "num_parameters": sum(tensor.num_values for tensor in tensors.values()),
    }


def show_lines(found: Found, facts: dict[str, Any]) -> list[str]:
    """The same for people."""
    link = "" if found.points_at is None else f" -> {found.points_at}"
    lines = [shown(f"{found.path}{link}: {'whole, by the sizes of its files' if not facts['faults'] else 'NOT WHOLE'}")]
    lines += [f"  {shown(fault)}" for fault in facts["faults"]]
    if found.manifest is not None:
        iteration = facts["iteration"]
        ranks = counted(facts["world_size"], "process", "processes")
        of = "no iteration given" if iteration is None else f"iteration {iteration}"
        lines.append(f"{of}, saved at {local_time(found.saved_at)} by {ranks}")
    if facts["states"]:
        lines.append(f"states: {shown(', '.join(facts['states']))}")
    if facts["extras"]:
        lines.append(f"extras: {', '.join(_pair(name, value) for name, value in facts['extras'].items())}")
    files = [[shown(name), size(num_bytes)] for name, num_bytes in facts["files"].items()]
    lines += ["", *table([["file", "size"], *files, ["in all", size(facts["size_bytes"])]], right={1})]
    if facts["weights"]:
        lines += ["", *_weights_lines(facts)]
    return lines


def _weights_lines(facts: dict[str, Any]) -> list[str]:
    rows = [
        [shown(tensor["name"]), " x ".join(map(str, tensor["shape"])) or "1 number", shown(tensor["dtype"])]
        for tensor in facts["weights"]
    ]
    rows += [[shown(name), f"= {shown(first)}", ""] for name, first in facts["tied"].items()]
    tensors = counted(len(facts["weights"]), "tensor", "tensors")
    parameters = counted(facts["num_parameters"], "parameter", "parameters")
    return [*table([["weights", "shape", "dtype"], *rows]), f"  {tensors}, {parameters} with the buffers"]


def _header(folder: Path, faults: list[str]) -> Header | None:
    try:
        return read_header(folder / WEIGHTS_NAME)
    except CheckpointError as error:
        fault = str(error).removeprefix(f"{folder}{os.sep}")
    except OSError as error:
        fault = f"{WEIGHTS_NAME} cannot be read ({error.strerror})"
    if not any(known.startswith(WEIGHTS_NAME) for known in faults):
        faults.append(fault)
    return None


def _sizes(found: Found) -> dict[str, int]:
    """What the manifest lists, or else what is there."""
    if found.manifest is not None:
        return {name: file.bytes for name, file in found.manifest.files.items()}
    if not found.folder.is_dir():
        return {}
    return {path.name: path.stat().st_size for path in sorted(found.folder.iterdir()) if path.is_file()}


def _extras(folder: Path, faults: list[str]) -> dict[str, Any] | None:
    """The keyword arguments of the save, in the tagged form of the file."""
    path = folder / _EXTRA
    try:
        if not path.is_file() or path.stat().st_size > _MAX_EXTRA_BYTES:
            return None
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if not any(fault.startswith(_EXTRA) for fault in faults):
            faults.append(f"{_EXTRA} cannot be read ({error})")
        return None
    return content if isinstance(content, dict) else None


def _pair(name: str, value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"$float"}:
        value = value["$float"]
    text = value if isinstance(value, str) else json.dumps(value)
    return shown(f"{name} = {text[:_MAX_SHOWN]}")
