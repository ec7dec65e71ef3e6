"""The first save of a run is rehearsed: what a resume does not bring back is one warning that names the object."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from tests.toys import Classifier, file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.checkpoint import Checkpointer
from trainwright.data import build_nlp_train_loader
from trainwright.hooks import Callback


class Slow(torch.optim.SGD):
    """Lookahead: slow weights and a counter in attributes, which torch's ``state_dict`` does not hold."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.counter, self.memory = 0, Memory()
        self.memory.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.counter += 1
        for slow, fast in zip(self.memory.slow, self.param_groups[0]["params"], strict=True):
            fast.copy_(slow.lerp_(fast, 0.5))


class Memory:
    slow: list[Tensor]


def of_bitsandbytes(model: nn.Module) -> torch.optim.Optimizer:
    """Its optimizers have a flag that the first step of each process sets."""

    class Flagged(torch.optim.SGD):
        initialized = False
        __module__ = "bitsandbytes.optim.sgd"

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.initialized = True
            super().step()

    optimizer = Flagged(model.parameters(), lr=0.1)
    optimizer.initialized = False
    return optimizer


class SlowWithState(Slow):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.memory.slow, "counter": self.counter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = dict(state)
        self.counter, self.memory.slow = own.pop("counter"), [one.clone() for one in own.pop("slow")]
        super().load_state_dict(own)


class Forgetting(torch.optim.Adam):
    """Its load loses a part of its state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for values in self.state.values():
            values["exp_avg"].zero_()


class Casting(torch.optim.Adam):
    """Its load changes a type and a setting."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.param_groups[0]["lr"] = 1.0


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


class Uneven(torch.optim.lr_scheduler.StepLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "last_epoch": 0})


class Add(Callback):
    def on_epoch_begin(self, epochs: int, logs: Any) -> None:
        if epochs == 2:
            self.optimizer.add_param_group({"params": [*self.model.body[0].parameters()]})


def body(kind: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: kind(model.parameters(), lr=0.01)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [one for one in messages if "does not come back" in one or "next sample" in one]


@pytest.mark.parametrize(
    ("optimizer", "schedule", "callback", "names"),
    [
        (body(torch.optim.SGD), None, Callback, []),
        (body(torch.optim.AdamW), cosine, Callback, []),
        (body(SlowWithState), cosine, Callback, []),
        (of_bitsandbytes, None, Callback, []),
        (body(Slow), None, Callback, ["optimizer (Slow)", "counter, memory"]),
        (body(Forgetting), None, Callback, ["optimizer (Forgetting)", "exp_avg"]),
        (body(Casting), None, Callback, ["param_groups[0].lr is 0.01, restored 1.0"]),
        (body(torch.optim.Adam), lambda one: Uneven(one, 3), Callback, ["lr_scheduler (Uneven): last_epoch is 4"]),
        (lambda model: torch.optim.SGD(model.body[-1].parameters(), lr=0.1), None, Add, ["1 parameter groups with 2"]),
    ],
    ids=[
        "SGD",
        "AdamW",
        "saved attributes",
        "of bitsandbytes",
        "attributes",
        "forgotten",
        "setting",
        "schedule",
        "added group",
    ],
)
def test_what_does_not_come_back_is_named_at_the_first_save(
    optimizer: Any, schedule: Any, callback: Any, names: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trained(folder: str, **saving: Any) -> nn.Module:
        torch.manual_seed(0)
        model = Classifier((4, 8, 2), dropout=0.2, seed=0)
        config = quiet(tmp_path / folder, num_epochs=2, batch_size=4, metrics=None, lr_scheduling_steps=1, **saving)
        mine = optimizer(model)
        with_schedule = {} if schedule is None else {"lr_scheduler": schedule(mine)}
        Trainer(model, config, points(32), optimizer=mine, callbacks=[callback()], **with_schedule).train()
        return model

    saving = trained("saving", save_steps=4)
    found = warnings_of(caplog)
    assert len(found) == bool(names)
    assert all(name in found[0] for name in names)
    silent = trained("silent", save_enabled=False)  # the rehearsal changes no number
    assert all(torch.equal(a, b) for a, b in zip(saving.parameters(), silent.parameters(), strict=True))


class Counting(IterableDataset[Any]):
    def __init__(self) -> None:
        self.start = self.done = 0

    def __iter__(self) -> Iterator[Any]:
        self.done, self.start = self.start, 0
        while self.done < 60:
            self.done += 1
            yield {"inputs": torch.full((4,), self.done / 60) + 0.1 * torch.randn(4), "labels": self.done % 2}

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["done"]


class Buffered(Counting):
    """It shuffles in a buffer that is not part of its state."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 10:
                yield buffer.pop(3)
        yield from buffer


@pytest.mark.parametrize("kind", [Counting, Buffered])
@pytest.mark.parametrize("api", [Trainer, DefaultTrainer])
def test_a_stream_whose_state_lacks_a_buffer_is_named(
    kind: Any, api: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if api is Trainer:
        config = quiet(tmp_path, max_steps=12, batch_size=4, metrics=None, save_steps=4)
        Trainer(Classifier((4, 2), seed=0), config, kind()).train()
    else:
        settings = {"train_iter": 12, "train_micro_batch_size": 4, "checkpointer": {"period": 4}}
        cfg = file_config(tmp_path, lambda: Classifier((4, 2), seed=0, is_scored=False), points, **settings)
        cfg.dataloader.train = LazyCall(build_nlp_train_loader)(dataset=LazyCall(kind)(), num_workers=0)
        DefaultTrainer(cfg).train()
    found = warnings_of(caplog)
    assert len(found) == (kind is Buffered)
    assert all("Buffered" in one for one in found)


class Growing(nn.Module):
    """A buffer that gets its shape in training, without a load of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(0))


def test_a_weight_that_a_new_model_cannot_load_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = Growing()
    checkpointer = Checkpointer(model, tmp_path, asynchronous=False)
    checkpointer.rehearse()
    model.seen = torch.ones(3)
    checkpointer.save("a")
    (message,) = warnings_of(caplog)
    assert "model: seen was float32 (0,) at the start and is float32 (3,)" in message


def test_check_names_what_a_resume_loses(tmp_path: Path) -> None:
    model = Classifier((4, 8, 2), seed=0)
    config = quiet(tmp_path, num_epochs=2, batch_size=4, metrics=None)
    trainer = Trainer(model, config, points(32), optimizer=Slow(model.parameters(), lr=0.01))
    (finding,) = trainer.check(only=["resume"]).findings
    assert finding.result == "problem"
    assert "counter, memory" in finding.evidence
