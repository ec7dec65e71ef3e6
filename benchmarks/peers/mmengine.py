"""MMEngine's Runner. It has no autocast on a CPU."""

import logging
from typing import Any

from mmengine.dataset import DefaultSampler
from mmengine.model import BaseModel
from mmengine.runner import Runner

from benchmarks.job import Job


class Model(BaseModel):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = job.model_with_loss()

    def forward(self, x: Any, labels: Any, mode: str = "tensor") -> Any:
        return self.model(x, labels)


def train(job: Job, variant: str) -> None:
    if job.precision == "bf16":
        raise SystemExit("mmengine: autocast is not for CPUs there")
    model, dataset = Model(job), job.dataset()
    checkpoint = {"type": "CheckpointHook", "by_epoch": False, "interval": max(1, job.steps // 4)}
    optimizer = {"type": "OptimWrapper", "optimizer": job.optimizer(model.parameters())}
    runner = Runner(
        model=model,
        work_dir=job.folder,
        train_dataloader=job.loader(dataset=dataset, sampler=DefaultSampler(dataset, shuffle=True, seed=0)),
        optim_wrapper={**optimizer, "accumulative_counts": job.accumulation},
        train_cfg={"by_epoch": True, "max_epochs": 1},
        default_hooks={
            "logger": {"type": "LoggerHook", "interval": job.log_every},
            "checkpoint": checkpoint if job.features else None,
        },
        visualizer={"type": "Visualizer", "vis_backends": [{"type": "LocalVisBackend"}]},
        log_level="ERROR",
    )
    logging.disable(logging.WARNING)
    runner.train()
