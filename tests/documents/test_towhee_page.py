"""The page about Towhee's trainer: its examples in their order, as one notebook, and what it prints below them."""

import ast
import contextlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import Trainer, TrainingConfig

_TRAINER = {
    "from towhee.trainer.trainer import Trainer": "from trainwright import Trainer",
    "from towhee.trainer.training_config import TrainingConfig": "from trainwright import TrainingConfig",
}
IMPORTS: dict[str, dict[str, str]] = {
    "train_model": _TRAINER,
    "train_operator": {"import towhee": "import trainwright as towhee"},
    "custom_callback": {"from towhee.trainer.callback import Callback": "from trainwright.hooks import Callback"},
    "list_metrics": {"from towhee.trainer.metrics import TMMetrics": "from trainwright.evaluation import TMMetrics"},
}
# In the order of the page.
CELLS = [
    "train_model", "train_operator", "save_and_load", "tensorboard", "custom_callback", "metric", "list_metrics",
    "custom_optimizer", "custom_loss", "sub_trainer1", "sub_trainer2",
]  # fmt: skip
NUMBER = r"\d+\.\d+(?:e-?\d+)?"


class Cell:
    """What a cell has printed, logged, and shown as the value of its last line."""

    def __init__(self, printed: str, logged: list[logging.LogRecord], shown: Any, names: dict[str, Any]) -> None:
        self.lines = [line for line in printed.splitlines() if line]
        self.logged = logged
        self.shown = shown
        self.names = names

    def epochs(self) -> list[tuple[str, ...]]:
        """Of each printed line the epoch, the name of its counter and the count."""
        return [m.groups() for line in self.lines if (m := re.match(r"epoch=(\d)/2, (\w+)=(\d+), ", line))]

    def config(self) -> str:
        """The configuration that was logged when training began."""
        return next(r.getMessage() for r in self.logged if r.getMessage().startswith("TrainingConfig("))


@pytest.fixture(scope="module")
def notebook(page_text: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Cell]]:
    names: dict[str, Any] = {"__name__": "__main__"}
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("trainwright").addHandler(handler)
    cells = {}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), torch.random.fork_rng():
        patch.chdir(tmp_path_factory.mktemp("notebook"))
        for name in CELLS:
            records.clear()
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                source = page_text(f"towhee/{name}", imports=IMPORTS.get(name))
                # Pictures of 64 x 64 pixels instead of 224 x 224 take a tenth of the time.
                shown = run_cell(source.replace("FakeData(", "FakeData(image_size=(3, 64, 64), "), names)
            cells[name] = Cell(printed.getvalue(), list(records), shown, dict(names))
        cells["folder"] = Cell("", [], Path.cwd(), {})
        yield cells
    logging.getLogger("trainwright").removeHandler(handler)


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell of a notebook; the value of its last line, if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "page", "exec"), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), "page", "eval"), names)


def test_a_model_is_trained_with_the_lines_of_the_page(notebook: dict[str, Cell]) -> None:
    cell = notebook["train_model"]
    assert cell.epochs() == [
        ("1", "global_step", "1"), ("1", "global_step", "2"), ("1", "eval_global_step", "0"),
        ("2", "global_step", "3"), ("2", "global_step", "4"), ("2", "eval_global_step", "1"),
    ]  # fmt: skip
    for line in cell.lines[:2]:
        assert re.fullmatch(rf"epoch=1/2, global_step=\d, epoch_loss={NUMBER}, epoch_metric={NUMBER}", line)
    assert re.fullmatch(
        rf"epoch=1/2, eval_global_step=0, eval_epoch_loss={NUMBER}, eval_epoch_metric={NUMBER}", cell.lines[2]
    )
    assert cell.config() == (
        "TrainingConfig(output_dir='./train_dummy_torch', overwrite_output_dir=True, eval_strategy='epoch',"
        " eval_steps=None, batch_size=1, val_batch_size=-1, seed=42, epoch_num=2, dataloader_pin_memory=True,"
        " dataloader_drop_last=True, dataloader_num_workers=0, lr=5e-05, metric='Accuracy', print_steps=1,"
        " load_best_model_at_end=False, early_stopping={'monitor': 'eval_epoch_metric', 'patience': 4, 'mode': 'max'},"
        " model_checkpoint={'every_n_epoch': 1}, tensorboard={'log_dir': 'mylogdir'}, loss='CrossEntropyLoss',"
        " optimizer='Adam', lr_scheduler_type='linear', warmup_ratio=0.0, warmup_steps=0, device_str=None,"
        " freeze_bn=False)"
    )
    folder = notebook["folder"].shown
    assert list((folder / "mylogdir").glob("events.out.tfevents.*"))
    for name in ("epoch_1", "epoch_2", "final_epoch"):
        assert (folder / "train_dummy_torch" / name / "README.md").is_file()


def test_an_operator_is_trained(notebook: dict[str, Cell]) -> None:
    cell = notebook["train_operator"]
    assert [line[1:] for line in cell.epochs()] == [
        ("global_step", "1"), ("global_step", "2"), ("eval_global_step", "0"),
        ("global_step", "3"), ("global_step", "4"), ("eval_global_step", "1"),
    ]  # fmt: skip
    assert "tensorboard={'log_dir': None, 'comment': ''}" in cell.config()
    op = cell.names["op"]
    image, _ = cell.names["train_data"][0]
    assert op(image).shape == (512,)


def test_a_training_goes_on_from_a_checkpoint_is_saved_and_loaded(notebook: dict[str, Cell]) -> None:
    cell = notebook["save_and_load"]
    assert cell.lines[-1] == "2"
    assert cell.epochs() == [  # the page's counters start again; ours continue
        ("2", "global_step", "3"), ("2", "global_step", "4"), ("2", "eval_global_step", "1"),
    ]  # fmt: skip
    first = notebook["train_model"]
    # Exactly what the uninterrupted training has printed for its second epoch.
    assert cell.lines[:3] == first.lines[3:6]


def test_tensorboard_is_set_and_switched_off_by_an_attribute(notebook: dict[str, Cell]) -> None:
    config = notebook["tensorboard"].names["training_config"]
    assert config.tensorboard["log_dir"] == "your_log_dir"
    config.tensorboard = None
    assert config.tensorboard is None


def test_a_callback_of_ones_own_is_called_before_each_batch(notebook: dict[str, Cell]) -> None:
    cell = notebook["custom_callback"]
    shapes = ["called" if line == "on_batch_begin" else line.split(", ")[1].split("=")[0] for line in cell.lines]
    assert shapes == ["called", "global_step", "called", "global_step", "called", "eval_global_step"]


def test_metrics_are_listed(notebook: dict[str, Cell]) -> None:
    assert notebook["metric"].names["training_config"].metric == "Accuracy"
    names = notebook["list_metrics"].shown
    assert {"Accuracy", "AUROC", "F1", "F1Score", "IoU", "MeanSquaredError", "WER", "BLEUScore", "PSNR"} <= set(names)


def test_an_optimizer_and_a_loss_of_ones_own(notebook: dict[str, Cell]) -> None:
    assert notebook["custom_optimizer"].shown.__name__ == "MyOptimizer"
    assert notebook["custom_loss"].shown.__name__ == "MyTripletLossFunc"


def test_an_optimizer_of_ones_own_makes_the_steps(
    notebook: dict[str, Cell], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = notebook["custom_optimizer"].names
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64 * 64, 10))
    trainer = Trainer(model, TrainingConfig(output_dir=tmp_path, batch_size=1), train_dataset=names["train_data"])
    trainer.set_optimizer(names["MyOptimizer"](model.parameters(), defaults={}))
    trainer.train()
    assert capsys.readouterr().out.splitlines() == ["my step..."] * 2 * len(names["train_data"])


# What the page leaves out of its custom trainers: comments made code, and ``...`` filled in.
STEP = """
self.optimizer.zero_grad()
y = model(inputs[0])
loss = torch.nn.functional.cross_entropy(y, inputs[1])
loss.backward()
self.optimizer.step()
self.lr_scheduler.step()
"""


def test_a_train_step_of_ones_own(
    page_text: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = page_text("towhee/sub_trainer1").replace(
        '        step_logs = {"step_loss": ..., "epoch_loss": ..., "epoch_metric": ...}',
        STEP.replace("\n", "\n        ")
        + 'step_logs = {"step_loss": loss.detach(), "epoch_loss": 0.5, "epoch_metric": 0.25}',
    )
    names: dict[str, Any] = {"Trainer": Trainer, "torch": torch}
    exec(compile(source, "page", "exec"), names)
    inputs, labels = torch.randn(8, 4), torch.randint(2, (8,))
    data = torch.utils.data.TensorDataset(inputs, labels)
    config = TrainingConfig(output_dir=tmp_path, batch_size=2, print_steps=4, lr=0.1)
    trainer = names["SubTrainer1"](torch.nn.Linear(4, 2), config, train_dataset=data)
    trainer.train()
    assert capsys.readouterr().out.splitlines() == [
        f"epoch={epoch}/2, global_step={epoch * 4}, epoch_loss=0.5, epoch_metric=0.25" for epoch in (1, 2)
    ]
    assert trainer.lr_scheduler.last_epoch == 8  # the step has moved the schedule, so nobody else has


def test_a_loss_of_ones_own(page_text: Callable[..., str], tmp_path: Path) -> None:
    source = page_text("towhee/sub_trainer2").replace(
        "loss = ... # loss_function(outputs, input3)", "loss = torch.nn.functional.mse_loss(outputs, input3)"
    )
    names: dict[str, Any] = {"Trainer": Trainer, "torch": torch}
    exec(compile(source, "page", "exec"), names)
    a, b = torch.randn(64, 3), torch.randn(64, 3)
    data = torch.utils.data.TensorDataset(a, b, a + b)
    config = TrainingConfig(output_dir=tmp_path, num_epochs=20, lr=0.02, metric=None)
    trainer = names["SubTrainer2"](Sum(), config, train_dataset=data, eval_dataset=data)
    assert trainer.train()["loss"] < 0.1 * float((a + b).square().mean())


class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([a, b], dim=1))


def test_the_layers_that_are_frozen_by_name_are_run_cell(page_text: Callable[..., str]) -> None:
    first = page_text(
        "freezing/freezer",
        imports={
            "from towhee.trainer.utils.layer_freezer import LayerFreezer": "from trainwright.optim import LayerFreezer",
            "from towhee.models import vit": "from trainwright.models import vit",
        },
    )
    names: dict[str, Any] = {}
    assert run_cell(first, names) == []
    assert run_cell(page_text("freezing/by_names"), names) == ["head"]
    trainable = {name for name, parameter in names["my_model"].named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, _ in names["my_model"].named_parameters()} - {"head.weight", "head.bias"}
