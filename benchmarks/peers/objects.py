"""Our Python API. Variants: ``passed`` (the plain loop's optimizer), ``graph``, ``quiet`` (without TensorBoard)."""

from typing import Any

from benchmarks.job import LEARNING_RATE, Job
from benchmarks.peers.ours import add_hooks, data_of
from trainwright import Trainer, TrainingConfig
from trainwright.hooks import Callback


class OwnStep(Trainer):
    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        self.optimizer.zero_grad()
        loss = model(**inputs)["loss"]
        loss.backward()
        self.optimizer.step()
        return {"step_loss": loss.detach()}


class CountBatches(Callback):
    def __init__(self) -> None:
        self.num_batches = 0

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        self.num_batches += 1


def train(job: Job, variant: str) -> None:
    job.is_compiled = variant == "graph"
    config = TrainingConfig(
        output_dir=job.folder,
        num_epochs=1,
        batch_size=job.batch,
        gradient_accumulation_steps=job.accumulation,
        mixed_precision="bf16" if job.precision == "bf16" else None,
        float32_matmul_precision="medium" if job.precision == "medium" else None,
        metrics=["Accuracy"] if job.own_step else [],
        lr_scheduler_type=None,  # as the plain loop
        save_steps=max(1, job.steps // 4) if job.features else job.stop_at or None,
        max_steps=job.stop_at or None,
        resume_from_checkpoint=job.resume or None,
        device_str="cpu" if job.device == "cpu" else "cuda:0",
        graph=variant == "graph",
        **({} if variant == "passed" else {"optimizer": "adam", "learning_rate": LEARNING_RATE}),
        **({"tensorboard": None} if variant == "quiet" else {}),
        **({"log_steps": job.log_every} | job.settings),
    )
    model: Any = job.net() if job.data == "tensors" else job.model_with_loss()
    dataset, collator = data_of(job)
    trainer_class = OwnStep if job.own_step else Trainer
    given = {"optimizer": job.optimizer(model.parameters())} if variant == "passed" else {}
    trainer = trainer_class(model, config, train_dataset=dataset, data_collator=collator, **given)
    if job.own_step:
        trainer.add_callback(CountBatches())
    add_hooks(trainer, job)
    trainer.train()
