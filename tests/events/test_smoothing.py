import json
import math
import random
import statistics

import pytest

from trainwright.config.errors import UserError
from trainwright.events import HistoryBuffer


def filled(values, **kwargs):
    history = HistoryBuffer(**kwargs)
    for value in values:
        history.update(value)
    return history


def test_averages_agree_with_the_statistics_module():
    values = [random.Random(0).gauss(0, 1) for _ in range(101)]
    history = filled(values)
    assert history.latest() == values[-1]
    for window in (1, 2, 7, 20, 101, 5000):
        assert history.median(window) == statistics.median(values[-window:])
        assert history.avg(window) == pytest.approx(statistics.fmean(values[-window:]), rel=1e-12)  # summation order
    assert history.global_avg() == pytest.approx(statistics.fmean(values), rel=1e-12)


def test_values_without_an_iteration_are_numbered():
    assert filled([5.0, 6.0]).values() == [(5.0, 0), (6.0, 1)]


def test_only_the_last_max_length_values_are_kept_but_the_global_mean_is_of_all():
    history = filled(range(10), max_length=3)
    assert history.values() == [(7.0, 7), (8.0, 8), (9.0, 9)]
    assert len(history) == 3
    assert history.median(100) == 8.0
    assert history.avg(100) == 8.0
    assert history.global_avg() == 4.5


@pytest.mark.parametrize("length", range(1, 12))
def test_trimming_never_shows(length):
    for count in range(1, 40):
        assert filled(range(count), max_length=length).values() == [(float(i), i) for i in range(count)][-length:]


def test_a_window_of_iterations_takes_all_values_of_an_iteration_and_skips_gaps():
    history = HistoryBuffer()
    for value, iteration in [(1, 0), (2, 10), (3, 10), (4, 14), (5, 19)]:
        history.update(value, iteration)
    assert history.values_of_last_iterations(1) == [5]
    assert history.values_of_last_iterations(9) == [4, 5]
    assert history.values_of_last_iterations(10) == [2, 3, 4, 5]
    assert history.values_of_last_iterations(20) == [1, 2, 3, 4, 5]


def test_nan_makes_the_median_nan_whatever_its_place_and_inf_is_a_value():
    for values in ([math.nan, 1, 2], [1, math.nan, 2], [1, 2, math.nan]):
        assert math.isnan(filled(values).median(3))
    assert filled([1, math.inf, 2]).median(3) == 2


def test_state_restores_windows_and_the_global_mean_through_json():
    values = [random.Random(1).random() for _ in range(50)]
    history = filled(values)
    restored = HistoryBuffer()
    restored.load_state_dict(json.loads(json.dumps(history.state_dict(max_values=20))))
    for value in (0.25, 0.75):
        history.update(value)
        restored.update(value)
    assert restored.values() == history.values()[-22:]
    assert restored.median(20) == history.median(20)
    assert restored.global_avg() == history.global_avg()


def test_reading_an_empty_buffer_and_windows_of_nothing_are_refused():
    for read in (HistoryBuffer().latest, HistoryBuffer().global_avg, lambda: HistoryBuffer().median(3)):
        with pytest.raises(UserError, match="no value yet"):
            read()
    with pytest.raises(UserError, match="window of 0"):
        filled([1]).avg(0)
    with pytest.raises(UserError, match="max_length"):
        HistoryBuffer(0)


def test_values_since_an_iteration_are_those_of_it_and_later():
    history = HistoryBuffer(max_length=4)
    for value, iteration in [(1.0, 3), (2.0, 4), (3.0, 4), (math.nan, 6)]:
        history.update(value, iteration)
    assert history.values_since(7) == []
    assert str(history.values_since(4)) == "[(2.0, 4), (3.0, 4), (nan, 6)]"
    assert history.values_since(0)[0] == (1.0, 3)
