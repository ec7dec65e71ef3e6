"""CRNN reads text in pictures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.models import CRNNImage2Text, CRNNImage2TextConfig, Model

CHARACTERS = {0: "", 1: "1", 2: "2", 3: "3", 4: "A"}
NARROW: dict[str, Any] = {
    "id2label": CHARACTERS,
    "image_height": 16,
    "image_width": 32,
    "channels": (4, 8, 8, 8, 12, 12, 12),
    "map2seq_out_dim": 16,
    "rnn_dim": 16,
}


@pytest.fixture
def model() -> CRNNImage2Text:
    torch.manual_seed(0)
    return CRNNImage2Text(CRNNImage2TextConfig(**NARROW))


def pictures(texts: list[list[int]]) -> Tensor:
    """A bar for each character, whose height is its id."""
    batch = torch.zeros(len(texts), 1, 16, 32)
    for row, text in enumerate(texts):
        for place, character in enumerate(text):
            batch[row, 0, 16 - 4 * character :, 2 + 10 * place : 8 + 10 * place] = 1
    return batch


TEXTS = [[1, 2, 3], [4, 4, 1], [3, 2, 0], [2, 2, 2]]


def test_it_learns_to_read(model: CRNNImage2Text, learns: Callable[..., float]) -> None:
    batch = {"pixel_values": pictures(TEXTS), "labels": torch.tensor(TEXTS)}
    assert learns(model, batch, steps=250) < 0.05
    assert [out.text for out in model.predict(batch)] == ["123", "AA1", "32", "222"]
    assert [out["text"] for out in model.post_process(batch["labels"])] == ["123", "AA1", "32", "222"]
    model.eval()
    ids = model.generate(batch["pixel_values"])
    assert model.post_process(ids) == model.post_process(model(batch["pixel_values"]))


def test_it_has_seven_convolutions_and_two_bidirectional_lstms_of_the_documented_sizes() -> None:
    model = CRNNImage2Text(CRNNImage2TextConfig(id2label=CHARACTERS))
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [c.out_channels for c in convolutions] == [64, 128, 256, 256, 512, 512, 512]
    assert (model.map2seq.in_features, model.map2seq.out_features) == (2048, 64)
    assert model.rnn2.input_size == 512
    assert model.rnn1.bidirectional
    logits = model.predict({"pixel_values": torch.zeros(2, 1, 64, 256)}, post_process=False)["logits"]
    assert logits.shape == (2, 64, 5)
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(2, 64))


@pytest.mark.parametrize(("height", "width", "features"), [(32, 128, 1024), (64, 256, 2048), (50, 100, 1536)])
def test_the_features_of_a_step_follow_from_the_height(height: int, width: int, features: int) -> None:
    config = CRNNImage2TextConfig(id2label=CHARACTERS, image_height=height, image_width=width)
    model = CRNNImage2Text(config)
    assert model.map2seq.in_features == features
    assert model.cnn(torch.zeros(1, 1, height, width)).flatten(1, 2).shape[1] == features


@pytest.mark.parametrize("size", [(64, 256), (32, 384), (24, 40), (16, 4), (100, 33)])
def test_pictures_of_any_size_are_read(model: CRNNImage2Text, size: tuple[int, int]) -> None:
    assert model(torch.zeros(2, 1, *size))["logits"].shape == (2, size[1] // 4, 5)


def test_the_loss_is_ctcs_with_padded_labels(model: CRNNImage2Text) -> None:
    logits = model(pictures(TEXTS))["logits"]
    texts = [torch.tensor([i for i in text if i]) for text in TEXTS]
    each = [
        torch.nn.functional.ctc_loss(row[:, None], t[None], torch.tensor([8]), torch.tensor([len(t)]), reduction="none")
        / len(t)
        for row, t in zip(logits, texts, strict=True)
    ]
    torch.testing.assert_close(model.compute_loss(logits, torch.tensor(TEXTS)), torch.cat(each).mean())


def test_texts_and_their_numbers_can_be_turned_round() -> None:
    ids = torch.tensor([[1, 2, 4, 3, 1]])
    read = {}
    for whole in (False, True):
        for digits in (False, True):
            config = CRNNImage2TextConfig(**NARROW, reverse_prediction_text=whole, reverse_output_digits=digits)
            read[whole, digits] = CRNNImage2Text(config).post_process(ids)[0].text
    assert read == {
        (False, False): "12A31",
        (False, True): "21A13",
        (True, False): "13A21",
        (True, True): "31A12",
    }


def test_save_then_load_is_the_identity(model: CRNNImage2Text, tmp_path: Path, assert_same: Callable) -> None:
    model(pictures(TEXTS))  # moves the running statistics
    loaded = Model.load(model.save(tmp_path / "crnn"))
    assert_same(loaded, model)
    assert loaded.config == model.config
    model.eval()
    assert torch.equal(loaded(pictures(TEXTS))["logits"], model(pictures(TEXTS))["logits"])


def test_unused_normalization_in_older_weights_is_passed_over(model: CRNNImage2Text, tmp_path: Path) -> None:
    folder = model.save(tmp_path / "crnn")
    weights = {**model.state_dict(), "cnn.0.bn.weight": torch.ones(4), "cnn.0.bn.bias": torch.zeros(4)}
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "model.pt")
    (folder / "model_config.yaml").write_text(
        (folder / "model_config.yaml")
        .read_text()
        .replace("reverse_output_digits: false", "reverse_output_digits: null")
    )
    assert torch.equal(Model.load(folder).cnn[0].conv.weight, model.cnn[0].conv.weight)


def test_labels_may_be_a_list_or_have_text_for_ids() -> None:
    for labels in (["", "1", "2"], {"0": "", "2": "2", "1": "1"}):
        assert CRNNImage2TextConfig(id2label=labels).id2label == {0: "", 1: "1", 2: "2"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id2label": None}, "id2label: got None; it must map ids"),
        ({"id2label": {0: "", 2: "b"}}, "1 is missing"),
        ({"id2label": {0: "a", 1: "b"}}, "id 0 is blank_id.*'a'"),
        ({"id2label": {"x": ""}}, "its keys are the ids"),
        ({"id2label": {}}, "0 is missing"),
        ({"blank_id": 7}, "blank_id: got 7"),
        ({"channels": (1, 2)}, "channels: got .* 7 whole numbers"),
        ({"batch_norm_blocks": (9,)}, "batch_norm_blocks"),
        ({"map2seq_in_dim": 13}, "multiple of the last of channels, 12"),
        ({"image_height": 8}, "image_height: got 8"),
        ({"rnn_dim": 0}, "rnn_dim: got 0"),
        ({"dropout": 1.0}, "dropout: got 1.0"),
    ],
)
def test_a_config_that_makes_no_network_is_an_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ConfigTypeError), match=message):
        CRNNImage2TextConfig(**{**NARROW, **fields})


def test_pictures_that_do_not_fit_are_an_error_that_says_what_to_do(model: CRNNImage2Text) -> None:
    with pytest.raises(ConfigError, match=r"3 channels, the model takes n_channels=1. Set gray_scale=True"):
        model(torch.zeros(1, 3, 16, 32))
    with pytest.raises(ConfigError, match=r"shape \(1, 16, 32\); it must be \(batch, channels"):
        model(torch.zeros(1, 16, 32))
    with pytest.raises(ConfigError, match="8 high and 32 wide; they must be at least 16 high"):
        model(torch.zeros(1, 1, 8, 32))
