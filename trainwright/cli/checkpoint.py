"""Inspect and export checkpoints: ``trainwright checkpoint list|show|verify|export PATH``.

All but ``export`` are read-only; torch is used only for ``export`` and ``--deep``. ``list`` and ``verify`` also take
the URL of a mirror.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainwright.base.errors import ConfigError, missing_path
from trainwright.base.files import read_regular
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.folder import POINTER_NAME, WEIGHTS_NAME, is_checkpoint
from trainwright.checkpoint.manifest import MANIFEST_NAME
from trainwright.checkpoint.mirror_store import shown_url
from trainwright.checkpoint.shard_index import INDEX_NAME, Index, read_index
from trainwright.checkpoint.verify import (
    CheckpointReport,
    FolderReport,
    checkpoint_paths,
    inspect_checkpoint,
    inspect_folders,
    with_other_names,
)
from trainwright.config.arguments import CommandsParser
from trainwright.inspect.report.run_state import config_file
from trainwright.inspect.report.text import cell, counted, local_time, print_found, shown, size, table

_EXTRA = "extra.json"
_NO_STATES = (_EXTRA, "model_extra.json", MANIFEST_NAME)
_FILE_SUFFIXES = (".onnx", ".pt2", ".pt", ".pth", ".ckpt", ".bin", ".safetensors")
_MAX_SHOWN = 100  # characters of one extra


def description(found: CheckpointReport) -> dict[str, Any]:
    """The facts that `show` prints, as JSON values. Unreadable values are None, with a fault."""
    faults = list(found.faults)
    index = _index(found, faults)
    sizes = _sizes(found)
    return {
        **_facts(found),
        "is_whole": not faults,
        "faults": faults,
        "files": sizes,
        "size_bytes": sum(sizes.values()),
        "states": [name.removesuffix(".json") for name in sizes if name.endswith(".json") and name not in _NO_STATES],
        "extras": _extras(found.folder) if _EXTRA in sizes else None,
        "weights": [
            {"name": name, "shape": list(tensor.shape), "dtype": tensor.dtype}
            for name, tensor in sorted(index.tensors.items())
        ],
        "tied": index.tied,
        "num_parameters": sum(tensor.num_values for tensor in index.tensors.values()),
    }


def show_lines(found: CheckpointReport, facts: dict[str, Any]) -> list[str]:
    link = "" if found.points_at is None else f" -> {found.points_at}"
    lines = [shown(f"{found.path}{link}: {'complete, by file sizes' if not facts['faults'] else 'NOT COMPLETE'}")]
    lines += [f"  {shown(fault)}" for fault in facts["faults"]]
    if found.manifest is not None:
        iteration = facts["iteration"]
        ranks = counted(facts["world_size"], "process", "processes")
        of = "no iteration" if iteration is None else f"after {iteration + 1} iterations"
        grid = ", ".join(f"{name} {number}" for name, number in (facts["layout"] or {}).items() if number > 1)
        lines.append(f"{of}, saved at {local_time(found.saved_at)} by {ranks}{shown(f' ({grid})' if grid else '')}")
    if facts["states"]:
        lines.append(f"states: {shown(', '.join(facts['states']))}")
    if facts["extras"]:
        extras = {
            name: one["$float"] if isinstance(one, dict) and set(one) == {"$float"} else one
            for name, one in facts["extras"].items()
        }
        lines.append(f"extras: {', '.join(f'{shown(name)} = {cell(extras[name], _MAX_SHOWN)}' for name in extras)}")
    files = [[shown(name), size(num_bytes)] for name, num_bytes in facts["files"].items()]
    lines += ["", *table([["file", "size"], *files, ["total", size(facts["size_bytes"])]], right={1})]
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


def _index(found: CheckpointReport, faults: list[str]) -> Index:
    listed = () if found.manifest is None else found.manifest.files
    try:
        return read_index(found.folder, "model", listed if INDEX_NAME in listed else (WEIGHTS_NAME,))
    except CheckpointError as error:
        fault = str(error).removeprefix(f"{found.folder}").lstrip(f"{os.sep}: ")
    except OSError as error:
        fault = f"{Path(error.filename or WEIGHTS_NAME).name} cannot be read ({error.strerror})"
    if not any(fault.startswith(known.partition(" ")[0]) for known in faults):
        faults.append(fault)
    return Index({}, {}, {})


def _sizes(found: CheckpointReport) -> dict[str, int]:
    """The files that the manifest lists, or those in the folder if there is no manifest."""
    if found.manifest is not None:
        return {name: file.bytes for name, file in found.manifest.files.items()}
    if not found.folder.is_dir():
        return {}
    return {path.name: path.stat().st_size for path in sorted(found.folder.iterdir()) if path.is_file()}


def _extras(folder: Path) -> dict[str, Any] | None:
    """The keyword arguments of the save, in the tagged form of the file."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_regular(folder / _EXTRA))
        return content if isinstance(content, dict) else None
    return None


COMPLETE, FAULTY = 0, 1

_EPILOG = "exit code: 0 all complete, 1 some incomplete or damaged, 2 wrong path or argument"


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    return int(args.run(args.path if "://" in args.path else _existing(args.path), args))


def parser() -> CommandsParser:
    commands = CommandsParser(prog="trainwright checkpoint", epilog=_EPILOG)
    text = "the checkpoints of a run, and the one that --resume uses"
    listing = commands.add_command("list", _list, "FOLDER [--verify] [--json]", text)
    listing.add_argument("--verify", action="store_true", help="read the files too, instead of only their sizes")
    text = "the contents of one: files, states, weights"
    show = commands.add_command("show", _show, "CHECKPOINT [--json]", text)
    show.add_argument("path", metavar="CHECKPOINT", help="a checkpoint")
    text = "read one, or all of a run, and compare every byte with the checksums"
    verify = commands.add_command("verify", _verify, "PATH [--deep] [--json]", text)
    verify.add_argument("--deep", action="store_true", help="also read each state back, and print sha256 sums")
    text = "write the weights as one file: of a checkpoint, or of the one that --resume uses"
    export = commands.add_command("export", _export, "PATH [--output FOLDER] [--json]", text)
    text = "a new folder; by default NAME-export in the working folder, with the name of PATH"
    export.add_argument("--output", metavar="FOLDER", type=Path, help=text)
    for one in (listing, verify, export):
        also = "; or the URL of a mirror" if one in (listing, verify) else ""
        one.add_argument("path", metavar="PATH", help=f"the folder of a run, or one checkpoint{also}")
    for one in (listing, show, verify, export):
        one.add_common("json")
    return commands


def _list(folder: Path | str, args: argparse.Namespace) -> int:
    if isinstance(folder, Path) and _is_one(folder):
        raise ConfigError(f"{folder}: is one checkpoint: use `trainwright checkpoint show {folder}`.")
    found = _folders(folder, contents=args.verify)
    facts = [
        {
            "folder": _title(place, folder),
            "checkpoints": [_facts(entry) for entry in place.found],
            "resume": None if place.resumed is None else place.resumed.path.name,
            POINTER_NAME: place.last,
            "pointer_fault": place.pointer_fault or None,
        }
        for place in found
    ]
    named = with_other_names(entry for place in found for entry in place.found)
    lines = [line for place in found for line in _place_lines(place, folder, named)]
    if not lines and isinstance(folder, Path):
        from trainwright.cli.run_folder import run_folders

        run = next(run_folders(folder), None)
        lines = [f"{folder}: no checkpoints.{f' It has runs: pass one of them, such as {run}.' if run else ''}"]
    print_found(facts, lines or [f"{folder}: no checkpoints."], as_json=args.json)
    are_complete = (not place.pointer_fault and all(entry.is_complete for entry in place.found) for place in found)
    return COMPLETE if all(are_complete) else FAULTY


def _folders(folder: Path | str, *, contents: bool, deep: bool = False) -> list[FolderReport]:
    """The folders of checkpoints of a run, or its mirror."""
    if isinstance(folder, Path):
        return inspect_folders(folder, contents=contents, deep=deep)
    if deep:
        raise ConfigError(f"--deep: not for a mirror. Download {shown_url(folder)}, and verify the folder.")
    from trainwright.checkpoint.mirror_report import inspect_mirror

    return [inspect_mirror(folder, contents=contents, setting="PATH")]


def _of_folder(folder: Path | str, command: str) -> Path:
    if isinstance(folder, str):
        raise ConfigError(
            f"{shown_url(folder)}: `trainwright checkpoint {command}` takes a folder; list and verify, a URL too."
        )
    return folder


def _show(folder: Path | str, args: argparse.Namespace) -> int:
    folder = _of_folder(folder, "show")
    if not _is_one(folder):
        names = [str(path) for path in checkpoint_paths(folder)]
        hint = f" It contains checkpoints: pass one of them, such as {names[-1]}." if names else ""
        raise ConfigError(f"{folder}: not a checkpoint.{hint}")
    found = inspect_checkpoint(folder, contents=False)
    facts = description(found)
    print_found(facts, show_lines(found, facts), as_json=args.json)
    return FAULTY if facts["faults"] else COMPLETE


def _verify(folder: Path | str, args: argparse.Namespace) -> int:
    if isinstance(folder, Path) and _is_one(folder):
        found, pointer_faults = [inspect_checkpoint(folder, deep=args.deep)], {}
    else:
        in_places = _folders(folder, contents=True, deep=args.deep)
        found = [entry for place in in_places for entry in place.found]
        pointer_faults = {place.folder / POINTER_NAME: place.pointer_fault for place in in_places}
        pointer_faults = {path: fault for path, fault in pointer_faults.items() if fault}
    if not found and not pointer_faults:
        raise ConfigError(f"{folder}: contains no checkpoint to verify.")
    facts = [_facts(entry, with_files=True) for entry in found]
    lines = [line for entry in found for line in _verdict(entry, deep=args.deep)]
    if found or args.json:
        print_found(facts, lines, as_json=args.json)
    for path, fault in pointer_faults.items():
        print(f"{shown(path)}: BAD: {shown(fault)}", file=sys.stderr if args.json else sys.stdout)
    return COMPLETE if all(entry.is_complete for entry in found) and not pointer_faults else FAULTY


def _export(path: Path | str, args: argparse.Namespace) -> int:
    path = _of_folder(path, "export")
    from trainwright.checkpoint.export import export_weights

    resumed = [] if _is_one(path) else [place.resumed.path for place in inspect_folders(path) if place.resumed]
    if not resumed and not _is_one(path):
        raise ConfigError(f"{path}: contains no complete checkpoint to export.")
    checkpoint = resumed[0] if resumed else path
    folder = args.output or Path(f"{path.resolve().name}-export")
    if folder.suffix in _FILE_SUFFIXES:
        in_python = f"; in Python, trainer.export({str(folder)!r})" if folder.suffix in (".onnx", ".pt2") else ""
        raise ConfigError(f"--output: got {str(folder)!r}; it is a folder, which gets {WEIGHTS_NAME}{in_python}.")
    tensors = export_weights(checkpoint, folder)
    num_bytes = (folder / WEIGHTS_NAME).stat().st_size
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    what = f"{counted(len(tensors), 'tensor', 'tensors')}, {size(num_bytes)}"
    lines = [f"{shown(checkpoint)}: {what} in {shown(folder / WEIGHTS_NAME)}"]
    lines += [f"  also {shown(name)}" for name in files if name != WEIGHTS_NAME]
    facts = {"checkpoint": str(checkpoint), "folder": str(folder), "files": files}
    print_found(facts, lines, as_json=args.json)
    return COMPLETE


def _existing(text: str) -> Path:
    """The folder, or the link to a deleted one."""
    path = Path(text)
    if path.is_dir() or path.is_symlink():
        return path
    if path.exists():
        near = "the folder of the checkpoint" if is_checkpoint(path.parent) else "the folder of a run"
        is_near = is_checkpoint(path.parent) or config_file(path.parent) is not None
        raise ConfigError(f"{path}: is a file; pass {near}{f': {str(path.parent)!r}' if is_near else ''}")
    raise missing_path(path, "no such folder.")


def _is_one(path: Path) -> bool:
    return is_checkpoint(path) or not path.exists()


def _title(place: FolderReport, asked: Path | str) -> str:
    return str(place.folder) if isinstance(asked, Path) else shown_url(asked)


_Named = list[tuple[CheckpointReport, list[CheckpointReport]]]


def _place_lines(place: FolderReport, folder: Path | str, named: _Named) -> list[str]:
    """``named``: the checkpoints of all places, each with its links, which may be in another place."""
    own = [(entry, links) for entry, links in named if entry in place.found]
    lines = []
    if own or place.pointer_fault:
        lines = [f"{shown(_title(place, folder))}: {counted(len(own), 'checkpoint', 'checkpoints')}"]
    if own:
        head = ["name", "iteration", "saved at", "size", "ranks", "complete", ""]
        rows = [_row(entry, links, is_resumed=place.resumed in (entry, *links)) for entry, links in own]
        lines += table([head, *rows], right={1, 3, 4})
    lines += [f"  {shown(entry.path.name)}: {shown(fault)}" for entry, _ in own for fault in entry.faults]
    if place.pointer_fault:
        lines.append(f"  {POINTER_NAME}: {shown(place.pointer_fault)}")
    if place.has_candidates and place.resumed is None:
        unknown = next((entry.path.name for entry in place.found if entry.is_unknown), None)
        why = "None of them is complete" if unknown is None else f"{shown(unknown)} cannot be read now"
        lines.append(f"  {why}: a resume raises an error.")
    return lines


def _row(entry: CheckpointReport, links: list[CheckpointReport], *, is_resumed: bool) -> list[str]:
    """The row of a checkpoint in the table of its place."""
    manifest = entry.manifest
    iteration = "?" if manifest is None else "-" if manifest.iteration is None else str(manifest.iteration)
    ranks = "?" if manifest is None else str(manifest.world_size)
    notes = [f"-> {entry.points_at}"] if entry.points_at is not None else []
    notes += [f"also {', '.join(link.path.name for link in links)}"] if links else []
    notes += ["<- a resume uses this one"] if is_resumed else []
    facts = [iteration, local_time(entry.saved_at), size(entry.size_bytes), ranks]
    return [shown(entry.path.name), *facts, "yes" if entry.is_complete else "NO", shown("  ".join(notes))]


def _facts(entry: CheckpointReport, *, with_files: bool = False) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": entry.path.name,
        "path": str(entry.path),
        "points_at": entry.points_at,
        **{name: getattr(entry.manifest, name, None) for name in ("iteration", "saved_at", "world_size", "layout")},
        "size_bytes": entry.size_bytes,
        "is_whole": entry.is_complete,
        "faults": list(entry.faults),
    }
    if with_files:
        files = {} if entry.manifest is None else entry.manifest.files
        facts["files"] = {
            name: {"bytes": file.bytes, "xxh3_128": file.xxh3_128, "sha256": file.sha256}
            for name, file in files.items()
        }
    return facts


def _verdict(entry: CheckpointReport, *, deep: bool) -> list[str]:
    """One line, and with ``deep`` one for each file, in the format of ``sha256sum --check``."""
    if not entry.is_complete:
        return [f"{shown(entry.path)}: BAD: {'; '.join(shown(fault) for fault in entry.faults)}"]
    assert entry.manifest is not None, "without a manifest there is a fault"
    files = entry.manifest.files
    line = f"{shown(entry.path)}: complete ({counted(len(files), 'file', 'files')}, {size(entry.size_bytes)})"
    sums = [f"{file.sha256}  {shown(entry.path / name)}" for name, file in files.items()] if deep else []
    return [line, *sums]
