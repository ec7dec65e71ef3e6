"""How many exchanges between processes a save, a load, an evaluated batch and a second of training take."""

import contextlib
import io
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from tests.distributed.layout_runs import Texts, build_language, settings
from tests.ranks import on_ranks
from trainwright import Trainer
from trainwright.evaluation import DatasetEvaluator, inference_on_dataset

OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
TENSORS = ("all_reduce", "all_gather", "gather", "broadcast", "barrier", "all_gather_into_tensor")


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """The calls of the functions of torch.distributed inside, by kind and thread."""
    calls, before = Counter[str](), {name: getattr(torch.distributed, name) for name in (*OBJECTS, *TENSORS)}

    def counting(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            where = "" if threading.current_thread() is threading.main_thread() else " of the writer"
            calls[("objects" if name in OBJECTS else "tensors") + where] += 1
            return before[name](*args, **options)

        return call

    for name in before:
        setattr(torch.distributed, name, counting(name))
    try:
        yield calls
    finally:
        for name, function in before.items():
            setattr(torch.distributed, name, function)


class Order(DatasetEvaluator):
    """Has no ``merge_state``: rank 0 processes the batches of all."""

    def reset(self) -> None:
        self.number = 0

    def process(self, inputs: Any, outputs: Any) -> None:
        self.number += 1

    def evaluate(self) -> dict[str, float]:
        return {"number": self.number}


def calls_of_a_run(folder: Path, layout: dict[str, Any]) -> tuple[dict[str, dict[str, int]], str]:
    found: dict[str, dict[str, int]] = {}
    config = settings(folder, batch_size=4, log_steps=1000, **layout)
    trainer = Trainer(build_language(plain=True), config, train_dataset=Texts(96))
    trainer.train()
    checkpointer = trainer.checkpointer

    def count(what: str, call: Any) -> None:
        with counted() as calls:
            call()
        found[what] = dict(calls)

    def save() -> None:
        checkpointer.save("model_2", iteration=102)
        checkpointer.wait()

    checkpointer.save("model_0", iteration=100)
    checkpointer.wait()
    count("save", lambda: checkpointer.save("model_1", iteration=101))
    checkpointer.wait()
    count("save and wait", save)
    count("load", lambda: checkpointer.load(Path(checkpointer.save_dir, "model_2")))
    for number in (2, 6):
        loader = [{"token_ids": Texts(8)[n]["token_ids"][None]} for n in range(number)]
        count(
            f"{number} batches",
            lambda loader=loader: inference_on_dataset(
                trainer.model, loader, 1, 100, lambda data, device: data, "cpu", Order()
            ),
        )
    with contextlib.redirect_stderr(io.StringIO()) as output:
        warnings.warn("once", stacklevel=1)
    return found, output.getvalue()


@pytest.mark.parametrize("layout", [{}, {"zero_stage": 3}], ids=["data", "zero 3"])
def test_what_a_run_exchanges(tmp_path: Path, layout: dict[str, Any]) -> None:
    """Objects: none for an evaluated batch and a save. A rank's random state is in a file of its own."""
    for rank, (calls, warned) in enumerate(on_ranks(calls_of_a_run, tmp_path, layout, world_size=2)):
        few, many = (calls[f"{number} batches"] for number in (2, 6))
        assert many["objects"] == few["objects"] <= 1
        assert many["tensors"] - few["tensors"] <= 4 * 4
        assert calls["save"] == {"tensors": 1 if layout else 2}
        assert calls["save and wait"] == {
            "tensors": 2 if layout else 3,
            **({"tensors of the writer": 5} if layout else {}),
        }
        assert calls["load"]["objects"] <= 4
        assert ("once" in warned) == (rank == 0)
    states = [*tmp_path.glob("**/model_2/trainer_ranks*.safetensors")]
    assert len(states) == (2 if layout else 1)
