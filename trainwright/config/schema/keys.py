"""The keys of the train and graph sections of config files, with their types."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from trainwright.config import validation as types

_Stage = Annotated[int, Field(ge=1, le=3), types.Allowed("1, 2 or 3")]
_StagesOrNone = Annotated[list[int] | None, types.Allowed("a list of whole numbers, or None")]
_Device = Annotated[
    Annotated[str, Field(pattern=r"^(cpu|cuda|mps|xpu)(:[0-9]+)?$")] | None,
    types.Allowed("'cpu', 'cuda', 'mps' or 'xpu', with or without a number ('cuda:0'), or None for the one there is"),
]


class Switch(TypedDict, total=False):
    enabled: types.YesNo


class ZeroOptimization(TypedDict, total=False):
    enabled: types.YesNo
    stage: _Stage


class Checkpointer(TypedDict, total=False):
    period: types.Period
    max_to_keep: types.CountOrNone
    save_top_k: types.CountOrNone
    save_trainable_only: types.YesNo
    save_model_after_n_epoch: types.CountOrNone
    asynchronous: types.YesNo


class Evaluation(TypedDict, total=False):
    enabled: types.YesNo
    evaluator: types.Lazy
    eval_period: types.Period
    eval_after_n_epoch: types.CountOrNone
    hardest_samples: types.CountOrNone
    eval_iter: types.Amount
    eval_metric: types.Words
    eval_mode: Annotated[Literal["max", "min"], types.Allowed("'max' or 'min'")]


class Dist(TypedDict, total=False):
    data_parallel_size: types.CountOrNone
    tensor_parallel_size: types.Count
    pipeline_parallel_size: types.Count
    replicate_size: types.CountOrNone
    sequence_parallel: types.YesNo
    pipeline_schedule: types.PipelineSchedule
    elastic: types.YesNo
    pipeline_num_layers: types.CountOrNone
    custom_pipeline_stage_id: _StagesOrNone
    device_type: _Device
    find_unused_parameters: types.YesNo
    hang_timeout_s: types.Positive
    # Recorded by a run, so they are in its config.yaml.
    num_nodes: types.CountOrNone
    num_gpus_per_node: types.CountOrZeroOrNone
    auto_pipeline_stage_id: types.Anything
    actual_pipeline_stage_id: types.Anything


class Train(TypedDict, total=False):
    output_dir: types.Words
    train_micro_batch_size: types.CountOrNone
    global_batch_size: types.CountOrNone
    num_accumulation_steps: types.CountOrNone
    train_iter: types.CountOrZero
    train_epoch: types.NotNegative
    iter_per_epoch: types.CountOrNone
    consumed_train_samples: types.CountOrZero
    consumed_valid_samples: types.CountOrZero
    train_samples: types.CountOrNone
    warmup_ratio: types.RatioBelowOne
    start_iter: types.CountOrZero
    amp: Switch
    activation_checkpoint: Switch
    nccl_fusion_threshold_mb: types.NotNegative
    nccl_fusion_max_ops: types.CountOrZero
    rdma_enabled: types.YesNo
    zero_optimization: ZeroOptimization
    checkpointer: Checkpointer
    test_micro_batch_size: types.Count
    evaluation: Evaluation
    load_weight: types.TextOrNone
    log_period: types.Period
    progress_bar: types.YesNo
    non_finite: types.NonFinite
    ema: types.EmaOrNone
    unfreeze: types.UnfreezeOrNone
    limit_train_batches: types.Batches
    limit_eval_batches: types.Batches
    overfit_batches: types.CountOrNone
    fast_dev_run: types.BatchesOrYes
    max_time: types.Duration
    eval_on_start: types.YesNo
    deterministic: types.YesNoOrWarn
    profile: types.ProfileOrNone
    trackers: types.TrackersOrNone
    float32_matmul_precision: types.MatmulPrecision
    scheduler: types.Lazy
    input_placement_device: _Device
    dist: Dist
    seed: types.Count
    # Derived by a run from the others.
    samples: types.CountOrZeroOrNone
    resume: types.YesNo
    warmup_iter: types.CountOrZeroOrNone
    # Aliases, which are resolved before the check.
    eval_period: types.Anything
    topk: types.Anything
    recompute_grad: types.Anything


class Graph(TypedDict, total=False):
    enabled: types.YesNo
    backend: types.Words
    # Settings of another backend.
    debug: types.Anything
    auto_parallel: types.Anything
    global_mode: types.Anything
    train_graph: types.Anything
    eval_graph: types.Anything


@with_config(ConfigDict(extra="forbid", strict=True))
class Run(TypedDict, total=False):
    """The sections whose keys are fixed."""

    train: Train
    graph: Graph


# Settings of another backend: accepted, and logged once as having no effect.
GRAPH_WITHOUT_EFFECT = ("debug", "auto_parallel", "global_mode", "train_graph", "eval_graph")
TRAIN_WITHOUT_EFFECT = {"nccl_fusion_threshold_mb": 16, "nccl_fusion_max_ops": 24, "rdma_enabled": True}
