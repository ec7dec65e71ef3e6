"""``RunSpec``: all settings of a run of either API, under one vocabulary. Nothing below reads a config class.

The table of settings makes one: of a ``TrainingConfig`` by the names of its rows, of a config file by their places.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from trainwright.config.named_settings import Api as Api
from trainwright.config.named_settings import NamedSettings
from trainwright.config.windows import Windows

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainwright.config.settings import TrainingConfig

    _Settings = TrainingConfig  # for the names and types of the settings only
else:
    _Settings = object

Half = Literal["bf16", "fp16"]

_OTHER_FORMS = (  # keys of config files that have a setting in another form
    "train.amp.enabled",
    "train.zero_optimization.enabled",
    "train.evaluation.enabled",
    "train.evaluation.eval_mode",
    "train.resume",
    "train.input_placement_device",
)


class RunSpec(NamedSettings, _Settings):
    """The settings as attributes, by their names in ``TrainingConfig``. It is immutable.

    Steps are counted as the API counts them: in micro-batches by the Python API, in updates by config files.

    Attributes:
        as_set: the settings as the user has set them, without the values that follow from others.
    """

    as_set: Mapping[str, Any]

    def __init__(
        self,
        api: Api,
        settings: Mapping[str, Any],
        as_set: Mapping[str, Any],
        name_of: Callable[[str], str],
        is_set: Callable[[str], bool],
    ) -> None:
        super().__init__(api, {**settings, "as_set": as_set}, name_of, is_set)

    @property
    def windows(self) -> Windows:
        """The micro-batches of each update."""
        return Windows.of(self.gradient_accumulation_steps)

    @property
    def may_end_early(self) -> bool:
        """Whether the user has set what may end the run before its length."""
        return self.max_time is not None or (self.early_stopping is not None and self.is_set("early_stopping"))

    def batch_settings(self, batch_size: int, accumulation: int | dict[int, int]) -> dict[str, Any]:
        """The settings of updates of so many micro-batches, by the names that the user gives them."""
        settings: dict[str, Any] = {
            self.name_of("batch_size"): batch_size,
            self.name_of("gradient_accumulation_steps"): accumulation,
        }
        if self.api == "Python" or isinstance(accumulation, dict):
            return settings
        return settings | {"train.global_batch_size": batch_size * accumulation}


def spec_of_training_config(config: "TrainingConfig") -> RunSpec:
    """The settings of the Python API."""
    settings = {name: getattr(config, name) for name in type(config).model_fields}
    return RunSpec("Python", settings, config.as_set, config.name_of, config.is_set)


def spec_of_cfg(cfg: "DictConfig", given: "DictConfig", half: Half = "bf16") -> RunSpec:
    """The settings of a complete configuration, as ``DefaultTrainer.cfg`` is.

    ``given``: the same without the values that depend on the data, which the trainer has written into ``cfg``.
    ``half``: the type of mixed precision on the device.
    A setting without a place in config files has the value that their runs have.
    """
    from omegaconf import DictConfig, ListConfig, OmegaConf

    from trainwright.config.lazy.lazy_config import MARKED
    from trainwright.config.lazy.provenance import is_set, value_at, values_at
    from trainwright.config.settings import KEYS, PLACES, place_of, values_of_files
    from trainwright.config.training.row import complete_early_stopping

    settings = values_of_files()
    values = values_at(cfg, [*PLACES.values(), *_OTHER_FORMS])
    for name, place in PLACES.items():
        value = values[place]
        if isinstance(value, DictConfig | ListConfig):
            value = OmegaConf.to_container(value)
        if value is not None or place in KEYS:
            settings[name] = value
    settings |= {
        "mixed_precision": half if values["train.amp.enabled"] else None,
        "zero_stage": settings["zero_stage"] if values["train.zero_optimization.enabled"] else 0,
        "eval_strategy": "step" if values["train.evaluation.enabled"] else "no",
        "greater_is_better": values["train.evaluation.eval_mode"] == "max",
        "resume_from_checkpoint": bool(values["train.resume"]),
        "init_weights_from": settings["init_weights_from"] or None,
        "device_str": settings["device_str"] or values["train.input_placement_device"],
    }

    as_set = settings
    settings = settings | {"early_stopping": complete_early_stopping(as_set["early_stopping"])}

    def is_set_by_user(name: str) -> bool:
        place = place_of(name)
        section, _, key = place.rpartition(".")
        if place in MARKED:
            return is_set(value_at(given, section), key)
        return place in KEYS and bool(value_at(given, place) != KEYS[place].default)

    return RunSpec("config file", settings, as_set, place_of, is_set_by_user)
