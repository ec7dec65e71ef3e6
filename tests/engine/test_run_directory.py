"""A run's folder is opened only when nothing can be lost by it; only files that runs wrote are replaced or moved."""

import csv
import errno
import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from tests.engine.earlier_run import CONFIG, WRITTEN, contents, earlier_run
from tests.fork_server import python
from tests.toys import Classifier, file_config, points, quiet
from trainwright import DefaultTrainer, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.checkpoint import Checkpointer, CheckpointError
from trainwright.data import ColumnDataset, build_image_train_loader
from trainwright.engine import TrainingLoop
from trainwright.engine.folder.files import RunFiles
from trainwright.engine.folder.run_folder import EARLIER_RUNS, RunFolder

logger = logging.getLogger("trainwright.test")


@pytest.fixture(autouse=True)
def info_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trainwright")


@pytest.mark.parametrize("name", ["$SCRATCH/run", "a${USER}", "5$", "a"])
def test_a_variable_of_the_shell_in_the_name_of_the_folder_is_a_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        RunFolder(tmp_path / name, resume=False)
    assert caplog.text.count("in which no variable is replaced. Write os.path.expandvars") == ("$" in name[:-1])


def opened(folder: Path, *, resume: bool = False) -> RunFolder:
    """The folder as it is when a run in it has begun and ended."""
    found = RunFolder(folder, resume=resume)
    found.prepare(CONFIG)
    found.open()
    found.close()
    return found


def test_an_empty_folder_is_opened_at_once_with_the_configuration_and_a_log(tmp_path: Path) -> None:
    (tmp_path / "new" / "deep").mkdir(parents=True)
    (tmp_path / "new" / "deep" / "log.txt").touch()  # an empty file is free to use
    folder = RunFolder(tmp_path / "new" / "deep", resume=False)
    logger.info("before it was opened")
    folder.prepare(CONFIG)
    logger.info("after")
    folder.close()
    logger.info("after it was closed")
    assert folder.is_open
    saved = OmegaConf.load(tmp_path / "new" / "deep" / "config.yaml")
    assert saved.train == {"seed": 1}  # whether this start resumed is no part of the run
    log = (tmp_path / "new" / "deep" / "log.txt").read_text()
    assert [line.rsplit("] ")[1] for line in log.splitlines()] == ["before it was opened", "after"]


def test_opening_moves_the_earlier_run_aside_with_its_links_and_nothing_else(tmp_path: Path) -> None:
    before = earlier_run(tmp_path)
    (tmp_path / "notes.md").write_text("mine")
    (tmp_path / "model_zoo").mkdir()
    opened(tmp_path)
    moved = contents(tmp_path / EARLIER_RUNS / "001")
    assert json.loads(moved.pop(".trainwright.json"))["files"] == sorted(WRITTEN)
    assert moved == before
    assert (tmp_path / EARLIER_RUNS / "001" / "model_final" / "manifest.json").is_file()  # the link still leads there
    assert (tmp_path / "notes.md").read_text() == "mine"
    assert (tmp_path / "model_zoo").is_dir()
    assert not (tmp_path / "metrics.json").exists()


def test_the_folder_of_an_unfinished_save_is_no_checkpoint(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    whole = next(path for path in sorted(tmp_path.iterdir()) if (path / "manifest.json").is_file())
    unfinished = tmp_path / f".tmp-model_0000009-{os.getpid()}-0123abcd-12345678-1"
    shutil.copytree(whole, unfinished)
    entries = RunFiles(tmp_path, RunFolder.file_names).entries()
    assert whole.name in entries
    assert unfinished.name not in entries


def test_a_resumed_run_stays_in_place_and_its_log_goes_on(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    folder = RunFolder(tmp_path, resume=True)
    folder.prepare(CONFIG)
    folder.open()
    logger.info("continues")
    folder.close()
    assert not (tmp_path / EARLIER_RUNS).exists()
    assert (tmp_path / "metrics.json").read_text() == WRITTEN["metrics.json"]
    log = (tmp_path / "log.txt").read_text()
    assert log.startswith(WRITTEN["log.txt"])
    assert log.rstrip().endswith("continues")


def test_a_folder_that_is_dropped_stops_logging(tmp_path: Path) -> None:
    handlers = list(logging.getLogger("trainwright").handlers)
    folder = RunFolder(tmp_path, resume=False)
    folder.prepare(CONFIG)
    del folder
    assert logging.getLogger("trainwright").handlers == handlers


HOLD = """
import os, sys
from trainwright.engine.folder.run_folder import RunFolder
from pathlib import Path
folder = RunFolder(Path(sys.argv[1]), resume=True)
folder.lock()
if sys.argv[2] == "forks" and os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a worker of a loader is no fork here")
@pytest.mark.parametrize("worker", ["", "forks"])
def test_a_folder_in_which_another_process_trains_is_refused(worker: str, tmp_path: Path) -> None:
    """Until it ends, however it does; a worker that outlives its killed trainer does not keep the folder."""
    earlier_run(tmp_path)
    command = [python(), "-c", HOLD, str(tmp_path), worker]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        process = int(other.stdout.readline())
        folder = RunFolder(tmp_path, resume=True)
        with pytest.raises(ConfigError, match=r"^train\.output_dir: another run is training"):
            folder.prepare(CONFIG)
        folder.close()
        os.kill(process, signal.SIGKILL)
        other.wait()  # its fork reads on until the pipe is closed
        RunFolder(tmp_path, resume=True).check_free()
        folder = RunFolder(tmp_path, resume=True)
        folder.prepare(CONFIG)
        folder.lock()
        folder.close()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    folder = RunFolder(tmp_path, resume=True)
    folder.prepare(CONFIG)
    folder.lock()
    folder.close()
    (line,) = [record.getMessage() for record in caplog.records if "no locks" in record.getMessage()]
    assert str(tmp_path) in line


def test_a_run_that_another_trainer_has_continued_is_not_trained_from_an_older_state(tmp_path: Path) -> None:
    def trainer(epochs: int) -> Trainer:
        config = TrainingConfig(output_dir=str(tmp_path), batch_size=4, num_epochs=epochs, resume_from_checkpoint=True)
        return Trainer(Classifier(), config, train_dataset=points(8))

    trainer(1).train()
    older, newer = trainer(2), trainer(4)
    newer.train()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"checkpoints.8: saved by another"):
        older.train()
    assert sorted(tmp_path.rglob("*")) == before
    newer.train()  # its own state is the newest


def test_the_config_of_another_start_is_kept(tmp_path: Path) -> None:
    for seed in (0, 1, 1, 2):
        folder = RunFolder(tmp_path, resume=True)
        folder.prepare(OmegaConf.create({"train": {"seed": seed}}))
        folder.close()
    seeds = {p.name: OmegaConf.load(p).train.seed for p in tmp_path.glob("*.yaml")}
    assert seeds == {"config.1.yaml": 0, "config.2.yaml": 1, "config.yaml": 2}
    assert json.loads((tmp_path / ".trainwright.json").read_text())["files"][:3] == sorted(seeds)


def test_a_folder_that_cannot_be_made_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"train\.output_dir: .*run .*Not a directory"):
        RunFolder(tmp_path / "file" / "run", resume=False).prepare(CONFIG)
    with pytest.raises(ConfigError, match=r"train\.output_dir: .*file' is a file"):
        RunFolder(tmp_path / "file", resume=False).prepare(CONFIG)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["config.yaml", "log.txt", "metrics.json", "last_checkpoint"])
def test_a_file_that_no_run_wrote_is_refused_by_name(tmp_path: Path, name: str, resume: bool) -> None:
    (tmp_path / name).write_text("precious things: 1\n")
    folder = RunFolder(tmp_path, resume=resume)
    with pytest.raises(ConfigError, match=rf"train.output_dir: .*no run wrote.*: {name}\. Move or rename"):
        folder.prepare(CONFIG)
    folder.close()
    assert contents(tmp_path) == {name: "precious things: 1\n"}


USERS_OWN = {
    "model_zoo/a.txt": "1",
    "model_0000007/weights.txt": "1",
    "metrics.json.bak": "{}",
    "log.txt.notes": "1",
    "config.mine.yaml": "train: {consumed_train_samples: 0}",
    "profile/me.py": "1",
    "events.out.tfevents.txt": "1",
    "README.md": "# mine",
    "profile/rank0_of_mine.pt.trace.json": "{}",
}


@pytest.mark.parametrize("has_list", [False, True])
def test_what_no_run_wrote_is_not_moved(tmp_path: Path, has_list: bool) -> None:
    before = earlier_run(tmp_path)
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rank0.12.pt.trace.json").write_text("{}")
    before["profile/rank0.12.pt.trace.json"] = "{}"
    if has_list:
        folder = RunFolder(tmp_path, resume=True)
        folder.files.add([])
        folder.close()
    for name, text in USERS_OWN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "model_link").symlink_to("model_0000009")
    (tmp_path / "circle").symlink_to("circle")
    shutil.copytree(tmp_path / "model_0000009", tmp_path / "model_backup")
    opened(tmp_path)
    moved = contents(tmp_path / EARLIER_RUNS / "001")
    moved.pop(".trainwright.json")
    assert moved == before
    assert (tmp_path / "model_link").is_symlink()
    assert (tmp_path / "circle").is_symlink()
    assert (tmp_path / "model_backup" / "manifest.json").is_file()
    now = contents(tmp_path)
    assert {name: now[name] for name in USERS_OWN} == USERS_OWN


@pytest.mark.parametrize("content", ["", "null", "[]", "{", "[" * 100_000, '{"files": ["../escape"]}', "\x00\xff"])
def test_a_damaged_list_is_none(tmp_path: Path, content: str) -> None:
    before = earlier_run(tmp_path / "run")
    (tmp_path / "escape").write_text("1")
    (tmp_path / "run" / ".trainwright.json").write_text(content)
    opened(tmp_path / "run")
    moved = contents(tmp_path / "run" / EARLIER_RUNS / "001")
    moved.pop(".trainwright.json")
    assert moved == before
    assert (tmp_path / "escape").is_file()


def move_aside(root: Path, left: int) -> None:
    """In a process that is killed by its operation number ``left``."""

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in ("rename", "replace", "mkdir", "rmdir", "fsync", "open", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    RunFiles(root, RunFolder.file_names).move_aside()
    os._exit(0)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a process that can be killed at once")
def test_a_move_that_is_killed_at_any_operation_is_undone_or_completed_by_the_next_start(tmp_path: Path) -> None:
    ends = set()
    for operations in count():
        root = tmp_path / str(operations)
        before = earlier_run(root)
        pid = os.fork()
        if pid == 0:
            try:
                move_aside(root, operations)
            finally:
                os._exit(1)
        status = os.waitpid(pid, 0)[1]
        assert status in (0, signal.SIGKILL)
        folder = RunFolder(root, resume=True)
        folder.recover()
        folder.close()
        there, moved = contents(root), contents(root / EARLIER_RUNS / "001")
        moved.pop(".trainwright.json", None)
        is_moved = moved == before
        assert is_moved or (moved == {} and {name: there[name] for name in before} == before)
        assert folder.holds_a_run() is not is_moved
        ends.add(is_moved)
        if status == 0:
            break
    assert operations > 20
    assert ends == {False, True}


class Leaving(nn.Module):
    """Changes the working folder in its third forward pass, as a library or a cell of a notebook may."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(4, 2), 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.passes += 1
        if self.passes == 3:
            os.chdir("elsewhere")
        return {"loss": self.layer(x).square().mean()}


@pytest.mark.parametrize("api", ["Trainer", "config file", "TrainingLoop"])
def test_a_changed_working_folder_changes_no_folder_of_the_run(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    data = ColumnDataset(x=torch.randn(32, 4))
    if api == "Trainer":
        Trainer(Leaving(), quiet("run", batch_size=4, num_epochs=1, save_steps=2), data).train()
    elif api == "config file":
        cfg = file_config(Path("run"), Leaving, lambda: data, train_micro_batch_size=4, train_iter=8, log_period=2)
        cfg.train.checkpointer.period = 2
        DefaultTrainer(cfg).train()
    else:
        model, loader = Leaving(), build_image_train_loader(data, 4, num_workers=0)[0]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in TrainingLoop(model, optimizer, loader, max_iter=8, output_dir="run", save_period=2, log_period=2):
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not [*(tmp_path / "elsewhere").iterdir()]
    files = {path.name for path in (tmp_path / "run").rglob("*")}
    assert {"metrics.json", "last_checkpoint"} <= files
    assert [row["iteration"] for row in map(json.loads, (tmp_path / "run/metrics.json").read_text().splitlines())][
        -1
    ] > 3


def small_run(folder: Path, **settings: Any) -> Trainer:
    config = TrainingConfig(
        output_dir=str(folder), batch_size=4, num_epochs=4, log_steps=1, save_steps=2, progress_bar=False, device="cpu",
        **settings,
    )  # fmt: skip
    return Trainer(Classifier(), config, train_dataset=points(8), eval_dataset=points(8))


def test_the_umask_gives_the_rights_of_each_file(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        small_run(tmp_path, tensorboard={"log_dir": None, "comment": ""}, hardest_samples=2).train()
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"metrics.json", "log.txt", "losses.csv", "run.json", "model.safetensors"} <= {path.name for path in files}
    assert {str(path) for path in files if stat.S_IMODE(path.stat().st_mode) != 0o664} == set()


@pytest.mark.parametrize("stops_at", [4, 8])  # in the middle, and at the end of a run that is continued
def test_a_resume_says_that_rows_of_metrics_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stops_at: int
) -> None:
    small_run(tmp_path, max_steps=stops_at).train()
    file = tmp_path / "metrics.json"
    rows = file.read_text().splitlines(keepends=True)
    file.write_text("".join(rows[:2]) + rows[2][:9])
    trainer = small_run(tmp_path, max_steps=8 if stops_at == 4 else 12, resume_from_checkpoint=True)
    trainer.config.num_epochs = 6
    trainer.train()
    (said,) = [record.getMessage() for record in caplog.records if "They are lost" in record.getMessage()]
    assert str(file) in said
    assert f"has no rows of the iterations 3 to {stops_at - 1}" in said


def test_a_resume_whose_metrics_are_complete_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for steps, log_steps in ((3, 1), (5, 1), (8, 1)):
        config = {"max_steps": steps, "resume_from_checkpoint": True}
        trainer = small_run(tmp_path, **config)
        trainer.config.log_steps = log_steps
        trainer.train()
    assert "They are lost" not in caplog.text
    assert [json.loads(line)["iteration"] for line in (tmp_path / "metrics.json").read_text().splitlines()] == [
        *range(9)
    ]


def test_a_long_cell_of_the_hardest_samples_loses_no_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small_run(tmp_path, max_steps=4, hardest_samples=2).train()
    file, limit = tmp_path / "hardest_samples.csv", csv.field_size_limit()
    before = file.read_text()
    rows = list(csv.DictReader(before.splitlines()))
    long = {**rows[0], "name": "word " * 40_000}  # longer than what Python reads by default
    with file.open("a", newline="") as end:
        csv.DictWriter(end, list(long)).writerow(long)
    small_run(tmp_path, hardest_samples=2, resume_from_checkpoint=True).train()
    assert not (tmp_path / "hardest_samples.csv.old").exists()
    assert file.read_text().startswith(before)
    assert long["name"] in file.read_text()
    assert csv.field_size_limit() == limit  # it is that of the process


@pytest.mark.parametrize(("old", "new"), [(",", ";"), ("dataset", "datasev"), ("name", "naie"), ("iteration,", "")])
def test_a_changed_header_of_the_hardest_samples_ends_nothing_and_loses_no_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, old: str, new: str
) -> None:
    small_run(tmp_path, max_steps=4, hardest_samples=2).train()
    file = tmp_path / "hardest_samples.csv"
    text = file.read_text()
    file.write_text(text.replace(old, new))
    small_run(tmp_path, hardest_samples=2, resume_from_checkpoint=True).train()
    assert (tmp_path / "hardest_samples.csv.old").read_text() == text.replace(old, new)
    assert "hardest_samples.csv: its columns are not iteration, dataset" in caplog.text
    assert file.read_text().startswith(text.partition("\n")[0])


def test_two_trainings_in_a_folder_without_locks_notice_each_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = f"""
        import fcntl, torch
        def refuse(*_): raise OSError(95, "Operation not supported")
        fcntl.flock = refuse
        from torch import nn
        from trainwright.checkpoint import Checkpointer
        Checkpointer(nn.Linear(1, 1), {str(tmp_path)!r}, asynchronous=False).save("model_0000001", iteration=1)
    """
    ours = Checkpointer(nn.Linear(1, 1), tmp_path, asynchronous=False)
    ours.save("model_0000000", iteration=0)
    assert "another process" not in caplog.text
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
    ours.save("model_0000002", iteration=2)
    ours.save("model_0000003", iteration=3)
    assert caplog.text.count("another process saves checkpoints here") == 1
