"""Models as folders: saved whole or not at all, loaded by name, here and from a hub."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.hub_server import HubServer
from tests.toys import assert_equal_weights
from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError, MissingFileError
from trainwright.checkpoint import Checkpointer, CheckpointError
from trainwright.models import (
    Bert,
    BertConfig,
    BertTextClassification,
    BertTextClassificationConfig,
    GPTTextGeneration,
    GPTTextGenerationConfig,
    Model,
    init_weights,
    model_files,
)

SMALL = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 10,
}


def test_save_then_load_is_the_identity(tiny: Model, tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "deep" / "tiny")
    assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "model_config.yaml", "preprocessor"]
    loaded = Model.load(folder)
    assert type(loaded) is type(tiny)
    assert_equal_weights(loaded, tiny)
    assert loaded.config == tiny.config
    assert loaded.preprocessor.config == tiny.preprocessor.config
    assert not loaded.training
    assert loaded.predict(["one two"]) == tiny.predict(["one two"])


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = GPTTextGeneration(GPTTextGenerationConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1))
    loaded = GPTTextGeneration.load(model.save(tmp_path / "gpt"))
    assert_equal_weights(loaded, model)
    assert loaded.head.weight is loaded.token_embedding.weight
    assert loaded.num_parameters == model.num_parameters


def test_a_field_of_the_config_may_be_other_for_this_load(tmp_path: Path) -> None:
    folder = Bert(BertConfig(**SMALL)).save(tmp_path / "bert")
    loaded = Model.load(folder, hidden_dropout_prob=0.5)
    assert loaded.config.hidden_dropout_prob == 0.5
    with pytest.raises(ConfigKeyError, match="Did you mean 'hidden_dropout_prob'"):
        Model.load(folder, hidden_dropout_pro=0.5)


def test_saving_again_replaces_everything_but_the_readme(tiny: Model, tmp_path: Path, files_of: Callable) -> None:
    folder = tiny.save(tmp_path / "m")
    (folder / "README.md").write_text("mine")
    nn.init.ones_(tiny.linear.weight)
    tiny.preprocessor = None
    tiny.save(folder)
    assert set(files_of(folder)) == {"README.md", "model.safetensors", "model_config.yaml"}
    assert (folder / "README.md").read_text() == "mine"
    assert_equal_weights(Model.load(folder), tiny)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_folder_with_other_things_is_left_alone(tiny: Model, tmp_path: Path, files_of: Callable) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"thesis.txt.*folder of its own"):
        tiny.save(tmp_path)
    assert files_of(tmp_path) == {"thesis.txt": b"years of work"}
    with pytest.raises(ConfigError, match="is a file"):
        tiny.save(tmp_path / "thesis.txt")


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_a_failed_save_leaves_what_was_there(
    tiny: Model, tmp_path: Path, files_of: Callable, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    folder = tiny.save(tmp_path / "m")
    before = files_of(tmp_path)
    nn.init.ones_(tiny.linear.weight)

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space left"):
            tiny.save(folder)
    assert files_of(tmp_path) == before


def test_state_that_is_no_tensor_is_refused(tiny: Model, tmp_path: Path) -> None:
    class Counter(nn.Module):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None: ...

    tiny.counter = Counter()
    with pytest.raises(ConfigTypeError, match=r"counter._extra_state is no tensor"):
        tiny.save(tmp_path / "m")
    assert not list(tmp_path.iterdir())


# What is wrong is said, once.


def test_weights_that_do_not_fit_are_all_named_in_one_message(tiny: Model, tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "m")
    other = nn.Module()
    other.linear = nn.Linear(2, 4)
    other.extra = nn.Linear(1, 1)
    torch.save(other.state_dict(), folder / "model.pt")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        Model.load(folder)
    message = str(caught.value)
    assert "not in the checkpoint: norm.{weight, bias, running_mean, running_var, num_batches_tracked}" in message
    assert "not in the model: extra.{weight, bias}" in message
    assert "linear.weight: shape (4, 2) there, (3, 2) in the model" in message


def test_weights_of_another_place_or_precision(tiny: Model, tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "m")
    renamed = {f"old.{name}": value for name, value in tiny.state_dict().items()}
    torch.save(renamed, folder / "model.pt")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"not in the model: old.linear"):
        Model.load(folder)

    folder = tiny.save(tmp_path / "m")
    torch.save(
        {name: v.double() if v.is_floating_point() else v for name, v in tiny.state_dict().items()}, folder / "model.pt"
    )
    (folder / "model.safetensors").unlink()
    loaded = Model.load(folder)
    assert loaded.linear.weight.dtype is torch.float32
    assert torch.equal(loaded.linear.weight, tiny.linear.weight)


def test_a_class_loads_its_own_models_only(tiny: Model, tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "m")
    assert type(type(tiny).load(folder)) is type(tiny)
    with pytest.raises(ConfigTypeError, match="holds a 'tiny_of_tests', which is a Tiny and not a Bert"):
        Bert.load(folder)
    # The preprocessor may be left out.
    assert Model.load(tiny.save(tmp_path / "m"), load_preprocessor=False).preprocessor is None
    # A pt file with code in it is refused.
    folder = tiny.save(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    torch.save(tiny, folder / "model.pt")
    with pytest.raises(CheckpointError, match="may hold code, which is never run"):
        Model.load(folder)


def test_what_is_missing_is_said(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="nowhere"):
        Model.load(tmp_path / "nowhere")
    folder = tiny.save(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"model.safetensors .*model.pt .*model_config.yaml, pre"):
        Model.load(folder)
    (folder / "model_config.yaml").unlink()
    with pytest.raises(MissingFileError, match=r"has no model_config.yaml, which says what model it is"):
        Model.load(folder)
    # A config that names no known model is an error.
    folder = tiny.save(tmp_path / "m")
    (folder / "model_config.yaml").write_text("name: bert_text_clasification\n")
    with pytest.raises(ConfigKeyError, match="Did you mean 'bert_text_classification'"):
        Model.load(folder)
    (folder / "model_config.yaml").write_text("width: 3\n")
    with pytest.raises(ConfigError, match="has no key 'name'"):
        Model.load(folder)


# Checkpoints.


def checkpoint_of(model: Model, folder: Path) -> Path:
    checkpointer = Checkpointer(model, folder, asynchronous=False, attachments=lambda: model_files(model))
    checkpointer.save("7", iteration=6)
    return folder / "7"


def test_a_training_checkpoint_with_a_config_is_a_model(tiny: Model, tmp_path: Path) -> None:
    loaded = Model.load(checkpoint_of(tiny, tmp_path))
    assert_equal_weights(loaded, tiny)
    assert loaded.preprocessor.config.scale == 2.0
    # A damaged checkpoint is not loaded.
    weights = checkpoint_of(tiny, tmp_path) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors has checksum"):
        Model.load(tmp_path / "7")


# The hub.


def test_a_model_goes_to_a_hub_and_comes_back(
    tiny: Model, hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    address = tiny.push_to_hub("someone/tiny")
    assert address.endswith("someone/tiny")
    (hub.folder("models", "someone/tiny") / "notes.txt").write_text("not needed")
    loaded = Model.load("someone/tiny")
    assert_equal_weights(loaded, tiny)
    assert loaded.preprocessor.config.scale == 2.0
    assert not any(path.endswith("notes.txt") for path in hub.requests)


def test_models_on_a_hub_are_found(tiny: Model, hub: HubServer) -> None:
    folder = tiny.save(hub.folder("models", "someone/old"))
    torch.save(tiny.state_dict(), folder / "model.pt")
    (folder / "model.safetensors").unlink()
    assert_equal_weights(Model.load("someone/old"), tiny)

    with pytest.raises(MissingFileError, match="someone/else"):
        Model.load("someone/else")


# Beginning with the weights of another model.


@pytest.fixture
def base(tmp_path: Path) -> Bert:
    torch.manual_seed(1)
    model = Bert(BertConfig(**SMALL))
    model.save(tmp_path / "base")
    return model


def classifier() -> BertTextClassification:
    torch.manual_seed(2)
    return BertTextClassification(BertTextClassificationConfig(id2label=["no", "yes"], **SMALL))


def test_a_base_gives_what_fits(base: Bert, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, untouched = classifier(), classifier()
    assert init_weights(model, tmp_path / "base") == ["classifier.weight", "classifier.bias"]
    assert_equal_weights(model.bert, base.bert)
    assert_equal_weights(model.classifier, untouched.classifier)

    caplog.clear()
    with caplog.at_level("INFO", logger="trainwright"):
        init_weights(classifier(), tmp_path / "base")
    (record,) = caplog.records
    assert "in the model, not in the file: classifier.{weight, bias}" in record.getMessage()

    torch.save(base.bert.state_dict(), tmp_path / "bare.pt")
    model = classifier()
    assert init_weights(model, tmp_path / "bare.pt") == ["classifier.weight", "classifier.bias"]
    assert_equal_weights(model.bert, base.bert)


def test_weights_that_do_not_fit_a_base(base: Bert, tmp_path: Path, tiny: Model) -> None:
    model = BertTextClassification(BertTextClassificationConfig(id2label=["no", "yes"], **{**SMALL, "vocab_size": 21}))
    with pytest.raises(CheckpointError, match=r"1 of the \d+ weights .*\n.*word_embeddings.*\n.* partial=True"):
        init_weights(model, tmp_path / "base")
    left = init_weights(model, tmp_path / "base", partial=True)
    assert left == ["bert.embeddings.word_embeddings.weight", "classifier.weight", "classifier.bias"]

    with pytest.raises(CheckpointError, match="none of the weights fits"):
        init_weights(classifier(), tiny.save(tmp_path / "tiny"))


def test_the_folder_of_a_run_is_refused_with_the_name_of_its_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "12").mkdir(parents=True)
    (tmp_path / "final_epoch").symlink_to("checkpoints/12")
    with pytest.raises(MissingFileError, match=f"For the weights of this run give {tmp_path / 'final_epoch'}"):
        init_weights(nn.Linear(2, 2), tmp_path)
