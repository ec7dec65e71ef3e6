"""A project with modules of its own, for tests of what data may name."""

import sys

import pytest

from trainwright.config import LazyConfig


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project in the working folder, with a module of its own, and a stranger's module outside of it."""
    (tmp_path / "project/configs").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "project/own_parts_xyz.py").write_text(
        "import os, subprocess\nfrom collections import Counter\n"
        "import torch\n"
        "from trainwright.config import instantiate\n"
        "class Net:\n    def __init__(self, width=1): self.width = width\n    apply = torch.nn.Module.apply\n"
        "    def _make(): pass\n"
        "def _hidden(): pass\n"
        "def pair(name, path=None): return {'_target_': name, 'path': path}\n"
        "def listed(name, path=None): return [pair(name, path)]\n"
        "def fails(**_): raise RuntimeError('on the way')\n"
        "class Builds:\n    def __init__(self, parts): self.parts = instantiate(parts)\n"
    )
    (tmp_path / "elsewhere/stranger_xyz.py").write_text("raise SystemExit('a stranger was imported')\n")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.syspath_prepend(tmp_path / "project")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    yield tmp_path / "project"
    sys.modules.pop("own_parts_xyz", None)


def from_yaml(folder, text):
    (folder / "c.yaml").write_text(text)
    return LazyConfig.load(folder / "c.yaml")
