"""Staging: tensors are copied to separate memory, so that training continues while the copy is written to disk.

The memory has the layout of the file, so it is written sequentially. It is reused by the next save: the first use of
newly allocated memory costs ten times as much as the copy.
"""

from collections.abc import Mapping
from typing import BinaryIO

import torch
import xxhash
from torch import Tensor

from trainwright.base.files import Writer
from trainwright.checkpoint.safetensors_file import TensorFile, bytes_of

_CHUNK_BYTES = 8 * 2**20  # written and hashed at a time: small enough to stay in the CPU cache between both

Copy = tuple[Tensor, Tensor]  # (place in the memory, original)


class StagingArea:
    """The copies of one checkpoint at a time, and the memory for them."""

    def __init__(self) -> None:
        self._blocks: dict[str, _Block] = {}
        self._arrivals: list[torch.cuda.Event] = []  # recorded after the device-to-host copies

    def stage(self, files: Mapping[str, Writer]) -> dict[str, Writer]:
        """Copy the tensors of ``files`` to staging memory; returns files that write the copies.

        Copies from GPUs may still be in flight: `wait_for_arrivals` waits for them.
        """
        staged, devices = dict(files), set[torch.device]()
        for name, file in files.items():
            if isinstance(file, TensorFile):
                block = staged[name] = self._block_for(name, file)
                for place, original in block.places_of(file):
                    place.copy_(original.detach(), non_blocking=original.is_cuda)
                    devices |= {original.device} if original.is_cuda else set()
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

    def _block_for(self, name: str, file: TensorFile) -> "_Block":
        block = self._blocks.get(name)
        if block is None or block.header != file.header or block.is_pinned != _is_sent_by_gpu(file):
            self._blocks.pop(name, None)  # free it first: there is never more than one copy
            block = self._blocks[name] = _Block(file)
        return block


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
