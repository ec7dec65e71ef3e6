"""Started by the tests, alone or on several ranks: trains by the Python API as its one argument (JSON) says."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from objects_project import Model, Points
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from trainwright import Trainer, TrainingConfig
from trainwright.hooks import Callback, HookBase
from trainwright.parallel import get_rank, get_world_size

SAID = json.loads(sys.argv[1])
OUT = Path(SAID["out"])
SEEN = OUT.with_name(f"{OUT.name}-seen{SAID.get('part', '')}")


class OwnTrainer(Trainer):
    """Notes which samples each step takes, and what ``train_step`` is given."""

    calls_plain_model = SAID.get("calls_plain_model", False)

    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        with open(SEEN / f"rank{get_rank()}.jsonl", "a") as file:
            kind = DistributedDataParallel if isinstance(model, DistributedDataParallel) else type(model)
            file.write(json.dumps([self.iter, inputs["number"].tolist(), kind.__name__]) + "\n")
        if "own_step" not in SAID:
            return super().train_step(model, inputs)
        loss = self.compute_loss(model, inputs)
        if SAID["own_step"] == "helped":
            self.backward(loss)
            self.step(self.optimizer)
        else:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"step_loss": loss.detach()}

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return super().compute_loss(self.model if self.calls_plain_model else model, inputs)


class Freeze(Callback):
    """A layer is frozen, but not in the second epoch."""

    def on_epoch_begin(self, epochs: int, logs: Any) -> None:
        self.model.body[0].requires_grad_(epochs == 2)


class KillAt(HookBase):
    def after_step(self) -> None:
        if self.trainer.iter == SAID["kill_at"]:
            self.trainer.checkpointer.wait(alone=True)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    SEEN.mkdir(parents=True, exist_ok=True)
    accelerator = None
    if "accelerator" in SAID:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, **SAID["accelerator"])
    torch.manual_seed(int(os.environ.get("RANK", 0)))  # weights of its own on each rank: those of rank 0 count
    model = Model(**SAID.get("model", {}))
    config = TrainingConfig(**{"output_dir": str(OUT), "progress_bar": False, "log_steps": 1, **SAID["config"]})
    data, given = Points(SAID.get("samples", 42), 0), {}
    if SAID.get("given_loader"):
        # The trainer initializes the process group, so the sampler takes the rank from the launcher.
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        sampler = DistributedSampler(data, size, rank, shuffle=False, drop_last=True)
        given["train_dataloader"] = DataLoader(data, batch_size=config.batch_size, sampler=sampler)
        given["eval_dataloader"] = DataLoader(Points(19, 1), batch_size=4)
    trainer = OwnTrainer(
        model, config, None if given else data, None if given else Points(19, 1), accelerator=accelerator,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), **given,
    )  # fmt: skip
    if SAID.get("freeze"):
        trainer.add_callback(Freeze())
    if "kill_at" in SAID:
        trainer.register_hooks([KillAt()])
    before = trainer.evaluate()
    trainer.train()
    results = trainer.evaluate()
    found = {
        "before": before,
        "results": results,
        "last": trainer.last_eval_results,
        "model": type(trainer.model).__name__,
        "wrapped": type(trainer.run.placement.model).__name__,
        "world_size": get_world_size(),
        "accelerate": "accelerate" in sys.modules,
        "consumed": trainer.consumed_samples,
        "predicted": trainer.predict({"inputs": data.inputs[:2], "labels": data.labels[:2]})["logits"].tolist(),
        "mean_weight": sum(p.double().sum().item() for p in trainer.model.parameters()),
    }
    trainer.save(OUT / "saved")
    (SEEN / f"found{get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
