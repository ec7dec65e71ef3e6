"""How a batch becomes a loss: what a model may return for a pair, and what an error tells of the batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig
from trainwright.engine import EagerTrainer, GraphBase, GraphTrainer
from trainwright.evaluation import inference_on_dataset

INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
PAIRS = TensorDataset(INPUTS, torch.randint(3, (16,), generator=torch.Generator().manual_seed(1)))


def config(folder: Path, **settings: Any) -> TrainingConfig:
    given = {"progress_bar": False, "tensorboard": None, "save_enabled": False, "batch_size": 8, "lr": 0.01}
    return TrainingConfig(output_dir=folder, **{**given, **settings})


class OwnLoss(nn.Module):
    """Returns its loss in the form that ``shape`` makes of it and the scores."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.shape = nn.Linear(4, 4), shape

    def forward(self, x: Tensor) -> Any:
        scores = self.layer(x)
        return self.shape(F.mse_loss(scores, x), scores)


SHAPES = {
    "number": lambda loss, scores: loss,
    "tuple": lambda loss, scores: (loss, scores),
    "alone in a tuple": lambda loss, scores: (loss,),
    "dict": lambda loss, scores: {"loss": loss, "scores": scores},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("graph", [False, True])
def test_a_model_that_returns_its_loss_for_the_first_of_a_pair_is_trained_by_it(
    shape: str, graph: bool, tmp_path: Path
) -> None:
    model = OwnLoss(SHAPES[shape])
    trainer = Trainer(model, config(tmp_path, graph=graph), PAIRS, PAIRS)
    before = F.mse_loss(model.layer(INPUTS), INPUTS).item()
    loss = trainer.train()["loss"]
    assert loss == pytest.approx(F.mse_loss(model.layer(INPUTS), INPUTS).item(), rel=1e-6)
    assert loss < before


class Wide(nn.Module):
    """Takes vectors of five."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return {"loss": F.cross_entropy(self.layer(x), labels)}


BATCH = {"x": torch.randn(3, 4), "labels": torch.zeros(3, dtype=torch.int64)}
NOTE = "The batch of this step: {x: float32 (3, 4) on cpu, labels: int64 (3,) on cpu}"


def notes_of(run: Any) -> list[str]:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        run()
    return caught.value.__notes__


@pytest.mark.parametrize("kind", ["eager", "graph"])
def test_an_error_of_the_model_tells_the_batch_of_a_file_run(kind: str) -> None:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer: EagerTrainer = EagerTrainer(model, [BATCH], optimizer)
    if kind == "graph":
        trainer = GraphTrainer(GraphBase(model, optimizer, backend="aot_eager"), [BATCH])
    assert notes_of(lambda: trainer.train(0, 1)) == [NOTE]


def test_an_error_of_the_model_tells_the_batch_of_an_evaluation() -> None:
    loader = [BATCH]
    assert notes_of(lambda: inference_on_dataset(Wide(), loader, 3, 1, lambda data, device: data, "cpu", None)) == [
        NOTE
    ]


@pytest.mark.parametrize("graph", [False, True])
def test_an_error_of_the_model_tells_the_batch_of_a_trainer(graph: bool, tmp_path: Path) -> None:
    samples = [{"x": row, "labels": 0} for row in torch.randn(3, 4)]
    trainer = Trainer(Wide(), config(tmp_path, batch_size=3, graph=graph), samples, samples)
    assert notes_of(trainer.train) == [NOTE]
    assert notes_of(trainer.evaluate) == [NOTE]


def test_an_error_in_a_loss_of_the_users_own_tells_the_pair(tmp_path: Path) -> None:
    class Mine(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Tensor:
            return model(inputs[0][:, :3])

    trainer = Mine(nn.Linear(4, 2), config(tmp_path), PAIRS)
    assert notes_of(trainer.train) == ["The batch of this step: (float32 (8, 4) on cpu, int64 (8,) on cpu)"]
