"""Model cards: read back by the hub's own library."""

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from trainwright.base.errors import ConfigTypeError
from trainwright.models import ModelCard

FULL: dict[str, Any] = {
    "model_name": "plates: a | b\n# <c>",
    "model_architecture": "CRNNImage2Text",
    "model_overview": "Reads *plates*.",
    "language": "fa",
    "tags": ["ocr", "ctc"],
    "tasks": "image2text",
    "datasets": ["Plates, one", "Plates: two"],
    "datasets_tags": ["someone/plates-1", "someone/plates-2"],
    "dataset_args": {"split": "test", "max_length": 8},
    "eval_results": {"evaluation.cer": 0.0125, "evaluation.loss": 0.5, "steps": 7, "broken": float("nan")},
    "eval_lines": [{"epoch": 1, "cer": 0.5}, {"epoch": 2, "cer": 0.0125, "note": "a|b"}],
    "training_summary": {"epochs": 2, "best": True},
    "training_config": {"learning_rate": 1e-5, "hub_token": "hf_abcdefghijklmnopqrstuvwxyz", "tags": ("x",)},
}


def front(text: str) -> dict[str, Any]:
    _, metadata, _ = text.split("---\n", 2)
    content: dict[str, Any] = yaml.safe_load(metadata)
    return content


def test_the_hubs_library_reads_what_was_written(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    path = ModelCard(**FULL).save_model_card(tmp_path / "new")
    assert path == tmp_path / "new" / "README.md"
    card = hub.ModelCard.load(path)
    assert card.data.language == ["fa"]
    assert card.data.library_name == "trainwright"
    assert card.data.pipeline_tag == "image-to-text"
    assert card.data.tags == ["ocr", "ctc", "image-to-text"]
    assert card.data.datasets == ["someone/plates-1", "someone/plates-2"]
    assert card.data.model_name == "plates: a | b # <c>"
    found = {result.metric_type: result for result in card.data.eval_results}
    assert {name: result.metric_value for name, result in found.items()} == {"cer": 0.0125, "loss": 0.5, "steps": 7}
    assert found["cer"].dataset_name == "Plates, one, Plates: two"
    assert found["cer"].dataset_type == "someone/plates-1"
    assert found["cer"].dataset_args == {"split": "test", "max_length": 8}
    assert found["cer"].task_type == "image-to-text"


def test_the_page_says_all_of_it_and_no_value_breaks_its_form() -> None:
    text = ModelCard(**FULL).to_text()
    body = text.split("---\n", 2)[2]
    assert body.startswith("\n# plates: a \\| b # &lt;c>\n")
    for expected in (
        "Reads *plates*.",
        "* **Architecture**: CRNNImage2Text",
        "* **Datasets**: Plates, one, Plates: two",
        "| evaluation.cer | 0.0125 |",
        "| broken | nan |",
        "| epoch | cer | note |",
        "| 2 | 0.0125 | a\\|b |",
        "| 1 | 0.5 |  |",
        "* **epochs**: 2",
        "Written by the trainwright trainer.",
    ):
        assert expected in body, expected


def test_cards_hold_what_is_known_and_no_secret() -> None:
    text = ModelCard(**FULL).to_text()
    assert "hf_abc" not in text
    assert "hub_token: ???" in text

    text = ModelCard(training_config={"note": "```\n# not a heading", "rate": 1e-5}).to_text()
    fence = "````"
    inside = text.split(f"{fence}yaml\n")[1].split(f"\n{fence}")[0]
    assert yaml.safe_load(inside)["note"] == "```\n# not a heading"

    text = ModelCard().to_text()
    assert front(text) == {"library_name": "trainwright"}
    assert "None" not in text
    assert "# model\n" in text


def test_a_config_object_is_written_by_its_to_dict() -> None:
    @dataclass
    class Config:
        rate: float = 0.25

        def to_dict(self) -> dict[str, Any]:
            return {"rate": self.rate, "path": Path("x")}

    assert "rate: 0.25\npath: x\n" in ModelCard(training_config=Config()).to_text()
    with pytest.raises(ConfigTypeError, match="training_config: got int"):
        ModelCard(training_config=3).to_text()


def test_lists_names_and_results_of_a_card(tmp_path: Path) -> None:
    index = front(ModelCard(eval_results={"eval_loss": 1}).to_text())["model-index"]
    assert index[0]["results"][0]["dataset"] == {"name": "evaluation data", "type": "unknown"}
    assert index[0]["results"][0]["metrics"] == [{"type": "loss", "name": "eval_loss", "value": 1}]

    assert front(ModelCard(datasets="one").to_text()) == front(ModelCard(datasets=["one"]).to_text())
    with pytest.raises(ConfigTypeError, match=r"ModelCard.tags: got \[1\]"):
        ModelCard(tags=[1]).to_text()

    path = ModelCard(model_name="x").save_model_card(tmp_path / "CARD.md")
    assert path == tmp_path / "CARD.md"
    assert "# x" in path.read_text()


def test_texts_of_numpy_and_enums_are_written_as_text() -> None:
    class Kind(enum.StrEnum):
        DIGITS = "digits"

    card = ModelCard(tags=[np.str_("small"), Kind.DIGITS], language=np.str_("en"), tasks=[Kind.DIGITS])
    metadata = yaml.safe_load(card.to_text().split("---")[1])
    assert metadata["tags"] == ["small", "digits"]
    assert metadata["language"] == ["en"]
