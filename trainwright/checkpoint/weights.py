"""A model's weights: read them from the model or a file, and load all or the fitting ones into the model."""

import json
import logging
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainwright._torch_compat.self_loading import self_loading_modules
from trainwright._torch_compat.tensor_chunks import local_of
from trainwright.base.dist import TIED_COPY
from trainwright.base.errors import MissingFileError
from trainwright.base.files import irregular
from trainwright.checkpoint.conversion import converted
from trainwright.checkpoint.errors import CheckpointError, PartialWeightsError
from trainwright.checkpoint.safetensors_file import check_tensor, tensor_key
from trainwright.checkpoint.safetensors_header import COPIES, TIED, read_header
from trainwright.checkpoint.shard_index import is_share
from trainwright.checkpoint.shards import ShardReader, StoredTensor
from trainwright.optim.layer_depth import head_names
from trainwright.parallel.pipeline import outline_of
from trainwright.parallel.sharding import class_before_sharding
from trainwright.parallel.wrappers import load_model_state, model_state, plain_name, unwrap

logger = logging.getLogger("trainwright.checkpoint")

_LEAST_BYTES = 2**22  # that are read at once
_SHOWN = 5  # modules that an error names
OLD_WEIGHTS_NAME = "model.pt"  # read, never written
INDEX_NAME = "model.safetensors.index.json"  # of a model of transformers in several files


def split_model_state(
    model: nn.Module, only: Collection[str] | None = None, *, is_sharded: bool = False
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, object]]:
    """A model's state as (tensors, metadata of their file, the modules' ``get_extra_state`` values).

    Tied tensors are listed once; the metadata holds their other names. ``only``: the names to list. ``is_sharded``:
    there may be DTensors.

    Raises:
        CheckpointTypeError: a parameter or buffer has no dense data.
    """
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    extra_state: dict[str, object] = {}
    names: dict[tuple[object, ...], str] = {}
    for name, value in model_state(model).items():
        if only is not None and name not in only:
            continue
        if not isinstance(value, Tensor):
            extra_state[name] = value
            continue
        check_tensor(local_of(value) if is_sharded else value, f"model.{name}")
        first = names.setdefault(tensor_key(value), name)
        if first == name:
            tensors[name] = value
        else:
            tied[name] = first
    copies = _copies_on_stages(model) if is_sharded else {}
    metadata = {TIED: json.dumps(tied)} if tied else {}
    metadata |= {COPIES: json.dumps(copies)} if copies else {}
    return tensors, metadata, extra_state


def _copies_on_stages(model: nn.Module) -> dict[str, str]:
    """{name of a parameter of this pipeline stage: name of the same parameter on the first stage that holds it}."""
    return {
        plain_name(name): first
        for name, parameter in unwrap(model).named_parameters()
        if (first := getattr(parameter, TIED_COPY, None)) is not None
    }


def read_weights(path: Path) -> dict[str, Any]:
    """The named tensors of a file, read without running code.

    Those of a ``.safetensors`` file, or of the files that a ``model.safetensors.index.json`` lists, are not read yet:
    each is a `StoredTensor`. ``.pt`` and ``.pth`` files are read completely.

    Raises:
        CheckpointError: the file does not hold named tensors.
    """
    if (kind := irregular(path)) is not None:
        raise CheckpointError(f"{path}: this is {kind}; it must be a file with weights.")
    if path.suffix == ".safetensors":
        if is_share(read_header(path)):
            raise CheckpointError(
                f"{path}: holds the parts of the tensors that one process had; give the checkpoint, {path.parent}."
            )
        return dict(ShardReader(path.parent, None, [path.name]).stored())
    if path.name == INDEX_NAME:
        return dict(ShardReader(path.parent, None, _listed_files(path)).stored())
    if path.suffix in (".pt", ".pth"):
        return _read_torch_file(path)
    raise CheckpointError(f"{path}: weights are read from a checkpoint folder, a .safetensors, a .pt or a .pth file.")


def _listed_files(index: Path) -> list[str]:
    try:
        names = [*dict.fromkeys(json.loads(index.read_bytes())["weight_map"].values())]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: expected an object with weight_map, the file of each tensor.") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} must be the name of a file in the same folder.")
    if missing := [name for name in names if not index.with_name(name).is_file()]:
        raise MissingFileError(
            f"{index}: {len(missing)} of the {len(names)} files that it lists are missing in the folder:"
            f" {', '.join(missing[:3])}{' …' * (len(missing) > 3)}. Copy or download them again."
        )
    return names


def _read_torch_file(path: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols, which do not matter here
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # an invalid file can raise any error
        # Torch's first line suggests to run the code in the file; the line with the cause names that code.
        found = re.search(r"WeightsUnpickler error: ([^\n.]*)", str(error))
        reason = found[1].strip() if found else type(error).__name__
        raise CheckpointError(
            f"{path}: refused, it cannot be read as plain tensors ({reason}). A .pt file may hold code, which is never "
            "run here: save only model.state_dict() in the program that made it, or save it with safetensors."
        ) from error
    for key in ("state_dict", "model"):  # what trainers wrap it in
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}; expected the mapping of a state_dict().")
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others:
        raise CheckpointError(f"{path}: expected only tensors; these values are not: {', '.join(others[:10])}.")
    return {str(name): value for name, value in content.items()}


def load_weights(
    model: nn.Module,
    weights: Mapping[str, Any],
    source: str,
    *,
    strict: bool,
    only: Collection[str] | None = None,
    partial: bool = True,
    is_resumed: bool = False,
) -> list[str]:
    """Copy ``weights`` into the parameters and buffers of the model; returns the names that keep their values.

    What a module loads itself may have other shapes and names: the module decides.

    Args:
        strict: every name, shape and dtype must match (a resume). Otherwise weights that do not fit are skipped and
            logged.
        only: names that must be there; the model keeps its own values of others that are missing.
        partial: without ``strict``, weights may be missing anywhere; False: only those of the head.
        is_resumed: the weights are those of this model. Others may be those of a base model, and in the form in which
            transformers stores them.

    Raises:
        PartialWeightsError: without ``strict`` and ``partial``, weights are missing that are not those of the head.
        CheckpointError: a weight does not match, or without ``strict`` none fits. The model is then unchanged, unless a
            module that loads itself has raised.
    """
    own = model_state(model)
    for name, value in own.items():
        if isinstance(value, Tensor):
            check_tensor(local_of(value), f"model.{name}")
    weights = _by_names_of_model(model, weights, own)
    if not is_resumed:
        weights = _with_base_prefix(model, converted(unwrap(model), weights, own, source), own)
    modules = {plain_name(name) for name in self_loading_modules(unwrap(model))}
    theirs = {name for name in (*own, *weights) if name.rpartition(".")[0] in modules}
    match = _Match.of(own, weights, theirs, only)
    if strict:
        match.check_equal(source, is_resumed=is_resumed)
    match.check_any(source)
    if not partial and not strict:
        match.check_complete(model, source)
    if not strict:
        match.log_rest(source)
    fitting = {n: value for n, value in weights.items() if (n in own and n not in match.shapes) or n in theirs}
    try:
        _copy(model, fitting, own, theirs)
    except Exception as error:
        if theirs:
            error.add_note(f"While the modules {', '.join(sorted(modules))} loaded their state from {source}.")
        raise
    # A tensor may have several names, of which one is enough.
    loaded = {tensor_key(own[name]) for name in fitting if isinstance(own.get(name), Tensor)}
    return [name for name, value in own.items() if isinstance(value, Tensor) and tensor_key(value) not in loaded]


class _Match(NamedTuple):
    """How weights fit a model, without those that modules load themselves.

    Attributes:
        own, weights: the names of the model, and those of the weights that it may take.
        missing: names of the model without a weight; ``unexpected``: the reverse.
        shapes, dtypes: a message for each weight whose shape or dtype differs.
    """

    own: Collection[str]
    weights: Collection[str]
    missing: list[str]
    unexpected: list[str]
    shapes: dict[str, str]
    dtypes: dict[str, str]

    @classmethod
    def of(
        cls,
        own: Mapping[str, Any],
        weights: Mapping[str, Any],
        theirs: Collection[str],
        needed: Collection[str] | None,
    ) -> "_Match":
        """``theirs``: what modules load themselves. ``needed``: the names that must be there; None: all."""
        missing = [n for n in _missing_names(own, weights) if n not in theirs and (needed is None or n in needed)]
        unexpected = [name for name in weights if name not in own and name not in theirs]
        shapes, dtypes = _differences(own, {name: value for name, value in weights.items() if name not in theirs})
        return cls([*own], [*weights], missing, unexpected, shapes, dtypes)

    def check_equal(self, source: str, *, is_resumed: bool) -> None:
        faults = [*_listed("not in the checkpoint", self.missing), *_listed("not in the model", self.unexpected)]
        faults += [*self.shapes.values(), *self.dtypes.values()]
        if faults and is_resumed:
            faults.append(
                "Build the model of this checkpoint to resume. To train another one start a new run, without"
                " resume_from_checkpoint (--resume); init_weights_from (train.load_weight) loads the weights that fit."
            )
        if faults:
            raise CheckpointError("\n  ".join([f"{source}: the weights do not match this model.", *faults]))

    def check_any(self, source: str) -> None:
        if not self.own or len(self.unexpected) + len(self.shapes) < len(self.weights):
            return
        some = ", ".join([*self.weights][:3]) or "nothing"
        faults = [f"It has {some}, the model has {', '.join([*self.own][:3])} ...", *self.shapes.values()]
        raise CheckpointError("\n  ".join([f"{source}: none of the weights fits this model.", *faults]))

    def check_complete(self, model: nn.Module, source: str) -> None:
        """Raise if the file has no values for weights that are not those of the head: a new task has another head."""
        lacking = [name for name in (*self.missing, *self.shapes) if not name.endswith(".num_batches_tracked")]
        ignored = getattr(unwrap(model), "_keys_to_ignore_on_load_missing", None) or ()  # of models of transformers
        lacking = [name for name in lacking if not any(re.search(pattern, name) for pattern in ignored)]
        head = head_names(unwrap(model), lacking)
        faults = [name for name in lacking if name not in head]
        if not faults:
            return
        missing = [name for name in faults if name not in self.shapes]
        shapes = [self.shapes[name] for name in faults if name in self.shapes]
        elsewhere = outline_of(unwrap(model))[0]  # on another pipeline stage
        unexpected = [name for name in self.unexpected if name not in elsewhere]
        lines = [
            f"{source}: it has no values for {len(faults)} of the {len(self.own)} weights of"
            f" {class_before_sharding(unwrap(model)).__name__}, which are not those of a new head.",
            *_first("in the model, not in the file", missing),
            *_first("in the file, not in the model", unexpected),
            *shapes[:_SHOWN],
            *([f"and {len(shapes) - _SHOWN} more of another shape"] if len(shapes) > _SHOWN else []),
        ]
        raise PartialWeightsError("\n  ".join(lines))

    def log_rest(self, source: str) -> None:
        if self.shapes:
            lines = [f"{source}: weights of another shape are not loaded:", *self.shapes.values()]
            logger.warning("%s", "\n  ".join(lines))
        for line in _listed("in the file, not in the model", self.unexpected):
            logger.info("%s: %s", source, line)
        for line in _listed("in the model, not in the file", self.missing):
            logger.warning("%s: %s. They keep their initial values.", source, line)


def _by_names_of_model(model: nn.Module, weights: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``weights`` by the names of the model. A file of the complete model has a tied weight once."""
    named = dict(_without_wrappers({plain_name(name): value for name, value in weights.items()}, own))
    for name, first in _copies_on_stages(model).items():
        if name not in named and first in named:
            named[name] = named[first]
    return named


def _with_base_prefix(model: nn.Module, weights: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """``weights``, under ``base_model_prefix`` if they are those of the base model alone."""
    prefix = getattr(unwrap(model), "base_model_prefix", "")
    below = {f"{prefix}.{name}": value for name, value in weights.items()}
    if prefix and not weights.keys() & own.keys() and below.keys() & own.keys():
        return below
    return weights


def _copy(model: nn.Module, weights: Mapping[str, Any], own: Mapping[str, Any], theirs: Collection[str]) -> None:
    """Copy in place, without a second model in memory: of stored tensors one block after another is read.

    If modules load ``theirs`` themselves, they get all values at once, as from ``load_state_dict``. Buffers made by
    ``expand`` cannot be written in place: they are replaced if they differ.
    """
    expanded = {name for name, value in own.items() if isinstance(value, Tensor) and _is_expanded(value)}
    plain = {name: value for name, value in weights.items() if name not in expanded}
    others = {name: weights[name] for name in expanded if name in weights}
    kept = {name: own[name] for name in theirs if name in own}
    for block in [[*plain]] if theirs else _blocks(plain, own):
        values = {name: _values(name, plain[name], own.get(name)) for name in block}
        values |= {name: _on_device(model, name, values.get(name, kept.get(name)), own) for name in theirs}
        load_model_state(model, values, strict=False)
        for reader in {plain[name].reader for name in block if isinstance(plain[name], StoredTensor)}:
            reader.release()
    others = {name: _values(name, value, own[name]) for name, value in others.items()}
    different = {name: value for name, value in others.items() if not torch.equal(value.to(own[name]), own[name])}
    if different:
        put = {name: value.to(own[name].device, own[name].dtype, copy=True) for name, value in different.items()}
        load_model_state(model, put, strict=False, assign=True)


def _on_device(model: nn.Module, name: str, value: Any, own: Mapping[str, Any]) -> Any:
    """A copy that a module may keep, on the device of its own value or of the model."""
    if not isinstance(value, Tensor):
        return value
    like = own.get(name, next(model.parameters(), value))
    return value.to(like.device if isinstance(like, Tensor) else value.device, copy=True)


def _blocks(weights: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[list[str]]:
    """The names of the weights, in at most 64 lists of about the same size in memory."""
    sizes = {name: local_of(own[name]).nbytes if isinstance(own.get(name), Tensor) else 0 for name in weights}
    enough = max(_LEAST_BYTES, sum(sizes.values()) // 64)
    block, num_bytes = list[str](), 0
    for name, size in sizes.items():
        block.append(name)
        num_bytes += size
        if num_bytes >= enough:
            yield block
            block, num_bytes = [], 0
    yield block


def _values(name: str, value: Any, own: Any) -> Any:
    """Of a stored tensor this process's part, perhaps in the memory of its file."""
    if not isinstance(value, StoredTensor):
        return value
    is_kept = name.rpartition(".")[2] == "_extra_state"  # by its module
    return value.like(own, is_mapped=not is_kept)


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share one place in memory."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _without_wrappers(weights: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """``weights`` without the prefix of data parallelism, if all names have it and none is a name of the model."""
    while weights and all(name.startswith("module.") for name in weights) and not weights.keys() & own.keys():
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    return weights


def _missing_names(own: Mapping[str, Any], weights: Mapping[str, Any]) -> list[str]:
    """Names of the model without a value. One of several tied names is enough."""
    given = {tensor_key(own[name]) for name in weights if isinstance(own.get(name), Tensor)}
    return [
        name
        for name, value in own.items()
        if name not in weights and not (isinstance(value, Tensor) and tensor_key(value) in given)
    ]


def _differences(own: Mapping[str, Any], weights: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """A message for each name whose shape differs from the model's, and for each whose dtype differs."""
    shapes, dtypes = {}, {}
    for name, theirs in weights.items():
        ours = own.get(name)
        if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor | StoredTensor):
            continue
        if name.rpartition(".")[2] == "_extra_state":  # its module checks the value
            continue
        if ours.shape != theirs.shape:
            shapes[name] = f"{name}: shape {tuple(theirs.shape)} there, {tuple(ours.shape)} in the model"
        elif ours.dtype != theirs.dtype:
            dtypes[name] = f"{name}: {theirs.dtype} there, {ours.dtype} in the model"
    return shapes, dtypes


def _first(what: str, names: Sequence[str]) -> list[str]:
    """As `_listed`, with the number of names, and only the first modules."""
    groups = group_names(names)
    more = ", ..." if len(groups) > _SHOWN else ""
    return [f"{len(names)} {what}: {', '.join(groups[:_SHOWN])}{more}"] if names else []


def _listed(what: str, names: Iterable[str]) -> list[str]:
    grouped = group_names(names)
    return [f"{what}: {', '.join(grouped)}"] if grouped else []


def group_names(names: Iterable[str]) -> list[str]:
    """Names grouped by module.

    >>> group_names(["a.weight", "a.bias", "scale"])
    ['a.{weight, bias}', 'scale']
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        module, _, last = name.rpartition(".")
        groups[module].append(last)
    result = []
    for module, last_names in groups.items():
        if not module:
            result.extend(last_names)
        else:
            result.append(f"{module}.{last_names[0] if len(last_names) == 1 else '{' + ', '.join(last_names) + '}'}")
    return result
