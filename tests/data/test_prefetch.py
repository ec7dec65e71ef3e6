"""One batch is read ahead, and nobody notices: order, content, errors and where a run goes on stay as they are."""

from collections import UserDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from tests.toys import Classifier, Samples, file_config
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig
from trainwright.base.batch import rebuilt
from trainwright.data import DistTensorData, Instance
from trainwright.data import prefetch as ahead
from trainwright.data.prefetch import ahead as read_ahead
from trainwright.hooks import CallbackHook

CPU = torch.device("cpu")


class FakeStream:
    """The CPU as a device with streams: a batch is right only once it was handed over."""

    log: ClassVar[list[str]] = []

    def __init__(self, device: torch.device) -> None: ...

    def copied(self, batch: Any) -> tuple[Any, list[Tensor]]:
        FakeStream.log.append("copy")
        return batch, []

    def wait_for(self, tensors: list[Tensor]) -> None:
        FakeStream.log.append("wait")


@pytest.fixture(autouse=True)
def _empty_log() -> None:
    FakeStream.log.clear()


@pytest.fixture
def _with_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_WITH_STREAMS", ("cpu",))
    monkeypatch.setattr(ahead, "SideStream", FakeStream)


def counted(log: list[int], count: int, error: Exception | None = None) -> Iterator[int]:
    for number in range(count):
        log.append(number)
        yield number
    if error is not None:
        raise error


def test_where_there_are_no_streams_nothing_is_read_ahead() -> None:
    log: list[int] = []
    batches = read_ahead(counted(log, 3), CPU)
    assert next(batches) == 0
    assert log == [0]
    assert [*batches] == [1, 2]


@pytest.mark.usefixtures("_with_streams")
def test_the_next_batch_is_under_way_when_one_is_given() -> None:
    log: list[int] = []
    batches = read_ahead(counted(log, 4), CPU)
    for number in range(3):
        assert next(batches) == number
        assert log == [*range(number + 2)]
    assert [*batches] == [3]
    assert FakeStream.log == ["copy", *["wait", "copy"] * 3, "wait"]
    assert [*read_ahead([], CPU)] == []


@pytest.mark.usefixtures("_with_streams")
def test_an_error_comes_when_its_batch_is_asked_for() -> None:
    batches = read_ahead(counted([], 2, OSError("gone")), CPU)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(OSError, match="gone"):
        next(batches)
    assert [*batches] == []


class Pair(NamedTuple):
    x: Tensor
    name: str


def test_batches_keep_their_form_on_the_way_to_the_device() -> None:
    x, there = torch.ones(2, 3), torch.zeros(1, device="meta")
    labels = DistTensorData(torch.zeros(2, dtype=torch.int32), ["split_0", "split_1"], -1)
    batch = {"all": [Instance(x=x, labels=labels), (Pair(x, "a"), None)], "there": there}
    moved: list[Tensor] = []
    found = rebuilt(partial(ahead._on, torch.device("meta"), moved), batch)
    instance, (pair, nothing) = found["all"]
    assert isinstance(instance, Instance)
    assert isinstance(pair, Pair)
    assert (pair.name, nothing, found["there"] is there) == ("a", None, True)
    assert (instance.labels.sbp_list, instance.labels.placement_idx) == (["split_0", "split_1"], -1)
    assert instance.labels.tensor.dtype == torch.int32  # types are to_batch's affair
    assert [*map(id, moved)] == [*map(id, (instance.x, instance.labels.tensor, pair.x))]
    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert batch["all"][0].x is x


class Graph:
    """An object with ``to`` and ``record_stream``, as those of PyTorch Geometric."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device, non_blocking: bool = False) -> "Graph":
        return Graph(self.x.to(device))

    def record_stream(self, stream: Any) -> None: ...


def test_objects_that_record_streams_and_packed_sequences_are_copied_ahead() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved: list[Tensor] = []
    batch = UserDict(graph=Graph(torch.ones(1)), packed=packed, ids=torch.ones(1))
    found = rebuilt(partial(ahead._on, torch.device("meta"), moved), batch)
    assert found["graph"].x.device.type == found["packed"].data.device.type == found["ids"].device.type == "meta"
    assert moved[0] is found["graph"]
    assert any(part is found["packed"].data for part in moved)


def weights(trainer: Any) -> list[float]:
    return [value for p in trainer.model.parameters() for value in p.flatten().tolist()]


def model() -> Classifier:
    return Classifier((4, 8, 3), dropout=0.3, seed=0)


def noisy() -> Samples:
    return Samples(inputs=lambda index: torch.randn(4) + index, labels=lambda index: index % 3, length=22)


class StoppedError(Exception):
    pass


def objects_run(folder: Path, kind: type[Trainer] = Trainer, stop_at: int = 0, **settings: Any) -> list[float]:
    def stop(trainer: Any) -> None:
        if trainer.iter == stop_at:
            raise StoppedError

    config = TrainingConfig(
        output_dir=folder, num_epochs=3, batch_size=4, save_steps=5, progress_bar=False, lr=0.01, **settings
    )
    trainer = kind(model(), config, noisy())
    if stop_at:
        trainer.register_hooks([CallbackHook(before_step=stop)])
        with pytest.raises(StoppedError):
            trainer.train()
    else:
        trainer.train()
    return weights(trainer)


def test_a_run_that_reads_ahead_ends_where_any_does_and_goes_on_exactly(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    plain = objects_run(tmp_path / "plain")
    assert not FakeStream.log
    request.getfixturevalue("_with_streams")
    assert objects_run(tmp_path / "ahead") == plain
    assert FakeStream.log
    objects_run(tmp_path / "cut", stop_at=11)
    assert objects_run(tmp_path / "cut", resume_from_checkpoint=True) == plain


@pytest.mark.usefixtures("_with_streams")
def test_what_a_user_does_to_batches_is_not_done_ahead(tmp_path: Path) -> None:
    class Drawing(Trainer):
        def prepare_input_batch(self, batch: Any) -> Any:
            batch["inputs"] += torch.rand(())
            return super().prepare_input_batch(batch)

    whole = objects_run(tmp_path / "whole", kind=Drawing)
    objects_run(tmp_path / "cut", Drawing, 11)
    assert objects_run(tmp_path / "cut", kind=Drawing, resume_from_checkpoint=True) == whole
    assert not FakeStream.log


def config_run(folder: Path, iterations: int) -> list[float]:
    cfg = file_config(folder, model, noisy, train_iter=iterations, train_micro_batch_size=4)
    cfg.train.update({"log_period": 5, "resume": True, "checkpointer": {"period": 5}, "evaluation": {"enabled": False}})
    cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.StepLR)(step_size=100)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=True)
    trainer.train()
    return weights(trainer)


def test_so_does_one_of_config_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    plain = config_run(tmp_path / "plain", 9)
    request.getfixturevalue("_with_streams")
    assert config_run(tmp_path / "ahead", 9) == plain
    assert FakeStream.log
    config_run(tmp_path / "cut", 5)
    assert config_run(tmp_path / "cut", 9) == plain
