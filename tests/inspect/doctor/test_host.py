"""What the doctor finds on this machine and between two processes of it."""

import socket
import time
from pathlib import Path

import pytest
import torch

from tests.ranks import on_ranks
from trainwright.inspect.doctor.group import Speed, measure_all_reduce, measure_clock
from trainwright.inspect.doctor.host import (
    Facts,
    addresses,
    measure_folder,
)
from trainwright.parallel import get_rank


def test_addresses_are_of_this_machine_and_not_the_loopback() -> None:
    for name, address in addresses().items():
        assert name in {name for _, name in socket.if_nameindex()}
        assert not address.startswith("127.")
        with socket.socket() as own:
            own.bind((address, 0))  # possible only with an address of this machine


def test_a_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    facts = Facts()
    measure_folder(tmp_path, facts)
    assert facts.folder_fault == ""
    assert facts.free_bytes > 0
    assert facts.bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


CPU = torch.device("cpu")


def measured() -> tuple[Speed, float, float]:
    """The speed, this rank's clock, and its clock if that of rank 1 is 5 s ahead."""
    speed, difference = measure_all_reduce(CPU), measure_clock()
    clock = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: clock() + 5 * get_rank())
        return speed, difference, measure_clock()


def test_two_ranks_of_one_machine() -> None:
    (speed, zero, own), (other, difference, ahead) = on_ranks(measured)
    assert (zero, own) == (0, 0)
    assert abs(difference) < 0.1  # the same clock, on a busy machine
    assert ahead == pytest.approx(5, abs=0.1)
    assert speed.bytes_per_s == pytest.approx(other.bytes_per_s)  # decided together
    assert 0 < speed.latency_s < 1
    assert speed.size_bytes in {1_000_000, 4_000_000, 16_000_000, 64_000_000}
