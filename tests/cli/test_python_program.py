"""A program of the Python API that is given to a command in place of a config file is refused before it runs."""

import textwrap
from pathlib import Path

import pytest

from trainwright.cli.main import main
from trainwright.cli.python_program import _OF_CONFIGS, _TRAINS, program_sign
from trainwright.config.unread import unread_names

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
PROGRAMS = [one for one in sorted(EXAMPLES.rglob("*.py")) if "__main__" in one.read_text()]
CONFIGS = [
    *sorted(EXAMPLES.rglob("configs/*.py")),
    *sorted((REPOSITORY / "trainwright" / "config" / "defaults").rglob("*.py")),
]


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: file.relative_to(EXAMPLES).as_posix())
def test_the_programs_of_the_examples_are_programs(file: Path) -> None:
    has_lazy_config = "LazyCall" in file.read_text() or "LazyConfig" in file.read_text()
    assert (program_sign(file) is not None) != has_lazy_config


def test_config_files_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "project"]) == 0
    for file in [*CONFIGS, tmp_path / "project" / "config.py"]:
        assert program_sign(file) is None, file
    assert len(CONFIGS) >= 2  # of the examples, and of the package where its sources are here


def test_the_documents_have_the_names_of_config_files() -> None:
    _, _, text = (REPOSITORY / "docs" / "config.md").read_text().partition("### A Python file that is no config file")
    section, _, _ = text.partition("\n## ")
    assert [name for name in (*_OF_CONFIGS, *_TRAINS) if f"`{name}`" not in section] == []


TRAINS = "model = Net()\ntrainer = Trainer(model, config, data)\n"


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        (TRAINS + "trainer.train()", "line 3: trainer.train()"),
        (TRAINS + "dataloader = []\nresults = trainer.train()", "line 4: trainer.train()"),
        ("from config import *\nDefaultTrainer(cfg).train()", "line 2: DefaultTrainer(cfg).train()"),
        ("import trainwright as t\nwith x:\n    t.Trainer(m, c, d).fit(3)", "line 3: t.Trainer(m, c, d).fit(3)"),
        ("def main():\n    Trainer(m, c, d)\nmain()", "line 2: Trainer(m, c, d)"),
        ("model = Net()\nfor x, y in data:\n    loss(model(x), y).backward()", "line 3: loss(model(x), y).backward()"),
        ("def main():\n    pass\nif __name__ == '__main__':\n    main()", "line 3: if __name__ == '__main__':"),
        ("with x:\n    t = Trainer(m, c, d)\nt.train()", "line 3: t.train()"),
        ("if x:\n    t = Trainer(m, c, d)\n    t.train()\nmodel, dataloader = 1, 2", "line 3: t.train()"),
        ("try:\n    pass\nexcept E:\n    Trainer(m, c, d).train()\nmodel, dataloader = 1, 2",
         "line 4: Trainer(m, c, d).train()"),
        ("t: Trainer = Trainer(m, c, d)\nt.train()\nmodel, dataloader = 1, 2", "line 2: t.train()"),
        ("print((t := Trainer(m, c, d)))\nt.train()\nmodel, dataloader = 1, 2", "line 2: t.train()"),
        ("with Trainer(m, c, d) as t:\n    t.train()\nmodel, dataloader = 1, 2", "line 2: t.train()"),
        ("if Trainer(m, c, d).train():\n    pass\nmodel, dataloader = 1, 2", "line 1: Trainer(m, c, d).train()"),
        # Config files: also those that are programs if Python runs them, and those with faults.
        ("from base import model, dataloader\nif __name__ == '__main__':\n    DefaultTrainer(cfg).train()", None),
        ("from base import *\ndef use(trainer):\n    trainer.train()", None),
        ("model = LazyCall(Net)()\ntrain.update(x=1)\nmodel.train()", None),
        ("model, dataloader = 1, 2\ntrain = dict(after=lambda: Trainer(m, c, d).train())", None),
        ("model, dataloader = 1, 2\ndef go():\n    t = Trainer(m, c, d)\n    t.train()", None),
        ("globals().update(config())\nif __name__ == '__main__':\n    Trainer(m, c, d).train()", None),
        ("optim = dict(lr=1)\ntrain.update(x=1)", None),
        ("def f(:", None),
        ("", None),
    ],
)  # fmt: skip
def test_a_file_is_a_program_by_a_sure_sign_only(text: str, sign: str | None, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(text)
    assert program_sign(file) == sign


@pytest.mark.parametrize("command", ["train", "check", "eval", "config show"])
def test_a_program_is_refused_before_it_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = """
        open("has_run", "w")
        from trainwright import Trainer
        trainer = Trainer(None, None, None)
        trainer.train()
    """
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(textwrap.dedent(program))
    assert main([*command.split(), "train.py"]) == 2
    said = capsys.readouterr().err
    assert "train.py: is a program, not a config file (line 5: trainer.train()), and has not been run." in said
    assert "python train.py" in said
    assert not Path("has_run").exists()


UNREAD = """
from config import *
from trainwright import DefaultTrainer

max_epochs = 3
batch_size = 8
train.train_micro_batch_size = batch_size
loss = LazyCall(torch.nn.CrossEntropyLoss)()
data = dict(root="x")
augment = dict(width=1)
other = LazyCall(spirals)(number=40, seed=1)
dataloader["train"].dataset = "${other}"
train.update(train_iter=1, train_epoch=0)
"""
BASE = """
from config import *

dataloader["train"].dataset = "${other}"
train.update(train_iter=1, train_epoch=0, train_micro_batch_size=8)
"""
CHILD = """
from config import LazyCall, spirals
from .base import dataloader, model, optim, train

__all__ = ["batch_size"]
batch_size = 8
other = LazyCall(spirals)(number=40, seed=1)
epochs = None
ema = False
dataset = "spirals"
lr = 0.1
"""
HOOK = "from trainwright.hooks import HookBase\ntrain.hooks = [LazyCall(HookBase)()]\n"


def test_values_of_a_config_file_that_nothing_reads_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "unread_values"]) == 0
    monkeypatch.chdir("unread_values")
    for text, named in ((UNREAD, {"max_epochs": 5, "loss": 8, "data": 9}), (UNREAD + HOOK, {"max_epochs": 5})):
        Path("unread.py").write_text(text)
        caplog.clear()
        assert main(["train", "unread.py"]) == 0
        found = [text for text in caplog.messages if "nothing reads" in text]
        assert [text.partition(". ")[0] for text in found] == [
            f"unread.py, line {line}: nothing reads {name}" for name, line in named.items()
        ]
        assert "A training reads train.train_epoch." in found[0]


def test_values_that_an_imported_file_reads_or_that_change_nothing_are_no_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "read_values"]) == 0
    monkeypatch.chdir("read_values")
    Path("base.py").write_text(BASE)
    Path("child.py").write_text(CHILD)
    assert main(["train", "child.py"]) == 0
    found = [text.partition(". ")[0] for text in caplog.messages if "nothing reads" in text]
    assert found == ["child.py, line 11: nothing reads lr"]


def test_names_that_a_config_file_may_read_by_their_text_are_not_unread(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text("lr = 1\nepochs = 2\nx = f'{epochs}'\nsaved = {k: v for k, v in globals().items()}")
    assert unread_names(file) == {}
    file.write_text("lr = 1\nepochs = 2\nx = f'{epochs}'\ndef f():\n    y = lr")
    assert unread_names(file) == {"x": 3}


def test_settings_in_sections_of_a_variable_that_no_training_reads_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "sections"]) == 0
    monkeypatch.chdir("sections")
    short = "\ntrain.update(train_iter=1, train_epoch=0, train_micro_batch_size=8)"
    setting = "\ncfg = get_config('common/defaults.py')\ncfg.train.seed = 3\ncfg.optim.lr = 0.5"
    Path("unread.py").write_text(f"from config import *{short}\nfrom trainwright import get_config{setting}")
    assert main(["train", "unread.py"]) == 0
    found = [text.partition("unread.py, ")[2] for text in caplog.messages if "nothing reads" in text]
    assert found == [
        "line 5: nothing reads cfg.train.seed. Write train.seed = ..., after train = cfg.train.",
        "line 6: nothing reads cfg.optim.lr. Write optim.lr = ..., after optim = cfg.optim.",
    ]
    read = "\ntrain = cfg.train\nrate = cfg.optim.lr * 2\noptim.lr = rate"
    Path("read.py").write_text(f"from config import *\nfrom trainwright import get_config{setting}{read}{short}")
    caplog.clear()
    assert main(["train", "read.py"]) == 0
    assert not [text for text in caplog.messages if "nothing reads" in text]


def test_all_sections_of_a_variable_are_named_if_one_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "cfg.model = LazyCall(dict)()\ncfg.dataloader = {'train': LazyCall(list)()}"
    imports = "from trainwright import LazyCall, get_config"
    Path("all.py").write_text(f"{imports}\ncfg = get_config('common/defaults.py')\n{text}")
    assert main(["train", "all.py"]) == 2
    found = capsys.readouterr().err
    assert "write model = ... instead of cfg.model. Its dataloader, train, optim, graph are not read either." in found
