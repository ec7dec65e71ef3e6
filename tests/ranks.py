"""Functions that run on several processes of one group, without a launcher: a start takes a tenth of torchrun's time.

``on_ranks(function, *arguments, world_size=2)`` returns what the function has returned on each rank, by rank. The
function belongs to a module, which each rank imports; arguments and results are pickled.
"""

import faulthandler
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fork_server import python

REPOSITORY = Path(__file__).parents[1]


class _NotStartedError(Exception):
    """A process has not reached its first line: the fork server, not what is tested."""


def on_ranks(function: Callable[..., Any], *arguments: Any, world_size: int = 2, timeout: float = 60) -> list[Any]:
    try:
        return _on_ranks(function, *arguments, world_size=world_size, timeout=timeout)
    except _NotStartedError as error:  # rare, cause unknown; a crash while stacks were read may have been one
        print(f"{function.__qualname__}: {error}; they are started again", file=sys.stderr)
        return _on_ranks(function, *arguments, world_size=world_size, timeout=timeout)


def _on_ranks(function: Callable[..., Any], *arguments: Any, world_size: int, timeout: float) -> list[Any]:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent holds it
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world_size),
    }
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder, "call")
        call.write_bytes(pickle.dumps((function.__module__, function.__qualname__, arguments)))
        ranks = [
            subprocess.Popen(
                [python(), "-m", "tests.ranks", folder],
                cwd=REPOSITORY,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world_size)
        ]
        end = time.monotonic() + timeout
        try:
            outputs = [rank.communicate(timeout=max(0.0, end - time.monotonic()))[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            codes = [rank.poll() for rank in ranks]  # one that has ended is why the others wait
            for rank in ranks:
                rank.send_signal(signal.SIGUSR2)
            time.sleep(1)  # until the stacks are written
            for rank in ranks:
                rank.kill()
            running = [rank for rank, code in enumerate(codes) if code is None]
            missing = [rank for rank in running if not Path(folder, f"started{rank}").exists()]
            if missing and not any(codes):
                raise _NotStartedError(f"ranks {missing} have not started after {timeout:g} s") from None
            stacks = "\n".join(
                f"rank {number} ({'waits' if code is None else f'ended with {code}'}):\n{rank.communicate()[0]}"
                for number, (rank, code) in enumerate(zip(ranks, codes, strict=True))
            )
            raise AssertionError(f"{function.__qualname__}: not done after {timeout:g} s\n{stacks}") from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
                assert rank.stdout is not None
                rank.stdout.close()
        assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(outputs)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]


def main() -> None:
    faulthandler.register(signal.SIGUSR2)
    folder = Path(sys.argv[1])
    (folder / f"started{os.environ['RANK']}").touch()
    from trainwright.parallel import setup_dist_util
    from trainwright.parallel.data_parallel import shut_down

    module, name, arguments = pickle.loads((folder / "call").read_bytes())
    function = getattr(importlib.import_module(module), name)
    setup_dist_util({"device_type": "cpu"})
    result = function(*arguments)
    (folder / os.environ["RANK"]).write_bytes(pickle.dumps(result))
    shut_down()


if __name__ == "__main__":
    main()
