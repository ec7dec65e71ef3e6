"""Checks of equalities: accumulated batches and a large one, a resumed run and an uninterrupted one, loss and mean."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainwright.base.batch import IGNORED, num_rows
from trainwright.engine.run import Run
from trainwright.inspect.check.batches import joined, same_values
from trainwright.inspect.check.copies import Copy
from trainwright.inspect.check.finding import Finding, Skipped, passed, problem, undecided
from trainwright.inspect.check.observed import SetUp
from trainwright.inspect.check.steps import dropout_off
from trainwright.models.outputs import named_outputs
from trainwright.models.targets import Targets, class_labels, target_of

_SAVED_AFTER = 3  # iterations
_ROUNDING = 1e-3  # of gradients, as a part of their length
_MOST_CLASSES = 8  # that may be ignored
_FAR = 4  # times the cross-entropy of equal scores
_RESHAPES = ("Squeeze", "Unsqueeze", "View", "UnsafeView", "Reshape", "Select", "Slice", "ToCopy")  # names in autograd


def check_loss_scale(setup: SetUp) -> Finding:
    """The loss is a mean of what it expects: no sum, no constant factor, no cross-entropy of probabilities."""
    new = setup.make()
    new.model.train()
    batches = [new.prepared(batch) for batch in new.run.batches.first(3)]
    with dropout_off(new.model):
        found = [_seeded_loss(new, batch) for batch in batches]
        losses = [loss for loss, _ in found]
        growth = _growth(new, batches, losses)
    values: dict[str, Any] = {"losses": losses, "growth": growth}
    if growth and all(abs(one - 2) < 0.02 for one in growth):
        return problem(
            f"A batch with each sample twice has {growth[0]:.3g} times the loss: it is a sum over the"
            " samples, not a mean.", "Divide by the number of samples (reduction='mean'): batch size, accumulation and"
            " learning rate assume a mean.", values,
        )  # fmt: skip
    pairs = [_scores_and_labels(outputs, batch) for (_, outputs), batch in zip(found, batches, strict=True)]
    scored = [pair for pair in pairs if pair is not None]
    if len(scored) == len(losses) and (misread := _misread_scores(losses, scored)):
        return problem(*misread, values)
    references = [_cross_entropy(*pair) for pair in scored]
    ratios = [loss / one for loss, one in zip(losses, references, strict=False) if one]
    if len(ratios) == len(losses) > 1 and max(ratios) - min(ratios) < 0.01 * abs(ratios[0]):
        return _factor_finding(ratios[0], setup.run.spec.windows.largest, values)
    text = "It does not grow with the number of samples." if growth else "It is a number of its own."
    return (passed if growth else undecided)(text, values=values)


def _factor_finding(factor: float, steps: int, values: dict[str, Any]) -> Finding:
    """The finding for losses that are ``factor`` times the cross-entropy; ``steps``: the accumulated batches."""
    values["factor"] = factor
    if steps > 1 and abs(factor * steps - 1) < 0.02:
        fix = "Remove the division: the trainer divides by the number of accumulated batches itself."
    elif not 0.1 < factor < 10:
        fix = "Remove the factor, unless it is meant as a weight."
    else:
        return passed(f"The loss is {factor:.3g} times the cross-entropy of the scores.", values=values)
    return problem(f"The loss is {factor:.3g} times the cross-entropy of the model's scores.", fix, values)


def _growth(new: Copy, batches: list[Any], losses: list[float]) -> list[float]:
    """The losses of batches with each sample twice, as multiples; empty if they cannot be made."""
    try:
        doubled = [_seeded_loss(new, joined([batch, batch]))[0] for batch in batches]
    except Skipped:
        return []
    return [big / loss for big, loss in zip(doubled, losses, strict=True) if loss]


def _seeded_loss(new: Copy, batch: Any) -> tuple[float, Any]:
    """The loss, and the outputs of the model."""
    outputs: list[Any] = []
    torch.manual_seed(0)
    with new.model.register_forward_hook(lambda *arguments: outputs.append(arguments[2])):
        loss = new.loss(batch)
    return float(loss), outputs[-1] if outputs else None


def _scores_and_labels(outputs: Any, batch: Any) -> tuple[Tensor, Tensor] | None:
    """Scores (B, C) and labels (B) or (B, C); None if there are none."""
    named = None if isinstance(outputs, Tensor) else named_outputs(outputs)
    scores = outputs if named is None else named.get("logits", named.get("prediction_scores"))
    labels = target_of(batch)
    is_known = isinstance(scores, Tensor) and isinstance(labels, Tensor) and len(scores.shape) in (1, 2)
    return (scores, labels) if is_known and scores.shape[:1] == labels.shape[:1] else None


def _cross_entropy(scores: Tensor, labels: Tensor) -> float | None:
    """Of class scores (B, C) and classes (B); None of others."""
    if scores.dim() != 2 or labels.dim() != 1 or labels.is_floating_point() or int(labels.max()) >= scores.shape[1]:
        return None
    return float(nn.functional.cross_entropy(scores.float(), labels.long()))


def _misread_scores(losses: list[float], scored: list[tuple[Tensor, Tensor]]) -> tuple[str, str] | None:
    """What is wrong with scores that a loss of torch takes for others than they are, and what to do."""

    def is_loss(reference: Callable[[Tensor, Tensor], float | None]) -> bool:
        found = [reference(*pair) for pair in scored]
        return all(one is not None and math.isclose(a, one, rel_tol=1e-4) for a, one in zip(losses, found, strict=True))

    def are(quality: Callable[[Tensor], Any]) -> bool:
        return all(bool(quality(scores.detach().float())) for scores, _ in scored)

    if is_loss(_cross_entropy):
        are_probabilities = are(lambda scores: scores.min() >= 0 and ((scores.sum(1) - 1).abs() < 1e-3).all())
        # Scores that are nearly equal have the same cross-entropy as their logarithms, which a model may use inside.
        if are_probabilities and not is_loss(lambda scores, labels: _cross_entropy(scores.log(), labels)):
            text = (
                "The scores of the model are probabilities (rows sum to 1), and the loss is a cross-entropy of logits."
            )
            return text, "Leave out the softmax of the model."
        mean, equal = sum(losses) / len(losses), math.log(max(2, scored[0][0].shape[1]))
        if mean > _FAR * equal:
            text = f"The cross-entropy before the training is {mean:.3g}; that of equal scores is {equal:.3g}."
            return text, "Scale the inputs (mean 0, variance 1) or the initial weights; compare labels and classes."
    if is_loss(_negative_score) and not are(lambda scores: (scores.logsumexp(1).abs() < 1e-3).all()):
        text = "NLLLoss takes logarithms of probabilities, which the scores of the model are not."
        return text, "Use CrossEntropyLoss, or add log_softmax to the model."
    if is_loss(_binary_cross_entropy) and all(map(_is_sigmoid, scored)):
        text = "The scores of the model are probabilities (of a sigmoid), and the loss is BCEWithLogitsLoss."
        return text, "Leave out the sigmoid of the model, or use BCELoss."
    return None


def _negative_score(scores: Tensor, labels: Tensor) -> float | None:
    known = _cross_entropy(scores, labels) is not None and int(labels.min()) >= 0
    return float(nn.functional.nll_loss(scores.float(), labels.long())) if known else None


def _binary_cross_entropy(scores: Tensor, labels: Tensor) -> float | None:
    if scores.numel() != labels.numel():
        return None
    return float(nn.functional.binary_cross_entropy_with_logits(scores.float(), labels.float().reshape(scores.shape)))


def _is_sigmoid(pair: tuple[Tensor, Tensor]) -> bool:
    """Whether the scores are the result of a sigmoid, perhaps of another shape."""
    node = pair[0].grad_fn
    while node is not None and node.name().startswith(_RESHAPES):
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith("Sigmoid")


def check_accumulation(setup: SetUp) -> Finding:
    """The accumulated gradient of several batches is the gradient of one batch with all their samples."""
    steps = setup.run.spec.windows.largest
    if steps == 1:
        raise Skipped("no gradients are accumulated")
    new = setup.make(gradient_accumulation_steps=steps)
    if any(isinstance(one, nn.modules.batchnorm._BatchNorm) and one.training for one in new.model.modules()):
        raise Skipped("batch normalization uses the statistics of each small batch")
    batches = new.run.batches.first(steps)
    whole = joined(batches)
    small = _gradients(new, batches)
    large = _gradients(setup.make(gradient_accumulation_steps=1), [whole])
    size = math.sqrt(sum(float(one.square().sum()) for one in large))
    difference = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(small, large, strict=True)))
    ratio = math.sqrt(sum(float(one.square().sum()) for one in small)) / size if size else 0.0
    values = {"difference": difference / size if size else 0.0, "ratio": ratio, "batches": steps}
    if difference > _ROUNDING * size and not setup.has_own_step:
        each = [_gradients(setup.make(gradient_accumulation_steps=1), [batch]) for batch in batches]
        if declaration := _declaration(new.run, batches, each, large):
            text, fix = declaration
            return problem(f"{text} The updates of {steps} batches differ by {values['difference']:.1g}.", fix, values)
    if not size or difference < 0.05 * size:
        text = f"The gradients of {steps} batches differ by {values['difference']:.1g} from those of one large batch."
        return passed(text, values=values)
    text = f"The accumulated gradients are {ratio:.3g} times as long as those of one large batch, and differ by"
    text += f" {values['difference']:.1g}."
    if not setup.has_own_step and abs(ratio - 1) < 0.2:
        advice = "The loss may depend on the other samples of a batch, or be drawn at random."
        return undecided(text, advice, values)
    fix = "Use self.backward(loss) and self.step(optimizer), which weight the batches, and do not divide the loss."
    return problem(text, fix, values)


def _declaration(run: Run, batches: list[Any], each: list[list[Tensor]], large: list[Tensor]) -> tuple[str, str] | None:
    """What the loss averages, and how to declare it; None: nothing that is known.

    It is what makes the weighted mean of the gradients of ``each`` batch those of the ``large`` one.
    """
    setting = run.spec.name_of("loss_ignores")
    size = math.sqrt(sum(float(one.square().sum()) for one in large))
    labels = [class_labels(batch, run.update.mean.counter.fields) for batch in batches]
    samples = [float(num_rows(batch) or 0) for batch in batches]
    rules = [(samples, "the samples", f"Set {setting}=None: samples count alike.")]
    if all(one is not None for one in labels):
        rules += _label_rules([one for one in labels if one is not None], setting)
    for weights, text, fix in rules:
        total = sum(weights) or 1.0
        means = [sum(w / total * one for w, one in zip(weights, row, strict=True)) for row in zip(*each, strict=True)]
        difference = sum(float((a - b).square().sum()) for a, b in zip(means, large, strict=True))
        if math.sqrt(difference) < _ROUNDING * size:
            return f"The loss of a batch is a mean over {text}, which nothing declares.", fix
    return None


def _label_rules(labels: list[Tensor], setting: str) -> list[tuple[list[float], str, str]]:
    """What losses may average in batches with these labels: the weight of each batch, its name, how to declare it."""
    rules = []
    values, numbers = torch.unique(torch.cat([one.flatten() for one in labels]), return_counts=True)
    for value in values[numbers.argsort(descending=True)][:_MOST_CLASSES].tolist():
        for ignored in ((value,), (value, IGNORED)):
            weights = [float(Targets(ignored).count(one)) for one in labels]
            shown = ignored[0] if len(ignored) == 1 else [*ignored]
            text = f"the labels that are not {' or '.join(map(str, ignored))}"
            rules.append((weights, text, f"Set {setting}={shown}, or return num_tokens from the model."))
    shifted = Targets(is_shifted=True)
    fix = "Give the model the attribute loss_type = 'ForCausalLM', or return num_tokens from it."
    return [*rules, ([float(shifted.count(one)) for one in labels], "the labels of the next tokens", fix)]


def _gradients(new: Copy, batches: list[Any]) -> list[Tensor]:
    """Those that the first step of an optimizer uses."""
    new.run.batches.repeat(batches)
    found: dict[int, Tensor] = {}
    own = {id(one) for one in new.model.parameters()}

    def keep(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for one in group["params"]:
                if id(one) in own and one.grad is not None:
                    found.setdefault(id(one), one.grad.detach().double().clone())

    with register_optimizer_step_pre_hook(keep), dropout_off(new.model):
        new.train(1)
    return [found.get(id(one), torch.zeros_like(one, dtype=torch.float64).detach()) for one in new.model.parameters()]


def check_resume(setup: SetUp) -> Finding:
    """A run that is saved and resumed has, bit for bit, the weights of the uninterrupted run."""
    folder = setup.folder / "resume"
    straight = setup.make(folder=folder, save_enabled=True)
    last = min(2 * _SAVED_AFTER, straight.trainer.max_iter)
    if last < 2:
        raise Skipped("the run has one update")
    middle = last // 2

    rehearsal = straight.run.checkpointer.rehearse()
    straight.train(last, before=lambda: straight.run.save() if straight.trainer.iter == middle else None)
    resumed = setup.make(folder=folder, resumes=True)
    if (first := resumed.trainer.start_iter) != middle:
        return problem(f"The resumed run starts at iteration {first}, not {middle}.")
    resumed.train(last - middle)
    different = _different(straight.model.state_dict(), resumed.model.state_dict())
    lost = [] if rehearsal is None else rehearsal.differences
    values = {"updates": last, "saved_after": middle, "different": different, "not_restored": lost}
    if not different and not lost:
        text = f"Saved after {middle} of {last} updates, resumed, and equal bit for bit."
        return passed(text, values=values)
    again = setup.make()
    again.train(last)
    if not lost and _different(straight.model.state_dict(), again.model.state_dict()):
        return undecided(
            "Two equal runs differ, so a resume cannot be compared.",
                       "Set deterministic, and seed your own generators.", values)  # fmt: skip
    text = f"{len(different)} tensors of the resumed run differ, first {different[0]}." if different else ""
    text = " ".join([*filter(None, [text]), *(f"Does not come back: {one}." for one in lost)])
    fix = "Save the state of what your code keeps: state_dict of hooks, callbacks, loaders; see docs/reliability.md."
    return problem(text, fix, values)


def _different(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return [name for name in first if isinstance(first[name], Tensor) and not same_values(first[name], second[name])]
