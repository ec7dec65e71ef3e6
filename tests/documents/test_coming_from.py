"""The page about other libraries: whatever it says that something is called here is called so."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import TensorDataset

from tests.toys import Classifier, file_config, points
from trainwright import DefaultTrainer, Trainer, TrainingConfig, get_config
from trainwright.cli.commands import COMMANDS
from trainwright.cli.main import main
from trainwright.events.formats import CURVES_NAME
from trainwright.hooks import Callback, TrainerControl

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "coming-from.md"


def our_names() -> Iterator[tuple[str, str]]:
    """Each name in the second column of a table, with the heading above it."""
    heading = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith("|---"):
            cells = re.split(r" ?(?<!\\)\| ?", line)
            for name in re.findall(r"`([^`]+)`", cells[2]):
                yield heading, name


NAMES = sorted(set(our_names()))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """One that has trained 12 steps in one epoch."""
    data = TensorDataset(torch.randn(24, 4), torch.randint(2, (24,)))
    folder = tmp_path_factory.mktemp("objects")
    trainer = Trainer(nn.Linear(4, 2), TrainingConfig(output_dir=folder, batch_size=2, num_epochs=1), data, data)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def saved_by_the_config_api(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a configuration that has trained 10 iterations."""
    folder = tmp_path_factory.mktemp("config")
    cfg = file_config(folder, Classifier, points, points, train_iter=10, train_micro_batch_size=4)
    cfg.train.checkpointer.period = 10
    cfg.train.evaluation.eval_period = 5
    cfg.train.evaluation.evaluator.topk = (1,)
    DefaultTrainer(cfg).train()
    return folder


def is_importable(name: str) -> bool:
    """A dotted name of ours: a module, or what a module holds."""
    room, _, last = name.rpartition(".")
    module = importlib.import_module(room)
    return hasattr(module, last) or importlib.util.find_spec(name) is not None


@pytest.mark.slow
def test_what_it_is_called_here_is_there(
    trainer: Trainer, saved_by_the_config_api: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    usage, defaults = capsys.readouterr().out, get_config("common/defaults.py")

    def exists(heading: str, name: str) -> bool:
        if name.startswith("trainwright ") and name.split()[1] in COMMANDS and name != "trainwright train":
            return True
        if name == "trainwright train" or name.startswith("--"):
            return name in usage
        if method := re.fullmatch(r"trainer\.(\w+)\(\)", name):
            return callable(getattr(trainer, method[1], None))
        if name.startswith("trainwright."):
            return is_importable(name)
        if name.startswith("train."):
            return OmegaConf.select(defaults, name, default=Ellipsis) is not Ellipsis
        if heading == "LiBai":
            return (REPOSITORY / name).is_file() or (saved_by_the_config_api / name).exists()
        return any(is_there(name, trainer))

    assert len(NAMES) > 100
    assert [(heading, name) for heading, name in NAMES if not exists(heading, name)] == []


def is_there(name: str, trainer: Trainer) -> Iterator[bool]:
    """Whether a name is a setting, something of a trainer, of a callback, or a file of a run."""
    output = Path(trainer.config.output_dir)
    yield name in TrainingConfig.model_fields or name in TrainingConfig.aliases
    yield hasattr(trainer, name) or hasattr(trainer.state, name) or name in inspect.signature(Trainer).parameters
    yield hasattr(Callback, name) or hasattr(TrainerControl(), name)
    yield hasattr(importlib.import_module("trainwright.hooks"), name)
    yield any((folder / name).exists() for folder in (output, output / "checkpoints", output / "final_epoch"))
    yield name == CURVES_NAME  # drawn for trainings of at least 30 seconds
    yield name in ("state_dict", "load_state_dict")  # asked for where a callback has them: docs/callbacks.md
