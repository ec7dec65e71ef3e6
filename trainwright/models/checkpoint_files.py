"""Files that a training checkpoint has beside the weights, so that it can be loaded as a model."""

import copy
import logging
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from trainwright.models.adapters import is_peft_model

logger = logging.getLogger("trainwright.models")


def checkpoint_files(model: nn.Module, preprocessor: Any = None, *, has_all_weights: bool = True) -> dict[str, bytes]:
    """The files of the model's config and of its preprocessor, by their relative names.

    Of a model of this library ``model_config.yaml``. Of one of transformers ``config.json`` and
    ``generation_config.json``, with which ``from_pretrained(checkpoint)`` works; not if the checkpoint has only the
    trained weights (``has_all_weights=False``): ``from_pretrained`` would initialize the others at random. Its
    preprocessor is in ``preprocessor/``.
    """
    files: dict[str, bytes] = {}
    config: Any = None
    with suppress(Exception):  # of a property: it must not prevent a save
        config = getattr(model, "config", None)
    own = sys.modules.get("trainwright.config.yaml_config")  # not imported for a config of another kind
    # Not a model that holds one of transformers: from_pretrained would not find the weights by their names.
    is_of_transformers = any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)
    if own is not None and isinstance(config, own.YamlConfig):
        files[getattr(model, "config_filename", "model_config.yaml")] = config.to_yaml().encode()
    elif has_all_weights and is_of_transformers and not _has_adapters(model):
        try:
            files |= _files_of_transformers(model, config)
        except Exception as error:  # such as a setting that JSON does not have: it must not prevent a save
            logger.warning("Checkpoints have no config.json, so transformers cannot load them: %s", error)
    if hasattr(preprocessor, "save"):
        files |= _files_written_by(preprocessor.save)
    elif hasattr(preprocessor, "save_pretrained"):  # transformers: from_pretrained(checkpoint / "preprocessor")
        written = _files_written_by(preprocessor.save_pretrained)
        files |= {f"preprocessor/{name}": text for name, text in written.items()}
    return files


def class_name(model: nn.Module) -> str:
    """The name of the model's class, also if ZeRO has made a class of its own of it (torch's ``fully_shard``)."""
    kind = type(model)
    is_sharded = any(base.__name__ == "FSDPModule" for base in kind.__bases__)
    return kind.__bases__[-1].__name__ if is_sharded else kind.__name__


def _has_adapters(model: nn.Module) -> bool:
    """Whether peft has changed the names of weights."""
    return is_peft_model(model) or any(type(module).__module__.startswith("peft.") for module in model.modules())


def _files_of_transformers(model: Any, config: Any) -> dict[str, bytes]:
    """As ``save_pretrained`` writes them: with the class of the model, by which servers choose theirs."""
    config = copy.deepcopy(config)
    config.architectures = [class_name(model)]
    files = {"config.json": config.to_json_string().encode()}
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        files["generation_config.json"] = generation.to_json_string().encode()
    return files


def _files_written_by(save: Callable[[Path], object]) -> dict[str, bytes]:
    """The files that ``save(folder)`` writes, by their relative names."""
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        written = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in written}
