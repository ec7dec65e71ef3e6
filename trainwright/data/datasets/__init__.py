"""Ready data sets of pictures: MNIST from its files, FakeData from nothing."""

from trainwright.data.datasets.fake import FakeData
from trainwright.data.datasets.mnist import MNIST, read_idx, write_idx

__all__ = ["MNIST", "FakeData", "read_idx", "write_idx"]
