"""One network, two tasks: the digit in an image, and how much ink it has. Each has its own head and loss.

python examples/recipes/multi_task.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from trainwright import Trainer, TrainingConfig
from trainwright.data import ColumnDataset


class TwoHeads(nn.Module):
    """Learns how to weight the losses, as in Kendall et al. 2018: exp(-s) loss + s."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1))
        self.digit, self.ink = nn.Linear(64, 10), nn.Linear(64, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: Tensor, labels: Tensor, ink: Tensor) -> dict[str, Tensor]:
        hidden = self.body(inputs)
        logits = self.digit(hidden)
        digit_error, ink_error = F.cross_entropy(logits, labels), F.mse_loss(self.ink(hidden)[:, 0], ink)
        weights = (-self.log_vars).exp()
        return {
            "digit_loss": weights[0] * digit_error + self.log_vars[0],
            "ink_loss": weights[1] * ink_error + self.log_vars[1],
            "digit_error": digit_error.detach(),  # numbers whose names have no "loss" are logged only
            "ink_error": ink_error.detach(),
            "digit_weight": weights[0].detach(),
            "logits": logits,  # the accuracy of evaluations
        }


def main(folder: str = "output/recipes/multi_task", num_epochs: int = 10) -> Trainer:
    torch.manual_seed(0)
    digits = load_digits()
    inputs, labels = torch.from_numpy(digits.data.astype("float32") / 16), torch.from_numpy(digits.target)
    columns = {"inputs": inputs, "labels": labels, "ink": inputs.mean(dim=1)}
    train_data = ColumnDataset(**{name: column[:1500] for name, column in columns.items()})
    eval_data = ColumnDataset(**{name: column[1500:] for name, column in columns.items()})
    config = TrainingConfig(
        output_dir=folder,
        num_epochs=num_epochs,
        batch_size=50,
        learning_rate=3e-3,
        lr_scheduler_type=None,
        log_steps=10,
    )
    trainer = Trainer(TwoHeads(), config, train_data, eval_data)
    print(trainer.train())
    return trainer


if __name__ == "__main__":
    main()
