"""From samples to batches: data sets, the order of their samples on each rank, and how samples become one batch."""

from typing import TYPE_CHECKING

from trainwright.base.batch import to_batch as to_batch
from trainwright.base.lazy_names import declared_names
from trainwright.data.collate import collate as collate

if TYPE_CHECKING:
    from trainwright.data import datasets as datasets
    from trainwright.data import transforms as transforms
    from trainwright.data.columns import ColumnDataset as ColumnDataset
    from trainwright.data.errors import DataError as DataError
    from trainwright.data.instance import DistTensorData as DistTensorData
    from trainwright.data.instance import Instance as Instance
    from trainwright.data.loaders import build_image_test_loader as build_image_test_loader
    from trainwright.data.loaders import build_image_train_loader as build_image_train_loader
    from trainwright.data.loaders import build_nlp_test_loader as build_nlp_test_loader
    from trainwright.data.loaders import build_nlp_train_loader as build_nlp_train_loader
    from trainwright.data.loaders import build_nlp_train_val_test_loader as build_nlp_train_val_test_loader
    from trainwright.data.mixture import MixedDataset as MixedDataset
    from trainwright.data.mixture import MixedStream as MixedStream
    from trainwright.data.packed import PackedDataset as PackedDataset
    from trainwright.data.sample_names import sample_name as sample_name
    from trainwright.data.sampler import CyclicSampler as CyclicSampler
    from trainwright.data.sampler import EpochSampler as EpochSampler
    from trainwright.data.sampler import RangedSampler as RangedSampler
    from trainwright.data.sampler import SingleRoundSampler as SingleRoundSampler
    from trainwright.data.streaming import StreamLoader as StreamLoader
    from trainwright.data.tar_shards import TarShards as TarShards
    from trainwright.tasks.dataset import Dataset as Dataset
    from trainwright.tasks.dataset import DatasetConfig as DatasetConfig
    from trainwright.tasks.dataset import register_dataset as register_dataset
    from trainwright.tasks.image2text.data import CharLevelOCRDataCollator as CharLevelOCRDataCollator
    from trainwright.tasks.image2text.data import ImageCaptioningDataCollator as ImageCaptioningDataCollator
    from trainwright.tasks.image2text.data import OCRDataset as OCRDataset
    from trainwright.tasks.image2text.data import OCRDatasetConfig as OCRDatasetConfig
    from trainwright.tasks.image2text.image_processor import ImageProcessor as ImageProcessor
    from trainwright.tasks.image2text.image_processor import ImageProcessorConfig as ImageProcessorConfig
    from trainwright.tasks.preprocessor import Preprocessor as Preprocessor
    from trainwright.tasks.preprocessor import PreprocessorConfig as PreprocessorConfig
    from trainwright.tasks.preprocessor import PreprocessorsContainer as PreprocessorsContainer
    from trainwright.tasks.preprocessor import register_preprocessor as register_preprocessor
    from trainwright.tasks.sequence_labeling.data import SequenceLabelingDataCollator as SequenceLabelingDataCollator
    from trainwright.tasks.sequence_labeling.data import SequenceLabelingDataset as SequenceLabelingDataset
    from trainwright.tasks.sequence_labeling.data import SequenceLabelingDatasetConfig as SequenceLabelingDatasetConfig
    from trainwright.tasks.speech_recognition.audio_features import AudioFeatureExtractor as AudioFeatureExtractor
    from trainwright.tasks.speech_recognition.audio_features import (
        AudioFeatureExtractorConfig as AudioFeatureExtractorConfig,
    )
    from trainwright.tasks.speech_recognition.data import SpeechRecognitionDataCollator as SpeechRecognitionDataCollator
    from trainwright.tasks.speech_recognition.data import SpeechRecognitionDataset as SpeechRecognitionDataset
    from trainwright.tasks.speech_recognition.data import (
        SpeechRecognitionDatasetConfig as SpeechRecognitionDatasetConfig,
    )
    from trainwright.tasks.text_classification.data import TextClassificationDataset as TextClassificationDataset
    from trainwright.tasks.text_classification.data import (
        TextClassificationDatasetConfig as TextClassificationDatasetConfig,
    )
    from trainwright.tasks.text_classification.data import TextPaddingDataCollator as TextPaddingDataCollator
    from trainwright.tasks.text_generation.data import TextGenerationDataCollator as TextGenerationDataCollator
    from trainwright.tasks.text_generation.data import TextGenerationDataset as TextGenerationDataset
    from trainwright.tasks.text_generation.data import TextGenerationDatasetConfig as TextGenerationDatasetConfig
    from trainwright.tasks.tokenizer import HFTokenizer as HFTokenizer
    from trainwright.tasks.tokenizer import HFTokenizerConfig as HFTokenizerConfig
    from trainwright.tasks.tokenizer import TextNormalizer as TextNormalizer
    from trainwright.tasks.tokenizer import TextNormalizerConfig as TextNormalizerConfig
    from trainwright.tasks.tokenizer import TextTokenizer as TextTokenizer
    from trainwright.tasks.tokenizer import TextTokenizerConfig as TextTokenizerConfig
    from trainwright.tasks.tokenizer import Tokenizer as Tokenizer
    from trainwright.tasks.tokenizer import TokenizerConfig as TokenizerConfig

if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __all__, __getattr__ = declared_names(__name__)
