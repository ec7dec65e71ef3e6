"""If a private part of torch changes, the training completes with the public API and the same weights."""

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests._torch_compat.conftest import CHANGES, Trained, change_torch, changed
from trainwright._torch_compat import (
    batch_collate,
    batch_tree,
    fused_update,
    grad_mode,
    optimizer_import,
    run_backward,
    schedule_step,
)
from trainwright._torch_compat.probing import check_close, is_usable


def test_a_training_on_todays_torch_takes_no_public_way(lines_of_training: Trained) -> None:
    assert lines_of_training() == []
    assert lines_of_training(optimizer="rmsprop") == []


@pytest.mark.parametrize("change", CHANGES)
def test_the_backward_call(change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained) -> None:
    def half(tensors: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        return original(tensors, [0.5 * gradient for gradient in gradients], *args, **kwargs)

    original: Any = torch.autograd.graph._engine_run_backward
    change_torch(monkeypatch, run_backward, "autograd.graph._engine_run_backward", change, half)
    (line,) = lines_of_training()
    assert "using the public API for the backward pass" in line


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("name", "kernel"),
    [("adam", "_fused_adam_"), ("adamw", "_fused_adamw_"), ("sgd", "_fused_sgd_"), ("adagrad", "_fused_adagrad_")],
)
def test_the_fused_kernels(
    name: str, kernel: str, change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained
) -> None:
    change_torch(monkeypatch, fused_update, kernel, change, lambda *args, **kwargs: None)
    (line,) = lines_of_training(optimizer=name)
    assert "using the public API for the steps of" in line


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_the_lists_that_an_optimizer_makes(
    kind: Any, change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained
) -> None:
    def empty(*args: Any) -> None:
        """Fills no list."""

    monkeypatch.setattr(kind, "_init_group", changed(kind._init_group, change, empty))
    lines = lines_of_training(optimizer=kind.__name__.lower())
    # Without a list of parameters there is nothing that a kernel could be called for: the step is torch's own.
    assert len(lines) == (change != "other result")


@pytest.mark.parametrize("name", ["_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"])
def test_the_hooks_of_an_optimizer(name: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained) -> None:
    def missing(optimizer: Optimizer) -> Any:
        raise AttributeError(name)

    monkeypatch.setattr(fused_update, "step_hooks", missing)
    (line,) = lines_of_training()
    assert "using the public API for the steps of Adam" in line


@pytest.mark.parametrize("change", CHANGES)
def test_the_gradient_mode(change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained) -> None:
    change_torch(monkeypatch, grad_mode, "_C._set_grad_enabled", change, lambda mode: None)
    (line,) = lines_of_training()
    assert "using the public API for the gradient mode" in line


@pytest.mark.parametrize("change", CHANGES)
def test_the_step_of_an_optimizer_without_the_compiler(
    change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained
) -> None:
    monkeypatch.setattr(optimizer_import, "_COMPILER", "nothing.has.imported.it")
    for kind in (torch.optim.SGD, torch.optim.RMSprop):
        guarded: Any = kind.step.__wrapped__  # type: ignore[attr-defined]
        if change == "missing":
            monkeypatch.delattr(guarded, "__wrapped__")
        else:
            monkeypatch.setattr(guarded, "__wrapped__", changed(guarded.__wrapped__, change, lambda self: None))
    lines = lines_of_training(optimizer="rmsprop")
    # Where torch does not wrap its steps there is nothing to leave out, and nothing to say.
    assert len(lines) == (change != "missing")


@pytest.mark.parametrize("change", ["other result", "error"])
def test_how_torch_keeps_the_guarded_form_of_a_method(
    change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained
) -> None:
    def other(name: str) -> Any:
        if change == "error":
            raise AttributeError("a method has no attributes")
        return lambda *args, **kwargs: None

    monkeypatch.setattr(optimizer_import, "_COMPILER", "nothing.has.imported.it")
    monkeypatch.setattr(optimizer_import, "_unguarded", other)
    if change == "other result":  # what is put there is called in place of the method
        monkeypatch.setattr(optimizer_import, "_unguarded_methods", _methods_that_do_nothing)
    (line,) = lines_of_training(optimizer="rmsprop")
    assert "using the public API for optimizers without torch's compiler" in line


def _methods_that_do_nothing() -> Any:
    patch = pytest.MonkeyPatch.context()
    monkeypatch = patch.__enter__()
    monkeypatch.setattr(Optimizer, "zero_grad", lambda self, set_to_none=True: None)
    return patch


@pytest.mark.parametrize("name", ["_step_count", "_last_lr"])
def test_where_a_schedule_keeps_its_state(
    name: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained
) -> None:
    kind: Any = torch.optim.lr_scheduler.LambdaLR
    original = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        vars(self)[f"other{name}"] = vars(self).pop(name)  # as if torch called it by another name

    def to_other(self: Any, key: str, value: Any) -> None:
        vars(self)[f"other{key}" if key == name and f"other{name}" in vars(self) else key] = value

    def from_other(self: Any, key: str) -> Any:
        if key == name:
            return vars(self)[f"other{name}"]
        raise AttributeError(key)

    def only_torch(step: Any) -> Any:
        def checked(scheduler: Any) -> bool:
            if f"other{name}" in vars(scheduler):
                raise AttributeError(name)
            return bool(step(scheduler))

        return checked

    monkeypatch.setattr(kind, "__init__", init)
    monkeypatch.setattr(kind, "__setattr__", to_other, raising=False)
    monkeypatch.setattr(kind, "__getattr__", from_other, raising=False)
    monkeypatch.setattr(schedule_step, "step_lambda", only_torch(schedule_step.step_lambda))
    (line,) = lines_of_training(warmup_steps=2)
    assert "using the public API for the step of a learning rate schedule" in line


@pytest.mark.parametrize("change", CHANGES)
def test_batches_of_plain_values(change: str, monkeypatch: pytest.MonkeyPatch, lines_of_training: Trained) -> None:
    change_torch(
        monkeypatch,
        batch_collate,
        "utils.data._utils.collate.collate",
        change,
        lambda values, collate_fn_map: torch.zeros(2),
    )
    (line,) = lines_of_training()
    assert "using the public API for batches of plain values" in line


@pytest.mark.parametrize("change", CHANGES)
def test_pinned_memory(change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Pinned:
        def pin_memory(self) -> str:
            return "pinned"

    caplog.set_level("INFO", logger="trainwright")
    change_torch(monkeypatch, batch_collate, "utils.data._utils.pin_memory.pin_memory", change, lambda batch: None)
    pin = batch_collate.pin_memory()
    assert pin({"a": Pinned(), "b": [Pinned(), 1], "c": (Pinned(),)}) == {
        "a": "pinned",
        "b": ["pinned", 1],
        "c": ("pinned",),
    }
    assert len(caplog.records) == 1


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["tree_flatten", "tree_unflatten"])
def test_nested_batches(
    name: str, change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="trainwright")
    change_torch(monkeypatch, batch_tree, f"utils._pytree.{name}", change, lambda *args: ([], None))
    batch = {"a": (1, 2)}
    leaves, structure = batch_tree.flatten(batch)
    assert leaves == [batch]
    assert batch_tree.unflatten(leaves, structure) == batch
    assert len(caplog.records) == 1


def test_a_probe_that_fails_is_one_line_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    def probe() -> None:
        raise ValueError("first line\nsecond line")

    caplog.set_level("INFO", logger="trainwright")
    assert not is_usable("something", probe)
    assert [record.getMessage() for record in caplog.records] == [
        f"torch {torch.__version__}: using the public API for something (ValueError: first line)."
    ]


def test_numbers_are_close_up_to_rounding() -> None:
    check_close("it", [1.0, 2.0], [1.000001, 2.0])
    for found in ([1.0, 2.1], [1.0], [1.0, float("nan")]):
        with pytest.raises((ArithmeticError, ValueError)):
            check_close("it", found, [1.0, 2.0])
