"""Evaluations without a trainer: several ranks have the results, and the errors, of one."""

import logging
import os
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks import on_ranks
from trainwright.evaluation import (
    BLEUEvaluator,
    ClsEvaluator,
    DatasetEvaluator,
    DatasetEvaluators,
    PPLEvaluator,
    RegEvaluator,
    inference_on_dataset,
)
from trainwright.evaluation.rank_exchange import gather_values
from trainwright.parallel.data_parallel import wrap_data_parallel

MICRO_BATCH = 3
LENGTHS = (1, 3, 4, 6, 7, 12, 14)
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
Pair = namedtuple("Pair", ["scores", "texts"])


class Rounds:
    """Rank r takes the r-th batch of each round; the last round may be short."""

    def __init__(self, length: int) -> None:
        batches = [list(range(start, min(start + MICRO_BATCH, length))) for start in range(0, length, MICRO_BATCH)]
        self.mine = batches[RANK::WORLD_SIZE]

    def __iter__(self):
        return iter(self.mine)

    def __len__(self) -> int:
        return len(self.mine)


class Scores(nn.Module):
    """``fails_on``: the rank whose second batch raises."""

    def __init__(self, fails_on: int | None = None) -> None:
        super().__init__()
        self.fails_on, self.num_calls = fails_on, 0
        self.register_buffer("shift", torch.tensor(float(RANK)))

    def forward(self, x, labels, reference):
        self.num_calls += 1
        if self.fails_on == RANK and self.num_calls == 2:
            raise ArithmeticError("in the model")
        candidates = [f"the cat sat on the mat number {round(float(row[1]), 1)}" for row in x]
        scores = x[:, 0] if labels.is_floating_point() else x + self.shift
        loss = x.square().mean() if labels.is_floating_point() else nn.functional.cross_entropy(x, labels)
        return {"prediction_scores": scores, "loss": loss, "candidate": candidates, "pair": Pair(x > 0, candidates)}


class Order(DatasetEvaluator):
    """Written for one process: no ``merge_state``."""

    def reset(self) -> None:
        self.seen = []

    def process(self, inputs, outputs) -> None:
        assert isinstance(outputs["pair"], Pair)
        assert torch.equal(outputs["pair"].scores, inputs["x"] > 0)
        self.seen += inputs["x"][:, 0].tolist()

    def evaluate(self) -> dict:
        return {"order": self.seen, "ranks": RANK}


class Sum(DatasetEvaluator):
    def reset(self) -> None:
        self.total, self.num_batches = torch.zeros((), dtype=torch.float64), 0

    def process(self, inputs, outputs) -> None:
        self.total += inputs["x"].double().round(decimals=2).sum()
        self.num_batches += 1

    def merge_state(self, others) -> None:
        for other in others:
            self.total += other.total
            self.num_batches += other.num_batches

    def evaluate(self) -> dict:
        return {"sum": round(self.total.item(), 6), "batches": self.num_batches}


class Errors(ClsEvaluator):
    """Overrides ``process`` and ``evaluate``, but not the ``merge_state`` of its base class."""

    def reset(self) -> None:
        super().reset()
        self.errors = []

    def process(self, inputs, outputs) -> None:
        super().process(inputs, outputs)
        self.errors += (outputs["prediction_scores"].argmax(1) != inputs["labels"]).tolist()

    def evaluate(self) -> dict:
        return {"errors": self.errors, **{f"own {name}": value for name, value in super().evaluate().items()}}


class Broken(Order):
    def process(self, inputs, outputs) -> None:
        raise ArithmeticError("in the evaluator")


class BrokenSum(Sum):
    def merge_state(self, others) -> None:
        raise ArithmeticError("in merge_state")


class Unpicklable(Sum):
    def reset(self) -> None:
        super().reset()
        self.function = lambda: None

    def merge_state(self, others) -> None:
        raise AssertionError("not reached")


def to_batch(data, device):
    x, labels = data
    references = [["the cat sat on the mat", f"a cat on the mat {round(float(row[1]), 1)}"] for row in x]
    return {"x": x.to(device), "labels": labels.to(device), "reference": references}


def to_batch_that_fails_on_the_last_rank(data, device):
    if RANK == WORLD_SIZE - 1:
        raise ArithmeticError("in get_batch")
    return to_batch(data, device)


def evaluate(length: int, evaluators, get_batch=to_batch, eval_iter=1e9, fails_on=None, numbers=False) -> dict:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(length, 4, generator=generator)
    x[:, 0] = torch.arange(length) / length  # which sample this is
    labels = torch.randint(4, (length,), generator=generator)
    loader = DataLoader(TensorDataset(x, labels.float() if numbers else labels), batch_sampler=Rounds(length))
    model = Scores(fails_on)
    if WORLD_SIZE > 1:
        model.weight = nn.Parameter(torch.zeros(1))
        model = wrap_data_parallel(model, torch.device("cpu"))
    return inference_on_dataset(model, loader, MICRO_BATCH * WORLD_SIZE, eval_iter, get_batch, "cpu", evaluators)


def failure(*arguments, **named) -> str:
    try:
        return str(evaluate(*arguments, **named))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def gathered() -> list:
    """Tensors of all kinds, and what comes of them on rank 0."""
    value = {
        "rank": RANK,
        "tensors": [
            torch.full((2, RANK), 1.5, dtype=torch.bfloat16),
            torch.tensor(RANK == 1),
            torch.tensor([1 + 2j, 3j]).conj() * RANK,
            torch.arange(6).reshape(2, 3).T,
            nn.Parameter(torch.tensor(0.5 + RANK)),
        ],
        "text": "x" * RANK,
    }
    values = [read() for read in gather_values(value) or []]
    return [
        [one["rank"], [[str(t.dtype), str(t.tolist())] for t in one["tensors"]], one["text"]]
        for one in values
        if isinstance(one["tensors"], list)
    ]


def no_pickled_tensors(self, protocol) -> None:
    raise AssertionError("a tensor is pickled")


def of_rank() -> dict:
    torch.Tensor.__reduce_ex__ = no_pickled_tensors
    messages: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("trainwright.evaluation").addHandler(handler)
    logging.getLogger("trainwright.evaluation").setLevel(logging.INFO)

    def evaluators() -> list:
        return [ClsEvaluator(topk=(1, 2)), DatasetEvaluators([PPLEvaluator(), Order()]), Sum(), Errors(topk=1)]

    results = {
        "classes": {n: evaluate(n, evaluators()) for n in LENGTHS},
        "numbers": {n: evaluate(n, [RegEvaluator(), BLEUEvaluator()], numbers=True) for n in LENGTHS if n > 2},
        "tokenized": evaluate(7, BLEUEvaluator(tokenize="13a")),
    }
    failures = {
        "evaluator": failure(7, Broken()),
        "get_batch": failure(7, Order(), to_batch_that_fails_on_the_last_rank),
        "get_batch, merged": failure(7, Sum(), to_batch_that_fails_on_the_last_rank),
        "model": failure(21, [Order(), Sum()], fails_on=1),
        "model, merged": failure(21, Sum(), fails_on=1),
        "merge_state": failure(7, BrokenSum()),
        "unpicklable": failure(7, Unpicklable()),
        "empty": failure(0, Order()),
    }
    limited = evaluate(12, Order(), to_batch, 1)["order"]
    found = {"results": results, "failures": failures, "limited": len(limited), "messages": messages}
    found["gathered"] = gathered() if WORLD_SIZE > 1 else []
    return found


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict]]:
    """What each rank finds, by number of ranks."""
    return {n: on_ranks(of_rank, world_size=n, timeout=180) for n in (1, 2, 3)}


@pytest.mark.parametrize("world_size", [2, 3])
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
    # Attributes that cannot be sent are an error on all.
    for rank in [*found[2], *found[3]]:
        assert "pickle" in rank["failures"]["unpicklable"]
    # No data is the same error on all.
    messages = {rank["failures"]["empty"] for ranks in found.values() for rank in ranks}
    assert len(messages) == 1
    assert "empty" in messages.pop()


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
