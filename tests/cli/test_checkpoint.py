"""``trainwright checkpoint list|show|verify``: what people and programs see of a folder of checkpoints."""

import hashlib
import json
import shutil
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from xxhash import xxh3_128_hexdigest

from trainwright import Trainer, TrainingConfig
from trainwright.checkpoint import Checkpointer, keep_newest
from trainwright.checkpoint.manifest import FileEntry, Manifest, read_manifest
from trainwright.checkpoint.verify import file_faults
from trainwright.cli.main import main

Command = Callable[..., tuple[str, str]]


@pytest.fixture
def checkpoint(capsys: pytest.CaptureFixture[str]) -> Command:
    """``checkpoint(*arguments, code=0)`` gives what the command printed on its two streams."""

    def run(*arguments: object, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        try:
            found = main(["checkpoint", *map(str, arguments)])
        except SystemExit as error:  # argparse's way out
            found = error.code
        said = capsys.readouterr()
        assert found == code, said.out + said.err
        return said.out, said.err

    return run


@pytest.fixture
def run(finished: Any, tmp_path: Path) -> Path:
    """model_0000029, 44 and 59; model_best, model_final (onto 59)."""
    folder = tmp_path / "output"
    shutil.copytree(finished.folder, folder, symlinks=True)
    return folder


@pytest.fixture(scope="module")
def objects_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoints/04 and /08 of the Python API."""
    folder = tmp_path_factory.mktemp("objects") / "output"
    data = TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
    config = TrainingConfig(output_dir=folder, num_epochs=2, batch_size=4, progress_bar=False, device="cpu")
    Trainer(nn.Linear(4, 2), config, data).train()
    return folder


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def save(model: nn.Module, path: Path, **extra: Any) -> None:
    checkpointer = Checkpointer(model, path.parent)
    checkpointer.save(path.name, iteration=1, **extra)
    checkpointer.wait()


def line_of(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if name in line.split())


# list


def test_list_shows_each_name_of_a_run_and_the_one_that_a_resume_takes(checkpoint: Command, run: Path) -> None:
    said, _ = checkpoint("list", run)
    assert said.splitlines()[0] == f"{run}: 5 checkpoints"
    for name in ("model_0000029", "model_0000044", "model_0000059", "model_best", "model_final"):
        assert " yes" in line_of(said, name)
    manifest = read_manifest(run / "model_0000029")
    saved_at = datetime.fromisoformat(manifest.saved_at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    size = sum(entry.bytes for entry in manifest.files.values())
    assert f"29  {saved_at}  {size / 1e6:.1f} MB      1  yes" in line_of(said, "model_0000029")
    assert "-> .model_final-" in line_of(said, "model_final")
    assert "-> .model_best-" in line_of(said, "model_best")
    taken = [line.split()[0] for line in said.splitlines() if "a resume uses this one" in line]
    assert taken == [(run / "last_checkpoint").read_text()]


def test_list_and_verify_show_a_run_of_the_python_api(checkpoint: Command, objects_run: Path) -> None:
    names = sorted(path.name for path in (objects_run / "checkpoints").glob("[0-9]*"))
    assert names
    for inside in ("", "checkpoints"):
        said, _ = checkpoint("list", objects_run / inside)
        assert all(line_of(said, name) for name in names)
        assert "a resume uses this one" in line_of(said, names[-1])
    said, _ = checkpoint("list", objects_run)
    listed = [line.split()[0] for line in said.splitlines()]
    assert (said.count("checkpoints:"), listed.count(names[-1])) == (1, 1)  # links are no checkpoints of their own
    also = line_of(said, names[-1]).partition("  also ")[2]
    assert {"final_epoch", "epoch_2"} <= {*also.partition("  ")[0].split(", ")}
    assert "None of them" not in said
    (place, inner) = json.loads(checkpoint("list", objects_run, "--json")[0])
    assert (place["resume"], inner["resume"]) == (None, names[-1])
    paths = [*(objects_run / "checkpoints").glob("[0-9]*"), *objects_run.glob("*epoch*")]
    verified = {line.split(": ")[0] for line in checkpoint("verify", objects_run)[0].splitlines()}
    assert verified >= {str(path) for path in paths}


def test_list_for_programs(checkpoint: Command, run: Path) -> None:
    (place,) = json.loads(checkpoint("list", run, "--json")[0])
    assert place["resume"] == place["last_checkpoint"] == "model_final"
    assert place["pointer_fault"] is None
    entries = {entry["name"]: entry for entry in place["checkpoints"]}
    assert [entry["iteration"] for entry in place["checkpoints"]][:2] == [29, 44]
    assert entries["model_final"]["points_at"] == ".model_final-0000059"
    assert entries["model_0000029"]["saved_at"] == read_manifest(run / "model_0000029").saved_at
    assert all(entry["is_whole"] and entry["world_size"] == 1 for entry in entries.values())


def test_list_finds_by_size_or_with_verify_by_content(checkpoint: Command, run: Path) -> None:
    with open(run / "model_0000029" / "optimizer.json", "ab") as file:
        file.write(b" ")
    for name in ("model_0000059", "model_final"):  # one file in a run; two in this copy of one
        flip(run / name / "model.safetensors")
    said, _ = checkpoint("list", run, code=1)
    assert " NO" in line_of(said, "model_0000029")
    assert "model_0000029: optimizer.json has" in said
    assert " yes" in line_of(said, "model_final")

    said, _ = checkpoint("list", run, "--verify", code=1)
    for name in ("model_0000059", "model_final"):
        assert " NO" in line_of(said, name)
        assert f"{name}: model.safetensors has checksum" in said
    assert "a resume uses this one" not in line_of(said, "model_final")


def test_list_marks_the_checkpoint_that_a_resume_uses(checkpoint: Command, run: Path) -> None:
    (run / "model_0000059" / "extra.json").unlink()
    (place,) = json.loads(checkpoint("list", run, "--json", code=1)[0])
    model = nn.Module()
    chosen = place["resume"]
    checkpointer = Checkpointer(model, run)
    with pytest.raises(Exception, match=str(run / chosen)):  # it is another model, and is named
        checkpointer.resume_or_load("")


@pytest.mark.parametrize(
    ("content", "says"),
    [("model_0000060", "names 'model_0000060'"), ("../x", "contains '../x', which is not a checkpoint name")],
)
def test_a_bad_pointer_is_reported(checkpoint: Command, run: Path, content: str, says: str) -> None:
    (run / "last_checkpoint").write_text(content)
    said, _ = checkpoint("list", run, code=1)
    assert f"last_checkpoint: {says}" in said
    assert "a resume uses this one" in said
    said, _ = checkpoint("verify", run, code=1)
    assert f"{run / 'last_checkpoint'}: BAD: {says}" in said
    for weights in run.glob("*/model.safetensors"):
        weights.write_bytes(b"")
    assert "None of them is complete" in checkpoint("list", run, code=1)[0]


def test_an_empty_folder_has_no_checkpoints(checkpoint: Command, tmp_path: Path) -> None:
    assert checkpoint("list", tmp_path)[0] == f"{tmp_path}: no checkpoints.\n"
    assert json.loads(checkpoint("list", tmp_path, "--json")[0]) == []


def test_a_link_to_nothing_is_bad_and_named(checkpoint: Command, run: Path) -> None:
    shutil.rmtree((run / "model_best").resolve())
    said, _ = checkpoint("list", run, code=1)
    assert " NO" in line_of(said, "model_best")
    assert "does not exist" in said
    assert "model_best: BAD: .model_best-" in checkpoint("verify", run / "model_best", code=1)[0]
    checkpoint("show", run / "model_best", code=1)


# show


def test_show_lists_the_contents_of_a_checkpoint(checkpoint: Command, run: Path) -> None:
    said, _ = checkpoint("show", run / "model_best")
    assert "model_best -> .model_best-" in said.splitlines()[0]
    assert "by 1 process" in said
    assert "states: lr_scheduler, optimizer, trainer\n" in said
    assert "extras: iteration = " in said
    assert "Acc@1 = " in said
    assert line_of(said, "linear_relu_stack.0.weight").endswith("  512 x 784  F32")
    assert "6 tensors, 669,706 parameters" in said
    for path in (run / "model_best").iterdir():
        if path.name != "manifest.json":
            assert line_of(said, path.name)


def test_show_for_programs(checkpoint: Command, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(2, 3))
    model[2].weight = model[0].weight
    save(model.bfloat16(), tmp_path / "model_0000001", note="x" * 200, loss=float("nan"))
    facts = json.loads(checkpoint("show", tmp_path / "model_0000001", "--json")[0])
    state = model.state_dict()
    assert {w["name"]: w["shape"] for w in facts["weights"]} == {
        name: list(value.shape) for name, value in state.items() if name != "2.weight"
    }
    assert {w["dtype"] for w in facts["weights"]} == {"BF16", "I64"}
    assert facts["tied"] == {"2.weight": "0.weight"}
    assert facts["num_parameters"] == sum(value.numel() for name, value in state.items() if name != "2.weight")
    assert facts["extras"] == {"iteration": 1, "note": "x" * 200, "loss": {"$float": "nan"}}
    assert facts["states"] == []
    said, _ = checkpoint("show", tmp_path / "model_0000001")
    assert "loss = nan" in said
    assert line_of(said, "2.weight").split() == ["2.weight", "=", "0.weight"]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"format": 1}', b"[" * 100_000])
def test_a_damaged_manifest_hides_nothing_else(checkpoint: Command, run: Path, content: bytes) -> None:
    (run / "model_0000029" / "manifest.json").write_bytes(content)
    said, _ = checkpoint("show", run / "model_0000029", code=1)
    assert "NOT COMPLETE" in said
    assert "manifest" in said.splitlines()[1]
    assert line_of(said, "optimizer.safetensors")
    assert "669,706 parameters" in said
    assert "manifest" in line_of(checkpoint("verify", run / "model_0000029", code=1)[0], "BAD:")
    assert " NO" in line_of(checkpoint("list", run, code=1)[0], "model_0000029")


def test_a_name_from_a_file_cannot_drive_the_terminal(checkpoint: Command, tmp_path: Path) -> None:
    folder = tmp_path / "model_0000001"
    save(nn.Linear(1, 1), folder)
    entries = dict(read_manifest(folder).files)
    entries["a\x1b[2Jb\n"] = FileEntry(1, "\x1b]0;x\x07")
    (folder / "manifest.json").write_bytes(Manifest(entries, 1, 1, "2026-11-21T00:00:00+00:00").to_bytes())
    for command in ("list", "show", "verify"):
        said, _ = checkpoint(command, tmp_path if command == "list" else folder, code=1)
        assert "\x1b" not in said
        assert r"a\x1b[2Jb\n" in said


# verify


def test_verify_reads_one_or_all(checkpoint: Command, run: Path) -> None:
    assert checkpoint("verify", run / "model_final")[0].startswith(f"{run / 'model_final'}: complete (7 files, ")
    assert len(checkpoint("verify", run)[0].splitlines()) == 5
    flip(run / "model_0000044" / "optimizer.safetensors")
    (run / "model_0000044" / "extra.json").unlink()
    good_and_bad, _ = checkpoint("verify", run, code=1)
    assert good_and_bad.count(": complete (") == 4
    bad = line_of(good_and_bad, "BAD:")
    assert bad.startswith(f"{run / 'model_0000044'}: BAD: ")
    assert "extra.json is missing" in bad
    assert "optimizer.safetensors has checksum" in bad
    checkpoint("verify", run / "model_0000029")
    checkpoint("verify", run / "model_0000044", code=1)


def test_verify_deep_prints_sums_that_another_program_can_check(checkpoint: Command, run: Path) -> None:
    _, *lines = checkpoint("verify", run / "model_0000029", "--deep")[0].splitlines()
    found = dict(reversed(line.split("  ")) for line in lines)
    files = [path for path in (run / "model_0000029").iterdir() if path.name != "manifest.json"]
    assert found == {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (run / "model_0000044" / "extra.json").unlink()
    entries = {entry["name"]: entry for entry in json.loads(checkpoint("verify", run, "--json", code=1)[0])}
    assert entries["model_0000044"]["faults"] == ["extra.json is missing"]
    assert entries["model_0000029"]["files"]["extra.json"]["sha256"] is None
    (entry,) = json.loads(checkpoint("verify", run / "model_0000029", "--deep", "--json")[0])
    for path in files:
        assert entry["files"][path.name]["sha256"] == found[str(path)]


def test_verify_deep_finds_a_state_that_was_written_wrongly(checkpoint: Command, tmp_path: Path) -> None:
    folder = tmp_path / "model_0000001"
    save(nn.Linear(1, 1), folder)
    (folder / "extra.json").write_text('{"$unknown":1}')
    entries = {**read_manifest(folder).files, "extra.json": FileEntry(14, xxh3_128_hexdigest(b'{"$unknown":1}'))}
    (folder / "manifest.json").write_bytes(Manifest(entries, 1, 1, "2026-11-21T00:00:00+00:00").to_bytes())
    checkpoint("verify", folder)
    assert "extra.json: not a state of this library" in checkpoint("verify", folder, "--deep", code=1)[0]


# wrong paths and arguments


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["lst", "output"], ["no command 'lst'", "Did you mean 'list'?"]),
        (["list", "outptu"], ["outptu: no such folder.", "Did you mean 'output'?"]),
        (["show", "output/model_000029"], ["Did you mean 'output/model_0000029'?"]),
        (["verify", "nowhere/at/all"], ["nowhere: no such folder."]),
        (["show", "output"], ["output: not a checkpoint.", "such as output/model_"]),
        (["list", "output/model_best"], ["is one checkpoint", "trainwright checkpoint show output/model_best"]),
        (["show", "output/model_best/model.safetensors"], ["is a file", "'output/model_best'"]),
        (["verify", "empty"], ["contains no checkpoint"]),
        (["verify", "output", "--dep"], ["'--dep'", "Did you mean '--deep'?"]),
        (["verify"], ["PATH"]),
        (["show", "output", "model_best"], ["model_best"]),
    ],
)
def test_a_wrong_argument_exits_2_and_suggests_the_right_one(
    checkpoint: Command, run: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], facts: list[str]
) -> None:
    monkeypatch.chdir(run.parent)
    (run.parent / "empty").mkdir()
    said, wrong = checkpoint(*arguments, code=2)
    assert said == ""
    for fact in facts:
        assert fact in wrong
    assert "Traceback" not in wrong


# beside a run


def test_looking_changes_nothing(checkpoint: Command, run: Path, contents: Callable) -> None:
    (run / ".tmp-model_0000074-1-00000000-1-0").mkdir()  # of a process that may run on another machine
    (run / ".tmp-model_0000074-1-00000000-1-0" / "model.safetensors").write_bytes(b"half")
    before = contents(run)
    for arguments in (["list"], ["list", "--verify"], ["verify"], ["verify", "--deep"]):
        assert ".tmp-" not in checkpoint(*arguments, run)[0]
    checkpoint("show", run / "model_final")
    assert contents(run) == before


def test_a_folder_that_is_being_written_in_is_never_called_bad(checkpoint: Command, tmp_path: Path) -> None:
    model = nn.Linear(20, 20)
    checkpointer = Checkpointer(model, tmp_path)
    checkpointer.save("model_0000000", iteration=0)
    checkpointer.wait()
    stop = threading.Event()

    def write() -> None:
        for iteration in range(1, 100_000):
            checkpointer.save(f"model_{iteration:07d}", iteration=iteration)
            with torch.no_grad():
                model.weight += 1
            checkpointer.save("model_best", iteration=iteration)
            checkpointer.wait()
            keep_newest(tmp_path, "model", 2)
            if stop.is_set():
                return

    writing = threading.Thread(target=write)
    writing.start()
    try:
        for _ in range(40):
            said, _ = checkpoint("verify", tmp_path)
            assert "BAD" not in said
            said, _ = checkpoint("list", tmp_path)
            assert "a resume uses this one" in said
    finally:
        stop.set()
        writing.join()


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Callable[[], object]], None]:
    """``meanwhile(folder, act)``: ``act`` happens, once, when that checkpoint's files are about to be looked at."""

    def when(folder: Path, act: Callable[[], object]) -> None:
        still_to_do = [act]

        def look(there: Path, *arguments: Any, **how: Any) -> Any:
            if there == folder.resolve() and still_to_do:
                still_to_do.pop()()
            return file_faults(there, *arguments, **how)

        monkeypatch.setattr(sys.modules["trainwright.checkpoint.verify"], "file_faults", look)

    return when


@pytest.mark.parametrize("command", ["list", "verify"])
def test_one_that_is_deleted_while_it_is_looked_at_is_left_out(
    checkpoint: Command, run: Path, meanwhile: Callable, command: str
) -> None:
    meanwhile(run / "model_0000029", lambda: shutil.rmtree(run / "model_0000029"))
    said, _ = checkpoint(command, run)
    assert "model_0000029" not in said
    assert "model_0000044" in said


def test_a_link_that_moves_while_it_is_looked_at_is_looked_at_again(
    checkpoint: Command, run: Path, meanwhile: Callable
) -> None:
    old = (run / "model_best").resolve()

    def save_again() -> None:
        shutil.copytree(run / "model_0000044", run / ".model_best-0000074")
        (run / "model_best").unlink()
        (run / "model_best").symlink_to(".model_best-0000074")
        shutil.rmtree(old)

    meanwhile(old, save_again)
    assert "model_best: complete" in checkpoint("verify", run / "model_best")[0]


def test_no_command_loads_torch_except_deep(run_python: Callable, run: Path) -> None:
    code = (
        "import sys\nfrom trainwright.cli.main import main\n"
        f"for arguments in (['--help'], ['checkpoint', 'list', r'{run}', '--verify'],"
        f" ['checkpoint', 'show', r'{run / 'model_best'}'], ['checkpoint', 'verify', r'{run}']):\n"
        "    assert main(arguments) == 0\n"
        "    assert not {'torch', 'numpy', 'pydantic', 'hydra'} & set(sys.modules), arguments\n"
    )
    run_python("-c", code, cwd=run, fresh=True)


def test_a_mirror_is_listed_and_verified(tmp_path: Path, checkpoint: Command) -> None:
    url, model = f"file://{tmp_path}/mirror", nn.Linear(4, 2)
    saved = Checkpointer(model, tmp_path / "run", mirror=url)
    for iteration in range(2):
        saved.save(f"model_{iteration:07d}", iteration=iteration)
        saved.wait()
        saved.mirror._background.wait()  # type: ignore[union-attr]
    saved.save("model_best", tag_last=False, iteration=1, accuracy=0.5)
    saved.close()
    out, _ = checkpoint("list", url)
    assert out.startswith(f"{url}: 3 checkpoints")
    assert [line.split()[0] for line in out.splitlines() if "a resume uses" in line] == ["model_0000001"]
    out, _ = checkpoint("verify", url)
    assert out.count("complete (2 files") == 3
    assert len(json.loads(checkpoint("verify", url, "--json")[0])) == 3

    (newest,) = (tmp_path / "mirror").glob("model_0000001.*")
    content = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    checkpoint("list", url)
    out, _ = checkpoint("verify", url, code=1)
    assert "model_0000001: BAD: model.safetensors has checksum" in out
    (newest / "model.safetensors").unlink()
    assert "model.safetensors is missing" in checkpoint("list", url, code=1)[0]
    assert "takes a folder" in checkpoint("show", url, code=2)[1]
    assert "contains no checkpoint" in checkpoint("verify", f"file://{tmp_path}/nothing", code=2)[1]
