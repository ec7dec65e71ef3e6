"""One rank of an evaluation, as a program: run by test_ranks.py once alone and once as two processes.

Prints what it got as JSON.
"""

import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright.evaluation import ClsEvaluator, DatasetEvaluator, PPLEvaluator, inference_on_dataset
from trainwright.parallel.data_parallel import wrap_data_parallel
from trainwright.parallel.launch import shut_down

MICRO_BATCH = 3
LENGTHS = (1, 3, 4, 6, 7, 12, 14)
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


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
    def forward(self, x, labels):
        return {"prediction_scores": x, "loss": nn.functional.cross_entropy(x, labels)}


class Order(DatasetEvaluator):
    def reset(self) -> None:
        self.seen = []

    def process(self, inputs, outputs) -> None:
        self.seen += inputs["x"][:, 0].tolist()

    def evaluate(self) -> dict:
        return {"order": self.seen}


class Broken(Order):
    def process(self, inputs, outputs) -> None:
        raise ArithmeticError("in the evaluator")


def to_batch(data, device):
    x, labels = data
    return {"x": x.to(device), "labels": labels.to(device)}


def to_batch_that_fails_on_the_last_rank(data, device):
    if RANK == WORLD_SIZE - 1:
        raise ArithmeticError("in get_batch")
    return to_batch(data, device)


def evaluate(length: int, evaluators, get_batch=to_batch, eval_iter=1e9) -> dict:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(length, 4, generator=generator)
    x[:, 0] = torch.arange(length) / length  # which sample this is
    data = TensorDataset(x, torch.randint(4, (length,), generator=generator))
    loader = DataLoader(data, batch_sampler=Rounds(length))
    model = Scores()
    if WORLD_SIZE > 1:
        model.weight = nn.Parameter(torch.zeros(1))
        model = wrap_data_parallel(model, torch.device("cpu"))
    return inference_on_dataset(model, loader, MICRO_BATCH * WORLD_SIZE, eval_iter, get_batch, "cpu", evaluators)


def failure(*arguments) -> str:
    try:
        return str(evaluate(*arguments))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("gloo")
    figures = {n: evaluate(n, [ClsEvaluator(topk=(1, 2)), PPLEvaluator(), Order()]) for n in LENGTHS}
    failures = {
        "evaluator": failure(7, Broken()),
        "get_batch": failure(7, Order(), to_batch_that_fails_on_the_last_rank),
        "empty": failure(0, Order()),
    }
    limited = evaluate(12, Order(), to_batch, 1)["order"]
    print(json.dumps({"figures": figures, "failures": failures, "limited": len(limited)}))
    if WORLD_SIZE > 1:
        shut_down()


if __name__ == "__main__":
    main()
