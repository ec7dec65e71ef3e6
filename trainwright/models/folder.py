"""A model as a folder, written atomically: ``model.safetensors``, ``model_config.yaml``, ``preprocessor/``."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainwright.base.errors import ConfigError, ConfigTypeError, MissingFileError
from trainwright.base.files import clean_sibling, commit_folder, make_folders, swap_folders
from trainwright.checkpoint.errors import PartialWeightsError
from trainwright.checkpoint.folder import is_checkpoint
from trainwright.checkpoint.hub import local_folder
from trainwright.checkpoint.manifest import MANIFEST_NAME
from trainwright.checkpoint.safetensors_file import TensorFile
from trainwright.checkpoint.shards import ShardReader, StoredTensor
from trainwright.checkpoint.state_files import MODEL
from trainwright.checkpoint.verify import read_unchanged, verify
from trainwright.checkpoint.weights import (
    INDEX_NAME,
    OLD_WEIGHTS_NAME,
    group_names,
    load_weights,
    read_weights,
    split_model_state,
)
from trainwright.config.yaml_file import read_mapping
from trainwright.models.config import CONFIG_NAME
from trainwright.parallel.wrappers import model_state

WEIGHTS_NAME = "model.safetensors"
_CONFIG_OF_TRANSFORMERS = "config.json"  # a repository with this file alone may have its weights in several files
_FILES_OF_INDEX = "model-*-of-*.safetensors"  # of a large model of transformers
PREPROCESSOR_NAME = "preprocessor"
_LAST = ("final_epoch", "model_final", "model_best")  # links of a run to a checkpoint
_KEPT = "README.md"  # the hub's page of a model


def save_model(
    model: nn.Module, path: str | os.PathLike[str], *, files: Mapping[str, bytes], weights_name: str = WEIGHTS_NAME
) -> Path:
    """Write a model's folder: its weights and ``files``. An existing one is replaced atomically. Returns it."""
    folder = Path(path).expanduser().resolve()
    _check_place(folder, {weights_name, *files})
    tensors, metadata, extra_state = split_model_state(model)
    if extra_state:
        raise ConfigTypeError(
            f"{type(model).__name__}.save: {', '.join(group_names(extra_state))} is no tensor, and a model's folder "
            "holds tensors and settings only; a training checkpoint keeps it."
        )
    make_folders(folder.parent)
    temporary = clean_sibling(folder)
    try:
        temporary.mkdir()
        for name, content in files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(content)
        with open(temporary / weights_name, "xb") as file:
            TensorFile(tensors, metadata)(file)
        _put_in_place(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def read_config(folder: Path, filename: str = CONFIG_NAME) -> tuple[str, dict[str, Any]]:
    """The registered name of the model in ``folder``, and the content of its config file."""
    file = folder / filename
    if not file.is_file():
        raise MissingFileError(
            f"{folder}: has no {filename}, which says what model it is (it holds {_listing(folder)}). "
            "For weights alone, build the model and give the folder as init_weights_from."
        )
    content = read_mapping(file)
    name = content.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"{file}: has no key 'name', the registered name of the model, such as 'crnn_image2text'.")
    return name, content


def fetch_model(path_or_id: str | os.PathLike[str], config: str, weights: str, revision: str | None = None) -> Path:
    """The folder of a model, here or from the hub: only the files that loading reads."""
    wanted = [config, _CONFIG_OF_TRANSFORMERS, f"{PREPROCESSOR_NAME}/*"]
    folder = local_folder(path_or_id, files=[*wanted, weights], revision=revision)
    if not Path(path_or_id).expanduser().is_dir() and not (folder / weights).exists():
        others = [OLD_WEIGHTS_NAME, INDEX_NAME, _FILES_OF_INDEX]
        folder = local_folder(path_or_id, files=[*wanted, *others], revision=revision)
    return folder


def read_model_weights(folder: Path, filename: str = WEIGHTS_NAME) -> tuple[dict[str, Any], Path]:
    """The weights in a model's folder or a checkpoint, and the file they come from; see `read_weights`.

    A checkpoint is verified first.
    """
    if not (folder / MANIFEST_NAME).exists():
        return _read_weights_file(folder, filename)

    def read(folder: Path) -> tuple[dict[str, Any], Path]:
        manifest = verify(folder)
        if manifest.layout is not None:
            return dict(ShardReader(folder, MODEL, manifest.files).stored()), folder
        return _read_weights_file(folder, filename)

    return read_unchanged(folder, read)


def _read_weights_file(folder: Path, filename: str) -> tuple[dict[str, Any], Path]:
    for name in (filename, INDEX_NAME, OLD_WEIGHTS_NAME):
        if (folder / name).is_file():
            return read_weights(folder / name), folder / name
    raise _no_weights(folder, filename)


def _no_weights(folder: Path, filename: str = WEIGHTS_NAME) -> MissingFileError:
    found = [folder / name for name in _LAST if (folder / name).is_dir()]
    hint = f" For the weights of this run give {found[0]}." if found else ""
    return MissingFileError(
        f"{folder}: has neither {filename} nor {OLD_WEIGHTS_NAME} (it holds {_listing(folder)}).{hint}"
    )


def load_all_weights(model: nn.Module, weights: Mapping[str, Any], source: str, skip: Sequence[str] = ()) -> None:
    """Load weights that are the model's own: every name and shape must agree. Floating-point types are converted.

    Args:
        skip: names, or beginnings of names up to a dot, of weights that are left out, and need not be there.
    """
    own = model_state(model)
    weights = {name: _as(weight, own.get(name)) for name, weight in weights.items() if not _is_below(name, skip)}
    for name, value in own.items():
        if _is_below(name, skip):
            weights[name] = value
    load_weights(model, weights, source, strict=True)


def init_weights(
    model: nn.Module, path_or_id: str | os.PathLike[str], *, revision: str | None = None, partial: bool = False
) -> list[str]:
    """Start ``model`` from the weights of another one, here (a folder, a checkpoint, a file) or on the hub.

    Those whose names and shapes fit are loaded; files of transformers are converted as its ``from_pretrained`` does. A
    base model's weights go into a model that has it below ``base_model_prefix``, too. Returns the names of the model's
    weights that were not loaded, which are logged too.

    Args:
        partial: whether weights may be missing anywhere, and not only those of a new head.

    Raises:
        MissingFileError: there is no such folder, or no weights in it. CheckpointError: none of them fits, or some are
            missing that are not those of a head.
    """
    path = weights_to_load(path_or_id, revision)
    weights, file = (read_weights(path), path) if path.is_file() else read_model_weights(path)
    try:
        return load_weights(model, weights, str(file), strict=False, partial=partial)
    except PartialWeightsError as error:
        raise PartialWeightsError(f"{error}\nTo start from what fits, pass partial=True.") from None


def weights_to_load(path_or_id: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The file or folder with the initial weights of a model, downloaded from the hub if it is an id."""
    path = Path(path_or_id).expanduser()
    if path.is_file():
        return path
    folder = fetch_model(path_or_id, CONFIG_NAME, WEIGHTS_NAME, revision)
    files = (WEIGHTS_NAME, INDEX_NAME, OLD_WEIGHTS_NAME)
    if not is_checkpoint(folder) and not any((folder / name).is_file() for name in files):
        raise _no_weights(folder)
    return folder


def _as(weight: Any, own: Any) -> Any:
    weight = weight.whole(is_mapped=True) if isinstance(weight, StoredTensor) else weight
    if isinstance(own, Tensor) and own.is_floating_point() and weight.is_floating_point():
        return weight.to(own.dtype)
    return weight


def _is_below(name: str, beginnings: Sequence[str]) -> bool:
    return any(re.match(rf"{re.escape(beginning)}(\.|$)", name) for beginning in beginnings)


def _check_place(folder: Path, names: set[str]) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; a model is saved as a folder.")
    own = names | {PREPROCESSOR_NAME, OLD_WEIGHTS_NAME, _KEPT}
    others = sorted(path.name for path in folder.iterdir() if path.name not in own)
    if others:
        raise ConfigError(
            f"{folder}: holds other things as well ({', '.join(others[:5])}), which saving a model there would delete; "
            "give it a folder of its own."
        )


def _put_in_place(temporary: Path, folder: Path) -> None:
    if (folder / _KEPT).is_file() and not (temporary / _KEPT).exists():
        shutil.copy2(folder / _KEPT, temporary)
    if not folder.exists() or not any(folder.iterdir()):
        commit_folder(temporary, folder)
        return
    fresh = clean_sibling(folder)
    commit_folder(temporary, fresh)
    try:
        swap_folders(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # the previous folder; the new one if the exchange failed


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return ", ".join(names[:8]) + (" ..." if len(names) > 8 else "") or "nothing"
