"""Checks by evaluations: an evaluation changes nothing, and the model transfers from some samples to others."""

from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.base.batch import num_rows
from trainwright.data.seeding import rng_state
from trainwright.inspect.check.batches import labels_are_inputs, same_values, with_permuted_labels
from trainwright.inspect.check.copies import Copy
from trainwright.inspect.check.finding import Finding, Skipped, passed, problem, undecided
from trainwright.inspect.check.observed import SetUp
from trainwright.inspect.check.steps import dropout_off

_MOST_SAMPLES = 750  # of the training data, of which a third is not trained on
_FEWEST_SAMPLES = 60  # not trained on
_PERMUTATIONS = 19
_FIRST, _LAST = 25, 800  # updates before the first and the last comparison; each is twice as late as the one before


def check_evaluation(setup: SetUp) -> Finding:
    """An evaluation changes no weight, buffer, mode or random generator, and uses no dropout or batch statistics."""
    overfits = setup.run.spec.overfit_batches
    new = setup.make(limit_eval_batches=None if overfits else 4)
    if not (new.eval_loaders or overfits):
        raise Skipped("there are no evaluation data")
    new.model.train()
    before, modes = _copied(new.model), {name: one.training for name, one in new.model.named_modules()}
    flags = {name: one.requires_grad for name, one in new.model.named_parameters()}
    state = rng_state()
    with _TrainingCalls() as calls:
        results = new.run.evaluate()
    faults = []
    after = _copied(new.model)
    changed = [name for name in before if name not in after or not same_values(before[name], after[name])]
    if changed:
        faults.append(f"it changes {len(changed)} tensors of the model (first {changed[0]})")
    if calls.found:
        faults.append(f"it computes with {', '.join(sorted(calls.found))}")
    later = [name for name, one in new.model.named_modules() if one.training != modes.get(name)]
    if later:
        faults.append(f"it leaves {later[0] or 'the model'} in another mode")
    if flags != {name: one.requires_grad for name, one in new.model.named_parameters()}:
        faults.append("it changes requires_grad")
    if not _equal_states(state, rng_state()):
        faults.append("it draws from the random generators of the training")
    values = {"faults": faults, "results": [*results]}
    if faults:
        fix = "Evaluate with model.eval() and torch.no_grad(), and give F.dropout(x, training=self.training)."
        return problem(f"An evaluation is not neutral: {'; '.join(faults)}.", fix, values)
    text = "It changes no weight, buffer, mode or random generator, and uses no dropout or batch statistics."
    return passed(text, values=values)


class _TrainingCalls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled() or func in _BY_FUNCTION:
            name, is_active = _BY_FUNCTION.get(func, ("", None))
            if is_active is not None and is_active(args, kwargs):
                self.found.add(name)
        return func(*args, **kwargs)


def _argument(place: int, name: str, default: Any) -> Callable[[Any, Any], Any]:
    return lambda args, kwargs: kwargs.get(name, args[place] if len(args) > place else default)


def _dropout(func: Any, rate: float = 0.5, default: bool = True) -> Any:
    p, training = _argument(1, "p", rate), _argument(2, "training", default)
    return lambda args, kwargs: bool(training(args, kwargs)) and p(args, kwargs) > 0


def _uses_batch(args: Any, kwargs: Any) -> bool:
    mean, training = _argument(1, "running_mean", None), _argument(5, "training", False)
    return mean(args, kwargs) is not None and bool(training(args, kwargs))


_F = nn.functional
_BY_FUNCTION: dict[Any, tuple[str, Callable[[Any, Any], bool]]] = {
    **{
        one: ("active dropout", _dropout(one))
        for one in (_F.dropout, _F.dropout1d, _F.dropout2d, _F.dropout3d, _F.feature_alpha_dropout)
    },
    _F.alpha_dropout: ("active dropout", _dropout(_F.alpha_dropout, default=False)),
    torch.dropout: ("active dropout", _dropout(torch.dropout)),
    _F.batch_norm: ("the statistics of a batch in batch normalization", _uses_batch),
    _F.scaled_dot_product_attention: (
        "active dropout of the attention",
        lambda args, kwargs: _argument(4, "dropout_p", 0.0)(args, kwargs) > 0,
    ),
}


def _copied(model: nn.Module) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: one.detach().clone() for name, one in named.items()}


def _equal_states(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal_states(first[name], second[name]) for name in first)
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(_equal_states, first, second))
    return bool((first == second).all()) if hasattr(first, "shape") else bool(first == second)


def check_labels(setup: SetUp) -> Finding:
    """The labels belong to their samples: what the model learns from some samples holds for others.

    The losses of samples that it has not seen are compared with those of the same samples with permuted labels.
    """
    new = setup.make(constant_rate=True)
    batches = _first_samples(new)
    learned, unseen = batches[: 2 * len(batches) // 3], batches[2 * len(batches) // 3 :]
    prepared = [[new.prepared(batch) for batch in part] for part in (learned, unseen)]
    number = sum(num_rows(batch) or 0 for batch in prepared[1])
    generator = torch.Generator().manual_seed(0)
    if with_permuted_labels(prepared[0][0], generator) is None:
        raise Skipped("the batches have no labels that can be permuted")
    if labels_are_inputs(prepared[0][0]):
        raise Skipped("the labels are the inputs")
    if number < _FEWEST_SAMPLES:
        raise Skipped(f"{number} samples are too few to compare")
    new.run.batches.repeat(learned)
    found: list[tuple[_Gain, _Gain]] = []

    def compare() -> None:
        done = new.trainer.iter + 1
        if done % _FIRST or (done // _FIRST).bit_count() != 1:
            return
        with dropout_off(new.model):
            gains = [_gain(new, part, generator) for part in (prepared[1], prepared[0][: len(prepared[1])])]
        found.append((gains[0], gains[1]))
        if gains[0].sigmas > 5 or (gains[1].is_memorized and done >= 8 * _FIRST):
            new.stop()

    affordable = int(0.5 * setup.seconds_left() / max(setup.step_seconds, 1e-6) / 2)
    if affordable < _FIRST:
        raise Skipped("no time was left")
    new.train(min(_LAST, affordable), after=compare, needed=_FIRST)
    if not found:
        raise Skipped(f"the run has fewer than {_FIRST} updates")
    others, own = found[-1]
    values = {
        "unseen_samples": number,
        "sigmas": others.sigmas,
        "sigmas_of_learned": own.sigmas,
        "updates": _FIRST << (len(found) - 1),
    }
    if others.sigmas > 5:
        text = f"{number} samples that were not trained on fit their own labels better than permuted ones"
        return passed(f"{text} ({others.sigmas:.0f} standard deviations).", values=values)
    if own.is_memorized and others.sigmas < 2 and others.gain < 0.05 * own.gain:
        text = f"The model learned samples by heart, but {number} others fit their labels no better than permuted ones."
        fix = "Compare some samples with their labels: were they shuffled apart? Or are the data too few to learn from?"
        return problem(text, fix, values)
    text = f"After {values['updates']} updates, samples that were not trained on fit their labels by"
    return undecided(f"{text} {others.sigmas:.1f} standard deviations: too little to decide.", "", values)


class _Gain:
    """How much lower the losses of the labels are than those of permuted labels."""

    def __init__(self, loss: float, permuted: list[float]) -> None:
        mean, spread = fmean(permuted), stdev(permuted)
        self.gain = mean - loss
        self.sigmas = self.gain / spread if spread else 0.0
        self.is_memorized = self.sigmas > 10 and loss < 0.5 * mean


def _gain(new: Copy, batches: list[Any], generator: torch.Generator) -> _Gain:
    def mean(draws: bool) -> float:
        losses = []
        for batch in batches:
            torch.manual_seed(0)
            losses.append(float(new.loss(with_permuted_labels(batch, generator) if draws else batch).detach()))
        return fmean(losses)

    with torch.random.fork_rng(devices=[]):
        return _Gain(mean(False), [mean(True) for _ in range(_PERMUTATIONS)])


def _first_samples(new: Copy) -> list[Any]:
    (first,) = new.run.batches.first(1)
    size = num_rows(new.prepared(first)) or 0
    if size < 4:
        raise Skipped("a batch has fewer than four samples" if size else "the samples of a batch cannot be counted")
    number = max(3, _MOST_SAMPLES // size)
    dataset: Any = getattr(new.run.batches.loader, "dataset", None)
    if hasattr(dataset, "__len__"):  # not the same samples again
        number = min(number, len(dataset) // size)
    batches = new.run.batches.first(number)
    if len(batches) < 3:
        raise Skipped("an epoch has fewer than three batches")
    return batches
