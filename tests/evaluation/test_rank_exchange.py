import json
from pathlib import Path

import pytest

from tests.torchrun import started

REPOSITORY = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("ranks.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict]]:
    """What each rank writes, by number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = [started(PROGRAM, folder, processes=world_size) for world_size in (1, 2, 3)]
    try:
        for process in processes:
            out, _ = process.communicate(timeout=180)
            assert process.returncode == 0, out
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return {n: [json.loads((folder / f"{n}-{rank}.json").read_text()) for rank in range(n)] for n in (1, 2, 3)}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.exhaustive(every=2)
def test_several_ranks_have_the_results_of_one_bit_for_bit(found, world_size):
    for rank in found[world_size]:
        assert rank["results"] == found[1][0]["results"]


def test_an_evaluator_without_merge_state_sees_every_sample_once_in_the_order_of_the_data_set(found):
    for rank in [*found[1], *found[2], *found[3]]:
        for length, results in rank["results"]["classes"].items():
            assert results["order"] == pytest.approx([i / int(length) for i in range(int(length))])
            assert len(results["errors"]) == int(length)
            assert results["ranks"] == 0


def test_an_evaluator_without_merge_state_is_logged_once_on_the_first_rank(found):
    assert not any("merge_state" in message for message in found[1][0]["messages"])
    for world_size in (2, 3):
        first, *others = ([m for m in rank["messages"] if "define" in m] for rank in found[world_size])
        assert [message.split()[1] for message in first] == ["Order", "Errors", "Broken"]
        assert not any(others)


def test_eval_iter_counts_batches_of_each_rank(found):
    assert {n: [rank["limited"] for rank in ranks] for n, ranks in found.items()} == {1: [3], 2: [6, 6], 3: [9, 9, 9]}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("failure", "rank", "message"),
    [
        ("evaluator", 0, "ArithmeticError: in the evaluator"),
        ("get_batch", -1, "ArithmeticError: in get_batch"),
        ("get_batch, merged", -1, "ArithmeticError: in get_batch"),
        ("model", 1, "ArithmeticError: in the model"),
        ("model, merged", 1, "ArithmeticError: in the model"),
        ("merge_state", 0, "ArithmeticError: in merge_state"),
    ],
)
def test_an_error_on_one_rank_is_an_error_on_all(found, world_size, failure, rank, message):
    rank %= world_size
    for number, of_rank in enumerate(found[world_size]):
        expected = message if number == rank else f"EvaluationError: Evaluation failed on rank {rank}: {message}"
        assert of_rank["failures"][failure] == expected
        assert (f"Evaluation failed on rank {rank}: {message}" in of_rank["messages"]) == (number == rank)


def test_attributes_that_cannot_be_sent_are_an_error_on_all(found):
    for rank in [*found[2], *found[3]]:
        assert "pickle" in rank["failures"]["unpicklable"]


def test_no_data_is_the_same_error_on_all(found):
    messages = {rank["failures"]["empty"] for ranks in found.values() for rank in ranks}
    assert len(messages) == 1
    assert "empty" in messages.pop()


def test_values_arrive_with_their_tensors(found):
    first, *others = (rank["gathered"] for rank in found[3])
    assert others == [[], []]
    assert [[rank, text] for rank, _, text in first] == [[0, ""], [1, "x"], [2, "xx"]]
    assert first[2][1] == [
        ["torch.bfloat16", "[[1.5, 1.5], [1.5, 1.5]]"],
        ["torch.bool", "False"],
        ["torch.complex64", "[(2-4j), -6j]"],
        ["torch.int64", "[[0, 3], [1, 4], [2, 5]]"],
        ["torch.float32", "2.5"],
    ]
    assert first[1][1][1] == ["torch.bool", "True"]
