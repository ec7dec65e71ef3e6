"""Enums of setting values. A member is equal to its string, and either can be used in a configuration."""

from enum import StrEnum

from trainwright.config.errors import ConfigError, did_you_mean

CUSTOM = "custom_"  # the name of an optimizer or a loss that the user passed as an object


class GivenName(str):
    """The user's name of an optimizer or a loss that is an object. Files contain ``custom_`` instead."""


class _Word(StrEnum):
    """A string enum. An unknown string is a ConfigError with the nearest name; known misspellings are accepted."""

    @classmethod
    def _missing_(cls, value: object) -> "_Word":
        word = MISSPELLED.get(str(value))
        if word in cls.words():
            return cls(word)
        raise ConfigError(f"{cls.__name__}: got {value!r}. {did_you_mean(str(value), cls.words())}")

    @classmethod
    def words(cls) -> list[str]:
        """All values as plain strings."""
        return [member.value for member in cls]


class TaskType(_Word):
    """The task of a model. It determines the metrics and how outputs are compared with labels."""

    AUDIO_CLASSIFICATION = "audio_classification"
    BACKBONE = "backbone"
    IMAGE2TEXT = "image2text"
    LANGUAGE_MODELING = "language_modeling"
    MASK_FILLING = "mask_filling"
    SEQUENCE_LABELING = "sequence_labeling"
    SPEECH_RECOGNITION = "speech_recognition"
    TEXT_CLASSIFICATION = "text_classification"
    TEXT_DETECTION = "text_detection"
    TEXT_GENERATION = "text_generation"


class OptimizerType(_Word):
    """Common optimizers. Others of ``torch.optim`` are selected by their class name."""

    ADAM = "adam"
    ADAMW = "adamw"
    SGD = "sgd"
    SDG = "sgd"  # the spelling of older configurations


class LRSchedulerType(_Word):
    """Short names of the schedules of ``torch.optim.lr_scheduler``."""

    CONSTANT = "constant"
    LAMBDA = "lambda"
    STEP = "step"
    REDUCE_ON_PLATEAU = "reduce_on_plateau"
    MULTI_STEP = "multi_step"
    ONE_CYCLE = "one_cycle"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"
    CYCLIC = "cyclic"
    SEQUENTIAL = "sequential"
    POLYNOMIAL = "polynomial"
    COSINE_ANNEALING = "cosine_annealing"
    COSINE_ANEALING = "cosine_annealing"  # the spelling of older configurations

    @property
    def torch_name(self) -> str:
        """The class of ``torch.optim.lr_scheduler``.

        >>> LRSchedulerType.REDUCE_ON_PLATEAU.torch_name
        'ReduceLROnPlateau'
        """
        if self is LRSchedulerType.REDUCE_ON_PLATEAU:
            return "ReduceLROnPlateau"
        return self.value.title().replace("_", "") + "LR"


class PrecisionType(_Word):
    """The precision of forward passes."""

    NO = "no"
    FULL = "no"
    FP16 = "fp16"
    BF16 = "bf16"


MISSPELLED = {"sdg": "sgd", "cosine_anealing": "cosine_annealing", "full": "no"}
