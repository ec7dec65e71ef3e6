"""Lightning's Trainer."""

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from benchmarks.job import Job

warnings.filterwarnings("ignore")


class Module(lightning.LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model, self.job = job.model_with_loss(), job

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.model(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self.job.optimizer(self.parameters(), **({} if self.job.device == "cpu" else {"fused": True}))


def train(job: Job, variant: str) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    saves = [ModelCheckpoint(dirpath=job.folder, filename="saved", every_n_train_steps=job.stop_at)]
    trainer = lightning.Trainer(
        max_epochs=1,
        max_steps=job.stop_at or -1,
        accelerator="cpu" if job.device == "cpu" else "gpu",
        devices=1,
        precision="bf16-mixed" if job.precision == "bf16" else "32-true",
        accumulate_grad_batches=job.accumulation,
        logger=CSVLogger(job.folder),
        log_every_n_steps=job.log_every,
        enable_progress_bar=job.features,
        enable_checkpointing=job.features or bool(job.stop_at),
        enable_model_summary=job.features,
        default_root_dir=job.folder,
        callbacks=saves if job.stop_at else None,
    )
    module = Module(job)
    if variant == "compile":
        module.model.compile()
    trainer.fit(module, job.loader(), ckpt_path=Path(job.resume, "saved.ckpt") if job.resume else None)
