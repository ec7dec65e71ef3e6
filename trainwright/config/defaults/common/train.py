"""Every setting of training and evaluation, from the table of settings. Read by get_config("common/train.py").train."""

from trainwright.config import LazyCall, settings

train = settings.SECTIONS["train"].value(LazyCall)
