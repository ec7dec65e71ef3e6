"""How many processes do what: every world size with every combination of sizes."""

from itertools import product
from typing import Any

import pytest

from trainwright.base.errors import ConfigError
from trainwright.parallel.layout import Layout


def test_each_combination_fits_or_is_refused_with_the_arithmetic() -> None:
    for world, tensor, pipeline in product(range(2, 13), (1, 2, 3, 4), (1, 2, 4)):
        asked = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
        if world % (tensor * pipeline) == 0:
            layout = Layout.of(asked, world)
            assert (layout.data, layout.tensor, layout.pipeline) == (world // tensor // pipeline, tensor, pipeline)
            assert layout.world_size == world
            assert layout.shard == 1
            continue
        with pytest.raises(ConfigError, match=f"multiple of {tensor * pipeline} processes .* {world} were started"):
            Layout.of(asked, world)


def test_zero_shares_one_copy_among_the_data_ranks() -> None:
    assert Layout.of({"zero_stage": 3}, 4).shard == 4
    hybrid = Layout.of({"zero_stage": 2, "replicate_size": 2, "tensor_parallel_size": 2}, 8)
    assert (hybrid.data, hybrid.replicate, hybrid.shard) == (4, 2, 2)
    context = Layout.of({"zero_stage": 2, "context_parallel_size": 2, "tensor_parallel_size": 2}, 8)
    assert (context.data, context.averaging, context.shard, context.world_size) == (2, 4, 4, 8)
    assert Layout.of({}, 4) == Layout(data=4, replicate=4)
    assert not Layout.of({"context_parallel_size": 4}, 4).is_plain
    assert Layout.of({}, 4).is_plain
    assert not Layout.of({"zero_stage": 1}, 4).is_plain


def test_experts_are_divided_among_the_ranks_of_a_copy() -> None:
    experts = {"expert_parallel_size": 2}
    assert Layout.of(experts, 4).expert_sizes == (2, 1, 2)
    assert Layout.of({**experts, "zero_stage": 2}, 4).expert_sizes == (1, 2, 2)
    assert Layout.of({**experts, "zero_stage": 3, "replicate_size": 2}, 8).expert_sizes == (2, 2, 2)
    assert Layout.of({**experts, "context_parallel_size": 2}, 4).expert_sizes == (2, 1, 2)
    tensor = {"expert_parallel_size": 4, "tensor_parallel_size": 2}
    assert Layout.of(tensor, 8).expert_sizes == (2, 1, 4)
    assert Layout.of({**tensor, "zero_stage": 3, "replicate_size": 2}, 16).expert_sizes == (2, 2, 4)
    assert str(Layout.of(tensor, 8)) == "4 data x 2 tensor, experts over 4"
    assert not Layout.of(experts, 2).is_plain
    assert str(Layout.of({**experts, "zero_stage": 3}, 4)) == "4 data (ZeRO 3), experts over 2"


def test_one_process_has_no_parallelism() -> None:
    assert Layout.of({"tensor_parallel_size": 2, "zero_stage": 3}, 1) == Layout()
    assert Layout.of({"expert_parallel_size": 2}, 1) == Layout()


@pytest.mark.parametrize(
    ("asked", "world", "message"),
    [
        ({"replicate_size": 2}, 4, "TrainingConfig.replicate_size: got 2, without ZeRO"),
        ({"replicate_size": 3, "zero_stage": 1}, 4, "got 3, which does not divide the 4 data ranks"),
        ({"sequence_parallel": True}, 2, "needs TrainingConfig.tensor_parallel_size > 1"),
        ({"context_parallel_size": 2, "pipeline_parallel_size": 2}, 4, "pipelines cannot divide sequences"),
        ({"context_parallel_size": 3}, 4, "context_parallel_size=3: needs a multiple of 3 processes"),
        ({"expert_parallel_size": 3}, 4, "expert_parallel_size: got 3, which does not divide the 4 data ranks. Set 1"),
        (
            {"expert_parallel_size": 2, "tensor_parallel_size": 4},
            8,
            "got 2, which TrainingConfig.tensor_parallel_size=4 does not divide: the tensor ranks hold different"
            " experts. Set 1, 4 or 8.",
        ),
        (
            {"expert_parallel_size": 3, "tensor_parallel_size": 2},
            4,
            "got 3, which does not divide the 4 data and tensor ranks. Set 1, 2 or 4.",
        ),
        (
            {"expert_parallel_size": 2, "tensor_parallel_size": 4, "zero_stage": 1, "replicate_size": 4},
            8,
            "got 4, which does not divide the 2 data ranks",
        ),
        ({"expert_parallel_size": 2, "pipeline_parallel_size": 2}, 4, "stages keep all experts of their layers"),
        (
            {"expert_parallel_size": 4, "zero_stage": 3, "replicate_size": 2},
            4,
            "got 4, which does not divide the 2 data ranks of a copy (TrainingConfig.replicate_size=2). Set 1 or 2.",
        ),
        ({"pipeline_schedule": "1F2B"}, 2, "Did you mean '1F1B'"),
        ({"pipeline_parallel_size": 4, "pipeline_num_layers": 3}, 4, "4 stages need at least 4 layers"),
        ({"pipeline_parallel_size": 2, "custom_pipeline_stage_id": [0, 1, 0]}, 2, "it must ascend"),
        ({"pipeline_parallel_size": 2, "custom_pipeline_stage_id": [0, 0]}, 2, "each of the stages 0 to 1"),
        (
            {"pipeline_parallel_size": 2, "custom_pipeline_stage_id": [0, 1], "pipeline_num_layers": 3},
            2,
            "2 numbers for 3 layers",
        ),
        (
            {"pipeline_parallel_size": 2, "zero_stage": 3, "pipeline_schedule": "ZBVZeroBubble"},
            4,
            "ZBVZeroBubble computes wrong gradients with ZeRO stage 3",
        ),
        (
            {
                "pipeline_parallel_size": 2,
                "custom_pipeline_stage_id": [0, 1],
                "pipeline_schedule": "Interleaved1F1B",
            },
            2,
            "Interleaved1F1B has 2 stages on each process",
        ),
    ],
)
def test_what_does_not_fit_is_refused(asked: dict[str, Any], world: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Layout.of(asked, world)
    assert message in str(error.value)


def test_all_faults_are_reported_together() -> None:
    asked = {"tensor_parallel_size": 4, "replicate_size": 2, "pipeline_schedule": "none"}
    with pytest.raises(ConfigError) as error:
        Layout.of(asked, 6, "train.dist.{}".format)
    for name in ("pipeline_schedule", "tensor_parallel_size", "replicate_size"):
        assert f"train.dist.{name}" in str(error.value)


@pytest.mark.parametrize(
    ("stages", "layers", "sizes"),
    [
        (2, 4, [2, 2]),
        (2, 5, [2, 3]),
        (3, 7, [2, 2, 3]),
        (4, 6, [1, 1, 2, 2]),
        (4, 8, [2, 2, 3, 1]),  # 4 stages, 2 layers each: the last one, with the loss, has fewer
        (4, 12, [3, 4, 4, 1]),
    ],
)
def test_layers_of_each_stage(stages: int, layers: int, sizes: list[int]) -> None:
    ids = Layout(pipeline=stages).stage_ids(layers)
    assert [ids.count(stage) for stage in range(stages)] == sizes
    assert ids == sorted(ids)
    assert Layout(pipeline=stages).automatic_stage_ids(layers) == ids
    custom = tuple(range(stages)) + (stages - 1,) * (layers - stages)
    assert Layout(pipeline=stages, custom_stage_ids=custom).stage_ids(layers) == list(custom)


def test_the_stages_that_the_user_chooses() -> None:
    asked = {"pipeline_parallel_size": 2, "custom_pipeline_stage_id": [0, 0, 0, 1]}
    assert Layout.of(asked, 2).stage_ids(4) == [0, 0, 0, 1]
