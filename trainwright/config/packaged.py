"""The defaults that come with the library, by name."""

from pathlib import Path

from omegaconf import DictConfig

from trainwright.config.errors import MissingFileError, did_you_mean
from trainwright.config.lazy import LazyConfig
from trainwright.config.provenance import mark_default


class MissingConfigError(MissingFileError, RuntimeError):
    """No configuration of that name is packaged; the page of ``get_config`` has it a RuntimeError."""


_FOLDER = Path(__file__).parent / "defaults"


def get_config(name: str) -> DictConfig:
    """A packaged configuration, such as ``get_config("common/train.py").train``, or a ``.py`` file of your own.

    Fresh at each call, so it may be edited. The packaged ones come first; any other name is a path.

    Raises:
        MissingConfigError: there is none of that name; the message lists those that there are.
    """
    there = sorted(path.relative_to(_FOLDER).as_posix() for path in _FOLDER.rglob("*.py"))
    if name not in there and name.endswith(".py") and Path(name).is_file():
        own: DictConfig = LazyConfig.load(name)
        return own
    if name not in there:
        nearest = did_you_mean(name, there)
        hint = f" {nearest}" if nearest.startswith("Did") else ""
        raise MissingConfigError(
            f"{name!r} is not available in trainwright's configs.{hint} There are: {', '.join(there)}."
        )
    config: DictConfig = LazyConfig.load(_FOLDER / name)
    if "train" in config:
        mark_default(config.train, "train_iter")  # train_epoch, where it is set, goes before it
        mark_default(config.train.evaluation, "eval_metric")
        mark_default(config.train.evaluation, "eval_mode")  # of the default metric: other metrics may say otherwise
    return config
