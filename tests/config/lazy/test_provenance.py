"""Where a config node came from: its file and line, its overrides, and whether code or data wrote it."""

import copy
import importlib
import os
import re
import sys
import threading
from itertools import count

import pytest
from omegaconf import OmegaConf

from tests.config.lazy.conftest import from_yaml
from trainwright.config import ConfigError, LazyCall, LazyConfig, instantiate


@pytest.mark.parametrize("launder", ["pair", "listed"])
@pytest.mark.parametrize("outer", ["own_parts_xyz.Builds", "trainwright.data.build_image_test_loader"])
def test_data_stays_data_when_a_function_hands_it_on_as_a_plain_dict(project, launder, outer):
    marker = project / "marker"
    inner = f"{{_target_: own_parts_xyz.{launder}, name: os.mkdir, path: {marker}}}"
    key = "parts" if "Builds" in outer else "test_batch_size: 1, num_workers: 0, dataset"
    cfg = from_yaml(project, f"x: {{_target_: {outer}, {key}: {inner}}}\n")
    with pytest.raises(ConfigError, match=r"'os\.mkdir' is refused"):
        instantiate(cfg.x)
    assert not marker.exists()

    (project / "c.py").write_text(
        "from own_parts_xyz import Builds\nfrom trainwright.config import LazyCall\nx = LazyCall(Builds)(parts=None)\n"
    )
    mixed = LazyConfig.apply_overrides(LazyConfig.load(project / "c.py"), [f"x.parts={inner.replace(': ', ':')}"])
    with pytest.raises(ConfigError, match=r"'os\.mkdir' is refused"):
        instantiate(mixed.x)
    assert not marker.exists()


def test_plain_dicts_are_codes_again_after_data_was_built_or_failed(project):
    cfg = from_yaml(project, "a: {_target_: own_parts_xyz.Net}\nb: {_target_: own_parts_xyz.fails, x: 1}\n")
    instantiate(cfg.a)
    with pytest.raises(RuntimeError, match="on the way"):
        instantiate(cfg.b)
    assert instantiate({"_target_": "os.getcwd"}) == str(project)


def test_another_thread_that_builds_what_code_wrote_is_not_hindered(project):
    inside, done = threading.Event(), threading.Event()
    (project / "waits_xyz.py").write_text("EVENTS = []\ndef wait(): EVENTS[0].set(); EVENTS[1].wait(10)\n")
    cfg = from_yaml(project, "x: {_target_: waits_xyz.wait}")
    importlib.import_module("waits_xyz").EVENTS.extend([inside, done])
    thread = threading.Thread(target=instantiate, args=(cfg.x,))
    thread.start()
    try:
        assert inside.wait(10)
        assert instantiate({"_target_": "os.getcwd"}) == str(project)
    finally:
        done.set()
        thread.join()
        sys.modules.pop("waits_xyz")


def test_the_mark_of_data_survives_copies_merges_and_moves(project):
    data = from_yaml(project, "x: {_target_: os.getcwd}")
    base = OmegaConf.create({"x": LazyCall(list)()}, flags={"allow_objects": True})
    moved = OmegaConf.create({"deep": [data.x]})
    for node in (copy.deepcopy(data).x, OmegaConf.merge(base, data).x, moved.deep[0], OmegaConf.create(data).x):
        with pytest.raises(ConfigError, match="refused"):
            instantiate(node)


def fails(value):
    raise RuntimeError(f"cannot use {value}")


def test_an_error_names_the_overrides_that_set_an_argument_or_the_node():
    cfg = OmegaConf.create({"model": LazyCall(dict)(inner=LazyCall(fails)(value=1))}, flags={"allow_objects": True})
    for text in ("model.inner.value=5", "model.inner={value:6}"):
        changed = LazyConfig.apply_overrides(copy.deepcopy(cfg), [text])
        with pytest.raises(RuntimeError, match=rf"model\.inner: .*override '{re.escape(text)}'\]"):
            instantiate(copy.deepcopy(changed).model)


def test_the_place_of_a_lazy_call_is_not_part_of_the_configuration():
    node = LazyCall(count)(start=1)
    assert set(node) == {"_target_", "start"}
    assert os.path.basename(__file__) not in OmegaConf.to_yaml(LazyCall("itertools.count")(start=1))
