"""Knowledge distillation (Hinton et al. 2015): a small network learns the scores of a large one."""

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from trainwright import Trainer, TrainingConfig
from trainwright.data import ColumnDataset

BATCH, EPOCHS, TEMPERATURE, SHARE = 32, 3, 4.0, 0.7


def data() -> tuple[ColumnDataset, ColumnDataset]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return ColumnDataset(input=x[:1400], labels=y[:1400]), ColumnDataset(input=x[1400:], labels=y[1400:])


def make_network(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def settings(folder: str) -> TrainingConfig:
    return TrainingConfig(
        output_dir=folder, num_epochs=EPOCHS, batch_size=BATCH, lr=5e-3, lr_scheduler_type=None, device="cpu"
    )


def loss_of_student(scores: Tensor, of_teacher: Tensor, labels: Tensor) -> Tensor:
    soft = F.log_softmax(scores / TEMPERATURE, 1), F.log_softmax(of_teacher / TEMPERATURE, 1)
    distance = F.kl_div(*soft, reduction="batchmean", log_target=True) * TEMPERATURE**2
    return SHARE * distance + (1 - SHARE) * F.cross_entropy(scores, labels)


class Distillation(Trainer):
    def __init__(self, teacher: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = teacher.eval().requires_grad_(False)

    def compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        images = inputs["input"]
        return loss_of_student(model(images), self.teacher(images), inputs["labels"])


def main(folder: str = "output/recipes/distillation") -> Trainer:
    train, test = data()
    teacher = make_network(256)
    Trainer(teacher, settings(f"{folder}/teacher"), train, test).train()
    student = Distillation(teacher, make_network(8), settings(f"{folder}/student"), train, test)
    print(student.train())
    return student


if __name__ == "__main__":
    main()
