"""From samples to batches: data sets, the order of their samples on each rank, and how samples become one batch."""

from trainwright.data import datasets, transforms
from trainwright.data.audio_features import AudioFeatureExtractor, AudioFeatureExtractorConfig
from trainwright.data.collate import collate, to_batch
from trainwright.data.collators import (
    CharLevelOCRDataCollator,
    ImageCaptioningDataCollator,
    SequenceLabelingDataCollator,
    SpeechRecognitionDataCollator,
    TextGenerationDataCollator,
    TextPaddingDataCollator,
)
from trainwright.data.dataset import Dataset, DatasetConfig, register_dataset
from trainwright.data.epochs import EpochSampler
from trainwright.data.errors import DataError
from trainwright.data.hf_tokenizer import HFTokenizer, HFTokenizerConfig
from trainwright.data.image_processor import ImageProcessor, ImageProcessorConfig
from trainwright.data.instance import DistTensorData, Instance
from trainwright.data.loaders import (
    build_image_test_loader,
    build_image_train_loader,
    build_nlp_test_loader,
    build_nlp_train_loader,
    build_nlp_train_val_test_loader,
)
from trainwright.data.ocr import OCRDataset, OCRDatasetConfig
from trainwright.data.preprocessor import (
    Preprocessor,
    PreprocessorConfig,
    PreprocessorsContainer,
    register_preprocessor,
)
from trainwright.data.sampler import CyclicSampler, RangedSampler, SingleRoundSampler
from trainwright.data.speech import SpeechRecognitionDataset, SpeechRecognitionDatasetConfig
from trainwright.data.text_datasets import (
    SequenceLabelingDataset,
    SequenceLabelingDatasetConfig,
    TextClassificationDataset,
    TextClassificationDatasetConfig,
)
from trainwright.data.text_generation import TextGenerationDataset, TextGenerationDatasetConfig
from trainwright.data.text_normalizer import TextNormalizer, TextNormalizerConfig
from trainwright.data.tokenizer import TextTokenizer, TextTokenizerConfig, Tokenizer, TokenizerConfig

__all__ = [
    "Instance",
    "DistTensorData",
    "CyclicSampler",
    "EpochSampler",
    "SingleRoundSampler",
    "RangedSampler",
    "build_image_train_loader",
    "build_image_test_loader",
    "build_nlp_train_loader",
    "build_nlp_test_loader",
    "build_nlp_train_val_test_loader",
    "collate",
    "to_batch",
    "DataError",
    "datasets",
    "transforms",
    "Dataset",
    "DatasetConfig",
    "register_dataset",
    "OCRDataset",
    "OCRDatasetConfig",
    "TextClassificationDataset",
    "TextClassificationDatasetConfig",
    "SequenceLabelingDataset",
    "SequenceLabelingDatasetConfig",
    "SpeechRecognitionDataset",
    "SpeechRecognitionDatasetConfig",
    "TextGenerationDataset",
    "TextGenerationDatasetConfig",
    "CharLevelOCRDataCollator",
    "ImageCaptioningDataCollator",
    "TextPaddingDataCollator",
    "SequenceLabelingDataCollator",
    "TextGenerationDataCollator",
    "SpeechRecognitionDataCollator",
    "Preprocessor",
    "PreprocessorConfig",
    "PreprocessorsContainer",
    "register_preprocessor",
    "ImageProcessor",
    "ImageProcessorConfig",
    "AudioFeatureExtractor",
    "AudioFeatureExtractorConfig",
    "Tokenizer",
    "TokenizerConfig",
    "TextTokenizer",
    "TextTokenizerConfig",
    "HFTokenizer",
    "HFTokenizerConfig",
    "TextNormalizer",
    "TextNormalizerConfig",
]
