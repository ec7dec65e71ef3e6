"""The library's defaults for training; config.py changes them."""

from trainwright.config import get_config

train = get_config("common/train.py").train
