"""Models: the contract that the Trainer leans on, and small reference models for the tasks that the documents name."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.models import vit as vit
    from trainwright.models.bert import Bert as Bert
    from trainwright.models.bert import BertConfig as BertConfig
    from trainwright.models.bert_tasks import BertSequenceLabeling as BertSequenceLabeling
    from trainwright.models.bert_tasks import BertSequenceLabelingConfig as BertSequenceLabelingConfig
    from trainwright.models.bert_tasks import BertTextClassification as BertTextClassification
    from trainwright.models.bert_tasks import BertTextClassificationConfig as BertTextClassificationConfig
    from trainwright.models.card import ModelCard as ModelCard
    from trainwright.models.config import ModelConfig as ModelConfig
    from trainwright.models.crnn import CRNNImage2Text as CRNNImage2Text
    from trainwright.models.crnn import CRNNImage2TextConfig as CRNNImage2TextConfig
    from trainwright.models.folder import init_weights as init_weights
    from trainwright.models.folder import model_files as model_files
    from trainwright.models.gpt import GPTTextGeneration as GPTTextGeneration
    from trainwright.models.gpt import GPTTextGenerationConfig as GPTTextGenerationConfig
    from trainwright.models.model import Model as Model
    from trainwright.models.outputs import ModelOutput as ModelOutput
    from trainwright.models.registry import build_model as build_model
    from trainwright.models.registry import register_model as register_model
    from trainwright.models.speech import CTCSpeechRecognition as CTCSpeechRecognition
    from trainwright.models.speech import CTCSpeechRecognitionConfig as CTCSpeechRecognitionConfig

# Which file holds a public name: torch is imported with those that need it. The block above says the same to type
# checkers; tests/models holds the two together.
_FILE_OF = {
    "Model": "model",
    "ModelConfig": "config",
    "ModelOutput": "outputs",
    "register_model": "registry",
    "build_model": "registry",
    "init_weights": "folder",
    "model_files": "folder",
    "CRNNImage2Text": "crnn",
    "CRNNImage2TextConfig": "crnn",
    "Bert": "bert",
    "BertConfig": "bert",
    "BertTextClassification": "bert_tasks",
    "BertTextClassificationConfig": "bert_tasks",
    "BertSequenceLabeling": "bert_tasks",
    "BertSequenceLabelingConfig": "bert_tasks",
    "CTCSpeechRecognition": "speech",
    "CTCSpeechRecognitionConfig": "speech",
    "GPTTextGeneration": "gpt",
    "GPTTextGenerationConfig": "gpt",
    "ModelCard": "card",
    "vit": "vit",
}

__all__ = [*_FILE_OF]


def __getattr__(name: str) -> object:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_FILE_OF[name]}")
    value = module if name == _FILE_OF[name] else getattr(module, name)
    globals()[name] = value  # found directly from now on
    return value
