"""Composer's Trainer."""

import warnings
from typing import Any

from composer import Callback, Trainer
from composer.models import ComposerModel

from benchmarks.job import Job

warnings.filterwarnings("ignore")


class Model(ComposerModel):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.net, self.job = job.net(), job

    def forward(self, batch: Any) -> Any:
        return self.net(batch["x"])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return self.job.loss(outputs, batch["labels"])


class Log(Callback):
    def __init__(self, job: Job) -> None:
        self.job = job

    def batch_end(self, state: Any, logger: Any) -> None:
        step = state.timestamp.batch.value
        if step % self.job.log_every == 0:
            self.job.log(step, state.loss.item())


def train(job: Job, variant: str) -> None:
    if job.accumulation > 1:
        raise SystemExit("composer: it takes the micro-batches of an update out of one batch")
    model = Model(job)
    trainer = Trainer(
        model=model,
        train_dataloader=job.loader(),
        optimizers=job.optimizer(model.parameters()),
        max_duration="1ep",
        device="cpu",
        precision="amp_bf16" if job.precision == "bf16" else "fp32",
        progress_bar=job.features,
        callbacks=[Log(job)],
        **({"save_folder": job.folder, "save_interval": f"{job.steps // 4}ba"} if job.features else {}),
    )
    trainer.fit()
    trainer.close()
