"""A program of a user of config files, for type checkers; it runs, too."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainwright import DefaultTrainer, LazyCall, LazyConfig, configurable, get_config, instantiate
from trainwright.cli.train import main
from trainwright.config import default_argument_parser, try_get_key
from trainwright.data import ColumnDataset, build_image_test_loader, build_image_train_loader
from trainwright.engine import HookBase, default_setup
from trainwright.evaluation import ClsEvaluator, DatasetEvaluator
from trainwright.hooks import EvalHook, PeriodicWriter
from trainwright.optim import WarmupCosineLR, build_optimizer, get_default_optimizer_params


class Classifier(nn.Module):
    @configurable
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layers(images)
        return {"loss": nn.functional.cross_entropy(scores, labels), "prediction_scores": scores}


def data() -> ColumnDataset:
    return ColumnDataset(images=torch.arange(16 * 8).reshape(16, 8) / 128, labels=torch.arange(16) % 2)


class Share(DatasetEvaluator):
    """The share of the images of class 1."""

    def reset(self) -> None:
        self.labels: list[int] = []

    def process(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        self.labels += inputs["labels"].tolist()

    def evaluate(self) -> dict[str, float]:
        return {"share": sum(self.labels) / max(len(self.labels), 1)}


class OwnTrainer(DefaultTrainer):
    def build_hooks(self) -> list[HookBase | None]:
        hooks = super().build_hooks()
        hooks.append(EvalHook(2, lambda: {"twice": 2.0}))
        hooks.append(PeriodicWriter([], period=2))
        return hooks

    def train_step(self, model: Any, inputs: Any) -> Mapping[str, Any]:
        outputs: dict[str, Any] = dict(super().train_step(model, inputs))
        self.step()
        return outputs


def run(folder: Path) -> None:
    cfg = get_config("common/defaults.py")
    cfg.model = LazyCall(Classifier)(width=4)
    cfg.dataloader = {
        "train": LazyCall(build_image_train_loader)(dataset=LazyCall(data)(), num_workers=0),
        "test": [LazyCall(build_image_test_loader)(dataset=LazyCall(data)(), num_workers=0)],
    }
    cfg.optim = LazyCall(torch.optim.SGD)(params=LazyCall(get_default_optimizer_params)(), lr=0.1)
    cfg.train.update({"output_dir": str(folder / "run"), "train_iter": 4, "train_micro_batch_size": 4})
    cfg.train.scheduler = LazyCall(WarmupCosineLR)(warmup_factor=0.1)
    cfg = LazyConfig.apply_overrides(cfg, ["train.seed=3", "train.progress_bar=false"])
    assert try_get_key(cfg, "train.seed") == 3
    arguments = default_argument_parser().parse_args(["--config-file", "config.py"])
    default_setup(cfg, arguments)
    trainer = OwnTrainer(cfg)
    results: dict[str, Any] = trainer.train()
    print(results, trainer.iter, trainer.cfg.train.seed)
    LazyConfig.save(cfg, str(folder / "saved.yaml"))
    model: nn.Module = DefaultTrainer.build_model(cfg)
    assert isinstance(instantiate(cfg.model), type(model))
    assert build_optimizer is not None
    print(DefaultTrainer.test(cfg, [], model, ClsEvaluator(topk=(1,))), Share(), main)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        run(Path(name))
