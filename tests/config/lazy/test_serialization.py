"""Configurations as YAML and as Python."""

import enum
import logging
import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from trainwright.config import LazyCall, LazyConfig, get_config, instantiate
from trainwright.config.lazy.provenance import is_set


class Colour(enum.Enum):
    RED = 1


class Part:
    def __init__(self, **kw):
        self.kw = kw


class Mode(enum.Enum):
    FAST = "fast"
    PAIR = (1, 2)


class Size(NamedTuple):
    height: int
    width: int


class _Hidden:
    pass


def collate(batch):
    return batch


@pytest.fixture
def cfg():
    return OmegaConf.create(
        {
            "text": ["1e-3", "null", "yes", "010", "2024-01-01", "12:30", "a: b", "", "ü", "'", "???x", "~", "1_000"],
            "numbers": [1, -2.5, 1e-5, 1e9, math.inf, True, None, 1e22, 0],
            "link": "${numbers.0}",
            "later": "???",
            "deep": {"x": {"y": [{"z": 1}]}, 3: "three"},
        },
        flags={"allow_objects": True},
    )


def test_what_is_saved_loads_to_an_equal_config_with_its_interpolations(cfg, tmp_path):
    LazyConfig.save(cfg, tmp_path / "c.yaml")
    loaded = LazyConfig.load(tmp_path / "c.yaml")
    assert OmegaConf.to_container(loaded) == OmegaConf.to_container(cfg)
    assert [type(a) for a in loaded.numbers] == [type(a) for a in cfg.numbers]
    loaded.numbers[0] = 7
    assert loaded.link == 7
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]  # no file beside it


def test_a_packaged_default_is_still_one_in_a_saved_file_unless_it_is_changed_there(tmp_path):
    cfg = OmegaConf.create({"train": get_config("common/train.py").train}, flags={"allow_objects": True})
    cfg.train.evaluation.eval_mode = "max"  # the default, but set
    LazyConfig.save(cfg, tmp_path / "c.yaml")
    evaluation = LazyConfig.load(tmp_path / "c.yaml").train.evaluation
    assert not is_set(evaluation, "eval_metric")
    assert is_set(evaluation, "eval_mode")
    (tmp_path / "c.yaml").write_text((tmp_path / "c.yaml").read_text().replace("Acc@1", "Acc@5"))
    assert is_set(LazyConfig.load(tmp_path / "c.yaml").train.evaluation, "eval_metric")


def test_what_has_no_path_is_left_as_text_with_one_warning(tmp_path, caplog):
    class Unprintable:
        def __repr__(self):
            raise ValueError

    cfg = OmegaConf.create({}, flags={"allow_objects": True})
    cfg.model = LazyCall(lambda: 1)()
    cfg.train = {"thing": object(), "odd": Unprintable(), "numbers": {1, 2}}
    with caplog.at_level(logging.WARNING, logger="trainwright.config"):
        LazyConfig.save(cfg, tmp_path / "c.yaml")
    (record,) = caplog.records
    for where in ("model._target_", "train.thing", "train.odd", "train.numbers"):
        assert where in record.getMessage()
    assert "lambda" in LazyConfig.load(tmp_path / "c.yaml").model._target_


def test_values_near_to_plain_ones_are_written_plainly(tmp_path, caplog):
    values = [
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.int64(3), 3),
        (np.float64(2), 2),
        (Path("/x"), "/x"),
        (Colour.RED, "RED"),
        (b"\x00", b"\x00"),
    ]
    cfg = OmegaConf.create({}, flags={"allow_objects": True})
    cfg.given = [value for value, _ in values]
    LazyConfig.save(cfg, tmp_path / "c.yaml")
    assert LazyConfig.load(tmp_path / "c.yaml").given == [plain for _, plain in values]
    assert not caplog.records


def test_objects_and_lazy_calls_among_arguments_are_built_again(tmp_path, caplog):
    given = {
        "mode": Mode.FAST,
        "modes": [Mode.FAST, {"a": Colour.RED}],
        "dtype": torch.float16,
        "device": torch.device("cuda", 1),
        "cpu": torch.device("cpu"),
        "act": torch.nn.functional.gelu,
        "pool": torch.nn.functional.max_pool2d,
        "fn": collate,
    }
    cfg = OmegaConf.create({}, flags={"allow_objects": True})
    cfg.part = LazyCall(Part)(options=LazyCall(dict)(a=1, b=LazyCall(list)()), **given)
    LazyConfig.save(cfg, tmp_path / "c.yaml", project_root=tmp_path.parent)
    assert (cfg.part._target_, cfg.part.fn) == (Part, collate)  # saving changes nothing
    loaded = LazyConfig.load(tmp_path / "c.yaml")
    assert loaded.project_root == ".."
    kw = instantiate(loaded.part).kw
    assert kw["modes"][1]["a"] is Colour.RED
    assert kw["modes"][0] is kw["mode"] is Mode.FAST
    assert (type(kw["options"]), kw["options"]) == (dict, {"a": 1, "b": []})
    for name in ("dtype", "device", "cpu", "act", "pool", "fn"):
        assert kw[name] == given[name]
    assert not caplog.records


def test_what_the_file_cannot_bring_back_is_named(tmp_path, caplog):
    cfg = OmegaConf.create({}, flags={"allow_objects": True})
    odd = {"counter": Counter("aab"), "shape": torch.Size([2])}
    cfg.part = LazyCall(Part)(pair=Mode.PAIR, cls=_Hidden, kind=LazyCall(dict)(_partial_=True), **odd)
    cfg.hidden = LazyCall(_Hidden)()
    cfg.path = LazyCall(Path)()
    with caplog.at_level(logging.WARNING, logger="trainwright.config"):
        LazyConfig.save(cfg, tmp_path / "c.yaml")
    (record,) = caplog.records
    for where in (
        "part.counter = Counter",
        "part.shape = torch.Size",
        "part.pair",
        "part.cls",
        "part.kind",
        "hidden._target_",
        "path._target_",
    ):
        assert where in record.getMessage()


def test_saving_data_imports_nothing_that_it_names(tmp_path, monkeypatch):
    (tmp_path / "named_by_data_xyz.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "c.yaml").write_text("x: {_target_: named_by_data_xyz.Net, a: 1}\n")
    cfg = LazyConfig.load(tmp_path / "c.yaml")
    cfg.x.path = Path("/a")
    LazyConfig.save(cfg, tmp_path / "d.yaml")


def test_a_failed_write_leaves_the_file_that_was_there(cfg, tmp_path, monkeypatch):
    LazyConfig.save(cfg, tmp_path / "c.yaml")
    before = (tmp_path / "c.yaml").read_bytes()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        LazyConfig.save({"a": 1}, tmp_path / "c.yaml")
    assert (tmp_path / "c.yaml").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_to_py_shows_what_would_set_the_config():
    cfg = OmegaConf.create({"b": {"x": 1, "a": "say"}, "n": "${b.x}"}, flags={"allow_objects": True})
    cfg.call = LazyCall(Counter)(x={"r": "a", "s": [1, 2.4, None]}, y="b")
    cfg.list = ["a", 1, LazyCall(Counter)()]
    assert LazyConfig.to_py(cfg) == (
        'cfg.b.a = "say"\n'
        "cfg.b.x = 1\n"
        'cfg.call = collections.Counter(x={"r": "a", "s": [1, 2.4, None]}, y="b")\n'
        'cfg.list = ["a", 1, collections.Counter()]\n'
        "cfg.n = 1\n"
    )
    assert LazyConfig.to_py(cfg, prefix="").startswith("b.a = ")


def test_to_py_of_a_long_call_is_python(tmp_path):
    cfg = OmegaConf.create({}, flags={"allow_objects": True})
    cfg.long = LazyCall(Counter)(**{f"name_of_argument_{i}": [i] * 30 if i == 3 else "x" for i in range(9)})
    text = LazyConfig.to_py(cfg)
    compile(text, "x", "exec")
    assert max(map(len, text.splitlines())) <= 120
