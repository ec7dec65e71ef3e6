"""Let a selective recomputation repeat the labels that torch's own code gives to the profiler.

A unit of FSDP2 within a recomputed block, such as its experts, has another number of them in the second computation,
and torch (2.13) raises an error for any operation that it has not seen as often in the first one. They have no result
that could be kept.
"""

import torch
from torch.utils import checkpoint

_LABELS = ("_record_function_enter", "_record_function_enter_new", "_record_function_exit")


def ignore_labels() -> None:
    """Leave the labels out of what selective recomputations compare, from now on."""
    ignored = getattr(checkpoint, "SAC_IGNORED_OPS", None)
    if isinstance(ignored, set):
        for packet in (getattr(torch.ops.profiler, name, None) for name in _LABELS):
            ignored.update([] if packet is None else [getattr(packet, overload) for overload in packet.overloads()])
