"""Lightning Fabric: a custom loop over objects that it has set up."""

from pathlib import Path

from lightning import Fabric

from benchmarks.job import Job


def train(job: Job, variant: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if job.precision == "bf16" else "32-true")
    model = job.model_with_loss()
    model, optimizer = fabric.setup(model, job.optimizer(model.parameters()))
    for step, batch in enumerate(fabric.setup_dataloaders(job.loader()), 1):
        is_end = step % job.accumulation == 0
        with fabric.no_backward_sync(model, enabled=not is_end):
            loss = model(**batch)["loss"]
            fabric.backward(loss / job.accumulation if job.accumulation > 1 else loss)
        if is_end:
            optimizer.step()
            optimizer.zero_grad()
        if step % job.log_every == 0:
            job.log(step, loss.item())
    if job.features:
        fabric.save(Path(job.folder) / "last.ckpt", {"model": model, "optimizer": optimizer})
