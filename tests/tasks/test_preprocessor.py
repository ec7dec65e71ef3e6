"""Preprocessors: registered, saved, loaded from folders and from a hub, alone and several together."""

import dataclasses
from pathlib import Path

import pytest

from tests.hub_server import HubServer
from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError, MissingFileError
from trainwright.data import (
    AudioFeatureExtractor,
    ImageProcessor,
    ImageProcessorConfig,
    Preprocessor,
    PreprocessorConfig,
    PreprocessorsContainer,
    TextNormalizer,
    TextTokenizer,
    register_preprocessor,
)
from trainwright.tasks.preprocessor import part_of_kind


@dataclasses.dataclass
class ShoutConfig(PreprocessorConfig):
    name = "test_shout"
    mark: str = "!"


@register_preprocessor("test_shout", config_class=ShoutConfig)
class Shout(Preprocessor):
    def __call__(self, text: str) -> str:
        return text.upper() + self.config.mark


def test_one_of_ones_own_is_saved_and_found_by_its_name(tmp_path: Path) -> None:
    folder = Shout(mark="?").save(tmp_path)
    assert folder == tmp_path / "preprocessor"
    assert (folder / "test_shout_config.yaml").read_text() == (
        "name: test_shout\nconfig_type: preprocessor\nmark: '?'\n"
    )
    loaded = Preprocessor.load(tmp_path)
    assert type(loaded) is Shout
    assert loaded("a") == "A?"
    # The config is a copy.
    config = ShoutConfig()
    assert Shout(config, mark="?").config.mark == "?"
    assert config.mark == "!"


def test_one_alone_is_given_as_itself(tmp_path: Path) -> None:
    ImageProcessor(ImageProcessorConfig(size=(64, 32), gray_scale=True)).save(tmp_path)
    loaded = Preprocessor.load(tmp_path)
    assert isinstance(loaded, ImageProcessor)
    assert loaded.config == ImageProcessorConfig(size=(64, 32), gray_scale=True)
    assert Preprocessor.load(tmp_path / "preprocessor").config == loaded.config
    assert Preprocessor.load(tmp_path, size=[8, 8]).config.size == (8, 8)


def all_kinds() -> list[Preprocessor]:
    return [ImageProcessor(), TextTokenizer.train(["a b"]), AudioFeatureExtractor(n_mels=20), TextNormalizer(), Shout()]


def test_several_are_a_container(tmp_path: Path) -> None:
    PreprocessorsContainer(all_kinds()).save(tmp_path)
    loaded = Preprocessor.load(tmp_path)
    assert isinstance(loaded, PreprocessorsContainer)
    assert set(loaded) == {
        "image_processor",
        "text_tokenizer",
        "audio_feature_extractor",
        "text_normalizer",
        "test_shout",
    }
    assert isinstance(loaded.image_processor, ImageProcessor)
    assert loaded.tokenizer.vocabulary == ["a", "b"]
    assert loaded.audio_feature_extractor.config.n_mels == 20
    assert isinstance(loaded.text_normalizer, TextNormalizer)
    assert loaded["test_shout"]("x") == "X!"
    assert type(ImageProcessor.load(tmp_path)) is ImageProcessor
    assert PreprocessorsContainer([Shout()]).tokenizer is None


def test_a_container_holds_one_of_each_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two have the name 'test_shout'"):
        PreprocessorsContainer([Shout(), Shout()])
    with pytest.raises(ConfigTypeError, match="got str"):
        PreprocessorsContainer(["shout"])  # type: ignore[list-item]
    # Overrides need one to be for.
    PreprocessorsContainer([Shout(), TextNormalizer()]).save(tmp_path)
    with pytest.raises(ConfigError):
        Preprocessor.load(tmp_path, mark="?")


def test_from_and_to_a_hub(hub: HubServer) -> None:
    address = PreprocessorsContainer(all_kinds()).push_to_hub("owner/several")
    assert address == f"{hub.url}/owner/several"
    (hub.root / "models/owner/several/model.safetensors").write_bytes(b"weights")
    assert len(Preprocessor.load("owner/several")) == 5
    assert not [path for path in hub.requests if path.endswith("model.safetensors")]
    Shout(mark="?").push_to_hub("owner/one")
    assert Preprocessor.load("owner/one")("a") == "A?"


def test_a_folder_without_one_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "model_config.yaml").write_text("name: crnn\nconfig_type: model\n")
    (tmp_path / "train_config.yaml").write_text("num_epochs: 3\n")
    with pytest.raises(MissingFileError, match=r"no Preprocessor in .*model_config\.yaml"):
        Preprocessor.load(tmp_path)
    Shout().save(tmp_path)
    with pytest.raises(MissingFileError, match="no ImageProcessor in"):
        ImageProcessor.load(tmp_path)
    with pytest.raises(MissingFileError, match="no such folder"):
        Preprocessor.load(tmp_path / "absent")


def test_unknown_names_and_keys_are_reported_with_the_file_and_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "preprocessor" / "image_processor_config.yaml"
    path.parent.mkdir()
    path.write_text("name: image_procesor\n")
    with pytest.raises(ConfigKeyError, match=r"image_processor_config\.yaml.*'image_procesor'.*'image_processor'"):
        Preprocessor.load(tmp_path)
    path.write_text("name: image_processor\ngrayscale: true\n")
    with pytest.raises(ConfigKeyError, match=r"image_processor_config\.yaml.*grayscale.*mean 'gray_scale'"):
        Preprocessor.load(tmp_path)
    path.write_text("config_type: preprocessor\nsize: [1, 2]\n")
    with pytest.raises(ConfigError, match="has no key 'name'"):
        Preprocessor.load(tmp_path)


@pytest.mark.parametrize("given", [[Shout(), TextNormalizer()], {"x": TextNormalizer()}, TextNormalizer()], ids=type)
def test_a_part_is_found_however_it_is_given(given: object) -> None:
    assert isinstance(part_of_kind(given, "text_normalizer", "Me"), TextNormalizer)
    with pytest.raises(ConfigError, match="Me: needs an image processor; its preprocessor has none"):
        part_of_kind(given, "image_processor", "Me")
    with pytest.raises(ConfigError, match=r"Pass preprocessor= to Me\.load or to the Trainer"):
        part_of_kind(None, "tokenizer", "Me")
