"""Every key of the train and graph sections, with what it may hold."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from omegaconf import DictConfig, ListConfig


@dataclass(frozen=True, slots=True)
class Rule:
    """``allowed`` says in words what ``holds`` tests."""

    allowed: str
    holds: Callable[[Any], bool]


Table: TypeAlias = "dict[str, Rule | Table]"


def whole(least: int) -> Rule:
    return Rule(f"a whole number >= {least}", lambda value: _is_whole(value) and value >= least)


def optional(rule: Rule) -> Rule:
    return Rule(f"{rule.allowed}, or None", lambda value: value is None or rule.holds(value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole_amount(value: Any) -> bool:
    """1e9 is a usual way to write "all of them", so a float with a whole value counts. inf does too."""
    return _is_whole(value) or (isinstance(value, float) and (value.is_integer() or value == math.inf))


BOOL = Rule("True or False", lambda value: isinstance(value, bool))
TEXT = Rule("text", lambda value: isinstance(value, str))
NAME = Rule("text that is not empty", lambda value: isinstance(value, str) and bool(value.strip()))
ANY = Rule("anything", lambda value: True)
RATIO = Rule("a number in [0, 1)", lambda value: _is_number(value) and 0 <= value < 1)
NOT_NEGATIVE = Rule("a number >= 0", lambda value: _is_number(value) and value >= 0)
AMOUNT = Rule("a whole number >= 1 (1e9 for all)", lambda value: _is_whole_amount(value) and value >= 1)
MODE = Rule("'max' or 'min'", lambda value: value in ("max", "min"))
NON_FINITE = Rule("'stop', 'skip' or 'warn'", lambda value: value in ("stop", "skip", "warn"))
MATMUL_PRECISION = Rule(
    "'highest', 'high', 'medium' or None", lambda value: value in ("highest", "high", "medium", None)
)
STAGE = Rule("1, 2 or 3", lambda value: _is_whole(value) and value in (1, 2, 3))
STAGES = Rule("a list of whole numbers", lambda value: isinstance(value, ListConfig) and all(map(_is_whole, value)))
LAZY = Rule(
    "a LazyCall, or an object",
    lambda value: not isinstance(value, str | int | float | ListConfig | None) and _is_lazy(value),
)
DEVICE = Rule(
    "'cpu', 'cuda', 'mps' or 'xpu', with or without a number ('cuda:0'), or None for the one there is",
    lambda v: v is None or (isinstance(v, str) and re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", v) is not None),
)
PROFILE = Rule(
    "True, False, None, or a dict of a ProfileHook's arguments: whole numbers for wait, warmup (>= 1), active (>= 1),"
    " repeat and num_rows; True or False for record_shapes, profile_memory, with_stack, with_flops and all_ranks",
    lambda value: value is None or isinstance(value, bool) or (isinstance(value, DictConfig) and _is_profile(value)),
)
ONLY_ONE = Rule("1: more is not supported yet in this version", lambda value: _is_whole(value) and value == 1)
OFF = Rule("False: True is not supported yet in this version", lambda value: value is False)


def _is_lazy(value: Any) -> bool:
    return not isinstance(value, DictConfig) or "_target_" in value


def _is_profile(value: DictConfig) -> bool:
    return all(key in _PROFILE and _PROFILE[key].holds(value[key]) for key in value)


_PROFILE = {
    "wait": whole(0),
    "warmup": whole(1),
    "active": whole(1),
    "repeat": whole(0),
    "record_shapes": BOOL,
    "profile_memory": BOOL,
    "with_stack": BOOL,
    "with_flops": BOOL,
    "num_rows": whole(0),
    "all_ranks": BOOL,
}

TRAIN: Table = {
    "output_dir": NAME,
    "train_micro_batch_size": optional(whole(1)),
    "global_batch_size": optional(whole(1)),
    "num_accumulation_steps": optional(whole(1)),
    "train_iter": whole(0),
    "train_epoch": NOT_NEGATIVE,
    "iter_per_epoch": optional(whole(1)),
    "consumed_train_samples": whole(0),
    "consumed_valid_samples": whole(0),
    "train_samples": optional(whole(1)),
    "warmup_ratio": RATIO,
    "start_iter": whole(0),
    "amp": {"enabled": BOOL},
    "activation_checkpoint": {"enabled": BOOL},
    "nccl_fusion_threshold_mb": NOT_NEGATIVE,
    "nccl_fusion_max_ops": whole(0),
    "rdma_enabled": BOOL,
    "zero_optimization": {"enabled": OFF, "stage": STAGE},
    "checkpointer": {
        "period": whole(1),
        "max_to_keep": optional(whole(1)),
        "save_model_after_n_epoch": optional(whole(1)),
        "asynchronous": BOOL,
    },
    "test_micro_batch_size": whole(1),
    "evaluation": {
        "enabled": BOOL,
        "evaluator": LAZY,
        "eval_period": whole(1),
        "eval_after_n_epoch": optional(whole(1)),
        "eval_iter": AMOUNT,
        "eval_metric": NAME,
        "eval_mode": MODE,
    },
    "load_weight": optional(TEXT),
    "log_period": whole(1),
    "non_finite": NON_FINITE,
    "profile": PROFILE,
    "float32_matmul_precision": MATMUL_PRECISION,
    "scheduler": LAZY,
    "input_placement_device": DEVICE,
    "dist": {
        "data_parallel_size": optional(whole(1)),
        "tensor_parallel_size": ONLY_ONE,
        "pipeline_parallel_size": ONLY_ONE,
        "pipeline_num_layers": optional(whole(1)),
        "custom_pipeline_stage_id": optional(STAGES),
        "device_type": DEVICE,
        "find_unused_parameters": BOOL,
        # Recorded by a run, so they are in the config.yaml of one.
        "num_nodes": optional(whole(1)),
        "num_gpus_per_node": optional(whole(0)),
        "auto_pipeline_stage_id": ANY,
        "actual_pipeline_stage_id": ANY,
    },
    "seed": whole(1),
    # Derived by a run from the others.
    "samples": optional(whole(0)),
    "resume": BOOL,
    "warmup_iter": optional(whole(0)),
}

GRAPH: Table = {"enabled": BOOL, "backend": NAME}

# Settings of another backend: accepted, and said once to be without meaning.
GRAPH_WITHOUT_MEANING = ("debug", "auto_parallel", "global_mode", "train_graph", "eval_graph")
TRAIN_WITHOUT_MEANING = {"nccl_fusion_threshold_mb": 16, "nccl_fusion_max_ops": 24, "rdma_enabled": True}
