"""Tensors as a safetensors file, written as a stream without a second copy in memory.

The format: eight bytes of header length, a JSON header, then every tensor's bytes without gaps. The safetensors
library needs all bytes in memory or opens the file itself, so this writer, which hashes while it writes, does not use
it, nor does `MappedTensors`, which keeps no more than one tensor in memory.
"""

import json
import logging
import mmap
import os
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from trainwright._torch_compat.tensor_chunks import local_of
from trainwright.base.files import open_regular
from trainwright.checkpoint.errors import CheckpointTypeError
from trainwright.checkpoint.safetensors_header import read_header

logger = logging.getLogger("trainwright.checkpoint")
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def check_tensor(tensor: Tensor, where: str) -> None:
    """Check that a tensor can be written."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or is_lazy(tensor):
        raise CheckpointTypeError(
            f"{where}: got a {type(tensor).__name__}, which does not store its data as a plain tensor; "
            "a checkpoint holds plain tensors; for the DTensors of a sharded model pass mesh= to the Checkpointer."
        )
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}, dtype {tensor.dtype}"
        raise CheckpointTypeError(f"{where}: got a tensor {kind}; a checkpoint holds dense tensors with data.")
    if tensor.dtype not in DTYPE_NAMES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
        raise CheckpointTypeError(f"{where}: got a tensor of dtype {tensor.dtype}; allowed: {allowed}.")


def tensor_key(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two tensors with the same memory, dtype and layout. Both must be alive when compared."""
    tensor = local_of(tensor)
    if tensor.numel() == 0:
        return (id(tensor),)
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


class TensorFile:
    """The layout of tensors in a safetensors file. Called with an open file, it writes them one at a time.

    It references the tensors and does not copy them: it writes their values at the time of writing.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        assert "__metadata__" not in tensors, "the format has this name for other things"
        # Wide elements first, so that each tensor starts at a multiple of its element size.
        ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        self.places: list[tuple[Tensor, int, int]] = []  # begin and end of each, in bytes after the header
        offset = 0
        for name, tensor in ordered:
            end = offset + tensor.numel() * tensor.element_size()
            entries[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            self.places.append((tensor, offset, end))
            offset = end
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        self.header = len(header).to_bytes(8, "little") + header
        self.num_bytes = len(self.header) + offset  # of the complete file

    def __call__(self, file: BinaryIO) -> None:
        file.write(self.header)
        for tensor, _, _ in self.places:
            if tensor.numel():
                file.write(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """The values of a non-empty tensor in row-major order, without a copy if it is contiguous on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # reshape(-1) keeps an unusual stride of a single element, which cannot be viewed as bytes.
    flat = plain.as_strided((plain.numel(),), (1,))
    content: memoryview = flat.view(torch.uint8).numpy().data
    return content


class MappedTensors:
    """The tensors of a safetensors file, which may be deleted meanwhile. Their memory is that of the file.

    On a file system without memory maps, each is read when it is requested; on Windows all are read. ``release()``
    frees the memory of what was read: what changes a tensor in place must change a copy.
    """

    def __init__(self, path: Path) -> None:
        self._entries = read_header(path).tensors
        self._content: mmap.mmap | bytearray | None = None
        with ExitStack() as stack:
            self._file = stack.enter_context(open(open_regular(path), "rb"))
            self._begin = 8 + int.from_bytes(self._file.read(8), "little")
            if os.name == "nt":  # a file that is mapped cannot be deleted there
                self._file.seek(0)
                self._content = bytearray(self._file.read())
                return
            try:
                self._content = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                logger.debug("%s: no memory map (%s), read tensor by tensor.", path, error)
                weakref.finalize(self, stack.pop_all().close)  # the file stays open until then

    def get_tensor(self, name: str) -> Tensor:
        entry = self._entries[name]
        if not entry.num_values:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu")
        offset = self._begin + entry.begin
        content = self._content
        if content is None:
            self._file.seek(offset)
            offset, content = 0, bytearray(self._file.read(entry.end - entry.begin))
        flat = torch.frombuffer(content, dtype=DTYPES[entry.dtype], count=entry.num_values, offset=offset)
        return flat.reshape(entry.shape)

    def release(self) -> None:
        """Free the memory of all tensors, whose values are read from the file again."""
        content = self._content
        if content is not None and not isinstance(content, bytearray) and hasattr(mmap, "MADV_DONTNEED"):
            content.madvise(mmap.MADV_DONTNEED)
