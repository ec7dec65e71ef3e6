"""All sections that have defaults, together: what a run gets for those that its configuration leaves out."""
# ruff: noqa: F401 - importing them is what makes them sections

from .graph import graph
from .optim import optim
from .train import train
