"""An evaluation that a callback requests counts as one of a period: the best checkpoint, schedules, both APIs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR

from tests.toys import Classifier, Results, assert_equal_weights, file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.checkpoint import Checkpointer
from trainwright.hooks import Callback

SCORES = {"every": [0.3, 0.9, 0.5, 0.4], "requested is worse": [0.9, 0.3, 0.5, 0.4]}  # at 2, 3 (requested), 4 and 6


class Requests(Callback):
    """Requests an evaluation after update 3, and keeps the model that each update begins with."""

    def __init__(self) -> None:
        self.models: dict[int, Any] = {}

    def on_train_batch_begin(self, batch: Any, logs: Any) -> None:
        self.models[logs["global_step"]] = copy.deepcopy(self.model)

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        self.trainercontrol.should_evaluate = logs["global_step"] == 3


class Scored(Trainer):
    scores: list[float]

    def evaluate(self, *arguments: Any) -> Any:
        return {**super().evaluate(*arguments), "accuracy": self.scores.pop(0)}


def by_objects(folder: Path, scores: list[float], **more: Any) -> Any:
    config = quiet(folder, batch_size=4, num_epochs=9, max_steps=6, learning_rate=0.1, eval_strategy="step",
                   eval_steps=2, metric_for_best_model="accuracy", metrics=["accuracy"], **more)  # fmt: skip
    trainer = Scored(Classifier(seed=0), config, points(16), points(8, seed=1), callbacks=[Requests()])
    trainer.scores = [*scores]
    return trainer


def by_config_file(folder: Path, scores: list[float], **more: Any) -> Any:
    cfg = file_config(folder, lambda: Classifier(seed=0), lambda: points(16), lambda: points(8, seed=1),
                      train_iter=6, train_micro_batch_size=4, test_micro_batch_size=4, log_period=1,
                      scheduler=LazyCall(ConstantLR)(factor=1.0), **more)  # fmt: skip
    evaluator = LazyCall(Results)(accuracy=scores)
    cfg.train.evaluation.update(evaluator=evaluator, eval_period=2, eval_metric="accuracy", eval_mode="max")
    trainer = DefaultTrainer(cfg)
    trainer.add_callback(Requests())
    return trainer


APIS = {"Python": by_objects, "config file": by_config_file}


@pytest.mark.parametrize(("scores", "best"), [(SCORES["every"], 3), (SCORES["requested is worse"], 2)])
@pytest.mark.parametrize("api", APIS)
def test_it_may_find_the_best_checkpoint(
    api: str, scores: list[float], best: int, tmp_path: Path, read_rows: Any
) -> None:
    trainer = APIS[api](tmp_path, scores)
    trainer.train()
    evaluated = [row["iteration"] + 1 for row in read_rows(tmp_path) if any("accuracy" in name for name in row)]
    assert evaluated == [2, 3, 4, 7]  # the final one counts as the iteration behind the last
    (folder,) = tmp_path.rglob("model_best")
    saved = Classifier(seed=5)
    assert Checkpointer(saved).load(folder, checkpointables=[])["iteration"] == best - 1
    of_update = next(one for one in trainer.callbacks if isinstance(one, Requests)).models[best]
    assert_equal_weights(saved, of_update)


@pytest.mark.parametrize("api", APIS)
def test_its_weights_are_loaded_at_the_end(api: str, tmp_path: Path) -> None:
    trainer = APIS[api](tmp_path, SCORES["every"], load_best_model_at_end=True)
    results = trainer.train()
    assert trainer.last_eval_results["accuracy"] == 0.9
    assert results is None or results["accuracy"] == 0.9
    of_update = next(one for one in trainer.callbacks if isinstance(one, Requests)).models[3]
    assert_equal_weights(trainer.model, of_update)


def test_a_plateau_schedule_is_stepped_before_the_next_update(tmp_path: Path, read_rows: Any) -> None:
    plateau = {"name_": "ReduceLROnPlateau", "patience": 0, "factor": 0.5, "mode": "max"}
    by_objects(tmp_path, SCORES["requested is worse"], lr_scheduler_type=plateau, log_steps=1).train()
    rates = [row["lr"] for row in read_rows(tmp_path) if "lr" in row]
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.05, 0.025, 0.025])


def test_an_evaluation_of_the_initial_weights_is_no_best_checkpoint(tmp_path: Path) -> None:
    trainer = by_objects(tmp_path, [1.0, *SCORES["every"]], eval_on_start=True)
    trainer.train()
    (folder,) = tmp_path.rglob("model_best")
    saved = Classifier(seed=5)
    assert Checkpointer(saved).load(folder, checkpointables=[])["iteration"] == 2
    assert not torch.equal(saved.body[0].weight, Classifier(seed=0).body[0].weight)
