"""Metrics of texts: error rates, ROUGE and BLEU."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from trainwright.evaluation.evaluator import EvaluationError
from trainwright.evaluation.metrics.metric import Metric, load_package


class _ErrorRate(Metric):
    """Insertions, deletions and substitutions over the complete data set, divided by the units of all references.

    It may be larger than 1. Empty references have no units: texts for them are insertions. If all references are
    empty it is 0.0 if all texts are empty, else 1.0.
    """

    default_objective = "minimize"

    def units(self, text: str) -> Sequence[str]:
        raise NotImplementedError

    def values(self, predictions: Any, targets: Any) -> dict[str, float]:
        distance = load_package("rapidfuzz.distance", f"The metric {self.name}").Levenshtein.distance
        found, true = ([self.units(text) for text in _texts(some, self.name)] for some in (predictions, targets))
        num_errors = sum(distance(one, other) for one, other in zip(true, found, strict=True))
        num_units = sum(map(len, true))
        return {self.name: num_errors / num_units if num_units else float(num_errors > 0)}


class CharacterErrorRate(_ErrorRate):
    """Units are characters (code points), blanks among them; nothing is stripped, folded or normalized."""

    name, all_keys = "cer", ("cer",)

    def units(self, text: str) -> str:
        return text


class WordErrorRate(_ErrorRate):
    """Units are separated by white space."""

    name, all_keys = "wer", ("wer",)

    def units(self, text: str) -> list[str]:
        return text.split()


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
        kept = "".join(one if self._is_of_a_word(one) else " " for one in text.lower())
        return [word for word in (part.strip(self._JOINERS) for part in self._EACH.sub(r" \1 ", kept).split()) if word]

    def _is_of_a_word(self, character: str) -> bool:
        return character in self._JOINERS or unicodedata.category(character)[0] in "LMN"


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
