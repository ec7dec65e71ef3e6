"""Registered names: our own are known without an import of theirs, and belong to us."""

from collections.abc import Callable
from pathlib import Path

import pytest

import trainwright.data as data
import trainwright.models as models
from trainwright.base.errors import ConfigError, ConfigKeyError
from trainwright.models.registry import Registry


def test_names_and_order_of_ours_are_known_before_their_classes_are_imported(
    run_python: Callable, tmp_path: Path
) -> None:
    data.TextNormalizer(data.TextNormalizerConfig()).save(tmp_path)
    (tmp_path / "train.csv").write_text("text,label\ngood,1\nbad,0\n")
    program = """
import sys
from trainwright.data import Dataset, DatasetConfig, Preprocessor, register_dataset
from trainwright.models import build_model

def take(name):
    @register_dataset(name, config_class=type("OwnConfig", (DatasetConfig,), {"name": name}))
    class Own(Dataset): ...

assert "trainwright.tasks.bert" not in sys.modules
for act, name in ((take, "ocr"), (take, "text_generation"), (build_model, "brt")):
    try:
        act(name)
    except ValueError as error:
        print(str(error).replace("\\n", " "))

assert "trainwright.tasks.text_classification.data" not in sys.modules
print(type(Dataset.load(sys.argv[1], split="train", preprocessor=None)).__name__)
assert "trainwright.tasks.tokenizer" not in sys.modules
print(type(Preprocessor.load(sys.argv[1])).__name__)

from trainwright.tasks.dataset import _registry  # imported until now in another order
print(*[cls.config_class.name for cls in _registry])
"""
    *taken, unknown, dataset, preprocessor, order = run_python(
        "-c", program, tmp_path, cwd=tmp_path, fresh=True
    ).stdout.splitlines()
    assert ["has this name; give " in message for message in taken] == [True, True]
    assert "Did you mean 'bert'?" in unknown
    assert (dataset, preprocessor) == ("TextClassificationDataset", "TextNormalizer")
    assert order == "ocr speech_recognition text_classification sequence_labeling text_generation"


def test_a_registry_without_classes_of_its_own() -> None:
    registry: Registry[object] = Registry("thing", data.DatasetConfig, {})
    assert list(registry) == []
    with pytest.raises(ConfigKeyError, match="no thing is registered as 'x'"):
        registry.find("x", "here")
    with pytest.raises(ConfigError, match="config_class must be a subclass of DatasetConfig"):
        registry.decorator("x", int)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", models.__all__)
def test_a_name_is_there(name: str) -> None:
    assert getattr(models, name).__name__.rpartition(".")[2] == name
