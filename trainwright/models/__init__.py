"""Models: the interface that the Trainer uses, and small reference models for each task."""

from typing import TYPE_CHECKING

from trainwright.base.lazy_names import declared_names

if TYPE_CHECKING:
    from trainwright.models import vit as vit
    from trainwright.models.card import ModelCard as ModelCard
    from trainwright.models.config import ModelConfig as ModelConfig
    from trainwright.models.folder import init_weights as init_weights
    from trainwright.models.model import Model as Model
    from trainwright.models.model import ModelOutput as ModelOutput
    from trainwright.models.model import build_model as build_model
    from trainwright.models.model import model_files as model_files
    from trainwright.models.model import register_model as register_model
    from trainwright.tasks.bert import Bert as Bert
    from trainwright.tasks.bert import BertConfig as BertConfig
    from trainwright.tasks.image2text.model import CRNNImage2Text as CRNNImage2Text
    from trainwright.tasks.image2text.model import CRNNImage2TextConfig as CRNNImage2TextConfig
    from trainwright.tasks.sequence_labeling.model import BertSequenceLabeling as BertSequenceLabeling
    from trainwright.tasks.sequence_labeling.model import BertSequenceLabelingConfig as BertSequenceLabelingConfig
    from trainwright.tasks.speech_recognition.model import CTCSpeechRecognition as CTCSpeechRecognition
    from trainwright.tasks.speech_recognition.model import CTCSpeechRecognitionConfig as CTCSpeechRecognitionConfig
    from trainwright.tasks.text_classification.model import BertTextClassification as BertTextClassification
    from trainwright.tasks.text_classification.model import BertTextClassificationConfig as BertTextClassificationConfig
    from trainwright.tasks.text_generation.model import GPTTextGeneration as GPTTextGeneration
    from trainwright.tasks.text_generation.model import GPTTextGenerationConfig as GPTTextGenerationConfig

if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __all__, __getattr__ = declared_names(__name__)
