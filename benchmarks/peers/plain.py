"""A plain PyTorch loop. Variants: ``fused`` (Adam), ``fetch`` (also reads complete batches), ``compile``
(that of fused, the model compiled), ``medium`` (matrix products in bfloat16). A job with a step of its own has the
metric that a Trainer computes, by torchmetrics: a plain loop calls that, too.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.job import Job, as_it_is

VARIANTS = ("", "fused", "fetch", "compile", "medium")


def train(job: Job, variant: str) -> None:
    if variant not in VARIANTS:
        raise ValueError(f"plain: there is no variant {variant!r}; there are {', '.join(VARIANTS[1:])}")
    is_pair = job.data == "tensors"
    model: nn.Module = (job.net() if is_pair else job.model_with_loss()).to(job.device)
    optimizer = job.optimizer(
        model.parameters(), **({"fused": True} if variant in ("fused", "fetch", "compile") else {})
    )
    loader = _loader(job, variant)
    if variant == "medium":
        torch.set_float32_matmul_precision("medium")
    if job.ranks > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    if variant == "compile":
        model = torch.compile(model)
    autocast: Any = contextlib.nullcontext()
    if job.precision == "bf16":
        autocast = torch.autocast(job.device.partition(":")[0], torch.bfloat16)
    accuracy = None
    if job.own_step:
        from torchmetrics.classification import MulticlassAccuracy  # here: the memory of the other jobs is without it

        accuracy = MulticlassAccuracy(10, average="micro")
    model.train()
    optimizer.zero_grad()
    for step, batch in enumerate(loader, 1):
        if job.device != "cpu":
            batch = to_device(batch, job.device)
        with autocast:
            outputs = None if is_pair else model(**batch)
            loss = job.loss(model(batch[0]), batch[1]) if outputs is None else outputs["loss"]
        (loss / job.accumulation if job.accumulation > 1 else loss).backward()
        if step % job.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
        if accuracy is not None:
            accuracy.update(outputs["logits"].detach(), batch["labels"])
        if step % job.log_every == 0:
            job.log(step, loss.item())
            if accuracy is not None:
                job.log(step, accuracy.compute().item())
    if job.features:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(job.folder) / "last.pt")


def _loader(job: Job, variant: str) -> Any:
    if variant == "fetch":
        return job.loader(dataset=job.batches(), collate_fn=as_it_is)
    if job.ranks == 1:
        return job.loader(pin_memory=job.device != "cpu")
    torch.distributed.init_process_group("gloo")
    dataset = job.dataset()
    return job.loader(dataset=dataset, sampler=torch.utils.data.DistributedSampler(dataset))


def to_device(batch: Any, device: str) -> Any:
    if isinstance(batch, dict):
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    return [tensor.to(device, non_blocking=True) for tensor in batch]
