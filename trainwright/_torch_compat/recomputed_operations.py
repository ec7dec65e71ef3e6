"""Allow a selective recomputation to call operations whose results are not kept more or less often than before.

Torch (2.13) raises an error for any operation that it has not seen as often in the first computation. The second one of
a recomputed block has another number of labels for the profiler, from units of FSDP2 within it, and of views of
parameters, which with tensor parallelism are taken in or before the block. Neither has a result that could be kept.
"""

import torch
from torch.utils import checkpoint

_LABELS = ("_record_function_enter", "_record_function_enter_new", "_record_function_exit")


def ignore_repeated() -> None:
    """Leave labels and views out of what selective recomputations compare, from now on."""
    ignored = getattr(checkpoint, "SAC_IGNORED_OPS", None)
    if isinstance(ignored, set):
        ignored.add(torch.ops.aten.view.default)
        for packet in (getattr(torch.ops.profiler, name, None) for name in _LABELS):
            ignored.update([] if packet is None else [getattr(packet, overload) for overload in packet.overloads()])
