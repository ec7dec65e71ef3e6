"""Two processes of which one does something alone: ``python alone_script.py FOLDER HOW LAYOUT``.

``HOW``: the name of a function below; the first process calls it after iteration ``AT``, or after the training if the
name begins with "after_". "ends": the second process ends before it builds its trainer. "caught": its training fails,
and its program catches the error and trains again. "all_caught": so it is on both, and one comes late then.
``LAYOUT``: settings of ``TrainingConfig`` as JSON.
"""

import json
import os
import signal
import sys
import time
from typing import Any

import torch

from tests.distributed.layout_runs import Texts, build_language
from tests.torchrun import free_port
from trainwright import Trainer, TrainingConfig
from trainwright.hooks import Callback
from trainwright.optim import LayerFreezer
from trainwright.parallel import faults

AT = 3
if "RANK" not in os.environ:  # started without torchrun: this process is the launcher, and waits for both
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "none"}
    os.environ |= {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    if os.fork():
        os.environ |= {"RANK": "1", "LOCAL_RANK": "1"}
        if os.fork():
            os.wait()
RANK = os.environ["RANK"]
folder, how, layout = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])


def act(trainer: Trainer) -> None:
    print(f"alone at {time.time()}", flush=True)
    if how.endswith("save"):
        trainer.save(f"{folder}/own")
    elif how.endswith("evaluate"):
        trainer.evaluate()
    elif how == "barrier":
        torch.distributed.barrier()
    elif how == "freeze":
        LayerFreezer(trainer.model).by_names(["head"])
    elif how == "launcher":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    elif how == "rates":
        trainer.optimizer.param_groups[0]["lr"] *= 2


class Alone(Callback):
    calls = 0

    def on_train_batch_end(self, batch: Any, logs: Any = None) -> None:
        self.calls += 1
        if self.calls != AT:
            return
        if how.endswith("caught") and (RANK == "1" or how == "all_caught"):
            print(f"alone at {time.time()}", flush=True)
            raise ValueError("a bad sample")
        if RANK == "1" and how.startswith("raises_"):
            print(f"alone at {time.time()}", flush=True)
            if how == "raises_before_save":
                raise ValueError("a bad sample")
            trainer.evaluate_step = fail
        if how == "raises_in_evaluate":
            trainer.evaluate()
        elif how == "raises_before_save" or (RANK == "0" and not how.startswith("after_")):
            act(trainer)


def fail(*_: Any, **__: Any) -> Any:
    raise ValueError("a bad sample")


class Late(Callback):
    trainer: Any = None
    calls = 0

    def on_train_batch_end(self, batch: Any, logs: Any = None) -> None:
        self.calls += 1
        if self.calls == AT:
            if RANK == "1":
                time.sleep(7)  # the other one is waiting for it, longer than it would after a failure
            self.trainer.save(f"{folder}/own")


def build(callback: Any) -> Trainer:
    config = TrainingConfig(
        output_dir=folder, batch_size=2, gradient_accumulation_steps=1 + ("pipeline_parallel_size" in layout),
        max_steps=20, device_str="cpu", tensorboard=None, num_dataloader_workers=0, eval_strategy="no", log_steps=2,
        lr_scheduler=None, hang_timeout_s=60, **layout,
    )  # fmt: skip
    trainer = Trainer(build_language(plain=True), config, train_dataset=Texts(160), eval_dataset=Texts(8))
    trainer.add_callback(callback)
    callback.trainer = trainer
    return trainer


if how == "ends" and RANK == "1":
    print(f"alone at {time.time()}", flush=True)
    sys.exit(0)
faults._STAYS_S, faults._ENDS_ITSELF_S, faults._REPORT_S = 1.0, 1.5, 0.5  # seconds; by default several times as many
trainer = build(Alone())
try:
    trainer.train()
except ValueError:
    if not how.endswith("caught"):
        raise
    build(Late()).train()
    print("trained again", flush=True)
if how.startswith("after_") and RANK == "0":
    act(trainer)
