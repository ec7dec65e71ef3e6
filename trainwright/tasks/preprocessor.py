"""Preprocessors convert images, audio and texts to tensors. Their files are stored in a folder ``preprocessor/``."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from trainwright.base.errors import ConfigError, ConfigTypeError, MissingFileError
from trainwright.checkpoint.hub import PathLike, local_folder, upload_folder
from trainwright.config.yaml_config import YamlConfig
from trainwright.config.yaml_file import read_mapping
from trainwright.models.registry import Registry

FOLDER = "preprocessor"
_CONFIG_END = "_config.yaml"
_TOP_LEVEL = [f"*{_CONFIG_END}", "tokenizer.json", "tokenizer_config.json"]  # in a folder without ``preprocessor/``

P = TypeVar("P", bound="type[Preprocessor]")


@dataclasses.dataclass
class PreprocessorConfig(YamlConfig):
    """Base of the settings of preprocessors: a dataclass with a class attribute ``name``.

    Its file is ``{name}_config.yaml``, or the class attribute ``filename``, which must end in ``_config.yaml``.
    """

    config_type: ClassVar[str] = "preprocessor"
    filename: ClassVar[str] = ""

    @classmethod
    def default_filename(cls) -> str:
        return cls.filename or f"{cls.name}{_CONFIG_END}"


def _push_to_hub(self: Any, repo_id: str, *, private: bool = False, commit_message: str | None = None) -> str:
    """Upload the files to the repository ``repo_id`` as one commit and return its URL. Other files there stay."""
    with tempfile.TemporaryDirectory() as name:
        self.save(name)
        return upload_folder(name, repo_id, private=private, commit_message=commit_message or "Upload preprocessor")


class Preprocessor:
    """Base of preprocessors. A class of your own has a config class and ``__call__``, and is registered:

    >>> @dataclasses.dataclass
    ... class ShoutConfig(PreprocessorConfig):
    ...     name = "shout"
    ...     mark: str = "!"
    >>> @register_preprocessor("shout", config_class=ShoutConfig)
    ... class Shout(Preprocessor):
    ...     def __call__(self, text):
    ...         return text.upper() + self.config.mark
    >>> Shout(mark="!!")("hello")
    'HELLO!!'

    Attributes:
        config: its settings, a copy of the given config.
        kind: its attribute in a `PreprocessorsContainer`: "tokenizer", "image_processor",
            "audio_feature_extractor", "text_normalizer", or "" for another kind.
    """

    config_class: ClassVar[type[PreprocessorConfig]] = PreprocessorConfig
    kind: ClassVar[str] = ""

    def __init__(self, config: PreprocessorConfig | None = None, **overrides: Any) -> None:
        if config is not None and not isinstance(config, self.config_class):
            raise ConfigTypeError(
                f"{type(self).__name__}: config must be a {self.config_class.__name__}; got {type(config).__name__}."
            )
        fields = {} if config is None else config.to_dict()
        self.config: Any = self.config_class.from_dict({**fields, **overrides})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no __call__: define one that converts inputs to tensors.")

    def save(self, path: PathLike, subfolder: str = FOLDER) -> Path:
        """Write its files into ``path/preprocessor`` and return that folder. Other files there stay."""
        folder = Path(path) / subfolder
        self.config.save(folder)
        self.save_files(folder)
        return folder

    def save_files(self, folder: Path) -> None:
        """Write data besides the config, for example a vocabulary. `from_files` reads it."""

    @classmethod
    def from_files(cls, config: Any, folder: Path) -> Self:
        """A preprocessor from its config and the files of `save_files`."""
        return cls(config)

    @classmethod
    def load(
        cls, path_or_id: PathLike, subfolder: str = FOLDER, *, revision: str | None = None, **overrides: Any
    ) -> Any:
        """The preprocessor in a folder here or on the hub, or all of them in a `PreprocessorsContainer`.

        Reads ``subfolder``, or the folder itself if there is none. ``Preprocessor.load`` loads all preprocessors;
        ``ImageProcessor.load`` loads the one of this class. ``overrides`` are fields of the config of the only
        preprocessor.

        Raises:
            MissingFileError: there is no such folder, or no preprocessor of this class in it.
            ConfigKeyError, ConfigError: a config has unknown keys or names a preprocessor that is not registered.
        """
        folder = local_folder(path_or_id, files=[f"{subfolder}/*", *_TOP_LEVEL], revision=revision)
        folder = folder / subfolder if (folder / subfolder).is_dir() else folder
        found = [item for item in _read(folder, overrides) if isinstance(item, cls)]
        if not found:
            names = sorted(path.name for path in folder.iterdir())
            raise MissingFileError(
                f"{path_or_id}: no {cls.__name__} in {folder}: it needs a file such as image_processor_config.yaml "
                f"(with a key 'name') or tokenizer.json; it has {names}."
            )
        return found[0] if len(found) == 1 else PreprocessorsContainer(found)

    push_to_hub = _push_to_hub

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"


class PreprocessorsContainer(Mapping[str, Preprocessor]):
    """The preprocessors of a model, by name and by kind.

    A mapping from ``config.name`` to preprocessor; ``tokenizer``, ``image_processor``, ``audio_feature_extractor`` and
    ``text_normalizer`` are the preprocessor of that kind, or None.
    """

    def __init__(self, preprocessors: "Sequence[Preprocessor] | Mapping[str, Preprocessor]" = ()) -> None:
        items = list(preprocessors.values() if isinstance(preprocessors, Mapping) else preprocessors)
        self._items: dict[str, Preprocessor] = {}
        for item in items:
            if not isinstance(item, Preprocessor):
                raise ConfigTypeError(f"preprocessor: got {type(item).__name__}; each must be a Preprocessor.")
            if item.config.name in self._items:
                raise ConfigError(f"preprocessor: two have the name {item.config.name!r}; a model has one of each.")
            self._items[item.config.name] = item

    tokenizer = property(lambda self: self._of_kind("tokenizer"))
    image_processor = property(lambda self: self._of_kind("image_processor"))
    audio_feature_extractor = property(lambda self: self._of_kind("audio_feature_extractor"))
    text_normalizer = property(lambda self: self._of_kind("text_normalizer"))
    push_to_hub = _push_to_hub

    def save(self, path: PathLike, subfolder: str = FOLDER) -> Path:
        """Write the files of all preprocessors into ``path/preprocessor`` and return that folder."""
        for item in self._items.values():
            item.save(path, subfolder)
        return Path(path) / subfolder

    def _of_kind(self, kind: str) -> Preprocessor | None:
        return next((item for item in self._items.values() if item.kind == kind), None)

    def __getitem__(self, name: str) -> Preprocessor:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"PreprocessorsContainer({list(self._items.values())!r})"


_OWN = {
    "audio_feature_extractor": "trainwright.tasks.speech_recognition.audio_features",
    "image_processor": "trainwright.tasks.image2text.image_processor",
    "text_tokenizer": "trainwright.tasks.tokenizer",
    "hf_tokenizer": "trainwright.tasks.tokenizer",
    "text_normalizer": "trainwright.tasks.tokenizer",
}
_registry: Registry[Preprocessor] = Registry("preprocessor", PreprocessorConfig, _OWN)


def register_preprocessor(name: str, config_class: type[PreprocessorConfig]) -> Callable[[P], P]:
    """Class decorator: `Preprocessor.load` finds the class by ``name``, the ``name`` of its config class."""
    return _registry.decorator(name, config_class)


def part_of_kind(preprocessor: Any, kind: str, who: str) -> Any:
    """The part of ``preprocessor`` (one, several, or a container) that has this ``kind``, such as "tokenizer"."""
    words = kind.replace("_", " ")
    if preprocessor is None:
        raise ConfigError(
            f"{who}: needs a preprocessor with {_a(words)}, and has none. Pass preprocessor= to "
            f"{who}.load or to the Trainer, or set the attribute .preprocessor, for example to Preprocessor.load(path)."
        )
    if getattr(preprocessor, "kind", None) == kind:
        return preprocessor
    items = preprocessor.values() if isinstance(preprocessor, Mapping) else preprocessor
    candidates = items if not isinstance(items, Preprocessor) and hasattr(items, "__iter__") else [items]
    for item in candidates:
        if getattr(item, "kind", None) == kind:
            return item
    raise ConfigError(f"{who}: needs {_a(words)}; its preprocessor has none: {preprocessor!r}")


def _a(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _read(folder: Path, overrides: Mapping[str, Any]) -> list[Preprocessor]:
    found = []
    for path in sorted(folder.glob(f"*{_CONFIG_END}")):
        content = read_mapping(path)
        if content.get("config_type", "preprocessor" if "name" in content else "") != "preprocessor":
            continue  # settings of a model, of a run, or of another library
        if "name" not in content:
            raise ConfigError(
                f"{path}: has no key 'name', the registered name of a preprocessor, such as 'image_processor'."
            )
        kind = _registry.find(content["name"], str(path))
        config = kind.config_class.from_dict({**content, **overrides}, source=str(path))
        found.append(kind.from_files(config, path.parent))
    if (folder / "tokenizer.json").is_file() and not any(item.kind == "tokenizer" for item in found):
        tokenizer = _registry.find("hf_tokenizer", str(folder))
        found.append(tokenizer.from_files(tokenizer.config_class(**overrides), folder))
    if overrides and len(found) > 1:
        raise ConfigError(
            f"{folder}: {sorted(overrides)} may be fields of each of {[f.config.name for f in found]}; "
            "load one by its class, or set its config afterwards."
        )
    return found
