"""Shows the least that a training needs: a model, settings, data.

    python examples/objects/shortest.py

What it leaves in ``output/objects/shortest`` is described in docs/trainer.md.
"""

from digits import digits
from torch import nn

from trainwright import Trainer, TrainingConfig

if __name__ == "__main__":
    train_data, eval_data = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    config = TrainingConfig(output_dir="output/objects/shortest", num_epochs=10, batch_size=32, learning_rate=1e-2)
    results = Trainer(model, config, train_data, eval_data).train()
    print(f"{results['accuracy']:.1%} of the digits that it has not seen are read")
