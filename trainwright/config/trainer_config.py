"""The settings of a training for a task: those of :class:`TrainingConfig`, with other defaults."""

from typing import ClassVar

from trainwright.config import setting_types as types
from trainwright.config.checked import CheckedConfig
from trainwright.config.setting_types import setting, with_default
from trainwright.config.training_config import TrainingConfig

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
    metrics: types.Metrics = with_default(_FIELDS["metrics"], None)
    early_stopping: types.EarlyStoppingOrNone = with_default(_FIELDS["early_stopping"], None)
    loss: types.NamedOrNone = with_default(_FIELDS["loss"], None)
    optimizer: types.Named = with_default(_FIELDS["optimizer"], "adam")
    lr_scheduler_type: types.LRSchedulerKind = with_default(_FIELDS["lr_scheduler_type"], None)
    task: types.Task = setting(..., "train", "What the model is for: decides its metrics.")
    logs_dir: types.Folder = with_default(_FIELDS["logs_dir"], "logs")
    log_steps: types.StepsOrShare = with_default(_FIELDS["log_steps"], None)

    __repr__ = CheckedConfig.__repr__
