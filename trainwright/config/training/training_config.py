"""``TrainingConfig`` and ``TrainerConfig``: the settings of the Python API, checked at creation and at every change."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

from pydantic import Field

from trainwright.config import validation as types
from trainwright.config.torch_names import find_device
from trainwright.config.training.aliases import ALIASES
from trainwright.config.training.checked_config import CATEGORIES, CheckedConfig, category_of, setting, with_default
from trainwright.config.training.metric_config import MetricConfig
from trainwright.config.validation import Allowed, allowed_text

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

    A setting may have aliases: ``config.lr`` is ``config.learning_rate``. Steps are micro-batches: one call of the
    trainer's ``training_step``. ``get_config_help()`` and ``docs/trainer-config.md`` describe all settings. Settings
    are also items: ``config["lr"]``, ``config.get("lr")``, ``config.keys()``.

    Raises:
        ConfigError: a setting is wrong; the message lists all faults.

    >>> config = TrainingConfig(batch_size=4, lr=1e-3)
    >>> config.learning_rate, config.eval_batch_size
    (0.001, 4)
    """

    # The first 25 are always shown, in this order.
    output_dir: types.Folder = setting("./output_dir", "train", "The folder of all files of a run.")
    overwrite_output_dir: types.YesNo = setting(
        True, "train", "Move the files of an earlier run in output_dir aside and start; False: raise an error."
    )
    eval_strategy: types.EvalStrategy = setting(
        "epoch",
        "train",
        "Evaluate after each epoch, every eval_steps steps, or never. 'eval_epoch': as 'epoch', but without metrics of"
        " training batches.",
    )
    eval_steps: types.StepsOrFraction = setting(
        None, "train", "Steps between evaluations, with eval_strategy 'step'; a share: of all steps."
    )
    batch_size: types.Count = setting(8, "train", "Samples in a batch of one process.")
    eval_batch_size: types.CountOrNone = setting(
        None, "train", "Samples in a batch of evaluation. None and -1: the value of batch_size."
    )
    seed: types.Seed = setting(
        42, "train", "The seed of shuffling, augmentation and dropout, not of the initial weights of the model."
    )
    num_epochs: types.Count = setting(2, "train", "Passes over the training data.")
    dataloader_pin_memory: types.YesNo = setting(
        True, "train", "Load batches into pinned memory, for faster copies to a GPU."
    )
    dataloader_drop_last: types.YesNo = setting(
        True, "train", "Drop the last training batch of an epoch if it is shorter. Evaluation uses all samples."
    )
    dataloader_num_workers: types.Workers = setting(
        0,
        "train",
        "Worker processes that load data, at most the number of CPUs; -1: the smallest of CPUs, batch_size and 8.",
    )
    learning_rate: types.Positive = setting(5e-5, "learning", "The peak learning rate of the schedule.")
    metrics: _Metrics = setting(
        ["Accuracy"],
        "metrics",
        "Metrics by name, or with arguments as a MetricConfig or dict. None: the metrics of the task, if set.",
    )
    print_steps: types.StepsOrFraction = setting(
        None, "logging", "Steps between printed lines; a share: of all steps. None: a progress bar for each epoch."
    )
    load_best_model_at_end: types.YesNo = setting(
        False, "train", "Load the best weights by metric_for_best_model at the end."
    )
    early_stopping: types.EarlyStoppingOrNone = setting(
        {"monitor": "eval_epoch_metric", "patience": 4, "mode": "max"},
        "callback",
        "Stop after patience epochs without an improvement of monitor. Unless you set a monitor, this is"
        " metric_for_best_model, by default the loss of the evaluation, in its direction. The mode 'auto' derives the"
        " direction from the name of the monitor. None: never.",
    )
    model_checkpoint: types.ModelCheckpointOrNone = setting(
        {"every_n_epoch": 1}, "callback", "Save every n epochs, or every n iterations. None: neither."
    )
    tensorboard: types.TensorBoardOrNone = setting(
        {"log_dir": None, "comment": ""},
        "callback",
        "The folder of TensorBoard's event files, and the suffix of its name.",
    )
    loss: types.NamedOrNone = setting(
        "CrossEntropyLoss", "learning", "A loss of torch.nn, for a model without its own loss."
    )
    optimizer: types.Named = setting("Adam", "learning", "An optimizer of torch.optim; upper and lower case are equal.")
    lr_scheduler_type: types.LRSchedulerKind = setting(
        "linear",
        "learning",
        "A schedule with warm-up over all updates, or a schedule of torch that is stepped at each update.",
    )
    warmup_ratio: types.Ratio = setting(0.0, "learning", "The fraction of all updates that are warm-up.")
    warmup_steps: types.SaveSteps = setting(
        0, "learning", "The number of warm-up updates, or their fraction of all updates; overrides warmup_ratio."
    )
    device_str: types.Device = setting(
        None, "device", "None: the accelerator, else the CPU; 'cuda': all GPUs; 'cuda:2', 'cpu': this device."
    )
    freeze_bn: types.YesNo = setting(False, "train", "Do not update the running statistics of batch normalization.")

    # The others are shown if they differ from the default.
    task: types.TaskOrNone = setting(None, "train", "The task of the model, which determines its metrics.")
    max_steps: types.StepsOrFraction = setting(
        None,
        "train",
        "End the training after this number of steps, or fraction of all batches, if the epochs take longer. Epochs are"
        " not shortened: see limit_train_batches.",
    )
    max_time: types.Duration = setting(
        None,
        "train",
        "Save and stop after this time: 'HH:MM:SS', 'DD:HH:MM:SS', seconds or a timedelta. A resume continues.",
    )
    limit_train_batches: types.Batches = setting(
        None, "train", "Train on this number of batches in each epoch, or on this share of them."
    )
    limit_eval_batches: types.Batches = setting(
        None, "train", "Evaluate on this number of batches of each process, or on this share of them."
    )
    overfit_batches: types.CountOrNone = setting(
        None, "train", "Train on the same first batches in each epoch, and evaluate on them: the loss should reach 0."
    )
    fast_dev_run: types.BatchesOrYes = setting(
        False,
        "train",
        "Try everything once, with one batch (True) or this number of them, in a temporary folder instead of"
        " output_dir.",
    )
    eval_on_start: types.YesNo = setting(False, "train", "Evaluate before the first step of a run.")
    deterministic: types.YesNoOrWarn = setting(
        False,
        "train",
        "Use only deterministic algorithms of torch in training; an operation without one is an error, or with 'warn'"
        " a warning.",
    )
    dataloader_shuffle: types.YesNo = setting(
        True, "train", "Shuffle the training data, in a different order in each epoch."
    )
    bucket_by_length: types.YesNoOrName = setting(
        False,
        "train",
        "Put training samples of similar length into a batch: by the dataset's lengths, or by this field of a sample.",
    )
    shuffle_buffer: types.CountOrNone = setting(
        None, "train", "Shuffle a stream of training data in blocks of this number of samples. None: its own order."
    )
    evaluate_with_generate: types.YesNo = setting(
        True, "train", "Evaluate a generative model by its generated outputs instead of its logits."
    )
    resume_from_checkpoint: types.Resume = setting(
        None,
        "train",
        "Resume from the newest checkpoint in output_dir, if any (True), or from a path.",
    )
    init_weights_from: types.PathOrNone = setting(
        None, "train", "A folder or a hub id with the initial weights. A resumed run loads its own weights."
    )
    weight_decay: types.NotNegative = setting(0.0, "learning", "The weight decay of the optimizer.")
    decay_norm_and_bias: types.YesNo = setting(
        True, "learning", "False: no weight decay on biases and on parameters of norm layers."
    )
    layer_decay: types.LayerDecay = setting(
        None,
        "learning",
        "Learning rates by depth: the last layer has learning_rate, each layer below it layer_decay times the rate of"
        " the next.",
    )
    max_grad_norm: types.PositiveOrNone = setting(
        None, "learning", "Clip the gradients of an update to this norm. None: no clipping."
    )
    clip_grad_value: types.PositiveOrNone = setting(
        None, "learning", "Clip each entry of the gradients to [-value, value], instead of max_grad_norm."
    )
    gradient_accumulation_steps: types.Count = setting(1, "learning", "The number of batches per update.")
    mixed_precision: types.Precision = setting(
        None, "learning", "Compute forward passes in 'bf16' (or True) or 'fp16'. None, False, 'no', 'full': in float32."
    )
    float32_matmul_precision: types.MatmulPrecision = setting(
        None,
        "learning",
        "Precision of float32 matrix products: 'high' (TF32), 'medium' (bfloat16). None: the setting of torch.",
    )
    lr_scheduler: types.NamedOrNone = setting(
        None, "learning", "A schedule of torch.optim.lr_scheduler, instead of lr_scheduler_type."
    )
    lr_scheduler_kwargs: types.Arguments = setting(None, "learning", "The arguments of lr_scheduler.")
    lr_scheduling_steps: types.StepsOrFraction = setting(
        None,
        "learning",
        "Steps between two steps of lr_scheduler; a share: of all steps; None: one step after each epoch."
        " Not for ReduceLROnPlateau, nor for"
        " lr_scheduler_type.",
    )
    non_finite: types.NonFinite = setting(
        "stop", "learning", "What to do if a loss or the gradients become NaN or infinite."
    )
    unfreeze: types.UnfreezeOrNone = setting(
        None,
        "learning",
        'Layers that are frozen at first: [{"epoch": 1, "layers": ["encoder"]}] trains them after the first epoch.',
    )
    ema: types.EmaOrNone = setting(
        None,
        "learning",
        "Evaluate and save an average of the weights: {'decay': 0.999} (EMA), or {'average': 'equal', 'start': 0.75}"
        " (SWA).",
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
    hardest_samples: types.CountOrNone = setting(
        None,
        "metrics",
        "Write this number of samples with the largest losses of each evaluation to hardest_samples.csv.",
    )
    log_steps: types.StepsOrFraction = setting(
        50, "logging", "Steps between lines of metrics; a share: of all steps; None: the ends of epochs alone."
    )
    logs_dir: types.Folder = setting(".", "logging", "The folder of logs inside output_dir.")
    progress_bar: types.YesNo = setting(True, "logging", "Show a progress bar on a terminal or in a notebook.")
    trackers: types.TrackersOrNone = setting(
        None,
        "logging",
        "Experiment trackers: 'wandb', 'mlflow' or 'trackio', a list of these, or their arguments by name, such as"
        " {'wandb': {'project': 'digits'}}.",
    )
    profile: types.ProfileOrNone = setting(
        None, "logging", "Record a few iterations with torch.profiler, into output_dir; True: by default which ones."
    )
    save_enabled: types.YesNo = setting(True, "checkpoint", "False: save nothing at all.")
    save_steps: types.SaveSteps = setting(
        None,
        "checkpoint",
        "Steps between checkpoints, in addition to model_checkpoint; a fraction: of all steps; 0: none.",
    )
    checkpoints_dir: types.Folder = setting("checkpoints", "checkpoint", "The folder of checkpoints inside output_dir.")
    max_to_keep: types.CountOrNone = setting(
        None, "checkpoint", "Keep only so many of the newest checkpoints, and the best; None: all."
    )
    save_trainable_only: types.YesNo = setting(
        False,
        "checkpoint",
        "Leave frozen parameters out of checkpoints: with peft, only the adapters are saved.",
    )
    save_top_k: types.CountOrNone = setting(
        None,
        "checkpoint",
        "Keep the k best checkpoints by metric_for_best_model, in addition to the newest, as model_best_{step}.",
    )
    gradient_checkpointing: types.YesNo = setting(
        False,
        "device",
        "Compute activations again in the backward pass instead of storing them: less memory, more time.",
    )
    distributed: types.YesNo = setting(False, "device", "Train in the processes of `accelerate launch`.")
    data_parallel_size: types.CountOrNone = setting(
        None, "device", "Processes that share each batch. None: as many as the other sizes leave."
    )
    tensor_parallel_size: types.Count = setting(1, "device", "Processes that hold the parts of each layer together.")
    pipeline_parallel_size: types.Count = setting(1, "device", "Stages that the layers of the model are spread over.")
    zero_stage: types.ZeroStage = setting(
        0,
        "device",
        "What the data-parallel processes share: 0 nothing, 1 the optimizer state, 2 gradients too, 3 parameters too.",
    )
    replicate_size: types.CountOrNone = setting(
        None, "device", "Copies of the model among the data-parallel processes, with a zero_stage. None: one copy."
    )
    sequence_parallel: types.YesNo = setting(
        False, "device", "Tensor-parallel processes also share the activations between their layers."
    )
    pipeline_schedule: types.PipelineSchedule = setting(
        "1F1B", "device", "In which order the stages work; the micro-batches are those of gradient accumulation."
    )
    find_unused_parameters: types.YesNo = setting(
        False, "device", "Some parameters take no part in some updates, with several processes. Costs time per step."
    )
    hang_timeout_s: types.Positive = setting(
        1800,
        "device",
        "After so long at one place, one of several processes ends the job; all print the stacks of their threads.",
    )
    elastic: types.YesNo = setting(
        False,
        "device",
        "A resume on another number of processes keeps the samples per update: gradient_accumulation_steps is derived.",
    )
    graph: types.YesNo = setting(False, "device", "Make each update one compiled program.")

    @property
    def device(self) -> "torch.device":
        """The device of the training: the requested one, by default the accelerator if available, else the CPU.

        A requested device that is not available is one warning and the CPU. "cuda", all GPUs, is the first GPU.
        """
        return find_device(self.device_str)

    @property
    def is_by_its_page(self) -> bool:
        """Whether the user used names of the page that documents a list of all 25 settings at the start of a run."""
        return not _WORDS_OF_THE_PAGE.isdisjoint(self._names.values())

    def __repr__(self) -> str:
        return f"TrainingConfig({', '.join(f'{name}={value!r}' for name, value in self._shown())})"

    def _shown(self) -> Iterator[tuple[str, Any]]:
        """The settings that are always shown, by their documented names, and the others if they are not defaults."""
        fields, as_set = type(self).model_fields, self._as_set
        for field in list(fields)[:_NUM_SHOWN]:
            name = _SHOWN_AS.get(field, field)
            value = ALIASES[name].read(as_set[field]) if name in ALIASES else as_set[field]
            yield name, -1 if name == "val_batch_size" and value is None else value
        if as_set["metrics"] is None or len(as_set["metrics"]) > 1:  # `metric` shows only the first one
            yield "metrics", as_set["metrics"]
        for field in list(fields)[_NUM_SHOWN:]:
            if as_set[field] != fields[field].default:
                yield field, as_set[field]


_FIELDS = TrainingConfig.model_fields


class TrainerConfig(TrainingConfig):
    """How a :class:`~trainwright.Trainer` trains a model for a task.

    ``output_dir`` and ``task`` are required. The default metrics are those of the task, the loss is that of the model.
    By default there is no early stopping and no learning-rate schedule.

    Raises:
        ConfigError: a setting is wrong; the message lists all faults.

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
    task: types.Task = setting(..., "train", "The task of the model, which determines its metrics.")
    logs_dir: types.Folder = with_default(_FIELDS["logs_dir"], "logs")
    log_steps: types.StepsOrFraction = with_default(_FIELDS["log_steps"], None)

    __repr__ = CheckedConfig.__repr__


def get_config_help(kind: type[CheckedConfig] = TrainingConfig) -> dict[str, dict[str, Any]]:
    """Print the description of each setting, by category.

    Returns ``{setting: {"help", "category", "allowed", "other_names", "default"}}``; a required setting has no default.
    """
    found = settings_help(kind)
    for category in CATEGORIES:
        print(f"{category}:")
        for name, info in found.items():
            if info["category"] == category:
                others = f" (also: {', '.join(info['other_names'])})" if info["other_names"] else ""
                default = f"Default: {info['default']!r}." if "default" in info else "Required."
                print(f"  {name}{others}\n      {info['help']}\n      It is {info['allowed']}. {default}")
    return found


def settings_help(kind: type[CheckedConfig]) -> dict[str, dict[str, Any]]:
    """The result of :func:`get_config_help`, without printing it."""
    found = {}
    hints = get_type_hints(kind, include_extras=True)
    for name, field in kind.model_fields.items():
        found[name] = {
            "help": field.description,
            "category": category_of(field),
            "allowed": allowed_text(hints[name]),
            "other_names": [other for other, synonym in ALIASES.items() if synonym.field == name],
        }
        if not field.is_required():
            found[name]["default"] = field.get_default(call_default_factory=True)
    return found


def dump_default_yaml(path: str | os.PathLike[str]) -> None:
    """Write the defaults of ``TrainingConfig`` as YAML, to be edited and read with ``load_from_yaml``."""
    TrainingConfig().save_to_yaml(path)
