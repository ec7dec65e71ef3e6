import json
import math
import random
import statistics

import pytest

from trainwright.base.errors import UserError
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


def test_only_the_last_max_length_values_are_kept_but_the_global_mean_is_of_all():
    history = filled(range(10), max_length=3)
    assert history.values() == [(7.0, 7), (8.0, 8), (9.0, 9)]
    assert len(history) == 3
    assert history.median(100) == 8.0
    assert history.avg(100) == 8.0
    assert history.global_avg() == 4.5
    for length in range(1, 12):
        for count in range(1, 40):
            kept = [(float(i), i) for i in range(count)][-length:]
            assert filled(range(count), max_length=length).values() == kept


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
        with pytest.raises(UserError, match="no value has been added"):
            read()
    with pytest.raises(UserError, match="window_size=0"):
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
    assert str(history.newest(2)) == "[(3.0, 4), (nan, 6)]"
    assert (len(history.newest(9)), history.newest(0)) == (4, [])


@pytest.mark.parametrize("length", [1, 2, 5, 1000])
def test_a_frozen_history_stays_what_it_was_whatever_comes_and_goes(length):
    history = HistoryBuffer(max_length=length)
    kept = []
    for count in range(30):
        history.update(count**2, count)
        frozen = history.frozen()
        expected = (history.values(), history.latest(), history.latest_iteration(), len(history), history.global_avg())
        expected += (history.median(3), history.avg(4), history.values_of_last_iterations(2), history.values_since(7))
        kept.append((frozen, (*expected, history.state_dict(3))))
    for frozen, expected in kept:
        read = (frozen.values(), frozen.latest(), frozen.latest_iteration(), len(frozen), frozen.global_avg())
        read += (frozen.median(3), frozen.avg(4), frozen.values_of_last_iterations(2), frozen.values_since(7))
        assert (*read, frozen.state_dict(3)) == expected
        assert frozen.frozen().values() == frozen.values()


def test_a_frozen_history_can_only_be_read():
    frozen = filled([1.0]).frozen()
    for write in (lambda: frozen.update(2.0), lambda: frozen.extend([2.0], [1]), lambda: frozen.load_state_dict({})):
        with pytest.raises(UserError, match="read-only"):
            write()
    assert frozen.values() == [(1.0, 0)]


@pytest.mark.parametrize("length", [1, 3, 1000])
def test_values_that_come_together_are_as_if_one_by_one(length):
    values = [random.Random(3).gauss(0, 1e3) for _ in range(50)]
    one_by_one, together = HistoryBuffer(length), HistoryBuffer(length)
    for place, value in enumerate(values):
        one_by_one.update(value, place // 2)
    for start in range(0, 50, 7):
        together.extend(values[start : start + 7], [place // 2 for place in range(start, min(start + 7, 50))])
    assert together.state_dict(1000) == one_by_one.state_dict(1000)  # bitwise, the sum too
    for window in range(1, 30):
        assert together.values_of_last_iterations(window) == one_by_one.values_of_last_iterations(window)


def test_windows_of_iterations_agree_with_a_plain_search():
    generator = random.Random(4)
    for _ in range(200):
        history = HistoryBuffer(max_length=generator.choice([3, 1000]))
        at, pairs = 0, []
        for _ in range(generator.randrange(1, 12)):
            at += generator.choice([0, 1, 1, 1, 3])
            pairs.append((float(len(pairs)), at))
            history.update(*pairs[-1])
        for window in range(1, 15):
            expected = [value for value, iteration in pairs if iteration > at - window][-history.max_length :]
            assert history.values_of_last_iterations(window) == expected
