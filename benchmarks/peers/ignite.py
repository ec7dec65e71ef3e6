"""Ignite: its supervised trainer."""

from typing import Any

import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, ProgressBar

from benchmarks.job import Job


def train(job: Job, variant: str) -> None:
    model = job.net()
    optimizer = job.optimizer(model.parameters())
    forward = torch.autocast("cpu", torch.bfloat16)(model.__call__) if job.precision == "bf16" else None
    trainer = create_supervised_trainer(
        model,
        optimizer,
        job.loss,
        gradient_accumulation_steps=job.accumulation,
        prepare_batch=lambda batch, **_: (batch["x"], batch["labels"]),
        **({} if forward is None else {"model_fn": lambda _, inputs: forward(inputs)}),
    )

    def log(engine: Any) -> None:
        job.log(engine.state.iteration, engine.state.output)

    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=job.log_every), log)
    if job.features:
        ProgressBar().attach(trainer, output_transform=lambda loss: {"loss": loss})
        state = {"model": model, "optimizer": optimizer, "trainer": trainer}
        saver = Checkpoint(state, DiskSaver(job.folder, require_empty=False))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=max(1, job.steps // 4)), saver)
    trainer.run(job.loader(), max_epochs=1)
