"""The Model contract: a module with a config, a loss, pre- and postprocessing. And models by name."""

import copy
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.base.batch import to_batch
from trainwright.base.errors import ConfigError, ConfigTypeError, did_you_mean
from trainwright.base.lazy_names import ring
from trainwright.base.signatures import read_signature
from trainwright.checkpoint.hub import upload_folder
from trainwright.models import folder as files
from trainwright.models.checkpoint_files import checkpoint_files
from trainwright.models.config import CONFIG_NAME, ModelConfig
from trainwright.models.eval_mode import evaluation_mode
from trainwright.models.registry import Registry


class ModelOutput(dict[str, Any]):
    """One result of ``post_process``.

    >>> out = ModelOutput(text="12A34")
    >>> out["text"], out.text
    ('12A34', '12A34')
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this output has no {name!r}. {did_you_mean(name, self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __repr__(self) -> str:
        return f"ModelOutput({', '.join(f'{name}={value!r}' for name, value in self.items())})"


class Model(nn.Module):
    """Base of models that the Trainer can train, evaluate, save and use for predictions.

    A subclass has ``forward``, which returns a dict such as ``{"logits": ...}``. It may override ``compute_loss``,
    which is called with the outputs and batch fields that its signature names; ``post_process``; and, for a model that
    generates sequences, ``is_generative = True`` and ``generate``.

    Args:
        config: settings; ``kwargs`` set fields of a copy of it.

    Class attributes:
        model_filename, config_filename: names of the files of a saved model.
        is_generative: whether `predict` and evaluation call ``generate`` rather than ``forward``.
        skip_keys_on_load: names or prefixes of weights that a file may have or lack.
        preprocessor_kind: which part of several preprocessors reads this model's inputs, such as "tokenizer".
        base_model_prefix: the attribute that holds the base model, if there is one.

    Raises:
        ConfigTypeError: the config is not one of this model's.
    """

    config_class: ClassVar[type[ModelConfig]] = ModelConfig
    model_filename: str = files.WEIGHTS_NAME
    config_filename: str = CONFIG_NAME
    is_generative: bool = False
    skip_keys_on_load: Sequence[str] = ()
    preprocessor_kind: ClassVar[str] = ""
    base_model_prefix: ClassVar[str] = ""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__()
        if not isinstance(config, self.config_class):
            raise ConfigTypeError(
                f"{type(self).__name__}.config: got {type(config).__name__}; it must be a {self.config_class.__name__}."
            )
        self.config: Any = copy.deepcopy(config).update(kwargs) if kwargs else config
        self._preprocessor: Any = None

    # For subclasses.

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The outputs for a batch, by name; the scores of classes under ``logits``."""
        raise NotImplementedError(f"{type(self).__name__} has no forward.")

    def compute_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy over all labels but -100. The last dimension of ``logits`` are the classes."""
        return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=-100)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The generated sequences, as ids."""
        raise NotImplementedError(f"{type(self).__name__} generates nothing.")

    def preprocess(self, inputs: Any, **kwargs: Any) -> Any:
        """Raw inputs as a batch, by the model's preprocessor.

        Raises:
            ConfigError: the model has none.
        """
        if self.preprocessor is None:
            first = inputs[0] if isinstance(inputs, list | tuple) and inputs else inputs
            kind = f"a {type(inputs).__name__}" + ("" if first is inputs else f" of {type(first).__name__}")
            raise ConfigError(
                f"{type(self).__name__}.predict: got {kind}, and the model has no preprocessor to make a "
                "batch of it. Set model.preprocessor, or give a batch: a dict of tensors."
            )
        return self._part(self.preprocessor_kind)(inputs, return_tensors="torch", **kwargs)

    def post_process(self, outputs: Any) -> Any:
        """Outputs, or ids of labels, as a list with a `ModelOutput` for each input. Here: the outputs as they are."""
        return outputs

    # For callers.

    @property
    def preprocessor(self) -> Any:
        """Converts files and texts to inputs; saved and loaded with the model. None if there is none."""
        return self._preprocessor

    @preprocessor.setter
    def preprocessor(self, preprocessor: Any) -> None:
        """One preprocessor; or several, in a list, a mapping or a ``PreprocessorsContainer``."""
        if isinstance(preprocessor, list | tuple | dict):
            preprocessor = ring("tasks.preprocessor").PreprocessorsContainer(preprocessor)
        self._preprocessor = preprocessor

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or buffer."""
        return next((t.device for tensors in (self.parameters(), self.buffers()) for t in tensors), torch.device("cpu"))

    @property
    def num_parameters(self) -> int:
        """The number of values in its parameters; shared ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def num_trainable_parameters(self) -> int:
        """Those that are not frozen."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def predict(
        self,
        inputs: Any,
        device: torch.device | str | None = None,
        preprocess: bool = True,
        post_process: bool = True,
        **kwargs: Any,
    ) -> Any:
        """The outputs for inputs: after ``post_process`` a list with one `ModelOutput` each.

        Computed in evaluation mode without gradients; the mode of each submodule is restored.

        Args:
            inputs: one raw input (a text, a path) or a list of them, for the preprocessor; or a batch, a dict of
                tensors.
            device: moves the model there first; None does not.
            preprocess: False uses the inputs unchanged, a tensor as the first argument of ``forward``.
            post_process: False returns the result of ``forward`` or ``generate``.
            kwargs: passed to those of ``preprocess`` (or the preprocessor itself), ``forward`` or ``generate``, and
                ``post_process`` that have such an argument.

        Raises:
            ConfigTypeError: none of them names an argument. ConfigError: raw inputs, and no preprocessor.
        """
        run = self.generate if self.is_generative else self.forward
        self._check_arguments(kwargs, run)
        if device is not None:
            self.to(device)
        batch = self._batch_of(inputs, preprocess, kwargs, run)
        batch = to_batch(batch, self.device)
        with evaluation_mode(self):
            outputs = run(**_named_by(run, {**batch, **kwargs}))
        if not post_process:
            return outputs
        outputs_name = next(iter(read_signature(self.post_process).parameters))
        more = _named_by(self.post_process, {**batch, **kwargs})
        return self.post_process(outputs, **{name: value for name, value in more.items() if name != outputs_name})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write weights, config and preprocessor into the folder ``path``, atomically; returns it.

        An existing model is replaced; its ``README.md`` is kept.

        Raises:
            ConfigError: the folder contains other files.
        """
        return files.save_model(self, path, files=model_files(self), weights_name=self.model_filename)

    @classmethod
    def load(
        cls,
        path_or_id: str | os.PathLike[str],
        load_preprocessor: bool = True,
        device: torch.device | str | None = None,
        *,
        model_filename: str | None = None,
        config_filename: str | None = None,
        revision: str | None = None,
        **overrides: Any,
    ) -> Self:
        """The model in a folder, a training checkpoint, or on the hub (``owner/name``). Its config names the class.

        Weights are loaded by name, and all of them must fit; none is executed code. The model is in evaluation mode.

        Args:
            overrides: fields of its config.

        Raises:
            MissingFileError: no such folder, or a file is not in it.
            ConfigKeyError: its model is not registered, or no such field of its config.
            ConfigTypeError: it is a model of another class than that ``load`` is called on.
            CheckpointError: weights are missing, not expected, of another shape, or damaged.
        """
        config_filename = config_filename or cls.config_filename
        folder = files.fetch_model(path_or_id, config_filename, model_filename or cls.model_filename, revision)
        name, content = files.read_config(folder, config_filename)
        model_class = cls if cls.config_class.name == name else find_model(name, str(folder / config_filename))
        if not issubclass(model_class, cls):
            raise ConfigTypeError(
                f"{path_or_id}: holds a {name!r}, which is a {model_class.__name__} and not a {cls.__name__}. "
                f"Load it by {model_class.__name__}.load or Model.load."
            )
        config = model_class.config_class.from_dict(content, source=str(folder / config_filename), **overrides)
        model = model_class(config)
        weights, file = files.read_model_weights(folder, model_filename or model_class.model_filename)
        files.load_all_weights(model, weights, str(file), model.skip_keys_on_load)
        if load_preprocessor and (folder / files.PREPROCESSOR_NAME).is_dir():
            model.preprocessor = ring("tasks.preprocessor").Preprocessor.load(folder)
        return model.to(device or "cpu").eval()

    def push_to_hub(self, repo_id: str, *, private: bool = False, commit_message: str | None = None) -> str:
        """Save the model and upload it as ``owner/name``; returns its address.

        Raises:
            UserError: the hub refused, or cannot be reached.
        """
        with tempfile.TemporaryDirectory() as scratch:
            saved = self.save(Path(scratch, "model"))
            return upload_folder(saved, repo_id, private=private, commit_message=commit_message or "Upload model")

    def _part(self, kind: str) -> Any:
        """The preprocessor of a kind among several, or the single one."""
        if kind and isinstance(self.preprocessor, Mapping):
            return ring("tasks.preprocessor").part_of_kind(self.preprocessor, kind, f"{type(self).__name__}.preprocess")
        return self.preprocessor

    def _batch_of(
        self, inputs: Any, preprocess: bool, kwargs: Mapping[str, Any], run: Callable[..., Any]
    ) -> dict[str, Any]:
        """A batch by name: tensors unchanged, everything else by ``preprocess``."""
        is_ready = isinstance(inputs, Mapping) or not preprocess
        if isinstance(inputs, Tensor) and self.preprocessor is None:
            is_ready = True
        if not is_ready:
            is_one = isinstance(inputs, str | bytes | os.PathLike) or not isinstance(inputs, Sequence)
            taken = {name: kwargs[name] for name in self._preprocess_arguments() if name in kwargs}
            inputs = self.preprocess([inputs] if is_one else inputs, **taken)
        return dict(inputs) if isinstance(inputs, Mapping) else {next(iter(read_signature(run).parameters)): inputs}

    def _preprocess_arguments(self) -> set[str]:
        """The arguments of ``preprocess``: its own, and those of the preprocessor if it forwards them."""
        own = read_signature(self.preprocess).parameters
        names = {name for name, p in own.items() if p.kind is not p.VAR_KEYWORD}
        if len(names) == len(own) or self.preprocessor is None:
            return names
        forwarded = read_signature(self._part(self.preprocessor_kind)).parameters
        names |= {name for name, p in list(forwarded.items())[1:] if p.kind is not p.VAR_KEYWORD}
        return names - {"return_tensors"}

    def _check_arguments(self, kwargs: Mapping[str, Any], run: Callable[..., Any]) -> None:
        known = {name for step in (run, self.post_process) for name in read_signature(step).parameters}
        known = (known | self._preprocess_arguments()) - {"args", "kwargs", "inputs", "outputs"}
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            where = f"{type(self).__name__}.predict: no argument"
            raise ConfigTypeError("\n".join(f"{where} {n!r}. {did_you_mean(n, known)}" for n in unknown))


M = TypeVar("M", bound=type[Model])
_OWN = {
    "crnn_image2text": "trainwright.tasks.image2text.model",
    "bert": "trainwright.tasks.bert",
    "bert_text_classification": "trainwright.tasks.text_classification.model",
    "bert_sequence_labeling": "trainwright.tasks.sequence_labeling.model",
    "ctc_speech_recognition": "trainwright.tasks.speech_recognition.model",
    "gpt_text_generation": "trainwright.tasks.text_generation.model",
}
_registry: Registry[Model] = Registry("model", ModelConfig, _OWN)


def register_model(name: str, config_class: type[ModelConfig]) -> Callable[[M], M]:
    """Class decorator: ``Model.load`` and `build_model` find the class by ``name``, which its config has too.

    Defining a class again, as a notebook does, replaces it.

    Raises:
        ConfigError, ConfigTypeError: the config class is none, has another name, or another model has this one.
    """
    return _registry.decorator(name, config_class)


def find_model(name: str, where: str = "build_model") -> type[Model]:
    """The class registered under ``name``."""
    return _registry.find(name, where)


def build_model(name: str, config: ModelConfig | Mapping[str, Any] | None = None, **kwargs: Any) -> Model:
    """A new model of the class registered under ``name``; ``kwargs`` set fields of its config.

    Raises:
        ConfigKeyError: no such model, or no such field. ConfigTypeError: the config is another model's.
    """
    model_class = find_model(name)
    if isinstance(config, ModelConfig):
        return model_class(config, **kwargs)
    return model_class(model_class.config_class.from_dict({**(config or {}), **kwargs}))


def model_files(model: Model) -> dict[str, bytes]:
    """The files that a model needs besides its weights: ``model_config.yaml`` and those in ``preprocessor/``, by name.

    A training checkpoint has them too, so that it can be loaded as a model.
    """
    return checkpoint_files(model, model.preprocessor)


def _named_by(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that a function has a parameter for."""
    parameters = read_signature(function).parameters
    return {name: value for name, value in values.items() if name in parameters}
