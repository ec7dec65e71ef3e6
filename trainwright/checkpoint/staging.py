"""Staging: tensors are copied to separate memory, so that training continues while the copy is written to disk.

The memory has the layout of the file, so it is written sequentially. It is reused by the next save: the first use of
newly allocated memory costs ten times as much as the copy.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import BinaryIO

import torch
import xxhash
from torch import Tensor

from trainwright.checkpoint.files import Writer
from trainwright.checkpoint.safetensors_file import TensorFile, bytes_of

_CHUNK_BYTES = 8 * 2**20  # written and hashed at a time: small enough to stay in the CPU cache between both
_LARGE_BYTES = 16 * 2**20  # from this size on, a second thread and allocation in advance are worth their cost

Copy = tuple[Tensor, Tensor]  # (place in the memory, original)


class StagingArea:
    """The copies of one checkpoint at a time, and the memory for them."""

    def __init__(self) -> None:
        self._blocks: dict[str, _Block] = {}
        self._arrivals: list[torch.cuda.Event] = []  # recorded after the device-to-host copies

    def stage(
        self, files: Mapping[str, Writer], beside: Callable[[Callable[[], None]], Callable[[], None]]
    ) -> dict[str, Writer]:
        """Copy the tensors of ``files`` to staging memory; returns files that write the copies.

        ``beside(task)`` starts a task in another thread and returns a function that waits for it: two threads copy
        large states. Copies from GPUs may still be in flight: `wait_for_arrivals` waits for them.
        """
        staged, copies = dict(files), list[Copy]()
        for name, file in files.items():
            if isinstance(file, TensorFile):
                block = staged[name] = self._block_for(name, file)
                copies += block.places_of(file)
        sent = [copy for copy in copies if copy[1].is_cuda]
        _copy_all(deque(sent))  # from this thread, whose stream they belong to
        to_do = deque(copy for copy in copies if not copy[1].is_cuda)
        is_large = sum(place.nbytes for place, _ in to_do) >= _LARGE_BYTES
        wait_for_other = beside(lambda: _copy_all(to_do)) if is_large else None
        try:
            _copy_all(to_do)
        finally:
            if wait_for_other is not None:
                wait_for_other()
        devices = {original.device for _, original in sent}
        self._arrivals = [torch.cuda.current_stream(device).record_event() for device in devices]
        return staged

    def wait_for_arrivals(self) -> None:
        """Wait for copies from GPUs."""
        for arrival in self._arrivals:
            arrival.synchronize()

    def staged_alike(self, files: Mapping[str, Writer]) -> dict[str, Writer] | None:
        """``files`` with the tensors that are already staged; None if any tensor has changed since."""
        self.wait_for_arrivals()
        alike = dict(files)
        for name, file in files.items():
            if isinstance(file, TensorFile):
                block = self._blocks.get(name)
                if block is None or not block.holds(file):
                    return None
                alike[name] = block
        return alike

    def reserve(self, files: Mapping[str, Writer]) -> None:
        """Allocate and touch the memory for staging these files. Staged content that fits stays unchanged."""
        for name, file in files.items():
            if isinstance(file, TensorFile) and file.num_bytes >= _LARGE_BYTES and not self._fits(name, file):
                self._block_for(name, file).memory.zero_()

    def _fits(self, name: str, file: TensorFile) -> bool:
        block = self._blocks.get(name)
        return block is not None and block.header == file.header and block.is_pinned == _is_sent_by_gpu(file)

    def _block_for(self, name: str, file: TensorFile) -> "_Block":
        if not self._fits(name, file):
            self._blocks.pop(name, None)  # free it first: there is never more than one copy
            self._blocks[name] = _Block(file)
        return self._blocks[name]


def _copy_all(to_do: deque[Copy]) -> None:
    """Make copies until the queue is empty; another thread may work on the same queue."""
    while True:
        try:
            place, original = to_do.popleft()
        except IndexError:
            return
        place.copy_(original.detach(), non_blocking=original.is_cuda)


class _Block:
    """The staging memory of one file: the bytes after the header. Called with an open file, it writes its content."""

    def __init__(self, file: TensorFile) -> None:
        self.header = file.header
        self.is_pinned = _is_sent_by_gpu(file)
        size = file.num_bytes - len(file.header)
        self.memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.is_pinned)

    def __call__(self, file: BinaryIO) -> None:
        file.write(self.header)
        content = self.memory.numpy().data
        for start in range(0, len(content), _CHUNK_BYTES):
            file.write(content[start : start + _CHUNK_BYTES])

    def places_of(self, file: TensorFile) -> list[Copy]:
        """For each tensor, a view of its place in this memory, and the tensor."""
        return [
            (self.memory[start:end].view(tensor.dtype).view(tensor.shape), tensor)
            for tensor, start, end in file.places
            if start < end
        ]

    def holds(self, file: TensorFile) -> bool:
        """Whether this memory holds the current values of the tensors of ``file``."""
        if self.header != file.header:
            return False
        content = self.memory.numpy().data
        return all(
            xxhash.xxh3_128_digest(content[start:end]) == xxhash.xxh3_128_digest(bytes_of(tensor))
            for tensor, start, end in file.places
            if start < end
        )


def _is_sent_by_gpu(file: TensorFile) -> bool:
    return any(tensor.is_cuda for tensor, _, _ in file.places)
