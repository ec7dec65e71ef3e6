"""What the sections of a configuration file may be bound to."""

import pytest

from trainwright.config import ConfigTypeError, LazyConfig, instantiate
from trainwright.config.schema.sections import complete
from trainwright.config.schema.validation import validate

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
def test_a_section_that_cannot_be_one_is_an_error_with_file_and_cure(tmp_path, line, section, cure):
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


def test_names_that_are_no_sections_may_be_anything(tmp_path):
    assert set(load(tmp_path, "scale = 5\noptimizer = torch.optim.SGD")) == {"model", "dataloader"}
