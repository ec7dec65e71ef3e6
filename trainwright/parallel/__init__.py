"""Where the work runs: ranks, devices, data parallelism, precision, recomputation."""

from typing import TYPE_CHECKING

from trainwright.base.dist import (
    get_data_parallel_rank,
    get_data_parallel_size,
    get_local_rank,
    get_rank,
    get_world_size,
    is_main_process,
    synchronize,
)
from trainwright.base.lazy_names import on_first_use
from trainwright.parallel.data_parallel import setup_dist_util, shut_down, wrap_data_parallel
from trainwright.parallel.precision import apply_autocast

__all__ = [
    "get_rank",
    "get_world_size",
    "get_local_rank",
    "get_data_parallel_rank",
    "get_data_parallel_size",
    "is_main_process",
    "synchronize",
    "setup_dist_util",
    "shut_down",
    "wrap_data_parallel",
    "apply_autocast",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __getattr__ = on_first_use(__name__, {})  # its error names the module of a public name
