"""What is recorded once and replayed: the bookkeeping, with a recorder that needs no device."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from trainwright.engine.compiled.program import Replayed


class Recorder:
    """As a CUDA graph: recording computes nothing, and each replay writes to the outputs of the recording."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, launch: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], object], Sequence[Tensor]]:
        self.recorded += 1
        outputs = [torch.zeros(())]

        def replay() -> None:
            for output, value in zip(outputs, launch(), strict=True):
                output.copy_(value)

        return replay, outputs


def add_to(inputs: list[Tensor]) -> list[Tensor]:
    batch, total = inputs
    total.add_(batch)
    return [total * 10]


def test_each_call_computes_once_with_its_own_batch_and_its_own_outputs() -> None:
    recorder, total = Recorder(), torch.zeros(())
    call = Replayed(add_to, [0], recorder)
    figures = [call([torch.tensor(float(value)), total])[0] for value in range(1, 7)]
    assert [figure.item() for figure in figures] == [10.0, 30.0, 60.0, 100.0, 150.0, 210.0]
    assert total == 21
    assert recorder.recorded == 1


def test_memory_that_has_moved_is_recorded_anew() -> None:
    recorder, total = Recorder(), torch.zeros(())
    call = Replayed(add_to, [0], recorder)
    for _ in range(5):
        call([torch.ones(()), total])
    total.data = torch.tensor(100.0)
    assert call([torch.ones(()), total])[0] == 1010
    assert recorder.recorded == 2


def test_what_cannot_be_recorded_is_called(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(launch: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    total = torch.zeros(())
    call = Replayed(add_to, [0], refuse)
    for _ in range(5):
        call([torch.ones(()), total])
    assert total == 5
    assert [record.getMessage() for record in caplog.records] == [
        "Graph mode: the launches of a step are not recorded in a CUDA graph: operation not permitted when stream is"
        " capturing."
    ]
