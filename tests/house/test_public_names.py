"""The names that users' code depends on are there, in the room where they are said to be."""

import importlib

import pytest

import trainwright

ROOMS = {
    "config": "LazyCall LazyConfig instantiate configurable get_config try_get_key default_argument_parser"
    " TrainingConfig TrainerConfig TaskType OptimizerType LRSchedulerType PrecisionType MetricConfig get_config_help"
    " dump_default_yaml",
    "engine": "TrainerBase HookBase EagerTrainer GraphTrainer GraphBase DefaultTrainer Trainer default_setup",
    "hooks": "HookBase CallbackHook IterationTimer ProfileHook Float32MatmulPrecision LRScheduler PeriodicWriter"
    " PeriodicCheckpointer BestCheckpointer EvalHook FiniteCheck NonFiniteError Callback CallbackList TrainerControl"
    " Logs RunCallbacks EarlyStoppingCallback ModelCheckpointCallback TensorBoardCallback TensorBoardCallBack"
    " PrintCallback PrintCallBack ProgressBarCallback ProgressBarCallBack",
    "events": "EventStorage get_event_storage HistoryBuffer EventWriter JSONWriter CSVWriter TensorBoardWriter"
    " ConsoleWriter",
    "checkpoint": "Checkpointer verify local_folder upload_folder",
    "optim": "build_optimizer get_default_optimizer_params reduce_param_groups build_lr_scheduler WarmupCosineLR"
    " WarmupCosineAnnealingLR WarmupStepLR WarmupMultiStepLR WarmupExponentialLR WarmupPolynomialLR"
    " configure_constant_scheduler configure_constant_scheduler_with_warmup configure_linear_scheduler_with_warmup"
    " configure_cosine_scheduler_with_warmup configure_cosine_with_hard_restarts_scheduler_with_warmup"
    " configure_polynomial_decay_scheduler_with_warmup LayerFreezer freeze_bn layer_depths",
    "evaluation": "DatasetEvaluator DatasetEvaluators ClsEvaluator PPLEvaluator RegEvaluator BLEUEvaluator"
    " inference_on_dataset print_csv_format flatten_results_dict MetricsHandler TextClassificationMetricsHandler"
    " SequenceLabelingMetricsHandler Image2TextMetricHandler Image2TextMetricsHandler SpeechRecognitionMetricsHandler"
    " TextGenerationMetricsHandler TorchMetricsHandler metrics_handler_for Metric build_metric TMMetrics"
    " get_metric_by_name show_avaliable_metrics objective_of",
    "data": "Instance DistTensorData CyclicSampler EpochSampler SingleRoundSampler RangedSampler"
    " build_image_train_loader build_image_test_loader build_nlp_train_loader build_nlp_test_loader"
    " build_nlp_train_val_test_loader datasets ColumnDataset Dataset DatasetConfig register_dataset OCRDataset"
    " OCRDatasetConfig"
    " TextClassificationDataset TextClassificationDatasetConfig SequenceLabelingDataset SequenceLabelingDatasetConfig"
    " SpeechRecognitionDataset SpeechRecognitionDatasetConfig TextGenerationDataset TextGenerationDatasetConfig"
    " CharLevelOCRDataCollator ImageCaptioningDataCollator TextPaddingDataCollator SequenceLabelingDataCollator"
    " TextGenerationDataCollator SpeechRecognitionDataCollator Preprocessor PreprocessorConfig PreprocessorsContainer"
    " register_preprocessor ImageProcessor ImageProcessorConfig AudioFeatureExtractor AudioFeatureExtractorConfig"
    " Tokenizer TokenizerConfig TextTokenizer TextTokenizerConfig HFTokenizer HFTokenizerConfig TextNormalizer"
    " TextNormalizerConfig",
    "models": "Model ModelConfig ModelOutput register_model build_model init_weights model_files CRNNImage2Text"
    " CRNNImage2TextConfig Bert BertConfig BertTextClassification BertTextClassificationConfig BertSequenceLabeling"
    " BertSequenceLabelingConfig CTCSpeechRecognition CTCSpeechRecognitionConfig GPTTextGeneration"
    " GPTTextGenerationConfig ModelCard vit",
    "report": "Run",
    "parallel": "is_main_process get_rank get_world_size get_data_parallel_rank get_data_parallel_size synchronize"
    " setup_dist_util",
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_its_names(room: str) -> None:
    module = importlib.import_module(f"trainwright.{room}")
    for name in ROOMS[room].split():
        assert hasattr(module, name), f"trainwright.{room}.{name}"
        assert name in module.__all__


@pytest.mark.parametrize("name", trainwright.__all__)
def test_a_top_level_name_is_there(name: str) -> None:
    assert getattr(trainwright, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Trainr"):
        trainwright.Trainr  # noqa: B018
    with pytest.raises(AttributeError, match=r"'trainwright\.data' has no attribute 'Datset'"):
        importlib.import_module("trainwright.data").Datset  # noqa: B018


@pytest.mark.parametrize(
    ("package", "name", "line"),
    [
        ("trainwright", "EarlyStoppingCallback", "from trainwright.hooks import EarlyStoppingCallback"),
        ("trainwright", "EarlyStopping", "from trainwright.hooks import EarlyStoppingCallback"),
        ("trainwright", "HookBase", "from trainwright.hooks import HookBase"),
        ("trainwright.engine", "EventStorage", "from trainwright.events import EventStorage"),
        ("trainwright.hooks", "Trainer", "from trainwright import Trainer"),
        ("trainwright.data", "Datset", "from trainwright.data import Dataset"),
    ],
)
def test_a_name_of_another_package_is_answered_with_its_import(package: str, name: str, line: str) -> None:
    with pytest.raises(ImportError, match=f"`{line}`"):
        exec(f"from {package} import {name}")
    with pytest.raises(AttributeError, match=f"`{line}`"):
        getattr(importlib.import_module(package), name)
    assert not hasattr(importlib.import_module(package), name)
