"""Lazy calls, and configuration files in Python and YAML."""

import builtins
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from trainwright.config import (
    ConfigError,
    ConfigKeyError,
    ConfigTypeError,
    LazyCall,
    LazyConfig,
    MissingFileError,
    get_config,
    instantiate,
    try_get_key,
)
from trainwright.config.config_file.checks import validate
from trainwright.config.config_file.sections import complete
from trainwright.config.lazy import lazy_config


class Net:
    def __init__(self, width=1, inner=None):
        self.width, self.inner = width, inner


class Other(Net):
    pass


@dataclass
class Shape:
    channels: int = 1


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project whose root is importable, and whose modules are gone afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    sys.modules.pop("configs", None)


def test_a_lazy_call_stays_open_to_edits_until_it_is_made():
    node = LazyCall(Net)(width=2, inner=LazyCall(Net)(width=3))
    node.width = 4
    del node.inner.width
    built = instantiate(node)
    assert (built.width, built.inner.width) == (4, 1)
    node._target_ = Other
    assert instantiate(node).width == 4
    assert instantiate(LazyCall(dict)(a=1)) == {"a": 1}
    assert instantiate(LazyCall(Shape)(channels=3)) == Shape(3)  # a dataclass is called, not taken apart


def test_positional_arguments_and_targets_that_cannot_be_called_are_refused():
    with pytest.raises(ConfigTypeError, match="keyword arguments"):
        LazyCall(Net)(3)
    with pytest.raises(ConfigTypeError, match="got 3"):
        LazyCall(3)


def test_a_lazy_call_of_a_lazy_call_builds_the_target_first():
    maker = LazyCall(make_adder)(amount=2)
    assert instantiate(LazyCall(maker)(value=3)) == 5


def make_adder(amount):
    return lambda value: value + amount


def test_relative_imports_run_files_afresh_by_path(tmp_path):
    root = write(
        tmp_path,
        {
            "root.py": "from itertools import count\nfrom trainwright.config import LazyCall as L\n"
            "from .a.one import text, section\nsection.x = 'changed'\nfrom .a.two import section2, text2\n"
            "call = L(count)(start=1)\n_private = dict(a=1)\nnumber = 5\n",
            "a/one.py": "text = 'base'\nsection = dict(x=1, y=2)\n",
            "a/two.py": "from .one import section as section2\nfrom ..other import text2\n",
            "other.py": "text2 = 'other'\n",
        },
    )
    cfg = LazyConfig.load(root / "root.py")
    assert isinstance(cfg.section, DictConfig)
    assert cfg.section.x == "changed"
    assert cfg.section2.x == 1
    assert sorted(cfg) == ["call", "section", "section2"]
    assert LazyConfig.load(root / "root.py", "number") == 5
    assert LazyConfig.load(str(root / "root.py"), ("text2", "text")) == ("other", "base")


def test_settings_imported_from_the_files_own_folder_are_fresh_at_each_load(project):
    write(
        project,
        {
            "configs/train.py": "train = dict(seed=1, log=dict(period=1))\n",
            "configs/config.py": "from configs.train import train\ntrain.update(dict(extra=train['seed']))\n"
            "train['log']['period'] += 1\n",
        },
    )
    for _ in range(2):
        assert LazyConfig.load(project / "configs/config.py").train == {"seed": 1, "extra": 1, "log": {"period": 2}}
    write(project, {"configs/train.py": "train = dict(seed=20, log=dict(period=1))\n"})
    assert LazyConfig.load(project / "configs/config.py").train.extra == 20
    assert "configs.train" not in sys.modules


def test_a_module_with_classes_stays_the_same(project):
    write(
        project,
        {
            "room_of_nets.py": "class Net: pass\n",
            "config.py": "from room_of_nets import Net\nfrom trainwright.config import LazyCall\n"
            "model = LazyCall(Net)()\n",
        },
    )
    one, two = (LazyConfig.load(project / "config.py") for _ in range(2))
    assert one.model._target_ is two.model._target_


@pytest.mark.parametrize(
    ("line", "error", "says"),
    [
        ("from .a import x", ImportError, "folder"),
        ("from . import a", ImportError, "folder"),
        ("from .nowhere import x", ImportError, "nowhere.py"),
        ("from .a.one import missing", ImportError, "missing"),
        ("x = 1 / 0", ZeroDivisionError, "bad.py"),
        ("cfg={ a=1 }", SyntaxError, "bad.py has syntax error"),
    ],
)
def test_a_file_that_cannot_be_loaded_says_why_and_leaves_python_as_it_was(tmp_path, line, error, says):
    write(tmp_path, {"bad.py": line + "\n", "a/one.py": "x = 1\n"})
    before = builtins.__import__
    with pytest.raises(error) as caught:
        LazyConfig.load(tmp_path / "bad.py")
    assert says in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert builtins.__import__ is before


def test_what_is_not_there_is_named(tmp_path):
    files = {"c.py": "train = dict(seed=1)\n", "c.txt": "", "list.yaml": "[1, 2]\n", "d.py": "table = {(1, 2): 3}\n"}
    write(tmp_path, files)
    with pytest.raises(MissingFileError, match=r"none.py"):
        LazyConfig.load(tmp_path / "none.py")
    with pytest.raises(ConfigKeyError, match="Did you mean 'train'"):
        LazyConfig.load(tmp_path / "c.py", "trian")
    with pytest.raises(ConfigError, match=r"\.txt"):
        LazyConfig.load(tmp_path / "c.txt")
    with pytest.raises(ConfigError, match="mapping"):
        LazyConfig.load(tmp_path / "list.yaml")
    with pytest.raises(ConfigTypeError, match="_table"):  # a dict that cannot be a section
        LazyConfig.load(tmp_path / "d.py")


def test_load_rel_is_relative_to_the_calling_file(tmp_path):
    write(
        tmp_path,
        {
            "sub/base.yaml": "a: 1\n",
            "sub/c.py": "from trainwright.config import LazyConfig\nbase = LazyConfig.load_rel('base.yaml')\n",
        },
    )
    assert LazyConfig.load(tmp_path / "sub/c.py").base.a == 1
    with pytest.raises(ConfigError, match="not a file"):
        eval("LazyConfig.load_rel('x.py')")


def test_yaml_is_read_safely_and_as_written(tmp_path):
    write(tmp_path, {"evil.yaml": "a: !!python/object/apply:os.getcwd []\n", "twice.yaml": "a: 1\na: 2\n"})
    for name in ("evil.yaml", "twice.yaml"):
        with pytest.raises(ConfigError, match=name):
            LazyConfig.load(tmp_path / name)
    write(tmp_path, {"n.yaml": "lr: 1e-3\nday: 2024-01-01\ntime: 12:30:00\nversion: 010\nnone:\nempty: ''\nbig: 1e9\n"})
    cfg = LazyConfig.load(tmp_path / "n.yaml")
    assert cfg == {
        "lr": 0.001,
        "day": "2024-01-01",
        "time": "12:30:00",
        "version": "010",
        "none": None,
        "empty": "",
        "big": 1e9,
    }


# Reading by dotted key.


def test_the_first_key_that_exists_wins_and_none_is_a_value():
    for cfg in ({"a": {"b": [1, {"c": 2}], "n": None}}, OmegaConf.create({"a": {"b": [1, {"c": 2}], "n": None}})):
        assert try_get_key(cfg, "x", "a.x", "a.b.1.c") == 2
        assert try_get_key(cfg, "a.n", default=3) is None
        assert try_get_key(cfg, "a.b.7", "a.n.x", "a.b.c.d", default=3) == 3
        assert try_get_key(cfg, "x") is None


# What the sections of a configuration file may be bound to.

HEAD = """\
import torch
from trainwright.config import LazyCall
model = LazyCall(torch.nn.Linear)(in_features=1, out_features=1)
dataloader = dict(test=[])
"""


def load(folder, line):
    (folder / "c.py").write_text(HEAD + line + "\n")
    return LazyConfig.load(folder / "c.py")


@pytest.mark.parametrize(
    ("line", "section", "cure"),
    [
        ("optim = LazyCall(torch.optim.SGD)", "optim", r"second call\? Write LazyCall\(torch.optim.SGD\)\(...\)"),
        ("model = LazyCall('a.Net')", "model", r"Write LazyCall\(a.Net\)\(...\)"),
        ("dataloader = LazyCall(dict)", "dataloader", "second call"),
        ("optim = torch.optim.SGD", "optim", r"the class torch.optim.SGD.*LazyCall\(torch.optim.SGD\)\(...\)"),
        ("def model(): pass", "model", "the function model"),
        ("optim = torch.optim", "optim", "the module torch.optim.*another name"),
        ("graph = True", "graph", r"got True \(bool\).*graph = dict\(enabled=True\)"),
        ("train = 5", "train", r"got 5 \(int\).*train = dict\(train_iter=100\)"),
        ("train = torch.nn.Linear(1, 1)", "train", "Linear"),
        ("model = [1]", "model", "list"),
        ("tokenization = 'gpt'", "tokenization", r"got 'gpt' \(str\)"),
    ],
)
def test_an_invalid_section_is_an_error_with_file_and_fix(tmp_path, line, section, cure):
    with pytest.raises(ConfigTypeError, match=cure) as caught:
        load(tmp_path, line)
    assert str(caught.value).startswith(f"{tmp_path / 'c.py'}: {section}: ")


def test_ready_made_objects_are_kept_where_a_run_can_use_them(tmp_path):
    torch = pytest.importorskip("torch")
    lines = """\
model = torch.nn.Linear(2, 3)
optim = torch.optim.SGD(model.parameters(), lr=0.5)
"""
    cfg = complete(load(tmp_path, lines))
    assert isinstance(cfg.model, torch.nn.Linear)
    assert isinstance(cfg.optim, torch.optim.SGD)
    assert cfg.optim.param_groups[0]["params"][0] is cfg.model.weight
    assert instantiate(cfg.model) is cfg.model
    cfg.train.scheduler = object()
    validate(cfg)


def test_other_mappings_and_none_are_sections_as_dicts_are(tmp_path):
    cfg = load(tmp_path, "import types\ntrain = types.MappingProxyType({'seed': 3})\noptim = None")
    assert cfg.train.seed == 3
    assert complete(cfg).optim._target_ == "torch.optim.AdamW"


# The defaults that come with the library.


def test_the_sections_are_to_be_had_alone_and_together():
    assert get_config("common/models/graph.py").graph.global_mode.enabled is False  # the place in LiBai
    together = get_config("common/defaults.py")
    assert sorted(together) == ["graph", "optim", "train"]
    for name in together:
        assert get_config(f"common/{name}.py") == {name: together[name]}  # and nothing that its file imports


@pytest.mark.parametrize("name", ["common/trian.py", "../lazy.py", "common/", "", "/etc/passwd"])
def test_another_name_lists_what_there_is_and_names_the_nearest(name):
    near = r".*Did you mean 'common/train\.py'" if name == "common/trian.py" else ""
    for kind in (MissingFileError, RuntimeError):
        with pytest.raises(kind, match=rf"not available in {near}.*common/train\.py"):
            get_config(name)


def test_a_packaged_model_or_data_set_of_libai_is_described_by_a_call():
    with pytest.raises(MissingFileError, match=r"model = LazyCall\(Net\)"):
        get_config("common/models/vit/vit_small_patch16_224.py")
    with pytest.raises(MissingFileError, match=r"dataloader\.train = LazyCall"):
        get_config("common/data/imagenet.py")


def test_a_path_is_a_file_of_ones_own_read_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("train = dict(seed=7)\n")
    get_config("train.py").train.seed = 8
    assert get_config("train.py").train.seed == 7
    assert get_config(str(tmp_path / "train.py")).train.seed == 7


def test_a_notebook_shows_a_config_without_its_secrets_and_none_of_another_program():
    cfg = LazyCall(dict)(model=LazyCall(Net)(width="<b>"), api_key="0123456789abcdef", size="${.model.width}")
    html = lazy_config.html_of(cfg)
    assert "Net(width=&#x27;&lt;b&gt;&#x27;)" in html
    assert "${.model.width}" in html
    assert "0123456789abcdef" not in html
    assert lazy_config.html_of(cfg.model)
    assert lazy_config.html_of(OmegaConf.create({"a": 1})) is None


class _OfTwo:
    def __init__(self, in_features, out_features=2): ...


def _by_position(first, /, second): ...


@pytest.mark.parametrize(
    ("target", "arguments", "text"),
    [
        (_OfTwo, (4, 2), r"Write LazyCall\(_OfTwo\)\(in_features=4, out_features=2\)\.$"),
        (_OfTwo, ([4],), r"Write LazyCall\(_OfTwo\)\(in_features=\.\.\.\)\.$"),
        (_by_position, (1, 2), r"takes its parts by position alone: describe a function of yours that calls it"),
        (torch.nn.Sequential, ([],), r"takes its parts by position alone: describe a function of yours that calls it"),
        (_OfTwo, (1, 2, 3), r"one mapping of them\.$"),
    ],
)
def test_positional_arguments_are_answered_with_their_names(target, arguments, text):
    with pytest.raises(ConfigTypeError, match=text):
        LazyCall(target)(*arguments)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("model = dict(a=1),", r"model: got a tuple of one: remove the comma at the end of the line"),
        ("class train:\n    seed = 1", r"train: got <class .*it must be a section, for example train = dict\("),
        (
            "from trainwright import TrainingConfig\ntrain = TrainingConfig(output_dir='o')",
            r"train: got a TrainingConfig, which is of the Python API; it must be a section, for example train = ",
        ),
        ("model = lambda: None", r"got a lambda\. Describe the call that it makes, for example LazyCall\(Net\)"),
    ],
)
def test_a_section_of_another_form_is_answered_with_the_line_to_write(tmp_path, text, answer):
    (tmp_path / "c.py").write_text(text + "\n")
    with pytest.raises(ConfigTypeError, match=answer):
        LazyConfig.load(tmp_path / "c.py")
