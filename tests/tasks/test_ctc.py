"""CTC: the loss against a count of all paths by hand, greedy decoding, and initialization of layers."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data.errors import DataError
from trainwright.models import (
    CRNNImage2Text,
    CRNNImage2TextConfig,
    CTCSpeechRecognition,
    CTCSpeechRecognitionConfig,
    Model,
)
from trainwright.models.export import export_model
from trainwright.tasks.ctc import ctc_greedy_decode, ctc_loss, ids_of, init_for_ctc, read_characters


def collapse(path: tuple[int, ...], blank: int) -> list[int]:
    return [key for key, _ in itertools.groupby(path) if key != blank]


def loss_by_hand(log_probs_TC: Tensor, text: list[int], blank: int) -> float:
    """Over every path of characters that reads as ``text``."""
    num_steps, num_classes = log_probs_TC.shape
    total = sum(
        math.exp(sum(log_probs_TC[t, c].item() for t, c in enumerate(path)))
        for path in itertools.product(range(num_classes), repeat=num_steps)
        if collapse(path, blank) == text
    )
    return -math.log(total)


@pytest.mark.parametrize("blank", [0, 2])
def test_the_loss_is_that_of_all_paths_counted_by_hand(blank: int) -> None:
    torch.manual_seed(0)
    log_probs = torch.randn(2, 4, 3).log_softmax(-1)
    a, b = [i for i in range(3) if i != blank]
    labels = torch.tensor([[a, a, blank], [b, -100, -100]])
    # Each text's loss is divided by its length, then their mean is taken.
    expected = (loss_by_hand(log_probs[0], [a, a], blank) / 2 + loss_by_hand(log_probs[1], [b], blank)) / 2
    # Tolerance: sums of 81 products in single precision.
    assert ctc_loss(log_probs, labels, blank=blank).item() == pytest.approx(expected, rel=1e-5)


def test_gradients_are_torchs_own() -> None:
    torch.manual_seed(0)
    scores = torch.randn(3, 7, 5, requires_grad=True)
    labels, lengths = torch.tensor([[1, 2, 2], [3, 0, 0], [4, 1, 0]]), torch.tensor([3, 1, 2])
    (own,) = torch.autograd.grad(ctc_loss(scores.log_softmax(-1), labels, blank=0), scores)
    targets = torch.tensor([1, 2, 2, 3, 4, 1])
    loss = F.ctc_loss(scores.log_softmax(-1).transpose(0, 1), targets, torch.tensor([7, 7, 7]), lengths)
    (theirs,) = torch.autograd.grad(loss, scores)
    torch.testing.assert_close(own, theirs)


def test_labels_behind_padding_are_found() -> None:
    log_probs = torch.randn(1, 5, 4).log_softmax(-1)
    left, right = torch.tensor([[0, 0, 1, 3]]), torch.tensor([[1, 3, 0, 0]])
    assert torch.equal(ctc_loss(log_probs, left, blank=0), ctc_loss(log_probs, right, blank=0))
    # Time steps beyond the lengths do not count.
    torch.manual_seed(0)
    log_probs = torch.randn(1, 6, 3).log_softmax(-1)
    shorter = ctc_loss(log_probs[:, :4], torch.tensor([[1, 2]]), blank=0)
    assert torch.equal(ctc_loss(log_probs, torch.tensor([[1, 2]]), torch.tensor([4]), blank=0), shorter)
    # A text without characters is a text of blanks.
    log_probs = torch.randn(1, 4, 3).log_softmax(-1)
    loss = ctc_loss(log_probs, torch.zeros(1, 0, dtype=torch.int64), blank=0)
    assert loss.item() == pytest.approx(-log_probs[0, :, 0].sum().item(), rel=1e-5)
    # A label that is no character is an error.
    with pytest.raises(DataError, match="got the id 9; the model has the characters 0 to 3"):
        ctc_loss(torch.randn(1, 5, 4).log_softmax(-1), torch.tensor([[1, 9]]), blank=0)


def test_a_text_longer_than_its_time_steps_counts_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    scores = torch.randn(2, 3, 9, requires_grad=True)
    labels = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [1, 0, 0, 0, 0, 0, 0]])
    with caplog.at_level("WARNING", logger="trainwright"):
        ctc_loss(scores.log_softmax(-1), labels, blank=0).backward()
        ctc_loss(scores.log_softmax(-1), labels, blank=0)
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert not scores.grad[0].any()
    assert scores.grad[1].any()
    (record,) = caplog.records
    assert "7 characters has only 3 time steps" in record.getMessage()


def scores_of(path: list[int], num_classes: int = 4) -> Tensor:
    return F.one_hot(torch.tensor([path]), num_classes).float().log_softmax(-1)


@pytest.mark.parametrize("blank", [0, 3])
def test_the_best_path_is_read_without_repeats_and_blanks(blank: int) -> None:
    torch.manual_seed(0)
    log_probs = torch.randn(6, 9, 4).log_softmax(-1)
    ids = ctc_greedy_decode(log_probs, blank=blank)
    expected = [collapse(tuple(row), blank) for row in log_probs.argmax(-1).tolist()]
    assert [[i for i in row if i != blank] for row in ids.tolist()] == expected
    assert ids.shape == (6, max(map(len, expected)))
    assert ids.dtype is torch.int64


def test_a_character_may_come_twice_if_a_blank_is_between() -> None:
    assert ctc_greedy_decode(scores_of([1, 1, 0, 1, 2, 2]), blank=0).tolist() == [[1, 1, 2]]
    assert ctc_greedy_decode(scores_of([0, 0]), blank=0).shape == (1, 0)
    # Labels with a double character are read as they are.
    ids = ids_of(torch.tensor([[1, 1, 2, 0], [2, -100, -100, -100]]), blank=0)
    assert read_characters(ids, {0: "", 1: "a", 2: "b"}, blank=0) == ["aab", "b"]
    assert read_characters(ids, {0: "<blank>", 1: "a", 2: "b"}, blank=0) == ["aab", "b"]


def test_outputs_logits_and_lists_are_distinguished() -> None:
    logits = scores_of([1, 0, 2])
    for outputs in ({"logits": logits}, logits, {"generated_ids": torch.tensor([[1, 2]])}, [[1, 2]]):
        assert ids_of(outputs, blank=0).tolist() == [[1, 2]]
    with pytest.raises(ConfigTypeError, match=r"got a tensor of shape \(3,\)"):
        ids_of(torch.ones(3), blank=0)
    with pytest.raises(ConfigTypeError, match="got str"):
        ids_of("12", blank=0)


def test_recurrent_weights_keep_lengths_and_forget_gates_are_open() -> None:
    lstm = nn.LSTM(6, 8, num_layers=2, bidirectional=True)
    lstm.apply(init_for_ctc)
    for end in ("l0", "l0_reverse", "l1", "l1_reverse"):
        for gate in getattr(lstm, f"weight_hh_{end}").chunk(4):
            torch.testing.assert_close(gate @ gate.T, torch.eye(8))
        biases = getattr(lstm, f"bias_ih_{end}") + getattr(lstm, f"bias_hh_{end}")
        assert biases.tolist() == [0] * 8 + [1] * 8 + [0] * 16


@pytest.mark.parametrize("convolution", [nn.Conv1d, nn.Conv2d])
def test_convolutions_with_relu_keep_the_size_of_their_inputs(convolution: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64, *[32] * (1 if convolution is nn.Conv1d else 2))
    layers = nn.Sequential(*[m for _ in range(6) for m in (convolution(64, 64, 3, padding=1), nn.ReLU())])
    default = layers(x).square().mean()
    layers.apply(init_for_ctc)
    assert 0.2 < layers(x).square().mean() < 2  # the zeros of the padding cost some
    assert default < 0.02


@pytest.mark.parametrize(
    "model",
    [
        CRNNImage2Text(CRNNImage2TextConfig(id2label=["", "a"], channels=(4,) * 7, rnn_dim=8, map2seq_out_dim=8)),
        CTCSpeechRecognition(CTCSpeechRecognitionConfig(id2label=["", "a"], num_features=8, hidden_size=8)),
    ],
    ids=["crnn", "speech"],
)
def test_models_with_ctc_begin_so(model: nn.Module) -> None:
    lstms = [module for module in model.modules() if isinstance(module, nn.LSTM)]
    assert lstms
    for lstm in lstms:
        for gate in lstm.weight_hh_l0.chunk(4):
            torch.testing.assert_close(gate @ gate.T, torch.eye(8))


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


def test_pictures_that_do_not_fit_are_an_error_that_says_what_to_do(
    model: CRNNImage2Text, speech: CTCSpeechRecognition
) -> None:
    with pytest.raises(ConfigError, match=r"3 channels.*n_channels=1.*gray_scale=True"):
        model(torch.zeros(1, 3, 16, 32))
    with pytest.raises(ConfigError, match=r"shape \(1, 16, 32\); it must be \(batch, channels"):
        model(torch.zeros(1, 16, 32))
    with pytest.raises(ConfigError, match="8 high and 32 wide; they must be at least 16 high"):
        model(torch.zeros(1, 1, 8, 32))
    # Features of another number are an error.
    with pytest.raises(ConfigError, match=r"\(1, 8, 5\).*\(batch, frames, features\).*num_features=4"):
        speech(torch.zeros(1, 8, 5))


LABELS = torch.tensor([[1, 2, 1], [2, 2, 0], [1, 0, 0]])


@pytest.fixture
def speech() -> CTCSpeechRecognition:
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


@pytest.mark.parametrize("num_frames", [8, 7, 1])
def test_how_far_a_batch_is_padded_changes_nothing(speech: CTCSpeechRecognition, num_frames: int) -> None:
    torch.manual_seed(1)
    features = torch.randn(1, num_frames, 4)
    noise = torch.randn(2, 20, 4)  # what lies in padding does not matter
    noise[:1, :num_frames] = features
    mask = torch.zeros(2, 20)
    mask[0, :num_frames] = mask[1, :] = 1
    alone = speech.predict({"input_features": features}, post_process=False)
    padded = speech.predict({"input_features": noise, "attention_mask": mask}, post_process=False)
    steps = (num_frames + 1) // 2
    assert padded["logit_lengths"].tolist() == [steps, 10]
    # Tolerance: single precision, other shapes.
    torch.testing.assert_close(padded["logits"][:1, :steps], alone["logits"], rtol=0, atol=1e-5)
    assert (padded["logits"][0, steps:].argmax(-1) == 0).all()
    labels = torch.tensor([[1], [2]])
    both = speech.compute_loss(padded["logits"], labels, padded["logit_lengths"])
    one = speech.compute_loss(alone["logits"], labels[:1])
    other = speech.compute_loss(padded["logits"][1:], labels[1:])
    torch.testing.assert_close(both, (one + other) / 2, rtol=0, atol=1e-5)


def test_gradients_are_finite_where_there_is_padding(speech: CTCSpeechRecognition) -> None:
    outputs = speech(batch()["input_features"], batch()["attention_mask"])
    speech.compute_loss(outputs["logits"], LABELS, outputs["logit_lengths"]).backward()
    assert all(parameter.grad.isfinite().all() for parameter in speech.parameters())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch.onnx
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11
@pytest.mark.parametrize("ending", ["pt2", "onnx"])
def test_the_speech_model_is_exported_with_its_numbers_whatever_is_padded(ending: str, tmp_path: Path) -> None:
    if ending == "onnx":
        pytest.importorskip("onnxruntime")
        if TorchVersion(torch.__version__) < "2.12":
            pytest.skip("torch 2.11 does not export it: pending unbacked symbols")
    torch.manual_seed(0)
    config = CTCSpeechRecognitionConfig(id2label=["", "a"], num_features=20, hidden_size=8, num_hidden_layers=2)
    mask = (torch.arange(21) < torch.tensor([[21], [15], [4]])).long()
    batch = {"input_features": torch.randn(3, 21, 20), "attention_mask": mask}
    _, difference = export_model(CTCSpeechRecognition(config), tmp_path / f"model.{ending}", batch)
    assert difference < 1e-5
