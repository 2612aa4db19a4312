"""The same Probe for networks that are too large for one product per output.

- Sums of squares (sharpness, its split, untied and adaptive) are means over random output
  directions v of +-1: E ||grad (v . f)||^2 = ||grad f||_F^2. First derivatives only, through the
  same rules as the exact pass; the spread over directions is the standard error.
- Largest singular values come from block Lanczos on A A^T per sample and layer, with products by A
  from the second derivative of v . f (attention then runs its plain kernel, which has one).
- The participation ratio is (tr G)^2 / tr G^2 of G = A A^T, both from random directions.

Where a head narrower than the outputs makes the exact pass as cheap, that one is taken.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatlens.algebra.lanczos import top_singular
from flatlens.algebra.spectra import rank_tolerance
from flatlens.algebra.traces import FEWEST
from flatlens.capture.inputs import Inputs, batches
from flatlens.capture.positions import split
from flatlens.capture.recorder import Plan
from flatlens.errors import FlatlensError, first_line
from flatlens.metrics import sharpness
from flatlens.passes.exact import Pass, Root, probe_batches
from flatlens.passes.products import Chunk, Forward, Key, Products, beside
from flatlens.probes import Probe, Sketch

MEANS = {
    *("grad", "adaptive", "invariant", "grad_weight", "grad_bias", "untied", "untied_bias"),
    "energy",
}
LARGEST = {"bypass", "chain", "beside"}
MAX_DIRECTIONS = 4096
MAX_STEPS = 100
EXACT_ENOUGH = 64  # products that are never worth estimating
TIMES_DEARER = 4  # an exact pass may cost this much more than a sketch before that is taken
MOMENTS = 4  # random directions for a layer's participation ratio
KEPT = 4  # a second derivative keeps as much as this many rows of all layers
LOOK = 5  # what Lanczos and the moments of a layer cost, in products with all their algebra
SPECTRA = 1000  # so many products double their cost: all inner products of their rows are taken


def sketch(
    model: nn.Module,
    x: Any,
    *,
    directions: int = 32,
    seed: int = 0,
    rtol: float | None = None,
    top: int = 3,
    tolerance: float = 1e-2,
    layers: bool = True,
    chunk: int | None = None,
    memory: int | None = None,
    output: Any = None,
    weight_norm: str = "operator",
) -> Probe:
    """Estimate what ``probe`` measures, from a few random output directions.

    Args:
        model: as for ``probe``; so are x, chunk, memory, output and weight_norm.
        directions: random output directions per sample.
        seed: of the directions; a sample has its own, the same in any chunk, order or share.
        rtol: add directions until the relative standard error of the sharpness is at most this;
            exact where that would take as many as all products.
        top: singular values per sample and layer.
        tolerance: of Lanczos, relative to the squared singular value.
        layers: False looks for singular values at the network's input alone, which is many times
            cheaper; those of the layers, and so ``nmls``, and the local dimension are NaN.

    Example:
        >>> import torch, flatlens as fl
        >>> net = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU(),
        ...                           torch.nn.Linear(300, 200)).double()
        >>> x = torch.randn(4, 300, dtype=torch.float64)
        >>> p, q = fl.sketch(net, x), fl.probe(net, x)
        >>> abs(fl.sharpness(p) / fl.sharpness(q) - 1) < 0.1
        True
        >>> abs(fl.mls(p) / fl.mls(q) - 1) < 0.001
        True
    """
    check_arguments(model, x)
    inputs = (batch for batch, _ in batches(x))
    return sketch_batches(
        model, inputs, directions=directions, seed=seed, rtol=rtol, top=top, tolerance=tolerance,
        layers=layers, chunk=chunk, memory=memory, output=output, weight_norm=weight_norm,
    )  # fmt: skip


def check_arguments(model: Any, x: Any) -> None:
    """Refuse what is no model and what holds no samples."""
    if not isinstance(model, nn.Module):
        raise FlatlensError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
    if not (hasattr(x, "__iter__") or hasattr(x, "__getitem__")):
        raise FlatlensError(
            f"x is {'None' if x is None else f'a {type(x).__name__}'}; give a tensor with samples "
            "first, a tuple or dict of tensors, or an iterable of batches"
        )


def sketch_batches(
    model: nn.Module,
    inputs: Iterable[Inputs],
    *,
    directions: int = 32,
    seed: int = 0,
    rtol: float | None = None,
    top: int = 3,
    tolerance: float = 1e-2,
    layers: bool = True,
    layer_top: int | None = None,
    auto: bool = False,
    budget: float | None = None,
    short: bool = False,
    adaptive: bool = True,
    **options: Any,
) -> Probe:
    """``sketch`` over batches of inputs, taken as they come.

    ``layer_top``: singular values of a layer, if not ``top``. ``auto``: exact where that is cheap
    enough, or within ``budget`` seconds; a note says which. ``short``: sharpness alone, if exact;
    without ``adaptive`` no adaptive sharpness, if exact.
    """
    if directions < 2:
        raise FlatlensError(f"directions={directions} give no standard error; use 2 or more")
    if rtol is not None and not rtol > 0:
        raise FlatlensError(f"rtol={rtol} is no relative error; give a positive number")
    if top < 1:
        raise FlatlensError(f"top={top} singular values cannot be found; ask for 1 or more")

    run = partial(
        SketchRun, directions=directions, seed=seed, rtol=rtol, top=top, tolerance=tolerance,
        layers=layers, layer_top=layer_top or top, auto=auto, budget=budget, short=short,
        adaptive=adaptive,
    )  # fmt: skip
    return probe_batches(model, inputs, run=run, **options)


class ExactIsCheaperError(Exception):
    """The first chunk tells that rtol takes this many directions, no fewer than all products."""


class SketchRun(Pass):
    """A Pass whose chunks are estimated."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        output: Any,
        chunk: int | None,
        memory: int | None,
        root: Root | None,
        *,
        directions: int,
        seed: int,
        rtol: float | None,
        top: int,
        tolerance: float,
        layers: bool = True,
        layer_top: int = 1,
        auto: bool = False,
        budget: float | None = None,
        short: bool = False,
        adaptive: bool = True,
    ) -> None:
        super().__init__(model, dtype, output, chunk, memory, root, short=short, adaptive=adaptive)
        self.count, self.seed, self.rtol = directions, seed, rtol
        self.top, self.tolerance, self.spectra_of_layers = top, tolerance, layers
        self.layer_top = layer_top
        self.auto, self.budget = auto, budget
        self.exactly = auto  # the exact pass is taken
        self.exact_rows = 0  # its products
        self.used: list[int] = []
        self.replicates: list[dict[Key, Tensor]] = []  # per chunk: sums over samples, by direction
        self.seen: Counter[int] = Counter()  # equal samples: each has directions of its own
        self.sum, self.variance = 0.0, 0.0  # of the sharpness, over samples so far
        self.converged = True

    def take(self, inputs: Inputs) -> None:
        """Estimate one batch of inputs, or measure it exactly where that is no dearer."""
        asked = self.chunk
        try:
            super().take(inputs)
        except ExactIsCheaperError as why:
            self.auto, self.count = False, why.args[0]
            self.chunk, self.plan = asked, None
            super().take(inputs)

    def _rows_needed(self, solo: Forward) -> int:
        self.exact_rows = exact = super()._rows_needed(solo)
        self.exactly = exact <= (EXACT_ENOUGH if self.auto else self.count)
        if self.exactly and not self.auto:
            why = "" if self.rtol is None else f" (rtol={self.rtol})"
            told = f"exact: {exact} products are no more than {self.count} directions{why}"
            self.notes.append(told)
        if self.auto and not (exact <= EXACT_ENOUGH and self.budget is None):
            self._choose(exact, solo)
        self.short &= self.exactly
        self.adaptive |= not self.exactly
        return exact if self.exactly else KEPT

    def _choose(self, exact: int, solo: Forward) -> None:
        """Exact or not, by the number of products each takes; say so."""
        sketched = self.count + LOOK * (len(solo.recorder.calls) + 1)
        cost = exact * (1 + exact / SPECTRA)
        self.exactly = exact <= EXACT_ENOUGH or cost <= TIMES_DEARER * sketched
        told = f"{exact} products a sample against about {sketched}"
        if self.budget is not None:
            start = time.perf_counter()
            for _ in range(3):
                torch.autograd.grad(solo.f.sum(), solo.edges, retain_graph=True, allow_unused=True)
            # per product: itself, and as much twice for the layers
            seconds = (time.perf_counter() - start) * self.batch
            self.exactly = exact <= sketched or exact * seconds <= self.budget
            told += f", {exact * seconds:.3g} s against {sketched * seconds:.3g} s"
            told += f" with a budget of {self.budget:g} s"
        self.notes.append(f"{'exact' if self.exactly else 'sketched'}: {told}")

    def _forward(self, inputs: Inputs, plan: Plan) -> Forward:
        if self.exactly:
            return super()._forward(inputs, plan)
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no second derivative
            return super()._forward(inputs, plan)

    def _directions(self, f: Tensor, n: int) -> Tensor | None:
        self.rows = super()._directions(f, n)
        return self.rows if self.exactly else f.new_empty(n, 1, f.shape[1])

    def _measure(self, inputs: Inputs) -> Chunk:
        if self.exactly:
            return super()._measure(inputs)
        plan = self._products(inputs)
        draw = _Signs(plan.f, self._streams(inputs), self.rows)
        chunk = self._average(plan, draw)
        chunk.columns |= self._spectra(plan, chunk, draw)
        return chunk

    def _streams(self, inputs: Inputs) -> list[np.random.Generator]:
        """Random numbers that belong to a sample by what it holds, not by where it stands."""
        streams = []
        for i in range(inputs.n):
            digest = hashlib.blake2b(digest_size=8)
            for t in inputs.tensors:
                flat = t[i].detach().cpu().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy().tobytes())
            key = int.from_bytes(digest.digest(), "big")
            streams.append(np.random.default_rng([self.seed, key, self.seen[key]]))
            self.seen[key] += 1
        return streams

    # -- sums of squares -------------------------------------------------------------------------

    def _average(self, plan: Products, draw: _Signs) -> Chunk:
        """Means over directions of what is a mean; sums over samples are kept by direction."""
        chunk: Chunk | None = None
        series: dict[Key, list[Tensor]] = {}
        count = 0
        while chunk is None or self._unsure(self._sharpness(series), count):
            for _ in range(self.count):
                plan.directions = draw.outputs(draw.next()).unsqueeze(1)
                found = plan.run(again=True)
                count += 1
                for i in range(len(plan.calls)):  # of one row, the singular value is the norm
                    norm = found.columns["layer", i, "singular"][:, 0]
                    found.columns["layer", i, "energy"] = norm.square()
                for key, column in found.columns.items():
                    if key[-1] in MEANS:
                        series.setdefault(key, []).append(column.double().sum(0))
                if chunk is None:
                    chunk = found
                else:
                    _merge(chunk, found)
            wanted = self._wanted(self._sharpness(series), count)
            if wanted >= self.exact_rows and not self.chunks:
                raise ExactIsCheaperError(round(wanted))
        for key, column in chunk.columns.items():
            if key[-1] in MEANS:
                chunk.columns[key] = column / count
        chunk.sums = {name: total / count for name, total in chunk.sums.items()}
        total = self._sharpness(series)
        self.sum += float(total.mean())
        self.variance += float(total.var()) / count
        self.used.append(count)
        self.replicates.append({key: torch.stack(parts) for key, parts in series.items()})
        return chunk

    def _sharpness(self, series: dict[Key, list[Tensor]]) -> Tensor:
        """The sum over samples of a chunk, by direction."""
        shares = [torch.stack(v) for k, v in series.items() if k[0] == "parameter" and "grad" in k]
        return torch.stack(shares).sum(0) if shares else torch.zeros(2)

    def _unsure(self, total: Tensor, count: int) -> bool:
        """Whether this chunk needs more directions, and may have them."""
        return self._wanted(total, count) > count and count + self.count <= self._limit

    @property
    def _limit(self) -> int:
        return min(MAX_DIRECTIONS, self.exact_rows)

    def _wanted(self, total: Tensor, count: int) -> float:
        """About how many directions of this chunk make all until here known to rtol."""
        if self.rtol is None:
            return 0.0
        variance = float(total.var())
        target = (self.rtol * (self.sum + float(total.mean()))) ** 2 - self.variance
        if variance == 0:
            return 0.0
        return max(float(FEWEST), variance / target) if target > 0 else np.inf

    # -- spectra ---------------------------------------------------------------------------------

    def _spectra(self, plan: Products, chunk: Chunk, draw: _Signs) -> dict[Key, Tensor]:
        f = plan.f
        v0 = draw.outputs(draw.next()).requires_grad_()
        with _second_derivative(), torch.enable_grad():
            wanted = range(len(plan.edges)) if self.spectra_of_layers else plan.inputs
            edges = [plan.edges[k] for k in wanted]
            grads = torch.autograd.grad(f, edges, v0, create_graph=True, allow_unused=True)
            backs = dict(zip(wanted, grads, strict=True))
        found: dict[tuple[int, ...], dict[str, Tensor]] = {}

        def look(edges: list[int], moments: int) -> dict[str, Tensor]:
            if (key := tuple(edges)) not in found:
                shape = draw.width, sum(plan.rows[k][1] for k in edges)
                if self.spectra_of_layers or edges == plan.inputs:
                    gram = _Gram(plan, edges, backs, v0, draw)
                    top = self.top if edges == plan.inputs else self.layer_top
                    found[key] = self._look(gram, shape, min(top, *shape), moments)
                else:
                    found[key] = _unknown(len(f), min(shape), v0.device)
            return found[key]

        columns: dict[Key, Tensor] = {}
        moments = self.count if self.spectra_of_layers else 0
        for name, values in look(plan.inputs, moments).items():
            columns["input", name] = values
        for i, (total, through) in enumerate(zip(plan.total, plan.through, strict=True)):
            for name, values in look([total], MOMENTS).items():
                if name != "jackknife":
                    columns["layer", i, name] = values
            if total != through:
                B = look([through], MOMENTS)
                columns["layer", i, "singular_through"] = B["singular"]
                columns["layer", i, "rank_through"] = B["rank"]
                columns["layer", i, "gap_norm"] = torch.full_like(B["dimension"], torch.nan)
        chunk.columns = {k: v for k, v in chunk.columns.items() if k[-1] not in _SPECTRAL}
        jackknife = columns.pop(("input", "jackknife"))
        self.replicates[-1]["input", "jackknife"] = jackknife
        return columns

    def _look(
        self, gram: _Gram, shape: tuple[int, int], top: int, moments: int
    ) -> dict[str, Tensor]:
        """Top singular values (NaN beyond), and the participation ratio from random directions."""
        draw, r = gram.draw, min(shape)
        looked: list[tuple[Tensor, Tensor]] = []

        def product(v: Tensor) -> Tensor:
            looked.append((v, gram(v)))
            return looked[-1][1]

        found = top_singular(product, draw.next(), top, self.tolerance, MAX_STEPS)
        self.converged = self.converged and bool(found.converged.all())
        values = _small(found.values, looked, gram, rank_tolerance(draw.f.dtype, *shape))
        looked.clear()
        singular = values.new_full((len(values), r), torch.nan)
        known = torch.where(found.converged, values, torch.nan)
        known[:, 0] = values[:, 0]  # the largest is given with its flag
        singular[:, : known.shape[1]] = known
        if moments == 0:
            return {**_unknown(len(singular), r, singular.device), "singular": singular}
        first, second = [], []
        for _ in range(moments):
            v = draw.next()
            w = gram(v).double()
            first.append((v * w).sum(1))
            second.append(w.square().sum(1))
        one, two = torch.stack(first, 1), torch.stack(second, 1)  # [b, moments]
        whole = _ratio(one.sum(1), two.sum(1), moments)
        without = _ratio(
            one.sum(1, keepdim=True) - one, two.sum(1, keepdim=True) - two, moments - 1
        )
        dimension = moments * whole - (moments - 1) * without.mean(1)  # jackknife: less bias
        spread = (moments - 1) / moments * (without - without.mean(1, keepdim=True)).square().sum(1)
        rank = torch.full((len(singular),), -1.0, dtype=torch.float64, device=singular.device)
        return {"singular": singular, "rank": rank, "dimension": dimension, "jackknife": spread}

    # -- standard errors -------------------------------------------------------------------------

    def finish(self, weight_norm: str) -> Probe:
        """One Probe with the errors of what was estimated."""
        p = super().finish(weight_norm)
        if not self.replicates:
            return p
        notes = []
        errors = self._errors(p)
        if self.rtol is not None and errors["sharpness"] > self.rtol * sharpness(p):
            notes.append(f"rtol={self.rtol} was not met within {self._limit} directions")
        if not self.converged:
            notes.append(
                f"Lanczos did not meet tolerance={self.tolerance} in {MAX_STEPS} steps: largest "
                "singular values are lower ends"
            )
        made = Sketch(min(self.used), self.seed, errors, self._layer_errors(p), self.converged)
        return Probe(**{**vars(p), "sketch": made, "notes": [*p.notes, *notes]})

    def _error(self, weights: dict[Key, float]) -> float:
        """The standard error of sum_k weight_k mean_i column_k."""
        variance = 0.0
        for chunk in self.replicates:
            total = sum(weight * chunk[key] for key, weight in weights.items())
            if isinstance(total, Tensor):
                variance += float(total.var()) / len(total)
        return variance**0.5 / self.n

    def _errors(self, p: Probe) -> dict[str, float]:
        layers = range(len(p.layers))
        sums: dict[str, list[Key]] = {
            "sharpness": [("parameter", q.name, "grad") for q in p.parameters],
            "adaptive_sharpness": [("parameter", q.name, "adaptive") for q in p.parameters],
            "sharpness_untied": [
                ("layer", i, name) for i in layers for name in ("untied", "untied_bias")
            ],
            "input_invariant_mls": [("input", "invariant")],
        }
        errors = {name: self._error(dict.fromkeys(keys, 1.0)) for name, keys in sums.items()}
        # sum_l ||W_l|| sqrt(mean_i w_il): its derivative by the means
        slopes: dict[Key, float] = {
            ("layer", i, "grad_weight"): float(0.5 * q.norm / np.sqrt(q.grad_weight.mean()))
            for i, q in enumerate(p.layers)
            if q.grad_weight.any()
        }
        errors["matrix_normalized_sharpness"] = self._error(slopes)
        spread = sum(float(chunk["input", "jackknife"].sum()) for chunk in self.replicates)
        errors["local_dimension"] = spread**0.5 / self.n
        return errors

    def _layer_errors(self, p: Probe) -> list[dict[str, float]]:
        columns = {
            "sharpness": ("grad_weight", "grad_bias"),
            "adaptive_sharpness": ("adaptive",),
            "sharpness_untied": ("untied", "untied_bias"),
        }
        return [
            {
                name: self._error({("layer", i, part): 1.0 for part in parts})
                for name, parts in columns.items()
            }
            for i in range(len(p.layers))
        ]


def _unknown(b: int, r: int, device: torch.device) -> dict[str, Tensor]:
    """What ``_look`` gives of spectra that nobody asked for."""
    options: Any = {"dtype": torch.float64, "device": device}
    return {
        "singular": torch.full((b, r), torch.nan, **options),
        "rank": torch.full((b,), -1.0, **options),
        "dimension": torch.full((b,), torch.nan, **options),
        "jackknife": torch.full((b,), torch.nan, **options),
    }


_SPECTRAL = {"singular", "rank", "singular_through", "rank_through", "gap_norm"}


class _Signs:
    """Random directions of +-1, a stream of its own for each sample; ``rows`` is R^T of a loss."""

    def __init__(self, f: Tensor, streams: list[np.random.Generator], rows: Tensor | None) -> None:
        self.f, self.streams, self.rows = f, streams, rows
        self.width = (f if rows is None else rows).shape[1]

    def next(self) -> Tensor:
        """One direction for each sample, [b, width]."""
        drawn = [stream.integers(0, 2, self.width, dtype=np.int8) for stream in self.streams]
        return torch.from_numpy(2 * np.stack(drawn) - 1).to(self.f)

    def outputs(self, v: Tensor) -> Tensor:
        """R v: the direction in the space of the outputs."""
        return v if self.rows is None else (self.rows.mT @ v[..., None]).squeeze(-1)

    def back(self, w: Tensor) -> Tensor:
        """R^T w: from there."""
        return w if self.rows is None else (self.rows @ w[..., None]).squeeze(-1)


class _Gram:
    """v -> A A^T v: a product onto the edges, and its transpose from their dependence on v0.

    A is df/dx at the edges, or R^T df/dx for a loss.
    """

    def __init__(
        self,
        plan: Products,
        edges: list[int],
        backs: Mapping[int, Tensor | None],
        v0: Tensor,
        draw: _Signs,
    ) -> None:
        found = [(k, back) for k in edges if (back := backs[k]) is not None and back.requires_grad]
        self.backs = [back for _, back in found]
        self.edges = [plan.edges[k] for k, _ in found]
        self.layouts = [plan.rows[k][0] for k, _ in found]
        self.f, self.v0, self.draw = plan.f, v0, draw

    def __call__(self, v: Tensor) -> Tensor:
        if not self.edges:
            return torch.zeros_like(v)
        g = self._onto(v)
        with _second_derivative():
            w = torch.autograd.grad(self.backs, self.v0, g, retain_graph=True)[0]
        return self.draw.back(w)

    def rows(self, v: Tensor) -> Tensor:
        """A^T v of each sample, [b, entries]."""
        parts = zip(self._onto(v), self.layouts, strict=True)
        return beside([split(g, layout, len(v)).flatten(1) for g, layout in parts])

    def _onto(self, v: Tensor) -> tuple[Tensor, ...]:
        directions = self.draw.outputs(v).contiguous()
        return torch.autograd.grad(self.f, self.edges, directions, retain_graph=True)


def _small(
    values: Tensor, looked: list[tuple[Tensor, Tensor]], gram: _Gram, tolerance: float
) -> Tensor:
    """The same singular values, with those that A A^T cannot tell from zero taken of A itself.

    A A^T squares the condition, so that a zero comes out as sqrt(eps) of the largest. The vectors
    of Lanczos span what was found: A^T times their ``top`` combinations has zeros where A has, and
    what is below ``tolerance`` of the largest is zero (theory 3). The others are lower ends: below
    1e-7 of the largest (float32: 1e-3) Lanczos may not have met all of their vectors.
    """
    poor = values[:, -1] < torch.finfo(gram.f.dtype).eps ** 0.25 * values[:, 0]
    if not bool(poor.any()):
        return values
    V, W = (torch.stack(part, 1) for part in zip(*looked, strict=True))  # [b, steps, n]
    T = V.double() @ W.double().mT
    vectors = torch.linalg.eigh((T + T.mT) / 2)[1][..., -values.shape[1] :]
    combined = (vectors.mT @ V.double()).to(V)
    A = torch.stack([gram.rows(v) for v in combined.unbind(1)], 1)[poor]
    s = torch.linalg.svdvals(A.double())
    values = values.clone()
    values[poor] = 0.0  # also where a dead input leaves fewer entries
    values[poor, : s.shape[1]] = torch.where(s < tolerance * s[:, :1], 0.0, s)
    return values


@contextlib.contextmanager
def _second_derivative() -> Iterator[None]:
    """Say what a network lacks that cannot be differentiated twice."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise FlatlensError(
            f"Lanczos needs a second derivative that this network lacks ({first_line(error)}); "
            'use method="exact"'
        ) from error


def _merge(whole: Chunk, part: Chunk) -> None:
    for key, column in part.columns.items():
        if key[-1] in MEANS:
            whole.columns[key] = whole.columns[key] + column
        elif key[-1] in LARGEST:
            whole.columns[key] = torch.maximum(whole.columns[key], column)
    for name, total in part.sums.items():
        whole.sums[name] = whole.sums[name] + total


def _ratio(one: Tensor, two: Tensor, count: int) -> Tensor:
    """(mean of one)^2 / mean of two from sums over ``count``; 0 where there is nothing."""
    return torch.where(two > 0, one.square() / (two * count), 0.0)
