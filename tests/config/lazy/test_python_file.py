"""Loading Python files leaves the process as it was."""

import re
import sys
import warnings

import pytest

from trainwright.base.errors import ConfigKeyError
from trainwright.config import ConfigImportError, LazyConfig


def test_a_function_of_a_file_imports_by_path_also_after_the_load(tmp_path):
    (tmp_path / "base.py").write_text("train = dict(seed=7)\n")
    (tmp_path / "c.py").write_text(
        "def late():\n"
        "    import json\n"
        "    from .base import train\n"
        "    def inner():\n"
        "        from .base import train\n"
        "        return train\n"
        "    return train, inner(), json\n"
    )
    first, second, module = LazyConfig.load(tmp_path / "c.py", "late")()
    assert first == second == {"seed": 7}
    assert first is not second
    assert module is sys.modules["json"]


def test_what_a_star_imports_can_be_changed_as_what_is_imported_by_name(tmp_path):
    (tmp_path / "base.py").write_text("train = dict(seed=1)\n_own = dict(a=1)\n")
    (tmp_path / "c.py").write_text("from .base import *\ntrain.seed = 5\n")
    assert LazyConfig.load(tmp_path / "c.py") == {"train": {"seed": 5}}


def test_a_name_that_a_module_does_not_have_is_an_error_with_the_nearest(tmp_path, monkeypatch):
    (tmp_path / "parts_wxyz.py").write_text("class Classifier: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "c.py").write_text("from parts_wxyz import Clasifier\n")
    with pytest.raises(ConfigImportError, match=r"c\.py, line 1: .*parts_wxyz\.py.*Did you mean 'Classifier'\?"):
        LazyConfig.load(tmp_path / "c.py")
    del sys.modules["parts_wxyz"]


@pytest.mark.parametrize("line", ["from .{} import x", "x = LazyConfig.load_rel('{}.py', 'x')"])
def test_files_that_import_each_other_are_an_error_that_names_them(tmp_path, line):
    for name, other in (("a", "b"), ("b", "a")):
        text = f"from trainwright.config import LazyConfig\n{line.format(other)}\n"
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(ConfigImportError, match=r"circle: \S*a\.py -> \S*b\.py -> \S*a\.py"):
        LazyConfig.load(tmp_path / "a.py")


def test_what_a_function_imports_after_the_load_stays_imported(tmp_path, monkeypatch):
    (tmp_path / "late_settings_xyz.py").write_text("value = [1]\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "c.py").write_text("def late():\n    from late_settings_xyz import value\n    return value\n")
    late = LazyConfig.load(tmp_path / "c.py", "late")
    assert late() is late()
    del sys.modules["late_settings_xyz"]


def test_values_of_other_modules_are_not_looked_at(tmp_path, monkeypatch):
    # torch.distributed.reduce_op warns when its class is asked for, as this value does
    lines = (
        "import warnings\n\nclass Old:\n    __class__ = property(lambda self: warnings.warn('old'))\n\nvalue = Old()\n"
    )
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "old_values_xyz.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path / "installed")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "c.py").write_text("import old_values_xyz\ntrain = dict(seed=1)\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LazyConfig.load(tmp_path / "project" / "c.py", "train")
    del sys.modules["old_values_xyz"]


def test_a_function_of_a_file_may_call_compiled_code_that_imports(tmp_path):
    # time.strptime imports its Python part through the C API, which takes the builtins of the calling globals.
    (tmp_path / "c.py").write_text("import time\n\ndef parse():\n    return time.strptime('2020', '%Y').tm_year\n")
    parse = LazyConfig.load(tmp_path / "c.py", "parse")
    sys.modules.pop("_strptime", None)
    assert parse() == 2020


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "optim = LazyCall(dict)(params=model.parameters())",
            r"parameters: no such key\. A LazyCall has only .*\(width\)",
        ),
        ("width = model.widht", r"widht: no such key\. Did you mean 'width'\?"),
        (
            "data = LazyCall(dict)(test=[{}]).test.dataset",
            r"test\[dataset\]: test is a list\. Write test\[0\]\.dataset",
        ),
        ("optim = get_config('common/optim.py').lr", r"lr: no such key\. Allowed: optim\."),
    ],
)
def test_a_key_that_a_section_or_a_lazy_call_does_not_have_is_named(tmp_path, line, text):
    beginning = "from trainwright import LazyCall, get_config\nmodel = LazyCall(dict)(width=3)\n"
    (tmp_path / "c.py").write_text(f"{beginning}{line}\n")
    with pytest.raises(ConfigKeyError, match=rf"c\.py, line 3: {text}"):
        LazyConfig.load(tmp_path / "c.py")


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        ("trainwright.data.build_image_train_loader(dataset=[])", "train_batch_size"),
        ("torch.optim.SGD(lr=0.1)", "params"),
        ("torch.optim.lr_scheduler.StepLR(step_size=3)", "optimizer"),
    ],
)
def test_a_forgotten_lazy_call_is_named(tmp_path, call, argument):
    (tmp_path / "config.py").write_text(f"import torch\nimport trainwright.data\n\nmade = {call}\n")
    with pytest.raises(TypeError, match="missing") as caught:
        LazyConfig.load(tmp_path / "config.py")
    name = call.partition("(")[0].rpartition(".")[2]
    assert f"line 4. The run gives {argument!r} to a lazy call: write LazyCall({name})(...)" in str(
        caught.value.__notes__
    )


def test_a_call_without_an_argument_in_code_that_the_file_calls_is_no_forgotten_lazy_call(tmp_path):
    (tmp_path / "steps_of_mine.py").write_text("import torch\n\ndef made():\n    return torch.optim.SGD(lr=0.1)\n")
    (tmp_path / "config.py").write_text("from .steps_of_mine import made\n\nx = made()\n")
    with pytest.raises(TypeError, match="missing") as caught:
        LazyConfig.load(tmp_path / "config.py")
    assert "lazy call" not in str(caught.value.__notes__)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("model = LazyCall(dict)(a=1)", r"line 1\. Write `from trainwright import LazyCall`"),
        ("width = 3\nmodel = dict(a=widht)", r"line 2\. Did you mean 'width'\?"),
        ("model = dict(a=ResNet18)", r"line 1\. Import it, for example with `from your_module import ResNet18`"),
        ("from libai.config import LazyCall", r"line 1\. Here it is `from trainwright import LazyCall`"),
        ("from trainwright.callbacks import ProgressBar", r"line 1\. Did you mean `from .* import ProgressBar\w+`\?"),
        ("from digits_projet import Net", r"line 1\. Did you mean 'digits_project'\?"),
        ("import xyzabc", r"line 1$"),
        (
            "import beside_xyz",
            r"line 1\. beside_xyz\.py is beside this file: write from \.beside_xyz import \.\.\., or move",
        ),
        ("x = dict(a=1).iteritems()", r"line 1$"),
        ("train = dict(a=1)\ntrain.a = 2", r"line 2\. A dict has keys: write \['a'\] in place of \.a"),
        ("from trainwright.lr_scheduler import WarmupCosineLR", r"`from trainwright\.optim import WarmupCosineLR`"),
        (
            "from trainwright import LazyCall\nmodel = LazyCall(dict)(a=1)\nmodel = model()",
            r"line 3\. LazyCall\(X\)\(\.\.\.\) describes a call, and takes no more brackets",
        ),
    ],
)
def test_a_name_or_module_that_is_not_there_is_answered_with_the_line_to_write(tmp_path, text, answer):
    (tmp_path / "c.py").write_text(text + "\n")
    (tmp_path / "digits_project.py").touch()
    (tmp_path / "beside_xyz.py").touch()
    with pytest.raises((NameError, ImportError, TypeError, AttributeError)) as caught:
        LazyConfig.load(tmp_path / "c.py")
    assert re.search(answer, "\n".join(caught.value.__notes__))


def test_a_section_inside_of_train_is_named_as_one_of_its_own(tmp_path):
    text = 'from trainwright import get_config\ntrain = get_config("common/train.py").train\ntrain.optim.lr = 0.1\n'
    (tmp_path / "c.py").write_text(text)
    with pytest.raises(ConfigKeyError, match=r"line 3: train\.optim: .* optim is a section of its own: write optim ="):
        LazyConfig.load(tmp_path / "c.py")


def test_an_optimizer_that_is_built_in_the_file_is_answered_with_its_lazy_call(tmp_path):
    text = "import torch\nfrom trainwright import LazyCall\nmodel = LazyCall(torch.nn.Linear)(in_features=1)\n"
    (tmp_path / "c.py").write_text(text + "optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n")
    with pytest.raises(ConfigKeyError, match=r"Write optim = LazyCall\(torch\.optim\.SGD\)\(lr=0\.1, momentum=0\.9\)"):
        LazyConfig.load(tmp_path / "c.py")
