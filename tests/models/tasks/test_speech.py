"""Speech by CTC."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainwright.config.errors import ConfigError
from trainwright.models import CTCSpeechRecognition, CTCSpeechRecognitionConfig, Model

LABELS = torch.tensor([[1, 2, 1], [2, 2, 0], [1, 0, 0]])


@pytest.fixture
def model() -> CTCSpeechRecognition:
    torch.manual_seed(0)
    config = CTCSpeechRecognitionConfig(id2label=["", "a", "b"], num_features=4, hidden_size=16)
    return CTCSpeechRecognition(config)


def batch() -> dict[str, Tensor]:
    """Each character is a tone of six frames, and two of silence."""
    features, mask = torch.zeros(3, 24, 4), torch.zeros(3, 24, dtype=torch.int64)
    for row, text in enumerate(LABELS.tolist()):
        for place, character in enumerate(i for i in text if i):
            features[row, 8 * place : 8 * place + 6, character] = 1
            mask[row, : 8 * place + 8] = 1
    return {"input_features": features, "attention_mask": mask, "labels": LABELS}


def test_it_learns_to_write_down_what_it_hears(model: CTCSpeechRecognition, learns: Callable[..., float]) -> None:
    assert learns(model, batch(), steps=120) < 0.1
    assert [out.text for out in model.predict(batch())] == ["aba", "bb", "a"]
    assert [out.text for out in model.post_process(LABELS)] == ["aba", "bb", "a"]
    model.eval()
    ids = model.generate(batch()["input_features"], batch()["attention_mask"])
    assert [out.text for out in model.post_process(ids)] == ["aba", "bb", "a"]


@pytest.mark.parametrize("num_frames", [8, 7, 1])
def test_how_far_a_batch_is_padded_changes_nothing(model: CTCSpeechRecognition, num_frames: int) -> None:
    torch.manual_seed(1)
    features = torch.randn(1, num_frames, 4)
    noise = torch.randn(2, 20, 4)  # what lies in padding does not matter
    noise[:1, :num_frames] = features
    mask = torch.zeros(2, 20)
    mask[0, :num_frames] = mask[1, :] = 1
    alone = model.predict({"input_features": features}, post_process=False)
    padded = model.predict({"input_features": noise, "attention_mask": mask}, post_process=False)
    steps = (num_frames + 1) // 2
    assert padded["logit_lengths"].tolist() == [steps, 10]
    # Tolerance: single precision, other shapes.
    torch.testing.assert_close(padded["logits"][:1, :steps], alone["logits"], rtol=0, atol=1e-5)
    assert (padded["logits"][0, steps:].argmax(-1) == 0).all()
    labels = torch.tensor([[1], [2]])
    both = model.compute_loss(padded["logits"], labels, padded["logit_lengths"])
    one = model.compute_loss(alone["logits"], labels[:1])
    other = model.compute_loss(padded["logits"][1:], labels[1:])
    torch.testing.assert_close(both, (one + other) / 2, rtol=0, atol=1e-5)


def test_a_text_longer_than_its_recording_counts_nothing(model: CTCSpeechRecognition) -> None:
    outputs = model(batch()["input_features"], torch.tensor([[1] * 24, [1] * 2 + [0] * 22, [1] * 24]))
    labels = torch.tensor([[1, 2], [1, 2], [2, 2]])
    loss = model.compute_loss(outputs["logits"], labels, outputs["logit_lengths"])
    others = model.compute_loss(outputs["logits"][::2], labels[::2], outputs["logit_lengths"][::2])
    torch.testing.assert_close(loss, others * 2 / 3)


def test_gradients_are_finite_where_there_is_padding(model: CTCSpeechRecognition) -> None:
    outputs = model(batch()["input_features"], batch()["attention_mask"])
    model.compute_loss(outputs["logits"], LABELS, outputs["logit_lengths"]).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_save_then_load_is_the_identity(model: CTCSpeechRecognition, tmp_path: Path, assert_same: Callable) -> None:
    loaded = Model.load(model.save(tmp_path / "speech"))
    assert_same(loaded, model)
    assert loaded.config == model.config


def test_features_of_another_number_are_an_error(model: CTCSpeechRecognition) -> None:
    with pytest.raises(ConfigError, match=r"shape \(1, 8, 5\); it must be \(batch, frames, features\).*num_features=4"):
        model(torch.zeros(1, 8, 5))
