"""A run's folder is opened only when nothing can be lost by it."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trainwright.checkpoint.files import is_temporary
from trainwright.config.errors import ConfigError
from trainwright.engine.run_folder import EARLIER_RUNS, RunFolder, keep_other_version

CONFIG = OmegaConf.create({"train": {"resume": True, "seed": 1}})
logger = logging.getLogger("trainwright.test")


@pytest.fixture(autouse=True)
def info_level():
    library = logging.getLogger("trainwright")
    before = library.level
    library.setLevel(logging.INFO)
    yield
    library.setLevel(before)


def earlier_run(folder: Path) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    (folder / "model_0000009").mkdir()
    (folder / "model_0000009" / "manifest.json").write_text("{}")
    (folder / "model_final").symlink_to("model_0000009")
    for name in ("metrics.json", "log.txt", "config.yaml", "last_checkpoint", "events.out.tfevents.1.vm.2"):
        (folder / name).write_text(name)
    return contents(folder)


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_an_empty_folder_is_opened_at_once_with_the_configuration_and_a_log(tmp_path: Path) -> None:
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


def test_a_folder_with_a_run_is_left_alone_until_it_is_opened(tmp_path: Path) -> None:
    before = earlier_run(tmp_path)
    folder = RunFolder(tmp_path, resume=False)
    folder.prepare(CONFIG)
    logger.info("nothing of this may be written")
    folder.close()
    assert not folder.is_open
    assert contents(tmp_path) == before


def test_opening_moves_the_earlier_run_aside_with_its_links_and_nothing_else(tmp_path: Path) -> None:
    before = earlier_run(tmp_path)
    (tmp_path / "notes.md").write_text("mine")
    (tmp_path / "model_zoo").mkdir()
    folder = RunFolder(tmp_path, resume=False)
    folder.prepare(CONFIG)
    folder.open()
    folder.close()
    assert contents(tmp_path / EARLIER_RUNS / "001") == before
    assert (tmp_path / EARLIER_RUNS / "001" / "model_final" / "manifest.json").is_file()  # the link still leads there
    assert (tmp_path / "notes.md").read_text() == "mine"
    assert (tmp_path / "model_zoo").is_dir()
    assert not (tmp_path / "metrics.json").exists()


def test_each_earlier_run_has_a_place_of_its_own(tmp_path: Path) -> None:
    for _ in range(3):
        earlier_run(tmp_path)
        folder = RunFolder(tmp_path, resume=False)
        folder.prepare(CONFIG)
        folder.open()
        folder.close()
    assert sorted(p.name for p in (tmp_path / EARLIER_RUNS).iterdir()) == ["001", "002", "003"]


def test_a_resumed_run_stays_in_place_and_its_log_goes_on(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    folder = RunFolder(tmp_path, resume=True)
    folder.prepare(CONFIG)
    folder.open()
    logger.info("goes on")
    folder.close()
    assert not (tmp_path / EARLIER_RUNS).exists()
    assert (tmp_path / "metrics.json").read_text() == "metrics.json"
    log = (tmp_path / "log.txt").read_text()
    assert log.startswith("log.txt")
    assert log.rstrip().endswith("goes on")


def test_a_folder_that_is_dropped_stops_logging(tmp_path: Path) -> None:
    handlers = list(logging.getLogger("trainwright").handlers)
    folder = RunFolder(tmp_path, resume=False)
    folder.prepare(CONFIG)
    del folder
    assert logging.getLogger("trainwright").handlers == handlers


HOLD = """
import sys, time
from trainwright.config.errors import ConfigError
from trainwright.engine.run_folder import lock_folder
from pathlib import Path
lock_folder(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        folder = RunFolder(tmp_path, resume=True)
        with pytest.raises(ConfigError, match="another run is training"):
            folder.prepare(CONFIG)
        folder.close()
        other.kill()  # however it ends, the folder is free then
    folder = RunFolder(tmp_path, resume=True)
    folder.prepare(CONFIG)
    folder.lock()
    folder.close()


HOLD_AND_FORK = """
import os, sys, time
from trainwright.engine.run_folder import lock_folder
from pathlib import Path
lock_folder(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a worker of a loader is no fork here")
def test_a_worker_that_outlives_its_killed_trainer_does_not_keep_the_folder(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_AND_FORK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match="another run is training"):
            RunFolder(tmp_path, resume=True).check_free()
        trainer.kill()
        trainer.wait()  # its fork reads on until the pipe is closed
        RunFolder(tmp_path, resume=True).check_free()


def test_a_config_that_a_kill_has_left_half_written_is_known_as_such(tmp_path: Path) -> None:
    written: list[str] = []

    def save(path: Path) -> None:
        written.append(path.name)
        path.write_text("seed: 1\n")

    keep_other_version(tmp_path / "config.yaml", save)
    assert is_temporary(written[0])  # so the next start removes it
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_another_config_of_that_name_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("precious: 1\n")
    for seed in (1, 1, 2):
        folder = RunFolder(tmp_path, resume=True)
        folder.prepare(OmegaConf.create({"train": {"seed": seed}}))
        folder.close()
    texts = {p.name: p.read_text() for p in tmp_path.glob("*.yaml")}
    assert sorted(texts) == ["config.1.yaml", "config.2.yaml", "config.yaml"]
    assert texts["config.1.yaml"] == "precious: 1\n"
    assert OmegaConf.create(texts["config.2.yaml"]).train.seed == 1
    assert OmegaConf.create(texts["config.yaml"]).train.seed == 2
