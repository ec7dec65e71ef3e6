"""The keys of the train and graph sections of config files, with their types."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from trainwright.config.validation import (
    Allowed,
    Amount,
    Anything,
    Batches,
    BatchesOrYes,
    Count,
    CountOrNone,
    CountOrZero,
    CountOrZeroOrNone,
    Duration,
    EmaOrNone,
    Lazy,
    MatmulPrecision,
    NonFinite,
    NotNegative,
    Period,
    PipelineSchedule,
    Positive,
    ProfileOrNone,
    RatioBelowOne,
    TextOrNone,
    TrackersOrNone,
    UnfreezeOrNone,
    Words,
    YesNo,
    YesNoOrWarn,
)

_Stage = Annotated[int, Field(ge=1, le=3), Allowed("1, 2 or 3")]
_StagesOrNone = Annotated[list[int] | None, Allowed("a list of whole numbers, or None")]
_Device = Annotated[
    Annotated[str, Field(pattern=r"^(cpu|cuda|mps|xpu)(:[0-9]+)?$")] | None,
    Allowed("'cpu', 'cuda', 'mps' or 'xpu', with or without a number ('cuda:0'), or None for the one there is"),
]


class Switch(TypedDict, total=False):
    enabled: YesNo


class ZeroOptimization(TypedDict, total=False):
    enabled: YesNo
    stage: _Stage


class Checkpointer(TypedDict, total=False):
    period: Period
    max_to_keep: CountOrNone
    save_top_k: CountOrNone
    save_trainable_only: YesNo
    save_model_after_n_epoch: CountOrNone
    asynchronous: YesNo


class Evaluation(TypedDict, total=False):
    enabled: YesNo
    evaluator: Lazy
    eval_period: Period
    eval_after_n_epoch: CountOrNone
    eval_iter: Amount
    eval_metric: Words
    eval_mode: Annotated[Literal["max", "min"], Allowed("'max' or 'min'")]


class Dist(TypedDict, total=False):
    data_parallel_size: CountOrNone
    tensor_parallel_size: Count
    pipeline_parallel_size: Count
    replicate_size: CountOrNone
    sequence_parallel: YesNo
    pipeline_schedule: PipelineSchedule
    elastic: YesNo
    pipeline_num_layers: CountOrNone
    custom_pipeline_stage_id: _StagesOrNone
    device_type: _Device
    find_unused_parameters: YesNo
    hang_timeout_s: Positive
    # Recorded by a run, so they are in its config.yaml.
    num_nodes: CountOrNone
    num_gpus_per_node: CountOrZeroOrNone
    auto_pipeline_stage_id: Anything
    actual_pipeline_stage_id: Anything


class Train(TypedDict, total=False):
    output_dir: Words
    train_micro_batch_size: CountOrNone
    global_batch_size: CountOrNone
    num_accumulation_steps: CountOrNone
    train_iter: CountOrZero
    train_epoch: NotNegative
    iter_per_epoch: CountOrNone
    consumed_train_samples: CountOrZero
    consumed_valid_samples: CountOrZero
    train_samples: CountOrNone
    warmup_ratio: RatioBelowOne
    start_iter: CountOrZero
    amp: Switch
    activation_checkpoint: Switch
    nccl_fusion_threshold_mb: NotNegative
    nccl_fusion_max_ops: CountOrZero
    rdma_enabled: YesNo
    zero_optimization: ZeroOptimization
    checkpointer: Checkpointer
    test_micro_batch_size: Count
    evaluation: Evaluation
    load_weight: TextOrNone
    log_period: Period
    non_finite: NonFinite
    ema: EmaOrNone
    unfreeze: UnfreezeOrNone
    limit_train_batches: Batches
    limit_eval_batches: Batches
    overfit_batches: CountOrNone
    fast_dev_run: BatchesOrYes
    max_time: Duration
    eval_on_start: YesNo
    deterministic: YesNoOrWarn
    profile: ProfileOrNone
    trackers: TrackersOrNone
    float32_matmul_precision: MatmulPrecision
    scheduler: Lazy
    input_placement_device: _Device
    dist: Dist
    seed: Count
    # Derived by a run from the others.
    samples: CountOrZeroOrNone
    resume: YesNo
    warmup_iter: CountOrZeroOrNone
    # Aliases, which are resolved before the check.
    eval_period: Anything
    topk: Anything
    recompute_grad: Anything


class Graph(TypedDict, total=False):
    enabled: YesNo
    backend: Words
    # Settings of another backend.
    debug: Anything
    auto_parallel: Anything
    global_mode: Anything
    train_graph: Anything
    eval_graph: Anything


@with_config(ConfigDict(extra="forbid", strict=True))
class Run(TypedDict, total=False):
    """The sections whose keys are fixed."""

    train: Train
    graph: Graph


# Settings of another backend: accepted, and logged once as having no effect.
GRAPH_WITHOUT_EFFECT = ("debug", "auto_parallel", "global_mode", "train_graph", "eval_graph")
TRAIN_WITHOUT_EFFECT = {"nccl_fusion_threshold_mb": 16, "nccl_fusion_max_ops": 24, "rdma_enabled": True}
