"""Build the parts of a run from a configuration: tokenizer, model, loaders, evaluator, writers."""

import copy
import inspect
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn

from trainwright.config.errors import ConfigKeyError, ConfigTypeError
from trainwright.config.lazy.instantiation import instantiate, locate_target
from trainwright.config.lazy.lazy_config import try_get_key
from trainwright.config.lazy.serialization import to_plain
from trainwright.config.secrets import safe_trackers, without_secrets
from trainwright.data.loaders import build_image_test_loader
from trainwright.data.streaming import eval_stream_loader, is_stream
from trainwright.evaluation.evaluator import DatasetEvaluator, DatasetEvaluators
from trainwright.events.writers import EventWriter, default_writers


def call_with_known(node: Any, given: Mapping[str, Any]) -> Any:
    """Instantiate a config node with the arguments of ``given`` that its target takes and the node does not set.

    Anything but a node with a ``_target_`` (for example a loader object) is returned unchanged.
    """
    if not (isinstance(node, Mapping | DictConfig) and "_target_" in node):
        return node
    parameters = inspect.signature(locate_target(node)).parameters
    known = {name: value for name, value in given.items() if name in parameters and value is not None}
    return instantiate(node, **known)


def build_tokenizer(cfg: DictConfig) -> Any:
    """The tokenizer of ``cfg.tokenization``; None without one."""
    node = try_get_key(cfg, "tokenization.tokenizer")
    if node is None:
        return None
    tokenizer = instantiate(node)
    multiple = try_get_key(cfg, "tokenization.make_vocab_size_divisible_by")
    settings = try_get_key(cfg, "model.cfg", "model")
    if multiple and isinstance(settings, DictConfig) and "vocab_size" in settings:
        settings.vocab_size = tokenizer.padded_vocab_size(multiple)
    return tokenizer


def build_model(cfg: DictConfig) -> nn.Module:
    """The model of ``cfg.model``."""
    model = instantiate(cfg.model)
    if isinstance(model, DictConfig | dict) and "_target_" not in cfg.model:
        raise ConfigTypeError(
            "model: has no _target_, so there is nothing to call. Describe the model with "
            "model = LazyCall(Net)(...), or override build_model."
        )
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"model: got {type(model).__name__}; it must be a torch.nn.Module.")
    return model


def build_train_loader(cfg: DictConfig, tokenizer: Any) -> Any:
    """The loader of ``cfg.dataloader.train``, or a tuple whose first item it is."""
    if try_get_key(cfg, "dataloader.train") is None:
        raise ConfigKeyError(
            "dataloader.train: missing. A training needs its loader, for example "
            "dataloader.train = LazyCall(build_image_train_loader)(dataset=...)."
        )
    given = {
        "train_batch_size": cfg.train.train_micro_batch_size,
        "test_batch_size": cfg.train.test_micro_batch_size,
        "consumed_samples": cfg.train.consumed_train_samples,
        "seed": cfg.train.seed,
        "tokenizer": tokenizer,
    }
    return call_with_known(cfg.dataloader.train, given)


def build_test_loaders(cfg: DictConfig, tokenizer: Any) -> list[Any]:
    """The loaders of ``cfg.dataloader.test``."""
    nodes = try_get_key(cfg, "dataloader.test", default=None)
    if nodes is None:
        return []
    if not isinstance(nodes, list | tuple | ListConfig | Mapping | DictConfig):
        raise ConfigTypeError(f"dataloader.test: got {type(nodes).__name__}; it must be a list of loaders.")
    given = {"test_batch_size": cfg.train.test_micro_batch_size, "seed": cfg.train.seed, "tokenizer": tokenizer}
    if not isinstance(nodes, Mapping | DictConfig):
        return [call_with_known(node, given) for node in nodes]
    named = {str(name): call_with_known(node, given) for name, node in nodes.items()}
    for name, loader in named.items():
        loader.name = name  # of its results
    return list(named.values())


def build_evaluator(cfg: DictConfig) -> DatasetEvaluator:
    """The evaluator of ``cfg.train.evaluation.evaluator``."""
    evaluator = instantiate(cfg.train.evaluation.evaluator)
    if isinstance(evaluator, list):
        evaluator = DatasetEvaluators(evaluator)
    if not isinstance(evaluator, DatasetEvaluator):
        raise ConfigTypeError(
            f"train.evaluation.evaluator: got {type(evaluator).__name__}; it must be a DatasetEvaluator."
        )
    return evaluator


def build_writers(cfg: DictConfig, num_iterations: int, per_epoch: int | Fraction | None) -> list[EventWriter]:
    """The console, ``metrics.json``, TensorBoard and the trackers of ``cfg.train.trackers``."""
    train = cfg.train
    settings, _ = without_secrets(to_plain(cfg)[0])
    trackers = None
    if train.trackers:
        from trainwright.config.validation import trackers_of  # imports pydantic, which most runs do not need

        trackers = trackers_of(to_plain(train.trackers)[0])
    return default_writers(
        train.output_dir,
        num_iterations,
        batch_size=train.global_batch_size,
        progress_bar=train.progress_bar,
        trackers=safe_trackers(trackers),
        settings=settings,
        iterations_per_epoch=per_epoch,
    )


def prediction_loader(data: Any, train: DictConfig) -> Any:
    """A loader of one pass over a data set or a list of samples."""
    if is_stream(data):  # each rank reads it completely and keeps its batches, so their order is known
        return eval_stream_loader(data, train.test_micro_batch_size, 0, None)
    datasets = [data] if isinstance(data, list) else data  # a list would be several data sets
    return build_image_test_loader(datasets, train.test_micro_batch_size, num_workers=0, seed=train.seed)


def settings_of_copy(
    given: DictConfig, cfg: DictConfig, folder: Path, changes: dict[str, Any], *, resumes: bool, is_endless: bool
) -> DictConfig:
    """The configuration of a copy that a check trains.

    ``given``: that of the run before the values that depend on the data were written into it, which ``cfg`` has.
    """
    from trainwright.config.settings import KEYS, changes_of  # here: loads pydantic

    new, changes = copy.deepcopy(given), dict(changes)
    changes.pop("save_enabled", None)  # always
    train = new.train
    train.update({"output_dir": str(folder), "resume": resumes})
    for key, value in changes_of("copy", KEYS).items():
        OmegaConf.update(new, key, value)
    sizes = ("gradient_accumulation_steps", "num_accumulation_steps"), ("batch_size", "train_micro_batch_size")
    if any(name in changes for name, _ in sizes):
        train.update({ours: changes.pop(name, cfg.train[ours]) for name, ours in sizes})
        train.global_batch_size = train.num_accumulation_steps * train.train_micro_batch_size
        train.update({"train_iter": cfg.train.train_iter, "train_epoch": 0})
    if is_endless:
        train.update({"train_iter": 100_000, "train_epoch": 0})
    train.update(changes)
    return new
