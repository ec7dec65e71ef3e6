"""Both APIs train, evaluate and predict with a model that is cut into pipeline stages, as one process does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.test_pipeline import VOCABULARY, build_gpt
from tests.ranks import on_ranks
from trainwright import Trainer, TrainingConfig


def samples(number: int = 22, length: int = 10) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(VOCABULARY, (number, length), generator=generator)
    return [{"token_ids": row, "labels": row} for row in rows]


def train_by_objects(folder: Path, **settings: Any) -> dict[str, Any]:
    config = TrainingConfig(
        num_epochs=2, batch_size=2, gradient_accumulation_steps=4, learning_rate=1e-2, max_grad_norm=0.5,
        output_dir=str(folder), save_enabled=False, log_steps=1, device_str="cpu",
        evaluate_with_generate=False, **settings,
    )  # fmt: skip
    trainer = Trainer(build_gpt(), config, train_dataset=samples(), eval_dataset=samples(7))
    results = trainer.train()
    history = trainer.storage.history("total_loss").values()
    norms = trainer.storage.history("grad_norm").values()
    predictions = trainer.predict(samples(5))
    return {
        "losses": [value for value, _ in history],
        "norms": [value for value, _ in norms],
        "results": results,
        "predictions": predictions["logits"],
    }


def train_stages_by_objects(folder: Path, **settings: Any) -> dict[str, Any]:
    return train_by_objects(folder, pipeline_parallel_size=2, **settings)


def test_objects_train_as_one_process(tmp_path: Path) -> None:
    alone = train_by_objects(tmp_path / "alone")
    for rank in on_ranks(train_stages_by_objects, tmp_path / "stages"):
        assert rank["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        assert rank["norms"] == pytest.approx(alone["norms"], abs=1e-5)
        assert rank["results"] == pytest.approx(alone["results"], abs=1e-5)
        torch.testing.assert_close(rank["predictions"], alone["predictions"], atol=1e-4, rtol=0)
