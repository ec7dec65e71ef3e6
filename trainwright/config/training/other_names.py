"""The aliases of settings as type checkers and editors see them: as arguments and as attributes of a configuration."""

from typing import TYPE_CHECKING, Any, Literal

from trainwright.config.training.checked_config import CheckedConfig

if TYPE_CHECKING:
    from trainwright.config import validation as types

    _GIVEN: Any = ...  # an argument that may be left out

    class OtherNames(CheckedConfig):
        """Of :class:`~trainwright.TrainingConfig`, whose table of settings defines them."""

        evaluation_strategy: Literal["epoch", "eval_epoch", "step", "no"] = _GIVEN
        do_evaluate: bool = _GIVEN
        train_micro_batch_size: types.Count = _GIVEN
        train_batch_size: types.Count = _GIVEN
        per_device_train_batch_size: types.Count = _GIVEN
        val_batch_size: types.Count | None = _GIVEN
        test_micro_batch_size: types.Count | None = _GIVEN
        per_device_eval_batch_size: types.Count | None = _GIVEN
        epoch_num: types.Count = _GIVEN
        train_epoch: types.Count = _GIVEN
        num_train_epochs: types.Count = _GIVEN
        max_epochs: types.Count = _GIVEN
        epochs: types.Count = _GIVEN
        num_dataloader_workers: types.Workers = _GIVEN
        lr: types.Positive = _GIVEN
        metric: Any = _GIVEN
        save_freq: int | None = _GIVEN
        device: Any = _GIVEN
        use_cpu: bool = _GIVEN
        limit_val_batches: types.Batches = _GIVEN
        group_by_length: bool | types.FieldName = _GIVEN
        eval_after_n_epoch: types.Count | None = _GIVEN
        check_val_every_n_epoch: types.Count | None = _GIVEN
        load_weight: types.Folder | None = _GIVEN
        filter_bias_and_bn: bool = _GIVEN
        gradient_clip_val: types.Positive | None = _GIVEN
        clip_grad_norm: types.Positive | None = _GIVEN
        num_accumulation_steps: types.CountByUpdate = _GIVEN
        accumulate_grad_batches: types.CountByUpdate = _GIVEN
        amp: Literal["no", "fp16", "bf16"] | None = _GIVEN
        eval_metric: types.Key = _GIVEN
        log_period: types.StepsOrFraction = _GIVEN
        logging_steps: types.StepsOrFraction = _GIVEN
        log_every_n_steps: types.StepsOrFraction = _GIVEN
        save_total_limit: types.Count | None = _GIVEN

else:
    OtherNames = CheckedConfig  # no fields: a value is kept once, by the name of its setting
