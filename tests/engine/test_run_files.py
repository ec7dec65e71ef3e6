"""Only files that runs wrote are replaced or moved; a move that is interrupted is completed."""

import logging
import os
import shutil
import signal
import sys
from itertools import count
from pathlib import Path

import pytest

from tests.engine.earlier_run import CONFIG, contents, earlier_run
from trainwright.config.errors import ConfigError
from trainwright.engine.folder.run_folder import EARLIER_RUNS, RunFolder


@pytest.fixture(autouse=True)
def info_level():
    library = logging.getLogger("trainwright")
    before = library.level
    library.setLevel(logging.INFO)
    yield
    library.setLevel(before)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["config.yaml", "log.txt", "metrics.json", "last_checkpoint"])
def test_a_file_that_no_run_wrote_is_refused_by_name(tmp_path: Path, name: str, resume: bool) -> None:
    (tmp_path / name).write_text("precious things: 1\n")
    folder = RunFolder(tmp_path, resume=resume)
    with pytest.raises(ConfigError, match=rf"train.output_dir: .*no run wrote.*: {name}\. Move or rename"):
        folder.prepare(CONFIG)
    folder.close()
    assert contents(tmp_path) == {name: "precious things: 1\n"}


def test_an_empty_file_is_free_to_use(tmp_path: Path) -> None:
    (tmp_path / "log.txt").touch()
    folder = RunFolder(tmp_path, resume=False)
    folder.prepare(CONFIG)
    folder.close()
    assert folder.is_open


USERS_OWN = {
    "model_zoo/a.txt": "1",
    "model_0000007/weights.txt": "1",
    "metrics.json.bak": "{}",
    "log.txt.notes": "1",
    "config.mine.yaml": "train: {consumed_train_samples: 0}",
    "profile/me.py": "1",
    "events.out.tfevents.txt": "1",
    "README.md": "# mine",
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
    folder = RunFolder(tmp_path, resume=False)
    folder.prepare(CONFIG)
    folder.open()
    folder.close()
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
    folder = RunFolder(tmp_path / "run", resume=False)
    folder.prepare(CONFIG)
    folder.open()
    folder.close()
    moved = contents(tmp_path / "run" / EARLIER_RUNS / "001")
    moved.pop(".trainwright.json")
    assert moved == before
    assert (tmp_path / "escape").is_file()


MOVE = """
import os, sys
left = int(sys.argv[2])
def counted(name):
    real = getattr(os, name)
    def call(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        return real(*args, **kwargs)
    setattr(os, name, call)
from trainwright.engine.folder.files import RunFiles
from trainwright.engine.folder.run_folder import RunFolder
from pathlib import Path
for name in ("rename", "replace", "mkdir", "rmdir", "fsync", "open", "unlink"):
    counted(name)
RunFiles(Path(sys.argv[1]), RunFolder.layout).move_aside()
os._exit(0)
"""


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
                sys.argv = ["", str(root), str(operations)]
                exec(MOVE, {"__name__": "move"})
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
