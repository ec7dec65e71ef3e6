"""During a training with tensor parallel: the loss of divided scores, and the check of the first gradients."""

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.layout_runs import Texts, build_language
from tests.ranks import on_ranks
from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.hooks.tensor_parallel import tensor_parallel_hook


def test_one_process_needs_no_hook() -> None:
    assert tensor_parallel_hook() is None


class Scaled(nn.Module):
    """Its plan lacks the word of ``scale``, which has half of the features on each process."""

    tensor_plan: ClassVar[dict[str, str]] = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(4, 8), nn.LayerNorm(4), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.down(self.scale(self.up(inputs).unflatten(-1, (-1, 4))).flatten(1))
        return scores


class Scores(nn.Module):
    """Whose scores stay apart in training."""

    tensor_plan: ClassVar[dict[str, str]] = {"head": "colwise_loss"}

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.shapes: list[torch.Size] = []

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Any = self.head(inputs)
        self.shapes.append((logits.to_local() if hasattr(logits, "to_local") else logits).shape)
        return logits  # type: ignore[no-any-return]

    def compute_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


def train(folder: Path, model: nn.Module) -> dict[str, Any]:
    torch.manual_seed(0)
    data = [{"inputs": torch.randn(4), "labels": index % 2} for index in range(8)]
    config = TrainingConfig(
        output_dir=str(folder / type(model).__name__), num_epochs=1, batch_size=4, tensor_parallel_size=2,
        device_str="cpu", eval_strategy="no", save_enabled=False, metrics=None, loss="CrossEntropyLoss",
    )  # fmt: skip
    trainer = Trainer(model, config, train_dataset=data)
    trainer.train()
    return trainer.evaluate(data)


def runs(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Scores()
    found: dict[str, Any] = {"results": train(folder, model)}
    found["shapes"] = [tuple(shape) for shape in model.shapes]
    try:
        train(folder, Scaled())
    except Exception as error:
        found["error"] = str(error)
    config = TrainingConfig(
        output_dir=str(folder / "generate"), tensor_parallel_size=2, sequence_parallel=True, device_str="cpu",
        evaluate_with_generate=True,
    )  # fmt: skip
    try:
        Trainer(build_language(plain=True), config, train_dataset=Texts(8))
    except ConfigError as error:
        found["generate"] = str(error)
    return found


def test_scores_stay_apart_in_training_and_first_gradients_are_compared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = train(tmp_path / "alone", Scores())
    for found in on_ranks(runs, tmp_path / "ranks"):
        assert abs(found["results"]["loss"] - expected["loss"]) < 1e-6
        assert found["shapes"] == [(4, 1), (4, 1), (4, 2), (4, 2)]  # of two training batches, and two in the evaluation
        assert "every process holds scale.weight, scale.bias" in found["error"]
        assert "evaluate_with_generate: got True with sequence_parallel=True" in found["generate"]
