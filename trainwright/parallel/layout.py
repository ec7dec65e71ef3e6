"""How the processes of a run are arranged: arithmetic alone, without a process group.

A run of ``world_size`` processes is a grid of pipeline stages x data ranks x context ranks x tensor ranks; the tensor
ranks of one place are neighbours. Gradients are averaged over data and context ranks, ``replicate * shard`` of them:
with ZeRO, ``shard`` of these hold one copy of the model together. ``expert`` neighbours of all of a grid without stages
hold the experts of one copy together.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainwright.base.errors import ConfigError, did_you_mean

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")  # that data ranks multiply

STAGES_PER_PROCESS = {"Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2}  # 1 otherwise


@dataclass(frozen=True)
class Layout:
    """The sizes of a run's parallelism.

    Attributes:
        data: data-parallel ranks, each with its share of a global batch.
        tensor: ranks that hold the parts of each layer together.
        pipeline: stages, each with some of the layers.
        replicate: copies of the model among the ranks whose gradients are averaged.
        zero_stage: what the ranks of one copy share: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        sequence_parallel: tensor ranks also share the activations between their layers.
        schedule: of the pipeline, one of ``SCHEDULES``.
        custom_stage_ids: the stage of each layer, if the user chose them.
        offload: with a zero_stage, parameters, gradients and optimizer state are in host memory.
        context: ranks that hold the parts of each sequence together.
        expert: data, context and tensor ranks that hold the experts of each layer together, whole ones each.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    replicate: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    schedule: str = "1F1B"
    custom_stage_ids: tuple[int, ...] | None = None
    offload: bool = False
    context: int = 1
    expert: int = 1

    def __str__(self) -> str:
        """
        >>> str(Layout(data=8, tensor=4, pipeline=2, zero_stage=3)), str(Layout())
        ('8 data (ZeRO 3) x 4 tensor x 2 pipeline', '1 data')
        """
        zero = f" (ZeRO {self.zero_stage}{', offloaded' * self.offload})" if self.zero_stage else ""
        copies = f" in {self.replicate} copies" if self.zero_stage and self.replicate > 1 else ""
        experts = f", experts over {self.expert}" if self.expert > 1 else ""
        sizes = [f"{self.data} data{zero}{copies}"]
        sequence = " (sequence parallel)" if self.sequence_parallel else ""
        sizes += [f"{self.context} context"] if self.context > 1 else []
        sizes += [f"{self.tensor} tensor{sequence}"] if self.tensor > 1 else []
        sizes += [f"{self.pipeline} pipeline"] if self.pipeline > 1 else []
        return " x ".join(sizes) + experts

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.averaging * self.tensor * self.pipeline

    @property
    def averaging(self) -> int:
        """The ranks whose gradients are averaged."""
        return self.data * self.context

    @property
    def shard(self) -> int:
        """The ranks that share one copy of the model between data and context ranks; 1: each holds a whole copy."""
        return self.averaging // self.replicate

    @property
    def expert_sizes(self) -> tuple[int, int, int]:
        """Copies of the experts, ranks that share the experts of one rank, and ranks that share those of one copy.

        Multiplied, they are all ranks: those whose gradients are averaged, and the tensor ranks of each.
        """
        if self.zero_stage == 0:
            return self.averaging * self.tensor // self.expert, 1, self.expert
        return self.replicate, self.shard * self.tensor // self.expert, self.expert

    @property
    def is_plain(self) -> bool:
        """Whether each process holds the whole model: one process, or data parallelism without ZeRO."""
        return self.tensor == self.pipeline == self.context == self.expert == 1 and self.zero_stage == 0

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 holds the parameters: of several ranks, or in host memory."""
        return self.averaging > 1 or self.offload

    @classmethod
    def of(
        cls, asked: Mapping[str, Any], world_size: int, name: Callable[[str], str] = "TrainingConfig.{}".format
    ) -> "Layout":
        """The layout of ``world_size`` processes.

        Args:
            asked: the settings ``tensor_parallel_size``, ``pipeline_parallel_size``, ``context_parallel_size``,
                ``expert_parallel_size``, ``replicate_size``, ``zero_stage``, ``zero_offload``, ``sequence_parallel``,
                ``pipeline_schedule``, ``pipeline_num_layers`` and ``custom_pipeline_stage_id``, where they are set. The
                data-parallel size follows.
            name: the name of a setting in a message.

        One process is a layout without any parallelism, whatever is asked for; ZeRO may offload its parameters.

        Raises:
            ConfigError: they do not fit together or to the number of processes; the message lists every fault.
        """
        faults = _faults(asked, world_size, name)
        if faults:
            raise ConfigError("\n".join(faults))
        zero_stage = asked.get("zero_stage") or 0
        offload = zero_stage > 0 and bool(asked.get("zero_offload"))
        if world_size == 1:
            return cls(zero_stage=zero_stage if offload else 0, offload=offload)
        tensor, pipeline, context = (asked.get(one) or 1 for one in _SIZES)
        data = world_size // (tensor * pipeline * context)
        custom = asked.get("custom_pipeline_stage_id") if pipeline > 1 else None
        return cls(
            data,
            tensor,
            pipeline,
            replicate=data * context if zero_stage == 0 else asked.get("replicate_size") or 1,
            zero_stage=zero_stage,
            offload=offload,
            sequence_parallel=bool(asked.get("sequence_parallel")),
            schedule=asked.get("pipeline_schedule") or cls.schedule,
            custom_stage_ids=None if custom is None else tuple(custom),
            context=context,
            expert=asked.get("expert_parallel_size") or 1,
        )

    @property
    def all_stages(self) -> "Layout":
        """The same with as many pipeline ranks as stages, of which some schedules have several on each process."""
        return replace(self, pipeline=self.pipeline * STAGES_PER_PROCESS.get(self.schedule, 1))

    def stage_ids(self, num_layers: int) -> list[int]:
        """The stage of each layer, in ascending order: the user's, or :meth:`automatic_stage_ids`."""
        custom = self.custom_stage_ids
        return self.automatic_stage_ids(num_layers) if custom is None else list(custom)

    def automatic_stage_ids(self, num_layers: int) -> list[int]:
        """All stages get equally many layers, the later ones one more where they do not divide.

        Of 4 or more stages with 2 or more layers each that divide, the last one gets fewer, so that the middle ones
        have more (LiBai's rule).
        """
        stages, placed = self.pipeline, num_layers
        if stages >= 4 and num_layers >= 8 and num_layers % stages == 0:
            placed += min(stages - 1, num_layers // stages)
        each, more = divmod(placed, stages)
        sizes = [each + (stage >= stages - more) for stage in range(stages)]
        return [stage for stage, size in enumerate(sizes) for _ in range(size)][:num_layers]


def _faults(asked: Mapping[str, Any], world_size: int, name: Callable[[str], str]) -> list[str]:
    """What does not fit in the settings of a layout; on one process they have no effect."""
    schedule, zero_stage = asked.get("pipeline_schedule") or Layout.schedule, asked.get("zero_stage") or 0
    faults = []
    if schedule not in SCHEDULES:
        faults.append(f"{name('pipeline_schedule')}: got {schedule!r}. {did_you_mean(schedule, SCHEDULES)}")
    if world_size == 1:
        return faults
    tensor, pipeline, context = numbers = [asked.get(one) or 1 for one in _SIZES]
    model_ranks = math.prod(numbers)
    shown = zip(_SIZES, numbers, strict=True)
    sizes = " x ".join(f"{name(one)}={size}" for one, size in shown if size > 1 or one != _SIZES[-1])
    if world_size % model_ranks:
        fitting = ", ".join(str(model_ranks * n) for n in (1, 2, 3))
        text = f"needs a multiple of {model_ranks} processes ({fitting}, ...), but {world_size} were started."
        faults.append(f"{sizes}: {text}")
    data = max(1, world_size // model_ranks) * context  # ranks that may hold a copy of the model each
    replicate, key = asked.get("replicate_size") or data, name("replicate_size")
    if zero_stage == 0 and replicate != data:
        text = f"got {replicate}, without ZeRO, where each of the {data} data ranks has its copy of the model."
        faults.append(f"{key}: {text} Set {name('zero_stage')}, or remove it.")
    elif data % replicate:
        text = f"got {replicate}, which does not divide the {data} data ranks ({world_size} processes / {sizes})."
        faults.append(f"{key}: {text}")
    if asked.get("sequence_parallel") and tensor == 1:
        faults.append(f"{name('sequence_parallel')}: got True, which needs {name('tensor_parallel_size')} > 1.")
    faults += _expert_faults(asked, data, name)
    if pipeline > 1:
        faults += _stage_faults(asked, pipeline, data, name)
        if context > 1:
            faults.append(f"{sizes}: pipelines cannot divide sequences. Use ZeRO or tensor parallelism, not stages.")
    return faults


def _expert_faults(asked: Mapping[str, Any], averaging: int, name: Callable[[str], str]) -> list[str]:
    expert, replicate = asked.get("expert_parallel_size") or 1, asked.get("replicate_size") or 1
    if expert == 1:
        return []
    where, faults = f"{name('expert_parallel_size')}: got {expert}", list[str]()
    tensor, pipeline = asked.get("tensor_parallel_size") or 1, asked.get("pipeline_parallel_size") or 1
    if pipeline > 1:
        text = f"with {name('pipeline_parallel_size')}={pipeline}; stages keep all experts of their layers."
        faults.append(f"{where} {text} Set one of them to 1.")
    total = averaging * tensor
    # Of a copy, with ZeRO; a replicate_size that does not fit has a message of its own.
    shard = averaging // replicate * tensor if asked.get("zero_stage") and averaging % replicate == 0 else total
    ranks = "data and tensor ranks" if tensor > 1 else "data ranks"
    if total % expert:
        faults.append(f"{where}, which does not divide the {total} {ranks}. {_sizes(total, tensor)}")
    elif shard % expert:
        text = f"which does not divide the {shard} {ranks} of a copy ({name('replicate_size')}={replicate})."
        faults.append(f"{where}, {text} {_sizes(shard, tensor)}")
    elif expert % tensor:
        text = (
            f"which {name('tensor_parallel_size')}={tensor} does not divide: the tensor ranks hold different experts."
        )
        faults.append(f"{where}, {text} {_sizes(shard, tensor)}")
    return faults


def _sizes(number: int, tensor: int) -> str:
    """The divisors of a number of ranks that are multiples of the tensor-parallel size, and 1."""
    found = [str(size) for size in range(1, number + 1) if number % size == 0 and (size % tensor == 0 or size == 1)]
    return f"Set {', '.join(found[:-1])}{' or ' * (len(found) > 1)}{found[-1]}."


def _stage_faults(asked: Mapping[str, Any], stages: int, data: int, name: Callable[[str], str]) -> list[str]:
    layers, custom = asked.get("pipeline_num_layers"), asked.get("custom_pipeline_stage_id")
    faults = []
    schedule = asked.get("pipeline_schedule") or Layout.schedule
    if asked.get("zero_stage") == 3 and data > 1 and schedule.endswith("ZeroBubble"):
        # torch's backward pass for the weights alone does not reach parameters that are gathered layer by layer.
        faults.append(
            f"{name('pipeline_schedule')}: {schedule} computes wrong gradients with ZeRO stage 3. Use stage 2"
            f" ({name('zero_stage')}), or the schedule Interleaved1F1B."
        )
    if layers is not None and layers < stages:
        faults.append(f"{name('pipeline_num_layers')}: got {layers}; {stages} stages need at least {stages} layers.")
    if custom is None:
        return faults
    if schedule in STAGES_PER_PROCESS:
        text = f"{schedule} has {STAGES_PER_PROCESS[schedule]} stages on each process; 1F1B and GPipe have one."
        faults.append(f"{name('custom_pipeline_stage_id')}: {text} Use one of these, or remove it.")
    where = f"{name('custom_pipeline_stage_id')}: got {list(custom)}"
    if layers is not None and len(custom) != layers:
        faults.append(f"{where}, {len(custom)} numbers for {layers} layers ({name('pipeline_num_layers')}).")
    if list(custom) != sorted(custom) or set(custom) != set(range(stages)):
        faults.append(f"{where}; it must ascend and have each of the stages 0 to {stages - 1}.")
    return faults
