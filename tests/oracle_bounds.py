"""Both sides of every inequality and its conditions from full Jacobians, slow and obvious.

The package is never imported here. `oracles.sample_calls` gives, for one sample and each call of a
measured layer, A = ∂f/∂x, B (through the layer), ∂f/∂z and the gradients of all parameters as
dense tensors. Each row of the table in docs/theory.md is written here exactly as it is there.

Conditions are decided from the same numbers. A layer is *dense* if the map from its input to its
one patch is a permutation. It is a *leaf* if the parameter's gradient is that of this call alone.
It has *no bypass* if A = B. Layers form a *chain* if A_l - B_l = A_{l+1}.
"""

import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from oracle_products import product_matrices
from oracles import (
    EPS,
    Call,
    kernel_matrices,
    mapped,
    norms,
    original,
    sample_calls,
    sharing_format,
    tensors,
)
from torch import Tensor, nn

# Two Jacobians whose relative difference is below the first are the same, above the second they
# are not. Between them a condition may be judged either way; if it is granted, the bound must hold.
SAME, OTHER = 1e-13, 1e-8
UNDERFLOW = 1e-150  # the square of this is zero


@dataclass(frozen=True)
class Row:
    """lhs <= rhs (logarithms of both if `log`), and whether that is a theorem here.

    NaN means unknown: Eq. 37 if the minimum is not attained, and volumes that rounding decides.
    """

    lhs: float
    rhs: float
    theorem: bool | None  # None: it depends on the tolerance for a bypass
    log: bool = False
    scale: float = 0.0  # 1e-10 of this is rounding, whatever the sides are
    # Values of each side below this are rounding of gradients that cancel to zero.
    zeros: tuple[float, float] | None = None


class Layer:
    """One call of a measured layer over all samples."""

    def __init__(
        self, calls: list[Call], every: list[list[Call]], samples: list[dict], names: dict, trained
    ) -> None:
        self.calls, self.call, self.every, self.samples = calls, calls[0], every, samples
        self.A = [c.values["dA"].flatten(1) for c in calls]
        self.B = [c.values["dB"].flatten(1) for c in calls]
        formats = [sharing_format(c, c.values["dz"]) for c in calls]
        self.u = [u for u, _ in formats]  # [G, T, d_in]
        self.J = [J for _, J in formats]  # [N, G, T, d_out]
        W = kernel_matrices(self.call)
        self.transposed = "transpose" in self.call.kind
        self.W = W.mT if self.transposed else W  # [G, d_out, d_in]
        self.G, self.T, _ = self.u[0].shape
        self.weight, self.bias = names.get(id(self.call.weight)), names.get(id(self.call.bias))
        self.counted = trained.get(self.weight, False)
        self.per_position = self.call.bias is not None and not self.transposed
        self.biased = self.per_position and trained.get(self.bias, False) and self.own("bias")
        self.leaf = self.counted and self.own("weight")
        self.x = np.array([float(c.values["x"].norm()) for c in calls])
        self.norm = norms(self.call)["operator"] if self.transposed else float(sigma(self.C)[0])
        self.kernel = float(torch.linalg.svdvals(self.W).max())

    def own(self, key: str) -> bool:
        """Whether no other call uses this parameter, and its gradient is that of this call."""
        mine = getattr(self.call, key)
        pairs = zip(self.calls, self.samples, strict=True)
        alone = sum((c.weight is mine) + (c.bias is mine) for c, *_ in self.every) == 1
        return alone and all(
            gap(s["parameters"][getattr(self, key)], c.values[f"d{key}"]) < OTHER for c, s in pairs
        )

    @cached_property
    def gradients(self) -> list[Tensor]:
        """Gradients [N, ...] per sample: of the parameter, or of a frozen weight in its calls."""
        if self.counted:
            return [s["parameters"][self.weight] for s in self.samples]
        uses = [row for row in self.every if row[0].weight is self.call.weight]
        return [sum(c.values["dweight"] for c in each) for each in zip(*uses, strict=True)]

    @property
    def w(self) -> np.ndarray:
        return np.array([float(g.square().sum()) for g in self.gradients])

    @property
    def w_rounding(self) -> np.ndarray:
        """Rounding of w if the terms J_p u_p^T of a gradient cancel: (4 eps)^2 of the terms.

        ‖Σ_p J_p u_p^T‖² ≤ T Σ_p ‖J_p‖² ‖u_p‖² is the size of the terms that are added.
        """
        pairs = zip(self.J, self.u, strict=True)
        terms = [
            float((J.square().sum((0, 3)) * u.square().sum(-1)).sum() * self.T) for J, u in pairs
        ]
        return (4 * EPS[self.W.dtype]) ** 2 * np.array(terms)

    @property
    def adaptive(self) -> float:
        W2 = self.call.values["weight"].square()
        return float(np.mean([float((g.square() * W2).sum()) for g in self.gradients]))

    @cached_property
    def unrolled(self) -> tuple[Tensor, Tensor]:
        """Return P [G, T, d_in, entries], which maps inputs to patches, and C = W P."""
        x, z = self.call.values["x"], self.call.values["dz"][0]
        size, fed = x.numel(), copy.copy(self.call)
        if self.call.geometry.get("product"):  # one entry of the input after the other
            columns = []
            for entry in torch.eye(size, dtype=x.dtype):
                fed.values = {"x": entry.reshape(x.shape)}
                columns.append(sharing_format(fed, z.new_zeros(1, *z.shape))[0])
            P = torch.stack(columns, -1)
            return P, torch.einsum("goi,gtie->gtoe", self.W, P)
        if self.call.kind == "linear":
            x, z = x.reshape(-1, x.shape[-1]), z.reshape(-1, z.shape[-1])
        basis = torch.eye(size, dtype=x.dtype).reshape(size * len(x), *x.shape[1:])
        fed.values = {"x": basis}
        u = sharing_format(fed, z.new_zeros(1, size * len(z), *z.shape[1:]))[0]
        P = u.unflatten(1, (size, -1)).movedim(1, -1)
        return P, torch.einsum("goi,gtie->gtoe", self.W, P)

    @property
    def C(self) -> Tensor:
        """The map that J is applied to; for a transposed convolution before the overlapping sum."""
        return self.unrolled[1].flatten(0, 2)

    @property
    def dense(self) -> bool:
        """Whether there is one position that reads every entry of the input once."""
        P = self.unrolled[0]
        return self.T == self.G == 1 and bool((P.sum((0, 1, 2)) == 1).all())

    @property
    def kappa(self) -> float:
        return float(self.unrolled[0].sum((0, 1, 2)).max())

    def scale(self, i: int) -> Tensor:
        """Return D at sample i, [G, T]."""
        return (self.u[i].square().sum(-1) + self.per_position).sqrt()

    @property
    def bypass(self) -> float:
        return max(gap(a, b) for a, b in zip(self.A, self.B, strict=True))

    def ratios(self, bias: bool = False) -> np.ndarray:
        """Return (‖W‖/x)² per sample, with x² + 1 instead of x² if a bias counts."""
        return bound(self.norm**2, self.x**2 + (bias and self.biased))

    def smallest(self, i: int, dtype: torch.dtype) -> float:
        """Return the T-th singular value of [U, 1] at sample i, the smallest over groups (theory
        4.2).

        It is NaN if rounding decides whether it is zero.
        """
        found = []
        for U in self.u[i]:
            if self.biased:
                U = torch.cat([U, torch.ones(self.T, 1, dtype=U.dtype)], 1)
            s = torch.linalg.svdvals(U)
            low = float(s[-1]) if len(s) == self.T else 0.0
            unsure = 0 < low < 1e3 * EPS[dtype] * max(U.shape) * float(s[0])
            found.append(np.nan if unsure else low)
        return float(np.min(found))


@dataclass
class Network:
    """All layers and all samples of one network."""

    layers: list[Layer]
    samples: list[dict]
    trained: dict[str, bool]
    model: nn.Module
    reads: list[bool]  # per layer: its input is the network's input, entry by entry

    @property
    def n(self) -> int:
        return len(self.samples)

    @property
    def A(self) -> list[Tensor]:
        return [s["A"] for s in self.samples]

    def total(self, weighted: bool) -> float:
        """Return S (Eq. 3), or S_adaptive (Eq. 41) with each gradient weighted by its parameter."""
        found = 0.0
        for name, p in self.model.named_parameters():
            for s in self.samples:
                g = s["parameters"][name]
                if self.trained[name] and g is not None:
                    found += float((g.square() * (p.detach().square() if weighted else 1)).sum())
        return found / self.n

    def beside(self, layer: Layer) -> float:
        """Return the distance of the network's A from this layer's A."""
        if len(self.A[0].mT) == len(layer.A[0].mT):
            pairs = zip(self.A, layer.A, strict=True)
            return max(min(gap(a, b), gap(in_order(a), in_order(b))) for a, b in pairs)
        pairs = [(used(a), used(b)) for a, b in zip(self.A, layer.A, strict=True)]  # more inputs
        return max(gap(a, b) if a.shape == b.shape else np.inf for a, b in pairs)

    @property
    def first(self) -> Layer | None:
        return self.layers[self.reads.index(True)] if True in self.reads else None


def full(model: nn.Module, x: Any, output: Any = None) -> Network:
    """Compute every Jacobian of `model` at the samples `x`, one sample at a time."""
    model = copy.deepcopy(original(model)).double().eval()
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    model.requires_grad_(True)
    names = {id(p): name for name, p in model.named_parameters()}
    x = mapped(lambda t: t.detach().double() if t.is_floating_point() else t, x)
    n = len(tensors(x)[0])
    each = [sample_calls(model, mapped(lambda t, i=i: t[i : i + 1], x), output) for i in range(n)]
    samples, calls = (
        [s for s, _ in each],
        [list(c) for c in zip(*(c for _, c in each), strict=True)],
    )
    layers = [Layer(row, calls, samples, names, trained) for row in calls]
    return Network(layers, samples, trained, model, [reads_input(row, samples) for row in calls])


def reads_input(calls: list[Call], samples: list[dict]) -> bool:
    """Whether the layer's input is the network's input, in any order."""
    return all(is_input(c, s) for c, s in zip(calls, samples, strict=True))


def is_input(call: Call, sample: dict) -> bool:
    """Whether x^l is a permutation of one leaf that is not a parameter."""
    edge, shape = call.targets["A"]
    leaves, queue = {}, [edge.node]
    while queue:
        node = queue.pop()
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        queue += [child for child, _ in node.next_functions if child is not None]
    (leaf, *others) = leaves.values()
    size = shape.numel()
    # `forward` feeds copies: a tensor that is itself a leaf was made by the model.
    if others or isinstance(leaf, nn.Parameter) or leaf is call.x or leaf.numel() != size:
        return False
    rows = [
        torch.autograd.grad(edge, leaf, e.reshape(shape), retain_graph=True)[0].flatten()
        for e in torch.eye(size, dtype=leaf.dtype)
    ]
    P = torch.stack(rows)
    if not torch.equal(P @ leaf.detach().flatten(), call.values["x"].flatten()):
        return False
    one_each = torch.ones(size, dtype=leaf.dtype)
    zeros_and_ones = bool(((P == 0) | (P == 1)).all())
    return zeros_and_ones and torch.equal(P.sum(0), one_each) and torch.equal(P.sum(1), one_each)


# -- the table -----------------------------------------------------------------


@np.errstate(divide="ignore", invalid="ignore", over="ignore")  # infinities are valid results here
def oracle_bounds(
    model: nn.Module, x: Any, output: Any = None, dtype: torch.dtype = torch.float64
) -> dict[str, Row]:
    """Return every row that applies by name; "eq12_untied, exact" uses ‖D⁻¹C‖₂ itself."""
    net = full(model, x, output)
    layers, first, n = net.layers, net.first, net.n
    S, adaptive = net.total(False), net.total(True)
    top = np.array([sigma(A)[0] for A in net.A])
    r = min(net.A[0].shape)
    frobenius = np.array([float(A.square().sum()) for A in net.A])
    volume = log_mean([log_volume(A, dtype) for A in net.A])
    noise = spread(net.A)
    S_zero = float(sum(q.w_rounding.mean() for q in layers if q.counted))
    rows = {"eq8": Row(volume, log_mean(r / 2 * np.log(frobenius / r)), True, True, noise)}

    if first is not None:
        paper = judged(first.dense and first.leaf, first.bypass, net.beside(first))
        ratios = first.ratios()
        root = np.sqrt(np.mean(ratios))
        A = float(np.mean(top))
        B = times(np.sqrt(ratios), np.sqrt(first.w)).mean()
        C, D = times(root, np.sqrt(first.w.mean())), times(root, np.sqrt(S))
        C_zero, D_zero = (times(root, np.sqrt(z)) for z in (first.w_rounding.mean(), S_zero))
        with_bias = first.ratios(bias=True)
        d = first.W.shape[1]
        invariant = [
            (A.square() * s["x"].square()).sum() for A, s in zip(net.A, net.samples, strict=True)
        ]
        jensen = r / 2 * np.log(S / r) + r / 2 * np.mean(np.log(with_bias))
        rows |= {
            "eq6": Row(
                float(np.mean(top**2)),
                times(ratios.max(), S),
                paper,
                zeros=(0.0, times(ratios.max(), S_zero)),
            ),
            "eq9": Row(
                volume,
                log_eq9([ratios], S, r),
                paper,
                True,
                noise,
                (-np.inf, log_eq9([ratios], S_zero, r)),
            ),
            "eq11": Row(A, D, paper, zeros=(0.0, D_zero)),
            "eq11_bias": Row(
                A,
                times(np.sqrt(with_bias.mean()), np.sqrt(S)),
                paper,
                zeros=(0.0, times(np.sqrt(with_bias.mean()), np.sqrt(S_zero))),
            ),
            "eq48_ab": Row(A, B, paper, zeros=(0.0, C_zero)),
            "eq48_bc": Row(B, C, True, zeros=(C_zero, C_zero)),
            "eq48_cd": Row(C, D, first.counted, zeros=(C_zero, D_zero)),
            "eq44": Row(float(np.mean(invariant)) / d, adaptive, paper),
            "eq44_shared": eq44_shared(first),
            "log_volume": Row(
                float(np.mean([log_volume(A, dtype) for A in net.A])),
                np.inf if np.isnan(jensen) else float(jensen),
                paper,
                True,
                noise,
            ),
        }
        if first.T == first.G == 1 and first.call.kind == "linear":
            rows["eq37"] = eq37(first, paper)

    if not layers:
        return rows
    dense, leaf = all(q.dense for q in layers), all(q.leaf for q in layers)
    paper = judged(dense and leaf, *(q.bypass for q in layers))
    nmls = sum(float(np.mean([sigma(a)[0] for a in q.A])) for q in layers)
    through = sum(float(np.mean([sigma(b)[0] for b in q.B])) for q in layers)
    gaps = [sigma(a)[0] - sigma(a - b)[0] for q in layers for a, b in zip(q.A, q.B, strict=True)]
    ranks = {min(q.A[0].shape) for q in layers}
    volumes = [log_mean([log_volume(a, dtype) for a in q.A]) for q in layers]
    rhs10, zero10 = (log_eq10(layers, ranks, size) for size in (S, S_zero))
    untied = np.array([[untied_energy(q, i) for i in range(n)] for q in layers]).sum(0).mean()
    cheap, exact = (
        np.array([[untied_constant(q, i, exact) ** 2 for i in range(n)] for q in layers])
        for exact in (False, True)
    )
    xbar = [divide(1.0, np.mean(divide(1.0, q.x**2))) ** 0.5 for q in layers]
    rows |= {
        "eq10": Row(
            log_sum(volumes),
            rhs10,
            paper,
            True,
            spread([a for q in layers for a in q.A]),
            (-np.inf, zero10),
        ),
        "eq12": Row(nmls, eq12(layers, S, False), paper, zeros=(0.0, eq12(layers, S_zero, False))),
        "eq12_bias": Row(
            nmls, eq12(layers, S, True), paper, zeros=(0.0, eq12(layers, S_zero, True))
        ),
        "eq12_untied": Row(through, times(np.sqrt(cheap.sum(0).mean()), np.sqrt(untied)), True),
        "eq12_untied, exact": Row(through, np.sqrt(exact.sum(0).mean() * untied), True),
        "eq12_tied_rank": tied_row(through, layers, S, leaf, dtype),
        "eq17": Row(sum(gaps) / n, eq12(layers, S, False), dense and leaf, scale=1e-3 * nmls),
        "eq35": Row(
            sum(
                b * float(np.mean([sigma(a)[0] for a in q.A]))
                for b, q in zip(xbar, layers, strict=True)
            ),
            sum(q.norm * np.sqrt(q.w.mean()) for q in layers),
            paper,
        ),
    }
    if is_chain(net):
        *inner, last = layers
        theorem = judged(all(q.dense and q.leaf for q in inner), net.beside(inner[0]))
        lhs = float(np.mean(top)) - last.norm
        scale = 1e-3 * float(np.mean(top))  # a difference
        rows["eq17_telescoped"] = Row(lhs, eq12(inner, S, False), theorem, scale=scale)
    return rows


def eq44_shared(first: Layer) -> Row:
    """Return (1/d) mean_i Σ_j ‖Σ_p u_pj (J_p W)_j‖², and the scale of its rounding."""
    plain = size = 0.0
    for u, J in zip(first.u, first.J, strict=True):
        terms = u * torch.einsum("ngto,goi->ngti", J, first.W)
        plain += float(terms.sum(2).square().sum()) / len(first.u)
        size += float(terms.abs().sum(2).square().sum()) / len(first.u)
    d = first.W.shape[1]
    return Row(plain / d, first.adaptive, first.leaf, scale=1e-18 * size)


def eq12(layers: list[Layer], S: float, bias: bool) -> float:
    total = sum(q.ratios(bias) for q in layers)
    return times(np.sqrt(np.mean(total)), np.sqrt(S))


def log_eq9(ratios: list[np.ndarray], S: float, r: int) -> float:
    """Return the log of (1/n) sqrt(Σ ratios^r) (nS/r)^(r/2)."""
    n = len(ratios[0])
    terms = [r * np.log(a) for row in ratios for a in row]
    value = -np.log(n) + log_sum(terms) / 2 + r / 2 * np.log(n * S / r)
    return np.inf if np.isnan(value) else float(value)


def log_eq10(layers: list[Layer], ranks: set[int], S: float) -> float:
    """Return the log of the right side of Eq. 10; layers of different rank are added one by one."""
    if len(ranks) == 1:
        return log_eq9([q.ratios() for q in layers], S, min(ranks))
    return log_sum([log_eq9([q.ratios()], S, min(q.A[0].shape)) for q in layers])


def untied_energy(q: Layer, i: int) -> float:
    """Return Σ_p ‖J_p‖² (‖u_p‖² + 1) of one sample."""
    return float((q.J[i].square().sum((0, 3)) * q.scale(i).square()).sum())


def untied_constant(q: Layer, i: int, exact: bool) -> float:
    """Return ‖D⁻¹C‖₂, or its cheap bound."""
    D = q.scale(i)
    if not exact:
        return float(bound(np.sqrt(q.kappa) * q.kernel, float(D.min())))
    rows = D.repeat_interleave(q.W.shape[1], 1).reshape(-1, 1)
    if float(D.min()) == 0:  # 0/0 where a patch lies in the padding or a group has no weights
        return np.inf if ((rows == 0) & q.C.any(1, keepdim=True)).any() else np.nan
    return float(sigma(q.C / rows)[0])


def tied_row(lhs: float, layers: list[Layer], S: float, leaf: bool, dtype: torch.dtype) -> Row:
    """Return the row of theory 4.2; rounding is eps times the largest singular value."""
    each = [[q.smallest(i, dtype) for i in range(len(q.calls))] for q in layers]
    squares = [bound(sigma(q.C)[0], s) ** 2 for q, s in zip(layers, each, strict=True)]
    total, nothing = np.sum(squares, 0).mean(), any(not q.C.any() for q in layers)  # 0/0 there
    unknown = np.isnan(each).any() or (nothing and 0 in np.array(each))
    rhs = np.nan if unknown else times(np.sqrt(total), np.sqrt(S))
    largest = [[float(torch.linalg.svdvals(u).max()) + 1 for u in q.u] for q in layers]
    scale = 1e-4 * rhs * float(np.max(divide(largest, each)))
    return Row(lhs, rhs, leaf, scale=scale if np.isfinite(scale) else 0.0)


def is_chain(net: Network) -> bool:
    """Whether identity skips lead from the input to a last layer f = W_L x + b."""
    layers = net.layers
    if len(layers) < 2 or not net.reads[0] or layers[-1].T > 1:
        return False
    size = net.A[0].shape[0]
    for c in layers[-1].calls:
        if not torch.equal(c.values["dz"].reshape(size, -1), torch.eye(size).double()):
            return False
    for q, after in pairwise(layers):
        for a, b, c in zip(q.A, q.B, after.A, strict=True):
            if a.shape != c.shape or gap(c, a - b) > OTHER:
                return False
    return True


def eq37(first: Layer, theorem: bool | None) -> Row:
    """Return both sides at the optimum of Eq. 36 (λ = 1), for the weight of this call."""
    n, W = len(first.calls), first.call.values["weight"].numpy()
    H = sum(c.values["dweight"].square().sum(0) for c in first.calls).numpy() / n
    if first.call.geometry.get("product"):
        W, H = (product_matrices(first.call, torch.from_numpy(t))[0].numpy() for t in (W, H))
    elif first.call.geometry.get("turned"):
        W, H = W.T, H.T
    value, t2 = minimum(H, W)
    lhs = 0.0
    for c, A in zip(first.calls, first.A, strict=True):
        columns, x2 = A.square().sum(0).numpy(), c.values["x"].flatten().square().numpy()
        lhs += (columns / t2).sum() * (t2 * x2).sum() / n
    attained = (H > 0).all() and W.any(0).all() and W.any(1).all()
    scale = float(np.sqrt(H.sum()) * np.linalg.norm(W))
    value = value if scale > 0 else 0.0
    return Row(float(np.sqrt(lhs)) if attained else np.nan, value, theorem, scale=scale)


def minimum(H: np.ndarray, W: np.ndarray) -> tuple[float, np.ndarray]:
    """Return min Σ H (s_k t_j)² + W²/(4 (s_k t_j)²) and its t², by Newton in (log s², log t²).

    A row or column without weight or curvature moves towards infinity or zero, until its cost is
    below rounding.
    """
    rows, columns = H.shape
    place = np.zeros((rows, columns, rows + columns))
    for k in range(rows):
        for j in range(columns):
            place[k, j, [k, rows + j]] = 1
    place, h, c = place.reshape(-1, rows + columns), H.ravel(), W.ravel() ** 2 / 4
    theta = np.zeros(rows + columns)
    for _ in range(300):
        up, down = h * np.exp(place @ theta), c * np.exp(-place @ theta)
        curvature = place.T @ ((up + down)[:, None] * place)
        step = np.linalg.lstsq(curvature, place.T @ (up - down), rcond=1e-14)[0]
        theta -= step / max(1.0, np.abs(step).max())
        if np.abs(step).max() < 1e-12:
            break
    return float((up + down).sum()), np.exp(theta[rows:])


# -- plain formulas ------------------------------------------------------------


def sigma(A: Tensor) -> np.ndarray:
    return torch.linalg.svdvals(A).numpy()


def log_volume(A: Tensor, dtype: torch.dtype) -> float:
    """Return Σ log σ over min(N, M) singular values; -inf if one counts as zero.

    It is NaN if rounding decides this, or more than five digits of the smallest value, or if its
    square is 0.
    """
    s = sigma(A)
    if s[-1] == 0:
        return -np.inf
    known = s[-1] >= 1e4 * EPS[dtype] * max(A.shape) * s[0] and s[-1] > UNDERFLOW
    return float(np.log(s).sum()) if known else np.nan


def spread(matrices: list[Tensor]) -> float:
    """Return Σ σ_1/σ_j, the factor of eps in the error of a log volume."""
    spectra = [s for s in map(sigma, matrices) if s[-1] > 0]
    return max((1e-4 * float((s[0] / s).sum()) for s in spectra), default=0.0)


def gap(a: Tensor | None, b: Tensor | None) -> float:
    """Return ‖a - b‖ / ‖a‖."""
    if a is None or b is None:
        return 0.0 if a is b else np.inf
    off, size = float((a - b).norm()), float(a.norm())
    return off / size if size > 0 else np.sign(off)


def in_order(A: Tensor) -> Tensor:
    """Return the columns in a canonical order that no permutation of the input changes."""
    return A[:, sorted(range(A.shape[1]), key=lambda j: A[:, j].tolist())]


def judged(conditions: bool, *gaps: float) -> bool | None:
    """Whether a theorem's conditions hold; None if a gap is too small to decide."""
    if not conditions or max(gaps) > OTHER:
        return False
    return None if max(gaps) > SAME else True


def used(A: Tensor) -> Tensor:
    """Return the columns that are not zero."""
    return A[:, A.any(0)]


def divide(a: Any, b: Any) -> Any:
    return np.asarray(a, dtype=float) / np.asarray(b, dtype=float)


def bound(norm: float, size: Any) -> Any:
    """Return a norm over a size; inf if only the size is 0."""
    return divide(norm, size) if norm > 0 else 0.0 * np.asarray(size)


def times(a: Any, b: Any) -> Any:
    """Return the product; 0 times inf is inf, because nothing is known then."""
    found = np.asarray(a) * np.asarray(b)
    found = np.where(np.isnan(found), np.inf, found)
    return found if found.ndim else float(found)


def log_sum(values: list[float]) -> float:
    top = float(np.max(values))
    return (
        top if not np.isfinite(top) else float(top + np.log(sum(np.exp(v - top) for v in values)))
    )


def log_mean(values: Any) -> float:
    return log_sum(list(values)) - float(np.log(len(values)))
