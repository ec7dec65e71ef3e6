"""Shows a custom trainer: knowledge distillation from a larger model (Hinton et al. 2015).

    python examples/objects/own_trainer.py

One method is overridden; everything else (evaluation, metrics, checkpoints, resuming) does not change.

B batch, C classes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from digits import digits
from torch import Tensor, nn

from trainwright import Trainer, TrainingConfig

TEMPERATURE = 4.0  # softens the teacher's distribution


class Distillation(Trainer):
    """``compute_loss`` compares with the labels and the teacher, in training and in evaluation."""

    def __init__(self, *arguments: Any, teacher: nn.Module, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.teacher = teacher.to(self.device).eval()

    def compute_loss(self, model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
        pixels, labels_B = inputs
        logits_BC = model(pixels)
        with torch.no_grad():
            taught_BC = self.teacher(pixels)
        log_student, log_teacher = (F.log_softmax(x / TEMPERATURE, dim=1) for x in (logits_BC, taught_BC))
        distance = F.kl_div(log_student, log_teacher, log_target=True, reduction="batchmean")
        return F.cross_entropy(logits_BC, labels_B) + TEMPERATURE**2 * distance


def settings(name: str) -> TrainingConfig:
    return TrainingConfig(
        output_dir=f"output/objects/own_trainer/{name}", num_epochs=15, batch_size=32, learning_rate=1e-2
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    train_data, eval_data = digits()
    teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    print("teacher", Trainer(teacher, settings("teacher"), train_data, eval_data).train())

    student = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    trainer = Distillation(student, settings("student"), train_data, eval_data, teacher=teacher)
    print("student", trainer.train())
