"""Keras on torch: the MLP with Keras layers, trained on the same loader."""

from pathlib import Path
from typing import Any

import keras
from torch.utils.data import default_collate

from benchmarks.job import LEARNING_RATE, Job
from benchmarks.models import MLP_SIZES


class Log(keras.callbacks.Callback):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.step = job, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        if self.step % self.job.log_every == 0:
            self.job.log(self.step, float(logs["loss"]))


def train(job: Job, variant: str) -> None:
    if job.model != "mlp":
        raise SystemExit("keras: only the MLP is written in its layers")
    if job.precision == "bf16":
        keras.config.set_dtype_policy("mixed_bfloat16")
    features, hidden, classes = MLP_SIZES
    layers = [keras.layers.Dense(hidden, activation="relu"), keras.layers.Dense(classes)]
    model = keras.Sequential([keras.Input((features,)), *layers])
    accumulation = job.accumulation if job.accumulation > 1 else None
    model.compile(
        optimizer=keras.optimizers.Adam(LEARNING_RATE, gradient_accumulation_steps=accumulation),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    callbacks = [Log(job)]
    if job.features:
        callbacks.append(keras.callbacks.ModelCheckpoint(Path(job.folder) / "last.keras"))
    loader = job.loader(collate_fn=_as_pair)
    model.fit(loader, epochs=1, verbose=1 if job.features else 0, callbacks=callbacks)


def _as_pair(samples: Any) -> Any:
    batch = default_collate(samples)
    return batch["x"], batch["labels"]
