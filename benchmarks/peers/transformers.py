"""The Trainer of transformers. It receives the same Adam; other settings are defaults."""

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.job import Job


class Log(TrainerCallback):
    def __init__(self, job: Job) -> None:
        self.job = job

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.job.log(state.global_step, float(logs["loss"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.job.stop_at:
            control.should_save = control.should_training_stop = True


def train(job: Job, variant: str) -> None:
    updates = job.steps // job.accumulation
    arguments = TrainingArguments(
        output_dir=job.folder,
        per_device_train_batch_size=job.batch,
        num_train_epochs=1,
        gradient_accumulation_steps=job.accumulation,
        bf16=job.precision == "bf16",
        logging_steps=job.log_every,
        report_to="none",
        disable_tqdm=not job.features,
        save_strategy="steps" if job.features else "no",
        save_steps=max(1, updates // 4),
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=job.device == "cpu",
        dataloader_pin_memory=job.device != "cpu",
        remove_unused_columns=False,
        torch_compile=variant == "compile",
    )
    model = job.model_with_loss()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=job.dataset(),
        optimizers=(job.optimizer(model.parameters(), **_fused(job)), None),
        callbacks=[Log(job)],
    )
    found = sorted(Path(job.resume).glob("checkpoint-*")) if job.resume else []
    trainer.train(resume_from_checkpoint=str(found[-1]) if found else None)


def _fused(job: Job) -> dict[str, bool]:
    return {} if job.device == "cpu" else {"fused": True}
