"""A recipe of timm's: mixup and cutmix, an average of the weights, learning rates by layer, no weight decay on norms.

A tiny vision transformer of timm on digits; a pretrained one is ``timm.create_model("vit_small_patch16_224",
pretrained=True, num_classes=10)``.
"""

from typing import Any

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.data import Mixup
from torch import Tensor, nn

from trainwright import Trainer, TrainingConfig
from trainwright.data import ColumnDataset

BATCH, EPOCHS, LR, DECAY = 32, 2, 2e-3, 0.95
MIXUP = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "label_smoothing": 0.1, "num_classes": 10}


def data() -> tuple[ColumnDataset, ColumnDataset]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    return ColumnDataset(x=x[:512], labels=y[:512]), ColumnDataset(x=x[1400:], labels=y[1400:])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 32, "depth": 3, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", **sizes, num_classes=10)


class MixupTrainer(Trainer):
    mixup = Mixup(**MIXUP)

    def compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        images, labels = inputs["x"], inputs["labels"]
        if model.training:
            images, labels = self.mixup(images, labels)
        return F.cross_entropy(model(images), labels)


def main(folder: str = "output/recipes/image_classifier") -> Trainer:
    train, test = data()
    config = TrainingConfig(
        output_dir=folder, num_epochs=EPOCHS, batch_size=BATCH, optimizer="AdamW", lr=LR, weight_decay=0.05,
        lr_scheduler={"name_": "CosineAnnealingLR", "T_max": EPOCHS * len(train) // BATCH}, lr_scheduling_steps=1,
        layer_decay=0.75, decay_norm_and_bias=False, ema={"decay": DECAY}, device="cpu",
    )  # fmt: skip
    trainer = MixupTrainer(make_model(), config, train_dataset=train, eval_dataset=test)
    print(trainer.train())  # of the averaged weights
    return trainer


if __name__ == "__main__":
    main()
