import gzip
import runpy
import struct
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from trainwright.base.errors import ConfigError, MissingFileError
from trainwright.data import DataError, transforms
from trainwright.data.datasets import MNIST, FakeData, read_idx, write_idx

PROJECT = Path(__file__).parents[2] / "examples" / "mnist"


def write_split(folder, part="train", count=6, suffix=""):
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", images)
    write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", np.arange(count, dtype=np.uint8))
    return images


@pytest.mark.parametrize("place", ["MNIST/raw", "."])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_are_found_in_both_folders_plain_and_gzipped(tmp_path, place, suffix):
    images = write_split(tmp_path / place, suffix=suffix)
    data = MNIST(tmp_path, train=True)
    assert len(data) == 6
    image, label = data[4]
    np.testing.assert_array_equal(image, images[4])
    assert (image.dtype, label, type(label)) == (np.uint8, 4, int)


def test_train_and_test_are_different_files_with_an_end(tmp_path):
    write_split(tmp_path, "train", 6)
    write_split(tmp_path, "t10k", 3)
    assert (len(MNIST(tmp_path)), len(MNIST(tmp_path, train=False))) == (6, 3)

    write_split(tmp_path)
    with pytest.raises(IndexError):
        MNIST(tmp_path)[6]


def test_transforms_are_applied_and_cannot_reach_the_data(tmp_path):
    images = write_split(tmp_path)

    def blacken(image):
        image[:] = 0
        return transforms.ToTensor()(image)

    data = MNIST(tmp_path, transform=blacken, target_transform=lambda digit: -digit)
    assert torch.equal(data[2][0], torch.zeros(1, 28, 28))
    assert data[2][1] == -2
    np.testing.assert_array_equal(data.data, images)


def test_absent_files_are_named_with_where_they_belong_and_how_to_get_some(tmp_path):
    with pytest.raises(MissingFileError) as raised:
        MNIST(tmp_path)
    message = str(raised.value)
    for fact in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        str(tmp_path / "MNIST" / "raw"),
        "download=True",
    ):
        assert fact in message
    assert f"prepare_digits.py {tmp_path}" in message


def test_only_what_is_absent_is_downloaded_and_kept(tmp_path):
    images = write_split(tmp_path / "source", suffix=".gz")
    root = tmp_path / "root"
    root.mkdir()
    write_idx(root / "train-labels-idx1-ubyte", np.full(6, 7, np.uint8))
    data = MNIST(root, download=True, source_url=(tmp_path / "source").as_uri())
    np.testing.assert_array_equal(data.data, images)
    assert data.targets.tolist() == [7] * 6
    assert [path.name for path in (root / "MNIST" / "raw").iterdir()] == ["train-images-idx3-ubyte.gz"]
    assert len(MNIST(root)) == 6


def test_a_damaged_download_is_not_kept(tmp_path):
    source = tmp_path / "source"
    write_split(source, suffix=".gz")
    whole = (source / "train-images-idx3-ubyte.gz").read_bytes()
    (source / "train-images-idx3-ubyte.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MissingFileError, match=r"Downloading failed: file:.*the gzip data are broken"):
        MNIST(tmp_path / "root", download=True, source_url=source.as_uri())
    assert not list((tmp_path / "root").rglob("*ubyte*"))


def test_a_failing_network_is_said_for_each_mirror(tmp_path, monkeypatch):
    def refuse(url, timeout):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(MissingFileError) as raised:
        MNIST(tmp_path, train=False, download=True)
    message = str(raised.value)
    assert message.count("no route to host") == 2
    assert "t10k-images-idx3-ubyte" in message
    assert "prepare_digits.py" in message


def test_a_mirror_with_other_content_is_refused(tmp_path, monkeypatch):
    source = tmp_path / "source"
    write_split(source, suffix=".gz")
    real_open = urllib.request.urlopen
    monkeypatch.setattr(
        urllib.request,
        "urlopen",
        lambda url, timeout: real_open((source / url.rsplit("/", 1)[1]).as_uri(), timeout=timeout),
    )
    with pytest.raises(MissingFileError, match="its checksum is not that of the published file"):
        MNIST(tmp_path / "root", download=True)


def test_nothing_is_asked_of_the_network_when_all_is_there(tmp_path, monkeypatch):
    write_split(tmp_path)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("asked the network"))
    assert len(MNIST(tmp_path, download=True, source_url="https://example.invalid/")) == 6


def test_files_that_do_not_belong_together_and_plain_http_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="source_url: got 'http://x/'; it must begin with https://"):
        MNIST(tmp_path, download=True, source_url="http://x/")

    write_split(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(5, np.uint8))
    with pytest.raises(DataError, match="has 6 pictures, train-labels-idx1-ubyte has 5 labels"):
        MNIST(tmp_path)


@pytest.fixture
def prepare_digits(tmp_path, monkeypatch, capsys):
    """Runs the script on ``tmp_path``: its exit message (None where it went well) and what it printed."""
    pytest.importorskip("sklearn")

    def run():
        monkeypatch.setattr(sys, "argv", ["prepare_digits.py", str(tmp_path)])
        message = None
        try:
            runpy.run_path(str(PROJECT / "prepare_digits.py"), run_name="__main__")
        except SystemExit as stop:
            message = stop.code
        return message, capsys.readouterr().out

    return run


@pytest.mark.exhaustive
def test_the_digits_script_holds_out_every_fifth_picture(tmp_path, prepare_digits):
    from sklearn.datasets import load_digits

    message, output = prepare_digits()
    assert message is None
    assert "wrote 1,437 digits for training and 360 for testing" in output
    train, test = MNIST(tmp_path), MNIST(tmp_path, train=False)
    digits = load_digits()
    np.testing.assert_array_equal(test.targets, digits.target[::5])
    np.testing.assert_array_equal(train.targets, np.delete(digits.target, np.s_[::5]))
    assert test.data.shape == (360, 28, 28)
    assert test.data.max() == 255
    # Bilinear by hand, at the centre of output pixel (13, 13): (13 + 0.5) * 8 / 28 - 0.5 = 3.357 input pixels in.
    position = 13.5 * 8 / 28 - 0.5
    weights = np.zeros(8)
    weights[3], weights[4] = 4 - position, position - 3
    expected = np.einsum("y,nyx,x->n", weights, digits.images[::5], weights) * 255 / 16
    np.testing.assert_allclose(test.data[:, 13, 13], expected, atol=0.501)  # rounded to whole shades


def test_the_digits_script_can_be_run_again_and_mends_what_is_missing(tmp_path, prepare_digits):
    raw = tmp_path / "MNIST" / "raw"
    prepare_digits()
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in raw.iterdir()}
    assert "nothing written" in prepare_digits()[1]
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in raw.iterdir()} == before

    (raw / "t10k-labels-idx1-ubyte.gz").unlink()
    assert prepare_digits()[0] is None
    assert {path.name: path.read_bytes() for path in raw.iterdir()} == {name: old[0] for name, old in before.items()}

    write_idx(raw / "train-labels-idx1-ubyte.gz", np.zeros(3, np.uint8))
    (raw / "t10k-labels-idx1-ubyte.gz").unlink()
    assert "train-labels-idx1-ubyte.gz there with other digits" in prepare_digits()[0]
    assert read_idx(raw / "train-labels-idx1-ubyte.gz").tolist() == [0, 0, 0]


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (0, 28, 28)])
@pytest.mark.parametrize("name", ["x", "x.gz"])
def test_written_and_read_is_the_identity(tmp_path, shape, name):
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    write_idx(tmp_path / name, array)
    result = read_idx(tmp_path / name)
    np.testing.assert_array_equal(result, array)
    assert result.flags.writeable
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")


def test_the_bytes_are_those_of_the_format_and_equal_for_equal_arrays(tmp_path):
    write_idx(tmp_path / "x", np.array([[1, 2, 3], [4, 5, 6]], np.uint8))
    assert (tmp_path / "x").read_bytes() == struct.pack(">HBBII6B", 0, 8, 2, 2, 3, 1, 2, 3, 4, 5, 6)

    for name in ("a.gz", "b.gz"):
        write_idx(tmp_path / name, np.arange(9, dtype=np.uint8))
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gz", "b.gz", "x"]

    write_idx(tmp_path / "x", np.zeros(4, np.uint8))
    with pytest.raises(DataError, match="1 dimensions; 3 are expected"):
        read_idx(tmp_path / "x", num_dimensions=3)

    with pytest.raises(DataError, match=r"got an array of int64.*astype\(np.uint8\)"):
        write_idx(tmp_path / "new", np.zeros(4, np.int64))
    assert not (tmp_path / "new").exists()


WHOLE = struct.pack(">HBBI4B", 0, 8, 1, 4, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"", "no IDX file"),
        (b"<html>not found</html>", "begins with b'<htm'.*web page"),
        (struct.pack(">HBBI", 0, 0x0D, 1, 4) + bytes(16), "element type 0x0d; only uint8"),
        (WHOLE[:6], "cut off within its header, at 6 of 8 bytes"),
        (WHOLE[:-1], r"11 bytes; shape \(4,\) in its header needs 12"),
        (WHOLE + b"x", r"13 bytes; shape \(4,\)"),
        (gzip.compress(WHOLE, mtime=0)[:-3], "the gzip data are broken"),
        (gzip.compress(WHOLE, mtime=0)[:10] + b"garbage", "the gzip data are broken"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, content, fact):
    path = tmp_path / "labels-idx1"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"labels-idx1: .*{fact}"):
        read_idx(path)


def test_samples_are_functions_of_their_indices_and_an_offset():
    data, twin = FakeData(20, (3, 4, 5)), FakeData(100, (3, 4, 5))
    state = torch.get_rng_state()
    legacy = np.random.get_state()[1].copy()
    later = [twin[index] for index in reversed(range(20))][::-1]
    for index in range(20):
        np.testing.assert_array_equal(data[index][0], later[index][0])
        assert data[index][1] == later[index][1]
    assert torch.equal(state, torch.get_rng_state())
    assert np.array_equal(legacy, np.random.get_state()[1])

    data = FakeData(10, (1, 4, 4))
    assert len({data[index][0].tobytes() for index in range(10)}) == 10
    np.testing.assert_array_equal(FakeData(10, (1, 4, 4), random_offset=3)[2][0], data[5][0])

    image, label = FakeData(5, (3, 6, 7), num_classes=4)[0]
    assert (image.shape, image.dtype, type(label)) == ((6, 7, 3), np.uint8, int)
    assert FakeData(5, (1, 6, 7))[0][0].shape == (6, 7)
    assert FakeData(5, (3, 6, 7), transform=transforms.ToTensor())[0][0].shape == (3, 6, 7)
    assert {FakeData(200, (1, 1, 1), num_classes=4)[index][1] for index in range(200)} == {0, 1, 2, 3}

    assert len(list(FakeData(5, (1, 2, 2)))) == 5

    with pytest.raises(ConfigError, match=r"FakeData\.size: got 0"):
        FakeData(0)
    with pytest.raises(ConfigError, match=r"FakeData.image_size: got \(28, 28\)"):
        FakeData(5, (28, 28))
