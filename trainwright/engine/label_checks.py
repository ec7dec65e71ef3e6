"""Class labels that the model has no score for, found before the first step where the data set has all its labels."""

import logging
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn
from torch.utils.data import default_collate

from trainwright.base.batch import IGNORED
from trainwright.base.errors import ConfigError
from trainwright.data.collate import collate
from trainwright.data.known_labels import Labels, known_labels
from trainwright.data.sample_names import shown_samples
from trainwright.evaluation.evaluators import ClsEvaluator
from trainwright.models.targets import loss_type_of
from trainwright.parallel.wrappers import unwrap

if TYPE_CHECKING:
    from trainwright.engine.run import Run

logger = logging.getLogger("trainwright.engine")

_OF_ONE_CLASS = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)
_MAY_CHANGE_LABELS = {
    "Python": ("prepare_input_batch", "evaluate", "evaluate_step", "evaluation_step", "compute_metric"),
    "config file": ("get_batch", "test"),
}
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, ClsEvaluator)


def declared_classes(model: nn.Module) -> int | None:
    """The number of classes that a model declares: ``id2label`` of ours, ``num_labels`` of one of transformers.

    None: it declares none, or is no classifier.
    """
    config = getattr(unwrap(model), "config", None)
    ours = sys.modules.get("trainwright.models.model")  # not loaded: it is not of a class of ours
    if ours is not None and isinstance(unwrap(model), ours.Model):
        return len(getattr(config, "id2label", None) or ()) or None
    number = getattr(config, "num_labels", None)
    is_classifier = str(loss_type_of(model)).endswith(_OF_ONE_CLASS)
    return number if is_classifier and isinstance(number, int) and number > 1 else None


def check_known_labels(run: "Run") -> None:
    """Check the labels of the data sets of a run that have all of theirs at hand.

    Only labels that reach the model as the data set has them: no method or collator of the user's can change them. A
    label that no training sample has is a warning, if the loss compares classes.

    Raises:
        ConfigError: a label is none of the classes that the model declares.
    """
    if run.overrides.has(*_MAY_CHANGE_LABELS[run.spec.api]) or not _has_built_in_steps(run):
        return
    is_python = run.spec.api == "Python"
    train, test = (
        ("Trainer.train_dataset", "Trainer.eval_dataset") if is_python else ("dataloader.train", "dataloader.test")
    )
    loaders = run.eval_loaders()
    names = [
        f"{test} ({number} of {len(loaders)})" if len(loaders) > 1 else test for number in range(1, 1 + len(loaders))
    ]
    data = {train: run.batches.loader, **dict(zip(names, loaders, strict=True))}
    datasets = {
        name: getattr(loader, "dataset", None)
        for name, loader in data.items()
        if getattr(loader, "collate_fn", None) in (collate, default_collate)
    }
    labels = {name: known for name, one in datasets.items() if (known := known_labels(one)) is not None}
    classes = declared_classes(run.model)
    if classes is not None:
        for name, known in labels.items():
            _refuse(name, datasets[name], known, classes, _ignored(run), type(unwrap(run.model)).__name__)
    elif (ignored := _ignored_class(run)) is not None and train in labels:
        seen = np.unique(labels.pop(train))
        for name, known in labels.items():
            _warn_of_unseen(name, datasets[name], known, [*seen, ignored])


def _has_built_in_steps(run: "Run") -> bool:
    stepper = getattr(run, "stepper", None)  # of config files, where the user may replace it
    return not run.overrides.has(*run.step_methods) and stepper is getattr(run, "built_stepper", None)


def _ignored_class(run: "Run") -> int | None:
    """The class that counts for nothing, where the criterion or the evaluator compares classes; None: none does."""
    criterion, evaluator = getattr(run, "criterion", None), getattr(run, "evaluator", None) if run.evaluates else None
    compares = next((one for one in (criterion, evaluator) if isinstance(one, _OF_CLASSES)), None)
    return None if compares is None else int(compares.ignore_index)


def _ignored(run: "Run") -> list[int]:
    """The labels that count for nothing: -100, that of a criterion of torch, and those of the setting."""
    of_criterion, declared = getattr(getattr(run, "criterion", None), "ignore_index", IGNORED), run.spec.loss_ignores
    of_setting = [declared] if isinstance(declared, int) else () if declared in ("declared", None) else declared
    return [IGNORED, of_criterion, *of_setting]


def _refuse(name: str, dataset: Any, labels: Labels, classes: int, ignored: list[int], model: str) -> None:
    wrong = np.flatnonzero(((labels < 0) | (labels >= classes)) & ~np.isin(labels, ignored))
    if len(wrong):
        raise ConfigError(
            f"{name}: sample {shown_samples(dataset, [int(wrong[0])])} has the label {labels[wrong[0]]}, and {model}"
            f" has {classes} classes, 0 to {classes - 1} ({len(wrong):,} of {len(labels):,} samples have such a label)."
            " Change the labels, or the number of the model's classes."
        )


def _warn_of_unseen(name: str, dataset: Any, labels: Labels, seen: list[int]) -> None:
    unseen = np.flatnonzero(~np.isin(labels, seen))
    if len(unseen):
        logger.warning(
            "%s: sample %s has the label %d, which no training sample has (%s of %s samples have such a label).",
            name,
            shown_samples(dataset, [int(unseen[0])]),
            labels[unseen[0]],
            f"{len(unseen):,}",
            f"{len(labels):,}",
        )
