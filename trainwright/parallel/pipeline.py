"""Pipeline parallelism: stages of a model on several processes, which pass micro-batches on to each other.

The schedules are those of ``torch.distributed.pipelining``. All stages of a pipeline read the same batches; between
them travel hidden states and their gradients.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.base.batch import parts
from trainwright.base.dist import gather_over_pipeline, new_cpu_group, warning_for_all
from trainwright.base.errors import ConfigError
from trainwright.parallel.batch_comparison import check_same, shapes_of
from trainwright.parallel.mesh import Mesh
from trainwright.parallel.pipeline_cut import Stage, cut_model
from trainwright.parallel.tied import TiedParameters

logger = logging.getLogger("trainwright.parallel")

Outline = tuple[dict[str, str], dict[str, type[nn.Module]]]

MAX_SCHEDULES = 16  # of different shapes; each has buffers for the hidden states of its micro-batches


class _EarlierStageError(RuntimeError):
    """A stage before this one has failed."""


@dataclass(frozen=True)
class ModelSize:
    """The parameters of a model: their number, those that are trained, their bytes, and the number of each part.

    A parameter that several parts share counts for the first of them.
    """

    total: int
    trainable: int
    num_bytes: int
    parts: Mapping[str, int]

    @classmethod
    def of(cls, model: nn.Module) -> "ModelSize":
        parameters, counted, parts = [*model.parameters()], set[int](), dict[str, int]()
        children = _parts_of(model)
        while len(children) == 1:  # a wrapper
            children = _parts_of(children[0][1])
        for name, child in children:
            of_part = {id(p): p.numel() for p in child.parameters() if id(p) not in counted}
            counted |= of_part.keys()
            parts[f"{type(child).__name__} {name}" if name.isdigit() else name] = sum(of_part.values())
        return cls(
            sum(p.numel() for p in parameters),
            sum(p.numel() for p in parameters if p.requires_grad),
            sum(p.numel() * p.element_size() for p in parameters),
            parts,
        )


def _parts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in model.named_children() if any(True for _ in child.parameters())]


class Pipeline:
    """The stages of this process, and their connection to those of the others.

    Attributes:
        stages: the stages of this process, the earliest first. What shards or wraps the model does it to each of them.
        is_last: whether this process has the last stage, which computes outputs and losses.
        last_rank: the pipeline rank of the process that has it.
        tied: the parameters that several stages hold.
        layer_stages: the stage of each layer.
        complete_size: of the model before it was cut.
        forward_s, backward_s: seconds of the latest ``run`` in forward and backward passes of this process's stages.
        outline: the names of the complete model, see :func:`outline_of`.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device) -> None:
        """Cut ``model``, in place. Every process calls this with the same model."""
        layout = mesh.layout
        self.complete_size = ModelSize.of(model)
        self.forward_s = self.backward_s = 0.0
        self._number = number = layout.all_stages.pipeline
        self._rank_of = [_rank_of(stage, layout.pipeline, layout.schedule) for stage in range(number)]
        own = [stage for stage, rank in enumerate(self._rank_of) if rank == mesh.pipeline_rank]
        self._model, self.outline = model, outline_of(model)
        self.stages, ties, self.layer_stages = cut_model(model, number, own, layout.all_stages.stage_ids)
        self.tied = TiedParameters(model, ties, own, self._rank_of, mesh)
        # Schedules with zero bubbles detach outputs in place, which views do not allow. FSDP2 warns of views.
        for stage in self.stages:
            stage.copies_output = layout.schedule.endswith("ZeroBubble") or layout.data > 1
        self.is_last, self.last_rank = self.stages[-1].is_last, self._rank_of[-1]
        self.device = device
        self._mesh, self._group = mesh, mesh.pipeline_group
        self._shapes: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        self._schedules: dict[Any, Any] = {}
        # At stage 3 parameters are gathered in each pass: data ranks must make the same passes in the same order.
        self._agree = self._build_agreement() if layout.zero_stage == 3 and layout.shard > 1 else None
        self._sent: Any = None
        self._sharded: list[Any] = []
        self._num_windows = 0
        self._prepared: tuple[Any, Any] | None = None
        self._sending: Any = None  # on the last stage: a broadcast that the others may not have received yet
        vars(model)["_pipeline"] = self
        model.forward = MethodType(_replaying(type(model).forward), model)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model has no pipeline: it cannot compute outputs."""
        return None

    def check_length(self, length: int, setting: str) -> None:
        """Warn if an update has few micro-batches for the pipeline, or a number that its schedule does not take."""
        name, stages = self._mesh.layout.schedule, self._mesh.layout.pipeline
        other = self._schedule_for(length)
        if other != name or length < stages:
            more = f" {name} does not take this number: {other} is used." if other != name else ""
            logger.warning(
                "%s=%d: the micro-batches of an update are those of the pipeline, whose %d stages wait for each other"
                " less with %d or more.%s",
                setting, length, stages, 4 * stages, more,
            )  # fmt: skip

    def warning_for_all(self) -> AbstractContextManager[None]:
        """Around what only the last stage computes: its warnings, those of the first data rank, are for all."""
        mesh = self._mesh
        return warning_for_all(mesh.averaging_rank == 0 and mesh.tensor_rank == 0)

    def _warning_for_all(self, finish: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        def finish_for_all(outputs: Any, batch: Any) -> Tensor:
            with self.warning_for_all():
                return finish(outputs, batch)

        return finish_for_all

    # Training.

    def run(self, batches: Sequence[Any], finish: Callable[[Any, Any], Tensor]) -> None:
        """Forward and backward passes of all micro-batches, whose gradients add up.

        Args:
            finish: called on the last stage with the outputs for each batch, and the batch; returns what is
                differentiated.
        """
        self._reshard()
        finish = self._warning_for_all(finish)
        self.forward_s = self.backward_s = 0.0
        self._num_windows += 1
        if self._num_windows & (self._num_windows - 1) == 0:  # 1, 2, 4, 8 ...: often enough to find what goes apart
            self._compare(batches)
        runs = [(key, [*group]) for key, group in groupby(batches, key=shapes_of)]
        is_new = False
        if self._agree is not None:
            apart = [(shapes_of(batch), [batch]) for batch in batches]
            is_alike, *are_known = self._agree(len(runs) == 1, self._has_schedules(runs), self._has_schedules(apart))
            runs, is_new = (runs, not are_known[0]) if is_alike else (apart, not are_known[1])
        for number, (key, same) in enumerate(runs, start=1):
            if is_new:  # on some of the processes that compute together: all learn the shapes, which takes a pass
                self._shapes.pop(key, None)
                self._schedules.pop((len(same), key), None)
            self._run_schedule(self._shapes_for(key, same[0]), key, same, finish, is_last=number == len(runs))

    def _has_schedules(self, runs: Sequence[tuple[Any, Sequence[Any]]]) -> bool:
        return all((len(same), key) in self._schedules for key, same in runs)

    def _run_schedule(
        self,
        shapes: list[tuple[Tensor, Tensor]],
        key: Any,
        batches: list[Any],
        finish: Callable[[Any, Any], Tensor],
        *,
        is_last: bool,
    ) -> None:
        key = len(batches), key
        if key not in self._schedules:
            if len(self._schedules) >= MAX_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = self._new_schedule(shapes, len(batches))
        schedule, timed = self._schedules[key]
        for stage in self.stages:
            stage.begin(batches, finish)
        for one in timed:
            one.averages, one.forward_s, one.backward_s = is_last, 0.0, 0.0
        placeholder = torch.zeros(len(batches), device=self.device)
        arguments = [placeholder] if self.stages[0].is_first else []
        error = None
        try:
            schedule.step(*arguments, target=placeholder if self.is_last else None, return_outputs=False)
        except RuntimeError:
            error = next((stage.error for stage in self.stages if stage.error is not None), None)
            if error is None:
                raise
        self.forward_s += sum(one.forward_s for one in timed)
        self.backward_s += sum(one.backward_s for one in timed)
        if error is not None:  # torch has replaced it by one of its own, which is not to be its context
            raise error

    def _new_schedule(self, shapes: list[tuple[Tensor, Tensor]], length: int) -> tuple[Any, list[Any]]:
        """A schedule and its stages."""
        # A new one for each shape: torch's keeps buffers for hidden states of one shape.
        from torch.distributed import pipelining

        from trainwright._torch_compat.pipeline_stage import TimedStage

        stages = [
            TimedStage(stage, stage.index, self._number, self.device, before, after, group=self._group)
            for stage, (before, after) in zip(self.stages, shapes, strict=True)
        ]
        kind = getattr(pipelining, f"Schedule{self._schedule_for(length)}")
        given = stages[0] if len(stages) == 1 else stages
        return kind(given, length, loss_fn=lambda loss, _: loss, scale_grads=False), stages

    def _schedule_for(self, length: int) -> str:
        """The schedule for a number of micro-batches: some need a certain number."""
        return schedule_for(self._mesh.layout.schedule, self._mesh.layout.pipeline, length)

    def _shapes_for(self, key: Any, batch: Any) -> list[tuple[Tensor, Tensor]]:
        """What each stage of this process receives and returns for batches of these shapes, as example tensors."""
        found = self._shapes.get(key)
        if found is not None:
            return found
        found = [_meta_pair(stage, *pair) for stage, pair in zip(self.stages, self._probe(batch), strict=True)]
        if len(self._shapes) >= MAX_SCHEDULES:
            del self._shapes[next(iter(self._shapes))]
        self._shapes[key] = found
        return found

    def _build_agreement(self) -> Callable[..., list[bool]]:
        return _agreement()

    def _compare(self, batches: Sequence[Any]) -> None:
        check_same(batches, gather_over_pipeline, "Pipeline stages")

    def _probe(self, batch: Any) -> list[tuple[Tensor | None, Any]]:
        """Run one batch without gradients, in evaluation mode: no random number is drawn, no statistics change."""
        modes = [(module, module.training) for stage in self.stages for module in stage.modules()]
        failure, found = None, []
        try:
            for stage in self.stages:
                stage.eval()
            with torch.no_grad():
                found = self._forward(batch)
        except Exception as error:
            failure = error
        finally:
            for module, is_training in modes:
                module.training = is_training
        is_first_cause = failure is not None and not isinstance(failure, _EarlierStageError)
        texts = gather_over_pipeline(f"{type(failure).__name__}: {failure}" if is_first_cause else None)
        if is_first_cause and failure is not None:
            raise failure
        first = next((place for place, text in enumerate(texts) if text is not None), None)
        if first is not None:
            failed = ConfigError(f"Another pipeline stage has failed with {texts[first]}")
            rank = torch.distributed.get_global_rank(self._group, first)
            failed.raised_on_rank = rank  # type: ignore[attr-defined]  # see parallel/faults.py
            raise failed
        return found

    def prepare(self, outputs: Any, batch: Any) -> None:
        """The next call of the model, which must be for ``batch``, returns these outputs. On the last stage."""
        self._prepared = outputs, batch

    def replay(self, arguments: Sequence[Any]) -> Any:
        """The prepared outputs, for a call of the model with ``arguments``."""
        prepared, self._prepared = self._prepared, None
        name = type(self._model).__name__
        if prepared is None:
            raise ConfigError(
                f"{name} is cut into pipeline stages, so a step or an evaluation can call it once for each batch, where"
                " its outputs are: on the last stage. Generating needs more calls; use tensor parallelism or ZeRO."
            )
        outputs, batch = prepared
        known = {*map(id, parts(batch))}
        if any(isinstance(argument, Tensor) and id(argument) not in known for argument in arguments):
            raise ConfigError(
                f"{name} is cut into pipeline stages, which have computed their outputs for the batch of the loader; it"
                " was called with other tensors. Change batches in the loader or its collate function."
            )
        return outputs

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor from the last stage to all others, in place. The last stage does not wait for the others."""
        dist: Any = torch.distributed
        sent = tensor.clone() if self.is_last else tensor  # may be changed before it has been sent
        work = dist.broadcast(sent, dist.get_global_rank(self._group, self.last_rank), self._group, async_op=True)
        if self._sending is not None:
            self._sending.wait()  # an error of it is raised here
        self._sending = work if self.is_last else None
        if not self.is_last:
            work.wait()

    # Evaluation.

    def evaluated(self, step: Callable[[Any], object], skip: Callable[[], object]) -> Callable[[Any], object]:
        """``step`` of an evaluation, called where outputs are: on the last stage.

        A call of the model in it returns the outputs of all stages. ``skip`` is called on the other processes.
        """
        self._reshard()

        def evaluate(batch: Any) -> object:
            outputs = self.evaluate(batch)
            if not self.is_last:
                return skip()
            with self.warning_for_all():
                self.prepare(outputs, batch)
                return step(batch)

        return evaluate

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Any:
        """The model's outputs for a batch, on the last stage; None on the others. Batches may have any shapes.

        Every stage calls this with the same batches. A stage does not wait for those behind it.
        """
        *_, (_, outputs) = self._forward(batch)
        return outputs if self.is_last else None

    def _forward(self, batch: Any) -> list[tuple[Tensor | None, Any]]:
        """The input and the result of each stage of this process."""
        here, passed, results, failure = self._mesh.pipeline_rank, None, [], None
        for stage in self.stages:
            hidden = passed
            try:
                if not stage.is_first and self._rank_of[stage.index - 1] != here:
                    hidden = self._receive(self._rank_of[stage.index - 1], stage)
                if failure is None:
                    stage.begin([batch])
                    passed = stage(hidden)
                    results.append((hidden, passed))
            except Exception as error:
                failure = failure or error
            if not stage.is_last and self._rank_of[stage.index + 1] != here:
                self._send(passed if failure is None else None, self._rank_of[stage.index + 1])
        if failure is not None:
            raise failure
        return results

    def _send(self, hidden: Tensor | None, rank: int) -> None:
        """Send hidden states; None: this stage or one before it has failed."""
        dist: Any = torch.distributed
        to = dist.get_global_rank(self._group, rank)
        head = None if hidden is None else (hidden.shape, hidden.dtype)
        dist.send_object_list([head], to, group=self._group)
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None
        if hidden is not None:
            hidden = hidden.contiguous()
            self._sent = dist.isend(hidden, to, group=self._group), hidden  # kept until it has arrived

    def _receive(self, rank: int, stage: Stage) -> Tensor:
        dist: Any = torch.distributed
        source, head = dist.get_global_rank(self._group, rank), [None]
        dist.recv_object_list(head, source, group=self._group)
        if head[0] is None:
            raise _EarlierStageError(f"{stage}: a stage before it has failed.")
        shape, dtype = head[0]
        hidden = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(hidden, source, group=self._group)
        return hidden

    def _reshard(self) -> None:
        """Parameters that an earlier forward pass has gathered may have been changed since, as averages do."""
        for module in self._sharded:
            module.reshard()

    def complete(self) -> None:
        """Call this when the stages are sharded: parameters that another stage counts in the norm are marked."""
        self.tied.find_copies()
        self._sharded = [m for stage in self.stages for m in stage.modules() if hasattr(m, "reshard")]  # FSDPModules


def _agreement() -> Callable[..., list[bool]]:
    """A function that returns which of its arguments are True on all processes. Every process must call this."""
    group, dist = new_cpu_group(), torch.distributed

    def agree(*values: bool) -> list[bool]:
        tensor = torch.tensor(values, dtype=torch.int32, device="cpu")
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=group)
        return [bool(value) for value in tensor]

    return agree


def pipeline_of(model: Any) -> Pipeline | None:
    """The pipeline that a model is cut into; None: it is complete."""
    return vars(model).get("_pipeline") if isinstance(model, nn.Module) else None


def outline_of(model: nn.Module, part: str = "") -> Outline:
    """The first name of each parameter by each of its names, and the class of each module by its name.

    Of the complete model, also if this process holds stages of it; with ``part`` of this submodule, without its name.
    """
    pipeline = pipeline_of(model)
    if pipeline is not None:
        return _outline_of_part(pipeline.outline, f"{part}.") if part else pipeline.outline
    model = model.get_submodule(part)
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    parameters = {name: first.setdefault(id(parameter), name) for name, parameter in named}
    return parameters, {name: type(module) for name, module in model.named_modules()}


def _outline_of_part(outline: Outline, prefix: str) -> Outline:
    parameters, modules = outline
    inside = {name.removeprefix(prefix): of for name, of in parameters.items() if name.startswith(prefix)}
    first: dict[str, str] = {}
    return (
        {name: first.setdefault(of, name) for name, of in inside.items()},
        {f"{name}.".removeprefix(prefix)[:-1]: kind for name, kind in modules.items() if f"{name}.".startswith(prefix)},
    )


def _replaying(forward: Callable[..., Any]) -> Callable[..., Any]:
    """In place of a model's ``forward``, with its signature: returns outputs that its stages have computed."""

    @functools.wraps(forward)
    def replay(model: nn.Module, *arguments: Any, **named: Any) -> Any:
        pipeline = pipeline_of(model)
        if pipeline is None:
            raise ConfigError(f"This copy of {type(model).__name__} has one pipeline stage of it, and no others.")
        return pipeline.replay([*arguments, *named.values()])

    return replay


def schedule_for(name: str, stages: int, length: int) -> str:
    """The schedule for ``length`` micro-batches: ``name``, or one without conditions if it needs another number."""
    if name == "1F1B" and length < stages:
        return "GPipe"
    if name.startswith("Interleaved") and length % max(1, length // stages):
        return "LoopedBFS"
    return name


def _rank_of(stage: int, ranks: int, schedule: str) -> int:
    """The pipeline rank of a stage: in a loop, or there and back."""
    if schedule == "ZBVZeroBubble" and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def _meta_pair(stage: Stage, before: Tensor | None, after: Any) -> tuple[Tensor, Tensor]:
    """Example tensors for torch, on no device."""

    def example(hidden: Tensor) -> Tensor:
        if not (isinstance(hidden, Tensor) and hidden.is_floating_point()):
            raise ConfigError(
                f"{stage} must pass one tensor of numbers to the next stage; got {type(hidden).__name__}."
            )
        return torch.empty(hidden.shape, dtype=hidden.dtype, device="meta", requires_grad=True)

    first = torch.empty(1, device="meta") if before is None else example(before)
    last = torch.empty((), device="meta", requires_grad=True) if stage.is_last else example(after)
    return first, last
