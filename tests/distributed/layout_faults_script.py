"""A training under a layout, of which the last process fails in the iteration ``AT``: ``FOLDER HOW LAYOUT``.

``HOW``: "raise", "hang" or "kill" in the forward pass of its last block; "data" and "hook": its data set or a hook
raises. ``LAYOUT``: settings of ``TrainingConfig`` as JSON.
"""

import json
import os
import signal
import sys
import time
from typing import Any

from torch import Tensor

from tests.distributed.layout_runs import Texts, build_language
from trainwright import Trainer, TrainingConfig
from trainwright.events import get_event_storage, has_event_storage
from trainwright.hooks import HookBase

AT = 6
IS_LAST = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
folder, how, layout = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])


def fail(kind: str) -> None:
    if not IS_LAST or how != kind or not has_event_storage() or get_event_storage().iter != AT - 1:
        return
    print(f"failing at {time.time()}", flush=True)
    if how == "hang":
        time.sleep(1000)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the last process fails")


class FailingTexts(Texts):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        fail("data")
        return super().__getitem__(index)


class FailingHook(HookBase):
    def after_step(self) -> None:
        fail("hook")


def in_forward(*_: Any) -> None:
    for kind in ("raise", "hang", "kill"):
        fail(kind)


model: Any = build_language(plain=True)
model.blocks[-1].register_forward_pre_hook(in_forward)
config = TrainingConfig(
    output_dir=folder, batch_size=2, gradient_accumulation_steps=2, num_epochs=1, device_str="cpu", tensorboard=None,
    num_dataloader_workers=0, eval_strategy="no", hang_timeout_s=3, **layout,
)  # fmt: skip
trainer = Trainer(model, config, train_dataset=FailingTexts(400))
trainer.register_hooks([FailingHook()])
trainer.train()
