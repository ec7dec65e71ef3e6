"""The library's defaults for training. To be changed in config.py."""

from trainwright.config import get_config

train = get_config("common/train.py").train
