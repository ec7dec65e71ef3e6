"""The table of settings: one row for each, with everything that is made of it.

The rows of the Python API are the fields of :class:`TrainingConfig`. ``SECTIONS`` has the keys of the sections
``train`` and ``graph`` of config files: those below, and each ``place`` of a field. A key at the place of a field has
its type and its help, and only one with another default is below. To add a setting is to add a row and the code that
uses it: defaults, checks, aliases, help, JSON schemas and tables follow.
"""

import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import ConfigDict, Field, with_config
from pydantic_core import PydanticUndefined
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from trainwright.base.devices import find_device
from trainwright.config import validation as types
from trainwright.config.training.checked_config import CheckedConfig
from trainwright.config.training.metric_config import MetricConfig
from trainwright.config.training.other_names import OtherNames
from trainwright.config.training.row import (
    CATEGORIES,
    UNCHANGED,
    UNSPECIFIED,
    Alias,
    Changed,
    Row,
    is_off,
    is_on,
    periods_of_epochs,
    read_metrics,
    read_name,
    read_schedule,
    read_time,
    setting,
)
from trainwright.config.validation import Allowed, allowed_text

if TYPE_CHECKING:
    import torch


_Metrics = Annotated[
    list[Annotated[str, Field(min_length=1)] | MetricConfig] | None,
    Allowed(
        "a list of names, of dicts and of MetricConfigs (objects and functions go to"
        " the Trainer: metrics_handler=[...]), or None"
    ),
]
_NO = {"no": None, "null": None, "None": None, False: None}

_NUM_SHOWN = 25

# Fields that the repr shows by another name.
_SHOWN_AS = {
    "eval_batch_size": "val_batch_size",
    "num_epochs": "epoch_num",
    "learning_rate": "lr",
    "metrics": "metric",
}

_WORDS_OF_THE_PAGE = frozenset(["epoch_num", "val_batch_size"])


def _kind_of_evaluation(eval_strategy: Any) -> Any:
    """What is built for evaluations; when they are due is computed at the start of each training."""
    return eval_strategy if eval_strategy in ("no", "eval_epoch") else "due"


def _evaluates(eval_strategy: Any) -> bool:
    return bool(eval_strategy != "no")


# Aliases whose values have another form.
_DO_EVALUATE = Alias(
    read=_evaluates,
    write=lambda value: UNSPECIFIED if is_on(value) else "no",
    accepts=_evaluates,
    note="False: 'no'",
)
_METRIC = Alias(
    read=lambda metrics: metrics[0] if isinstance(metrics, list) and metrics else None,
    write=lambda metric: [] if metric is None else [metric],
    note="the first, or None",
)
_SAVE_FREQ = Alias(
    read=lambda periods: periods.get("every_n_epoch", 0) if isinstance(periods, dict) else 0,
    write=periods_of_epochs,
    note="its every_n_epoch; 0: None",
)
_USE_CPU = Alias(
    read=lambda device: isinstance(device, str) and device.partition(":")[0] == "cpu",
    write=lambda value: "cpu" if is_on(value) else UNSPECIFIED,
    note="True: 'cpu'",
)


class TrainingConfig(OtherNames):
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

    # fmt: off
    # The first 25 are always shown, in this order.
    output_dir: types.Folder = setting(
        "./output_dir", "train", "The folder of all files of a run.",
        trainer=..., place="train.output_dir", resumed="",
    )
    overwrite_output_dir: bool = setting(
        True, "train", "Move the files of an earlier run in output_dir aside and start; False: raise an error.",
        resumed="",
    )
    eval_strategy: Literal["epoch", "eval_epoch", "step", "no"] = setting(
        "epoch", "train",
        "Evaluate after each epoch, every eval_steps steps, or never. 'eval_epoch': as 'epoch', but without metrics of"
        " training batches.",
        names="evaluation_strategy", others={"do_evaluate": _DO_EVALUATE},
        words={"steps": "step", None: "no", False: "no", "null": "no", "None": "no"},
        changed=_kind_of_evaluation,
    )
    eval_steps: types.StepsOrFraction = setting(
        None, "train", "Steps between evaluations, with eval_strategy 'step'; a share: of all steps.",
        place="train.evaluation.eval_period", changed="train",
    )
    batch_size: types.Count = setting(
        8, "train", "Samples in a batch of one process.",
        trainer=1, place="train.train_micro_batch_size",
        names="train_micro_batch_size train_batch_size per_device_train_batch_size",
    )
    eval_batch_size: types.Count | None = setting(
        None, "train", "Samples in a batch of evaluation. None and -1: the value of batch_size.",
        place="train.test_micro_batch_size", names="val_batch_size test_micro_batch_size per_device_eval_batch_size",
        words={-1: None},
    )
    seed: types.Seed = setting(
        42, "train", "The seed of shuffling, augmentation and dropout, not of the initial weights of the model.",
        place="train.seed",
    )
    num_epochs: types.Count = setting(
        2, "train", "Passes over the training data.",
        trainer=1, place="train.train_epoch", names="epoch_num train_epoch num_train_epochs max_epochs epochs",
        dev_run=1, resumed="", changed="train",
    )
    dataloader_pin_memory: bool = setting(
        True, "train", "Load batches into pinned memory, for faster copies to a GPU.", resumed="",
    )
    dataloader_drop_last: bool = setting(
        True, "train", "Drop the last training batch of an epoch if it is shorter. Evaluation uses all samples.",
        trainer=False,
    )
    dataloader_num_workers: types.Workers = setting(
        0, "train",
        "Worker processes that load data, at most the number of CPUs; -1: the smallest of CPUs, batch_size and 8.",
        trainer=4, place="dataloader.train.num_workers", names="num_dataloader_workers", resumed="",
    )
    learning_rate: types.Positive = setting(
        5e-05, "learning", "The peak learning rate of the schedule.",
        trainer=2e-05, place="optim.lr", names="lr", resumed="optimizer",
    )
    metrics: _Metrics = setting(
        ["Accuracy"], "metrics",
        "Metrics by name, or with arguments as a MetricConfig or dict. None: the metrics of the task, if set.",
        trainer=None, others={"metric": _METRIC}, read=read_metrics, file=None,
    )
    print_steps: types.StepsOrFraction = setting(
        None, "logging", "Steps between printed lines; a share: of all steps. None: a progress bar for each epoch.",
        copy=None, changed="train",
    )
    load_best_model_at_end: bool = setting(
        False, "train", "At the end load the best weights by metric_for_best_model; train() returns their results.",
        place="train.load_best_model_at_end", copy=False, resumed="", changed="train",
    )
    early_stopping: types.EarlyStopping | None = setting(
        {"monitor": "eval_epoch_metric", "patience": 4, "mode": "max"}, "callback",
        "Stop after patience evaluations without an improvement of monitor. Unless you set a monitor, this is"
        " metric_for_best_model, by default the loss of the evaluation, in its direction. The mode 'auto' derives the"
        " direction from the name of the monitor. None: never.",
        trainer=None, words=_NO, copy=None, changed="train", place="train.early_stopping",
    )
    model_checkpoint: types.ModelCheckpointOrNone = setting(
        {"every_n_epoch": 1}, "callback", "Save every n epochs, or every n iterations. None: neither.",
        others={"save_freq": _SAVE_FREQ}, words=_NO, resumed="", changed="train", file=None,
    )
    tensorboard: types.TensorBoard | None = setting(
        {"log_dir": None, "comment": ""}, "callback",
        "The folder of TensorBoard's event files, and the suffix of its name.",
        words=_NO, copy=None, resumed="", changed="train",
    )
    loss: types.Named | None = setting(
        "CrossEntropyLoss", "learning", "A loss of torch.nn, for a model without its own loss.",
        trainer=None, file=None,
    )
    optimizer: types.Named = setting(
        "Adam", "learning", "An optimizer of torch.optim; upper and lower case are equal.",
        trainer="adam", place="optim", read=read_name, resumed="optimizer",
    )
    lr_scheduler_type: types.LRSchedulerKind = setting(
        "linear", "learning",
        "A schedule with warm-up over all updates, or a schedule of torch that is stepped at each update.",
        trainer=None, place="train.scheduler", read=read_schedule, resumed="lr_scheduler",
    )
    warmup_ratio: types.Ratio = setting(
        0.0, "learning", "The fraction of all updates that are warm-up.",
        place="train.warmup_ratio",
    )
    warmup_steps: types.SaveSteps = setting(
        0, "learning", "The number of warm-up updates, or their fraction of all updates; overrides warmup_ratio.",
    )
    device_str: types.Device | None = setting(
        None, "device", "None: the accelerator, else the CPU; 'cuda': all GPUs; 'cuda:2', 'cpu': this device.",
        place="train.dist.device_type", others={"device": Alias(note="reads as a torch.device"), "use_cpu": _USE_CPU},
    )
    freeze_bn: bool = setting(
        False, "train", "Do not update the running statistics of batch normalization.",
        place="train.freeze_bn", changed="train",
    )

    # The others are shown if they differ from the default.
    task: types.Task | None = setting(None, "train", "The task of the model, which determines its metrics.")
    max_steps: types.StepsOrFraction = setting(
        None, "train",
        "End the training after this number of steps, or fraction of all batches, if the epochs take longer. Epochs"
        " are not shortened: see limit_train_batches.",
        place="train.train_iter", words={-1: None}, dev_run=None, resumed="", changed="train",
    )
    max_time: types.Duration = setting(
        None, "train",
        "Save and stop after this time: 'HH:MM:SS', 'DD:HH:MM:SS', seconds or a timedelta. A resume continues.",
        place="train.max_time", read=read_time, dev_run=None, copy=None, resumed="", changed="train",
    )
    limit_train_batches: types.Batches = setting(
        None, "train", "Train on this number of batches in each epoch, or on this share of them.",
        place="train.limit_train_batches", dev_run=lambda n: n,
    )
    limit_eval_batches: types.Batches = setting(
        None, "train", "Evaluate on this number of batches of each process, or on this share of them.",
        place="train.limit_eval_batches", names="limit_val_batches", dev_run=lambda n: n, changed="train",
    )
    overfit_batches: types.Count | None = setting(
        None, "train", "Train on the same first batches in each epoch, and evaluate on them: the loss should reach 0.",
        place="train.overfit_batches", words={0: None}, dev_run=None,
    )
    fast_dev_run: bool | types.Count = setting(
        False, "train",
        "Try everything once, with one batch (True) or this number of them, in a temporary folder instead of"
        " output_dir.",
        place="train.fast_dev_run", copy=False, resumed="",
    )
    eval_on_start: bool = setting(
        False, "train", "Evaluate before the first step of a run.",
        place="train.eval_on_start", copy=False, resumed="", changed="train",
    )
    deterministic: bool | Literal["warn"] = setting(
        False, "train",
        "Use only deterministic algorithms of torch in training; an operation without one is an error, or with 'warn'"
        " a warning.",
        place="train.deterministic",
    )
    dataloader_shuffle: bool = setting(
        True, "train", "Shuffle the training data, in a different order in each epoch.",
    )
    bucket_by_length: bool | types.FieldName = setting(
        False, "train",
        "Put training samples of similar length into a batch: by the dataset's lengths, or by this field of a sample.",
        names="group_by_length",
    )
    shuffle_buffer: types.Count | None = setting(
        None, "train", "Shuffle a stream of training data in blocks of this number of samples. None: its own order.",
    )
    label_names: types.FieldNames | None = setting(
        None, "train",
        "The fields of a batch that are its labels, for the loss and metrics, several as a tuple. None: 'labels',"
        " 'label', 'targets' or 'target', or else the labels that forward takes.",
    )
    eval_every_n_epoch: types.Count | None = setting(
        None, "train", "Epochs between evaluations, with eval_strategy 'epoch' or 'eval_epoch'. None: 1.",
        place="train.evaluation.eval_after_n_epoch", names="eval_after_n_epoch check_val_every_n_epoch",
        dev_run=None, changed="train",
    )
    evaluate_with_generate: bool = setting(
        True, "train", "Evaluate a generative model by its generated outputs instead of its logits.", changed="train",
    )
    resume_from_checkpoint: types.Resume = setting(
        None, "train", "Resume from the newest checkpoint in output_dir, if any (True), or from a path.",
        counterpart="train.resume",
        dev_run=None, resumed="",
    )
    allow_other_trainer: bool = setting(
        False, "train", "Resume a run that another class of trainer has made.",
        place="train.allow_other_trainer", resumed="", changed="train",
    )
    init_weights_from: types.Folder | None = setting(
        None, "train", "A folder or a hub id with the initial weights. A resumed run loads its own weights.",
        place="train.load_weight", names="load_weight", copy=None, resumed="",
    )
    init_weights_partial: bool = setting(
        False, "train", "Whether the initial weights may lack others than those of a new head.",
        place="train.init_weights_partial", copy=False, resumed="",
    )
    weight_decay: types.NotNegative = setting(
        0.0, "learning", "The weight decay of the optimizer.",
        place="optim.weight_decay", resumed="optimizer",
    )
    decay_norm_and_bias: bool = setting(
        True, "learning", "False: no weight decay on biases and on parameters of norm layers.",
        others={"filter_bias_and_bn": Alias(read=is_off, write=is_off, note="False: True")}, resumed="optimizer",
    )
    layer_decay: types.RatioAboveZero | None = setting(
        None, "learning",
        "Learning rates by depth: the last layer has learning_rate, each layer below it layer_decay times the rate of"
        " the next.",
        place="optim.params.layer_decay", resumed="optimizer",
    )
    max_grad_norm: types.Positive | None = setting(
        None, "learning", "Clip the gradients of an update to this norm. None: no clipping.",
        place="optim.params.clip_grad_max_norm", names="gradient_clip_val clip_grad_norm", changed="train",
    )
    clip_grad_value: types.Positive | None = setting(
        None, "learning", "Clip each entry of the gradients to [-value, value], instead of max_grad_norm.",
        place="optim.params.clip_grad_value", changed="train",
    )
    gradient_accumulation_steps: types.CountByUpdate = setting(
        1, "learning",
        "The number of batches per update; a dict for numbers that change: {0: 1, 1000: 4} is four from the update on"
        " that follows 1,000 others.",
        place="train.num_accumulation_steps", names="num_accumulation_steps accumulate_grad_batches",
    )
    mixed_precision: Literal["no", "fp16", "bf16"] | None = setting(
        None, "learning",
        "Compute forward passes in 'bf16' (or True) or 'fp16'. None, False, 'no', 'full': in float32.",
        place="train.amp.enabled", names="amp", words={True: "bf16", False: "no", "full": "no"},
    )
    float32_matmul_precision: types.MatmulPrecision = setting(
        None, "learning",
        "Precision of float32 matrix products: 'high' (TF32), 'medium' (bfloat16). None: the setting of torch.",
        place="train.float32_matmul_precision",
    )
    lr_scheduler: types.Named | None = setting(
        None, "learning", "A schedule of torch.optim.lr_scheduler, instead of lr_scheduler_type.",
        place="train.scheduler", read=read_name, resumed="lr_scheduler",
    )
    lr_scheduler_kwargs: types.Arguments | None = setting(
        None, "learning", "The arguments of lr_scheduler.", resumed="lr_scheduler"
    )
    lr_scheduling_steps: types.StepsOrFraction = setting(
        None, "learning",
        "Steps between two steps of lr_scheduler; a share: of all steps; None: one step after each epoch. Not for"
        " ReduceLROnPlateau, nor for lr_scheduler_type.", changed="train",
    )
    loss_ignores: types.LossIgnores = setting(
        "declared", "learning",
        "What the mean loss of a batch leaves out, so that an update, several processes and an evaluation average it"
        " over what it has in: a class of the labels, several, or None: samples count alike. 'declared': as the"
        " criterion of torch (its ignore_index and class weights) or the loss_type of the model says; else integer"
        " labels count without those of -100. The num_tokens that a model returns come first.",
        place="train.loss_ignores",
    )
    non_finite: types.NonFinite = setting(
        "stop", "learning", "What to do if a loss or the gradients become NaN or infinite.",
        place="train.non_finite",
    )
    unfreeze: types.UnfreezeOrNone = setting(
        None, "learning",
        'Layers that are frozen at first: [{"epoch": 1, "layers": ["encoder"]}] trains them after the first epoch.',
        place="train.unfreeze",
    )
    ema: types.EmaOrNone = setting(
        None, "learning",
        "Evaluate and save an average of the weights: {'decay': 0.999} (EMA; 'warmup': 2000 lets the decay rise), or"
        " {'average': 'equal', 'start': 0.75} (SWA).",
        place="train.ema", words=_NO | {True: {}},
    )
    metric_for_best_model: types.Key = setting(
        "loss", "metrics",
        "The metric of the best checkpoint: a key of evaluation, or a training metric with the prefix 'train.'.",
        place="train.evaluation.eval_metric", names="eval_metric",
    )
    greater_is_better: bool | None = setting(
        None, "metrics",
        "Whether a higher metric_for_best_model is better; None: known for losses, error rates, accuracies and the"
        " metrics of torchmetrics.",
        counterpart="train.evaluation.eval_mode",
    )
    hardest_samples: types.Count | None = setting(
        None, "metrics",
        "Write this number of samples with the largest losses of each evaluation to hardest_samples.csv.",
        place="train.evaluation.hardest_samples",
    )
    log_steps: types.StepsOrFraction = setting(
        50, "logging", "Steps between lines of metrics; a share: of all steps; None: the ends of epochs alone.",
        trainer=None, place="train.log_period", names="log_period logging_steps log_every_n_steps", changed="train",
    )
    log_throughput: bool = setting(
        False, "logging",
        "Log floating-point operations and tokens per second, and the share of the device's peak.",
        place="train.log_throughput", copy=False,
    )
    logs_dir: types.Folder = setting(
        ".", "logging", "The folder of logs inside output_dir.", trainer="logs", changed="train"
    )
    progress_bar: bool = setting(
        True, "logging", "Show a progress bar on a terminal or in a notebook.",
        place="train.progress_bar", copy=False, changed="train",
    )
    trackers: types.TrackersOrNone = setting(
        None, "logging",
        "Experiment trackers: 'wandb', 'mlflow' or 'trackio', a list of these, or their arguments by name, such as"
        " {'wandb': {'project': 'digits'}}.",
        place="train.trackers", words=_NO, changed="train",
    )
    profile: types.ProfileOrNone = setting(
        None, "logging", "Record a few iterations with torch.profiler, into output_dir; True: by default which ones.",
        place="train.profile", words=_NO | {True: {}}, copy=None,
    )
    save_enabled: bool = setting(True, "checkpoint", "False: save nothing at all.")
    save_steps: types.SaveSteps = setting(
        None, "checkpoint",
        "Steps between checkpoints, in addition to model_checkpoint; a fraction: of all steps; 0: none.",
        place="train.checkpointer.period", changed="train",
    )
    checkpoints_dir: types.Folder = setting("checkpoints", "checkpoint", "The folder of checkpoints inside output_dir.")
    max_to_keep: types.Count | None = setting(
        None, "checkpoint", "Keep only so many of the newest checkpoints, and the best; None: all.",
        place="train.checkpointer.max_to_keep", names="save_total_limit", changed="train",
    )
    save_trainable_only: bool = setting(
        False, "checkpoint", "Leave frozen parameters out of checkpoints: with peft, only the adapters are saved.",
        place="train.checkpointer.save_trainable_only",
    )
    save_top_k: types.Count | None = setting(
        None, "checkpoint",
        "Keep the k best checkpoints by metric_for_best_model, in addition to the newest, as model_best_{step}.",
        place="train.checkpointer.save_top_k",
    )
    save_best: types.MetricDirections = setting(
        None, "checkpoint",
        "Also keep the best checkpoint by each of these metrics, as model_{metric}_best: ['accuracy'], or with"
        " directions {'accuracy': 'max'}.",
        place="train.checkpointer.save_best",
    )
    save_asynchronously: bool = setting(
        True, "checkpoint",
        "A background thread writes checkpoints, from a copy of model and optimizer in memory.",
        place="train.checkpointer.asynchronous",
    )
    checkpoint_mirror: types.Url | None = setting(
        None, "checkpoint",
        "A URL of fsspec, such as 's3://bucket/run', to which each checkpoint is copied in the background. A resume"
        " downloads the newest, if output_dir has none that is newer.",
        place="train.checkpointer.mirror", dev_run=None, copy=None, resumed="",
    )
    gradient_checkpointing: bool | Literal["selective", "offload"] = setting(
        False, "device",
        "Compute activations again in the backward pass instead of storing them: less memory, more time. 'selective'"
        " stores matrix products; 'offload' stores the inputs of blocks, in host memory.",
        place="train.activation_checkpoint.enabled",
    )
    compile_blocks: bool = setting(
        False, "device", "Compile each repeated block of the model by itself.",
        place="train.compile_blocks", copy=False,
    )
    distributed: bool = setting(False, "device", "Without effect: the processes are those that the launcher started.")
    data_parallel_size: types.Count | None = setting(
        None, "device", "Processes that share each batch. None: as many as the other sizes leave.",
        place="train.dist.data_parallel_size",
    )
    tensor_parallel_size: types.Count = setting(
        1, "device", "Processes that hold the parts of each layer together.",
        place="train.dist.tensor_parallel_size",
    )
    pipeline_parallel_size: types.Count = setting(
        1, "device", "Stages that the layers of the model are spread over.",
        place="train.dist.pipeline_parallel_size",
    )
    context_parallel_size: types.Count = setting(
        1, "device", "Processes that hold the parts of each sequence together.",
        place="train.dist.context_parallel_size",
    )
    expert_parallel_size: types.Count = setting(
        1, "device", "Data and tensor ranks that hold the experts of each layer together, and exchange tokens.",
        place="train.dist.expert_parallel_size",
    )
    zero_stage: types.ZeroStage = setting(
        0, "device",
        "What the data-parallel processes share: 0 nothing, 1 the optimizer state, 2 gradients too, 3 parameters too.",
        place="train.zero_optimization.stage",
    )
    zero_gather_precision: Literal["bf16"] | None = setting(
        None, "device",
        "With a zero_stage: gather parameters, and compute, in this type; gradients and updates keep theirs.",
        place="train.zero_optimization.gather_precision",
    )
    zero_offload: bool = setting(
        False, "device",
        "With a zero_stage, also on one process: parameters and optimizer in host memory.",
        place="train.zero_optimization.offload",
    )
    replicate_size: types.Count | None = setting(
        None, "device", "Copies of the model among the data-parallel processes, with a zero_stage. None: one copy.",
        place="train.dist.replicate_size",
    )
    sequence_parallel: bool = setting(
        False, "device", "Tensor-parallel processes also share the activations between their layers.",
        place="train.dist.sequence_parallel",
    )
    pipeline_schedule: types.PipelineSchedule = setting(
        "1F1B", "device", "In which order the stages work; the micro-batches are those of gradient accumulation.",
        place="train.dist.pipeline_schedule",
    )
    custom_pipeline_stage_id: types.Stages = setting(
        None, "device", "The stage of each layer, for example [0, 0, 0, 1]. None: equal numbers of layers.",
        place="train.dist.custom_pipeline_stage_id",
    )
    meta_init: bool = setting(
        False, "device",
        "Build the model, a LazyCall, on the meta device: each process allocates only its part.",
        place="train.dist.meta_init",
    )
    find_unused_parameters: bool = setting(
        False, "device", "Some parameters take no part in some updates, with several processes. Costs time per step.",
        place="train.dist.find_unused_parameters",
    )
    hang_timeout_s: types.Positive | None = setting(
        None, "device",
        "After so long at one place, one of several processes ends the job; all print the stacks of their threads."
        " None: 300, and 1800 before the first update.",
        place="train.dist.hang_timeout_s",
    )
    elastic: bool = setting(
        False, "device",
        "A resume on another number of processes keeps the samples per update: gradient_accumulation_steps is derived.",
        place="train.dist.elastic",
    )
    graph: bool = setting(
        False, "device", "Make each update one compiled program.",
        place="graph.enabled", copy=False,
    )
    graph_backend: types.Words = setting(
        "inductor", "device",
        "A backend of torch.compile for these programs: 'inductor' (fast), 'aot_eager' (needs no compiler).",
        place="graph.backend",
    )

    # fmt: on

    @property  # type: ignore[misc]  # as an argument it is an alias of device_str
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
        """The settings that are always shown, by their documented names, and the others if they are not defaults."""
        always, metrics = list(type(self).model_fields)[:_NUM_SHOWN], self._as_set["metrics"]
        shown = self._values(always, _SHOWN_AS)
        if shown["val_batch_size"] is None:
            shown["val_batch_size"] = -1
        if metrics is None or len(metrics) > 1:  # `metric` shows only the first one
            shown["metrics"] = metrics
        return self._text(shown | self._values([field for field in self._changed() if field not in always], {}))


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

    task: types.Task = setting(..., "train", "The task of the model, which determines its metrics.")

    __repr__ = CheckedConfig.__repr__


for _name, _row in TrainerConfig.rows.items():
    if _row.trainer is not UNCHANGED:
        TrainerConfig.model_fields[_name].default = _row.trainer if _row.trainer is not ... else PydanticUndefined
TrainerConfig.model_rebuild(force=True)


ABSENT: Any = object()  # no default: a run writes the key, or only reads it
_Stage = Annotated[int, Field(ge=1, le=3), Allowed("1, 2 or 3")]
_Device = Annotated[
    Annotated[str, Field(pattern=r"^(cpu|cuda|mps|xpu)(:[0-9]+)?$")] | None,
    Allowed("'cpu', 'cuda', 'mps' or 'xpu', with or without a number ('cuda:0'), or None for the one there is"),
]


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a section of config files, or a section in it.

    Attributes:
        default: ABSENT for a key that a run writes; for a lazy call, a function of ``LazyCall``.
        kind, help: by default those of the field of ``TrainingConfig`` that has this place.
        keys: of a section.
        dev_run, copy, resumed, changed: as those of a :class:`Row`; ``resumed`` is that of the field, if there is one.
        has_effect: False for a setting of another backend, which is accepted and logged once.
    """

    name: str
    default: Any = ABSENT
    kind: Any = None
    help: str = ""
    keys: "tuple[Key, ...]" = ()
    dev_run: Any = UNCHANGED
    copy: Any = UNCHANGED
    resumed: str = "now"
    changed: Changed = "build"
    has_effect: bool = True

    def value(self, lazy_call: Callable[[str], Any]) -> Any:
        """A new copy of the default."""
        if self.keys:
            return {key.name: key.value(lazy_call) for key in self.keys if key.default is not ABSENT or key.keys}
        return self.default(lazy_call) if callable(self.default) else copy.copy(self.default)


# fmt: off
_CHECKPOINTER = (
    Key("period", 5000, types.Period, "Save each so many iterations, or this share of all of them."),
    Key("max_to_keep", 100),
    Key("save_top_k", None, None, "Keep the k best checkpoints by eval_metric, in addition to the newest."),
    Key("save_model_after_n_epoch", None, types.Count | None, "Save each so many epochs, instead of period.",
        dev_run=None, resumed=""),
)
_EVALUATION = (
    Key("enabled", True, bool, "Evaluate in the training and at its end."),
    Key("evaluator", lambda lazy_call: lazy_call("trainwright.evaluation.ClsEvaluator")(topk=(1, 5)), types.Lazies,
        "What computes the metrics: an evaluator, a metric of torchmetrics or a metrics handler; or several."),
    Key("eval_period", 5000, types.Period, "Evaluate each so many iterations, or this share of all of them.",
        dev_run=lambda number: max(1, number // 2)),
    Key("eval_after_n_epoch", None, types.Count | None, "Evaluate each so many epochs, instead of eval_period.",
        dev_run=None),
    Key("eval_iter", 1e9, types.Amount, "The largest number of batches of an evaluation.", changed="train"),
    Key("eval_metric", "Acc@1", types.Words, "The metric that decides which checkpoint is the best."),
    Key("eval_mode", "max", Literal["max", "min"],
        "Whether eval_metric should be large or small."),
)
_DIST = (
    Key("data_parallel_size", 1, None,
        "Processes that share each batch. 1 and None: as many as the other sizes leave."),
    Key("elastic", False, None, "A resume on another number of processes keeps the samples per update."),
    Key("pipeline_num_layers", None, types.Count | None, "The number of layers of the model. None: it is counted.",
        resumed=""),
    Key("device_type", None, _Device, "None: the accelerator if there is one, else the CPU.", resumed=""),
    Key("num_nodes", ABSENT, types.Count | None, "Machines. Written by a run.", resumed=""),
    Key("num_gpus_per_node", ABSENT, types.CountOrZero | None, "Processes of a machine. Written by a run.",
        resumed=""),
    Key("auto_pipeline_stage_id", ABSENT, types.Anything, "Written by a run.", resumed=""),
    Key("actual_pipeline_stage_id", ABSENT, types.Anything, "The stage of each layer. Written by a run.", resumed=""),
)
_TRAIN = (
    Key("output_dir", "./output", types.Folder, "Where checkpoints, logs, metrics.json and config.yaml go."),
    Key("train_micro_batch_size", 32, types.Count | None,
        "Samples in a batch of one process. global_batch_size = train_micro_batch_size * num_accumulation_steps *"
        " number of data-parallel ranks; what is None follows from the others."),
    Key("global_batch_size", None, types.Count | None, "Samples in an update, which is an iteration."),
    Key("num_accumulation_steps", None, types.CountByUpdate | None,
        "The number of batches per update; a dict for numbers that change: {0: 1, 1000: 4} is four from the iteration"
        " on that follows 1,000 others. global_batch_size is then None."),
    Key("train_iter", 10000, types.CountOrZero,
        "The number of iterations. Where train_epoch is set too, the longer counts.",
        dev_run=lambda number: number, changed="train"),
    Key("train_epoch", 0, types.NotNegative,
        "Passes over the training data; it has priority over the default of train_iter.", dev_run=0, changed="train"),
    Key("iter_per_epoch", ABSENT, types.Count | None, "Iterations of an epoch, for data of unknown length."),
    Key("limit_train_batches", None),
    Key("limit_eval_batches", None, dev_run=lambda number: number, changed="train"),
    Key("overfit_batches", None),
    Key("fast_dev_run", False, None,
        "True or a number of iterations: try everything once, in the folder fast_dev_run inside output_dir.",
        dev_run=False),
    Key("consumed_train_samples", 0, types.CountOrZero, "Counted by the run itself.", resumed=""),
    Key("consumed_valid_samples", 0, types.CountOrZero, "Counted by the run itself.", resumed=""),
    Key("train_samples", None, types.Count | None, "Counted by the run itself.", resumed=""),
    Key("warmup_ratio", 0, types.RatioBelowOne,
        "Share of the iterations, in [0, 1), in which the learning rate rises."),
    Key("start_iter", 0, types.CountOrZero, "First iteration. Resuming sets it.", resumed=""),
    Key("amp", keys=(
        Key("enabled", False, bool, "Mixed precision in training."),
        Key("evaluation", False, bool, "With enabled: mixed precision in evaluation, too; False: float32."),
    )),
    Key("activation_checkpoint", keys=(Key("enabled", False),)),
    Key("nccl_fusion_threshold_mb", 16, types.NotNegative, has_effect=False, resumed=""),
    Key("nccl_fusion_max_ops", 24, types.CountOrZero, has_effect=False, resumed=""),
    Key("rdma_enabled", True, bool, has_effect=False, resumed=""),
    Key("zero_optimization", keys=(
        Key("enabled", False, bool, "Share the states of the training between the data-parallel processes."),
        Key("stage", 1, _Stage, "1: the optimizer state, 2: gradients too, 3: parameters too."),
    )),
    Key("checkpointer", keys=_CHECKPOINTER),
    Key("test_micro_batch_size", 32, types.Count, "Samples per rank in one batch of evaluation."),
    Key("evaluation", keys=_EVALUATION),
    Key("load_weight", "", types.Text | None,
        "A folder or a hub id with the initial weights. A resumed run loads its own weights.", copy=""),
    Key("log_period", 20, types.Period, "Iterations between lines of metrics, or a share of all iterations.",
        dev_run=1),
    Key("progress_bar", True, None,
        "Show a bar on a terminal and a table in a notebook. False: only the lines of the log.", changed="train"),
    Key("scheduler",
        lambda lazy_call: lazy_call("trainwright.optim.WarmupCosineLR")(
            warmup_factor=0.001, alpha=0.01, warmup_method="linear"),
        types.Lazy, "max_iter and warmup_iter are set from train_iter, train_epoch and warmup_ratio."),
    Key("callbacks", [], types.LazyCalls,
        "Callbacks, called around epochs, batches and evaluations: [LazyCall(MyCallback)(...)]."),
    Key("hooks", [], types.LazyCalls, "Hooks, called around iterations: [LazyCall(MyHook)(...)]."),
    Key("early_stopping", None, None,
        "Stop after patience evaluations without an improvement of monitor, by default eval_metric; its mode is then"
        " eval_mode. The mode 'auto' derives the direction from the name of the monitor. None: never.",
        copy=None, changed="train"),
    Key("load_best_model_at_end", False, None,
        "At the end load the best weights by eval_metric; train() returns their results.", copy=False,
        changed="train"),
    Key("input_placement_device", None, _Device, "As dist.device_type, which has priority over it.", resumed=""),
    Key("dist", keys=_DIST),
    Key("seed", 1234, types.Seed, "The seed of weights, shuffling, augmentation and dropout."),
    Key("samples", ABSENT, types.CountOrZero | None, "Written by a run.", resumed=""),
    Key("resume", ABSENT, bool, "Continue from the latest checkpoint. Set by --resume.", resumed=""),
    Key("warmup_iter", ABSENT, types.CountOrZero | None, "Written by a run.", resumed=""),
    # Aliases, which are resolved before the check.
    Key("eval_period", ABSENT, types.Anything, "Alias of evaluation.eval_period."),
    Key("topk", ABSENT, types.Anything, "Alias of evaluation.evaluator.topk."),
    Key("recompute_grad", ABSENT, types.Anything, "Alias of activation_checkpoint."),
)
_GRAPH = (
    Key("enabled", False, copy=False),
    *(Key(name, ABSENT, types.Anything, has_effect=False)
      for name in ("debug", "auto_parallel", "global_mode", "train_graph", "eval_graph")),
)
# fmt: on


def _section(path: str, keys: tuple[Key, ...]) -> Key:
    """A section of these keys, and of the settings of the Python API that have their place in it and no key yet."""
    own = (_section(f"{path}.{key.name}", key.keys) if key.keys else key for key in keys)
    names, shared = {key.name for key in keys}, list[Key]()
    for field, row in TrainingConfig.rows.items():
        place, _, last = row.place.rpartition(".")
        if place == path and last not in names:
            default = TrainingConfig.model_fields[field].default
            shared.append(Key(last, default, dev_run=row.dev_run, copy=row.copy, changed=row.changed))
    return Key(path.rpartition(".")[2], keys=(*own, *shared))


SECTIONS = {"train": _section("train", _TRAIN), "graph": _section("graph", _GRAPH)}


def _leaves(keys: Mapping[str, Key]) -> Iterator[tuple[str, Key]]:
    for path, key in keys.items():
        if key.keys:
            yield from _leaves({f"{path}.{inner.name}": inner for inner in key.keys})
        else:
            yield path, key


KEYS = dict(_leaves(SECTIONS))  # by their dotted path
_FIELD_AT = {row.place: name for name, row in TrainingConfig.rows.items()}


PLACES = {name: row.place for name, row in TrainingConfig.rows.items() if row.place}


def place_of(name: str) -> str:
    """The key of a setting in a config file, perhaps in another form; the name itself if there is none."""
    return PLACES.get(name) or TrainingConfig.rows[name].counterpart or name


def values_of_files() -> dict[str, Any]:
    """The settings of a run of a config file that are at no place in it."""
    fields = TrainingConfig.model_fields
    return {
        name: fields[name].default if row.file is UNCHANGED else row.file for name, row in TrainingConfig.rows.items()
    }


def source_of_key(path: str) -> str:
    """:attr:`Row.source` of a key of config files."""
    if path in _FIELD_AT:
        return TrainingConfig.rows[_FIELD_AT[path]].source
    for section, part in (("optim", "optimizer"), ("train.scheduler", "lr_scheduler")):
        if path.startswith(f"{section}."):
            return "now" if path.rpartition(".")[2].startswith("clip_grad_") else part
    return KEYS[path].resumed if path in KEYS else "now"


def default_of_key(path: str) -> Any:
    """The default of a key of config files; ABSENT if there is none, and a function for a lazy call."""
    return KEYS[path].default if path in KEYS else ABSENT


def key_above(path: str) -> str:
    """The key of the table that ``path`` is, or whose value it is in; "" if there is none."""
    while path and path not in KEYS:
        path = path.rpartition(".")[0]
    return path


def changed_of_key(path: str) -> Changed:
    """:attr:`Row.changed` of a key of config files, or of a key inside its value; also of sections without a table."""
    key = key_above(path)
    return KEYS[key].changed if key else "build"


@functools.cache
def type_of_sections() -> Any:
    """The TypedDict of the sections whose keys are fixed."""
    return with_config(ConfigDict(extra="forbid", strict=True))(_type_of(Key("run", keys=tuple(SECTIONS.values())), ""))


@functools.cache
def type_of_group_settings() -> Any:
    """The TypedDict of the settings of the Python API that are arguments of ``optim.params`` in config files."""
    above = "optim.params."
    keys = {place.removeprefix(above): _type_hints()[name] for name, place in PLACES.items() if place.startswith(above)}
    typed_dict: Any = TypedDict
    return with_config(ConfigDict(strict=True))(typed_dict("Params", keys, total=False))


def type_of_key(path: str) -> Any:
    """The type of a key of ``KEYS``."""
    return _type_of(KEYS[path], path)


def _type_of(key: Key, path: str) -> Any:
    if key.keys:
        above = f"{path}." if path else ""
        typed_dict: Any = TypedDict  # of keys that are known here only
        name = key.name.title().replace("_", "")
        return typed_dict(name, {one.name: _type_of(one, above + one.name) for one in key.keys}, total=False)
    if key.kind is not None:
        return Annotated[key.kind, Field(description=key.help or None)]
    field = _FIELD_AT[path]
    return Annotated[
        _type_hints()[field], Field(description=key.help or TrainingConfig.model_fields[field].description)
    ]


@functools.cache
def _type_hints(kind: type[CheckedConfig] = TrainingConfig) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def changes_of(
    column: Literal["dev_run", "copy"], rows: Mapping[str, Row | Key], num_batches: int = 0
) -> dict[str, Any]:
    """What a dev run of ``num_batches``, or the copy for a check, sets among ``TrainingConfig.rows`` or ``KEYS``."""
    values = {name: getattr(row, column) for name, row in rows.items()}
    return {
        name: value(num_batches) if callable(value) else value
        for name, value in values.items()
        if value is not UNCHANGED
    }


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
    hints = _type_hints(kind)
    for name, field in kind.model_fields.items():
        found[name] = {
            "help": field.description,
            "category": kind.rows[name].category,
            "allowed": allowed_text(hints[name]),
            "other_names": [other for other, alias in kind.aliases.items() if alias.field == name],
        }
        if not field.is_required():
            found[name]["default"] = field.get_default(call_default_factory=True)
    return found


def dump_default_yaml(path: str | os.PathLike[str]) -> None:
    """Write the defaults of ``TrainingConfig`` as YAML, to be edited and read with ``load_from_yaml``."""
    TrainingConfig().save_to_yaml(path)
