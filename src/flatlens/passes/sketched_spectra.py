"""Largest singular values and participation ratios of a chunk, from products alone.

The largest singular values come from block Lanczos on A A^T per sample and layer, with products by
A from ``forward_products``. The participation ratio is (tr G)^2 / tr G^2 of G = A A^T, both from
random directions.

If products have an error, Lanczos finds the space and gradients alone give the values: for unit
vectors u, ||A^T u|| never exceeds the largest singular value. Lanczos then works on A A^T + E, so
the error of sigma^2 is at most its residual plus ||E||. The norm ||E|| is at most the root of the
products' summed squared errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flatlens.algebra.lanczos import top_singular
from flatlens.algebra.spectra import rank_tolerance
from flatlens.algebra.sums import largest_entry, power_of_two, side_by_side
from flatlens.capture.inputs import check_finite
from flatlens.capture.layout import Layout, split
from flatlens.passes.derivative_rows import Setup
from flatlens.passes.difference_steps import times_per_sample
from flatlens.passes.directions import Signs
from flatlens.passes.forward_products import ForwardProducts, Replay, Way
from flatlens.passes.needs import INPUT_SPECTRUM, LAYER_SPECTRA, LAYER_TOPS, THROUGH
from flatlens.passes.request import SketchOptions
from flatlens.passes.segments import Key

MAX_STEPS = 100
LAYER_MOMENTS = 4  # random directions for a layer's participation ratio


class SpectrumFinder:
    """The computation of the spectra of one chunk.

    Attributes:
        columns: the results, by key.
        spread: squared standard error of each sample's participation ratio at the input.
        converged: whether every largest singular value met the tolerance, on its device.
        input_error: largest error of sigma_1 at the input, summed over samples; 0 if products have
            no error.
        layer_error: largest error of sigma_1 at layers, summed over samples and layers.
        products: products with the Jacobian.
    """

    def __init__(
        self,
        setup: Setup,
        signs: Signs,
        options: SketchOptions,
        needs: frozenset[str],
        replay: Replay,
        way: Way,
    ) -> None:
        self.setup, self.signs, self.options, self.needs = setup, signs, options, needs
        self.converged = torch.ones((), dtype=torch.bool, device=setup.f.device)
        at_layers = options.layers and LAYER_TOPS in needs
        plan = setup.plan
        wanted = range(len(plan.edges)) if at_layers else plan.inputs
        self.products = ForwardProducts(setup, signs, replay, wanted, way, options.tolerance)
        self._by_edges: dict[tuple[int, ...], dict[str, Tensor]] = {}
        self.columns: dict[Key, Tensor] = {}
        moments = options.directions if options.layers else 0
        at_input = dict(self._look(plan.inputs, moments, INPUT_SPECTRUM in needs))
        self.spread = at_input.pop("spread")
        self.input_error = at_input.pop("singular_error").sum()
        self.layer_error = torch.zeros_like(self.input_error)
        self.columns |= {("input", name): values for name, values in at_input.items()}
        if LAYER_TOPS in needs:
            for i in range(len(plan.layers)):
                self._look_at_layer(i)

    def _look_at_layer(self, call: int) -> None:
        q, whole = self.setup.plan.layers[call], LAYER_SPECTRA in self.needs
        columns = dict(self._look([q.total], LAYER_MOMENTS, whole))
        del columns["spread"]
        self.layer_error = self.layer_error + columns.pop("singular_error").sum()
        if THROUGH in self.needs and q.total != q.through:
            B = self._look([q.through], LAYER_MOMENTS, whole)
            columns |= {"singular_through": B["singular"], "rank_through": B["rank"]}
            columns["gap_norm"] = torch.full_like(B["dimension"], torch.nan)
        if THROUGH not in self.needs:
            columns["singular_through"] = torch.full_like(columns["singular"], torch.nan)
            columns["gap_norm"] = torch.full_like(columns["dimension"], torch.nan)
            if q.total != q.through and self.options.layers:
                self.signs.skip(1 + LAYER_MOMENTS)
        self.columns |= {("layer", call, name): values for name, values in columns.items()}

    def _look(self, edges: list[int], moments: int, whole: bool) -> dict[str, Tensor]:
        """Compute the spectrum of the derivative at some edges, once.

        Args:
            edges: the numbers of the edges.
            moments: random directions for the participation ratio.
            whole: whether the ratio is asked for; if not, its directions are drawn and discarded.
        """
        key, plan = tuple(edges), self.setup.plan
        if key not in self._by_edges:
            shape = self.signs.width, sum(plan.kept_rows[k][1] for k in edges)
            if self.options.layers or edges == plan.inputs:
                gram = GramProduct(self.setup, edges, self.products, self.signs)
                options = self.options
                top = options.top if edges == plan.inputs else options.layer_top
                count = moments if whole else 0
                self._by_edges[key] = self._spectrum(gram, shape, min(top, *shape), count)
                self.signs.skip(moments - count)
            else:
                self._by_edges[key] = _unknown(self.setup.batch, min(shape), self.setup.f.device)
        return self._by_edges[key]

    def _spectrum(
        self, gram: GramProduct, shape: tuple[int, int], top: int, moments: int
    ) -> dict[str, Tensor]:
        """Compute the top singular values (the others are NaN) and the participation ratio."""
        looked: list[tuple[Tensor, Tensor]] = []

        def product(v: Tensor) -> Tensor:
            looked.append((v, gram(v)))
            return looked[-1][1]

        start, tolerance = self.signs.next(), self.options.tolerance
        result = top_singular(product, start, top, tolerance, MAX_STEPS)
        largest, precision = result.values[:, 0], self.setup.forward.precision
        error = gram.error_norm()  # of A A^T
        rounding = 64 * torch.finfo(precision).eps
        accurate = error <= (tolerance + rounding) * largest.square()
        result = result._replace(converged=result.converged & accurate[:, None])
        self.converged = self.converged & result.converged.all()
        limit = rank_tolerance(precision, *shape)
        within = error + result.residual[:, 0]  # of sigma^2
        sigma_error = torch.where(error > 0, within / (2 * largest), 0.0) / gram.scale
        values = _small_values(result.values / gram.scale[:, None], looked, gram, limit)
        looked.clear()
        singular = values.new_full((len(values), min(shape)), torch.nan)
        known = torch.where(result.converged, values, torch.nan)
        known[:, 0] = values[:, 0]  # kept also if it did not converge
        singular[:, : known.shape[1]] = known
        unknown = _unknown(len(singular), min(shape), singular.device)
        known_columns = {**unknown, "singular": singular, "singular_error": sigma_error}
        if moments == 0:
            return known_columns
        dimension, spread = _participation_ratio(gram, self.signs, moments)
        return {**known_columns, "dimension": dimension, "spread": spread}


class GramProduct:
    """The product v -> A A^T v: a gradient A^T v, and the product of A with it.

    A is df/dx at the edges, or R^T df/dx for a loss. The product is taken with ``scale`` A, because
    squares of a small or large A leave float32.

    Attributes:
        scale: a power of two for each sample, from the first product.
        errors: the norm of each product's error for each sample, if products have errors.
    """

    def __init__(
        self, setup: Setup, edges: list[int], products: ForwardProducts, signs: Signs
    ) -> None:
        self.numbers = [k for k in edges if products.alive(k)]
        self.edges = [setup.plan.edges[k] for k in self.numbers]
        self.layouts = [setup.plan.kept_rows[k][0] for k in self.numbers]
        self.f, self.signs, self.start = setup.f, signs, setup.forward.start
        self.products, self.precision = products, setup.forward.precision
        self.scale = setup.f.new_ones(setup.batch, dtype=torch.float64)
        self.errors: list[Tensor] = []
        self._scaled = False
        self._compared = False

    def __call__(self, v: Tensor) -> Tensor:
        if not self.edges:
            return torch.zeros_like(v)
        g = tuple(t.detach() for t in self._onto(v))
        if not self._scaled:
            entries = [split(t, layout, len(v)).flatten(1) for t, layout in self._with_layouts(g)]
            self.scale = power_of_two(torch.stack([largest_entry(t) for t in entries]).amax(0))
            self._scaled = True
        factors = self.scale.to(v)
        g = tuple(times_per_sample(t, layout, factors) for t, layout in self._with_layouts(g))
        w, error = self._times(g, factors)
        if error is None and not self._compared:
            self._compared = True
            if not self.products.second_derivative_agrees(v, w, self._energy(g)):
                w, error = self._times(g, factors)
        if error is None:
            return w
        self.errors.append(error * self.scale)
        return _exact_along(v, w, self._energy(g))

    def _times(self, g: Sequence[Tensor], factors: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return A g, or R^T A g for a loss, and its error, which is None if it is rounding."""
        w, error = self.products.times(self.numbers, g)
        # A second derivative can be NaN where the first one is finite.
        check_finite(w, self.start, f"{self.products.way.name} (Lanczos needs it)")
        return self.signs.from_outputs(w) * factors[:, None], error

    def _energy(self, g: Sequence[Tensor]) -> Float[Tensor, " b"]:
        """Return ||g||^2 of each sample."""
        pairs = self._with_layouts(g)
        batch = len(self.scale)
        energy = [split(t, k, batch).flatten(1).double().square().sum(1) for t, k in pairs]
        return torch.stack(energy).sum(0)

    def error_norm(self) -> Float[Tensor, " b"]:
        """Return an upper bound of ||E||; A A^T + E is the operator of all products so far."""
        if not self.errors:
            return torch.zeros_like(self.scale)
        return torch.stack(self.errors).square().sum(0).sqrt()

    def jacobian_rows(self, v: Tensor) -> Tensor:
        """Return A^T v of each sample, [b, entries]."""
        pairs = self._with_layouts(tuple(t.detach() for t in self._onto(v)))
        return side_by_side([split(g, layout, len(v)).flatten(1) for g, layout in pairs])

    def _with_layouts(self, grads: Sequence[Tensor]) -> Iterator[tuple[Tensor, Layout | None]]:
        return zip(grads, self.layouts, strict=True)

    def _onto(self, v: Tensor) -> tuple[Tensor, ...]:
        directions = self.signs.to_outputs(v).contiguous()
        return torch.autograd.grad(self.f, self.edges, directions, retain_graph=True)


def _exact_along(v: Tensor, w: Tensor, energy: Float[Tensor, " b"]) -> Tensor:
    """Make w = A A^T v exact along v, where the exact value is ``energy`` = ||A^T v||^2."""
    wide, length = w.double(), v.double().square().sum(1)
    missing = torch.where(length > 0, (energy - (v.double() * wide).sum(1)) / length, 0.0)
    return (wide + missing[:, None] * v.double()).to(w)


def _participation_ratio(gram: GramProduct, signs: Signs, moments: int) -> tuple[Tensor, Tensor]:
    """Estimate each sample's participation ratio and squared standard error by jackknife."""
    traces, squares, before = [], [], len(gram.errors)
    for _ in range(moments):
        v = signs.next()
        w = gram(v).double()
        traces.append((v * w).sum(1))
        squares.append(w.square().sum(1))
    trace, square = torch.stack(traces, 1), torch.stack(squares, 1)  # [b, moments]
    traces_sum, squares_sum = trace.sum(1, keepdim=True), square.sum(1, keepdim=True)
    full_ratio = _ratio(traces_sum[:, 0], squares_sum[:, 0], moments)
    without = _ratio(traces_sum - trace, squares_sum - square, moments - 1)
    dimension = moments * full_ratio - (moments - 1) * without.mean(1)  # jackknife: less bias
    spread = (without - without.mean(1, keepdim=True)).square().sum(1)
    spread = (moments - 1) / moments * spread
    if len(gram.errors) > before:
        # The trace is exact. An error of norm e changes ||w||^2 by at most 2 ||w|| e + e^2.
        e = torch.stack(gram.errors[before:], 1)
        square_error = (2 * square.sqrt() * e + e.square()).sum(1)
        share = torch.where(squares_sum[:, 0] > 0, square_error / squares_sum[:, 0], 0.0)
        spread = spread + (dimension * share).square()
    return dimension, spread


def _ratio(trace: Tensor, square: Tensor, count: int) -> Tensor:
    """Return (mean trace)^2 / mean square, from sums over ``count`` terms; 0 if both are 0."""
    return torch.where(square > 0, trace.square() / (square * count), 0.0)


def _unknown(b: int, r: int, device: torch.device) -> dict[str, Tensor]:
    """Return NaN columns for a spectrum that was not asked for."""
    options: Any = {"dtype": torch.float64, "device": device}
    return {
        "singular": torch.full((b, r), torch.nan, **options),
        "rank": torch.full((b,), -1.0, **options),
        "dimension": torch.full((b,), torch.nan, **options),
        "spread": torch.full((b,), torch.nan, **options),
        "singular_error": torch.zeros(b, **options),
    }


def _small_values(
    values: Tensor, looked: list[tuple[Tensor, Tensor]], gram: GramProduct, tolerance: float
) -> Tensor:
    """Replace singular values that A A^T cannot tell from zero by those of A itself.

    A A^T squares the condition number, so a zero appears as sqrt(eps) of the largest value. The
    vectors of Lanczos span the space that it explored. A^T times their top combinations has zeros
    where A has, and values below ``tolerance`` of the largest are zero (theory 3). The others are
    lower ends, because below 1e-7 of the largest (float32: 1e-3) Lanczos may have missed some of
    their vectors. If products have an error, all values are taken from A.
    """
    if values.shape[1] == 1 and not gram.errors:
        return values
    poor = values[:, -1] < torch.finfo(gram.precision).eps ** 0.25 * values[:, 0]
    if gram.errors:
        poor = torch.ones_like(poor)
    if not bool(poor.any()):
        return values
    V, W = (torch.stack(vectors, 1) for vectors in zip(*looked, strict=True))  # [b, steps, n]
    T = V.double() @ W.double().mT
    vectors = torch.linalg.eigh((T + T.mT) / 2)[1][..., -values.shape[1] :]
    combined = (vectors.mT @ V.double()).to(V)
    A = torch.stack([gram.jacobian_rows(v) for v in combined.unbind(1)], 1)[poor]
    s = torch.linalg.svdvals(A.double())
    values = values.clone()
    values[poor] = 0.0  # also if a dead input leaves fewer entries
    values[poor, : s.shape[1]] = torch.where(s < tolerance * s[:, :1], 0.0, s)
    return values
