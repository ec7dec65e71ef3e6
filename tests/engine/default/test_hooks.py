"""The hooks that a configuration describes: when they evaluate and save, and what they keep."""

from pathlib import Path

import pytest
from torch import Tensor

from tests.engine.default.test_default_trainer import Model, config, rows
from tests.toys import Results
from trainwright import DefaultTrainer


@pytest.mark.parametrize(("epochs", "ends"), [(1, [4, 7, 11, 14, 17]), (2, [7, 14])])
def test_evaluations_and_checkpoints_are_at_the_ends_of_epochs_also_within_an_iteration(
    tmp_path: Path, epochs: int, ends: list[int]
) -> None:
    cfg = config(tmp_path, train_iter=0, train_epoch=5, train_micro_batch_size=8)
    cfg.dataloader.train.dataset.length = 27  # 3.375 iterations
    cfg.train.evaluation.eval_after_n_epoch = cfg.train.checkpointer.save_model_after_n_epoch = epochs
    DefaultTrainer(cfg).train()
    evaluated = [row["iteration"] for row in rows(tmp_path) if "Acc@1" in row]
    assert evaluated == [*(end - 1 for end in ends if end < 17), 17]
    assert sorted(int(path.name[6:]) + 1 for path in tmp_path.glob("model_0*")) == ends


def test_the_k_best_checkpoints_are_kept_besides_the_newest(tmp_path: Path) -> None:

    cfg = config(tmp_path, checkpointer={"period": 1, "max_to_keep": 2, "save_top_k": 3})
    cfg._set_flag("allow_objects", True)
    cfg.train.evaluation.update(
        {
            "evaluator": Results(score=[0.3, 0.9, 0.5, 0.7, 0.1, 0.2]),
            "eval_metric": "score",
            "eval_mode": "max",
            "eval_period": 1,
        }
    )
    DefaultTrainer(cfg).train()
    kept = sorted(path.name for path in tmp_path.glob("model_best*"))
    assert kept == ["model_best", "model_best_0000001", "model_best_0000002", "model_best_0000003"]
    assert (tmp_path / "model_best").resolve().name == "model_best_0000001"
    assert sorted(path.name for path in tmp_path.glob("model_0*")) == ["model_0000004", "model_0000005"]


def test_a_value_of_the_model_and_a_result_of_one_name_are_two_values(tmp_path: Path) -> None:
    class Scored(Model):
        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            outputs = super().forward(inputs, labels)
            return {**outputs, "score": outputs["loss"] * 0 + 7} if self.training else outputs

    cfg = config(tmp_path, train_iter=4)
    cfg._set_flag("allow_objects", True)
    cfg.model = Scored()
    cfg.train.evaluation.update(
        evaluator=Results(score=[0.3, 0.2]), eval_metric="score", eval_mode="max", eval_period=2
    )
    trainer = DefaultTrainer(cfg)
    assert trainer.train() == {"score": 0.2}
    latest = trainer.storage.latest()
    assert (latest["score"][0], latest["evaluation/score"][0]) == (7, 0.2)
    assert (tmp_path / "model_best").is_dir()


def test_save_top_k_without_evaluation_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(tmp_path, checkpointer={"save_top_k": 3})
    cfg.train.evaluation.enabled = False
    DefaultTrainer(cfg)
    assert "train.checkpointer.save_top_k has no effect: nothing is evaluated" in caplog.text


def test_beside_a_bar_the_line_of_an_epoch_alone_shows_its_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(tmp_path, train_iter=0, train_epoch=2, log_period=1)
    cfg.train.evaluation.eval_period = 2
    with caplog.at_level("INFO"):
        trainer = DefaultTrainer(cfg)
        trainer.train()
    results = [record for record in caplog.records if record.getMessage().startswith("Evaluation: ")]
    per_epoch = trainer.max_iter // 2
    assert [record.progress for record in results] == [at % per_epoch == 0 for at in range(2, trainer.max_iter + 1, 2)]
    assert {record.progress for record in results} == {False, True}
