"""The names of samples, from attributes, columns, methods, and through data sets that contain others."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from trainwright.base.errors import ConfigTypeError
from trainwright.data import DataError, MixedDataset, SingleRoundSampler, collate, sample_name
from trainwright.data.loaders import DatasetPart
from trainwright.data.mixture import mixed
from trainwright.data.sample_names import shown_samples


class Files(Dataset):
    """Four samples; reading one fails."""

    def __init__(self, **names: Any) -> None:
        vars(self).update(names)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("A name does not need the sample.")


@pytest.mark.parametrize(
    "names",
    [
        {"ids": ["a", "b", "c", "d"]},
        {"paths": [Path(name) for name in "abcd"]},
        {"samples": [(name, 0) for name in "abcd"]},  # as in torchvision's ImageFolder
        {"sample_name": lambda index: "abcd"[index]},
        {"files": ["x"], "filenames": list("abcd")},  # the first has no item for each sample
    ],
)
def test_the_names_of_a_data_set(names: dict[str, Any]) -> None:
    assert [sample_name(Files(**names), index) for index in range(4)] == list("abcd")


@pytest.mark.parametrize("names", [{}, {"samples": [torch.zeros(2)] * 4}, {"ids": "abcd"}, {"ids": [True] * 4}])
def test_other_attributes_are_no_names(names: dict[str, Any]) -> None:
    assert sample_name(Files(**names), 2) is None


def test_parts_and_datasets_of_others_have_their_names() -> None:
    named, other = Files(ids=list("abcd")), TensorDataset(torch.zeros(3))
    joined = ConcatDataset([other, Subset(named, [3, 1])])
    assert [sample_name(joined, index) for index in range(5)] == [None, None, None, "d", "b"]
    mixture = MixedDataset([other, named], [1.0, 1.0])
    assert [sample_name(mixture, index) for index in (2, 3, 6)] == [None, "a", "d"]
    assert [sample_name(DatasetPart(named, 1, 2, 5), index) for index in range(4)] == ["b", "c", "b", "c"]

    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"text": ["one", "two"], "id": ["q1", "q2"]})
    assert [sample_name(table, index) for index in range(2)] == ["q1", "q2"]
    assert sample_name(table.remove_columns("id"), 0) is None

    assert shown_samples(Files(ids=list("abcd")), [2, 0]) == "2 (c), 0 (a)"
    assert shown_samples(TensorDataset(torch.zeros(3000)), range(2000), at_most=2) == "0, 1, … (2,000 in all)"


@pytest.mark.parametrize(
    ("samples", "fact"),
    [
        (
            [{"image": np.zeros((1, 8))}, {"image": np.zeros((8,))}],
            r"sample 1 of the batch has 'image' of shape \(8,\); sample 0 has \(1, 8\)",
        ),
        (
            [(torch.zeros(2), 1), (torch.zeros(2), 1), (torch.zeros(3), 1)],
            r"sample 2 of the batch has '\[0\]' of shape \(3,\)",
        ),
        ([{"a": 1}, {"b": 1}], r"sample 1 of the batch has keys \['b'\]; sample 0 has \['a'\]"),
        ([{"a": [1, 2]}, {"a": [1]}], "sample 1 of the batch has 'a' of length 1; sample 0 has 2"),
        ([torch.zeros(2), None], "sample 1 of the batch is None"),
        ([{"a": [1, None]}, {"a": [1, 2]}], r"sample 0 of the batch is None at 'a\[1\]'"),
        ([(1, object()), (1, object())], r"sample 0, \[1\], is a builtins.object.*convert it in the data set"),
        ([{"x": Image.new("L", (2, 2))}], r"sample 0, x, is a PIL.Image.Image.*ToTensor"),
    ],
)
def test_what_does_not_fit_is_said_with_its_place(samples, fact):
    with pytest.raises(DataError, match=fact):
        collate(samples)


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        ("data/train.csv", r"got the path 'data/train.csv'.*Dataset.load"),
        (Path("data"), r"got the path 'data'"),
        (pandas.DataFrame({"a": [1, 2]}), r"got a DataFrame.*ColumnDataset"),
        ({"inputs": torch.zeros(3, 1), "labels": np.zeros(3)}, r"got a dict of arrays; pass ColumnDataset"),
        ({"train": [1, 2], "test": [3]}, r"got a dict of data sets; pass one of them: data\['train'\]"),
        ([torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)], r"\(3, 2\) and \(3,\).*TensorDataset"),
        (0.2, r"got 0.2 \(float\); a data set has __getitem__ and __len__.*random_split"),
        (torch.nn.Sequential(), r"got Sequential\(\)"),
    ],
)
def test_what_is_no_data_set_is_refused_with_what_to_pass(data, fact):
    with pytest.raises(ConfigTypeError, match=f"data: .*{fact}"):
        SingleRoundSampler(data, 2)
    if isinstance(data, dict):
        with pytest.raises(ConfigTypeError, match=f"train_dataset: .*{fact}"):
            mixed(data)


def test_a_list_of_tensors_may_be_samples():
    assert len(SingleRoundSampler([torch.zeros(3), torch.zeros(2)], 2)) == 1
