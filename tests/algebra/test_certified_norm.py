"""The upper end of a norm is proven: it is never below the truth, and no wider than it need be."""

import math

import numpy as np
import pytest
import torch

from flatlens.algebra import certified_norm
from flatlens.algebra.certified_norm import largest_eigenvalue, least_mass


def crowd(n, g, *above):
    """Random values in [0, 1], and a few above them."""
    return torch.cat([torch.rand(n - len(above), generator=g), torch.tensor(above)])


def few_distinct(n, g):
    return torch.tensor([0.0, 0.5, 0.999, 1.0])[torch.randint(4, (n,), generator=g)]


SPECTRA = {
    "evenly_spread": lambda n, g: torch.linspace(0, 1, n),
    "one_value_above_a_crowd": lambda n, g: crowd(n, g, 1.02),
    "twins_above_a_crowd": lambda n, g: crowd(n, g, 1.001, 1.001),
    "crowd_at_the_top": lambda n, g: 1 - torch.rand(n, generator=g) ** 4,
    "steep": lambda n, g: torch.logspace(-12, 0, n),
    "few_distinct": few_distinct,
    "squares_of_gaussian": lambda n, g: torch.linalg.svdvals(torch.randn(n, n, generator=g)) ** 2,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", SPECTRA)
def test_the_true_value_lies_between_the_ends(name, dtype):
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        d = SPECTRA[name](100 + 20 * seed, g).to(dtype)
        top = largest_eigenvalue(lambda v, d=d: v * d, d, max_steps=60, residual=1e-2, width=0.1)
        true, eps = float(d.max()), 8 * torch.finfo(dtype).eps
        assert top.value <= true * (1 + eps)
        assert true <= top.upper * (1 + eps)
        assert top.upper <= 1.25 * true


def test_the_check_can_fail(monkeypatch):
    """With more mass than random starts have, the upper end falls below the largest value."""
    monkeypatch.setattr(certified_norm, "least_mass", lambda runs, size: 3 * runs / size)
    missed = 0
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        d = SPECTRA["one_value_above_a_crowd"](5000, g)
        top = largest_eigenvalue(lambda v, d=d: v * d, d, max_steps=16, residual=1.0, width=9.0)
        missed += top.upper < float(d.max())
    assert missed


@pytest.mark.parametrize("runs", [1, 2, 4])
def test_the_starts_have_the_mass_that_the_proof_takes(runs, monkeypatch):
    """At a risk of 5 % the masses of random starts fall below the bound in at most 5 %."""
    monkeypatch.setattr(certified_norm, "RISK", 0.05)
    rng = np.random.default_rng(0)
    v = rng.standard_normal((20_000, runs, 30))
    masses = ((v[..., 0] / np.linalg.norm(v, axis=-1)) ** 2).sum(1)
    share = (masses <= least_mass(runs, 30)).mean()
    assert 0.03 < share <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / len(masses))


def test_a_map_of_low_rank_is_seen_whole():
    u = torch.nn.functional.normalize(torch.randn(300, dtype=torch.float64), dim=0)
    top = largest_eigenvalue(
        lambda v: 3 * (v @ u)[:, None] * u, u, max_steps=60, residual=1e-7, width=1e-3
    )
    assert top.value == pytest.approx(3, rel=1e-12)
    assert 3 * (1 - 1e-12) <= top.upper <= 3 * (1 + 1e-6)


def test_nothing_has_the_norm_zero():
    zero = torch.zeros(100)
    assert largest_eigenvalue(lambda v: v * 0, zero, max_steps=9, residual=0.1, width=0.1) == (
        0,
        0,
        0,
    )
