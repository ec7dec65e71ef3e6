"""Shows a minimal training: a model, settings, data.

    python examples/objects/shortest.py

docs/trainer.md describes the files in ``output/objects/shortest``.
"""

from digits import digits
from torch import nn

from trainwright import Trainer, TrainingConfig

if __name__ == "__main__":
    train_data, eval_data = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    config = TrainingConfig(output_dir="output/objects/shortest", num_epochs=10, batch_size=32, learning_rate=1e-2)
    results = Trainer(model, config, train_data, eval_data).train()
    print(f"{results['accuracy']:.1%} accuracy on the evaluation digits")
