"""Sweeps: Optuna and Ray Tune end bad trials early, and the best trial is the one with the best evaluation."""

from pathlib import Path

import pytest

from tests.examples.test_recipes import recipe as load

pytest.importorskip("sklearn", reason="the digits are scikit-learn's: pip install 'trainwright[examples]'")


@pytest.mark.exhaustive
def test_a_sweep_with_optuna_ends_bad_trials_early(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="pip install 'trainwright[sweeps]'")
    recipe = load("sweep_optuna")
    study = recipe.main(str(tmp_path))
    states = [trial.state.name for trial in study.trials]
    assert len(states) == recipe.TRIALS
    assert {"COMPLETE", "PRUNED"} == set(states)
    complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    for trial in complete:
        assert sorted(trial.intermediate_values) == [1, 2, 3, 4]
        assert trial.value == pytest.approx(trial.intermediate_values[4], rel=1e-6)
    assert study.best_value == min(trial.value for trial in complete) < 0.4
    pruned = [trial for trial in study.trials if trial.state.name == "PRUNED"]
    assert all(len(trial.intermediate_values) < 4 for trial in pruned)
    # The settings of a trial are in its folder.
    config = (tmp_path / f"trial_{study.best_trial.number}" / "training_config.yaml").read_text()
    assert repr(study.best_params["learning_rate"]) in config


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")  # those of Ray
def test_a_sweep_with_ray_tune_ends_bad_trials_early(tmp_path: Path) -> None:
    reason = "Ray has no packages for every Python version, so it is in no test extra: pip install 'trainwright[ray]'"
    pytest.importorskip("ray", reason=reason)
    recipe = load("sweep_ray")
    results = recipe.main(str(tmp_path))
    assert [result.error for result in results] == [None] * recipe.TRIALS
    epochs = sorted(result.metrics["training_iteration"] for result in results)
    assert epochs[0] < epochs[-1] == recipe.EPOCHS
    best = results.get_best_result()
    assert best.metrics["loss"] == min(result.metrics["loss"] for result in results) < 0.6
    assert best.metrics["accuracy"] > 0.85
    # The settings of each trial are in its run folder.
    configs = [path.read_text() for path in (tmp_path / "runs").glob("*/training_config.yaml")]
    assert len(configs) == recipe.TRIALS
    assert sum(repr(best.config["learning_rate"]) in config for config in configs) == 1
