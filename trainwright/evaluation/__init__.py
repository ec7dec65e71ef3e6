"""How good a model is: evaluators that turn batches into exact figures, and the loop that feeds them."""

from trainwright.evaluation.bleu import BLEUEvaluator
from trainwright.evaluation.classification import ClsEvaluator
from trainwright.evaluation.evaluator import DatasetEvaluator, DatasetEvaluators, EvaluationError
from trainwright.evaluation.loop import inference_on_dataset
from trainwright.evaluation.perplexity import PPLEvaluator
from trainwright.evaluation.regression import RegEvaluator
from trainwright.evaluation.report import flatten_results_dict, print_csv_format

__all__ = [
    "DatasetEvaluator",
    "DatasetEvaluators",
    "ClsEvaluator",
    "PPLEvaluator",
    "RegEvaluator",
    "BLEUEvaluator",
    "EvaluationError",
    "inference_on_dataset",
    "print_csv_format",
    "flatten_results_dict",
]
