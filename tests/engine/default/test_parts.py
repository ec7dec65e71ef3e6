"""The builders of a configuration's parts."""

from trainwright.config import LazyCall
from trainwright.engine.default.setup import call_with_known


def loader(dataset: str, train_batch_size: int, seed: int = 0) -> tuple[str, int, int]:
    return dataset, train_batch_size, seed


def test_a_builder_gets_what_it_takes_and_the_node_leaves_open() -> None:
    given = {"train_batch_size": 8, "seed": 5, "consumed_samples": 3, "tokenizer": None}
    assert call_with_known(LazyCall(loader)(dataset="d"), given) == ("d", 8, 5)


def test_something_ready_made_is_returned_as_it_is() -> None:
    ready = [1, 2]
    assert call_with_known(ready, {"train_batch_size": 8}) is ready
