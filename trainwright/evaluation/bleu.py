"""BLEU of generated text."""

from collections.abc import Sequence
from typing import Any

from trainwright.evaluation.evaluator import DatasetEvaluator, EvaluationError, required
from trainwright.evaluation.torchmetrics_function import torchmetrics_function


class BLEUEvaluator(DatasetEvaluator):
    """``{"bleu_score"}`` in [0, 1], over the whole data set (not a mean over sentences).

    Reads ``outputs["candidate"]``, a list of texts, and ``inputs["reference"]``, for each of them a text or a list of
    texts that would all be right. Words are what stands between blanks; with ``tokenize`` (``"13a"``, ``"intl"``,
    ``"char"``, ``"zh"`` …) they are those of SacreBLEU's tokenizer, whose scores can be compared between papers.
    """

    def __init__(self, n_gram: int = 4, smooth: bool = False, tokenize: str | None = None) -> None:
        self.n_gram, self.smooth, self.tokenize = n_gram, smooth, tokenize
        self.reset()

    def __repr__(self) -> str:
        return f"BLEUEvaluator(n_gram={self.n_gram}, smooth={self.smooth}, tokenize={self.tokenize!r})"

    def reset(self) -> None:
        self._candidates: list[str] = []
        self._references: list[list[str]] = []

    def process(self, inputs: Any, outputs: Any) -> None:
        candidates: Sequence[str] = required(outputs, "candidate", evaluator=self, where="what the model returns")
        references: Sequence[Any] = required(inputs, "reference", evaluator=self, where="the batch")
        if isinstance(candidates, str) or isinstance(references, str) or len(candidates) != len(references):
            raise EvaluationError(
                "BLEUEvaluator: candidate and reference must be lists with one entry per sample, "
                f"but got {_length(candidates)} and {_length(references)}."
            )
        self._candidates += candidates
        self._references += [[reference] if isinstance(reference, str) else list(reference) for reference in references]

    def known_results(self) -> list[str]:
        return ["bleu_score"]

    def evaluate(self) -> dict[str, float]:
        if not self._candidates:
            raise EvaluationError("BLEUEvaluator has seen no samples.")
        settings: dict[str, Any] = {"n_gram": self.n_gram, "smooth": self.smooth}
        name = "bleu_score"
        if self.tokenize is not None:
            name, settings["tokenize"] = "sacre_bleu_score", self.tokenize
        return {
            "bleu_score": float(torchmetrics_function("text", name)(self._candidates, self._references, **settings))
        }


def _length(values: Sequence[Any]) -> str:
    return "one text" if isinstance(values, str) else f"{len(values)} entries"
