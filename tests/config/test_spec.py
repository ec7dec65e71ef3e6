"""The settings of a run: all of them, by one vocabulary, from either API; the names are the user's."""

from pathlib import Path

import pytest

from tests.toys import Classifier, file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, TrainingConfig
from trainwright.config.settings import PLACES
from trainwright.config.spec import RunSpec, spec_of_training_config


@pytest.fixture
def of_file(tmp_path: Path) -> RunSpec:
    cfg = file_config(
        tmp_path,
        Classifier,
        points,
        LazyCall(points)(seed=1),
        train_iter=2,
        train_micro_batch_size=8,
        ema={"decay": 0.5},
    )
    return DefaultTrainer(cfg).run.spec


def test_it_has_every_setting(of_file: RunSpec, tmp_path: Path) -> None:
    of_program = spec_of_training_config(quiet(tmp_path, batch_size=4))
    for name in TrainingConfig.model_fields:
        assert hasattr(of_file, name)
        assert hasattr(of_program, name)
    assert (of_program.batch_size, of_program.eval_batch_size) == (4, 4)
    assert of_program.as_set["eval_batch_size"] is None


def test_settings_of_a_config_file_have_their_names_and_forms(of_file: RunSpec) -> None:
    assert (of_file.batch_size, of_file.max_steps, of_file.num_epochs, of_file.ema) == (8, 2, 0, {"decay": 0.5})
    assert (of_file.zero_stage, of_file.mixed_precision, of_file.init_weights_from) == (0, None, None)
    assert (of_file.early_stopping, of_file.loss, of_file.model_checkpoint) == (None, None, None)
    assert [of_file.is_set(name) for name in ("batch_size", "deterministic", "metrics")] == [True, False, False]


def test_messages_name_a_setting_as_the_user_does(of_file: RunSpec, tmp_path: Path) -> None:
    assert of_file.where("batch_size") == of_file.name_of("batch_size") == "train.train_micro_batch_size"
    assert of_file.name_of("metrics") == "metrics"
    config = TrainingConfig(output_dir=str(tmp_path), train_batch_size=4, use_cpu=True)
    spec = spec_of_training_config(config)
    assert (spec.name_of("batch_size"), spec.where("seed")) == ("train_batch_size", "TrainingConfig.seed")
    assert spec.name_of("device_str") == "device_str"  # use_cpu has other values
    assert spec.batch_settings(2, 4) == {"train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert of_file.batch_settings(2, 4)["train.global_batch_size"] == 8


def test_it_is_immutable(of_file: RunSpec) -> None:
    with pytest.raises(AttributeError, match="immutable"):
        of_file.seed = 3  # type: ignore[misc]


def test_each_place_is_that_of_one_setting_or_of_two_that_exclude_each_other() -> None:
    places = list(PLACES.values())
    assert {place for place in places if places.count(place) > 1} == {"train.scheduler"}
