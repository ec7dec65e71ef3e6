"""Which runs a sweep has: those of a grid, or those that a search draws, with Optuna."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainwright.base.errors import ConfigError, import_optional
from trainwright.cli.sweep.values import Values, name_of, text_of

if TYPE_CHECKING:
    import optuna

STORAGE = "optuna.db"  # in the folder of a search


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of a sweep. ``texts``: its values by their keys, as in overrides. ``name``: of its folder."""

    name: str
    texts: dict[str, str]
    number: int = 0  # of its trial


class Source(Protocol):
    """The runs of a sweep. Runs that an earlier command has not completed come first."""

    total: int

    def known(self) -> list[PlannedRun]:
        """The runs so far; of a grid all."""

    def new(self) -> Iterator[PlannedRun]:
        """The further runs, each drawn when it is about to begin."""

    def end(self, run: PlannedRun, value: float | None) -> None:
        """A run is complete with this value, or has failed (None)."""


class Grid:
    """A run for each combination of values."""

    def __init__(self, values: Values) -> None:
        self._runs = [PlannedRun(name_of(texts), texts) for texts in values.grid()]
        self.total = len(self._runs)

    def known(self) -> list[PlannedRun]:
        return self._runs

    def new(self) -> Iterator[PlannedRun]:
        return iter(())

    def end(self, run: PlannedRun, value: float | None) -> None:
        pass


class Search:
    """Runs whose values Optuna draws, which keeps them in the folder of the search.

    What a trial draws depends on the seed, on its number and on the results so far, so an interrupted search that
    continues draws what an uninterrupted one draws. A trial that is tried again keeps its values.
    """

    def __init__(
        self, values: Values, folder: Path, total: int, *, direction: Any, sampler: str, seed: int, begins: bool
    ) -> None:
        message = "--trials: a search needs Optuna: pip install optuna (a grid, --sweep, needs nothing)."
        import_optional("optuna", message, ConfigError)
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._values, self._sampler, self._seed = values, sampler, seed
        self._distributions = {key: _distribution(values, key) for key in values.keys}
        storage = optuna.storages.RDBStorage(f"sqlite:///{folder / STORAGE}")
        if begins and folder.name in optuna.get_all_study_names(storage):
            optuna.delete_study(study_name=folder.name, storage=storage)
        self._study: optuna.Study = optuna.create_study(
            storage=storage, study_name=folder.name, direction=direction, load_if_exists=True
        )
        self.total = max(total, len(self._trials()))
        self._drawn: dict[int, optuna.Trial] = {}

    def known(self) -> list[PlannedRun]:
        return [self._planned(trial) for trial in self._trials()]

    def new(self) -> Iterator[PlannedRun]:
        while (number := len(self._trials())) < self.total:
            self._study.sampler = self._new_sampler(number)
            trial = self._study.ask(self._distributions)
            self._drawn[trial.number] = trial
            yield self._planned(trial)

    def end(self, run: PlannedRun, value: float | None) -> None:
        from optuna.trial import TrialState, create_trial

        before = self._study.get_trials(deepcopy=False)[run.number]
        if not before.state.is_finished():
            state = TrialState.FAIL if value is None else None
            self._study.tell(run.number, value, state=state)
        elif before.state == TrialState.FAIL and value is not None and run.number not in self._repeated():
            # Optuna changes no trial that has ended: the sampler reads the result from a copy.
            attributes = {_REPEATS: run.number}
            params, distributions = before.params, before.distributions
            self._study.add_trial(
                create_trial(params=params, distributions=distributions, value=value, user_attrs=attributes)
            )

    def _trials(self) -> "list[optuna.trial.FrozenTrial]":
        return [one for one in self._study.get_trials(deepcopy=False) if _REPEATS not in one.user_attrs]

    def _repeated(self) -> set[int]:
        return {one.user_attrs.get(_REPEATS, -1) for one in self._study.get_trials(deepcopy=False)}

    def _planned(self, trial: Any) -> PlannedRun:
        texts = {}
        for key in self._values.keys:
            value = trial.params[key]
            texts[key] = text_of(self._values.ranges[key], value) if key in self._values.ranges else value
        return PlannedRun(f"trial_{trial.number:03d}", texts, trial.number)

    def _new_sampler(self, number: int) -> Any:
        import numpy as np
        import optuna

        kind = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}[self._sampler]
        return kind(seed=int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0]))


_REPEATS = "repeats_trial"


def _distribution(values: Values, key: str) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if key in values.choices:
        return CategoricalDistribution(tuple(values.choices[key]))
    range_ = values.ranges[key]
    if range_.is_int:
        return IntDistribution(int(range_.low), int(range_.high), log=range_.is_log)
    return FloatDistribution(range_.low, range_.high, log=range_.is_log)
