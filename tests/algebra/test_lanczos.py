"""The largest singular values against plain SVDs: spectra that are kind, and those that are not."""

import pytest
import torch

from flatlens.algebra.lanczos import top_singular

SIZE = 40


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def with_spectrum(values: torch.Tensor, rows: int = SIZE, columns: int = SIZE) -> torch.Tensor:
    """A matrix of these singular values in random bases."""
    U = torch.linalg.qr(normal(rows, len(values), seed=1)).Q
    V = torch.linalg.qr(normal(columns, len(values), seed=2)).Q
    return (U * values) @ V.mT


def spectrum(*largest: float, rest: float = 0.0) -> torch.Tensor:
    return torch.tensor([*largest, *[rest] * (SIZE - len(largest))], dtype=torch.float64)


MATRICES = {
    "random": normal(SIZE, SIZE),
    "wide": normal(SIZE, 5 * SIZE),
    "low_rank": normal(SIZE, 2) @ normal(2, SIZE, seed=3),
    "rank_one": normal(SIZE, 1) @ normal(1, SIZE, seed=3),
    "clustered": with_spectrum(torch.linspace(1.0, 0.99, SIZE, dtype=torch.float64)),
    "decaying": with_spectrum(0.7 ** torch.arange(SIZE, dtype=torch.float64)),
    "second_twice": with_spectrum(spectrum(5.0, 3.0, 3.0, 2.0, rest=0.1)),
    "identity": torch.eye(SIZE, dtype=torch.float64),
    "projector": with_spectrum(spectrum(1.0, 1.0, 1.0, 1.0)),
    "zero": torch.zeros(SIZE, SIZE, dtype=torch.float64),
    "tiny": 1e-60 * normal(SIZE, SIZE),
    "huge": 1e60 * normal(SIZE, SIZE),
    "nearly_zero_rows": normal(SIZE, SIZE) * 10.0 ** -torch.arange(SIZE, dtype=torch.float64),
    "sparse": torch.diag(spectrum(3.0, 2.0, 1.0)),
    "largest_three_times": with_spectrum(spectrum(5.0, 5.0, 5.0, 2.0, 1.0, rest=0.5)),
    "largest_twice": with_spectrum(spectrum(5.0, 5.0, 1.0, rest=0.5)),
    "all_twice": with_spectrum(torch.arange(SIZE, 0, -1, dtype=torch.float64).div(2).ceil()),
}
every_matrix = pytest.mark.parametrize("name", MATRICES)


def gram(A: torch.Tensor):
    return lambda v: (A @ (A.mT @ v[..., None]))[..., 0]


def signs(b: int, n: int, seed: int = 4) -> torch.Tensor:
    return 2.0 * torch.randint(0, 2, (b, n), generator=generator(seed)).double() - 1


def agree(found, A: torch.Tensor, tolerance: float) -> None:
    """Relative to the largest; what is 0 is 0."""
    truth = torch.linalg.svdvals(A.double())[:, : found.values.shape[1]]
    off = (found.values.double() - truth).abs()
    assert bool((off <= tolerance * truth[:, :1]).all()), (found.values, truth)


@every_matrix
@pytest.mark.parametrize("top", [1, 3])
def test_largest_values(name, top):
    A = MATRICES[name].expand(3, -1, -1)
    found = top_singular(gram(A), signs(3, SIZE), top, 1e-8)
    assert bool(found.converged.all())
    agree(found, A, 1e-7)


@every_matrix
def test_loose_tolerance_is_kept_too(name):
    A = MATRICES[name].expand(3, -1, -1)
    found = top_singular(gram(A), signs(3, SIZE), 1, 1e-3)
    assert bool(found.converged.all())
    agree(found, A, 1e-3)


def test_mixed_batch_is_as_each_alone():
    """One matrix of each kind: the easy ones wait for the hard ones, and stay right."""
    A = torch.stack([m[:, :SIZE] for name, m in MATRICES.items()])
    found = top_singular(gram(A), signs(len(A), SIZE), 3, 1e-8)
    assert bool(found.converged.all())
    agree(found, A, 1e-7)


@pytest.mark.parametrize("name", [name for name in MATRICES if name not in ("tiny", "huge")])
def test_float32(name):
    A = MATRICES[name].float().expand(2, -1, -1)
    found = top_singular(gram(A), signs(2, SIZE).float(), 2, 1e-4)
    assert bool(found.converged.all())
    agree(found, A, torch.finfo(torch.float32).eps ** 0.5)  # 0 is the root of a rounding error


@pytest.mark.parametrize("seed", range(20))
def test_any_size(seed):
    """As many steps as dimensions are exact; there may be fewer values than were asked for."""
    g = generator(seed)
    n, m, rank = (int(torch.randint(1, 9, (1,), generator=g)) for _ in range(3))
    A = normal(4, n, rank, seed=seed) @ normal(4, rank, m, seed=seed + 100)
    found = top_singular(gram(A), signs(4, n, seed), 5, 1e-10)
    assert found.values.shape == (4, min(5, n))
    assert found.steps <= n
    assert bool(found.converged.all())
    truth = torch.nn.functional.pad(torch.linalg.svdvals(A), (0, n))[:, : min(5, n)]
    # σ = √θ: what is exactly 0 is found as the root of a rounding error
    assert torch.allclose(found.values, truth, rtol=1e-7, atol=1e-7 * float(truth.max()))


def test_the_last_block_may_be_smaller():
    A = normal(2, SIZE, SIZE)
    found = top_singular(gram(A), signs(2, SIZE), 3, 0.0, max_steps=SIZE)
    assert found.steps == SIZE  # 13 blocks of three, and one vector
    assert bool(found.converged.all())
    agree(found, A, 1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_values_are_never_above_the_largest(seed):
    A = normal(5, 200, 150, seed=seed)
    truth = torch.linalg.svdvals(A)[:, 0]
    for steps in (1, 2, 5, 10, 30):
        found = top_singular(gram(A), signs(5, 200, seed), 1, 1e-12, max_steps=steps)
        assert bool((found.values[:, 0] <= truth * (1 + 1e-12)).all())


@pytest.mark.parametrize("tolerance", [1e-2, 1e-3])
@pytest.mark.parametrize("seed", range(5))
def test_tolerance_on_the_dense_edge_of_a_random_spectrum(seed, tolerance):
    """No gap at all; the values of a large random matrix are off by less than the tolerance."""
    A = normal(4, 300, 300, seed=seed)
    found = top_singular(gram(A), signs(4, 300, seed), 3, tolerance)
    assert bool(found.converged.all())
    agree(found, A, tolerance)


def test_unconverged_values_are_flagged():
    A = normal(3, 200, 200)
    found = top_singular(gram(A), signs(3, 200), 2, 1e-10, max_steps=6)
    assert found.steps == 6
    assert not bool(found.converged.any())


def test_flag_is_each_operators_own():
    """The identity is known at once, a random matrix is not."""
    A = torch.stack([torch.eye(200, dtype=torch.float64), normal(200, 200)])
    found = top_singular(gram(A), signs(2, 200), 1, 1e-10, max_steps=6)
    assert found.converged[:, 0].tolist() == [True, False]
    agree(top_singular(gram(A[:1]), signs(1, 200), 1, 1e-10, max_steps=6), A[:1], 1e-10)


def test_fewer_steps_where_there_is_a_gap():
    clear = with_spectrum(spectrum(10.0, rest=1.0)).expand(1, -1, -1)
    dense = MATRICES["random"].expand(1, -1, -1)
    few, many = (top_singular(gram(A), signs(1, SIZE), 1, 1e-6).steps for A in (clear, dense))
    assert few < many
