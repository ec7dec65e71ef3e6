"""Registered names: our own are known without an import of theirs, and belong to us."""

from collections.abc import Callable
from pathlib import Path

import pytest

import trainwright.data as data
from trainwright.config.errors import ConfigError, ConfigKeyError
from trainwright.models.registry import Registry


@pytest.fixture
def run(run_python: Callable, tmp_path: Path) -> Callable[[str], str]:
    """The output of a program in which no class of ours has been used."""
    return lambda program: str(run_python("-c", program, cwd=tmp_path, fresh=True).stdout)


def test_a_folder_is_read_by_a_class_that_nobody_has_imported(tmp_path: Path, run: Callable) -> None:
    data.TextNormalizer(data.TextNormalizerConfig()).save(tmp_path)
    program = f"""
import sys
from trainwright.data import Preprocessor
assert "trainwright.tasks.tokenizer" not in sys.modules
print(type(Preprocessor.load({str(tmp_path)!r})).__name__)
"""
    assert run(program).strip() == "TextNormalizer"


def test_the_data_set_whose_columns_a_file_has(tmp_path: Path, run: Callable) -> None:
    (tmp_path / "train.csv").write_text("text,label\ngood,1\nbad,0\n")
    program = f"""
import sys
from trainwright.data import Dataset
assert "trainwright.tasks.text_classification.data" not in sys.modules
print(type(Dataset.load({str(tmp_path)!r}, split="train", preprocessor=None)).__name__)
"""
    assert run(program).strip() == "TextClassificationDataset"


@pytest.mark.parametrize("name", ["ocr", "text_generation"])
def test_a_name_of_ours_is_taken_before_our_class_is_imported(name: str, run: Callable) -> None:
    program = f"""
from trainwright.data import Dataset, DatasetConfig, register_dataset
class OwnConfig(DatasetConfig):
    name = {name!r}
try:
    @register_dataset({name!r}, config_class=OwnConfig)
    class Own(Dataset): ...
except ValueError as error:
    print(error)
"""
    assert "has this name; give Own another" in run(program)


def test_an_unknown_name_has_the_nearest_of_ours(run: Callable) -> None:
    program = """
import sys
from trainwright.models import build_model
assert "trainwright.tasks.bert" not in sys.modules
try:
    build_model("brt")
except ValueError as error:
    print(error)
"""
    assert "Did you mean 'bert'?" in run(program)


def test_ours_come_first_in_their_own_order(run: Callable) -> None:
    program = """
import sys, trainwright.tasks.text_generation.data
assert "trainwright.tasks.image2text.data" not in sys.modules
from trainwright.tasks.dataset import _registry
print(*[cls.config_class.name for cls in _registry])
"""
    assert run(program).strip() == "ocr speech_recognition text_classification sequence_labeling text_generation"


def test_a_registry_without_classes_of_its_own() -> None:
    registry: Registry[object] = Registry("thing", data.DatasetConfig, {})
    assert list(registry) == []
    with pytest.raises(ConfigKeyError, match="no thing is registered as 'x'"):
        registry.find("x", "here")
    with pytest.raises(ConfigError, match="config_class must be a subclass of DatasetConfig"):
        registry.decorator("x", int)  # type: ignore[arg-type]
