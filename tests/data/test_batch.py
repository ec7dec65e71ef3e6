"""What a batch is: its fields, parts, labels and samples, whatever form it has."""

import doctest
from collections import namedtuple

import numpy as np
import torch

from trainwright.base import batch as batches
from trainwright.base.batch import fields, first_labels, joined, leaves, mapped, pair, parts, tensors
from trainwright.data import DistTensorData, Instance

X, Y = torch.zeros(4, 3), torch.arange(4)
Point = namedtuple("Point", "x y")


def test_examples() -> None:
    assert doctest.testmod(batches).failed == 0


def test_parts_and_values_of_any_batch() -> None:
    assert parts(X) == [X]
    assert (fields(X), pair(X), first_labels(X)) == (None, None, None)

    batch = {"a": [X, ("text", None)], "b": Instance(c=DistTensorData(Y)), "p": Point(1, 2)}
    assert [type(leaf).__name__ for leaf in leaves(batch)] == ["Tensor", "str", "NoneType", "Tensor", "int", "int"]
    assert len(list(tensors(batch))) == 2
    assert mapped(lambda value: 0, batch) == {"a": [0, (0, 0)], "b": {"c": 0}, "p": Point(0, 0)}


def test_joined_is_the_inverse_of_a_split() -> None:
    whole = {"x": X, "n": np.arange(4), "names": list("abcd"), "p": (X, Y)}
    some = {"x": X[:1], "n": np.arange(1), "names": ["a"], "p": (X[:1], Y[:1])}
    rest = {"x": X[1:], "n": np.arange(1, 4), "names": list("bcd"), "p": (X[1:], Y[1:])}
    found = joined([some, rest])
    assert list(map(str, leaves(found))) == list(map(str, leaves(whole)))
    assert len(joined([torch.zeros(2, 3), torch.zeros(1, 4)])) == 3  # a list: samples of different shapes
