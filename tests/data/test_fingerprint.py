"""Equal data has an equal fingerprint, other data another one."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from trainwright.data.fingerprint import described_data, fingerprint


class Own(Dataset):
    def __init__(self, files: list[str], scale: float) -> None:
        self.files, self.scale = files, scale
        self.function = lambda: None

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is read")

    def __len__(self) -> int:
        return len(self.files)


def tensors(value: float = 0.0) -> TensorDataset:
    inputs = torch.arange(6000.0).reshape(1000, 6).clone()
    inputs[-1, -1] += value
    return TensorDataset(inputs, torch.arange(1000))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (tensors(), tensors(1.0)),
        (Own(["a.png", "b.png"], 1.0), Own(["a.png", "c.png"], 1.0)),
        (Own(["a.png"], 1.0), Own(["a.png"], 2.0)),
        (Subset(tensors(), range(10)), Subset(tensors(), range(11))),
        ([{"text": "a"}], [{"text": "b"}]),
        (np.zeros(3), np.zeros(3, dtype=np.float32)),
        (list(range(100_000)), list(range(100_001))),
    ],
    ids=["tensors", "files", "settings", "subsets", "lists", "types", "lengths"],
)
def test_other_data_has_another_fingerprint(one: Any, other: Any) -> None:
    assert fingerprint(one) == fingerprint(one)
    assert len(fingerprint(one) or "") == 16
    assert fingerprint(one) != fingerprint(other)


def test_it_is_the_same_in_every_process(run_python: Any, tmp_path: Path) -> None:
    code = (
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "from trainwright.data.fingerprint import fingerprint\n"
        "print(fingerprint(TensorDataset(torch.arange(12.0).reshape(3, 4), torch.arange(3))))"
    )
    done: subprocess.CompletedProcess[str] = run_python("-c", code, cwd=tmp_path)
    assert done.stdout.strip() == fingerprint(TensorDataset(torch.arange(12.0).reshape(3, 4), torch.arange(3)))


def test_a_fingerprint_ends_and_draws_nothing() -> None:
    before = torch.get_rng_state()
    described_data(tensors())
    assert torch.equal(torch.get_rng_state(), before)

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            raise AssertionError("nothing is read")

    assert described_data(Stream()) == {"class": Stream.__qualname__, "samples": None, "fingerprint": None}

    value: list[Any] = [1]
    value.append(value)
    assert fingerprint(value) is not None
    assert fingerprint(torch.ones(3, dtype=torch.bfloat16)) != fingerprint(torch.zeros(3, dtype=torch.bfloat16))
    assert fingerprint(torch.tensor(1.0)) != fingerprint(torch.tensor(2.0))


def test_what_the_page_of_the_trainer_says_is_read() -> None:
    """64 places, of each the first 4096 numbers; another number elsewhere is not seen, another shape or dtype is."""

    def changed(place: int, column: int = 0) -> str | None:
        data = torch.zeros(1500, 5000)
        data[place, column] = 1.0
        return fingerprint(TensorDataset(data))

    same = fingerprint(TensorDataset(torch.zeros(1500, 5000)))
    read = {place * 1499 // 63 for place in range(64)}
    assert read.issuperset({0, 1499})
    assert 700 not in read
    assert changed(700) == changed(0, 4096) == same
    assert len({same, changed(0), changed(1499), changed(0, 4095), changed(23)}) == 5
    assert fingerprint(TensorDataset(torch.zeros(1500, 5000).double())) != same
    assert fingerprint(TensorDataset(torch.zeros(1501, 5000))) != same
