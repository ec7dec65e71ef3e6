"""The default sections, which a run uses where its configuration has none."""
# ruff: noqa: F401 - the imported names are the sections

from .graph import graph
from .optim import optim
from .train import train
