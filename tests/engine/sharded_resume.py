"""Runs that stop at a checkpoint and resume, in any layout, for `test_sharded_resume`."""

import shutil
from pathlib import Path
from typing import Any

import torch

from tests.engine.test_pipeline_step import samples
from tests.parallel.test_pipeline import build_gpt
from trainwright import Trainer, TrainingConfig
from trainwright.parallel.dist import is_main_process, synchronize

Content = dict[str, torch.Tensor]


def train(folder: str, *, steps: int, **settings: Any) -> tuple[list[float], Content]:
    """Train up to ``steps`` from where the folder's last checkpoint is; returns the losses and the weights."""
    dropout, batch_size = settings.pop("dropout", 0.0), settings.pop("batch_size", 4)
    config = TrainingConfig(
        max_steps=steps, batch_size=batch_size, learning_rate=1e-2, weight_decay=0.1, output_dir=folder,
        log_steps=1, device_str="cpu", save_steps=2, seed=5,
        resume_from_checkpoint=True, eval_strategy="no", evaluate_with_generate=False, ema={"decay": 0.5}, **settings,
    )  # fmt: skip
    model = build_gpt()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    trainer = Trainer(model, config, train_dataset=samples())
    trainer.train()
    history = trainer.storage.histories().get("total_loss")  # none if nothing was left to train
    losses = [] if history is None else [value for value, _ in history.values()]
    weights = {name: full(value) for name, value in model.state_dict().items()}
    trainer.checkpointer.close()
    return losses, weights


def full(value: Any) -> torch.Tensor:
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def forget(folder: Path, step: str) -> None:
    """Remove the checkpoint of the last step, as if the run had been killed before it."""
    synchronize()
    if is_main_process():
        for path in (folder / "final_epoch", folder / "checkpoints" / step):
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
        (folder / "checkpoints" / "last_checkpoint").write_text("2")
    synchronize()


def resume_each(base: str, layouts: list[dict[str, Any]]) -> list[Any]:
    """For each layout: an unbroken run with dropout, its resume, and the resume of a run of one process."""
    found = []
    for number, layout in enumerate(layouts):
        folder = Path(base, str(number))
        unbroken = train(str(folder), steps=4, dropout=0.1, **layout)
        forget(folder, "4")
        resumed = train(str(folder), steps=4, dropout=0.1, **layout)
        found.append((unbroken, resumed, train(f"{base}/from-one-{number}", steps=4, **layout)))
    return found
