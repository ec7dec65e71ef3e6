"""Metrics by name: our own, and any of torchmetrics over a complete data set."""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainwright.base.errors import ConfigError, nearest_name
from trainwright.config.training.metric_config import MetricConfig
from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.metrics.metric import Metric, load_package
from trainwright.evaluation.metrics.tm_metrics import TMMetrics


class _ErrorRate(Metric):
    """Insertions, deletions and substitutions over the complete data set, divided by the units of all references.

    It may be larger than 1. Empty references have no units: texts for them are insertions. If all references are
    empty it is 0.0 if all texts are empty, else 1.0.
    """

    default_objective = "minimize"
    is_of_words: ClassVar[bool]

    def values(self, predictions: Any, targets: Any) -> dict[str, float]:
        distance = load_package("rapidfuzz.distance", f"The metric {self.name}").Levenshtein.distance
        units: Callable[[str], Sequence[str]] = str.split if self.is_of_words else str
        found, true = ([*map(units, _texts(some, self.name))] for some in (predictions, targets))
        num_errors = sum(distance(one, other) for one, other in zip(true, found, strict=True))
        num_units = sum(map(len, true))
        return {self.name: num_errors / num_units if num_units else float(num_errors > 0)}


class CharacterErrorRate(_ErrorRate):
    """Units are characters (code points), blanks among them; nothing is stripped, folded or normalized."""

    name, all_keys, is_of_words = "cer", ("cer",), False


class WordErrorRate(_ErrorRate):
    """Units are separated by white space."""

    name, all_keys, is_of_words = "wer", ("wer",), True


class Rouge(Metric):
    """ROUGE F-measures in [0, 1], a mean over samples; ``rougeLsum`` takes lines for sentences.

    Words are those of any script (`Words`); for ASCII the scores are those of the package rouge_score. A target may
    be a list of texts that would all be right: the best one counts.

    Args:
        use_stemmer: cut English endings off with rouge_score's own words, which are Latin letters and digits only.
        tokenizer: an object with ``tokenize(text) -> list[str]``.
    """

    name, all_keys = "rouge", ("rouge1", "rouge2", "rougeL", "rougeLsum")
    default_objective = "maximize"

    def __init__(self, *, use_stemmer: bool = False, tokenizer: Any = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.use_stemmer, self.tokenizer = use_stemmer, tokenizer

    def values(self, predictions: Any, targets: Any) -> dict[str, float]:
        package = load_package("rouge_score.rouge_scorer", "The metric rouge")
        tokenizer = self.tokenizer or (None if self.use_stemmer else Words())
        scorer = package.RougeScorer(list(self.all_keys), use_stemmer=self.use_stemmer, tokenizer=tokenizer)
        totals = dict.fromkeys(self.all_keys, 0.0)
        for text, references in zip(_texts(predictions, self.name), _references(targets, self.name), strict=True):
            for key, score in scorer.score_multi(references, text).items():
                totals[key] += score.fmeasure
        return {key: total / len(predictions) for key, total in totals.items()}


class Words:
    """Lower-case runs of letters, their marks, and digits, of any script; each Chinese or Japanese sign is a word.

    >>> Words().tokenize("It's naïve; سلام دنیا, 東京!")
    ['it', 's', 'naïve', 'سلام', 'دنیا', '東', '京']
    """

    _EACH = re.compile("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f])")
    _JOINERS = "\u200c\u200d"  # stand inside words of Persian and Indic scripts

    def tokenize(self, text: str) -> list[str]:
        is_kept = (one in self._JOINERS or unicodedata.category(one)[0] in "LMN" for one in text.lower())
        kept = "".join(one if is_part else " " for one, is_part in zip(text.lower(), is_kept, strict=True))
        return [word for word in (part.strip(self._JOINERS) for part in self._EACH.sub(r" \1 ", kept).split()) if word]


class Bleu(Metric):
    """SacreBLEU's corpus score, in [0, 1]: 1.0 is the perfect text, also where it is shorter than four words.

    A target may be a list of texts that would all be right.

    Args:
        tokenize: SacreBLEU's: "13a" (default), "intl", "char", "zh" (for Chinese), "none" …
        lowercase: capital letters do not matter.
    """

    name, all_keys = "bleu", ("bleu",)
    default_objective = "maximize"

    def __init__(self, *, tokenize: str | None = None, lowercase: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.tokenize, self.lowercase = tokenize, lowercase

    def values(self, predictions: Any, targets: Any) -> dict[str, float]:
        package = load_package("sacrebleu.metrics", "The metric bleu")
        scorer = package.BLEU(tokenize=self.tokenize, lowercase=self.lowercase, effective_order=True)
        references = _references(targets, self.name)
        most = max(map(len, references))
        streams = [[some[i] if i < len(some) else None for some in references] for i in range(most)]
        score: float = scorer.corpus_score(_texts(predictions, self.name), streams).score
        return {"bleu": min(score / 100, 1.0)}  # the package's own rounding passes 100


def _texts(values: Any, name: str) -> list[str]:
    texts = list(values)
    wrong = next((value for value in texts if not isinstance(value, str)), None)
    if wrong is not None or isinstance(values, str):
        came = "one text" if isinstance(values, str) else f"a {type(wrong).__name__} among them"
        raise EvaluationError(f"metric {name}: it takes a list of texts, one per sample, but got {came}.")
    return texts


def _references(values: Any, name: str) -> list[list[str]]:
    """Of each sample, the texts that are right."""
    return [[value] if isinstance(value, str) else _texts(value, name) for value in values]


AVERAGES = ("macro", "micro", "weighted", "binary")


class Accuracy(Metric):
    """The fraction of samples with the right class."""

    name, all_keys = "accuracy", ("accuracy",)
    default_objective = "maximize"

    def values(self, predictions: Any, targets: Any) -> dict[str, float]:
        found_N, true_N = class_labels(predictions, targets, self.name)
        return {"accuracy": float((found_N == true_N).sum()) / len(true_N)}


class _RatioOfClasses(Metric):
    """A ratio per class, and its mean over the classes that occur in predictions or targets; 0 without samples.

    Args:
        average: "macro" (each class has the same weight), "weighted" (by its samples), "micro" (over all samples) or
            "binary" (of the class ``pos_label`` only).
    """

    default_objective = "maximize"
    # The denominator for each class, of how often it is predicted and how often it is true.
    predicted_share: ClassVar[float]

    def __init__(self, *, average: str = "macro", pos_label: Any = 1, **settings: Any) -> None:
        super().__init__(**settings)
        if average not in AVERAGES:
            raise ConfigError(f"metric {self.name}: average is {average!r}; it must be one of {', '.join(AVERAGES)}.")
        self.average, self.pos_label = average, pos_label

    def values(self, predictions: Any, targets: Any) -> dict[str, float]:
        found_N, true_N = class_labels(predictions, targets, self.name)
        classes, index = np.unique(np.concatenate([found_N, true_N]), return_inverse=True)
        found_N, true_N = index[: len(found_N)], index[len(found_N) :]
        counts = [np.bincount(some, minlength=len(classes)) for some in (found_N[found_N == true_N], found_N, true_N)]
        if self.average == "binary":
            counts = [count[classes == self.pos_label] for count in counts]
        if self.average == "micro":
            counts = [count.sum(keepdims=True) for count in counts]
        hits_C, found_C, true_C = counts
        possible_C = self.predicted_share * found_C + (1 - self.predicted_share) * true_C
        ratios = np.divide(hits_C, possible_C, out=np.zeros(len(hits_C)), where=possible_C > 0)
        weights = true_C if self.average == "weighted" else np.ones_like(ratios)
        total = float(weights.sum())
        return {self.name: float((ratios * weights).sum()) / total if total else 0.0}


class Precision(_RatioOfClasses):
    """Of the samples that were given a class, the fraction that has it."""

    name, all_keys, predicted_share = "precision", ("precision",), 1.0


class Recall(_RatioOfClasses):
    """Of the samples that have a class, the fraction that was given it."""

    name, all_keys, predicted_share = "recall", ("recall",), 0.0


class F1(_RatioOfClasses):
    """The harmonic mean of precision and recall."""

    name, all_keys, predicted_share = "f1", ("f1",), 0.5


def class_labels(predictions: Any, targets: Any, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """One label per sample, from class labels or scores (N, C)."""
    found, true = as_array(predictions), as_array(targets)
    if found.ndim == 2 and np.issubdtype(found.dtype, np.floating):
        found = found.argmax(axis=1)
    found, true = (
        labels.squeeze(1) if labels.ndim == 2 and labels.shape[1] == 1 else labels for labels in (found, true)
    )
    if found.shape != true.shape or true.ndim != 1:
        raise EvaluationError(
            f"metric {name}: predictions have shape {found.shape} and targets {true.shape}; both must be class labels "
            "(N,), or the predictions scores (N, C)."
        )
    if found.dtype.kind in "US" or true.dtype.kind in "US":
        return found.astype(str), true.astype(str)
    return found, true


def as_array(values: Any) -> NDArray[Any]:
    """A tensor on any device, an array or a list, as an array in memory."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    tensor = values.detach().cpu()
    return np.asarray(tensor.float() if tensor.is_floating_point() else tensor)


class Seqeval(Metric):
    """``accuracy`` of labels, and ``recall``, ``precision`` and ``f1`` of complete spans, over all spans (micro).

    Predictions and targets are lists of label texts for each sample, in a scheme such as IOB: ``B-name I-name O``.
    Spans are read as conlleval reads them, in any of IOB1, IOB2, IOE, IOBES, BILOU and BMES.

    Args:
        mode, scheme: seqeval's own: ``mode="strict", scheme="IOB2"`` counts only spans that are written correctly.
    """

    name, all_keys = "seqeval", ("accuracy", "recall", "precision", "f1")
    default_objective = "maximize"

    def __init__(self, *, mode: str | None = None, scheme: str | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.mode, self.scheme = mode, scheme

    def values(self, predictions: Any, targets: Any) -> dict[str, float]:
        seqeval = load_package("seqeval.metrics", "The metric seqeval")
        scheme = None if self.scheme is None else getattr(load_package("seqeval.scheme", "seqeval"), self.scheme)
        settings = {"mode": self.mode, "scheme": scheme, "zero_division": 0}
        true, found = [list(labels) for labels in targets], [list(labels) for labels in predictions]
        if not any(true) and not any(found):  # seqeval would divide by the number of labels
            return dict.fromkeys(self.all_keys, 0.0)
        accuracy = float(seqeval.accuracy_score(true, found))
        if self.mode is None:
            true, found = _as_iobes(true), _as_iobes(found)
        spans = {key: float(getattr(seqeval, f"{key}_score")(true, found, **settings)) for key in self.all_keys[1:]}
        return {"accuracy": accuracy, **spans}


# Without a scheme, seqeval reads the prefixes B, I, E and S, as conlleval does; BILOU and BMES have other letters.
_PREFIX = {letter + end: own + end for letter, own in zip("LUWM", "ESSI", strict=True) for end in ("", "-")}


def _as_iobes(texts: list[list[str]]) -> list[list[str]]:
    return [[_PREFIX.get(label[:2], label[:2]) + label[2:] for label in text] for text in texts]


METRICS: dict[str, type[Metric]] = {
    metric.name: metric
    for metric in (Accuracy, Precision, Recall, F1, Seqeval, CharacterErrorRate, WordErrorRate, Rouge, Bleu)
}


MetricEntry = str | MetricConfig | Metric | Mapping[str, Any]


def split_entry(entry: MetricEntry) -> tuple[str, dict[str, Any]]:
    """The name of an entry of ``metrics``, and its settings and arguments."""
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping):
        name = entry.get("name_", entry.get("name", ""))
        return str(name), {key: value for key, value in entry.items() if key not in ("name", "name_")}
    if isinstance(entry, Metric):
        return entry.name, {}
    settings = {"objective": entry.objective, "output_keys": entry.output_keys, **entry.arguments}
    if "n_decimals" in entry.model_fields_set:
        settings["n_decimals"] = entry.n_decimals
    return entry.name, settings


def build_metric(
    metric: str | MetricConfig | Metric,
    config: MetricConfig | Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Metric:
    """``build_metric("f1", average="micro")``: a metric with ``compute(predictions, targets) -> dict[str, float]``.

    Args:
        metric: accuracy, precision, recall, f1, seqeval, cer, wer, rouge, bleu, any name that `TMMetrics` knows, a
            ``MetricConfig`` with one of these, or a metric, which is returned unchanged.
        config: the arguments of a metric that is named, as a ``MetricConfig`` or a mapping.
        arguments: ``objective``, ``output_keys``, ``n_decimals``, and those of the metric itself.

    Raises:
        ConfigError: there is no such metric, or an argument that it does not take.
    """
    if isinstance(metric, Metric):
        return metric
    name, settings = split_entry(metric)
    if isinstance(metric, str) and config is not None:
        settings = dict(config) if isinstance(config, Mapping) else split_entry(config)[1]
    arguments = {**settings, **arguments}
    own = METRICS.get(name)
    try:
        return TorchMetric(name, **arguments) if own is None else own(**arguments)
    except ConfigError as error:
        if own is None and f"torchmetrics has no {name!r}" in str(error):
            raise ConfigError(f"{error} Ours: {', '.join(METRICS)}.{nearest_name(name, METRICS)}") from error
        raise
    except TypeError as error:
        raise ConfigError(f"metric {name}: {error}".replace(f"{own and own.__name__}.__init__() ", "")) from error


class TorchMetric(Metric):
    """A torchmetrics class over a complete data set. Results that are not numbers are an error."""

    def __init__(self, name: str, *, objective: str | None = None, **arguments: Any) -> None:
        settings = {key: arguments.pop(key) for key in ("output_keys", "n_decimals") if key in arguments}
        self.name = name
        self._metric = TMMetrics(name, **arguments)
        self.default_objective = self._metric.objective
        super().__init__(objective=objective, **settings)

    def declare_scores(self, *, are_logits: bool | None, is_classes_last: bool | None = None) -> None:
        """As of `TMMetrics`."""
        self._metric.declare_scores(are_logits=are_logits, is_classes_last=is_classes_last)

    def declare_targets(self, *, are_probabilities: bool) -> None:
        """As of `TMMetrics`."""
        self._metric.declare_targets(are_probabilities=are_probabilities)

    def values(self, predictions: Any, targets: Any) -> Mapping[str, float]:
        self._metric.reset()
        self._metric.update(_as_tensor(predictions), _as_tensor(targets))
        return numbers_of(self._metric, self._metric.compute(all_ranks=False))  # these are the data of all ranks


def numbers_of(metric: TMMetrics, value: Any) -> dict[str, float]:
    """A result as numbers by name: one by the metric's key, a vector by ``key_0, key_1 …``, a dictionary by its own."""
    if isinstance(value, Mapping):
        scalars = {str(k): v for k, v in value.items() if not isinstance(v, Tensor) or v.numel() == 1}
        return {key: float(item) for key, item in scalars.items()}
    found = torch.as_tensor(value) if isinstance(value, int | float | Tensor) else None
    if found is not None and found.numel() == 1:
        return {metric.key: float(found)}
    if found is not None and found.dim() == 1:
        return {f"{metric.key}_{number}": item for number, item in enumerate(found.tolist())}
    shape = f"a tensor of shape {tuple(found.shape)}" if found is not None else f"a {type(value).__name__}"
    raise EvaluationError(
        f"metric {metric.name} gives {shape}, not numbers. Name one that gives numbers, or call TMMetrics.compute."
    )


def _as_tensor(values: Any) -> Any:
    """A tensor of numbers; texts unchanged."""
    if isinstance(values, Tensor) or (len(values) and isinstance(values[0], str | Mapping)):
        return values
    if isinstance(values, list | tuple) and values and isinstance(values[0], Tensor):
        return torch.stack(list(values))
    return torch.as_tensor(np.asarray(values) if isinstance(values, list | tuple) else values)
