"""The names that users' code depends on are there, in the room where they are said to be."""

import ast
import importlib
from pathlib import Path

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
def test_a_top_level_name_is_the_rooms_own(name: str) -> None:
    value = getattr(trainwright, name)
    if name != "__version__":
        room = importlib.import_module(f"trainwright.{trainwright._ROOM_OF[name]}")
        assert value is getattr(room, name)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(trainwright.__file__).read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING")
    declared = {a.name: n.module.removeprefix("trainwright.") for n in block.body for a in n.names}
    assert declared == trainwright._ROOM_OF


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Trainr"):
        trainwright.Trainr  # noqa: B018
    with pytest.raises(AttributeError, match=r"'trainwright\.data' has no attribute 'Datset'"):
        importlib.import_module("trainwright.data").Datset  # noqa: B018
