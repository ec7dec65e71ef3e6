"""``trainwright doctor``: collect the facts of all ranks, judge them, and print one line for each check."""

import argparse
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.config.arguments import TrainingArgumentParser, whole_number
from trainwright.inspect.report.text import counted

if TYPE_CHECKING:
    import torch

    from trainwright.inspect.doctor.group import Speed
    from trainwright.inspect.doctor.host import Facts

HEALTHY, FAULTY = 0, 1
MIN_FREE_BYTES = 1_000_000_000
MIN_SHM_BYTES = 500_000_000
MAX_CLOCK_S = 1.0
_OTHERS_END_S = 2.0  # for the processes of other hosts to end after the last exchange
TIMEOUT_S = 8.0  # of a connection or an exchange between ranks

_EPILOG = """\
checks: addresses, ports, versions, all-reduce, clocks, output folder, disk, devices, shared memory, open files

  trainwright doctor                                                  this machine
  trainwright launch -n 2 doctor                                      and an all-reduce between two processes
  trainwright launch -n 8 --nnodes 2 --rdzv-endpoint host0:29500 doctor --output-dir /shared/run    all hosts

exit code: 0 no check failed, 1 one failed, 2 wrong arguments
"""


@dataclass(frozen=True)
class Line:
    """One check. ``advice``: what to do; with it the check failed, or warns."""

    name: str
    text: str
    advice: str = ""
    is_warning: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.advice) and not self.is_warning


def parser() -> argparse.ArgumentParser:
    parser = TrainingArgumentParser(prog="trainwright doctor", epilog=_EPILOG)
    parser.add_argument("--output-dir", default=".", metavar="FOLDER", help="output folder of the run (default: .)")
    parser.add_argument(
        "--port", type=whole_number(1, 65535), default=29500, help="port where hosts will meet (default: 29500)"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the checks; rank 0 prints. Every rank returns the same exit code."""
    args = parser().parse_args(argv)
    from trainwright.parallel.data_parallel import shut_down

    start = time.perf_counter()
    facts, lines = _examine(Path(args.output_dir), args.port)
    is_first = facts[0].rank == _rank() and os.environ.get("LOCAL_RANK", "0") == "0"
    if is_first:  # rank 0, or one of each host if they cannot exchange anything
        print(report(facts, lines, time.perf_counter() - start), flush=True)
    shut_down()
    has_failed = any(line.failed for line in lines)
    if has_failed and is_first and len({fact.host for fact in facts}) > 1:
        # torchrun's store is on this host and ends when this process does. torchrun on another host would then report a
        # lost connection, and not the exit code of its own processes, if these are still running.
        time.sleep(_OTHERS_END_S)
    return FAULTY if has_failed else HEALTHY


def report(facts: Sequence["Facts"], lines: Sequence[Line], seconds: float) -> str:
    hosts = len({fact.host for fact in facts})
    versions = ", ".join(f"{name} {version}" for name, version in facts[0].versions.items())
    text = [f"{counted(len(facts), 'process', 'processes')} on {counted(hosts, 'host', 'hosts')}: {versions}", ""]
    width = max(len(line.name) for line in lines)
    for line in lines:
        mark = "FAIL" if line.failed else "warn" if line.advice else "ok"
        text.append(f"  {mark:4}  {line.name:{width}}  {line.text}")
        text += [f"        {'':{width}}  -> {line.advice}"] if line.advice else []
    failed, warnings = (sum(map(test, lines)) for test in (lambda line: line.failed, lambda line: line.is_warning))
    verdict = f"{failed} of {len(lines)} checks failed" if failed else f"{len(lines)} checks, none failed"
    verdict += f", {counted(warnings, 'warning', 'warnings')}" if warnings else ""
    return "\n".join([*text, "", f"{verdict} ({seconds:.1f} s)."])


def _examine(folder: Path, port: int) -> "tuple[list[Facts], list[Line]]":
    """The facts of all ranks, and the lines; those of this rank alone if the ranks cannot exchange anything."""
    from trainwright.inspect.doctor.host import connection_fault, facts_of_this_process, measure_folder, port_fault
    from trainwright.parallel.data_parallel import num_launched, setup_dist_util

    num_ranks, rank = num_launched(), _rank()
    try:
        device = setup_dist_util(timeout_s=TIMEOUT_S)
        facts = facts_of_this_process(rank)
        if num_ranks == 1:
            created = _make_folder(folder, facts)
            measure_folder(folder, facts)
            _remove(folder, created)
            fault = port_fault(port)
            advice = f"end the program there (`ss -ltnp 'sport = :{port}'`), or choose another port in --rdzv-endpoint."
            own = Line("port", f"{port}: {fault}" if fault else f"{port} is free", advice if fault else "")
            last = Line("all-reduce", "needs several processes: trainwright launch -n 2 doctor")
            return [facts], [own, *judge([facts], folder), last]
        facts.master_fault = connection_fault(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        return _examine_together(facts, folder, device)
    except RuntimeError as error:  # torch's error of a connection or an exchange
        facts = facts_of_this_process(rank)
        return [facts], [judge_addresses([facts]), judge_meeting(str(error))]


def _examine_together(facts: "Facts", folder: Path, device: "torch.device") -> "tuple[list[Facts], list[Line]]":
    from trainwright.base.dist import all_gather_object, broadcast_object, synchronize
    from trainwright.inspect.doctor.group import measure_all_reduce, measure_clock
    from trainwright.inspect.doctor.host import measure_folder

    speed = measure_all_reduce(device)
    hosts = all_gather_object(facts.host)
    first_ranks = [rank for rank, host in enumerate(hosts) if hosts.index(host) == rank]
    facts.clock_s = measure_clock()
    created = _make_folder(folder, facts) if facts.rank == 0 else []
    token = broadcast_object(folder / f".trainwright-doctor-{uuid.uuid4().hex}")
    if facts.rank == 0 and not facts.folder_fault:
        token.touch()
    synchronize()
    if facts.rank in first_ranks:
        facts.sees_token = _waits_for(token)
        if facts.sees_token:
            measure_folder(folder, facts)
    everywhere = all_gather_object(facts)
    if facts.rank == 0:
        token.unlink(missing_ok=True)
        _remove(folder, created)
    known = [everywhere[rank] for rank in first_ranks]
    return everywhere, [*judge(everywhere, folder, known), judge_clocks(known), judge_speed(speed, len(hosts))]


def judge(facts: "Sequence[Facts]", folder: Path, first_of_hosts: "Sequence[Facts] | None" = None) -> list[Line]:
    """The lines about facts that need no measurement between ranks; ``first_of_hosts`` have those of the folder."""
    first = facts if first_of_hosts is None else first_of_hosts
    lines = [judge_addresses(first), judge_versions(facts), judge_devices(facts, first)]
    lines += [judge_master(facts)] if len(facts) > 1 else []
    return [*lines, *judge_folder(first, folder), judge_shm(first), judge_files(first, len(facts))]


def judge_addresses(facts: "Sequence[Facts]") -> Line:
    chosen = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    shown = []
    for fact in facts:
        found = ", ".join(f"{address} ({name})" for name, address in fact.addresses.items()) or fact.resolved
        shown.append(f"{fact.host}: {found or 'no address'}")
    unreachable = [fact for fact in facts if not chosen and (not fact.resolved or fact.resolved.startswith("127."))]
    text = "; ".join(shown)
    if len(facts) > 1 and unreachable:
        names = ", ".join(fact.host for fact in unreachable)
        interface = next((name for fact in unreachable for name in fact.addresses), "eth0")
        return Line(
            "addresses",
            f"{names}: the host's name leads to {unreachable[0].resolved or 'no address'}, of no use to other hosts",
            f"set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME={interface}, and --local-addr; or correct /etc/hosts.",
        )
    return Line("addresses", text)


def judge_meeting(error: str) -> Line:
    reason = (error.splitlines() or [""])[0]
    return Line(
        "connection",
        f"rank {_rank()} cannot exchange data with the others: {reason}",
        "allow all TCP ports between the hosts (firewall), and set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the"
        " interface that they share.",
    )


def judge_master(facts: "Sequence[Facts]") -> Line:
    faults = [f"rank {fact.rank} on {fact.host}: {fact.master_fault}" for fact in facts if fact.master_fault]
    if faults:
        return Line("ports", "; ".join(faults), "allow this port between the hosts (firewall).")
    return Line("ports", f"all ranks reach {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}")


def judge_versions(facts: "Sequence[Facts]") -> Line:
    differing = []
    for name in facts[0].versions:
        ranks = _by_value(facts, lambda fact, name=name: fact.versions[name])  # type: ignore[misc]
        if len(ranks) > 1:
            differing.append(f"{name} {_by_ranks(ranks)}")
    if differing:
        return Line("versions", "; ".join(differing), "install the same versions on all hosts.")
    return Line("versions", "equal on all ranks" if len(facts) > 1 else ", ".join(facts[0].versions.values()))


def judge_devices(facts: "Sequence[Facts]", first_of_hosts: "Sequence[Facts]") -> Line:
    kinds = _by_value(facts, lambda fact: fact.device)
    if len(kinds) > 1:
        advice = "give all ranks the same kind; CUDA_VISIBLE_DEVICES= (empty) is the CPU everywhere."
        return Line("devices", _by_ranks(kinds), advice)
    shown = []
    for fact in first_of_hosts:
        processes = [other for other in facts if other.host == fact.host]
        if fact.device == "cpu":
            shown.append(f"{fact.host}: CPU, {fact.cores} cores, {len(processes)} x {fact.threads} threads")
            if len(processes) * fact.threads > 2 * fact.cores:
                advice = f"set OMP_NUM_THREADS={max(1, fact.cores // len(processes))}."
                return Line("devices", f"{shown[-1]}, which wait for each other", advice, is_warning=True)
            continue
        shown.append(f"{fact.host}: {fact.devices} x {fact.device}")
        if len({other.device_index for other in processes}) < min(len(processes), fact.devices):
            return Line("devices", f"{shown[-1]}, and several ranks use one", "set LOCAL_RANK on each rank.")
    return Line("devices", "; ".join(shown))


def judge_folder(first_of_hosts: "Sequence[Facts]", folder: Path) -> list[Line]:
    faults = [f"{fact.host}: {fact.folder_fault}" for fact in first_of_hosts if fact.folder_fault]
    if faults:
        return [Line("output folder", "; ".join(faults), "choose a folder that you may write to (--output-dir).")]
    blind = [fact.host for fact in first_of_hosts if not fact.sees_token]
    if blind:
        text = f"{', '.join(blind)}: does not see what rank 0 writes into {folder.absolute()}"
        advice = "choose a folder on a file system that all hosts share, such as NFS or Lustre."
        return [Line("output folder", text, advice)]
    shared = "writable, and the same on all hosts" if len(first_of_hosts) > 1 else "writable"
    lines = [Line("output folder", f"{folder.absolute()}: {shared}")]
    least = min(first_of_hosts, key=lambda fact: fact.free_bytes)
    slowest = min(fact.bytes_per_s for fact in first_of_hosts)
    text = f"{_gb(least.free_bytes)} free; writes {slowest / 1e6:,.0f} MB/s, so 1 GB takes {1e9 / slowest:.1f} s"
    is_full = least.free_bytes < MIN_FREE_BYTES
    return [*lines, Line("disk", text, f"make space on {least.host}, or choose another folder." if is_full else "")]


def judge_shm(first_of_hosts: "Sequence[Facts]") -> Line:
    sizes = [(fact.shm_bytes, fact.host) for fact in first_of_hosts if fact.shm_bytes is not None]
    if not sizes:
        return Line("shared memory", "not limited by this system")
    least, host = min(sizes)
    text = f"/dev/shm has {_gb(least)}"
    if least >= MIN_SHM_BYTES:
        return Line("shared memory", text)
    advice = "loaders with num_workers > 0 need more: `docker run --ipc=host`, or a memory volume at /dev/shm."
    return Line("shared memory", f"{text} on {host}", advice, is_warning=True)


def judge_files(first_of_hosts: "Sequence[Facts]", num_ranks: int) -> Line:
    from trainwright.base.open_files import needed_files

    limits = [(fact.files, fact.host) for fact in first_of_hosts if fact.files is not None]
    if not limits:
        return Line("open files", "any number")
    least, host = min(limits)
    if least >= needed_files(num_ranks):
        return Line("open files", f"{least:,} of a process")
    advice = (
        f"{num_ranks} processes may need {needed_files(num_ranks):,} each, for their connections: `ulimit -n"
        f" {needed_files(num_ranks)}` before the start, LimitNOFILE= of a service, `--ulimit nofile=` of a container."
    )
    return Line("open files", f"{least:,} of a process on {host}", advice, is_warning=True)


def judge_clocks(first_of_hosts: "Sequence[Facts]") -> Line:
    farthest = max(first_of_hosts, key=lambda fact: abs(fact.clock_s))
    text = f"at most {abs(farthest.clock_s) * 1e3:.1f} ms between hosts" if len(first_of_hosts) > 1 else "one host"
    if abs(farthest.clock_s) <= MAX_CLOCK_S:
        return Line("clocks", text)
    how = "ahead of" if farthest.clock_s > 0 else "behind"
    text = f"{farthest.host} is {abs(farthest.clock_s):.1f} s {how} {first_of_hosts[0].host}"
    return Line("clocks", text, "synchronize the clocks (chrony or ntpd): times in logs and files are wrong.")


def judge_speed(speed: "Speed", num_ranks: int) -> Line:
    gradients_s = 4e8 / speed.bytes_per_s
    text = f"{num_ranks} ranks: {speed.latency_s * 1e3:.2f} ms latency, {speed.bytes_per_s / 1e9:.2f} GB/s"
    return Line("all-reduce", f"{text} (float32 gradients of 100 M parameters: {gradients_s:.2g} s)")


def _make_folder(folder: Path, facts: "Facts") -> list[Path]:
    """Make the folder; the folders that were made, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        facts.folder_fault = f"{folder}: {error.strerror or error}"
    return missing


def _remove(folder: Path, created: Iterable[Path]) -> None:
    for path in created:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _waits_for(token: Path) -> bool:
    """Whether the file is there, also on a file system that shows it a little later."""
    for _ in range(20):
        try:
            if token.name in os.listdir(token.parent):  # unlike a question for the name, not cached
                return True
        except OSError:
            pass
        time.sleep(0.1)
    return False


def _by_value(facts: "Sequence[Facts]", value: "Callable[[Facts], str]") -> dict[str, "list[Facts]"]:
    found: dict[str, list[Facts]] = {}
    for fact in facts:
        found.setdefault(value(fact), []).append(fact)
    return found


def _by_ranks(values: dict[str, "list[Facts]"]) -> str:
    """``2.13.0 on ranks 0, 1 (a), 2.12.0 on rank 5 (b)``."""
    texts = []
    for value, facts in values.items():
        numbers = ", ".join(str(fact.rank) for fact in facts[:8]) + (", ..." if len(facts) > 8 else "")
        hosts = ", ".join(dict.fromkeys(fact.host for fact in facts))
        texts.append(f"{value} on rank{'s' * (len(facts) > 1)} {numbers} ({hosts})")
    return ", ".join(texts)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"


def _rank() -> int:
    return int(os.environ.get("RANK", 0))
