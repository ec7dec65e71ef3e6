"""While the processes of torchrun meet: whether the others on this machine still run.

For torchrun, a process that ends with exit code 0 has not failed, so it leaves the others waiting for it.
"""

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger("trainwright.parallel")

_FIRST_LOOK_S = 5.0  # after which torchrun has started all of them
_LOG_AFTER_S = 10.0
_OF_JOB = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def siblings_awaited() -> Iterator[None]:
    """A block in which this process waits for all others. It ends the process if one of them cannot come any more."""
    has_met = threading.Event()
    threading.Thread(target=_watch, args=(has_met,), name="trainwright-siblings", daemon=True).start()
    try:
        yield
    finally:
        has_met.set()


def ended_siblings(environment: Mapping[str, str], processes: Path = Path("/proc")) -> set[int]:
    """The local ranks of torchrun's processes on this machine that have ended; empty where that is unknown.

    A process is known by its environment, which Linux shows to processes of the same user.
    """
    if not all(name in environment for name in (*_OF_JOB, "LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        return set()
    job = {f"{name}={environment[name]}".encode() for name in _OF_JOB}
    running = set[int]()
    for path in processes.glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or belongs to another user
            entries = path.read_bytes().split(b"\0")
            if job.issubset(entries):
                running |= {int(entry[11:]) for entry in entries if entry.startswith(b"LOCAL_RANK=")}
    if int(environment["LOCAL_RANK"]) not in running:
        return set()  # nor are the others seen
    return set(range(int(environment["LOCAL_WORLD_SIZE"]))) - running


def _watch(has_met: threading.Event) -> None:
    last, environment, log_at = set[int](), os.environ, time.monotonic() + _LOG_AFTER_S
    has_met.wait(_FIRST_LOOK_S)
    while not has_met.wait(1.0):
        if time.monotonic() > log_at and environment.get("LOCAL_RANK", "0") == "0":
            log_at = math.inf
            logger.warning(
                "Rank %s waits for the other processes of WORLD_SIZE=%s at %s:%s. Start them; for one process, unset"
                " WORLD_SIZE in the environment.",
                *(environment.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
            )
        ended = ended_siblings(environment)
        if ended and ended == last:
            local_rank, first = (
                int(environment["LOCAL_RANK"]),
                int(environment["RANK"]) - int(environment["LOCAL_RANK"]),
            )
            if local_rank == min(set(range(int(environment["LOCAL_WORLD_SIZE"]))) - ended):
                names = ", ".join(str(first + rank) for rank in sorted(ended))
                sys.stderr.write(
                    f"The program of rank {names} has ended before it built its trainer. The others wait for it, so the"
                    " job ends. Every process must build the trainer, not only where `if is_main_process()` or another"
                    " condition holds.\n"
                )
                sys.stderr.flush()
            else:
                time.sleep(1.0)  # that message comes first: torchrun ends all when one has failed
            os._exit(1)
        last = ended
