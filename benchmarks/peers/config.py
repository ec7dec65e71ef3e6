"""Our config-file API, with its default hooks. Variants: ``passed`` (the optimizer of the plain loop), ``graph``."""

from typing import Any

import torch
from omegaconf import OmegaConf

from benchmarks.job import LEARNING_RATE, Job
from benchmarks.peers.ours import add_hooks, data_of
from trainwright import DefaultTrainer, LazyCall
from trainwright.data import build_image_train_loader


def train(job: Job, variant: str) -> None:
    job.is_compiled = variant == "graph"
    dataset, collate = data_of(job)
    loader, _, _ = build_image_train_loader(dataset, job.batch, num_workers=0, collate_fn=collate)
    cfg: Any = OmegaConf.create(flags={"allow_objects": True})
    cfg.model, cfg.dataloader = job.model_with_loss(), LazyCall(dict)(train=loader)
    not_fused = {"fused": False} if variant == "passed" else {}
    cfg.optim = LazyCall(torch.optim.Adam)(lr=LEARNING_RATE, **not_fused)
    cfg.graph = {"enabled": variant == "graph"}
    updates = (job.stop_at or job.steps) // job.accumulation
    cfg.train = {
        "output_dir": job.resume or job.folder,
        "resume": bool(job.resume),
        "train_iter": updates,
        "train_micro_batch_size": job.batch,
        "num_accumulation_steps": job.accumulation,
        "float32_matmul_precision": "medium" if job.precision == "medium" else None,
        "log_period": job.log_every,
        "amp": {"enabled": job.precision == "bf16"},
        "input_placement_device": job.device,
    }
    cfg.train.update(job.settings)
    if job.features:
        cfg.train.checkpointer = {"period": max(1, updates // 4)}
    trainer = DefaultTrainer(cfg)
    add_hooks(trainer, job)
    trainer.train()
