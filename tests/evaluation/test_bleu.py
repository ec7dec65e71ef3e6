import math

import pytest

from trainwright.evaluation import BLEUEvaluator, EvaluationError


def test_the_score_is_that_of_the_whole_data_set():
    evaluator = BLEUEvaluator(n_gram=1)
    # 5 of 6 words are right; the brevity penalty compares these 6 words with the 4 + 3 of the nearest references.
    evaluator.process({"reference": ["a b c e"]}, {"candidate": ["a b c d"]})
    evaluator.process({"reference": [["f g h", "z z z z z z"]]}, {"candidate": ["f g"]})
    assert evaluator.evaluate()["bleu_score"] == pytest.approx(5 / 6 * math.exp(1 - 7 / 6))


def test_the_right_text_scores_one_and_an_unrelated_one_zero():
    evaluator = BLEUEvaluator()
    evaluator.process({"reference": ["the cat sat on the mat"]}, {"candidate": ["the cat sat on the mat"]})
    assert evaluator.evaluate() == {"bleu_score": pytest.approx(1.0)}
    evaluator.reset()
    evaluator.process({"reference": ["the cat sat on the mat"]}, {"candidate": ["no word in common here"]})
    assert evaluator.evaluate() == {"bleu_score": 0.0}


def test_a_tokenizer_parts_words_from_punctuation():
    def score(tokenize: str | None) -> float:
        evaluator = BLEUEvaluator(n_gram=1, tokenize=tokenize)
        evaluator.process({"reference": ["good, yes."]}, {"candidate": ["good , yes ."]})
        return evaluator.evaluate()["bleu_score"]

    assert score("13a") == pytest.approx(1.0)
    assert score(None) == 0.0


def test_lists_of_unequal_length_are_refused():
    with pytest.raises(EvaluationError, match="1 entries and 2 entries"):
        BLEUEvaluator().process({"reference": ["a", "b"]}, {"candidate": ["a"]})
    with pytest.raises(EvaluationError, match="one text"):
        BLEUEvaluator().process({"reference": ["a"]}, {"candidate": "a"})
    with pytest.raises(EvaluationError, match="'candidate'"):
        BLEUEvaluator().process({"reference": ["a"]}, {"text": ["a"]})
