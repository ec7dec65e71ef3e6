"""Whatever happens to the files of a checkpoint is found, named, and never loaded.

The checkpoints are those of a real run: weights, buffers, Adam's state, schedule, randomness, hooks' memory.
"""

import builtins
import errno
import io
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import MissingFileError
from trainwright.checkpoint import Checkpointer, CheckpointError, folder, verify
from trainwright.cli.main import main

EVERY = 37  # bytes between two flips, as in the measurement of other formats in docs/reliability.md


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(24, 6, generator=generator), torch.randint(3, (24,), generator=generator))


def trainer(folder: Path, *, resume: bool = False) -> Trainer:
    config = TrainingConfig(
        output_dir=folder, num_epochs=3, batch_size=4, save_steps=6, lr_scheduler_type="cosine", progress_bar=False,
        device="cpu", resume_from_checkpoint=resume,
    )  # fmt: skip
    return Trainer(net(), config, data())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trainer(folder).train()
    return folder / "checkpoints"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """The checkpoints 06, 12 and 18."""
    folder = tmp_path / "output" / "checkpoints"
    shutil.copytree(finished, folder, symlinks=True)
    assert sorted(path.name for path in folder.iterdir()) == ["06", "12", "18", "last_checkpoint"]
    return folder


def files(run: Path) -> list[Path]:
    return sorted(path for path in (run / "18").iterdir() if path.name != "README.md")  # which people may edit


def states(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def assert_found(run: Path, name: str) -> None:
    """By the check, and by a load: which changes nothing then."""
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        verify(run / "18")
    model = nn.Linear(1, 1)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        Checkpointer(model).load(run / "18", checkpointables=[])
    assert torch.equal(model.weight, before)


def test_a_checkpoint_of_a_run_has_every_kind_of_file(run: Path) -> None:
    names = {path.name for path in files(run)}
    assert {"manifest.json", "extra.json", "model.safetensors", "optimizer.json", "optimizer.safetensors"} <= names
    assert {"lr_scheduler.json", "trainer.json", "trainer_ranks.safetensors"} <= names


@pytest.mark.slow
def test_a_flipped_bit_is_found_in_every_file_and_the_file_is_named(run: Path) -> None:
    flips = 0
    for path in files(run):
        good = path.read_bytes()
        for number, position in enumerate(range(0, len(good), EVERY)):
            bad = bytearray(good)
            bad[position] ^= 1 << number % 8  # each bit in its turn
            path.write_bytes(bad)
            assert_found(run, path.name)
            flips += 1
        path.write_bytes(good)
    assert flips > 500
    verify(run / "18")


def test_a_truncated_longer_or_deleted_file_is_found_and_named(run: Path) -> None:
    for path in files(run):
        good = path.read_bytes()
        for length in {0, 1, 8, len(good) // 2, 4096, len(good) - 8, len(good) - 1}:
            if 0 <= length < len(good):
                path.write_bytes(good[:length])
                assert_found(run, path.name)
        for longer in (good + b"\0", good + b" ", good + good):
            path.write_bytes(longer)
            assert_found(run, path.name)
        path.unlink()
        assert_found(run, path.name)
        path.write_bytes(good)


def test_two_swapped_files_are_found_and_named(run: Path) -> None:
    paths = [path for path in files(run) if path.name != "manifest.json"]
    for number, first in enumerate(paths):
        for second in paths[number + 1 :]:
            contents = first.read_bytes(), second.read_bytes()
            first.write_bytes(contents[1])
            second.write_bytes(contents[0])
            assert_found(run, first.name)
            assert_found(run, second.name)
            first.write_bytes(contents[0])
            second.write_bytes(contents[1])


def test_a_file_of_another_checkpoint_is_found_also_where_its_size_is_the_same(run: Path) -> None:
    same_size = 0
    for path in files(run):
        good, other = path.read_bytes(), (run / "12" / path.name).read_bytes()
        if good == other:
            continue
        same_size += len(good) == len(other)
        path.write_bytes(other)
        if path.name == "manifest.json":  # a complete one: the error names the files that do not match it
            assert_found(run, "model.safetensors")
        else:
            assert_found(run, path.name)
        path.write_bytes(good)
    assert same_size >= 3


def test_files_that_were_not_saved_are_no_fault_and_are_not_read(run: Path) -> None:
    (run / "18" / "NOTES.md").write_text("what came out")
    (run / "18" / "notes").mkdir()
    (run / "18" / "optimizer.pt").write_bytes(b"what an older tool left")
    verify(run / "18", deep=True)
    assert trainer(run.parent, resume=True).state.global_step == 18


def test_the_run_that_went_back_ends_where_the_whole_one_did(run: Path, finished: Path) -> None:
    (run / "18" / "trainer.json").write_bytes(b"{}")
    trainer(run.parent, resume=True).train()
    for path in (finished / "18").iterdir():
        if path.name.endswith(".safetensors"):
            assert (run / "18" / path.name).read_bytes() == path.read_bytes(), path.name
    verify(run / "18")


def test_all_bad_is_an_error_that_gives_each_reason_and_changes_nothing(run: Path, tmp_path) -> None:
    (run / "06" / "manifest.json").write_bytes(b"{}")
    (run / "12" / "trainer_ranks.safetensors").unlink()
    (run / "18" / "model.safetensors").write_bytes((run / "12" / "model.safetensors").read_bytes())
    before = states(run.parent)
    with pytest.raises(CheckpointError) as raised:
        trainer(run.parent, resume=True)
    lines = str(raised.value).splitlines()
    assert "none of the checkpoints is valid" in lines[0]
    assert any(str(run / "06" / "manifest.json") in line for line in lines)
    twelfth = lines.index(f"{run / '12'}: is damaged.")
    assert lines[twelfth + 1].strip() == "trainer_ranks.safetensors is missing"
    eighteenth = lines.index(f"{run / '18'}: is damaged.")
    assert lines[eighteenth + 1].strip().startswith("model.safetensors has checksum")
    assert states(run.parent) == before
    # An absent folder is a missing file.
    with pytest.raises(MissingFileError, match="nowhere"):
        verify(tmp_path / "nowhere")


NO_DAMAGE = (errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ETIMEDOUT)


class Unreachable:
    """Opening one file fails ``times`` times. A call of the system, so that it does not matter what opens the file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Path, code: int, times: float) -> None:
        self.file, self.code, self.left, self.met = file, code, times, 0
        for module, name in ((builtins, "open"), (io, "open"), (os, "open")):
            monkeypatch.setattr(module, name, self._failing(getattr(module, name)))
        monkeypatch.setattr(folder, "_PAUSE_S", 0)

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, *arguments: Any, **options: Any) -> Any:
            if self.left > 0 and isinstance(path, str | os.PathLike) and Path(path) == self.file:
                self.left -= 1
                self.met += 1
                raise OSError(self.code, os.strerror(self.code), str(path))
            return call(path, *arguments, **options)

        return opened


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "trainer.json"])
@pytest.mark.parametrize("code", NO_DAMAGE, ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read_at_the_first_try_is_read_at_the_second(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, name: str
) -> None:
    disk = Unreachable(monkeypatch, run / "18" / name, code, times=1)
    assert trainer(run.parent, resume=True).start_iter == 18
    assert disk.met == 1
    assert "damaged" not in caplog.text


@pytest.mark.parametrize("has_pointer", [True, False])
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
@pytest.mark.parametrize("code", NO_DAMAGE, ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read_ends_the_resume_with_the_cause(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    name: str,
    has_pointer: bool,
) -> None:
    if not has_pointer:
        (run / "last_checkpoint").unlink()
    before = states(run)
    disk = Unreachable(monkeypatch, run / "18" / name, code, times=float("inf"))
    with pytest.raises(OSError, match=rf"{os.strerror(code)}.*18/{name}") as raised:
        trainer(run.parent, resume=True)
    assert raised.value.errno == code
    assert "move this one away" in "".join(raised.value.__notes__)
    with pytest.raises(OSError, match=os.strerror(code)):
        verify(run / "18")
    assert main(["checkpoint", "list", "--verify", str(run)]) == 1
    assert "18 cannot be read now: a resume raises an error." in capsys.readouterr().out
    disk.left = 0
    assert states(run) == before
    assert trainer(run.parent, resume=True).start_iter == 18


def test_a_folder_that_could_not_be_listed_at_the_start_is_not_one_of_another_process(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, fails = Path.iterdir, True

    def iterdir(path: Path) -> Any:
        if fails and path == run:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    checkpointer = Checkpointer(net(), run)
    with pytest.raises(OSError, match="Too many open files"):
        checkpointer.check_newest()
    fails = False
    checkpointer.check_newest()


def test_weights_are_read_where_the_file_system_has_no_memory_maps(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trainer(run.parent, resume=True)

    def no_map(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(mmap, "mmap", no_map)
    resumed = trainer(run.parent, resume=True)
    assert resumed.start_iter == 18
    for name, value in expected.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value)
    theirs = expected.optimizer.state_dict()["state"]
    for number, state in resumed.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, theirs[number][name]) for name, value in state.items())


@pytest.mark.parametrize("change", ["edited", "deleted"])
def test_a_model_card_is_for_people_who_may_edit_it(run: Path, change: str) -> None:
    card = run / "18" / "README.md"
    if change == "edited":
        card.write_text(card.read_text() + "\nA note.\n")
    else:
        card.unlink()
    verify(run / "18", deep=True)
    assert trainer(run.parent, resume=True).start_iter == 18
