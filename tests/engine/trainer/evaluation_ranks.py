"""One rank of the Python API's evaluations, as a program: test_evaluation.py runs it alone and under torchrun.

Writes its results as JSON to the folder of its first argument.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig, get_config
from trainwright.data import ColumnDataset, build_image_test_loader, build_image_train_loader
from trainwright.hooks import Callback

FOLDER = Path(sys.argv[1])
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Model(nn.Module):
    """Batch normalization, whose buffers differ between the ranks; fails in its second call on ``fails_on``."""

    fails_on: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.num_calls = nn.BatchNorm1d(4), nn.Linear(4, 3), 0
        self.norm.running_mean += 0.1 * (RANK + 1)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.fails_on == RANK and self.num_calls == 2:
            raise ArithmeticError("in the model")
        result: Tensor = self.layer(self.norm(x))
        return result


class OwnStep(Trainer):
    def evaluate_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        loss = F.cross_entropy(model(inputs[0]), inputs[1])
        return {"eval_step_loss": loss, "eval_epoch_metric": 0.75}


class OwnOutputs(Trainer):
    def evaluation_step(self, batch: Any) -> dict[str, Any]:
        return {**super().evaluation_step(batch), "logits": F.one_hot(batch[1], 3).float()}


class OwnMetric(Trainer):
    def compute_metric(self, model: Any, inputs: Any) -> float:
        return 0.125


class Batches(Callback):
    def on_eval_batch_end(self, batch: Any, logs: Any) -> None:
        assert logs["eval_epoch_loss"] > 0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from ({"x": x} for x, _ in data(11))


class Shared(IterableDataset[Any]):
    """Yields the share of its rank."""

    is_sharded = True

    def __iter__(self) -> Any:
        yield from (data(11)[number] for number in range(RANK, 11, WORLD_SIZE))


def config_trainer() -> Any:
    cfg = get_config("common/defaults.py")
    cfg.model = LazyCall(Model)()
    train = LazyCall(build_image_train_loader)(dataset=LazyCall(ColumnDataset)(x=LazyCall(torch.ones)(size=(16, 4))))
    test = LazyCall(build_image_test_loader)(dataset=LazyCall(Stream)(), num_workers=0)
    cfg.dataloader = {"train": {**train, "num_workers": 0}, "test": [test]}
    output_dir = str(FOLDER / f"{WORLD_SIZE}" / "config")
    cfg.train.update({"output_dir": output_dir, "train_micro_batch_size": 2, "test_micro_batch_size": 3})
    return DefaultTrainer(cfg)


def data(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(length)
    return TensorDataset(torch.randn(length, 4, generator=generator), torch.randint(3, (length,), generator=generator))


def build(kind: type[Trainer] = Trainer) -> Trainer:
    torch.manual_seed(0)
    config = TrainingConfig(
        output_dir=FOLDER / f"{WORLD_SIZE}" / kind.__name__, progress_bar=False, tensorboard=None, save_enabled=False,
        batch_size=4, eval_batch_size=3, loss="CrossEntropyLoss", metrics=["Accuracy", "F1Score"], num_epochs=1,
    )  # fmt: skip
    return kind(Model(), config, data(12), data(7), callbacks=[Batches()])


def failure(trainer: Trainer, fails_on: int) -> str:
    trainer.model.fails_on, trainer.model.num_calls = fails_on, 0
    try:
        return str(trainer.evaluate(data(21)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    messages: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainwright.evaluation").addHandler(handler)
    trainer, config = build(), config_trainer()
    found: dict[str, Any] = {
        "lengths": {n: trainer.evaluate(data(n)) for n in (1, 2, 3, 4, 7, 12, 19)},
        "logs": trainer.evaluate(trainer.model, {}),
        "list": trainer.evaluate(list(data(5))),
        "loader": trainer.evaluate(DataLoader(data(5), batch_size=2)),
        "predictions": trainer.predict(data(7)).flatten().tolist(),
        "predictions of a loader": trainer.predict(DataLoader(data(7), batch_size=3)).flatten().tolist(),
        "predictions by batch": [x for part in trainer.predict(data(7), iterate=True) for x in part.flatten().tolist()],
        "shared stream": trainer.evaluate(Shared()),
        "predictions of a shared stream": sorted(trainer.predict(Shared()).flatten().tolist()),
        "config files: predictions of a stream": config.predict(Stream()).flatten().tolist(),
        "config files: predictions of the test data": sorted(config.predict().flatten().tolist()),
        **{kind.__name__: build(kind).evaluate() for kind in (OwnStep, OwnOutputs, OwnMetric)},
    }
    trained = build().train()
    failures = {
        "first": failure(trainer, 0),
        "last": failure(trainer, WORLD_SIZE - 1),
    }
    try:
        trainer.evaluate(iter([]))
    except Exception as error:
        failures["empty"] = f"{type(error).__name__}: {error}"
    found_all = {"results": found, "trained": trained, "failures": failures, "messages": messages}
    (FOLDER / f"{WORLD_SIZE}-{RANK}.json").write_text(json.dumps(found_all))


if __name__ == "__main__":
    main()
