"""Checks of a Trainer's arguments, all of them before anything is built."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from trainwright.base.batch import warn_of_order
from trainwright.base.errors import ConfigError, ConfigTypeError, nearest_name
from trainwright.config.foreign_names import ARGUMENTS, argument_hint
from trainwright.data.errors import are_inputs_and_labels, columns_fault, data_fault, is_read
from trainwright.data.mixture import mixed
from trainwright.data.wrapped import with_inner
from trainwright.engine.loaders import each, warn_of_left_out
from trainwright.evaluation.evaluator import DatasetEvaluator
from trainwright.hooks.callbacks import Callback
from trainwright.optim.named import NamedOptimizers, check_schedules
from trainwright.parallel.meta_start import built_on, has_meta

if TYPE_CHECKING:
    from trainwright.config.settings import TrainingConfig

logger = logging.getLogger("trainwright.engine")

_CHECKPOINT = "output/checkpoints/400"  # an example of a path


@dataclass(frozen=True, kw_only=True)
class Given:
    """The arguments of a ``Trainer``, checked."""

    model: nn.Module
    config: "TrainingConfig"
    train_dataset: Any
    eval_dataset: Any
    train_dataloader: Any
    eval_dataloader: Any
    data_collator: Callable[[list[Any]], Any] | None
    preprocessor: Any
    metrics_handler: Any
    optimizer: Optimizer | None  # several are a NamedOptimizers
    schedules: Mapping[str, LRScheduler] | None  # by the names of their optimizers
    loss: Callable[..., Any] | None
    accelerator: Any
    model_card: Any
    callbacks: Iterable[Callback]

    @classmethod
    def checked(
        cls,
        model: Any,
        config: Any,
        *,
        training_config: Any,
        unknown: Mapping[str, Any],
        **given: Any,
    ) -> "Given":
        """The arguments, or an error that names everything wrong with them."""
        refuse_arguments("Trainer", unknown, ARGUMENTS)
        model, config = model_and_config(model, config, training_config)
        model = built(model, config)
        check_parts(model, config, given)
        names = "optimizer", "lr_scheduler", "optimizers", "lr_schedulers"
        optimizer, lr_scheduler, optimizers, lr_schedulers = map(given.pop, names)
        if optimizers is not None or lr_schedulers is not None:
            optimizer = several(optimizer, lr_scheduler, optimizers, lr_schedulers)
        check_optimizer(optimizer, model, lr_scheduler)
        check_given(config, optimizer, lr_scheduler or lr_schedulers, given)
        check_kinds(**{name: given[name] for name in ("data_collator", "metrics_handler", "model_card")})
        given["train_dataset"] = mixed(given["train_dataset"])
        check_data(given)
        schedules = lr_schedulers if lr_scheduler is None else {"optimizer": lr_scheduler}
        return cls(model=model, config=config, optimizer=optimizer, schedules=schedules, **given)

    @property
    def data(self) -> dict[str, Any]:
        """The data arguments by name."""
        names = ("train_dataset", "train_dataloader", "eval_dataset", "eval_dataloader")
        return {name: getattr(self, name) for name in names}


def model_and_config(model: Any, config: Any, training_config: Any) -> tuple[Any, Any]:
    """Model and config, which may come in either order; ``training_config`` is an alias of ``config``."""
    from trainwright.config.settings import TrainingConfig

    given = [part for part in (config, training_config) if part is not None]
    if len(given) == 2:
        raise ConfigTypeError("Trainer: got config and training_config, two names of one argument. Pass one of them.")
    config = given[0] if given else None
    if isinstance(model, TrainingConfig) and not isinstance(config, TrainingConfig):
        model, config = config, model
    if config is None and isinstance(model, nn.Module):
        config = TrainingConfig(output_dir="tmp_trainer")
        logger.warning("Trainer: no config was passed; training with the defaults, output_dir=%s.", config.output_dir)
    return model, config


def built(model: Any, config: Any) -> Any:
    """The model of a LazyCall, on the meta device if the configuration requests that; another one as it is."""
    is_on_meta = bool(getattr(config, "meta_init", False))
    if isinstance(model, Mapping) or type(model).__name__ == "DictConfig":
        from trainwright.config.lazy.instantiation import instantiate  # loads omegaconf

        with built_on(meta=is_on_meta):
            return instantiate(model)
    if is_on_meta and isinstance(model, nn.Module) and not has_meta(model):
        logger.warning(
            "TrainingConfig.meta_init has no effect: the model is built already. Pass LazyCall(Net)(...), or build it"
            " within torch.device('meta')."
        )
    return model


def refuse_arguments(where: str, unknown: Iterable[str], table: Mapping[str, str]) -> None:
    """Raise for arguments that do not exist, with our names for those of other libraries, or the nearest."""
    own = {*table.values(), *(field.name for field in fields(Given))} if where == "Trainer" else set()
    hints = {name: method_hint(table, name) or nearest_name(name, own).strip() for name in unknown}
    if hints:
        faults = [f"{where}: there is no argument {name!r}. {hint}".rstrip() for name, hint in hints.items()]
        raise ConfigTypeError("\n".join(faults))


def method_hint(table: Mapping[str, str], name: str) -> str:
    """What an argument that a method of the Trainer does not have is called, by ``table``, or that it is a setting."""
    from trainwright.config.settings import TrainingConfig

    return argument_hint(name, table, {*TrainingConfig.model_fields, *TrainingConfig.aliases}).strip()


def no_path(given: Any) -> ConfigTypeError:
    """The error about the argument of ``train`` that is no path of a checkpoint."""
    if isinstance(given, bool):
        fix = f"For the latest checkpoint set TrainingConfig(resume_from_checkpoint={given})."
    elif isinstance(given, int | float):
        fix = f"The length is a setting: TrainingConfig(num_epochs={given}), or max_steps={given}."
    else:
        fix = "Model, settings and data are arguments of Trainer(model, config, train_dataset, eval_dataset)."
    shown = repr(given) if isinstance(given, int | float) else type(given).__name__
    return ConfigTypeError(
        f"Trainer.train: got resume_checkpoint_path={shown}. It takes nothing, or the path of a checkpoint to"
        f" continue from: train('{_CHECKPOINT}'). {fix}"
    )


def check_parts(model: Any, config: Any, given: Mapping[str, Any]) -> None:
    """Raise if the model, the settings or the data are missing."""
    from trainwright.config.settings import TrainingConfig

    faults = []
    if not isinstance(model, nn.Module):
        hint = f" Load it first, for example AutoModel.from_pretrained({model!r})." if isinstance(model, str) else ""
        faults.append(f"Trainer.model: got {_shown(model)}; it must be a torch.nn.Module.{hint}")
    if not isinstance(config, TrainingConfig):
        hint = " Write TrainingConfig(**config)." if isinstance(config, Mapping) else ""
        faults.append(f"Trainer.config: got {_shown(config)}; it must be a TrainingConfig.{hint}")
    if given["train_dataset"] is None and given["train_dataloader"] is None:
        faults.append(
            "Trainer.train_dataset: got None; pass a data set, or a loader as train_dataloader. To only"
            " evaluate or predict, pass the data that you evaluate on: it is not trained on before train()."
        )
    has_eval_data = given["eval_dataset"] is not None or given["eval_dataloader"] is not None
    if isinstance(config, TrainingConfig) and config.eval_strategy == "step" and not has_eval_data:
        faults.append("Trainer.eval_dataset: got None with TrainingConfig.eval_strategy='step'; pass one, or a loader.")
    if faults:
        raise ConfigTypeError("\n".join(faults))


SEVERAL_TO_EVALUATE = "{name: data set, ...}"


def several_fault(dataset: Any, fix: str) -> str | None:
    """Why a list is no data set but has several, with what to pass instead; None for any other object."""
    several = dataset if isinstance(dataset, list | tuple) else ()
    firsts = [one[0] if isinstance(one, tuple) and one else one for one in several]
    if not firsts or not all(isinstance(one, Dataset) for one in firsts):
        return None
    return f"got a {type(dataset).__name__} of data sets, which would be read as samples; pass {fix}."


def loader_fault(loader: Any) -> str | None:
    """Why an object is no loader; None if it may be one, or is None."""
    kind = type(loader).__name__
    if isinstance(loader, Dataset):
        return f"got {kind}, a data set"
    if loader is not None and (isinstance(loader, str) or not is_read(loader)):
        return f"got {loader!r:.80} ({kind})"
    return f"got {kind}, an iterator, which can be iterated only once" if isinstance(loader, Iterator) else None


def check_data(arguments: Mapping[str, Any]) -> None:
    """Raise for loaders passed as data sets and data sets passed as loaders."""
    faults = []
    for name, fix in (
        ("train", "{name: (data set, weight), ...}, or torch.utils.data.ConcatDataset([...])"),
        ("eval", SEVERAL_TO_EVALUATE),
    ):
        dataset, loader = arguments[f"{name}_dataset"], arguments[f"{name}_dataloader"]
        if isinstance(dataset, DataLoader):
            faults.append(f"Trainer.{name}_dataset: got a DataLoader; pass it as {name}_dataloader.")
        if (fault := several_fault(dataset, fix)) is not None:
            faults.append(f"Trainer.{name}_dataset: {fault}")
        if not isinstance(dataset, Mapping) and (fault := data_fault(dataset)) is not None:
            faults.append(f"Trainer.{name}_dataset: {fault}")
        elif name == "eval" and are_inputs_and_labels(arguments["train_dataset"], dataset):
            faults.append(
                f"Trainer.eval_dataset: got an array of the shape {tuple(dataset.shape)} beside a train_dataset of the"
                f" shape {tuple(arguments['train_dataset'].shape)}, as inputs and labels. Pass both as one data set:"
                " Trainer(model, config, torch.utils.data.TensorDataset(inputs, labels))."
            )
        if (fault := loader_fault(loader)) is not None:
            use = f"pass it as {name}_dataset" if isinstance(loader, Dataset) else "pass a list or a loader"
            faults.append(f"Trainer.{name}_dataloader: {fault}; {use}.")
    for argument in ("eval_dataset", "eval_dataloader"):
        if isinstance(arguments[argument], Mapping):
            check_named_data(arguments[argument], argument)
    if faults:
        raise ConfigTypeError("\n".join(faults))


def check_labels(model: nn.Module, data: Iterable[Any]) -> None:
    """Raise if a label has one id in the model and another one in a data set."""
    of_model = _ids(model)
    for dataset in chain.from_iterable(map(with_inner, data)):
        for label, number in _ids(dataset).items():
            if of_model.get(label, number) != number:
                raise ConfigError(
                    f"Trainer: the label {label!r} is {number} in {type(dataset).__name__}, and {of_model[label]} in"
                    " the model. Build the model with id2label=dataset.config.id2label."
                )


def _ids(owner: Any) -> dict[str, int]:
    id2label = getattr(getattr(owner, "config", None), "id2label", None)
    return {label: int(number) for number, label in id2label.items()} if isinstance(id2label, Mapping) else {}


def check_named_data(given: Mapping[Any, Any], argument: str) -> None:
    """Raise unless ``given`` has evaluation data by name, and names that can be parts of the names of metrics."""
    if (fault := columns_fault(given)) is not None:
        raise ConfigTypeError(f"Trainer.{argument}: {fault}")
    names = [name for name in given if not (isinstance(name, str) and re.fullmatch(r"\S(.*\S)?", name))]
    if not given or names:
        raise ConfigError(
            f"Trainer.{argument}: got a dict {f'with the names {names}' if names else 'without entries'}; it must"
            " have a data set for each name, and a name is text on one line."
        )
    for name, data in given.items():
        is_loader = isinstance(data, DataLoader)
        if data is None or isinstance(data, str) or (is_loader and argument == "eval_dataset"):
            raise ConfigTypeError(
                f"Trainer.{argument}[{name!r}]: got {type(data).__name__}; it must be a data set."
                f"{' Pass loaders as eval_dataloader={...}.' if is_loader else ''}"
            )
        if (fault := data_fault(data)) is not None:
            raise ConfigTypeError(f"Trainer.{argument}[{name!r}]: {fault}")


_OBJECTS = {
    "optimizer": "torch.optim.AdamW(model.parameters(), lr=...)",
    "lr_scheduler": "torch.optim.lr_scheduler.LambdaLR(optimizer, function), beside that optimizer",
}
_INNER = {"optimizer": "optimizer", "lr_scheduler": "scheduler"}


# What an object of an argument has, and what it is.
_KINDS = {
    "data_collator": (("__call__",), "a function of a list of samples"),
    "loss": (("__call__",), "a module or a function of (outputs, target)"),
    "optimizer": (("step", "param_groups"), "a torch.optim.Optimizer"),
    "lr_scheduler": (("step", "get_last_lr"), "a schedule of torch.optim.lr_scheduler"),
    "metrics_handler": (
        ("__call__",),
        "a MetricsHandler, a metric of torchmetrics, a DatasetEvaluator, a function of (predictions, labels), or a"
        " list or dict of these",
    ),
    "model_card": (("to_text",), "a ModelCard"),
}


def check_kinds(**given: Any) -> None:
    """Raise one error that lists every argument of the wrong type."""
    faults = [fault for name, value in given.items() if value is not None and (fault := _kind_fault(name, value))]
    if faults:
        raise ConfigTypeError("\n".join(faults))


def check_loss(loss: Any) -> None:
    if fault := _kind_fault("loss", loss):
        raise ConfigTypeError(fault)
    warn_of_order("Trainer.loss", loss, "output, target")


def _kind_fault(name: str, value: Any) -> str:
    """The text of the error if ``value`` is not what the argument takes, else ""."""
    attributes, kind = _KINDS[name]
    fits = all(hasattr(value, attribute) for attribute in attributes)
    if name == "metrics_handler":
        fits = fits or all(hasattr(value, method) for method in ("reset", "update", "compute"))
        fits = fits or isinstance(value, DatasetEvaluator | list | tuple | Mapping)
    if fits and not isinstance(value, type):
        return ""
    is_name = name in ("optimizer", "loss") and isinstance(value, str)
    hint = f" A name is a setting: TrainingConfig({name}={value!r})." if is_name else ""
    if callable(value) and name in _OBJECTS:
        hint = f" Pass an object: {name}={_OBJECTS[name]}."
    if isinstance(value, Mapping) and (inner := _INNER.get(name, "")) in value:  # as Lightning has it
        hint = f" Pass the object in it: {name}={inner}, and the rest as settings (lr_scheduling_steps)."
    return f"Trainer.{name}: got {_shown(value)}; it must be {kind}.{hint}"


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object of it, {value.__name__}(...)"
    text = repr(value).partition("\n")[0]
    return f"{text:.60} ({type(value).__name__})"


def check_optimizer(optimizer: Any, model: nn.Module, lr_scheduler: Any = None) -> None:
    """Raise if the optimizer holds none of the model's parameters, or the schedule belongs to another optimizer.

    ``optimizer``: None for one that the configuration names.
    """
    check_kinds(optimizer=optimizer, lr_scheduler=lr_scheduler)
    own = {id(parameter) for parameter in model.parameters()}
    groups = [] if optimizer is None else optimizer.param_groups
    if optimizer is not None and not any(id(one) in own for group in groups for one in group["params"]):
        raise ConfigError(
            f"Trainer.optimizer: {type(optimizer).__name__} holds none of the model's parameters; build it with"
            " model.parameters()."
        )
    if lr_scheduler is not None and getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            f"Trainer.lr_scheduler: {type(lr_scheduler).__name__} belongs to another optimizer; pass that optimizer"
            " too, as optimizer=, or set the schedule in the configuration."
        )


def several(optimizer: Any, lr_scheduler: Any, optimizers: Any, lr_schedulers: Any) -> NamedOptimizers:
    """The optimizers as one, checked with their schedules."""
    if optimizers is None:
        raise ConfigError("Trainer.lr_schedulers: needs optimizers={name: ...}; the schedule of one is lr_scheduler=.")
    if optimizer is not None or lr_scheduler is not None:
        other = "optimizer" if optimizer is not None else "lr_scheduler"
        raise ConfigError(f"Trainer: got optimizers and {other}. Pass all of them as {other}s={{name: ...}}.")
    named = NamedOptimizers(optimizers, where="Trainer.optimizers")
    if lr_schedulers is not None:
        check_schedules(lr_schedulers, named.optimizers, "Trainer.lr_schedulers")
    return named


def _warn_of_data(given: Mapping[str, Any]) -> None:
    for kind in ("train", "eval"):
        if given[f"{kind}_dataset"] is not None and given[f"{kind}_dataloader"] is not None:
            logger.warning("Trainer.%s_dataset is not read: the Trainer uses %s_dataloader. Pass one.", kind, kind)
    for loader in each(given["eval_dataloader"]):
        warn_of_left_out(loader, "Trainer.eval_dataloader")


def check_given(
    config: "TrainingConfig", optimizer: Optimizer | None, lr_scheduler: Any, given: Mapping[str, Any]
) -> None:
    """Warn once about settings and arguments that a passed part makes ineffective."""
    names = {
        "optimizer": ("optimizer", "learning_rate", "weight_decay", "decay_norm_and_bias", "layer_decay"),
        "lr_scheduler": ("lr_scheduler", "lr_scheduler_kwargs", "lr_scheduler_type", "warmup_ratio", "warmup_steps"),
        "loss": ("loss",),
        "train_dataloader": ("dataloader_drop_last", "dataloader_shuffle", "bucket_by_length", "shuffle_buffer"),
    }
    parts = {**given, "optimizer": optimizer, "lr_scheduler": lr_scheduler or None}
    unused = [
        f"{name}={getattr(config, name)!r} (the Trainer uses the passed {part}, {type(parts[part]).__name__})"
        for part in names
        for name in names[part]
        if parts[part] is not None and getattr(config, name) != type(config).model_fields[name].default
    ]
    named = [metric for metric in config.metrics or () if isinstance(metric, str)]  # others may give an objective
    if given["metrics_handler"] is not None and named and config.is_set("metrics"):
        unused.append(f"metrics={named} (the Trainer uses the passed metrics_handler)")
    steps = config.lr_scheduling_steps
    if steps is not None and lr_scheduler is None and config.lr_scheduler is None:
        unused.append(f"lr_scheduling_steps={steps} (lr_scheduler_type is stepped after each update)")
    _warn_of_data(given)
    if unused:
        logger.warning("TrainingConfig: settings without effect: %s. Remove them.", "; ".join(unused))
    each = lr_scheduler.values() if isinstance(lr_scheduler, Mapping) else [lr_scheduler]
    if steps is not None and any(isinstance(one, ReduceLROnPlateau) for one in each):
        raise ConfigError(
            f"TrainingConfig.lr_scheduling_steps: got {steps}, but the passed ReduceLROnPlateau is stepped after each"
            " evaluation, or at the end of each epoch without one. Remove it."
        )
