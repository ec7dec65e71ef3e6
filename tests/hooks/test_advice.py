"""One suggestion, where a measured part of the time could be saved; none elsewhere."""

import dataclasses
from typing import Any

import pytest

from trainwright.events import PhaseTimes
from trainwright.hooks.advice import Facts, SettingNames, advice, duration, percent, shares_of

NAMES = SettingNames(
    workers="dataloader_num_workers",
    no_workers="dataloader_num_workers=0",
    collate="data_collator=same",
    save="save_steps",
    asynchronous="asynchronous=True",
    evaluate="eval_steps",
    profile="profile=True",
)
# A training of 100 s and 10,000 iterations of 10 ms in which nothing stands out.
WELL = {"data": 4.0, "forward": 36.0, "backward": 48.0, "optimizer": 8.0, "hooks": 4.0}


def advice_for(
    seconds: float = 100.0, iterations: int = 10_000, facts: dict[str, Any] | None = None, **phases: float
) -> str:
    """The advice for some seconds in each phase, "" for none."""
    times = PhaseTimes(**{**WELL, **phases})
    own = {"iterations": iterations, "num_workers": 0, "num_cpus": 4, "names": NAMES, **(facts or {})}
    return advice(shares_of(times, seconds), Facts(**own)) or ""


def test_no_advice_where_all_is_well() -> None:
    assert advice_for() == ""


@pytest.mark.parametrize(("seconds", "iterations"), [(1.9, 10_000), (100.0, 49)])
def test_no_advice_for_a_short_run(seconds: float, iterations: int) -> None:
    scale = seconds / 100
    phases = {name: value * scale for name, value in {**WELL, "data": 64.0, "forward": 10.0, "backward": 14.0}.items()}
    assert advice_for(seconds, iterations, **phases) == ""
    assert advice_for(data=64.0, forward=10.0, backward=14.0) != ""


def test_slow_samples_are_read_by_workers() -> None:
    line = advice_for(data=60.0, forward=10.0, backward=18.0)
    assert line.startswith("Waiting for data takes 60 % of the time")
    assert "dataloader_num_workers" in line
    assert "__getitems__" in line
    assert "__getitems__" not in advice_for(data=60.0, forward=10.0, backward=20.0, facts={"reads_batches": True})


def test_quick_samples_are_read_by_whole_batches_and_not_by_workers() -> None:
    quick = {"iterations": 1_000_000, "data": 60.0, "forward": 10.0, "backward": 20.0}
    line = advice_for(**quick)  # type: ignore[arg-type]
    assert line.index("ColumnDataset") < line.index("__getitems__ returns the complete batch, with data_collator=same")
    assert "num_workers" not in line
    assert "data" not in advice_for(**quick, facts={"reads_batches": True})  # type: ignore[arg-type]


def test_with_workers_there_it_is_more_of_them_up_to_the_number_of_cpus() -> None:
    slow = {"data": 60.0, "forward": 10.0, "backward": 20.0}
    assert "with 2 workers for 4 CPUs: raise dataloader_num_workers" in advice_for(**slow, facts={"num_workers": 2})  # type: ignore[arg-type]
    assert "prepare samples once" in advice_for(**slow, facts={"num_workers": 4})  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_workers", "told_as"), [(1, "with 1 worker: "), (4, "with 4 workers: ")])
def test_batches_that_are_quicker_read_than_handed_over_are_read_without_workers(
    num_workers: int, told_as: str
) -> None:
    handed_over = {"iterations": 100_000, "data": 70.0, "forward": 6.0, "backward": 10.0, "optimizer": 4.0}
    line = advice_for(**handed_over, facts={"num_workers": num_workers})  # type: ignore[arg-type]
    assert line.startswith(f"Waiting for data takes 70 % of the time, {told_as}")
    assert line.endswith("try dataloader_num_workers=0.")
    # The same time a batch, but of a long step: there the workers are too few.
    slow = advice_for(**{**handed_over, "iterations": 20_000}, facts={"num_workers": num_workers})  # type: ignore[arg-type]
    assert "dataloader_num_workers=0" not in slow


def test_one_worker_is_no_plural() -> None:
    slow = {"data": 60.0, "forward": 10.0, "backward": 20.0}
    assert ", with 1 worker for 4 CPUs: raise" in advice_for(**slow, facts={"num_workers": 1})  # type: ignore[arg-type]


def test_times_of_data_are_of_batches_and_not_of_updates() -> None:
    of_8 = {"iterations": 50_000, "data": 60.0, "forward": 10.0, "backward": 20.0}
    assert "num_workers" in advice_for(**of_8)  # type: ignore[arg-type]
    assert "num_workers" not in advice_for(**of_8, facts={"batches": 8})  # type: ignore[arg-type]


def test_evaluations_and_saves_that_take_long() -> None:
    less = {"forward": 10.0, "backward": 20.0}
    line = advice_for(hooks=58.0, evaluation=50.0, **less)
    assert line == "Evaluations take 50 % of the time: eval_steps makes them less frequent."
    line = advice_for(hooks=58.0, save=50.0, **less)
    assert line == "Saves take 50 % of the time: save_steps makes them less frequent."
    line = advice_for(hooks=58.0, save=50.0, **less, facts={"saves_async": False})  # type: ignore[arg-type]
    assert "asynchronous=True writes them in the background" in line


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "metrics", "hooks", "compile"])
def test_nothing_is_blamed_whose_cause_is_not_measured(phase: str) -> None:
    """The first use of a package, for one, is in the phase that uses it."""
    assert advice_for(iterations=300_000, **{**dict.fromkeys(WELL, 2.0), phase: 90.0}) == ""


def test_what_saves_most_is_advised_and_nothing_else() -> None:
    both = {"data": 25.0, "hooks": 45.0, "save": 40.0, "forward": 10.0, "backward": 12.0}
    assert advice_for(**both).startswith("Saves take")  # type: ignore[arg-type]
    assert advice_for(**{**both, "data": 50.0, "save": 20.0, "hooks": 20.0}).startswith("Waiting for data")  # type: ignore[arg-type]


def test_shares_are_of_the_whole_and_add_up() -> None:
    phases = PhaseTimes(data=1.0, forward=1.5, backward=3.0, optimizer=1.0, metrics=0.5, hooks=2.0)
    phases.evaluation, phases.save = 0.5, 0.25
    shares = shares_of(phases, 10.0)
    known = {"data": 0.1, "forward": 0.15, "backward": 0.3, "optimizer": 0.1, "metrics": 0.05, "hooks": 0.125}
    assert known.items() <= dataclasses.asdict(shares).items()
    assert (shares.evaluation, shares.save, shares.other) == (0.05, 0.025, pytest.approx(0.1))
    parts = [getattr(shares, field.name) for field in dataclasses.fields(shares) if field.name != "seconds"]
    assert sum(parts) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 us"), (2.534e-4, "253 us"), (3.214e-3, "3.21 ms"), (0.9996, "1.00 s"), (75, "75.00 s")],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert percent(0.314) == "31 %"
