import pytest

from trainwright.config.errors import ConfigError
from trainwright.data.splits import DatasetPart, shares, split_ranges, train_val_test_datasets


@pytest.mark.parametrize("length", [0, 1, 2, 3, 10, 999, 1000, 1001])
@pytest.mark.parametrize("proportions", [[949, 50, 1], [1, 1, 1], [1, 0, 0], [0.8, 0.1, 0.1], [0, 0, 2]])
def test_ranges_follow_each_other_and_are_the_whole(length, proportions):
    ranges = split_ranges(length, proportions)
    assert [index for part in ranges for index in part] == list(range(length))
    for part, proportion in zip(ranges, proportions, strict=True):
        assert abs(len(part) - length * proportion / sum(proportions)) <= 1  # two cuts, each rounded by a half at most


@pytest.mark.parametrize("weights", [[1], [1, 1, 1], [0.7, 0.2, 0.1], [5, 0, 1]])
@pytest.mark.parametrize("total", [0, 1, 7, 1000])
def test_shares_lose_nothing_and_are_within_one_of_exact(weights, total):
    counts = shares(total, weights)
    assert sum(counts) == total
    assert all(abs(count - total * w / sum(weights)) < 1 for count, w in zip(counts, weights, strict=True))


def test_without_numbers_each_part_holds_every_sample_of_its_ranges_once():
    train, val, test = train_val_test_datasets(
        [range(10), range(100, 110)], [[8, 1, 1]], None, None, lambda parts: [x for part in parts for x in part]
    )
    assert train == [*range(8), *range(100, 108)]
    assert (val, test) == ([8, 108], [9, 109])


def test_weights_share_out_the_numbers_and_only_training_repeats():
    train, val, test = train_val_test_datasets(
        [range(10), range(100, 200)],
        [[8, 1, 1], [90, 5, 5]],
        [3, 1],
        [20, 4, None],
        lambda parts: [x for part in parts for x in part],
    )
    assert train == [*range(8), *range(7), *range(100, 105)]  # 15 and 5
    assert val == [8, 190]  # 3 and 1, of which the first data set has one
    assert test == [9, *range(195, 200)]


def test_a_part_without_samples_is_none():
    train, val, test = train_val_test_datasets([range(10)], [[1, 0, 0]], None, [5, 5, 5], list)
    assert list(train) == [0, 1, 2, 3, 4]
    assert (val, test) == (None, None)


def test_a_data_set_with_an_empty_range_gives_its_share_to_the_others():
    train, _, _ = train_val_test_datasets(
        [range(4), range(10, 14)], [[0, 1, 0], [1, 0, 0]], [1, 1], [6, 1, 0], lambda parts: parts
    )
    assert list(train) == [10, 11, 12, 13, 10, 11]


def test_a_part_ends():
    with pytest.raises(IndexError, match="sample 5 of a part of 5"):
        DatasetPart("abcdef", 2, 3, 5)[5]


def test_all_faults_are_said_at_once():
    with pytest.raises(ConfigError) as raised:
        train_val_test_datasets([range(4), range(4), range(4)], [[1, 1], [0, 0, 0]], [1], [1, 2], list)
    message = str(raised.value)
    for fact in (
        "splits: got 2 rows for 3 data sets",
        "splits[0]: got [1, 1]; it must be three proportions",
        "splits[1]: got [0, 0, 0]",
        "weights: got 1 for 3 data sets",
        "train_val_test_num_samples: got [1, 2]",
    ):
        assert f"build_nlp_train_val_test_loader.{fact}" in message


def test_weights_without_numbers_are_refused():
    with pytest.raises(ConfigError, match="train_val_test_num_samples"):
        train_val_test_datasets([range(4), range(4)], [[1, 1, 1]], [1, 2], None, list)
