"""Accelerate: a custom loop over prepared objects."""

from pathlib import Path

from accelerate import Accelerator, skip_first_batches

from benchmarks.job import Job


def train(job: Job, variant: str) -> None:
    precision = "bf16" if job.precision == "bf16" else "no"
    steps = job.accumulation
    accelerator = Accelerator(cpu=job.device == "cpu", gradient_accumulation_steps=steps, mixed_precision=precision)
    model = job.model_with_loss()
    model, optimizer, loader = accelerator.prepare(model, job.optimizer(model.parameters()), job.loader())
    done = 0
    if job.resume:
        accelerator.load_state(job.resume)
        done = int(Path(job.resume, "step").read_text())
        loader = skip_first_batches(loader, done)
    model.train()
    for step, batch in enumerate(loader, done + 1):
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if step % job.log_every == 0:
            job.log(step, loss.item())
        if step == job.stop_at:
            break
    if job.features or job.stop_at:
        accelerator.save_state(job.folder)
        Path(job.folder, "step").write_text(str(step))
