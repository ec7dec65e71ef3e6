"""Shows a callback with state: an exponential moving average of the weights, used in evaluations.

    python examples/objects/own_callback.py

The average is part of every checkpoint, so a resumed run continues it.
"""

from typing import Any

import torch
from digits import digits
from torch import Tensor, nn

from trainwright import Trainer, TrainingConfig
from trainwright.hooks import Callback


class MeanWeights(Callback):
    """Keeps ``decay * mean + (1 - decay) * weights`` of each parameter; evaluations use the means.

    ``self.model``, ``self.optimizer`` and ``self.trainercontrol`` are there from ``on_train_begin`` on.
    """

    def __init__(self, decay: float = 0.99) -> None:
        self.decay = decay
        self.means: dict[str, Tensor] = {}
        self.trained: dict[str, Tensor] = {}

    def on_train_begin(self, logs: Any) -> None:
        self.means = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        for name, weight in self.model.named_parameters():
            self.means[name].lerp_(weight.detach(), 1 - self.decay)

    def on_eval_begin(self, logs: Any) -> None:
        self.trained = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.put(self.means)

    def on_eval_end(self, logs: Any) -> None:
        self.put(self.trained)
        print(f"epoch {logs['epoch']}: {logs['eval_accuracy']:.1%} with the averaged weights")

    def put(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(weights[name])

    def state_dict(self) -> dict[str, Any]:
        return {"means": self.means}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # after on_train_begin
        self.means = state["means"]


if __name__ == "__main__":
    torch.manual_seed(0)
    train_data, eval_data = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    config = TrainingConfig(
        output_dir="output/objects/own_callback",
        num_epochs=10,
        batch_size=32,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        resume_from_checkpoint=True,
    )
    trainer = Trainer(model, config, train_data, eval_data)
    trainer.add_callback(MeanWeights())
    trainer.train()
    print(f"{trainer.evaluate()['accuracy']:.1%} with the weights of the last step")
