"""Data sets: what is embedded is what UCI published; a bad file is refused in one sentence."""

from pathlib import Path

import numpy as np
import pytest
import torch

from flatlens.errors import FlatlensError
from flatlens.experiments.data import load

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


@pytest.mark.parametrize("name", ["mnist", "npz", "npz:", ""])
def test_unknown_names_are_refused(name):
    with pytest.raises(FlatlensError, match="Unknown data"):
        load(name)
