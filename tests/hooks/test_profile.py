"""Traces of a few iterations: which ones, where they lie, and that nothing which goes wrong with them ends a run."""

import inspect
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.toys import Samples, Squares, assert_equal_weights, file_config
from trainwright import DefaultTrainer, Trainer, TrainingConfig
from trainwright.config import ConfigError
from trainwright.config.settings import type_of_sections
from trainwright.config.validation import Profile, section_faults
from trainwright.engine import EagerTrainer, GraphBase, GraphTrainer
from trainwright.hooks import CallbackHook, ProfileHook

pytestmark = pytest.mark.filterwarnings("error")


def eager(seed: int = 0) -> EagerTrainer:
    torch.manual_seed(seed)
    net = Squares()
    batches = [{"x": torch.randn(2, 4)} for _ in range(4)]
    return EagerTrainer(net, batches, torch.optim.SGD(net.parameters(), lr=0.1))


def profiled(folder: Path, iterations: int, start: int = 0, **arguments: Any) -> EagerTrainer:
    trainer = eager()
    trainer.register_hooks([ProfileHook(folder, **arguments)])
    trainer.train(start, iterations)
    return trainer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def steps(path: Path) -> list[int]:
    """The iterations that a trace shows."""
    events = json.loads(path.read_text())["traceEvents"]
    return sorted(
        {int(found[1]) for event in events if (found := re.fullmatch(r"ProfilerStep#(\d+)", str(event["name"])))}
    )


def test_by_default_three_iterations_are_recorded_behind_the_first_twelve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        profiled(tmp_path / "profile", 30)
    assert names(tmp_path / "profile") == ["rank0.12.pt.trace.json"]
    trace = tmp_path / "profile" / "rank0.12.pt.trace.json"
    assert steps(trace) == [12, 13, 14]
    events = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert events.count("aten::addmm") == 3
    (said,) = caplog.messages
    assert said.startswith(f"Profile of iterations 13 to 15: {trace} ")
    assert re.search(r"\n +[\d.]+ [um]s +\d+ % +3  aten::addmm", said)
    assert len(said.splitlines()) == 12  # a table of ten


@pytest.mark.parametrize(
    ("start", "end", "arguments", "recorded"),
    [
        (0, 40, {"wait": 3, "warmup": 1, "active": 2, "repeat": 3, "num_rows": 0}, [[4, 5], [10, 11], [16, 17]]),
        (0, 20, {"wait": 3, "warmup": 1, "active": 1, "repeat": 0}, [[4], [9], [14], [19]]),
        (0, 10, {"wait": 0, "warmup": 1, "active": 1}, [[1]]),
        (100, 130, {"wait": 5, "warmup": 1, "active": 2}, [[106, 107]]),
    ],
    ids=["repeated", "without an end", "from the beginning", "after a resume"],
)
def test_windows(start: int, end: int, arguments: dict[str, Any], recorded: list[list[int]], tmp_path: Path) -> None:
    profiled(tmp_path, end, start=start, **arguments)
    assert sorted(steps(tmp_path / name) for name in names(tmp_path)) == recorded


def test_it_goes_on_counting_where_epochs_are_trainings_of_their_own(tmp_path: Path) -> None:
    trainer = eager()
    trainer.register_hooks([ProfileHook(tmp_path, wait=6, warmup=1, active=1)])
    for epoch in range(4):
        trainer.train(4 * epoch, 4 * epoch + 4)
    assert [steps(tmp_path / name) for name in names(tmp_path)] == [[7]]


def test_a_training_that_ends_while_it_records_leaves_what_was_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        profiled(tmp_path, 14)
    assert names(tmp_path) == ["rank0.12.pt.trace.json"]
    assert {12, 13} <= set(steps(tmp_path / "rank0.12.pt.trace.json"))
    assert "Profile of iterations 13 to 14" in caplog.text


@pytest.mark.parametrize("iterations", [3, 11])
def test_a_training_that_ends_before_says_so(iterations: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiled(tmp_path, iterations)
    assert names(tmp_path) == []
    assert "Nothing was profiled: recording starts with iteration 13" in caplog.text
    assert "wait=10" in caplog.text


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [11, 13])
def test_an_error_in_the_middle_is_the_one_that_is_raised(
    error: type[BaseException], at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(trainer: Any) -> None:
        if trainer.iter == at:
            raise error

    trainer = eager()
    trainer.register_hooks([ProfileHook(tmp_path), CallbackHook(before_step=fail)])
    with pytest.raises(error):
        trainer.train(0, 30)
    assert "Nothing was profiled" not in caplog.text  # no advice for a training that fails
    assert names(tmp_path) == (["rank0.12.pt.trace.json"] if at == 13 else [])
    profiled(tmp_path / "again", 30)  # nothing of it is left running
    assert names(tmp_path / "again") == ["rank0.12.pt.trace.json"]


def test_a_folder_that_cannot_be_written_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert profiled(tmp_path / "file" / "profile", 30).iter == 30
    assert "the trace was not written: NotADirectoryError" in caplog.text


@pytest.mark.parametrize(("moment", "call"), [("start", 1), ("step", 1), ("step", 4), ("key_averages", 1)])
def test_a_profiler_that_fails_ends_no_training(
    moment: str, call: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, inherited = [0], getattr(torch.profiler.profile, moment)

    def fail(self: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise RuntimeError("no profiler today")
        return inherited(self)

    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, moment, fail)
        assert profiled(tmp_path, 30).iter == 30
    assert caplog.text.count("no profiler today") == 1
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    assert not torch.autograd.profiler._is_profiler_enabled
    profiled(tmp_path / "again", 30)  # nothing of it is left running
    assert names(tmp_path / "again") == ["rank0.12.pt.trace.json"]


def test_the_table_is_of_the_devices_kernels_where_it_runs_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(key: str, device: str, host_us: float, device_us: float, *, is_mark: bool = False) -> SimpleNamespace:
        times = {"self_cpu_time_total": host_us, "self_device_time_total": device_us}
        return SimpleNamespace(
            key=key, count=3, device_type=SimpleNamespace(name=device), is_user_annotation=is_mark, **times
        )

    rows = [row("aten::mm", "CPU", 90, 40), row("gemm", "CUDA", 0, 30), row("copy", "CUDA", 0, 10)]
    marks = [row("my range", "CUDA", 0, 500, is_mark=True), row("ProfilerStep#12", "CUDA", 0, 500)]
    monkeypatch.setattr(torch.profiler.profile, "key_averages", lambda self: rows + marks)
    with caplog.at_level(logging.INFO):
        profiled(tmp_path, 30)
    table = caplog.messages[0].splitlines()[1:]
    assert [line.split() for line in table[1:]] == [
        ["30", "us", "75", "%", "3", "gemm"],
        ["10", "us", "25", "%", "3", "copy"],
    ]
    assert table[0].endswith("operation (on the device)")


def test_inside_a_profiler_of_the_users_own_this_one_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as own:
        assert profiled(tmp_path, 30).iter == 30
    assert any(event.name == "aten::addmm" for event in own.events())  # it has recorded until its end
    assert caplog.text.count("another profiler records in this process") == 1
    assert not names(tmp_path)


@pytest.mark.parametrize("wait", [10, 11, 13])
def test_of_two_hooks_whose_windows_overlap_one_records(
    wait: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = eager()
    trainer.register_hooks([ProfileHook(tmp_path / "a", wait=10), ProfileHook(tmp_path / "b", wait=wait)])
    trainer.train(0, 30)
    assert names(tmp_path / "a")
    assert not names(tmp_path / "b")
    assert caplog.text.count("another profiler records in this process") == 1
    profiled(tmp_path / "c", 30)  # a later training
    assert names(tmp_path / "c")


def test_options_are_torchs_and_the_weights_those_without(tmp_path: Path) -> None:
    watched = profiled(tmp_path / "all", 30, record_shapes=True, profile_memory=True, with_stack=True, with_flops=True)
    profiled(tmp_path / "none", 30)
    with_all, without = ((tmp_path / kind / "rank0.12.pt.trace.json").read_text() for kind in ("all", "none"))
    for sign in ("Input Dims", "[memory]", "test_profile.py"):
        assert sign in with_all
        assert sign not in without
    plain = eager()
    plain.train(0, 30)
    assert_equal_weights(watched.model, plain.model)


def test_other_processes_record_only_where_all_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.hooks.profile.get_rank", lambda: 1)
    profiled(tmp_path, 30)
    assert names(tmp_path) == []
    profiled(tmp_path, 30, all_ranks=True)
    assert names(tmp_path) == ["rank1.12.pt.trace.json"]


@pytest.mark.exhaustive
def test_a_compiled_step(tmp_path: Path) -> None:
    net = Squares()
    graph = GraphBase(net, torch.optim.SGD(net.parameters(), lr=0.1), backend="aot_eager")
    trainer = GraphTrainer(graph, [{"x": torch.randn(2, 4)} for _ in range(4)])
    trainer.register_hooks([ProfileHook(tmp_path)])
    trainer.train(0, 20)
    assert steps(tmp_path / "rank0.12.pt.trace.json") == [12, 13, 14]


# The settings of both APIs.

ARGUMENTS = {
    name: parameter
    for name, parameter in inspect.signature(ProfileHook).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


def test_settings_have_the_arguments_and_the_defaults_of_the_hook() -> None:
    assert set(Profile.__annotations__) == set(ARGUMENTS)
    read = TrainingConfig(profile=True).profile
    assert read == {name: ARGUMENTS[name].default for name in read}
    arguments = {name: parameter.default for name, parameter in ARGUMENTS.items()}
    assert section_faults(type_of_sections(), {"train": {"profile": arguments}}) == []


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"wiat": 1}, "profile.wiat: no such key. Did you mean 'wait'?"),
        ({"active": 0}, "profile.active: got 0"),
        ({"wait": -1}, "profile.wait: got -1"),
        ("yes", "profile: got 'yes'"),
    ],
)
def test_a_wrong_setting_is_an_error(given: Any, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(fault)):
        TrainingConfig(profile=given)
    cfg = files_config(tmp_path)
    cfg.train.profile = given
    path, _, what = fault.partition(": ")
    with pytest.raises(ConfigError, match=rf"train\.{re.escape(path)}: {re.escape(what)}"):
        DefaultTrainer(cfg)


def files_config(folder: Path) -> Any:
    return file_config(folder, Squares, lambda: Samples(x=torch.ones(64, 4)), train_iter=20, train_micro_batch_size=4)


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize(
    ("asked", "recorded"), [(True, [12, 13, 14]), ({"wait": 2, "active": 2}, [4, 5]), (None, None), (False, None)]
)
@pytest.mark.slow
def test_the_setting_of_each_api(asked: Any, recorded: list[int] | None, tmp_path: Path) -> None:
    cfg = files_config(tmp_path / "files")
    cfg.train.profile = asked
    DefaultTrainer(cfg).train()
    settings = {"output_dir": str(tmp_path / "objects"), "batch_size": 4, "num_epochs": 2, "metrics": None}
    quiet = {"early_stopping": None, "tensorboard": None, "progress_bar": False, "save_enabled": False}
    config = TrainingConfig(**settings, **quiet, device_str="cpu", profile=asked)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
    Trainer(nn.Linear(4, 3), config, train_dataset=data).train()
    for api in ("files", "objects"):
        found = [steps(path) for path in (tmp_path / api).glob("profile/*.json")]
        assert found == ([] if recorded is None else [recorded])
