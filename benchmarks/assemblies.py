"""The sides of cases c1, c2 and c3: one `flatlens.measure` against code of a skilled user.

All sides of a case compute the same numbers:

- **c1**: the headline set: S, MLS, NMLS, log volume, local dimension, normalised MLS, and the right
  sides of Eqs. 11 and 12 with the norms of the kernels;
- **c2**: the same with adaptive sharpness;
- **c3**: the headline set with operator norms. That of a convolution is the norm of the map from
  image to image.

An assembly takes S from a package (in c2 S and adaptive sharpness, from the entries of the
Gauss-Newton diagonal) and the rest from N backward passes of its own, shared where the package
allows it.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import sides
import torch
from sides import Exact
from torch import Tensor, nn

import flatlens as fl
from flatlens.metrics import HEADLINE

Values = dict[str, Any]
PER_SAMPLE = [name for name in HEADLINE if not name.startswith("eq")]
TOLERANCE, MOST_STEPS = 1e-3, 100  # of the power iteration


@dataclass(frozen=True)
class Extent:
    """The quantities of a case in addition to the headline set."""

    adaptive: bool = False
    operator: bool = False

    @property
    def names(self) -> list[str]:
        """The quantities that flatlens returns for each sample."""
        return [*PER_SAMPLE, *(["adaptive_sharpness"] if self.adaptive else [])]


EXTENTS = {"c1": Extent(), "c2": Extent(adaptive=True), "c3": Extent(operator=True)}


def flatlens_whole(extent: Extent) -> Callable[[nn.Module], Exact]:
    """One call. Quantities are per sample; the right sides of the inequalities are numbers."""

    def side(model: nn.Module) -> Exact:
        def whole(x: Tensor, _batch: int) -> Values:
            measured = fl.measure(
                model, x, method="exact", quantities=[*extent.names, "eq11", "eq12"],
                weight_norm="operator" if extent.operator else "kernel",
            )  # fmt: skip
            values = {name: measured.samples[name].tolist() for name in extent.names}
            return {**values, **{b.name: b.rhs for b in measured.bounds}}

        return whole

    return side


# ------------------------------------------------------------------ what a user adds to S

Row = Callable[[Tensor, list[Tensor], bool], tuple[Tensor, ...]]  # derivatives of one output


def plain_row(f_v: Tensor, places: list[Tensor], more: bool) -> tuple[Tensor, ...]:
    """Return the derivatives of the sum of one output over the samples."""
    return torch.autograd.grad(f_v, places, retain_graph=more)


@dataclass(frozen=True)
class Seen:
    """The outputs of a batch, and the input of every layer."""

    out: Tensor
    layer_inputs: list[Tensor]


def spectra(
    model: nn.Module, extent: Extent, row: Row = plain_row
) -> Callable[[Tensor, int], Values]:
    """Compute everything but S: Jacobians at the layers' inputs, singular values, weight norms."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]

    def sums(x: Tensor, norms: list[float]) -> Values:
        leaf = x.clone().requires_grad_()
        seen = forward(model, layers, leaf)
        N = seen.out.shape[1]
        # a flattened image, or a tensor that two layers read, counts once
        places = {same(x_l): x_l for x_l in [leaf, *seen.layer_inputs]}
        by_output = [row(seen.out[:, v].sum(), list(places.values()), v + 1 < N) for v in range(N)]
        jacobians = (torch.stack(place, 1).flatten(2) for place in zip(*by_output, strict=True))
        spectrum = dict(zip(places, map(singular, jacobians), strict=True))
        at_input = spectrum[same(leaf)]
        squares = at_input.square()
        x_norms = x.flatten(1).double().norm(dim=1)
        ratios = [
            float((W / x_l.detach().flatten(1).norm(dim=1)).square().sum())
            for W, x_l in zip(norms, seen.layer_inputs, strict=True)
        ]
        return {
            "mls": float(at_input[:, 0].sum()),
            "nmls": float(sum(spectrum[same(x_l)][:, 0].sum() for x_l in seen.layer_inputs)),
            "log_volume": float(at_input.log().sum()),
            "local_dimension": float((squares.sum(1) ** 2 / squares.square().sum(1)).sum()),
            "normalized_mls": float((x_norms.square() * squares[:, 0]).sum()),
            "first_ratio": ratios[0],
            "ratios": sum(ratios),
        }

    def means(x: Tensor, batch: int) -> Values:
        norms = weight_norms(model, layers, x[:1], extent.operator)
        totals: Values = {}
        for chunk in x.split(batch):
            for key, value in sums(chunk, norms).items():
                totals[key] = totals.get(key, 0.0) + value
        return {key: value / len(x) for key, value in totals.items()}

    return means


def forward(model: nn.Module, layers: list[nn.Module], x: Tensor) -> Seen:
    """Run the network once and keep the layers' inputs."""
    captured: list[Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda _m, args: captured.append(args[0])) for m in layers]
    try:
        return Seen(model(x), captured)
    finally:
        for handle in hooks:
            handle.remove()


def same(x: Tensor) -> tuple[int, int]:
    """Return a key that is equal for tensors with the same memory, whatever their shape."""
    return x.data_ptr(), x.numel()


def singular(jacobian: Tensor) -> Tensor:
    """Compute singular values in descending order from the smaller Gram matrix in float64."""
    wide = jacobian.double()
    wide = wide if wide.shape[1] <= wide.shape[2] else wide.mT
    return torch.linalg.eigvalsh(wide @ wide.mT).clamp(min=0).sqrt().flip(1)


# ------------------------------------------------------------------ norms of weights


@torch.no_grad()
def weight_norms(
    model: nn.Module, layers: list[nn.Module], x: Tensor, operator: bool
) -> list[float]:
    """Compute the norm of every layer's weight, of convolutions as a map of images."""
    if not operator:
        return [kernel_norm(m.weight.flatten(1)) for m in layers]
    inputs = forward(model, layers, x).layer_inputs
    return [
        convolution_norm(m, x_l.shape) if isinstance(m, nn.Conv2d) else kernel_norm(m.weight)
        for m, x_l in zip(layers, inputs, strict=True)
    ]


def kernel_norm(W: Tensor) -> float:
    """Compute the largest singular value from the smaller Gram matrix."""
    W = W if W.shape[0] <= W.shape[1] else W.mT
    return float(torch.linalg.eigvalsh(W @ W.mT)[-1].clamp(min=0).sqrt())


@torch.no_grad()
def convolution_norm(m: nn.Conv2d, shape: torch.Size) -> float:
    """Run power iteration with the convolution and its transpose until the norm converges."""
    options: Any = {"stride": m.stride, "padding": m.padding, "dilation": m.dilation}
    v = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    norm = 0.0
    for _ in range(MOST_STEPS):
        out = nn.functional.conv2d(v / v.norm(), m.weight, groups=m.groups, **options)
        before, norm = norm, float(out.norm())
        if abs(norm - before) <= TOLERANCE * norm:
            break
        v = torch.nn.grad.conv2d_input(shape, m.weight, out, groups=m.groups, **options)
    return norm


# ------------------------------------------------------------------ S, and the entries behind it

Entries = Callable[[Tensor], tuple[float, float]]  # sums over a batch: S, adaptive sharpness


def weighted(squares: Tensor, p: Tensor) -> Tensor:
    """Sum one parameter's squared derivatives, alone and times theta^2."""
    return torch.stack([squares.sum(), (squares * p.detach().square()).sum()])


def jacrev_entries(model: nn.Module) -> Entries:
    """Compute S and adaptive sharpness from explicit Jacobians."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    jacobian = sides.jacobian(model)

    def of_batch(x: Tensor) -> tuple[float, float]:
        found = jacobian(parameters, x)
        totals = sum(weighted(j.square().sum((0, 1)), parameters[k]) for k, j in found.items())
        return tuple(totals.tolist())

    return of_batch


def backpack_entries(model: nn.Module) -> Entries:
    """Compute S and adaptive sharpness from the Gauss-Newton diagonal."""
    diagonal = sides.backpack_diagonal(model)

    def of_batch(x: Tensor) -> tuple[float, float]:
        totals = sum(weighted(d, p) for p, d in diagonal(x))
        return tuple((totals / 2).tolist())

    return of_batch


ENTRIES = {"jacrev": jacrev_entries, "backpack_ggn": backpack_entries}

# ------------------------------------------------------------------ assemblies


def with_bounds(values: Values) -> Values:
    """Turn sums of squared ratios into the right-hand sides of Eqs. 11 and 12."""
    S = values["sharpness"]
    values["eq11"] = (values.pop("first_ratio") * S) ** 0.5
    values["eq12"] = (values.pop("ratios") * S) ** 0.5
    return values


def assembled(name: str, extent: Extent) -> Callable[[nn.Module], Exact]:
    """Assemble S from a package and the rest from autograd."""

    def side(model: nn.Module) -> Exact:
        own = {id(p): p for p in model.parameters()}  # the same weights without the peer's hooks
        rest = spectra(deepcopy(model, own), extent)
        if extent.adaptive:
            entries = ENTRIES[name](model)
        else:
            S = sides.PEERS[name](model)

        def whole(x: Tensor, batch: int) -> Values:
            if extent.adaptive:
                sums = torch.tensor([entries(chunk) for chunk in x.split(batch)]).double().sum(0)
                sharp, adaptive = (sums / len(x)).tolist()
                values = {"sharpness": sharp, "adaptive_sharpness": adaptive}
            else:
                values = {"sharpness": S(x, batch)}
            return with_bounds({**values, **rest(x, batch)})

        return whole

    return side


def in_one_sweep(extent: Extent) -> Callable[[nn.Module], Exact]:
    """Take BackPACK's per-sample norms (in c2, sums of squares) from the same N backward passes."""

    def side(model: nn.Module) -> Exact:
        import backpack
        from backpack.extensions import BatchL2Grad, SumGradSquared

        net = backpack.extend(model)
        extension = SumGradSquared() if extent.adaptive else BatchL2Grad()
        totals: list[Tensor] = []

        def row(f_v: Tensor, places: list[Tensor], more: bool) -> tuple[Tensor, ...]:
            with backpack.backpack(extension, retain_graph=more):
                derivatives = plain_row(f_v, places, more)
            of_parameters = sides.take(net, extension.savefield)
            totals.append(
                torch.stack([weighted(v, p) for p, v in of_parameters]).sum(0)
                if extent.adaptive
                else torch.stack([v.sum() for _, v in of_parameters]).sum()[None]
            )
            return derivatives

        rest = spectra(net, extent, row)

        def whole(x: Tensor, batch: int) -> Values:
            totals.clear()
            values = rest(x, batch)
            names = ["sharpness", *(["adaptive_sharpness"] if extent.adaptive else [])]
            sums = (torch.stack(totals).double().sum(0) / len(x)).tolist()
            return with_bounds({**dict(zip(names, sums, strict=True)), **values})

        return whole

    return side


def whole_sides(case: str) -> dict[str, Callable[[nn.Module], Exact]]:
    """Return the sides of a case by name, including the floor and the lower limit."""
    extent = EXTENTS[case]
    names = ENTRIES if extent.adaptive else [n for n in sides.PEERS if n not in ("loop", "asdl")]
    return {
        "floor": sides.floor,
        "lower_limit": sides.lower_limit_whole,
        "flatlens": flatlens_whole(extent),
        **{f"{name}+autograd": assembled(name, extent) for name in names},
        f"backpack_{'squares' if extent.adaptive else 'l2'}+autograd": in_one_sweep(extent),
    }
