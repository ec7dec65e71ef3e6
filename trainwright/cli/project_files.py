"""The files of a new project. ``PROJECT`` is replaced by its name, ``PACKAGE`` by that of its Python package."""

_DATA = '''\
"""The data: points on three spirals. Replace it by your own."""

import torch
CLASS_IMPORT


def spirals(number: int, seed: int) -> DATASET:
    """``number`` points (x, y), labelled with the number of their spiral: 0, 1 or 2."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % 3
    radius = torch.rand(number, generator=draw)
    angle = labels * 2 * torch.pi / 3 + 4 * radius + 0.15 * torch.randn(number, generator=draw)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return DATASET(ARGUMENTS)
'''

_MODEL = '''\
"""The model: replace it by your own."""

import torch
from torch import nn


class Classifier(nn.Module):
    """Scores of three classes for points of the plane."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        )

'''

_CONFIG_FORWARD = '''\
    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arguments are the fields of a sample. The output "loss" is minimized, other losses are only logged."""
        scores = self.layers(points)
        return {"loss": nn.functional.cross_entropy(scores, labels), "prediction_scores": scores}
'''

_PYTHON_FORWARD = """\
    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.layers(points)
"""

_CONFIG = '''\
"""The run: `trainwright train config.py`; single values change on the command line: `optim.lr=1e-3 model.width=32`."""

import torch
from trainwright import LazyCall, get_config
from trainwright.data import build_image_test_loader, build_image_train_loader
from trainwright.optim import get_default_optimizer_params

from PACKAGE.data import spirals
from PACKAGE.model import Classifier

model = LazyCall(Classifier)(width=64)
dataloader = dict(
    train=LazyCall(build_image_train_loader)(dataset=LazyCall(spirals)(number=3000, seed=0), num_workers=0),
    test=[LazyCall(build_image_test_loader)(dataset=LazyCall(spirals)(number=600, seed=1), num_workers=0)],
)
optim = LazyCall(torch.optim.AdamW)(params=LazyCall(get_default_optimizer_params)(), lr=0.01)
train = get_config("common/train.py").train
train.update(output_dir="output/PROJECT", train_epoch=20, train_micro_batch_size=64, log_period=100)
train.evaluation.update(eval_after_n_epoch=2, evaluator=dict(topk=[1]))
# train.callbacks = [LazyCall(MyCallback)()]  # code of your own during a training; train.hooks for hooks
'''

_TRAIN = '''\
"""The run: `python train.py`."""

from trainwright import Trainer, TrainingConfig

from PACKAGE.data import spirals
from PACKAGE.model import Classifier


def build_trainer(**settings: object) -> Trainer:
    """The trainer, which `trainwright eval RUN --trainer train.py` uses too. ``settings`` replace those below."""
    values = dict(output_dir="output/PROJECT", num_epochs=20, batch_size=64, learning_rate=0.01)
    config = TrainingConfig(**{**values, **settings})
    return Trainer(Classifier(), config, spirals(3000, seed=0), spirals(600, seed=1))


if __name__ == "__main__":
    print(build_trainer().train())
'''

_CONFIG_TEST = '''\
"""The project trains: `python -m pytest`."""

import json
from pathlib import Path

from trainwright.cli.main import main

CONFIG = Path(__file__).parents[1] / "config.py"


def test_a_short_run_learns(tmp_path: Path) -> None:
    settings = ["train.train_epoch=4", "train.log_period=10", f"train.output_dir={tmp_path}"]
    assert main(["train", str(CONFIG), *settings]) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    losses = [row["total_loss"] for row in rows if "total_loss" in row]
    assert losses[-1] < 0.7 * losses[0]
'''

_PYTHON_TEST = '''\
"""The project trains: `python -m pytest`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from train import build_trainer


def test_a_short_run_learns(tmp_path: Path) -> None:
    results = build_trainer(num_epochs=4, output_dir=tmp_path).train()
    assert results["accuracy"] > 0.5  # guessing: 0.33
'''

_README = """\
# PROJECT

```bash
TRAIN_COMMANDS
python -m pytest                  # a short run, as a test
```

| file | contents |
|---|---|
| RUN_FILE | the settings of the run |
| PACKAGE/data.py, PACKAGE/model.py | the data and the model |
| tests/ | tests |
| output/ | what runs write; not in git |
"""

_CONFIG_COMMANDS = """\
trainwright train config.py       # add --resume to continue, --fast-dev-run to try everything quickly
trainwright train config.py optim.lr=1e-3 train.output_dir=output/lower_lr
trainwright runs output           # all runs
trainwright eval output/PROJECT   # metrics of the best checkpoint"""

_PYTHON_COMMANDS = """\
python train.py
trainwright runs output           # all runs
trainwright eval output/PROJECT --trainer train.py"""


def project_files(name: str, package: str, api: str) -> dict[str, str]:
    """The files of a project by their paths. ``api``: "config" or "python"."""
    is_config = api == "config"
    data = {
        "CLASS_IMPORT": "from trainwright.data import ColumnDataset"
        if is_config
        else "from torch.utils.data import TensorDataset",
        "DATASET": "ColumnDataset" if is_config else "TensorDataset",
        "ARGUMENTS": "points=points, labels=labels" if is_config else "points, labels",
    }
    readme = {
        "TRAIN_COMMANDS": _CONFIG_COMMANDS if is_config else _PYTHON_COMMANDS,
        "RUN_FILE": "config.py" if is_config else "train.py",
    }
    files = {
        "README.md": _filled(_README, readme),
        ".gitignore": "output/\n__pycache__/\n",
        f"{package}/__init__.py": "",
        f"{package}/data.py": _filled(_DATA, data),
        f"{package}/model.py": _MODEL + (_CONFIG_FORWARD if is_config else _PYTHON_FORWARD),
        "config.py" if is_config else "train.py": _CONFIG if is_config else _TRAIN,
        "tests/test_training.py": _CONFIG_TEST if is_config else _PYTHON_TEST,
    }
    return {path: _filled(text, {"PROJECT": name, "PACKAGE": package}) for path, text in files.items()}


def _filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text
