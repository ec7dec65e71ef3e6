"""Graph mode: what somebody changes between steps, in optimizer, parameters or batches, acts as it does eagerly."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.compiled.test_graph_trainer import Event, Net, Run, adamw, batches, captures, has_compiler, refusals
from trainwright.engine.compiled.capture import layout_of

Optimizer = torch.optim.Optimizer
CHANGE_AT, UPDATES = 10, 24


class Small(nn.Module):
    """Two layers of one shape: their states can change places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.second(torch.tanh(self.first(inputs))), labels)}


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def plain(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=False)


def two_groups(parameters: Any) -> Optimizer:
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": others, "lr": 0.1}], lr=0.01, fused=True)


@pytest.fixture(autouse=True)
def _seen(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "trainwright.engine")
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # megabytes, where somebody listens


def both(change: Callable[[Any, Any], Any] | None = None, **settings: Any) -> tuple[Run, Run]:
    """An eager run and one of programs, with the same change after a step; their losses and weights are the same."""
    if change is not None:
        at = {CHANGE_AT: lambda trainer: change(trainer._plain_model, trainer.optimizer)}
        settings["hooks"] = lambda optimizer: [Event(at)]
    settings = {"net": Small, "updates": UPDATES, **settings}
    eager, graph = Run(None, **settings), Run("aot_eager", **settings)
    torch.testing.assert_close(graph.values(), eager.values(), rtol=1e-5, atol=1e-5)
    for left, right in zip(graph.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    if change is not None:
        undisturbed = Run(None, **{**settings, "hooks": lambda optimizer: []})
        assert (undisturbed.values() - eager.values()).abs().max() > 1e-4  # it did matter
    return eager, graph


# States of the optimizer.


def swap(owner: Any, one: Any, other: Any) -> None:
    owner[one], owner[other] = owner[other], owner[one]


def new_dictionary(_: Any, optimizer: Any) -> None:
    optimizer.state = type(optimizer.state)(dict)


def swapped_inside(model: Any, optimizer: Any) -> None:
    swap(optimizer.state, model.first.weight, model.second.weight)


def other_owners(model: Any, optimizer: Any) -> None:
    """The same states in the same order, of parameters that have changed places."""
    first, second = model.first.weight, model.second.weight
    states = {{first: second, second: first}.get(p, p): state for p, state in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(states)


STATES: dict[str, Callable[[Any, Any], Any]] = {
    "cleared": lambda _, optimizer: optimizer.state.clear(),
    "one-deleted": lambda model, optimizer: optimizer.state.pop(model.first.weight),
    "another-dictionary": new_dictionary,
    "swapped": swapped_inside,
    "of-other-owners": other_owners,
}


@pytest.mark.parametrize("optimizer", [adamw, sgd, plain], ids=["adamw", "sgd", "not fused"])
@pytest.mark.parametrize("change", STATES)
def test_states_that_are_others_are_those_of_the_next_step(
    change: str, optimizer: Callable[[Any], Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    if change == "one-deleted" and optimizer is sgd:
        pytest.skip("torch's fused SGD takes all momenta or none")
    eager, graph = both(STATES[change], optimizer=optimizer)
    theirs, ours = eager.optimizer.state_dict()["state"], graph.optimizer.state_dict()["state"]
    for key, state in theirs.items():
        assert all(torch.allclose(ours[key][name], value, rtol=1e-3, atol=1e-4) for name, value in state.items())
    assert len(captures(caplog)) == 1  # the program works on those that torch has made
    assert not refusals(caplog)


def test_a_reset_within_a_window_and_again_later() -> None:
    at = dict.fromkeys((10, 11, 17), lambda trainer: trainer.optimizer.state.clear())
    both(accumulation=3, hooks=lambda optimizer: [Event(at)])
    both(hooks=lambda optimizer: [Event(at)])


def test_states_of_other_strides(caplog: pytest.LogCaptureFixture) -> None:
    def change(model: Any, optimizer: Any) -> None:
        state = optimizer.state[model.first.weight]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].mul(0.5).t().contiguous().t()

    both(change, optimizer=plain)
    assert len(captures(caplog)) == 2


def test_parameters_that_change_groups(caplog: pytest.LogCaptureFixture) -> None:
    def change(_: Any, optimizer: Any) -> None:
        first, second = (group["params"] for group in optimizer.param_groups)
        first[0], second[1] = second[1], first[0]

    both(change, optimizer=two_groups)
    assert len(captures(caplog)) == 2


# What is put around a step.


def lowered(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.clamp_(-0.2, 0.2)


def halve(parameter: Any) -> None:
    parameter.grad.mul_(0.0)


HOOKS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "tensor": (lambda model, _: model.first.weight.register_hook(lambda gradient: gradient * 0), "a parameter has a"),
    "accumulated": (
        lambda model, _: model.second.bias.register_post_accumulate_grad_hook(halve),
        "a parameter has a hook on its gradient",
    ),
    "before": (lambda _, optimizer: optimizer.register_step_pre_hook(lowered), "has hooks around its step"),
    "after": (lambda _, optimizer: optimizer.register_step_post_hook(lowered), "has hooks around its step"),
    "step": (lambda _, optimizer: setattr(optimizer, "step", lambda *a: None), "has been replaced"),
}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_come_later_end_the_programs(name: str, accumulation: int, caplog: pytest.LogCaptureFixture) -> None:
    change, why = HOOKS[name]
    both(change, accumulation=accumulation)
    assert len(captures(caplog)) == 1
    assert len(refusals(caplog)) == 1
    assert why in refusals(caplog)[0]


def test_a_hook_on_a_parameter_from_the_beginning(caplog: pytest.LogCaptureFixture) -> None:
    def net() -> nn.Module:
        model = Small()
        model.first.weight.register_hook(lambda gradient: gradient * 0)
        return model

    _, graph = both(net=net)
    assert not captures(caplog)
    assert "a hook on its gradient" in refusals(caplog)[0]
    assert torch.equal(graph.model.first.weight * 0, torch.zeros(6, 6))


def test_a_hook_that_has_been_removed_is_none(caplog: pytest.LogCaptureFixture) -> None:
    def net() -> nn.Module:
        model = Small()
        model.first.weight.register_hook(lambda gradient: gradient * 0).remove()
        return model

    both(net=net)
    assert len(captures(caplog)) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_put_in_place_of_the_classs(when: str, caplog: pytest.LogCaptureFixture) -> None:
    """By a test, for instance: with mock.patch."""
    patch = mock.patch.object(torch.optim.AdamW, "step")
    at: dict[int, Any] = {CHANGE_AT: lambda trainer: patch.start()} if when == "after" else {}
    if when == "before":
        patch.start()
    try:
        run = Run("aot_eager", net=Small, hooks=lambda optimizer: [Event(at)], updates=UPDATES)
        assert torch.optim.AdamW.step.call_count == (UPDATES if when == "before" else UPDATES - CHANGE_AT - 1)  # type: ignore[attr-defined]
    finally:
        patch.stop()
    assert "has been replaced" in refusals(caplog)[0]
    assert run.trainer.iter == UPDATES


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_gradient_that_is_there_is_added_to(accumulation: int, caplog: pytest.LogCaptureFixture) -> None:
    def change(model: Any, _: Any) -> None:
        model.first.weight.grad = torch.ones(6, 6)

    both(change, accumulation=accumulation)
    assert len(captures(caplog)) == 1
    assert not refusals(caplog)


# Batches.


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(
        self, inputs: Tensor, labels: Tensor, task: Any = None, mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        losses = F.cross_entropy(self.layer(inputs), labels, reduction="none")
        losses = losses if mask is None else losses * mask
        return {"loss": losses.mean() * (3.0 if task is True else 1.0)}


@pytest.mark.parametrize("fixed", [{"task": "a"}, {}], ids=["beside a text", "beside tensors"])
def test_a_field_that_comes_later_is_looked_at(fixed: dict[str, Any]) -> None:
    mask = torch.full((8,), 0.1)
    data = [{**batch, **fixed, **({"mask": mask} if index > 3 else {})} for index, batch in enumerate(batches(8))]
    eager, _ = both(net=Optional, data=data)
    assert eager.values()[4:8].max() < eager.values()[:4].min()


def test_a_field_that_comes_later_beside_one_that_nobody_looks_at() -> None:
    first = {"inputs": torch.ones(2), "id": ["a", "b"]}
    layout = layout_of(first, ["inputs", "mask"])
    assert layout.take({**first, "id": ["c", "d"]}) == [first["inputs"]]
    assert layout.take({"inputs": first["inputs"]}) == [first["inputs"]]
    assert layout.take({**first, "mask": torch.ones(2)}) is None


@pytest.mark.parametrize("order", [(1, True), (True, 1), (True, 1.0)])
def test_numbers_that_are_equal_and_of_other_types(order: tuple[Any, Any]) -> None:
    data = [{**batch, "task": order[index > 3]} for index, batch in enumerate(batches(8))]
    both(net=Optional, data=data)


# A class that is written to.


class CountsByClass(Net):
    num_calls = 0

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        type(self).num_calls += 1
        return super().forward(inputs, labels)


def test_a_counter_of_the_class_stays_eager(caplog: pytest.LogCaptureFixture) -> None:
    CountsByClass.num_calls = 0
    both(net=CountsByClass)
    assert CountsByClass.num_calls == 2 * UPDATES
    assert len(refusals(caplog)) == 1
    assert "writes to type(graph.model)" in refusals(caplog)[0]


class Normalizes(Small):
    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.first.weight.data = F.normalize(self.first.weight.data)
        return super().forward(inputs, labels)


def test_data_put_into_a_parameter_stay_eager(caplog: pytest.LogCaptureFixture) -> None:
    both(net=Normalizes)
    assert "replaces the data of a tensor" in refusals(caplog)[0]


# The folder of the compiler.

NO_FOLDER = """
import logging, sys, torch
from torch import nn
from torch.utils.data import TensorDataset
from trainwright import Trainer, TrainingConfig

logging.basicConfig(level="INFO")
data = TensorDataset(torch.randn(32, 6), torch.arange(32) % 4)
config = TrainingConfig(
    output_dir=sys.argv[1], graph=True, loss="CrossEntropyLoss", batch_size=8, num_epochs=2, eval_strategy="no",
    save_enabled=False, progress_bar=False, metrics=None,
)
for _ in range(2):
    trainer = Trainer(nn.Linear(6, 4), config, train_dataset=data)
    trainer.train()
    assert trainer.iter == 8
"""


def test_a_folder_that_cannot_be_used_leaves_the_steps_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(blocked))
    done = subprocess.run(
        [sys.executable, "-c", NO_FOLDER, str(tmp_path / "run")],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "stay eager" in line]
    assert told
    assert "torch's compiler cannot be imported (FileExistsError" in told[0]


@pytest.mark.exhaustive(every=2)
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("damage", ["text", "half"])
def test_a_program_on_disk_that_cannot_be_read_is_made_anew(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    first = Run("inductor", net=Small, updates=5)
    (kept,) = (tmp_path / "trainwright").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(b"not a program" if damage == "text" else whole[: len(whole) // 2])
    second = Run("inductor", net=Small, updates=5)
    third = Run("inductor", net=Small, updates=5)
    assert caplog.text.count("cannot be read and is compiled again") == 1
    assert ["loaded from disk" in line for line in captures(caplog)] == [False, False, True]
    assert first.values().tolist() == second.values().tolist() == third.values().tolist()
    assert [*(tmp_path / "trainwright").iterdir()] == [kept]
