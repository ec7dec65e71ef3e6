"""Run a command or a script in several processes: ``trainwright launch``. torchrun starts and watches them."""

import argparse
import ast
import contextlib
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.base.devices import count_cpus
from trainwright.base.errors import ConfigError, MissingFileError, did_you_mean
from trainwright.cli.commands import COMMANDS
from trainwright.config.arguments import TrainingArgumentParser, whole_number

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

FAILED = 1
TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: the connection to the other hosts was lost
_REJOIN_AFTER_S = 5
_JOIN_TIMEOUT_S = 60  # how long the doctor waits for a host; torchrun waits ten minutes

_EPILOG = """\
examples:
  trainwright launch -n 2 train config.py optim.lr=1e-3
  trainwright launch -n 8 script.py --its --own=arguments
  trainwright launch -n 8 --nnodes 2 --rdzv-endpoint host0:29500 train config.py    (the same on both hosts)
  trainwright launch -n 2 doctor

exit code: that of the process that failed first (128 + n: ended by signal n), 2 wrong arguments,
           75 the connection to the other hosts was lost (--rejoin N: try again)
"""

# Options of torchrun that are passed on.
_TORCHRUN = {
    "--rdzv-endpoint": ("HOST:PORT", "address of one of the hosts, the same on all of them"),
    "--rdzv-id": ("ID", "name of this run; hosts with the same name meet"),
    "--rdzv-backend": ("NAME", "how the hosts meet (default: c10d)"),
    "--rdzv-conf": ("K=V,...", "timeouts of the meeting, such as last_call_timeout=30"),
    "--local-addr": ("ADDRESS", "the address of this host that the others can reach"),
    "--node-rank": ("N", "number of this host, with --master-addr instead of --rdzv-endpoint"),
    "--master-addr": ("HOST", "address of host 0"),
    "--master-port": ("PORT", "port on host 0"),
    "--monitor-interval": ("S", "seconds between two looks at the processes"),
    "--shutdown-timeout": ("S", "seconds for the processes to end after SIGTERM (default: 30; not with torch 2.11)"),
    "--log-dir": ("FOLDER", "folder of the log files of --redirects and --tee"),
    "--redirects": ("SPEC", "write the output of the processes into files: 3 all, 0:1,1:2 by process"),
    "--tee": ("SPEC", "as --redirects, and show it too"),
    "--local-ranks-filter": ("RANKS", "show the output of these processes only, such as 0,1"),
}


def main(argv: Sequence[str]) -> int:
    """Run the processes of this host; return the exit code."""
    args = _parse(argv)
    arguments = [*_torchrun_options(args), *_program(args)]
    if args.max_nodes > 1:
        from trainwright.parallel.connections import end_lost_connections  # here: loads torch

        end_lost_connections(_read_timeout(args.rdzv_conf))
    with _log_folder(args) as more:
        code = _run([*more, *arguments])
    if code == TRY_AGAIN and args.rejoin > 0:
        print(f"trainwright launch: joins the other hosts again in {_REJOIN_AFTER_S} s.", file=sys.stderr, flush=True)
        time.sleep(_REJOIN_AFTER_S)
        at = len(argv) - len(args.command)
        again = [*argv[:at], "--rejoin", str(args.rejoin - 1), *argv[at:]]  # the last one counts
        os.execv(sys.executable, [sys.executable, "-P", "-m", "trainwright", "launch", *again])
    return code


def parser() -> TrainingArgumentParser:
    parser = TrainingArgumentParser(
        prog="trainwright launch",
        usage="trainwright launch [-n N] [--nnodes A:B] [--max-restarts N] [options] COMMAND|SCRIPT|-m MODULE ...",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    text = "processes on each host (default: one for each GPU); also auto, cpu, gpu as in torchrun"
    add(*_names("--nproc-per-node", "-n"), metavar="N", help=text)
    add("--nnodes", default="1", metavar="A:B", help="hosts, or the least and the most (default: 1)")
    text = "restarts after a failure (default: 0)"
    add(*_names("--max-restarts"), type=whole_number(), default=0, metavar="N", help=text)
    text = "the run continues from its latest checkpoint, if there is one, also that of a script"
    add("--resume", action="store_true", help=text)
    text = "join the other hosts again if the connection was lost, N times"
    add("--rejoin", type=whole_number(), default=0, metavar="N", help=text)
    for name, (metavar, text) in _TORCHRUN.items():
        add(*_names(name), metavar=metavar, help=text)
    add("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND|SCRIPT ...", help=argparse.SUPPRESS)
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    options = parser()
    known, unknown = options.parse_known_args(list(argv))
    if unknown:
        options.refuse(unknown[0])
    args: argparse.Namespace = known
    for name in ("--redirects", "--tee"):
        streams = _value(args, name)
        if streams is not None and not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", streams):
            raise ConfigError(
                f"launch: {name}: got {streams!r}; it must be 1 (the output), 2 (the errors), 3 (both) or 0 (none), or"
                " such a number for each process: 0:3,1:2."
            )
    least, _, most = args.nnodes.partition(":")
    most = most or least
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise ConfigError(
            f"launch: --nnodes: got {args.nnodes!r}; it must be a number of hosts such as 2, or A:B with A <= B."
        )
    args.min_nodes, args.max_nodes = int(least), int(most)
    number = args.nproc_per_node
    if number is not None and number not in ("auto", "cpu", "gpu", "xpu") and not (number.isdecimal() and int(number)):
        raise ConfigError(
            f"launch: --nproc-per-node: got {number!r}; it must be a whole number >= 1, auto, cpu or gpu."
        )
    _check_command(args)
    return args


def _names(name: str, *others: str) -> list[str]:
    """Both spellings that torchrun accepts."""
    return [*others, *dict.fromkeys((name, "--" + name[2:].replace("-", "_")))]


def _check_command(args: argparse.Namespace) -> None:
    if not args.command:
        raise ConfigError("launch: nothing to run. For example: trainwright launch -n 2 train config.py")
    name = args.command[0]
    commands = [command for command in COMMANDS if command != "launch"]
    if args.module or name in commands:
        return
    if name == "launch":
        raise ConfigError("launch: cannot run itself; options come before the command.")
    if name.endswith(".py") or os.sep in name:
        if not Path(name).is_file():
            raise MissingFileError(f"launch: {name}: no such file.")
        if _is_config_file(Path(name)):
            raise ConfigError(f"launch: {name} is a config file: trainwright launch [options] train {name}")
        return
    if re.fullmatch(r"python[0-9.]*|torchrun", name):
        raise ConfigError(f"launch: {name!r} is left out: trainwright launch [options] SCRIPT ... runs it with Python.")
    if name.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"launch: {name}: no command. A config file is trained by: trainwright launch [options] train {name}"
        )
    raise ConfigError(f"launch: no command and no script {name!r}. {did_you_mean(name, commands)}")


def _is_config_file(path: Path) -> bool:
    """Whether a Python file has the sections of a run, and starts nothing."""
    try:
        lines = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):  # Python reports it
        return False
    names = {
        one.id for line in lines if isinstance(line, ast.Assign) for one in line.targets if isinstance(one, ast.Name)
    }
    return names >= {"model", "dataloader"} and re.search(rb"Trainer|__main__", path.read_bytes()) is None


def _program(args: argparse.Namespace) -> list[str]:
    is_command = not args.module and args.command[0] in COMMANDS
    if args.resume and not is_command:
        from trainwright.parallel.restarts import RESUME  # here: loads torch

        os.environ[RESUME] = "1"
    if args.module:
        return ["-m", *args.command]
    if not is_command:
        return list(args.command)
    # -P: without the working folder, where a file could have the name of a module that Python imports at the start.
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    return ["--no-python", python, "-P", "-u", "-m", "trainwright", *_with_resume(args)]


def _with_resume(args: argparse.Namespace) -> list[str]:
    """The command; a training that may be restarted continues from its latest checkpoint."""
    command = list(args.command)
    if args.resume and command[0] != "train":
        print(f"trainwright launch: --resume has no effect with the command {command[0]}.", file=sys.stderr)
    may_restart = args.resume or args.max_restarts > 0 or args.min_nodes < args.max_nodes
    if command[0] != "train" or not may_restart or {"--resume", "--eval-only", "--fast-dev-run"} & {*command}:
        return command
    if not args.resume:
        print("trainwright launch: adds --resume, so that a restart continues the run.", file=sys.stderr)
    return [*command, "--resume"]


def _passed_on(args: argparse.Namespace) -> list[str]:
    values = ((name, _value(args, name)) for name in _TORCHRUN)
    return [text for name, value in values if value is not None for text in (name, value)]


def _value(args: argparse.Namespace, name: str) -> Any:
    return getattr(args, name[2:].replace("-", "_"))


def _torchrun_options(args: argparse.Namespace) -> list[str]:
    number = _num_processes(args.nproc_per_node)
    if number.isdecimal():  # torchrun sets 1, and warns
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cpus() // int(number))))
    options = ["--nproc-per-node", number, "--nnodes", args.nnodes, "--max-restarts", str(args.max_restarts)]
    options += _passed_on(args)
    if args.command[0] == "doctor" and not args.rdzv_conf:
        options += ["--rdzv-conf", f"join_timeout={_JOIN_TIMEOUT_S}"]
    if args.rdzv_endpoint:
        return options if args.rdzv_backend else [*options, "--rdzv-backend", "c10d"]
    if args.master_addr:
        if args.max_nodes > 1 and args.node_rank is None:
            raise ConfigError("launch: --master-addr also needs --node-rank, a number of its own on each host.")
        return options
    if args.max_nodes > 1:
        raise ConfigError(
            f"launch: --nnodes {args.nnodes} needs --rdzv-endpoint HOST:PORT, the address of one of the hosts, the same"
            f" on all of them; for example, if this is that host, --rdzv-endpoint {platform.node()}:29500"
        )
    return [*options, "--standalone"]


def _num_processes(asked: str | None) -> str:
    import torch

    devices = torch.accelerator.device_count()
    if asked is None:
        return str(max(1, devices))
    cores = count_cpus()
    if asked.isdecimal() and not devices and int(asked) > 2 * cores:
        print(
            f"trainwright launch: {asked} processes share {cores} CPU cores, and each waits for the others.",
            file=sys.stderr,
        )
    if asked.isdecimal() and 0 < devices < int(asked):
        raise ConfigError(
            f"launch: --nproc-per-node: got {asked}, but this machine has {devices} GPU{'s' * (devices > 1)}. Start at"
            f" most {devices}, or set CUDA_VISIBLE_DEVICES= (empty) to use the CPU."
        )
    return asked


def _read_timeout(conf: str | None) -> float:
    """How many seconds torchrun waits for an answer of another host."""
    settings = dict(part.strip().partition("=")[::2] for part in (conf or "").split(","))
    with contextlib.suppress(ValueError):  # torchrun refuses it
        return float(settings.get("read_timeout", 60))
    return 60.0


@contextlib.contextmanager
def _log_folder(args: argparse.Namespace) -> Iterator[list[str]]:
    """The option for a folder of log files that is deleted at the end if nothing is written there."""
    if args.log_dir:
        yield []
        return
    if {args.redirects, args.tee} - {None, "0"}:
        folder = tempfile.mkdtemp(prefix="torchelastic_")
        print(f"trainwright launch: the log files are in {folder}; --log-dir FOLDER sets another.", file=sys.stderr)
        yield ["--log-dir", folder]
        return
    with tempfile.TemporaryDirectory(prefix="torchelastic_", ignore_cleanup_errors=True) as folder:
        yield ["--log-dir", folder]


def _run(arguments: list[str]) -> int:
    """torchrun with these arguments, as its command line runs it."""
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
    from torch.distributed.run import main as torchrun

    # A store for each attempt: in one for all, a process that restarts finds the addresses of the attempt before.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        return _report(error)
    except SignalException as ended:
        return 128 + int(ended.sigval)
    except (RendezvousConnectionError, RendezvousTimeoutError, DistNetworkError, DistStoreError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            print(f"trainwright launch: the port is in use on this machine: {reason}", file=sys.stderr)
            print("  Choose another --master-port, or leave it out.", file=sys.stderr)
            return FAILED
        print(f"trainwright launch: no connection to the other hosts: {reason}", file=sys.stderr)
        print("  `trainwright doctor` checks the hosts; --rejoin 10 joins them again.", file=sys.stderr)
        return TRY_AGAIN
    return 0


def _report(error: "ChildFailedError") -> int:
    """Name the process that failed first. Of several with the same reason, only one has printed it."""
    rank, failure = error.get_first_failure()
    code = int(failure.exitcode)
    kind = ""
    message: Any = failure.message
    if isinstance(message, dict):  # from its error file
        kind = str(message.get("message", "")).partition(":")[0]
        if code == -signal.SIGTERM:  # torchrun ended it while it reported its error, as another one had ended
            codes = (int(one.exitcode) for one in error.failures.values())
            code = next((one for one in codes if one > 0), FAILED)
    how = f"failed with {kind}," if kind else "ended with"
    how += f" exit code {code}; the messages of the job are above"
    if code < 0:
        how = f"was ended by {_signal_name(-code)}"
    elif code - 128 in (signal.SIGINT, signal.SIGTERM):
        how = f"was stopped by {_signal_name(code - 128)} and has ended with exit code {code}"
    where = f"{platform.node()}, process {failure.pid}"
    print(f"trainwright launch: rank {rank} ({where}) {how}.", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _signal_name(number: int) -> str:
    name = signal.Signals(number).name
    return name + (", often the system's, out of memory (see `dmesg`)" if name == "SIGKILL" else "")
