"""Which YAML files are refused: those that grow, nest or wait without bounds."""

import os

import pytest

from trainwright.config import ConfigError, LazyConfig, TrainingConfig
from trainwright.config.yaml_file import MAX_DEPTH
from trainwright.data import DatasetConfig, Preprocessor, PreprocessorConfig
from trainwright.models import Model, ModelConfig

READERS = [
    LazyConfig.load,
    TrainingConfig.load_from_yaml,
    ModelConfig.load,
    DatasetConfig.load,
    PreprocessorConfig.load,
]
_LEVELS = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
_LEVELS += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
_CHAIN = ["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, MAX_DEPTH))]

REFUSED = {
    "aliases repeat more than": "\n".join(_LEVELS),
    "inside the node that it repeats": "train: &a\n  x: *a\n",
    "line 1.*\n.*": "train: &a [1, *a]\n",
    "more than 50 levels": "a: " + "[" * 20_000 + "]" * 20_000,
    "50 levels of nesting": "a: " + "{a: " * MAX_DEPTH + "1" + "}" * MAX_DEPTH,
    "levels of nesting": "\n".join(_CHAIN),
}


@pytest.mark.parametrize(
    ("read", "reason"),
    [(LazyConfig.load, reason) for reason in REFUSED] + [(read, "inside the node") for read in READERS[1:]],
)
def test_what_grows_or_nests_without_bounds_is_refused_at_once(tmp_path, read, reason):
    path = tmp_path / "config.yaml"
    path.write_text(next(text for key, text in REFUSED.items() if key.startswith(reason)))
    with pytest.raises(ConfigError, match=reason) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_folder_of_a_model_or_preprocessor_is_read_with_the_same_bounds(tmp_path):
    (tmp_path / "model_config.yaml").write_text("name: gpt\n" + REFUSED["aliases repeat more than"])
    (tmp_path / "x_config.yaml").write_text("name: image_processor\nsize: &s [*s]\n")
    for load in (Model.load, Preprocessor.load):
        with pytest.raises(ConfigError, match="alias"):
            load(tmp_path)


def test_what_people_write_with_aliases_is_read(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("base: &b {lr: 0.1, betas: [0.9, 0.99]}\noptim: {<<: *b, lr: 0.2}\nall: [*b, *b]\n")
    base = {"lr": 0.1, "betas": [0.9, 0.99]}
    assert LazyConfig.load(path) == {"base": base, "optim": {**base, "lr": 0.2}, "all": [base, base]}


@pytest.mark.parametrize("read", [*READERS, LazyConfig.load], ids=lambda read: read.__qualname__)
def test_a_named_pipe_is_refused_rather_than_waited_for(tmp_path, read):
    path = tmp_path / "config.yaml"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="a pipe, a socket or a device"):
        read(path)
    path.unlink()
    path.mkdir()
    with pytest.raises((ConfigError, FileNotFoundError), match="config"):
        read(path)
    os.mkfifo(tmp_path / "config.py")
    with pytest.raises(ConfigError, match="a pipe, a socket or a device"):
        LazyConfig.load(tmp_path / "config.py")


def test_interpolations_that_people_write_are_read(tmp_path):
    rows = [f"name{i}: '${{root}}/${{.kind}}_{i}'" for i in range(300)]
    (tmp_path / "c.yaml").write_text(
        "\n".join(["root: /data", "kind: run", *rows, "all: {x: '${name7}', y: ['${..x}']}", "c: ${oc.select:no,7}"])
        + "\nd: ${oc.dict.keys:all}\n"
    )
    cfg = LazyConfig.load(tmp_path / "c.yaml")
    assert (cfg.c, list(cfg.d)) == (7, ["x", "y"])
    assert (cfg.name299, cfg.all.x, cfg.all.y[0]) == ("/data/run_299", "/data/run_7", "/data/run_7")
