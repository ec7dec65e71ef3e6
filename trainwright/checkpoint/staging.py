"""Staging: tensors copied into memory of their own, so that training goes on while that memory is written to disk.

The memory of a file is laid out as the file, so it is written in one go. It is kept for the next save: memory that is
used for the first time costs ten times the copy.
"""

import threading
from collections.abc import Collection, Mapping
from typing import BinaryIO

import torch
import xxhash
from torch import Tensor

from trainwright.checkpoint.files import Writer
from trainwright.checkpoint.tensors import TensorFile, bytes_of

_CHUNK_BYTES = 8 * 2**20  # written and hashed at a time: small enough to be in the cache for the second
_SMALL_BYTES = 64 * 2**10  # copied at once in any case
_WORTH_RESERVING_BYTES = 16 * 2**20


class StagingArea:
    """The copies of one checkpoint at a time, and the memory for them.

    ``is_copied`` is set when everything staged has been copied: what may change later only waits for that.
    """

    def __init__(self) -> None:
        self.is_copied = threading.Event()
        self.is_copied.set()
        self._blocks: dict[str, _Block] = {}
        self._later: list[tuple[Tensor, Tensor]] = []  # (copy, original)
        self._arrivals: list[torch.cuda.Event] = []  # behind the copies that GPUs have been told to make

    def stage(self, files: Mapping[str, Writer], may_wait: Collection[str] = ()) -> dict[str, Writer]:
        """The same files, the tensors of which nobody else holds.

        The large tensors of the files named in ``may_wait`` are copied by `copy_the_rest`, which must be called by
        another thread soon; so is the wait for what a GPU sends.
        """
        staged = dict(files)
        for name, file in files.items():
            if isinstance(file, TensorFile):
                block = self._block_for(name, file)
                for copy, original in block.pairs(file):
                    if name in may_wait and original.is_cpu and original.nbytes >= _SMALL_BYTES:
                        self._later.append((copy, original))
                    else:
                        copy.copy_(original.detach(), non_blocking=original.is_cuda)
                self._arrivals += block.arrivals(file)
                staged[name] = block
        if self._later or self._arrivals:
            self.is_copied.clear()
        return staged

    def copy_the_rest(self) -> None:
        """Copy what `stage` has left, and wait for what is on its way. Nobody waits for it longer if that fails."""
        try:
            for copy, original in self._later:
                copy.copy_(original)
            for arrival in self._arrivals:
                arrival.synchronize()
        finally:
            self._later.clear()
            self._arrivals.clear()
            self.is_copied.set()

    def staged_alike(self, files: Mapping[str, Writer]) -> dict[str, Writer] | None:
        """``files`` with what is staged already in place of their tensors; None if any tensor has changed since."""
        self.is_copied.wait()
        alike = dict(files)
        for name, file in files.items():
            if isinstance(file, TensorFile):
                block = self._blocks.get(name)
                if block is None or not block.holds(file):
                    return None
                alike[name] = block
        return alike

    def reserve(self, files: Mapping[str, Writer]) -> None:
        """Get the memory that staging these files will take, and touch it."""
        for name, file in files.items():
            if isinstance(file, TensorFile) and file.num_bytes >= _WORTH_RESERVING_BYTES:
                self._block_for(name, file).memory.zero_()

    def _block_for(self, name: str, file: TensorFile) -> "_Block":
        block = self._blocks.get(name)
        if block is None or block.header != file.header or block.is_pinned != _is_sent_by_gpu(file):
            self._blocks.pop(name, None)  # first: there is never more than one copy
            block = self._blocks[name] = _Block(file)
        return block


class _Block:
    """The memory of one file: the bytes behind the header. Called with an open file, it writes that file."""

    def __init__(self, file: TensorFile) -> None:
        self.header = file.header
        self.is_pinned = _is_sent_by_gpu(file)
        size = file.num_bytes - len(file.header)
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=self.is_pinned)

    def __call__(self, file: BinaryIO) -> None:
        file.write(self.header)
        content = self.memory.numpy().data
        for start in range(0, len(content), _CHUNK_BYTES):
            file.write(content[start : start + _CHUNK_BYTES])

    def pairs(self, file: TensorFile) -> list[tuple[Tensor, Tensor]]:
        """Each tensor's place in this memory, seen as a tensor like it, and the tensor."""
        return [
            (self.memory[start:end].view(tensor.dtype).view(tensor.shape), tensor)
            for tensor, start, end in file.places
            if start < end
        ]

    def arrivals(self, file: TensorFile) -> list[torch.cuda.Event]:
        """One event for each GPU that sends into this memory, behind everything it has been told so far."""
        devices = {tensor.device for tensor, _, _ in file.places if tensor.is_cuda}
        return [torch.cuda.current_stream(device).record_event() for device in devices]

    def holds(self, file: TensorFile) -> bool:
        """Whether the tensors of ``file`` are what is in this memory."""
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
