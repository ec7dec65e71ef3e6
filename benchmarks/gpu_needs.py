"""Rows of ``benchmarks.gpu_table`` for what several processes do with GPUs only: order, memory, hangs.

With fewer GPUs than processes, all of them share the first one: each is a host of its own for NCCL, which exchanges
over sockets. This shows whether the calls are made in an order that completes and gives the right numbers. It shows
nothing about speed, nor about NVLink, InfiniBand, or kernels of NCCL that wait for each other on one GPU: that takes a
GPU for each process. ``--device cpu`` runs the same code with gloo, which shows that it has no errors of its own.
"""

import os
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.counted_peak import counted_peak
from benchmarks.gpu_rows import Found, Settings, build_gpt, compared, gpt_config, trained_gpt
from benchmarks.worker import folder_of_run
from trainwright.base.agreed_checks import AgreedChecks
from trainwright.base.dist import all_gather_object, get_rank, is_any
from trainwright.hooks import HookBase
from trainwright.inspect.estimate import estimate
from trainwright.parallel.data_parallel import shut_down
from trainwright.parallel.mesh import current_mesh

HANG_S = 5  # hang_timeout_s of the row of a hang
WAITED = f"waited at one place for {HANG_S} s"


class Check(HookBase):
    """The check for signals of all ranks, which a run makes once a second, before each step."""

    def before_train(self) -> None:
        self._checks = AgreedChecks(self.trainer.start_iter, period_s=0)
        self.num_checks = 0

    def before_step(self) -> None:
        assert self._checks.largest(self.trainer.iter, get_rank() + 1)[0] == dist.get_world_size()
        self.num_checks += 1


def order(settings: Settings) -> Found:
    """The all-reduce of the check before each step, beside the communicators of FSDP and of a pipeline.

    It is on the group of all ranks, and those are on groups of their own: NCCL needs each rank to make the calls of one
    GPU in an order in which none waits for a later one.
    """
    check = Check()
    losses, _ = trained_gpt(settings, hooks=[check])
    shut_down()
    return compared(settings, losses, f"{check.num_checks} checks")


def evaluations(settings: Settings) -> Found:
    """Evaluations of a pipeline between its steps: asynchronous broadcasts of outputs beside sends and receives.

    With more than one GPU it also shows whether the two overlap without a deadlock on the hardware.
    """

    class Evaluate(HookBase):
        def before_train(self) -> None:
            self.found = list[float]()

        def after_step(self) -> None:
            self.found.append(self.trainer.evaluate()["loss"])

    evaluate = Evaluate()
    losses, _ = trained_gpt(settings, hooks=[evaluate])
    are_equal = not is_any(any(len(set(row)) > 1 for row in zip(*all_gather_object(evaluate.found), strict=True)))
    shut_down()
    found = compared(settings, losses, f"{len(evaluate.found)} evaluations, equal on all ranks: {are_equal}")
    return Found(found.result, found.expected, found.passed and are_equal, losses)


def eager(settings: Settings) -> Found:
    """``device_id`` of ``init_process_group``, which connects NCCL at once and splits groups from that communicator.

    The library passes none. With a GPU for each process the times say whether it should.
    """
    rank = int(os.environ["RANK"])
    device = torch.device(settings.device, rank % torch.cuda.device_count()) if settings.on_gpu else torch.device("cpu")
    if settings.on_gpu:
        torch.cuda.set_device(device)
    times, sums = [], []
    with folder_of_run() as folder:
        for number, device_id in enumerate((None, device if settings.on_gpu else None)):
            store = dist.FileStore(f"{folder}/store{number}", settings.ranks)
            start = time.perf_counter()
            backend = "nccl" if settings.on_gpu else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=settings.ranks, device_id=device_id)
            group = dist.new_group([*range(settings.ranks)])
            summed = torch.ones(8, device=device)
            for one in (None, group):
                dist.all_reduce(summed, group=one)
            sums.append(summed[0].item())
            times.append(time.perf_counter() - start)
            dist.destroy_process_group()
    return Found(
        f"start and two sums: {times[0]:.2f} s without it, {times[1]:.2f} s with it",
        "equal sums",
        sums == [settings.ranks**2] * 2,
    )


def dropout(settings: Settings) -> Found:
    """Dropout of tensor-parallel processes: equal masks of what all have, other masks of parts on a GPU.

    On a CPU, DTensor draws from each process's own generator, so that masks of parts are not compared there.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    losses, trainer = trained_gpt(settings, dropout=0.3)
    mesh = current_mesh()
    assert mesh is not None
    replicated = [
        tensor_of(parameter).cpu().tolist()
        for parameter in trainer.model.parameters()
        if not isinstance(parameter, DTensor) or all(one.is_replicate() for one in parameter.placements)
    ]
    weights = all_gather_object(replicated)

    def masks(kind: Any) -> list[Any]:
        ones = distribute_tensor(torch.ones(64, 64, device=trainer.device), mesh.device_mesh["tp"], [kind])
        return all_gather_object(torch.nn.functional.dropout(ones).to_local().cpu().tolist())

    first, second = masks(Replicate())
    one_part, other_part = masks(Shard(0))
    has_equal, has_equal_masks, has_others = weights[0] == weights[1], first == second, one_part != other_part
    shut_down()
    return Found(
        f"equal weights that all have: {has_equal}; equal masks: {has_equal_masks}, other ones of parts: {has_others}",
        "equal weights and masks, other masks of parts on a GPU",
        has_equal and has_equal_masks and (has_others or not settings.on_gpu) and all(loss == loss for loss in losses),
    )


def offload(settings: Settings) -> Found:
    """ZeRO with parameters in pinned host memory (``zero_offload``): exchanges of the host beside those of the GPU."""

    class Pinned(HookBase):
        def before_step(self) -> None:
            self.is_pinned = all(tensor_of(one).is_pinned() for one in self.trainer.model.parameters())

    pinned = Pinned()
    losses, _ = trained_gpt(settings, hooks=[pinned])
    shut_down()
    found = compared(settings, losses, f"pinned: {pinned.is_pinned}")
    return Found(found.result, found.expected, found.passed and pinned.is_pinned is settings.on_gpu, losses)


def compiled(settings: Settings) -> Found:
    """Compiled blocks under FSDP, or tensor parallel."""
    losses, trainer = trained_gpt(settings, compile_blocks=True)
    ms = trainer.record.ms_per_step
    shut_down()
    return compared(settings, losses, f"{ms:.1f} ms a step")


def peak(settings: Settings) -> Found:
    """The peak of the caching allocator against that of ``estimate``; on a CPU, of tensors that are counted."""
    on_cpu = replace(settings, device="cpu")
    with folder_of_run() as folder:  # before the processes meet
        config = gpt_config(on_cpu, folder)
        expected = estimate(lambda config: build_gpt(config, on_cpu), config, world_size=settings.ranks).peak
    reserved = 0

    class Reset(HookBase):
        def before_step(self) -> None:
            if self.trainer.iter == 2 and settings.on_gpu:  # the optimizer has its states
                torch.cuda.reset_peak_memory_stats()

    if settings.on_gpu:
        trained_gpt(settings, hooks=[Reset()])
        measured, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        with folder_of_run() as folder:
            config = gpt_config(settings, folder)
            measured = counted_peak(lambda: build_gpt(config, settings))
    shut_down()
    ratio = measured / expected
    return Found(
        f"{measured / 2**20:,.1f} MiB, estimated {expected / 2**20:,.1f}"
        + (f"; reserved {reserved / 2**20:,.1f}" if settings.on_gpu else ""),
        "within 10 % of the estimate",
        0.9 <= ratio <= 1.1,
    )


def hanging(settings: Settings) -> Found:
    """A training whose last process does not come to its third step. The others wait in their step, or for their GPU.

    On a GPU the host waits where it reads a number, while the kernel of an exchange spins.
    """

    class Hang(HookBase):
        def before_step(self) -> None:
            if self.trainer.iter == 2 and get_rank() == settings.ranks - 1:
                time.sleep(1000)

    trained_gpt(settings, hooks=[Hang()], hang_timeout_s=HANG_S)
    return Found("", "", False)


def tensor_of(parameter: Any) -> Tensor:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach()  # type: ignore[no-any-return]
