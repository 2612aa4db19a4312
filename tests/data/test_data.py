"""Data sets: they are what was published; a bad file is refused by name in one sentence."""

import gzip
import os
import pickle
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flatlens.data import image_sets
from flatlens.data.datasets import load
from flatlens.data.fetch import PUBLISHED, fetch, verify
from flatlens.data.formats import read_cifar, read_cifar_python, read_idx
from flatlens.errors import FlatlensError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(6, 3)), np.array([0, 1, 2, 0, 1, 2])


def saved(folder: Path, **arrays) -> str:
    np.savez(folder / "data.npz", **arrays)
    return f"npz:{folder / 'data.npz'}"


def test_digits_are_the_published_ones():
    data = load("digits")
    x, y = torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test])
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert (tuple(data.x_train.shape), tuple(data.x_test.shape)) == ((1000, 64), (797, 64))
    assert (x.min(), x.max()) == (0, 1)
    # published counts of the classes, and the sum of all pixels
    assert y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (16 * x.double()).sum() == 561_718


def test_digits_split_has_no_image_twice():
    data = load("digits")
    assert len(torch.cat([data.x_train, data.x_test]).unique(dim=0)) == 1797


def test_npz_without_a_test_part(tmp_path):
    data = load(saved(tmp_path, x=X, y=Y))
    assert data.x_train.dtype == torch.float64
    assert np.array_equal(data.x_train, X)
    assert data.y_train.tolist() == Y.tolist()
    assert (len(data.x_test), len(data.y_test), data.classes) == (0, 0, 3)


def test_npz_with_a_test_part(tmp_path):
    data = load(saved(tmp_path, x=X, y=Y, x_test=X[:2], y_test=np.array([4, 0], dtype=np.uint8)))
    assert (len(data.x_test), data.y_test.dtype, data.classes) == (2, torch.int64, 5)


def test_npz_with_float_targets(tmp_path):
    assert load(saved(tmp_path, x=X, y=RNG.normal(size=(6, 2)))).classes == 2


def test_npz_keeps_token_ids_as_integers(tmp_path):
    tokens = np.arange(12, dtype=np.int16).reshape(6, 2)
    assert load(saved(tmp_path, x=tokens, y=Y)).x_train.dtype == torch.int64


def test_npz_in_another_byte_order(tmp_path):
    assert np.array_equal(load(saved(tmp_path, x=X.astype(">f8"), y=Y)).x_train, X)


BAD_ARRAYS = {
    "no array y": {"x": X},
    "no array x and no y": {"z": X},
    "come as a pair": {"x": X, "y": Y, "x_test": X},
    "the same n": {"x": X, "y": Y[:5]},
    "must be [n, ...]": {"x": X[0], "y": Y},
    "no samples": {"x": X[:0], "y": Y[:0]},
    "classes and must have shape [n]": {"x": X, "y": np.eye(6, dtype=int)},
    "count from 0": {"x": X, "y": Y - 1},
    "one test sample has shape [2]": {"x": X, "y": Y, "x_test": X[:, :2], "y_test": Y},
    "mix integers and floats": {"x": X, "y": Y, "x_test": X, "y_test": Y / 2},
    "dtype complex128": {"x": X + 0j, "y": Y},
    "dtype <U1": {"x": X, "y": Y.astype("U1")},
    "arrays of Python objects": {"x": np.array([[None]] * 6), "y": Y},
}


@pytest.mark.parametrize("reason", BAD_ARRAYS)
def test_npz_refuses(tmp_path, reason):
    name = saved(tmp_path, **BAD_ARRAYS[reason])
    with pytest.raises(FlatlensError) as refusal:
        load(name)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_npz_refuses_a_missing_file(tmp_path):
    with pytest.raises(FlatlensError, match=r"none\.npz: No such file"):
        load(f"npz:{tmp_path / 'none.npz'}")


@pytest.mark.parametrize(
    "content", [b"", b"x,y\n1,2\n", b"PK\x03\x04 cut short", b"\x80\x02}q\x00."]
)
def test_npz_refuses_another_kind_of_file(tmp_path, content):
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(FlatlensError, match=r"not a NumPy \.npz file"):
        load(f"npz:{tmp_path / 'data.npz'}")


def test_npz_refuses_a_single_array(tmp_path):
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(FlatlensError, match="single array"):
        load(f"npz:{tmp_path / 'x.npy'}")


@pytest.mark.parametrize("name", ["mnist", "npz", "npz:", "folder:", "synthetic:", ""])
def test_unknown_names_are_refused(name):
    with pytest.raises(FlatlensError, match="Unknown data"):
        load(name)


@pytest.mark.parametrize("name", ["digits", "fashion-mnist", "cifar10", "npz:a.npz"])
def test_unknown_options_are_refused(name):
    with pytest.raises(FlatlensError, match=r"cannot take these options: .* 'colour'"):
        load(name, colour="red")


# ------------------------------------------------------------------ small files as published


def idx(array) -> bytes:
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes())


IMAGES = RNG.integers(0, 256, size=(5, 28, 28))
LABELS = np.array([9, 0, 0, 3, 7])
FASHION_MNIST, CIFAR10 = (list(PUBLISHED[name].files) for name in ("fashion-mnist", "cifar10"))
TRAIN_X, TRAIN_Y, TEST_X, TEST_Y = FASHION_MNIST


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """An empty folder that FLATLENS_DATA names; the cache folder is another empty one."""
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("FLATLENS_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "data"


def make_fashion(folder: Path) -> Path:
    """Five images to train, two to test."""
    folder = folder / "fashion-mnist"
    folder.mkdir(parents=True)
    arrays = (IMAGES, LABELS, IMAGES[:2], LABELS[:2])
    for name, array in zip(FASHION_MNIST, arrays, strict=True):
        (folder / name).write_bytes(idx(array))
    return folder


def make_cifar(folder: Path, labels=range(10)) -> Path:
    """One image of each class in each of the five training files, and in the test file."""
    folder = folder / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for k, name in enumerate(CIFAR10):
        (folder.parent / name).write_bytes(
            b"".join(bytes([c]) + bytes([10 * k + c]) * 3071 + b"\xff" for c in labels)
        )
    return folder


@pytest.fixture
def few(monkeypatch):
    """The counts that the files of `make_cifar` have."""
    monkeypatch.setattr(image_sets, "CIFAR10_COUNTS", {"training": 5, "test": 1})


def refusal(name: str, **options) -> str:
    with pytest.raises(FlatlensError) as caught:
        load(name, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return sentence


@pytest.mark.parametrize(("shape", "axes"), [("flat", (784,)), ("image", (1, 28, 28))])
def test_fashion_mnist(root, shape, axes):
    make_fashion(root)
    data = load("fashion-mnist", shape=shape)
    assert data.x_train.shape == (5, *axes)
    assert data.x_test.shape == (2, *axes)
    assert (data.x_train.dtype, data.y_train.dtype) == (torch.float32, torch.int64)
    expected = torch.from_numpy(IMAGES).reshape(5, *axes).float() / 255
    assert torch.equal(data.x_train, expected)
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([9, 0, 0, 3, 7], [9, 0])
    assert data.classes == 10


def test_fashion_mnist_is_flat_by_default(root):
    make_fashion(root)
    assert load("fashion-mnist").x_train.shape == (5, 784)


def test_fashion_mnist_refuses_an_unknown_shape(root):
    assert "use flat or image" in refusal("fashion-mnist", shape="square")


whole = idx(IMAGES)
DAMAGED = {
    "cut short or damaged: Compressed file ended": whole[:-20],
    "damaged or no gzip file: Not a gzipped file": b"not a data set",
    "damaged or no gzip file: CRC check failed": whole[:-8] + bytes(8),
    "it begins with nothing instead of 00000803": gzip.compress(b""),
    "it begins with 00000801 instead of 00000803": idx(LABELS),
    "it says whole and there are 0": gzip.compress(bytes((0, 0, 8, 3, 0, 0))),
    "it says 5 x 28 x 28 and there are 3915": gzip.compress(gzip.decompress(whole)[:-5]),
    "it says 5 x 28 x 28 and there are more": gzip.compress(gzip.decompress(whole) + b"!"),
    "it says 0 x 28 x 28": idx(IMAGES[:0]),
    "images of 14 x 28 pixels": idx(IMAGES[:, :14]),
    f"{TRAIN_Y} has 5 labels for the 4 images of": idx(IMAGES[:4]),
}


@pytest.mark.parametrize("reason", DAMAGED)
def test_fashion_mnist_refuses(root, reason):
    folder = make_fashion(root)
    (folder / TRAIN_X).write_bytes(DAMAGED[reason])
    sentence = refusal("fashion-mnist")
    assert str(folder / TRAIN_X) in sentence
    assert reason in sentence


def test_fashion_mnist_refuses_labels_of_another_data_set(root):
    folder = make_fashion(root)
    (folder / TEST_Y).write_bytes(idx(np.array([3, 46])))
    assert f"{folder / TEST_Y} has the label 46" in refusal("fashion-mnist")


def test_cifar10(root, few):
    make_cifar(root)
    data = load("cifar10")
    assert (data.x_train.shape, data.x_test.shape) == ((50, 3, 32, 32), (10, 3, 32, 32))
    assert (data.x_train.dtype, data.y_train.dtype) == (torch.float32, torch.int64)
    assert data.y_train.tolist() == 5 * list(range(10))
    assert data.x_train[13, 0, 0, 0] == torch.tensor(13.0) / 255  # the first pixel, second file
    assert data.x_train[13, 2, 31, 31] == 1  # the last pixel
    assert data.x_test[7, 1, 0, 0] == torch.tensor(57.0) / 255


@pytest.mark.parametrize("copy", [range(10), (0, 1)], ids=["whole", "cut"])
def test_cifar10_two_classes_keep_ten_outputs(root, few, copy):
    make_cifar(root, copy)
    data = load("cifar10", classes=(1, 0))
    assert data.y_train.tolist() == [0, 1] * 5
    assert data.y_test.tolist() == [0, 1]
    assert (len(data.x_train), data.classes) == (10, 10)


def test_cifar10_targets_stay_class_indices(root, few):
    make_cifar(root)
    assert load("cifar10", classes=(3, 8)).y_test.tolist() == [3, 8]


def test_cifar10_refuses_a_class_that_a_cut_copy_lacks(root, few):
    folder = make_cifar(root, (0, 1))
    sentence = refusal("cifar10")
    assert f"{folder} is incomplete" in sentence
    assert "training files hold 0 images of class 2 instead of 5" in sentence


def test_cifar10_refuses_a_file_cut_between_two_records(root, few):
    path = make_cifar(root) / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-3073])
    assert "test files hold 0 images of class 9 instead of 1" in refusal("cifar10")


@pytest.mark.parametrize("classes", [(0, 10), (-1,)])
def test_cifar10_refuses_unknown_classes(root, few, classes):
    make_cifar(root)
    assert "numbers from 0 to 9" in refusal("cifar10", classes=classes)


BAD_BATCHES = {
    "its 3072 bytes are not a whole number of records of 3073 bytes": bytes(3072),
    "its 0 bytes are not": b"",
    "record 1 has the label 10": bytes(3073) + bytes([10]) + bytes(3072),
}


@pytest.mark.parametrize("reason", BAD_BATCHES)
def test_cifar10_refuses(root, few, reason):
    path = make_cifar(root) / "data_batch_3.bin"
    path.write_bytes(BAD_BATCHES[reason])
    sentence = refusal("cifar10")
    assert str(path) in sentence
    assert reason in sentence


# ------------------------------------------------------------------ CIFAR's python format


def word(text: str) -> bytes:
    """A string of Python 2, as the published files have them."""
    return b"U" + bytes([len(text)]) + text.encode()


def array(pixels: np.ndarray, kind="u1") -> bytes:
    """An array as NumPy pickled it under Python 2."""
    shape = b"".join(b"J" + struct.pack("<i", n) for n in pixels.shape)
    dtype = b"cnumpy\ndtype\nq\n" + word(kind) + b"K\x00K\x01\x87Rq\x0b(K\x03" + word("|")
    dtype += b"NNN" + 2 * (b"J" + struct.pack("<i", -1)) + b"K\x00tb"
    content = pixels.tobytes()
    return (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85"
        + word("b")
        + b"\x87Rq\t(K\x01"
        + shape
        + b"\x86"
        + dtype
        + b"\x89T"
        + struct.pack("<i", len(content))
        + content
        + b"tb"
    )


def python_batch(pixels: np.ndarray, labels, data: bytes | None = None) -> bytes:
    """A batch with the opcodes of the published ones (protocol 2)."""
    return (
        b"\x80\x02}q\x01("
        + (word("batch_label") + b"q\x02" + word("training batch 1 of 5") + b"q\x03")
        + (word("labels") + b"q\x04]q\x05(" + b"".join(b"K" + bytes([c]) for c in labels) + b"e")
        + (word("data") + b"q\x06" + (array(pixels) if data is None else data))
        + (word("filenames") + b"q\x0c]q\r(" + b"".join(word("a.png") for _ in labels) + b"eu.")
    )


PIXELS = RNG.integers(0, 256, size=(3, 3072), dtype=np.uint8)
PYTHON = python_batch(PIXELS, [6, 9, 0])


def to_python(folder: Path) -> Path:
    """The files of `make_cifar` in the other format; the binary ones are gone."""
    other = folder.with_name("cifar-10-batches-py")
    other.mkdir()
    for path in folder.iterdir():
        pixels, labels = read_cifar(path)
        (other / path.stem).write_bytes(python_batch(pixels.reshape(-1, 3072), labels.tolist()))
        path.unlink()
    return other


def test_python_batches_of_the_tests_are_what_numpy_reads():
    batch = pickle.loads(PYTHON, encoding="bytes")
    assert np.array_equal(batch[b"data"], PIXELS)
    assert (batch[b"labels"], next(iter(batch))) == ([6, 9, 0], b"batch_label")


def test_cifar10_in_the_python_format_is_the_same(root, few):
    folder = make_cifar(root)
    binary = load("cifar10", classes=(3, 8))
    to_python(folder)
    python = load("cifar10", classes=(3, 8))
    for name in ("x_train", "y_train", "x_test", "y_test"):
        assert torch.equal(getattr(python, name), getattr(binary, name))


def test_cifar10_in_the_python_format_is_verified_and_not_fetched_again(root, monkeypatch):
    folder = to_python(make_cifar(root))
    assert {path.parent for path in verify("cifar10")} == {folder}
    assert set(verify("cifar10").values()) == {"different"}
    monkeypatch.setattr("flatlens.data.places.matches", lambda path, checksum: True)
    assert fetch("cifar10") == folder.parent


def test_the_binary_format_comes_first(root, few):
    kept = {path: path.read_bytes() for path in make_cifar(root).iterdir()}
    other = to_python(next(iter(kept)).parent)
    for path, content in kept.items():
        path.write_bytes(content)
    (other / "data_batch_1").write_bytes(b"not read")
    assert len(load("cifar10").x_train) == 50


class Calls:
    def __reduce__(self):
        return print, ("called",)


def pickled(**entries) -> bytes:
    """Of Python 3, bytes as keys."""
    return pickle.dumps({key.encode(): value for key, value in entries.items()}, protocol=3)


BAD_PICKLES = {
    "cut short or no CIFAR-10 batch: pickle data was truncated": PYTHON[:-2000],
    "cut short or no CIFAR-10 batch: Ran out of input": b"",
    "batch: it asks for builtins.print, which was not called": pickled(labels=Calls()),
    "it asks for posix.system, which was": b"cposix\nsystem\n(U\x04truetR.",
    "record 1 has the label 10": python_batch(PIXELS, [6, 10, 0]),
    "as many rows of 3072 bytes as data": python_batch(PIXELS, [6, 9]),
    "it should have a list of labels": pickled(labels=3),
    "a list of labels and as many rows": pickle.dumps([1, 2]),
    "list of labels and as many rows of": python_batch(PIXELS[:0], []),
    "and as many rows of 3072 bytes as": python_batch(PIXELS, [1], array(np.zeros(384), "f8")),
    "cut short or no CIFAR-10 batch: ": bytes(3073),
}


@pytest.mark.parametrize("reason", BAD_PICKLES)
def test_cifar10_refuses_a_pickle(root, few, capsys, reason):
    path = to_python(make_cifar(root)) / "data_batch_3"
    path.write_bytes(BAD_PICKLES[reason])
    sentence = refusal("cifar10")
    assert str(path) in sentence
    assert reason in sentence
    assert capsys.readouterr().out == ""  # nothing was called


def test_a_batch_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "data_batch_1"
    for place in [*range(150), *range(150, len(PYTHON), 97), len(PYTHON) - 1]:
        path.write_bytes(PYTHON[:place])
        with pytest.raises(FlatlensError, match="data_batch_1 is cut short or no CIFAR-10 batch"):
            read_cifar_python(path)


@pytest.mark.parametrize(("name", "files"), [("fashion-mnist", 4), ("cifar10", 6)])
def test_absent_data_says_which_files_to_put_where(root, name, files):
    sentence = refusal(name)
    assert sentence.count(".gz") + sentence.count(".bin") == files
    assert f"into {root / name} (FLATLENS_DATA is looked at first)" in sentence
    assert str(root.parent / "cache" / "flatlens" / name) in sentence


def test_absent_data_without_the_variable(root, monkeypatch):
    monkeypatch.delenv("FLATLENS_DATA")
    sentence = refusal("cifar10")
    assert "into cifar10 in a folder that you name in FLATLENS_DATA" in sentence


def test_only_the_missing_files_are_asked_for(root):
    (make_fashion(root) / TEST_X).unlink()
    assert f"put {TEST_X} into" in refusal("fashion-mnist")


def test_the_cache_folder_comes_second(root):
    make_fashion(root.parent / "cache" / "flatlens")
    assert len(load("fashion-mnist").x_train) == 5
    folder = make_fashion(root)
    (folder / TRAIN_X).write_bytes(idx(IMAGES[:3]))
    (folder / TRAIN_Y).write_bytes(idx(LABELS[:3]))
    assert len(load("fashion-mnist").x_train) == 3


# ------------------------------------------------------------------ options in the name


def test_options_may_stand_in_the_name(root, few):
    make_cifar(root)
    make_fashion(root)
    assert load("cifar10?classes=3,8").y_test.tolist() == [3, 8]
    assert load("cifar10?classes=3").y_test.tolist() == [3]
    assert load("cifar10", classes=3).y_test.tolist() == [3]
    assert load("fashion-mnist?shape=image").x_train.shape == (5, 1, 28, 28)
    data = load("synthetic:gaussians?n=7&dim=3", classes=2)
    assert (data.x_train.shape, data.x_test.shape, data.classes) == ((7, 3), (7, 3), 2)


def test_a_path_may_have_a_question_mark(tmp_path):
    np.savez(tmp_path / "what?.npz", x=X, y=Y)
    assert len(load(f"npz:{tmp_path / 'what?.npz'}").x_train) == 6


BAD_OPTIONS = {
    "cifar10?colour=red": "unexpected keyword argument 'colour'",
    "digits?n=3": "unexpected keyword argument 'n'",
    "cifar10?classes=a": "classes takes whole numbers, not 'a'",
    "cifar10?classes=": "classes takes whole numbers, not ''",
    "cifar10?classes": "options are written name?key=value&key=value",
    "synthetic:teacher?n=1.5": "n takes a whole number, not '1.5'",
    "synthetic:teacher?noise=loud": "noise takes a number, not 'loud'",
    "synthetic:teacher?n=5&n=6": "given the option n twice",
    "synthetic:teacher?n=0": "n=0 of synthetic data must be at least 1",
    "synthetic:gaussians?noise=nan": "must be finite and not negative",
    "synthetic:gaussians?seed=-1": "must be finite and not negative",
    "synthetic:moons": "Unknown data 'synthetic:moons'",
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_that_are_refused(name):
    assert BAD_OPTIONS[name] in refusal(name)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("synthetic:gaussians", {"n": "abc"}, "n takes a whole number, not 'abc'"),
        ("synthetic:gaussians", {"n": 1.5}, "n takes a whole number, not 1.5"),
        ("synthetic:gaussians", {"classes": (0, 1)}, "classes takes a whole number, not (0, 1)"),
        ("synthetic:gaussians", {"shape": "abc"}, "shape takes whole numbers, not 'abc'"),
        ("synthetic:gaussians", {"shape": ()}, "shape takes whole numbers, not ()"),
        ("synthetic:teacher", {"noise": "loud"}, "noise takes a number, not 'loud'"),
        ("cifar10", {"classes": ()}, "classes takes whole numbers, not ()"),
        ("folder:photos", {"size": 6.5}, "size takes whole numbers, not 6.5"),
        ("folder:photos", {"size": "x"}, "size takes whole numbers, not 'x'"),
        ("fashion-mnist", {"shape": 3}, "shape takes a word, not 3"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(name, options, reason):
    assert reason in refusal(name, **options)


def test_options_may_be_numbers_of_any_origin():
    x = load("synthetic:gaussians", n=np.int64(4), shape=[3, 2], noise=0).x_train
    assert (x.shape, len(x.unique(dim=0)) <= 4) == ((4, 3, 2), True)
    assert load("synthetic:gaussians", n=4, shape=5).x_train.shape == (4, 5)


def test_standardised_images_have_mean_0_and_deviation_1_in_each_channel(tmp_path):
    x = RNG.normal(size=(8, 3, 4, 4)) * [[[[1]], [[5]], [[0]]]] + [[[[2]], [[-7]], [[3]]]]
    name = saved(tmp_path, x=x, y=np.arange(8), x_test=x[:2] + 1, y_test=np.arange(2))
    data = load(name, standardize=True)
    flat = data.x_train.double().movedim(1, 0).flatten(1)
    assert flat.mean(1).tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert flat.std(1, correction=0).tolist() == pytest.approx([1, 1, 0], abs=1e-6)
    move = [1 / x[:, c].std() for c in range(2)] + [1.0]  # a channel without contrast is shifted
    for c in range(3):
        moved = (data.x_test - data.x_train[:2])[:, c]
        torch.testing.assert_close(moved, torch.full_like(moved, move[c]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -1e6, 1e-30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_channel_without_contrast_becomes_zero_whatever_its_value(tmp_path, value, dtype):
    x = RNG.normal(size=(50, 2, 7, 7)).astype(dtype)
    x[:, 1] = value
    name = saved(tmp_path, x=x, y=np.arange(50), x_test=x[:2], y_test=np.arange(2))
    data = load(name, standardize=True)
    assert torch.count_nonzero(data.x_train[:, 1]) == torch.count_nonzero(data.x_test[:, 1]) == 0
    assert data.x_train[:, 0].std() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("name", ["digits", "synthetic:teacher?n=20&dim=4"])
def test_standardised_rows_have_one_mean_and_deviation(name):
    joined = f"{name}{'&' if '?' in name else '?'}standardize=true"
    plain, data = load(name), load(joined)
    mean, deviation = plain.x_train.mean(), plain.x_train.std(correction=0)
    torch.testing.assert_close(data.x_train, (plain.x_train - mean) / deviation)
    torch.testing.assert_close(data.x_test, (plain.x_test - mean) / deviation)
    assert torch.equal(load(f"{joined[:-4]}false").x_train, plain.x_train)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_standardize_is_true_or_false(value):
    assert "standardize takes true or false, not" in refusal("digits", standardize=value)
    assert "standardize takes true or false" in refusal(f"digits?standardize={value}")


def test_tokens_are_not_standardised(tmp_path):
    name = saved(tmp_path, x=np.arange(12).reshape(6, 2), y=Y)
    assert "standardize needs inputs of floating-point" in refusal(name, standardize=True)


def test_a_damaged_member_of_an_npz_file(tmp_path):
    path = tmp_path / "data.npz"
    np.savez_compressed(path, x=RNG.normal(size=(200, 8)), y=np.arange(200))
    content = bytearray(path.read_bytes())
    content[3_000:3_100] = bytes(100)
    path.write_bytes(content)
    assert "data.npz: it is damaged" in refusal(f"npz:{path}")


def test_a_text_in_place_of_an_array(tmp_path):
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as file:
        file.writestr("x", "one, two")
        file.writestr("y", "0, 1")
    assert "x is not a NumPy array" in refusal(f"npz:{tmp_path / 'data.npz'}")


def test_an_idx_header_that_promises_too_much(tmp_path):
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(bytes((0, 0, 8, 3)) + b"\xff" * 12 + b"12"))
    with pytest.raises(FlatlensError, match=r"images.gz is damaged: its header promises 4"):
        read_idx(path, 3)


@pytest.mark.parametrize(
    "name",
    [
        "synthetic:gaussians?n=1000000000000",
        "synthetic:gaussians?shape=1000000,1000000,1000000",
        "synthetic:gaussians?classes=1000000000000",
        "synthetic:teacher?n=1000000000000",
        "synthetic:teacher?hidden=1000000000000",
    ],
)
def test_data_beyond_the_memory_is_refused_before_it_is_drawn(name):
    assert "GB of memory" in refusal(name)


def test_images_beyond_the_memory_are_refused(tmp_path):
    pytest.importorskip("PIL")
    (tmp_path / "a").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "a" / "b.png")
    assert "GB of memory" in refusal(f"folder:{tmp_path}?size=1000000")


def test_an_npz_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("flatlens.data.memory.total_memory", lambda: 10**6)
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1000, 1000)), y=np.zeros(1000))
    assert "GB of memory" in refusal(f"npz:{tmp_path}/a.npz")


@pytest.mark.parametrize("kind", ["npz", "fashion-mnist", "cifar10", "folder"])
def test_a_pipe_in_place_of_a_file_does_not_hang(root, kind, tmp_path, few):
    if kind == "npz":
        os.mkfifo(tmp_path / "a.npz")
        assert "regular file" in refusal(f"npz:{tmp_path}/a.npz")
        return
    if kind == "folder":
        (tmp_path / "images" / "a").mkdir(parents=True)
        os.mkfifo(tmp_path / "images" / "a" / "b.png")
        assert "regular file" in refusal(f"folder:{tmp_path}/images")
        return
    folder = make_fashion(root) if kind == "fashion-mnist" else make_cifar(root)
    file = sorted(folder.iterdir())[0]
    file.unlink()
    os.mkfifo(file)
    assert "is not here" in refusal(kind)


def test_an_option_given_both_ways_is_refused():
    assert "the option n twice" in refusal("synthetic:teacher?n=5", n=6)


# ------------------------------------------------------------------ made up


@pytest.mark.parametrize("name", ["synthetic:gaussians", "synthetic:teacher"])
def test_synthetic_data_depends_on_its_seed_alone(name):
    first, torch_state = load(name), torch.get_rng_state()
    again, other = load(name, seed=0), load(f"{name}?seed=1")
    assert torch.equal(torch.get_rng_state(), torch_state)
    for field in ("x_train", "y_train", "x_test", "y_test"):
        assert torch.equal(getattr(first, field), getattr(again, field))
        assert not torch.equal(getattr(first, field), getattr(other, field))
    assert (first.x_train.dtype, first.y_train.dtype) == (torch.float32, torch.int64)
    assert (first.x_train.shape, first.classes) == ((1000, 20), 10)
    assert first.y_train.unique().tolist() == list(range(10))


def test_gaussians_lie_around_centres_of_length_one():
    data = load("synthetic:gaussians?n=20000&dim=5&classes=3&noise=0.1")
    for label in range(3):
        cloud = data.x_train[data.y_train == label]
        assert cloud.mean(0).norm() == pytest.approx(1, abs=0.01)
        assert cloud.std(0).numpy() == pytest.approx(0.1, rel=0.05)
        # the test part lies around the same centres
        assert data.x_test[data.y_test == label].mean(0) == pytest.approx(cloud.mean(0), abs=0.01)


def test_noise_flips_labels_of_the_teacher():
    clean, noisy = load("synthetic:teacher"), load("synthetic:teacher?noise=0.2")
    assert torch.equal(clean.x_train, noisy.x_train)
    agree = (clean.y_train == noisy.y_train).double().mean()
    assert 0.5 < agree < 0.95


# ------------------------------------------------------------------ folders of images


def make_images(folder: Path, counts: dict[str, int], size=(4, 6), suffix="png") -> Path:
    """Grey value 10 * class + number in every pixel, red channel 200; size is height, width."""
    for c, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for k in range(count):
            pixels = np.full((*size, 3), 10 * c + k, np.uint8)
            pixels[..., 0] = 200
            Image.fromarray(pixels).save(folder / name / f"{k}.{suffix}")
    return folder


def test_folder(tmp_path):
    make_images(tmp_path / "pets", {"cat": 4, "dog": 3})
    (tmp_path / "pets" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "pets" / ".hidden").mkdir()
    data = load(f"folder:{tmp_path / 'pets'}")
    assert (data.x_train.shape, len(data.x_test), data.classes) == ((7, 3, 4, 6), 0, 2)
    assert (data.x_train[:, 0] == torch.tensor(200.0) / 255).all()
    values = (255 * data.x_train[:, 1, 0, 0]).round().int().tolist()
    assert sorted(zip(data.y_train.tolist(), values, strict=True)) == [
        *((0, k) for k in range(4)),
        *((1, 10 + k) for k in range(3)),
    ]


def test_folder_mixes_the_classes_always_alike(tmp_path):
    make_images(tmp_path / "a", {"cat": 20, "dog": 20})
    make_images(tmp_path / "b", {"cat": 20, "dog": 20})
    first, second = load(f"folder:{tmp_path / 'a'}"), load(f"folder:{tmp_path / 'b'}")
    assert torch.equal(first.x_train, second.x_train)
    assert set(first.y_train[:10].tolist()) == {0, 1}


@pytest.mark.parametrize("test", ["test", "val"])
def test_folder_with_a_test_part(tmp_path, test):
    make_images(tmp_path / "train", {"cat": 2, "dog": 2}, suffix="JPEG")
    make_images(tmp_path / test, {"dog": 3}, suffix="jpg")
    data = load(f"folder:{tmp_path}")
    assert (len(data.x_train), data.y_test.tolist(), data.classes) == (4, [1, 1, 1], 2)


def test_folder_in_another_size_and_grey(tmp_path):
    make_images(tmp_path, {"cat": 1, "dog": 1})
    make_images(tmp_path, {"bird": 1}, size=(9, 5))
    assert load(f"folder:{tmp_path}?size=8").x_train.shape == (3, 3, 8, 8)
    assert load(f"folder:{tmp_path}", size=(2, 3), channels=1).x_train.shape == (3, 1, 2, 3)


def test_a_size_takes_the_middle_of_an_image(tmp_path):
    (tmp_path / "a").mkdir()
    pixels = np.zeros((4, 8), np.uint8)
    pixels[:, 2:6] = 255
    Image.fromarray(pixels).save(tmp_path / "a" / "wide.png")
    assert (load(f"folder:{tmp_path}?size=4").x_train == 1).all()


def sixteen_bits(folder):
    (folder / "deep").mkdir()
    Image.fromarray(np.zeros((4, 6), np.uint16)).save(folder / "deep" / "a.png")


BAD_FOLDERS = {
    "none is not a folder": lambda folder: folder.rmdir(),
    "none has no class folders": lambda folder: None,
    "none has no images (.png, .jpg, .jpeg)": lambda folder: (folder / "cat").mkdir(),
    "cat has no images": lambda folder: make_images(folder, {"cat": 0, "dog": 2}),
    "0.png has 9 x 5 pixels, but": lambda folder: [
        make_images(folder, {"cat": 9}),
        make_images(folder, {"dog": 1}, size=(9, 5)),
    ],
    "a.png has more than 8 bits a pixel": sixteen_bits,
    "val/wolf is a class that the training folder lacks": lambda folder: [
        make_images(folder / "train", {"cat": 1}),
        make_images(folder / "val", {"wolf": 1}),
    ],
    "val have 9 x 5 pixels": lambda folder: [
        make_images(folder / "train", {"cat": 1}),
        make_images(folder / "val", {"cat": 1}, size=(9, 5)),
    ],
}


@pytest.mark.parametrize("reason", BAD_FOLDERS)
def test_folder_refuses(tmp_path, reason):
    folder = tmp_path / "none"
    folder.mkdir()
    BAD_FOLDERS[reason](folder)
    sentence = refusal(f"folder:{folder}")
    if "but" in reason:  # which of the two sizes comes first is a matter of names
        assert "give size=" in sentence
        assert "9 x 5" in sentence
    else:
        assert reason in sentence


@pytest.mark.parametrize("content", [b"", b"no image"])
def test_folder_names_a_bad_image(tmp_path, content):
    make_images(tmp_path, {"cat": 3})
    (tmp_path / "cat" / "1.png").write_bytes(content)
    assert f"Cannot read {tmp_path / 'cat' / '1.png'}" in refusal(f"folder:{tmp_path}")


def test_folder_names_a_truncated_image(tmp_path):
    noise = RNG.integers(0, 256, size=(64, 64, 3), dtype=np.uint8)
    (tmp_path / "cat").mkdir()
    for name in ("a.png", "b.jpg"):
        path = tmp_path / "cat" / name
        Image.fromarray(noise).save(path)
        path.write_bytes(path.read_bytes()[:-1000])
        assert f"Cannot read {path}: it is cut short" in refusal(f"folder:{tmp_path}")
        path.unlink()


@pytest.mark.parametrize("options", [{"size": 0}, {"size": (1, 2, 3)}, {"channels": 2}])
def test_folder_refuses_options(tmp_path, options):
    make_images(tmp_path, {"cat": 1})
    assert f"of {tmp_path}" in refusal(f"folder:{tmp_path}", **options)


def test_folder_without_pillow(tmp_path, monkeypatch):
    make_images(tmp_path, {"cat": 1})
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install 'flatlens[images]'" in refusal(f"folder:{tmp_path}")


# ------------------------------------------------------------------ the real thing


def real(folder: str) -> None:
    root = os.environ.get("FLATLENS_DATA")
    if not root:
        pytest.skip("FLATLENS_DATA is not set: no real data to read")
    if not (Path(root) / folder).is_dir():
        pytest.skip(f"the folder that FLATLENS_DATA names has no {folder}")


@pytest.mark.slow
def test_fashion_mnist_is_the_published_one():
    real("fashion-mnist")
    data = load("fashion-mnist")
    assert (data.x_train.shape, data.x_test.shape) == ((60_000, 784), (10_000, 784))
    assert data.y_train.bincount().tolist() == 10 * [6000]
    assert data.y_test.bincount().tolist() == 10 * [1000]
    assert data.y_train[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    # mean and deviation that everyone normalises with
    assert f"{data.x_train.mean():.4f} {data.x_train.std():.4f}" == "0.2860 0.3530"


def test_real_records_are_the_same_in_both_formats(tmp_path):
    real("cifar10")
    source = Path(os.environ["FLATLENS_DATA"]) / "cifar10" / "cifar-10-batches-bin"
    path = tmp_path / "test_batch"
    pixels, labels = read_cifar(source / "test_batch.bin")
    path.write_bytes(python_batch(pixels.reshape(-1, 3072), labels.tolist()))
    x, y = read_cifar_python(path)
    assert np.array_equal(x, pixels)
    assert np.array_equal(y, labels)


def test_cifar10_classes_0_and_1_are_the_published_ones():
    real("cifar10")
    data = load("cifar10", classes=(0, 1))
    assert (data.x_train.shape, data.x_test.shape) == ((10_000, 3, 32, 32), (2_000, 3, 32, 32))
    assert data.y_train.bincount().tolist() == [5000, 5000]
    assert data.y_test.bincount().tolist() == [1000, 1000]
    assert data.classes == 10
    assert (data.x_train.min(), data.x_train.max()) == (0, 1)
