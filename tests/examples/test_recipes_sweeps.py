"""Sweeps: Optuna ends a bad trial early, and the best trial is the one with the best evaluation."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the digits are scikit-learn's: pip install 'trainwright[examples]'")
optuna = pytest.importorskip("optuna", reason="pip install 'trainwright[sweeps]'")

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"


def test_a_sweep_with_optuna_ends_bad_trials_early(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("sweep_optuna", RECIPES / "sweep_optuna.py")
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
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
