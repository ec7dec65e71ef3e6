"""Build the parts of a run from a configuration: tokenizer, model, loaders, evaluator, writers."""

import copy
import inspect
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn

from trainwright._torch_compat.probing import real_tensors
from trainwright.config.errors import ConfigError, ConfigKeyError, ConfigTypeError
from trainwright.config.lazy.instantiation import instantiate, locate_target
from trainwright.config.lazy.lazy_config import try_get_key
from trainwright.config.lazy.serialization import to_plain
from trainwright.config.secrets import safe_trackers, without_secrets
from trainwright.data.loaders import build_image_test_loader, set_position
from trainwright.data.streaming import eval_stream_loader, is_stream
from trainwright.engine.default.length import num_samples
from trainwright.engine.default.setup import changed_settings, check_num_layers, limit_data, overfit_loader
from trainwright.engine.folder.summary import log_recomputed
from trainwright.engine.loss_fn import explain_forward
from trainwright.engine.run import Run
from trainwright.engine.spec import RunSpec
from trainwright.evaluation.evaluator import DatasetEvaluator, DatasetEvaluators
from trainwright.events.writers import EventWriter, default_writers
from trainwright.optim.named import NamedOptimizers
from trainwright.parallel.dist import get_data_parallel_size
from trainwright.parallel.parallelize import parallelize
from trainwright.parallel.pipeline import pipeline_of
from trainwright.parallel.rank_checks import check_same_settings, data_size


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


def read_data(train: DictConfig, build_train: Callable[[], Any], build_test: Callable[[], Any]) -> tuple[Any, Any]:
    """The loaders of training and of evaluations, limited as the settings ask for."""
    with real_tensors():  # in an estimate, too
        loaders = build_train()
        train_loader = loaders[0] if isinstance(loaders, tuple | list) else loaders
        limit_data(train, train_loader)
        test_loaders = build_test()
        sizes = {place: data_size(getattr(one, "dataset", None)) for place, one in enumerate(test_loaders)}
        check_same_settings({"dataloader": {"test": sizes}})
    if train.overfit_batches is not None:
        test_loaders = [overfit_loader(train_loader, train.train_micro_batch_size)]
    return train_loader, test_loaders


def place_model(run: Run, dist: DictConfig, *, splits_scores: bool) -> None:
    """Put the model on its device and spread it over the processes."""
    recompute = run.spec.layout.gradient_checkpointing
    recomputed = parallelize(
        run.model, run.device, recompute=recompute, autocast=run.autocast, splits_scores=splits_scores,
        find_unused_parameters=run.spec.layout.find_unused_parameters,
    )  # fmt: skip
    if recompute:
        log_recomputed(recomputed)
    if (pipeline := pipeline_of(run.model)) is not None:
        check_num_layers(dist, pipeline.layer_stages)


def one_optimizer(built: Any) -> Any:
    """The optimizer that was built; of several by name, the one that steps all of them."""
    return NamedOptimizers(built) if isinstance(built, Mapping) else built


def schedules(built: Any) -> tuple[Any, dict[str, Any]]:
    """The schedule that was built, and those of several optimizers by name."""
    return (None, dict(built)) if isinstance(built, Mapping) else (built, {})


def set_batches(run: Run, loader: Any, samples_done: int) -> None:
    """Start the training data after ``samples_done`` samples."""
    run.batches.start(
        samples_done // (run.spec.batch.batch_size * get_data_parallel_size()),
        is_positioned=set_position(loader, samples_done),
        keeps_generators=samples_done > 0,
    )
    hooks = run.hooks
    run.batches.may_change = lambda: any(hook.may_change_data for hook in hooks)


def forward(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """The outputs of the model for the fields of a batch."""
    try:
        return model(**batch)
    except TypeError as error:
        explain_forward(error, model, batch)
        raise


def examples(test_loaders: list[Any]) -> Any:
    """The loader whose first batch is an example of the model's input."""
    if not test_loaders:
        raise ConfigError("DefaultTrainer.export: there is no example; pass a batch, or set dataloader.test.")
    return test_loaders[0]


def facts(
    train: DictConfig,
    given: DictConfig,
    num_train: int | None,
    per_epoch: int | Fraction | None,
    test_loaders: list[Any],
) -> dict[str, Any]:
    """What the start of a run shows beside the facts of both APIs."""
    evaluated = [num_samples(loader, train.test_micro_batch_size) for loader in test_loaders]
    return {
        "num_train": num_train,
        "num_eval": sum(number or 0 for number in evaluated) or None,
        "iterations_per_epoch": per_epoch,
        "settings": changed_settings(given),
    }


def record(spec: RunSpec, train: DictConfig, train_loader: Any, test_loaders: list[Any]) -> dict[str, Any]:
    """What ``run.json`` has of a run of this API."""
    tests = {str(getattr(one, "name", at)): getattr(one, "dataset", one) for at, one in enumerate(test_loaders)}
    return {
        "api": spec.api,
        "samples_per_iteration": train.global_batch_size,
        "seed": spec.safety.seed,
        "precision": spec.precision.mixed_precision or "float32",
        "data": {"train": getattr(train_loader, "dataset", train_loader)}
        | {f"test {name}" if len(tests) > 1 else "test": one for name, one in tests.items()},
    }
