"""From samples to batches: data sets, the order of their samples on each rank, and how samples become one batch."""

from typing import TYPE_CHECKING

from trainwright.data.collate import collate, to_batch
from trainwright.names import on_first_use

if TYPE_CHECKING:
    from trainwright.data import datasets as datasets
    from trainwright.data import transforms as transforms
    from trainwright.data.audio_features import AudioFeatureExtractor as AudioFeatureExtractor
    from trainwright.data.audio_features import AudioFeatureExtractorConfig as AudioFeatureExtractorConfig
    from trainwright.data.collators import CharLevelOCRDataCollator as CharLevelOCRDataCollator
    from trainwright.data.collators import ImageCaptioningDataCollator as ImageCaptioningDataCollator
    from trainwright.data.collators import SequenceLabelingDataCollator as SequenceLabelingDataCollator
    from trainwright.data.collators import SpeechRecognitionDataCollator as SpeechRecognitionDataCollator
    from trainwright.data.collators import TextGenerationDataCollator as TextGenerationDataCollator
    from trainwright.data.collators import TextPaddingDataCollator as TextPaddingDataCollator
    from trainwright.data.columns import ColumnDataset as ColumnDataset
    from trainwright.data.dataset import Dataset as Dataset
    from trainwright.data.dataset import DatasetConfig as DatasetConfig
    from trainwright.data.dataset import register_dataset as register_dataset
    from trainwright.data.epochs import EpochSampler as EpochSampler
    from trainwright.data.errors import DataError as DataError
    from trainwright.data.image_processor import ImageProcessor as ImageProcessor
    from trainwright.data.image_processor import ImageProcessorConfig as ImageProcessorConfig
    from trainwright.data.instance import DistTensorData as DistTensorData
    from trainwright.data.instance import Instance as Instance
    from trainwright.data.loaders import build_image_test_loader as build_image_test_loader
    from trainwright.data.loaders import build_image_train_loader as build_image_train_loader
    from trainwright.data.loaders import build_nlp_test_loader as build_nlp_test_loader
    from trainwright.data.loaders import build_nlp_train_loader as build_nlp_train_loader
    from trainwright.data.loaders import build_nlp_train_val_test_loader as build_nlp_train_val_test_loader
    from trainwright.data.ocr import OCRDataset as OCRDataset
    from trainwright.data.ocr import OCRDatasetConfig as OCRDatasetConfig
    from trainwright.data.preprocessor import Preprocessor as Preprocessor
    from trainwright.data.preprocessor import PreprocessorConfig as PreprocessorConfig
    from trainwright.data.preprocessor import PreprocessorsContainer as PreprocessorsContainer
    from trainwright.data.preprocessor import register_preprocessor as register_preprocessor
    from trainwright.data.sampler import CyclicSampler as CyclicSampler
    from trainwright.data.sampler import RangedSampler as RangedSampler
    from trainwright.data.sampler import SingleRoundSampler as SingleRoundSampler
    from trainwright.data.speech import SpeechRecognitionDataset as SpeechRecognitionDataset
    from trainwright.data.speech import SpeechRecognitionDatasetConfig as SpeechRecognitionDatasetConfig
    from trainwright.data.text_datasets import SequenceLabelingDataset as SequenceLabelingDataset
    from trainwright.data.text_datasets import SequenceLabelingDatasetConfig as SequenceLabelingDatasetConfig
    from trainwright.data.text_datasets import TextClassificationDataset as TextClassificationDataset
    from trainwright.data.text_datasets import TextClassificationDatasetConfig as TextClassificationDatasetConfig
    from trainwright.data.text_generation import TextGenerationDataset as TextGenerationDataset
    from trainwright.data.text_generation import TextGenerationDatasetConfig as TextGenerationDatasetConfig
    from trainwright.data.text_normalizer import TextNormalizer as TextNormalizer
    from trainwright.data.text_normalizer import TextNormalizerConfig as TextNormalizerConfig
    from trainwright.data.tokenizer import HFTokenizer as HFTokenizer
    from trainwright.data.tokenizer import HFTokenizerConfig as HFTokenizerConfig
    from trainwright.data.tokenizer import TextTokenizer as TextTokenizer
    from trainwright.data.tokenizer import TextTokenizerConfig as TextTokenizerConfig
    from trainwright.data.tokenizer import Tokenizer as Tokenizer
    from trainwright.data.tokenizer import TokenizerConfig as TokenizerConfig

# The block above says the same to type checkers; tests/house holds the two together.
_NAMES_OF = {
    "datasets": "datasets",
    "transforms": "transforms",
    "audio_features": "AudioFeatureExtractor AudioFeatureExtractorConfig",
    "collators": (
        "CharLevelOCRDataCollator ImageCaptioningDataCollator SequenceLabelingDataCollator"
        " SpeechRecognitionDataCollator TextGenerationDataCollator TextPaddingDataCollator"
    ),
    "columns": "ColumnDataset",
    "dataset": "Dataset DatasetConfig register_dataset",
    "epochs": "EpochSampler",
    "errors": "DataError",
    "image_processor": "ImageProcessor ImageProcessorConfig",
    "instance": "DistTensorData Instance",
    "loaders": (
        "build_image_test_loader build_image_train_loader build_nlp_test_loader build_nlp_train_loader"
        " build_nlp_train_val_test_loader"
    ),
    "ocr": "OCRDataset OCRDatasetConfig",
    "preprocessor": "Preprocessor PreprocessorConfig PreprocessorsContainer register_preprocessor",
    "sampler": "CyclicSampler RangedSampler SingleRoundSampler",
    "speech": "SpeechRecognitionDataset SpeechRecognitionDatasetConfig",
    "text_datasets": (
        "SequenceLabelingDataset SequenceLabelingDatasetConfig TextClassificationDataset"
        " TextClassificationDatasetConfig"
    ),
    "text_generation": "TextGenerationDataset TextGenerationDatasetConfig",
    "text_normalizer": "TextNormalizer TextNormalizerConfig",
    "tokenizer": "HFTokenizer HFTokenizerConfig TextTokenizer TextTokenizerConfig Tokenizer TokenizerConfig",
}

__all__ = ["collate", "to_batch", *" ".join(_NAMES_OF.values()).split()]
__getattr__ = on_first_use(__name__, _NAMES_OF)
