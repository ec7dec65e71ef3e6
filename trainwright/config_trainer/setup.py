"""Prepare a run: check its configuration, join its processes, and write what follows from these and from the data."""

import argparse
import copy
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from torch.utils.data import DataLoader, Dataset

from trainwright.base.dist import (
    get_averaging_rank,
    get_averaging_size,
    get_data_parallel_size,
    get_world_size,
    is_main_process,
)
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.base.files import relative_path
from trainwright.base.signatures import read_signature
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.folder import POINTER_NAME
from trainwright.config.config_file.checks import validate
from trainwright.config.config_file.sections import (
    complete,
    exact,
    iterations_of_epochs,
    milestone_iterations,
    resolve_batch_sizes,
    total_iterations,
    warmup_iterations,
)
from trainwright.config.lazy.allowlist import project_roots
from trainwright.config.lazy.instantiation import instantiate, locate_target
from trainwright.config.lazy.lazy_config import call_fault, get_config, try_get_key
from trainwright.config.lazy.provenance import (
    SECTIONS,
    TARGET,
    are_several,
    is_set,
    is_trusted,
    mark_default,
    raw_children,
    value_at,
)
from trainwright.config.lazy.serialization import to_plain
from trainwright.config.secrets import redact_command, remember_secrets, without_secrets
from trainwright.config.windows import WindowEpochs, Windows
from trainwright.config.yaml_file import read_mapping
from trainwright.data.batch_loader import BatchLoader, make_loader
from trainwright.data.loaders import build_image_test_loader, build_nlp_test_loader
from trainwright.data.sampler import CyclicSampler, SingleRoundSampler
from trainwright.engine.folder.files import RunFiles
from trainwright.engine.folder.mirrored import fetch_run, mirror_of
from trainwright.engine.folder.run_folder import RunFolder, make_folder
from trainwright.engine.logs import kept_records, log_to_console
from trainwright.engine.resumed_settings import differences, flat
from trainwright.engine.run import Run
from trainwright.evaluation.objective import MODES, objective_of_name
from trainwright.events.epoch_means import EpochLength
from trainwright.hooks import HookBase
from trainwright.hooks.callbacks import Callback
from trainwright.optim.schedules import extend_schedule
from trainwright.parallel.data_parallel import launched_rank, setup_dist_util
from trainwright.parallel.mesh import current_mesh
from trainwright.parallel.rank_checks import check_same_settings
from trainwright.parallel.restarts import is_continued

logger = logging.getLogger("trainwright.engine")

# What follows from the length of a run.
BY_LENGTH = (
    *("train.train_iter", "train.warmup_iter", "train.scheduler"),
    *("train.log_period", "train.checkpointer.period", "train.evaluation.eval_period"),
)
BATCH_SIZES = ("train_micro_batch_size", "global_batch_size", "num_accumulation_steps")

# Settings that the start of a run shows by other names.
_SHOWN_ELSEWHERE = {
    *("train.output_dir", "train.train_micro_batch_size", "train.global_batch_size", "train.num_accumulation_steps"),
    *("train.dist.data_parallel_size", "train.scheduler", "train.resume", "train.evaluation.eval_mode"),
    *("train.train_iter", "train.train_epoch"),
}


def bind_arguments(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """``function`` with as many of the arguments as it takes; adds no Python frame."""
    parameters = read_signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return partial(function, *(arguments if takes_any else arguments[: len(positional)]))


def apply_dev_run(cfg: DictConfig) -> None:
    """Shorten the run as ``train.fast_dev_run`` says: True is 20 iterations. Its folder is in the run's folder."""
    from trainwright.config.settings import KEYS, changes_of  # here: loads pydantic

    train = cfg.train
    if not train.fast_dev_run:
        return
    iterations = 20 if train.fast_dev_run is True else train.fast_dev_run
    changes = changes_of("dev_run", KEYS, iterations)
    if train.overfit_batches is not None:  # it limits the evaluation, too
        del changes["train.limit_eval_batches"]
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value)
    train.output_dir = os.path.join(train.output_dir, "fast_dev_run")
    logger.info("fast_dev_run: %d iterations in %s; the run itself is not changed.", iterations, train.output_dir)


def check_loader(loader: Any, batch_size: int) -> None:
    """Raise for what is no training loader, and for batches of another size than the run counts."""
    refuse_other_than_loader(loader, "dataloader.train")
    own = loader.batch_size if type(loader) is DataLoader else None
    if own not in (None, batch_size):
        raise ConfigError(
            f"dataloader.train: its batches have {own} samples, and train.train_micro_batch_size={batch_size}, by which"
            " samples and epochs are counted. Give both one value."
        )


def refuse_other_than_loader(loader: Any, path: str) -> None:
    """Raise for a data set, a section or a list in place of the loader at ``path``."""
    is_training = path == "dataloader.train"
    if (fault := call_fault(loader)) is not None:
        raise ConfigTypeError(f"{path}: {fault}")
    if isinstance(loader, Dataset) and is_training:  # a test loader may be one, of batches
        what = f"{type(loader).__name__}, a data set; describe a loader of it:"
    elif isinstance(loader, ListConfig):
        what = f"a list of {len(loader)}; it must be one loader, without the brackets:"
    elif isinstance(loader, DictConfig):
        what = f"a section with {', '.join(map(str, loader))}, without {TARGET}; describe a loader:"
    elif is_iterable(loader) and not isinstance(loader, str):
        return
    else:
        what = f"{type(loader).__name__}, which yields no batches; describe a loader:"
    builder = "build_image_train_loader" if is_training else "build_image_test_loader"
    raise ConfigTypeError(f"{path}: got {what} LazyCall({builder})(dataset=...).")


def is_iterable(loader: Any) -> bool:
    """Whether ``iter(loader)`` works."""
    return hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")


def warn_of_order(node: Any) -> None:
    """Log a training loader whose builder is that of evaluations."""
    target = locate_target(node) if isinstance(node, DictConfig) and TARGET in node else None
    if target in (build_image_test_loader, build_nlp_test_loader) and node.get("sampler") is None:
        name = target.__name__
        logger.warning(
            "dataloader.train: %s reads the samples in one order, without shuffling. Write LazyCall(%s)(...).",
            name, name.replace("test", "train"),
        )  # fmt: skip


# Arguments of loaders that choose no samples.
_OF_READING = {TARGET, "num_workers", "batch_size", "train_batch_size", "test_batch_size", "shuffle", "drop_last"}


def warn_of_same_data(cfg: DictConfig) -> None:
    """Log test loaders whose data set is the call of the training loader, with its arguments, as after a copy."""
    if not value_at(cfg, "train.evaluation.enabled") or value_at(cfg, "train.overfit_batches") is not None:
        return
    tests = value_at(cfg, "dataloader.test")
    nodes = [*raw_children(tests).values()] if isinstance(tests, DictConfig | ListConfig) else []
    train, *others = (_data_of(node) for node in (value_at(cfg, "dataloader.train"), *nodes))
    if train is not None and others and all(one == train for one in others):
        logger.warning(
            "dataloader.test: its data set is the same call, with the same arguments, as dataloader.train.dataset. If"
            " both give the same samples, the evaluation measures the data of the training.",
        )


def _data_of(loader: Any) -> Any:
    """The call of the data set, if it has arguments and the loader reads all of it."""
    call = to_plain(loader)[0] if isinstance(loader, DictConfig) else {}
    data = call.pop("dataset", None)
    data = data[0] if isinstance(data, list) and len(data) == 1 else data
    is_call = isinstance(data, dict) and TARGET in data and len(data) > 1
    return data if is_call and call.keys() <= _OF_READING else None


def limit_data(train: DictConfig, data_loader: Any) -> None:
    """Apply ``limit_train_batches`` and ``overfit_batches`` to the training loader."""
    name = "limit_train_batches" if train.overfit_batches is None else "overfit_batches"
    if train[name] is None:
        return
    sampler = getattr(data_loader, "batch_sampler", None)
    if not isinstance(sampler, CyclicSampler):
        raise ConfigError(
            f"train.{name}: got {train[name]}, which needs a loader of trainwright.data with its default sampler;"
            f" dataloader.train is a {type(data_loader).__name__}. Build it with build_image_train_loader, or limit its"
            " data set."
        )
    sampler.limit_epochs(train[name], keeps_batches=name == "overfit_batches")


def overfit_loader(data_loader: BatchLoader, batch_size: int) -> Any:
    """The loader of the evaluations of ``overfit_batches``: the training data, in their order."""
    rank, size = get_averaging_rank(), get_averaging_size()
    sampler = SingleRoundSampler(data_loader.dataset, batch_size, data_parallel_rank=rank, data_parallel_size=size)
    return make_loader(
        data_loader.dataset, sampler, seed=0, num_workers=0, collate_fn=data_loader.collate_fn, loader_options={}
    )


def default_setup(cfg: DictConfig, args: argparse.Namespace | None = None) -> None:
    """Complete and check ``cfg`` in place, join the launcher's processes, and start logging.

    All three batch sizes and ``dist.data_parallel_size`` are filled in, so ``config.yaml`` has them.

    ``args`` is the result of :func:`~trainwright.config.default_argument_parser`; None means no arguments. The output
    folder is created and gets its ``config.yaml``, unless it holds an earlier run, which stays unchanged until the new
    run has made its first step.

    Raises:
        ConfigError: the configuration cannot run; the message lists every fault.
    """
    log_to_console(launched_rank())  # before the first warning
    with kept_records() as records:
        _default_setup(cfg, args, records)


def _default_setup(cfg: DictConfig, args: argparse.Namespace | None, records: list[logging.LogRecord]) -> None:
    source: str | None = getattr(args, "config_file", None) or None
    whole = checked(cfg, source=source)
    with open_dict(cfg):
        for section in whole:
            cfg[section] = whole[section]
        cfg.train.resume = bool(cfg.train.get("resume", False)) or bool(getattr(args, "resume", False))
        if source is not None:
            # A path relative to the output folder: with it the saved configuration finds the project's modules.
            for root in project_roots(source, cfg, trusts_folder=getattr(args, "trust_folder", False))[:1]:
                cfg.project_root = _as_text(relative_path(root, Path(cfg.train.output_dir).resolve()))

    device = join_ranks(cfg, trains=not getattr(args, "eval_only", False))
    complete_batch_sizes(cfg)
    vars(cfg._metadata)[_STARTED] = _Started(_containers(cfg), device, records)
    folder = RunFolder(cfg.train.output_dir, resume=cfg.train.resume)
    folder.recover()
    if is_main_process() and not getattr(args, "eval_only", False):
        folder.check_free()
        folder.check_names()
        if not folder.holds_a_run():
            make_folder(folder.path, folder.setting)
            folder.write_config(cfg)


@contextmanager
def model_of_run_in_errors(cfg: DictConfig, checkpoint: Callable[[], str]) -> Iterator[None]:
    """An error of loading weights names the arguments of the model that were others in the run of ``checkpoint()``."""
    try:
        yield
    except CheckpointError as error:
        if type(error) is not CheckpointError:
            raise
        try:
            before = json.loads(Path(checkpoint(), "trainer.json").read_text(encoding="utf-8"))["settings"]
        except (OSError, ValueError, KeyError, TypeError):  # of weights alone, or damaged
            raise error from None
        now = flat(without_secrets({"model": to_plain(value_at(cfg, "model"))[0]})[0])
        names = [name for name in differences(before, now) if name.startswith("model.")]
        if not names:
            raise
        one, other = (", ".join(f"{n}={of[n]}" for n in names if n in of) or "no such setting" for of in (before, now))
        raise CheckpointError(
            f"{error}\n  The run of this checkpoint has {one}; this configuration has {other}."
        ) from error


def call_with_known(node: Any, given: Mapping[str, Any]) -> Any:
    """Instantiate a config node with the arguments of ``given`` that its target takes, in place of those that it sets.

    Anything but a node with a ``_target_`` (for example a loader object) is returned unchanged.
    """
    if not (isinstance(node, Mapping | DictConfig) and "_target_" in node):
        return node
    parameters = read_signature(locate_target(node)).parameters
    known = {name: value for name, value in given.items() if name in parameters and value is not None}
    for name, value in known.items():
        own = node.get(name, value)
        if own not in (None, value) and (key := _KEY_OF.get(name)) is not None:
            logger.warning(
                "%s of a loader (%s) has no effect: %s=%s sets it. Remove it, or set that key.", f"{name}={own}",
                getattr(locate_target(node), "__name__", "its target"), key, value,
            )  # fmt: skip
    return instantiate(node, **known)


_KEY_OF = {
    "train_batch_size": "train.train_micro_batch_size",
    "test_batch_size": "train.test_micro_batch_size",
    "seed": "train.seed",
}


_OWN_CODE: dict[str, type[Callback | HookBase]] = {"train.callbacks": Callback, "train.hooks": HookBase}


def own_parts(cfg: DictConfig, key: str) -> list[Any]:
    """The callbacks or hooks that ``train.callbacks`` or ``train.hooks`` lists."""
    kind, parts = _OWN_CODE[key], list[Any]()
    for place, node in enumerate(OmegaConf.select(cfg, key) or ()):
        part = instantiate(node)
        if not isinstance(part, kind):
            other = next((name for name, one in _OWN_CODE.items() if isinstance(part, one)), None)
            hint = "" if other is None else f" A {_OWN_CODE[other].__name__} belongs into {other}."
            raise ConfigTypeError(
                f"{key}.{place}: got {type(part).__name__}; it must be a trainwright.hooks.{kind.__name__}.{hint}"
            )
        parts.append(part)
    return parts


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
        train.global_batch_size = None
        train.update({"train_iter": cfg.train.train_iter, "train_epoch": 0})
    if is_endless:
        train.update({"train_iter": 100_000, "train_epoch": 0})
    train.update(changes)
    return new


_STARTED = "trainwright_started"  # in omegaconf's metadata of a configuration


class _Started:
    """What ``default_setup`` has made of a configuration, in this process, and what it has logged."""

    def __init__(self, content: Any, device: torch.device, records: list[logging.LogRecord]) -> None:
        self.content = content
        self.device = device
        self.records = records

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:  # a copy of the configuration is as complete
        return self

    def __reduce__(self) -> Any:  # another process has not joined the others
        return type(None), ()


def started(cfg: DictConfig) -> tuple[DictConfig, torch.device, list[logging.LogRecord]]:
    """A complete and checked copy of ``cfg``, with all batch sizes, the device of the run, and what was logged.

    The processes are joined, and logging is started. What ``default_setup`` has done is not repeated, unless the
    configuration has been changed since.
    """
    before = vars(cfg._metadata).get(_STARTED) if isinstance(cfg, DictConfig) else None
    if before is not None and (content := _containers(cfg)) == before.content:
        check_same_settings(content)  # every process is here, also those where the configuration was changed
        return copy.deepcopy(cfg), before.device, before.records
    log_to_console(launched_rank())  # before the first warning
    with kept_records() as records:
        whole = checked(cfg)
        device = join_ranks(whole)
        complete_batch_sizes(whole)
    return whole, device, records


def checked(cfg: DictConfig, *, source: str | None = None) -> DictConfig:
    """A complete copy of ``cfg``, in which everything is resolved that needs neither processes nor data.

    ``source``: its file, for messages.
    """
    whole = complete(cfg)
    remember_secrets(whole)
    validate(whole, source=source)
    apply_dev_run(whole)
    whole.train.output_dir = _as_text(os.path.expanduser(whole.train.output_dir))
    resolve_eval_mode(whole)
    return whole


def complete_batch_sizes(cfg: DictConfig) -> None:
    """Write the three batch sizes and the layout of the processes into ``cfg.train``.

    Sizes that a run on another number of processes completed, as in its ``config.yaml``, keep the global batch.
    """
    train, num_ranks = cfg.train, get_data_parallel_size()
    sizes: dict[str, int | None] = {name: train[name] for name in BATCH_SIZES}
    recorded, given = train.dist.data_parallel_size, [size for size in sizes.values() if size is not None]
    if train.get("resume", False) and (before := _sizes_of_run(train.output_dir)) is not None:
        ranks, batch = before
        if train.dist.elastic and ranks != num_ranks:
            logger.info(
                "Elastic: %d data ranks instead of %d, %d samples per update as before.", num_ranks, ranks, batch
            )
            sizes.update({"global_batch_size": batch, "num_accumulation_steps": None})
            given = []
    else:
        ranks, batch = num_ranks, 0
    if recorded not in (None, 1, num_ranks) and len(given) == 3 and given[1] == given[0] * given[2] * recorded:
        sizes["num_accumulation_steps"] = None
    train.update(dict(zip(BATCH_SIZES, resolve_batch_sizes(sizes, num_ranks), strict=True)))
    if batch and ranks != num_ranks and train.global_batch_size not in (None, batch):
        logger.warning(
            "Resumed on %d data ranks instead of %d, with %d samples per update instead of %d;"
            " train.dist.elastic=True keeps the samples per update.",
            num_ranks, ranks, train.global_batch_size, batch,
        )  # fmt: skip
    train.dist.data_parallel_size = num_ranks
    _record_layout(train.dist)


def _record_layout(dist: DictConfig) -> None:
    """Write the number of machines, the processes of each, and the stages of the layers into ``train.dist``.

    Other machines than those of a saved configuration are a warning.
    """
    each = int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))
    found: dict[str, Any] = {"num_nodes": max(1, get_world_size() // each), "num_gpus_per_node": each}
    for name, number in found.items():
        if dist.get(name) not in (None, number) and is_main_process():
            logger.warning("train.dist.%s: the configuration has %s, this run has %d.", name, dist[name], number)
    mesh = current_mesh()
    if mesh is not None and mesh.layout.pipeline > 1 and (layers := dist.pipeline_num_layers) is not None:
        stages = mesh.layout.all_stages
        found["auto_pipeline_stage_id"] = stages.automatic_stage_ids(layers)
        found["actual_pipeline_stage_id"] = stages.stage_ids(layers)
    dist.update(found)


def check_num_layers(dist: DictConfig, layer_stages: Sequence[int]) -> None:
    """Compare ``train.dist.pipeline_num_layers`` with the layers of the model that was cut."""
    if dist.pipeline_num_layers not in (None, len(layer_stages)):
        raise ConfigError(
            f"train.dist.pipeline_num_layers: got {dist.pipeline_num_layers}, but the model has {len(layer_stages)}"
            f" layers. Set {len(layer_stages)}, or None: then it is counted."
        )


def _sizes_of_run(folder: str) -> tuple[int, int] | None:
    """The data ranks and the global batch of the run in ``folder``, by its ``config.yaml``; None: unknown."""
    file = Path(folder, "config.yaml")
    if not file.is_file():
        return None
    with suppress(OSError, ValueError, LookupError, TypeError):
        saved = read_mapping(file)
        return int(saved["train"]["dist"]["data_parallel_size"]), int(saved["train"]["global_batch_size"])
    return None


def _as_text(path: str) -> str:
    """``path`` as a value of a configuration, where ``${`` starts an interpolation."""
    return path.replace("${", r"\${")


def join_ranks(cfg: DictConfig, *, trains: bool = True) -> torch.device:
    """Join the launcher's processes; return the device that ``cfg.train`` requests.

    A run that resumes downloads what its folder lacks. ``trains``: False for an evaluation.
    ``dist.device_type`` and ``input_placement_device`` are equivalent here; the first has priority.
    """
    asked = try_get_key(cfg, "train.dist.device_type") or try_get_key(cfg, "train.input_placement_device")
    zero = cfg.train.zero_optimization
    if zero.stage != 1 and not zero.enabled:
        logger.warning(
            "train.zero_optimization.stage=%s has no effect: train.zero_optimization.enabled is False.", zero.stage
        )
    sizes = {**cfg.train.dist, "zero_stage": zero.stage if zero.enabled else 0, "zero_offload": zero.offload}
    sizes["device_type"] = asked

    def key_of(name: str) -> str:
        zero = {"zero_stage": "train.zero_optimization", "zero_offload": "train.zero_optimization.offload"}
        return zero.get(name, f"train.dist.{name}")

    device = setup_dist_util(sizes, name=key_of, check=lambda: check_same_settings(_containers(cfg)))
    files = RunFiles(Path(cfg.train.output_dir).absolute(), RunFolder.file_names)
    mirror = mirror_of(cfg.train.checkpointer.mirror, "train.checkpointer.mirror", files)
    elsewhere = mirror.has_checkpoint if mirror is not None else bool
    if not cfg.train.get("resume", False) and is_continued(Path(cfg.train.output_dir, POINTER_NAME), elsewhere):
        with open_dict(cfg):
            cfg.train.resume = True
    fetch_run(mirror, resumes=bool(cfg.train.get("resume", False)), trains=trains)
    return device


def _containers(cfg: DictConfig) -> Any:
    """``cfg`` as dicts and lists; interpolations stay text."""
    return OmegaConf.to_container(cfg, resolve=False)


def sections_of(cfg: DictConfig) -> dict[str, Any]:
    """The sections that a trainer reads, as dicts and lists."""
    content = _containers(cfg)
    return {name: content[name] for name in SECTIONS if name in content}


def changed_settings(cfg: DictConfig) -> str:
    """The settings of ``cfg.train`` that differ from the defaults, as on a command line."""
    defaults = dict(_leaves(get_config("common/train.py").train, "train"))
    changed = [
        f"{k}={v}" for k, v in _leaves(cfg.train, "train") if v != defaults.get(k, v) and k not in _SHOWN_ELSEWHERE
    ]
    return ", ".join(changed)


def _leaves(section: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The values of a section by their dotted keys; a lazy call is the name of its target."""
    from trainwright.config.settings import KEYS  # here: loads pydantic

    for key, value in section.items():
        if isinstance(value, DictConfig) and "_target_" in value:
            yield f"{path}.{key}", _name_of_call(value)
        elif isinstance(value, ListConfig) and f"{path}.{key}" in _OWN_CODE:
            yield f"{path}.{key}", [_name_of_call(one) for one in value]
        elif isinstance(value, DictConfig) and f"{path}.{key}" in KEYS:
            yield f"{path}.{key}", without_secrets({key: OmegaConf.to_container(value)})[0][key]
        elif isinstance(value, DictConfig):
            yield from _leaves(value, f"{path}.{key}")
        else:
            yield f"{path}.{key}", value


def _name_of_call(node: Any) -> str:
    target = node["_target_"] if isinstance(node, DictConfig) else type(node)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def next_commands(cfg: DictConfig, given: DictConfig, *, is_own_trainer: bool, has_ended_early: bool) -> list[str]:
    """What a user may type after a training; only what works with this run's files and builds its trainer.

    ``given``: the configuration as the user wrote it. ``is_own_trainer``: a class of the user's, which only the program
    of the run builds. ``has_ended_early``: by early stopping.
    """
    folder = cfg.train.output_dir.rstrip("/")
    commands = [f"tensorboard --logdir {shlex.quote(folder)}"]
    name = "train_epoch" if given.train.train_epoch and not given.train.train_iter else "train_iter"
    longer = f"train.{name}={2 * cfg.train[name]}"
    if has_ended_early:
        name, longer = "early_stopping", "train.early_stopping=null"
    if "project_root" not in cfg:  # the program has not read its configuration from the command line
        return [*commands, f"train.resume=True with {longer.replace('null', 'None')} trains it longer"]
    has_best = Path(folder, "model_best").exists()
    if is_own_trainer:
        # As it was started, without what the command adds.
        left_out = ("--resume", "--eval-only", f"train.{name}=", "train.load_weight=")
        given_arguments = (one for one in sys.argv if not one.startswith(left_out))
        program = shlex.join([os.path.basename(sys.executable), *redact_command(given_arguments)])
        best = shlex.quote(f"train.load_weight={folder}/model_best")
        commands += [f"{program} --eval-only {best}"] if has_best else []
        return [*commands, f"{program} --resume {longer}"]
    commands += [f"trainwright eval {shlex.quote(folder)}"] if has_best else []
    return [*commands, f"trainwright train {shlex.quote(folder + '/config.yaml')} --resume {longer}"]


def resolve_eval_mode(cfg: DictConfig) -> None:
    """Set ``train.evaluation.eval_mode`` by the metric's name, unless the user has set it."""
    evaluation = cfg.train.evaluation
    if is_set(evaluation, "eval_mode"):
        return
    objective = objective_of_name(evaluation.eval_metric)
    if objective is not None:
        evaluation.eval_mode = MODES[objective]
        mark_default(evaluation, "eval_mode", is_derived=True)  # it follows another metric that is set later
    elif evaluation.enabled and try_get_key(cfg, "dataloader.test"):
        raise ConfigError(
            f"train.evaluation.eval_metric: got {evaluation.eval_metric!r}, and it is unknown whether higher is"
            " better. Set train.evaluation.eval_mode='max' or 'min'."
        )


def scale_to_data(cfg: DictConfig, data_loader: Any) -> None:
    """Write the number of iterations, and the settings that depend on it, into ``cfg.train``."""
    train = cfg.train
    length, windows = num_samples(data_loader, train.train_micro_batch_size), windows_of(train)
    micro_batch = train.train_micro_batch_size * get_data_parallel_size()
    if length is not None and length < (largest := micro_batch * windows.largest):
        raise ConfigError(
            f"train.global_batch_size: got {largest}, but the training set has {length} samples; it"
            f" must be at most {length}: set a smaller train.train_micro_batch_size, or"
            f" train.global_batch_size where that is set. ({train.train_micro_batch_size} train_micro_batch_size x"
            f" {windows.largest} num_accumulation_steps x {get_data_parallel_size()} processes)"
        )
    if train.train_epoch == 0 and is_set(train, "train_epoch") and not is_set(train, "train_iter"):
        logger.warning(
            "train.train_epoch=0: the length of the run is the default train.train_iter=%d. Set train.train_iter,"
            " or a train_epoch above 0.", train.train_iter,
        )  # fmt: skip
    asked_for, by_epochs = train.train_iter, iterations_of_epochs(train, length, micro_batch, windows)
    train.train_iter = total_iterations(train, length, micro_batch, windows)
    if asked_for and by_epochs:
        logger.info(
            "train.train_iter=%d and train.train_epoch=%g (%d iterations) are both set: the larger counts, %d."
            " Set train.train_epoch=0 to train train_iter iterations.",
            asked_for, train.train_epoch, by_epochs, train.train_iter,
        )  # fmt: skip
    _compute(train, "train", "warmup_iter", warmup_iterations(train.train_iter, train.warmup_ratio))
    for path, scheduler in _schedulers(train).items():
        _scale_scheduler(train, path, scheduler)
    if length is not None:
        # Whole iterations, for what is shown; the hooks count the epochs themselves.
        per_epoch = max(1, length // (micro_batch * windows.largest))
        if (epochs := try_get_key(train, "evaluation.eval_after_n_epoch")) is not None:
            train.evaluation.eval_period = epochs * per_epoch
        if (epochs := try_get_key(train, "checkpointer.save_model_after_n_epoch")) is not None:
            train.checkpointer.period = epochs * per_epoch


def num_samples(data_loader: Any, batch_size: int) -> int | None:
    """The number of samples of a loader's data set; None if unknown (an iterable data set)."""
    dataset, sampler = getattr(data_loader, "dataset", None), getattr(data_loader, "batch_sampler", None)
    if isinstance(sampler, CyclicSampler):
        return sampler.num_used
    if hasattr(dataset, "__len__"):
        return len(dataset)  # type: ignore[arg-type]
    if dataset is None and hasattr(data_loader, "__len__"):
        return len(data_loader) * batch_size
    return None


def windows_of(train: DictConfig) -> Windows:
    """The micro-batches of each iteration."""
    return Windows.of(train.num_accumulation_steps)


def iterations_per_epoch(train: DictConfig, num_samples: int | None) -> EpochLength | None:
    """None: unknown. A fraction where an epoch ends within an iteration."""
    if length := train.get("iter_per_epoch"):
        return int(length)
    if not num_samples:
        return None
    windows = windows_of(train)
    micro_batches = Fraction(num_samples, train.train_micro_batch_size * get_data_parallel_size())
    if windows.is_scheduled:
        return WindowEpochs(micro_batches, windows)
    return max(micro_batches / windows.at(0), Fraction(1))


def num_epochs(train: DictConfig, num_samples: int | None, iterations: int) -> float | None:
    """The epochs of so many iterations; None: unknown."""
    if length := train.get("iter_per_epoch"):
        return iterations / int(length)
    samples = windows_of(train).before(iterations) * train.train_micro_batch_size * get_data_parallel_size()
    return samples / num_samples if num_samples else None


def scale_shares(train: DictConfig) -> None:
    """Write periods that are shares of all iterations as iterations."""
    for section, key in ((train, "log_period"), (train.checkpointer, "period"), (train.evaluation, "eval_period")):
        if isinstance(section[key], float):
            section[key] = math.ceil(exact(section[key]) * train.train_iter)


_COMPUTED_FROM = {"max_iter": "train.train_iter or train.train_epoch", "warmup_iter": "train.warmup_ratio"}


def _compute(section: DictConfig, path: str, name: str, value: int) -> None:
    """Write what the run computes; warn if code has set another number, but not if a saved run has."""
    given = value_at(section, name)
    if isinstance(given, int) and given != value and is_set(section, name) and is_trusted(section):
        logger.warning(
            "%s.%s=%s has no effect: the run computes it, %d, from %s. Set %s instead.",
            path, name, given, value, _COMPUTED_FROM[name], _COMPUTED_FROM[name],
        )  # fmt: skip
    section[name] = value
    mark_default(section, name, is_derived=True)


def mark_computed(train: DictConfig) -> None:
    """Mark what the run computes as such: the start of the run has warned of other numbers."""
    for section in (train, *_schedulers(train).values()):
        for name in _COMPUTED_FROM:
            if name in section:
                mark_default(section, name, is_derived=True)


def _schedulers(train: DictConfig) -> dict[str, DictConfig]:
    """The lazy calls of the schedules by their dotted paths."""
    section, path = train.scheduler, "train.scheduler"
    found = {f"{path}.{name}": section[name] for name in section} if are_several(section) else {path: section}
    return {path: one for path, one in found.items() if isinstance(one, DictConfig) and "_target_" in one}


def _scale_scheduler(train: DictConfig, path: str, scheduler: DictConfig) -> None:
    taken = read_signature(locate_target(scheduler)).parameters  # torch's schedulers take neither
    for name, value in (("max_iter", train.train_iter), ("warmup_iter", train.warmup_iter)):
        if name in taken:
            _compute(scheduler, path, name, value)
    factor = taken.get("warmup_factor")
    if factor is not None and factor.default is factor.empty and factor.name not in scheduler:
        scheduler.warmup_factor = get_config("common/train.py").train.scheduler.warmup_factor
    if (milestones := try_get_key(scheduler, "milestones")) is not None:
        scheduler.milestones = milestone_iterations(milestones, train.train_iter)


def epochs_of_length(train: DictConfig) -> float:
    """The epochs that set the length of a run, as the user has written it; 0: ``train_iter`` does."""
    return 0 if train.train_iter else float(train.train_epoch)


_MOST_EPOCHS = 10  # a larger period is not taken for one of epochs
_IN_EPOCHS = {
    "evaluation.eval_period": "evaluation.eval_after_n_epoch",
    "checkpointer.period": "checkpointer.save_model_after_n_epoch",
}


def warn_of_periods(train: DictConfig, per_epoch: EpochLength | None, *, evaluates: bool) -> None:
    """Log periods that are a small part of an epoch in a run whose length is in epochs: they are probably epochs."""
    length = per_epoch if isinstance(per_epoch, int | Fraction) else 0  # else unknown, or of several lengths
    most = min(epochs_of_length(train) / 2, _MOST_EPOCHS, length / 10)
    found = {
        f"train.{key}": (period, f"train.{in_epochs}")
        for key, in_epochs in _IN_EPOCHS.items()
        if type(period := value_at(train, key)) is int and period <= most and value_at(train, in_epochs) is None
        if evaluates or key != "evaluation.eval_period"
    }
    if found:
        logger.warning(
            "%s count%s iterations (%d in an epoch). To count epochs write %s.",
            " and ".join(f"{key}={period}" for key, (period, _) in found.items()), "s" * (len(found) == 1),
            round(length), " and ".join(f"{key}={period}" for period, key in found.values()),
        )  # fmt: skip


def epochs_of_schedules(train: DictConfig) -> float:
    """:func:`epochs_of_length`; 0 if milestones are shares of the run."""
    milestones = [one for node in _schedulers(train).values() for one in try_get_key(node, "milestones") or ()]
    return 0 if any(isinstance(one, float) for one in milestones) else epochs_of_length(train)


def extend_schedules(run: Run, build: Callable[[Any], Any]) -> None:
    """Make the schedules those of a longer run, at their positions; ``build`` builds them for an optimizer."""
    if run.lr_scheduler is not None:
        extend_schedule(run.lr_scheduler, build)
        return
    rates = [group["lr"] for group in run.optimizer.param_groups]
    longer = build(run.optimizer)  # sets the first rates of all of them
    for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for name, schedule in run.lr_schedulers.items():
        extend_schedule(schedule, lambda optimizer, name=name: longer[name])  # type: ignore[misc]
