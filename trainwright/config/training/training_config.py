"""The run settings of the Python API: one flat object, checked when it is created and at every change."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from trainwright.config import types
from trainwright.config.torch_names import find_device
from trainwright.config.training.aliases import SYNONYMS
from trainwright.config.training.checked_config import CheckedConfig, setting, with_default
from trainwright.config.training.metric_config import MetricConfig
from trainwright.config.validation import Allowed

if TYPE_CHECKING:
    import torch


_Metrics = Annotated[
    list[Annotated[str, Field(min_length=1)] | MetricConfig] | None,
    Allowed("a list of names, of dicts and of MetricConfigs, or None"),
]
_NUM_SHOWN = 25

# Fields that the repr shows by another name.
_SHOWN_AS = {
    "eval_batch_size": "val_batch_size",
    "num_epochs": "epoch_num",
    "learning_rate": "lr",
    "metrics": "metric",
}

_WORDS_OF_THE_PAGE = frozenset(["epoch_num", "val_batch_size"])


class TrainingConfig(CheckedConfig):
    """How a :class:`~trainwright.Trainer` trains.

    Each setting has one name and may have others from older configurations, which are read and written alike:
    ``config.lr`` is ``config.learning_rate``. Steps are micro-batches: one call of the trainer's ``training_step``.
    ``get_config_help()`` and ``docs/trainer-config.md`` describe each setting. It also reads like a dict:
    ``config["lr"]``, ``config.get("lr")``, ``config.keys()``.

    Raises:
        ConfigError: something is wrong; the message lists every fault.

    >>> config = TrainingConfig(batch_size=4, lr=1e-3)
    >>> config.learning_rate, config.eval_batch_size
    (0.001, 4)
    """

    # The first 25 are shown always, in this order.
    output_dir: types.Folder = setting("./output_dir", "train", "The folder of everything that a run writes.")
    overwrite_output_dir: types.YesNo = setting(
        True, "train", "Move the files of an earlier run in output_dir aside and start; False: raise an error."
    )
    eval_strategy: types.EvalStrategy = setting(
        "epoch",
        "train",
        "Evaluate at the end of each epoch; every eval_steps steps; or never. 'eval_epoch': as 'epoch', without metrics"
        " of the training itself.",
    )
    eval_steps: types.CountOrNone = setting(None, "train", "Steps between evaluations, with eval_strategy 'step'.")
    batch_size: types.Count = setting(8, "train", "Samples in a batch of one process.")
    eval_batch_size: types.CountOrNone = setting(
        None, "train", "Samples in a batch of evaluation; None and -1: batch_size, and so it reads."
    )
    seed: types.Seed = setting(
        42, "train", "Of shuffling, augmentation and dropout; not of the weights of a model, which exist before."
    )
    num_epochs: types.Count = setting(2, "train", "Passes over the training data.")
    dataloader_pin_memory: types.YesNo = setting(True, "train", "Read batches into memory that a GPU copies faster.")
    dataloader_drop_last: types.YesNo = setting(
        True, "train", "Leave out the last training batch of an epoch if it is shorter. Evaluation takes every sample."
    )
    dataloader_num_workers: types.Workers = setting(
        0,
        "train",
        "Processes that read data, at most the CPUs there are; -1: as many as CPUs or batch_size, at most 8.",
    )
    learning_rate: types.Positive = setting(5e-5, "learning", "The optimizer's rate, where the schedule is at its top.")
    metrics: _Metrics = setting(
        ["Accuracy"],
        "metrics",
        "Metrics by name, or with arguments as a MetricConfig or dict. None: those of the task, if there is one.",
    )
    print_steps: types.CountOrNone = setting(
        None, "logging", "Print a line every so many steps; None: a progress bar for each epoch."
    )
    load_best_model_at_end: types.YesNo = setting(
        False, "train", "End with the weights that were best by metric_for_best_model."
    )
    early_stopping: types.EarlyStoppingOrNone = setting(
        {"monitor": "eval_epoch_metric", "patience": 4, "mode": "max"},
        "callback",
        "Stop after patience epochs without a better monitor, which is metric_for_best_model unless you name one; the"
        " mode 'auto' goes by the monitor's name. None: never.",
    )
    model_checkpoint: types.ModelCheckpointOrNone = setting(
        {"every_n_epoch": 1}, "callback", "Save every so many epochs, or every so many iterations; None: neither."
    )
    tensorboard: types.TensorBoardOrNone = setting(
        {"log_dir": None, "comment": ""}, "callback", "The folder of TensorBoard's events, and what its name ends in."
    )
    loss: types.NamedOrNone = setting(
        "CrossEntropyLoss", "learning", "A loss of torch.nn, for a model that has none of its own."
    )
    optimizer: types.Named = setting("Adam", "learning", "An optimizer of torch.optim, in upper or lower case.")
    lr_scheduler_type: types.LRSchedulerKind = setting(
        "linear", "learning", "A schedule with warm-up over all updates, or one of torch's stepped at each update."
    )
    warmup_ratio: types.Ratio = setting(0.0, "learning", "The part of all updates that warms up.")
    warmup_steps: types.CountOrZero = setting(0, "learning", "Updates that warm up; goes before warmup_ratio.")
    device_str: types.Device = setting(
        None, "device", "None: the accelerator, else the CPU; 'cuda': all GPUs; 'cuda:2', 'cpu': that one."
    )
    freeze_bn: types.YesNo = setting(False, "train", "Leave the running statistics of batch normalization as they are.")

    # The rest is shown where it differs from the default.
    task: types.TaskOrNone = setting(None, "train", "What the model is for: decides its metrics.")
    max_steps: types.StepsOrShare = setting(
        None, "train", "Steps after which training ends, if the epochs have not ended by then; a share: of all batches."
    )
    dataloader_shuffle: types.YesNo = setting(True, "train", "Shuffle the training data, in a new order in each epoch.")
    evaluate_with_generate: types.YesNo = setting(
        True, "train", "Evaluate a generative model by what it generates, rather than by its logits."
    )
    resume_from_checkpoint: types.Resume = setting(
        None,
        "train",
        "Resume from the newest checkpoint in output_dir (True), if there is one, or from the given path.",
    )
    init_weights_from: types.PathOrNone = setting(
        None, "train", "A folder or a hub id with the initial weights. A resumed run loads its own weights."
    )
    weight_decay: types.NotNegative = setting(0.0, "learning", "The optimizer's.")
    max_grad_norm: types.PositiveOrNone = setting(
        None, "learning", "Scale the gradients of an update down to this norm, where theirs is larger. None: do not."
    )
    gradient_accumulation_steps: types.Count = setting(1, "learning", "Batches whose gradients make one update.")
    mixed_precision: types.Precision = setting(
        None, "learning", "Compute forward passes in 'bf16' (also: True) or 'fp16'. None, False, 'no', 'full': do not."
    )
    float32_matmul_precision: types.MatmulPrecision = setting(
        None, "learning", "Multiply matrices of float32 in 'high' (TF32) or 'medium' (bfloat16); None: as torch is set."
    )
    lr_scheduler: types.NamedOrNone = setting(
        None, "learning", "A schedule of torch.optim.lr_scheduler, instead of lr_scheduler_type."
    )
    lr_scheduler_kwargs: types.Arguments = setting(None, "learning", "The arguments of lr_scheduler.")
    lr_scheduling_steps: types.CountOrNone = setting(
        None,
        "learning",
        "Steps between two steps of lr_scheduler; None: one step at the end of each epoch. Not for"
        " ReduceLROnPlateau, nor for lr_scheduler_type.",
    )
    non_finite: types.NonFinite = setting(
        "stop", "learning", "What to do if a loss or the gradients become NaN or infinite."
    )
    metric_for_best_model: types.Key = setting(
        "loss",
        "metrics",
        "The metric of the best checkpoint: a key of evaluation, or a training metric with the prefix 'train.'.",
    )
    greater_is_better: types.YesNoOrNone = setting(
        None,
        "metrics",
        "Whether a higher metric_for_best_model is better; None: known for losses, error rates, accuracies and the"
        " metrics of torchmetrics.",
    )
    log_steps: types.StepsOrShare = setting(
        50, "logging", "Steps between lines of metrics; a share: of all steps; None: the ends of epochs alone."
    )
    logs_dir: types.Folder = setting(".", "logging", "The folder of logs inside output_dir.")
    progress_bar: types.YesNo = setting(True, "logging", "Show progress bars on a terminal.")
    profile: types.ProfileOrNone = setting(
        None, "logging", "Record a few iterations with torch.profiler, into output_dir; True: by default which ones."
    )
    save_enabled: types.YesNo = setting(True, "checkpoint", "False: save nothing at all.")
    save_steps: types.SaveSteps = setting(
        None,
        "checkpoint",
        "Steps between checkpoints besides those of model_checkpoint; a share: of all steps; 0: none.",
    )
    checkpoints_dir: types.Folder = setting("checkpoints", "checkpoint", "The folder of checkpoints inside output_dir.")
    max_to_keep: types.CountOrNone = setting(
        None, "checkpoint", "Keep only so many of the newest checkpoints, and the best; None: all."
    )
    distributed: types.YesNo = setting(False, "device", "Train in the processes of `accelerate launch`.")
    graph: types.YesNo = setting(False, "device", "Make each update one compiled program.")

    @property
    def device(self) -> "torch.device":
        """Where to train: the device asked for if it is there; else the accelerator if there is one; else the CPU.

        One that is asked for and not there is one warning and the CPU. "cuda", all GPUs, is the first of them.
        """
        return find_device(self.device_str)

    @property
    def is_by_its_page(self) -> bool:
        """Whether it is written in the words of the page whose output shows all 25 settings at the start of a run."""
        return not _WORDS_OF_THE_PAGE.isdisjoint(self._names.values())

    def __repr__(self) -> str:
        return f"TrainingConfig({', '.join(f'{name}={value!r}' for name, value in self._shown())})"

    def _shown(self) -> Iterator[tuple[str, Any]]:
        """The settings that are always shown, by their documented names, and the others that differ from defaults."""
        fields, as_set = type(self).model_fields, self._as_set
        for field in list(fields)[:_NUM_SHOWN]:
            name = _SHOWN_AS.get(field, field)
            value = SYNONYMS[name].read(as_set[field]) if name in SYNONYMS else as_set[field]
            yield name, -1 if name == "val_batch_size" and value is None else value
        if as_set["metrics"] is None or len(as_set["metrics"]) > 1:  # `metric` shows only the first one
            yield "metrics", as_set["metrics"]
        for field in list(fields)[_NUM_SHOWN:]:
            if as_set[field] != fields[field].default:
                yield field, as_set[field]


_FIELDS = TrainingConfig.model_fields


class TrainerConfig(TrainingConfig):
    """How a :class:`~trainwright.Trainer` trains a model for a task.

    ``output_dir`` and ``task`` must be given. Metrics are the task's own if none are named, the loss is the model's.
    Nothing stops early or changes the learning rate unless it is asked for.

    Raises:
        ConfigError: something is wrong; the message lists every fault.

    >>> config = TrainerConfig(output_dir="out", task="image2text", metrics=["cer"])
    >>> config.num_epochs, config.learning_rate
    (1, 2e-05)
    """

    name: ClassVar[str] = "trainer"
    config_type: ClassVar[str] = "trainer"

    output_dir: types.Folder = with_default(_FIELDS["output_dir"], ...)
    batch_size: types.Count = with_default(_FIELDS["batch_size"], 1)
    num_epochs: types.Count = with_default(_FIELDS["num_epochs"], 1)
    dataloader_drop_last: types.YesNo = with_default(_FIELDS["dataloader_drop_last"], False)
    dataloader_num_workers: types.Workers = with_default(_FIELDS["dataloader_num_workers"], 4)
    learning_rate: types.Positive = with_default(_FIELDS["learning_rate"], 2e-5)
    metrics: _Metrics = with_default(_FIELDS["metrics"], None)
    early_stopping: types.EarlyStoppingOrNone = with_default(_FIELDS["early_stopping"], None)
    loss: types.NamedOrNone = with_default(_FIELDS["loss"], None)
    optimizer: types.Named = with_default(_FIELDS["optimizer"], "adam")
    lr_scheduler_type: types.LRSchedulerKind = with_default(_FIELDS["lr_scheduler_type"], None)
    task: types.Task = setting(..., "train", "What the model is for: decides its metrics.")
    logs_dir: types.Folder = with_default(_FIELDS["logs_dir"], "logs")
    log_steps: types.StepsOrShare = with_default(_FIELDS["log_steps"], None)

    __repr__ = CheckedConfig.__repr__
