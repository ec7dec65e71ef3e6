"""What a TrainingConfig shows of itself is what its page prints."""

import pytest

from trainwright import TrainingConfig
from trainwright.config import MetricConfig

OF_THE_MODEL = (
    "TrainingConfig(output_dir='./train_dummy_torch', overwrite_output_dir=True, eval_strategy='epoch', "
    "eval_steps=None, batch_size=1, val_batch_size=-1, seed=42, epoch_num=2, dataloader_pin_memory=True, "
    "dataloader_drop_last=True, dataloader_num_workers=0, lr=5e-05, metric='Accuracy', print_steps=1, "
    "load_best_model_at_end=False, early_stopping={'monitor': 'eval_epoch_metric', 'patience': 4, 'mode': 'max'}, "
    "model_checkpoint={'every_n_epoch': 1}, tensorboard={'log_dir': 'mylogdir'}, loss='CrossEntropyLoss', "
    "optimizer='Adam', lr_scheduler_type='linear', warmup_ratio=0.0, warmup_steps=0, device_str=None, freeze_bn=False)"
)
OF_THE_OPERATOR = (
    "TrainingConfig(output_dir='./train_dummy_operator', overwrite_output_dir=True, eval_strategy='epoch', "
    "eval_steps=None, batch_size=8, val_batch_size=-1, seed=42, epoch_num=2, dataloader_pin_memory=True, "
    "dataloader_drop_last=True, dataloader_num_workers=0, lr=5e-05, metric='Accuracy', print_steps=1, "
    "load_best_model_at_end=False, early_stopping={'monitor': 'eval_epoch_metric', 'patience': 4, 'mode': 'max'}, "
    "model_checkpoint={'every_n_epoch': 1}, tensorboard={'log_dir': None, 'comment': ''}, loss='CrossEntropyLoss', "
    "optimizer='Adam', lr_scheduler_type='linear', warmup_ratio=0.0, warmup_steps=0, device_str=None, freeze_bn=False)"
)


def test_the_first_example_of_the_page() -> None:
    training_config = TrainingConfig(
        output_dir="./train_dummy_torch",
        epoch_num=2,
        batch_size=1,
        print_steps=1,
        tensorboard={"log_dir": "mylogdir"},
    )
    assert repr(training_config) == str(training_config) == OF_THE_MODEL


def test_the_operators_example_of_the_page() -> None:
    training_config = TrainingConfig(batch_size=8, epoch_num=2, output_dir="./train_dummy_operator", print_steps=1)
    assert repr(training_config) == OF_THE_OPERATOR


def test_the_changes_of_the_page() -> None:
    training_config = TrainingConfig()
    training_config.tensorboard = {"log_dir": "your_log_dir"}
    training_config.metric = "Accuracy"
    assert "tensorboard={'log_dir': 'your_log_dir'}, " in repr(training_config)
    training_config.tensorboard = None
    assert "tensorboard=None, " in repr(training_config)


def test_other_settings_follow_where_they_differ_from_their_default() -> None:
    config = TrainingConfig(max_steps=5, weight_decay=0.0, metrics=["a", MetricConfig("b")], eval_batch_size=3)
    shown = repr(config)
    assert shown.endswith("freeze_bn=False, metrics=['a', MetricConfig(name='b')], max_steps=5)")
    assert ", val_batch_size=3, " in shown
    assert ", metric='a', " in shown


@pytest.mark.parametrize("metrics", [None, [], ["a"], ["a", "b"], [MetricConfig("a", top_k=1)]])
def test_metrics_are_shown_so_that_they_can_be_made_again(metrics: object) -> None:
    assert eval(repr(TrainingConfig(metrics=metrics))).metrics == metrics


def test_the_summary_shows_what_differs_by_the_names_that_were_written() -> None:
    config = TrainingConfig(lr=0.1, metric="F1", num_epochs=3, batch_size=8)
    assert config.summary() == "TrainingConfig(num_epochs=3, lr=0.1, metric='F1')"
    config.update(val_batch_size=3)
    assert config.summary() == "TrainingConfig(val_batch_size=3, num_epochs=3, lr=0.1, metric='F1')"
    assert TrainingConfig().summary() == "TrainingConfig()"
