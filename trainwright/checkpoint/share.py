"""What one process of a sharded run saves: its parts of the tensors, and its stage's part of the states."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainwright._torch_compat.optimizer_import import without_compiler
from trainwright.checkpoint.files import Writer
from trainwright.checkpoint.optimizer_state import by_name, numbered, with_names
from trainwright.checkpoint.safetensors_file import TensorFile
from trainwright.checkpoint.shard_index import shard_name
from trainwright.checkpoint.shards import Grid, StoredTensor, share_of
from trainwright.checkpoint.state_files import (
    EXTRA,
    MODEL,
    MODEL_EXTRA,
    Stateful,
    bytes_writer,
    completed,
    encode_state,
)
from trainwright.checkpoint.weights import split_model_state, unwrap


@dataclass(frozen=True, slots=True)
class Share:
    """The files that this process writes, and its stage's states, which rank 0 merges and writes."""

    files: Mapping[str, Writer]
    trees: dict[str, Any]  # {state: its encoded form}, on the first process of each stage


def is_of_model(checkpointable: Any) -> bool:
    """Whether its state has a tensor per weight of the model, which is sharded like that weight."""
    return isinstance(checkpointable, Optimizer) or model_tensors_key(checkpointable) is not None


def model_tensors_key(checkpointable: Any) -> str | None:
    """The key of the state under which tensors have the names of the model's weights (`WeightAverage`)."""
    return getattr(checkpointable, "model_tensors", None)


def make_share(
    model: nn.Module,
    checkpointables: Mapping[str, Stateful],
    extra: Mapping[str, Any],
    attached: Mapping[str, bytes],
    only: Collection[str] | None,
    *,
    grid: Grid,
    held_before: Collection[str],
    names_from: nn.Module,
) -> Share:
    """The share of this process. Does not copy tensors.

    Args:
        held_before: the names of weights that an earlier stage of a pipeline has too, and writes.
        names_from: the module whose parameters the optimizers have.

    Raises:
        CheckpointTypeError: a state holds a value that a checkpoint cannot store.
    """
    weights, metadata, model_extra = split_model_state(model, only, is_sharded=True)
    weights = {name: tensor for name, tensor in weights.items() if name not in held_before}
    files: dict[str, Writer | None] = {_file(MODEL, grid): share_of(weights, metadata, grid)}
    trees: dict[str, Any] = {}
    with without_compiler():
        states = {name: checkpointable.state_dict() for name, checkpointable in checkpointables.items()}
    for name, state in [*states.items(), (MODEL_EXTRA, model_extra)]:
        checkpointable = checkpointables.get(name)
        if name == MODEL_EXTRA and not state:
            continue
        if name == MODEL_EXTRA or is_of_model(checkpointable):
            text, tensors = encode_state(_own(state, checkpointable, held_before, names_from), name, is_sharded=True)
            files[_file(name, grid)] = share_of(tensors, {}, grid)
            trees[name] = json.loads(text)
        else:
            text, tensors = encode_state(state, name)
            files |= {
                f"{name}.json": bytes_writer(text),
                f"{name}.safetensors": TensorFile(tensors) if tensors else None,
            }
    files[f"{EXTRA}.json"] = bytes_writer(encode_state(dict(extra), EXTRA)[0])
    files |= {name: bytes_writer(content) for name, content in attached.items()}
    is_own = (lambda name: True) if grid.rank == 0 else {_file(name, grid) for name in (MODEL, *trees)}.__contains__
    return Share(
        {name: writer for name, writer in files.items() if writer is not None and is_own(name)},
        trees if grid.is_first_of_stage else {},
    )


def _file(state: str, grid: Grid) -> str:
    return shard_name(state, grid.rank, grid.world_size)


def _own(state: Any, checkpointable: Any, held_before: Collection[str], names_from: nn.Module) -> Any:
    """A state with the names of weights, without those that an earlier stage writes."""
    if isinstance(checkpointable, Optimizer):
        state = by_name(with_names(state, checkpointable, names_from))
    key = "state" if isinstance(checkpointable, Optimizer) else model_tensors_key(checkpointable)
    if key is None:
        return state
    return {**state, key: {name: value for name, value in state[key].items() if name not in held_before}}


def own_part(state: Any, target: Any, model: nn.Module, *, is_part: bool) -> Any:
    """The state that ``target.load_state_dict`` takes, with this process's parts of its own tensors.

    ``is_part``: the model is a stage of the one in the checkpoint.
    """
    if isinstance(target, Optimizer):
        return numbered(state, target, model, is_part=is_part, read=_read_like if _has_stored(state) else None)
    key = model_tensors_key(target)
    if key is None or not isinstance(state, Mapping) or not isinstance(state.get(key), Mapping):
        return state
    stored = {name: value for name, value in state[key].items() if isinstance(value, StoredTensor)}
    if not stored:
        return state
    own = unwrap(model).state_dict()
    return {**completed({**state, key: None}), key: {n: t.like(own[n]) for n, t in stored.items() if n in own}}


def use_own_rates(schedule: Any) -> None:
    """Give a loaded schedule the rates of its own optimizer's groups, where the saved one had other groups."""
    groups = schedule.optimizer.param_groups
    for one in (schedule, *getattr(schedule, "_schedulers", ())):
        if hasattr(one, "base_lrs") and all("initial_lr" in group for group in groups):
            one.base_lrs = [group["initial_lr"] for group in groups]
    schedule._last_lr = [group["lr"] for group in groups]


def _has_stored(state: Any) -> bool:
    states = state.get("state", {}).values() if isinstance(state, Mapping) else ()
    return any(isinstance(value, StoredTensor) for values in states for value in values.values())


def _read_like(value: Any, parameter: Any) -> Any:
    return value.like(parameter) if isinstance(value, StoredTensor) else value


def merged(trees: list[Any]) -> Any:
    """One encoded state from those of the stages: their dicts united; where they differ, the first stage's value.

    >>> merged([{"a": 1, "b": {"x": 1}}, {"a": 2, "b": {"y": 2}}])
    {'a': 1, 'b': {'x': 1, 'y': 2}}
    """
    first = trees[0]
    if not isinstance(first, dict):
        return first
    others = [tree for tree in trees[1:] if isinstance(tree, dict)]
    keys = dict.fromkeys(key for tree in (first, *others) for key in tree)
    return {
        key: (_merged_groups if key == "param_groups" else merged)(
            [tree[key] for tree in (first, *others) if key in tree]
        )
        for key in keys
    }


def _merged_groups(groups_of_stages: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Groups of an optimizer with equal settings are one group, with the parameters of all stages."""
    result = [dict(group) for group in groups_of_stages[0]]
    for group in (group for groups in groups_of_stages[1:] for group in groups):
        same = next((known for known in result if _settings(known) == _settings(group)), None)
        if same is None:
            result.append(dict(group))
        else:
            same["params"] = list(dict.fromkeys([*same["params"], *group["params"]]))
    return result


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
