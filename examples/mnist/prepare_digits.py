"""Write the handwritten digits of scikit-learn as MNIST's four files, without a network.

    python examples/mnist/prepare_digits.py [FOLDER]

1,797 images of 8x8 pixels with 17 gray levels, resized to 28x28 pixels with 256. Every fifth image (0, 5, 10, ...) is
in the test set. FOLDER is the ``path`` of the dataset; default: the ``data`` folder of the project. Existing files are
not changed; missing files are added.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from trainwright.data.datasets import read_idx, write_idx

SIZE = 28
TEST_EVERY = 5


def load_digits_28() -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 (N, 28, 28), and their digits, uint8 (N,)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("The digits come with scikit-learn, which is not installed. Install it: pip install scikit-learn")
    images, digits = load_digits(return_X_y=True)
    images_N1HW = torch.from_numpy(images).to(torch.float32).reshape(-1, 1, 8, 8) * (255 / 16)
    resized_N1HW = F.interpolate(images_N1HW, size=(SIZE, SIZE), mode="bilinear", align_corners=False)
    return resized_N1HW.squeeze(1).round().to(torch.uint8).numpy(), digits.astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parent / "data")
    raw = parser.parse_args().folder / "MNIST" / "raw"

    images, digits = load_digits_28()
    is_test = np.arange(len(digits)) % TEST_EVERY == 0
    files = {
        "train-images-idx3-ubyte.gz": images[~is_test],
        "train-labels-idx1-ubyte.gz": digits[~is_test],
        "t10k-images-idx3-ubyte.gz": images[is_test],
        "t10k-labels-idx1-ubyte.gz": digits[is_test],
    }
    present = {name: path for name in files if (path := find_file(raw, name)) is not None}
    foreign = [path.name for name, path in present.items() if not np.array_equal(read_idx(path), files[name])]
    if foreign and len(present) < len(files):
        sys.exit(f"{raw}: {', '.join(foreign)} there with other digits. Move them away, or two sets would be mixed.")
    raw.mkdir(parents=True, exist_ok=True)
    for name in files.keys() - present.keys():
        write_idx(raw / name, files[name])
    if len(present) == len(files):
        print(f"{raw}: all four files exist; nothing written.")
    else:
        print(f"{raw}: wrote {np.sum(~is_test):,} digits for training and {np.sum(is_test):,} for testing.")


def find_file(folder: Path, name: str) -> Path | None:
    """The file, gzipped or not, or None if it does not exist."""
    return next((path for path in (folder / name, folder / name.removesuffix(".gz")) if path.is_file()), None)


if __name__ == "__main__":
    main()
