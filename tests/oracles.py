"""A slow, obvious oracle for all that one pass measures; the package is never imported here.

float64, one sample at a time (batches of size 1), one `torch.autograd.grad` per output coordinate,
full Jacobians, dense matrices, plain SVDs. Layers are seen by patching `F.linear`, `F.conv*d` and
`F.conv_transpose*d` (and `nn.ConvNd._conv_forward`, which pads first where the padding mode is not
"zeros"). The patched call is

    z = layer(x + δx, W + δW, b + δb),  δ = 0,       and hands on a copy of z,

so that, with f the flattened output of one sample,
    A = ∂f/∂x    total: every reader of the tensor that enters,
    B = ∂f/∂δx   through this call alone,
    ∂f/∂δW, ∂f/∂δb: the weight and bias of this call alone,    ∂f/∂z: per position J_p.

Format of a layer at one sample, G groups, T positions: u [G, T, d_in], J [N, G, T, d_out].
A transposed convolution's positions are its *input* positions, its outputs there the C_out·k
products before the overlapping sum.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from string import ascii_uppercase
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from oracle_products import (
    bilinear,
    made_of_parameters,
    patched_products,
    patched_recurrent,
    product_format,
    product_matrices,
)
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

CONVS = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d}
TRANSPOSED = ["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]
MEASURED_MODULES = (nn.Linear, nn.modules.conv._ConvNd)
EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23}


# -- what is reported ----------------------------------------------------------


@dataclass
class InputTruth:
    """The network's input: spectrum of ∂f/∂x and what needs x itself, per sample."""

    singular: np.ndarray
    rank: np.ndarray
    x_norm: np.ndarray
    invariant: np.ndarray


@dataclass
class LayerTruth:
    """One call of a measured layer; arrays are per sample."""

    name: str | None  # None: the weight is computed and no Linear or Conv module owns the call
    kind: str
    weight: str | None
    bias: str | None
    has_bias: bool
    positions: int
    in_features: int
    out_features: int
    M: int
    operator: float
    kernel: float
    frobenius: float
    x_norm: np.ndarray
    patch_min: np.ndarray
    singular: np.ndarray
    rank: np.ndarray
    singular_through: np.ndarray
    rank_through: np.ndarray
    bypass: np.ndarray
    gap_norm: np.ndarray
    grad_weight: np.ndarray
    grad_bias: np.ndarray
    untied: np.ndarray
    untied_bias: np.ndarray
    adaptive: np.ndarray


@dataclass
class ParameterTruth:
    """‖∂f/∂p‖² and Σ_j p_j² ‖∂f/∂p_j‖² of one parameter, per sample; 0 if frozen or unused."""

    name: str
    numel: int
    frozen: bool
    used: bool
    grad: np.ndarray
    adaptive: np.ndarray


@dataclass
class Truth:
    """Everything the oracle knows. `layers` is None where samples do not make the same calls."""

    n: int
    N: int
    M: int
    output: np.ndarray
    input: InputTruth
    layers: list[LayerTruth] | None
    parameters: list[ParameterTruth]

    def per_sample(self) -> dict[str, np.ndarray]:
        """The metrics that are means over samples, per sample."""
        one = self.input
        values = {
            "sharpness": np.zeros(self.n) + sum(p.grad for p in self.parameters),
            "adaptive_sharpness": np.zeros(self.n) + sum(p.adaptive for p in self.parameters),
            "mls": one.singular[:, 0],
            "volume": volume(one.singular, one.rank),
            "log_volume": log_volume(one.singular, one.rank),
            "local_dimension": local_dimension(one.singular),
            "normalized_mls": one.x_norm**2 * one.singular[:, 0] ** 2,
            "input_invariant_mls": one.invariant,
        }
        if self.layers:
            values |= {
                "sharpness_untied": sum(layer.untied + layer.untied_bias for layer in self.layers),
                "nmls": sum(layer.singular[:, 0] for layer in self.layers),
                "nmls_through": sum(layer.singular_through[:, 0] for layer in self.layers),
                "network_volume": sum(volume(layer.singular, layer.rank) for layer in self.layers),
            }
        return values

    def metrics(self, weight_norm: str = "operator") -> dict[str, float]:
        """Every metric of the network by its canonical name."""
        values = {name: float(np.mean(per)) for name, per in self.per_sample().items()}
        if self.layers:
            values["matrix_normalized_sharpness"] = sum(
                getattr(layer, weight_norm) * float(np.sqrt(np.mean(layer.grad_weight)))
                for layer in self.layers
            )
            values["weighted_nmls"] = sum(
                harmonic(layer.x_norm) * float(np.mean(layer.singular[:, 0]))
                for layer in self.layers
            )
        return values


# -- plain formulas ------------------------------------------------------------


def volume(singular: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """∏ σ_j over all r = min(N, M); 0 where the matrix is rank-deficient."""
    return np.where(rank == singular.shape[1], np.prod(singular, axis=1), 0.0)


def log_volume(singular: np.ndarray, rank: np.ndarray, top: int | None = None) -> np.ndarray:
    """Σ log σ_j over the first `top` (all); -inf where the rank is smaller."""
    top = singular.shape[1] if top is None else top
    with np.errstate(divide="ignore"):
        return np.where(rank >= top, np.log(singular[:, :top]).sum(axis=1), -np.inf)


def local_dimension(singular: np.ndarray) -> np.ndarray:
    """Participation ratio (Σ σ²)² / Σ σ⁴ (Eq. 15); 0 where the Jacobian is 0."""
    top = np.where(singular[:, :1] > 0, singular[:, :1], 1.0)
    squares = (singular / top) ** 2
    return np.where(
        singular[:, 0] > 0, squares.sum(1) ** 2 / np.maximum((squares**2).sum(1), 1e-300), 0.0
    )


def harmonic(x_norm: np.ndarray) -> float:
    """(mean 1/x²)^(-1/2); 0 as soon as one x is 0."""
    return 0.0 if (x_norm == 0).any() else float(np.mean(1 / x_norm**2) ** -0.5)


def rank_of(singular: np.ndarray, size: int, dtype: torch.dtype) -> np.ndarray:
    """How many singular values count: σ_j >= eps · max(N, M) · σ_1, and σ_1 > 0."""
    counts = (singular >= EPS[dtype] * size * singular[:, :1]) & (singular > 0)
    return counts.sum(axis=1)


# -- seeing the calls ----------------------------------------------------------


@dataclass
class Call:
    """One call of a measured layer as it was seen, batch size 1; `index` counts all calls."""

    index: int
    kind: str
    owner: tuple[str, nn.Module]
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    pad: Callable[[Tensor], Tensor]
    geometry: dict[str, Any]
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: dict[str, tuple[Tensor | GradientEdge, torch.Size]]
    values: dict[str, Tensor] = field(default_factory=dict)


class Recorder:
    """Lists the calls of measured layers while `recording(model)` is open."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.modules: list[tuple[str, nn.Module]] = []
        self.inside = False

    def record(self, kind, run, x, weight, bias, pad=lambda x: x, **geometry) -> Tensor:
        if self.inside or not torch.is_grad_enabled():  # nothing under no_grad has a derivative
            return run(x, weight, bias)
        if not x.requires_grad:
            x.requires_grad_()
        dx, dw = (
            torch.zeros_like(x, requires_grad=True),
            torch.zeros_like(weight, requires_grad=True),
        )
        db = None if bias is None else torch.zeros_like(bias, requires_grad=True)
        values = {"x": x.detach().clone(), "weight": weight.detach().clone()}
        entering = get_gradient_edge(x)  # now: an in-place operation may change x afterwards
        self.inside = True
        z = run(x + dx, weight + dw, None if bias is None else bias + db)
        self.inside = False
        targets = {"A": (entering, x.shape), "B": (dx, x.shape), "weight": (dw, weight.shape)}
        targets |= {"z": (get_gradient_edge(z), z.shape)}
        targets |= {} if db is None else {"bias": (db, db.shape)}
        call = Call(
            len(self.calls),
            kind,
            self.modules[-1],
            run,
            pad,
            geometry,
            x,
            weight,
            bias,
            targets,
            values,
        )
        self.calls.append(call)
        return z.clone()  # what is done to z in place is done to the copy

    def linear(self, original):
        def patched(input, weight, bias=None):
            if bias is None or bias.shape == weight.shape[:1]:
                return self.record("linear", original, input, weight, bias)
            return self.record("linear", original, input, weight, None) + bias

        return patched

    def addmm(self, original):
        """bias + x W with W a parameter, as transformers' Conv1D does it."""

        def run(x, w, b):
            return x @ w if b is None else original(b, x, w)

        def patched(bias, x, weight):
            if not isinstance(weight, nn.Parameter):
                return original(bias, x, weight) if not made_of_parameters(x) else x @ weight + bias
            if bias.shape != weight.shape[1:]:
                return self.record("linear", run, x, weight, None, turned=True) + bias
            return self.record("linear", run, x, weight, bias, turned=True)

        return patched

    def record_bilinear(self, original, x1, x2, weight, added) -> Tensor:
        """Two calls with one output: W x1 beside x2, and W x2 beside x1."""
        dw = torch.zeros_like(weight, requires_grad=True)
        moved, calls, sides = [], [], (("xi", "kij", "xkj"), ("xj", "kij", "xki"))
        for x in (x1, x2):
            if not x.requires_grad:
                x.requires_grad_()
            moved.append((get_gradient_edge(x), torch.zeros_like(x, requires_grad=True)))
        (edge1, dx1), (edge2, dx2) = moved
        self.inside = True
        z = original(x1 + dx1, x2 + dx2, weight + dw, None)
        z = z + (added[False] * x2.unsqueeze(-2)).sum(-1) + (added[True] * x1.unsqueeze(-2)).sum(-1)
        self.inside = False
        for swapped, (x, edge, dx) in enumerate([(x1, edge1, dx1), (x2, edge2, dx2)]):
            e, letters = added[bool(swapped)], sides[swapped]
            free = ascii_uppercase[: x.dim() - 1]
            letters = tuple(part.replace("x", free) for part in letters)
            sizes = (1, e.shape[-1] * e.shape[-2], x.shape[-1])
            targets = {"A": (edge, x.shape), "B": (dx, x.shape), "weight": (dw, weight.shape)}
            targets["z"] = (e, e.shape)
            geometry = {"letters": letters, "view": lambda w: w, "sizes": sizes, "product": True}
            values = {"x": x.detach().clone(), "weight": weight.detach().clone()}
            run = partial(apply_product, letters)
            calls.append(
                Call(len(self.calls) + swapped, "bilinear", self.modules[-1], run, lambda x: x,
                     geometry, x, weight, None, targets, values)
            )  # fmt: skip
        self.calls += calls
        return z.clone()

    def conv(self, kind, original):
        def patched(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
            geometry = {
                "stride": stride,
                "padding": padding,
                "dilation": dilation,
                "groups": groups,
            }
            return self.record(
                kind, lambda x, w, b: original(x, w, b, **geometry), input, weight, bias, **geometry
            )

        return patched

    def padded_conv(self, kind, original):
        def patched(module, input, weight, bias):
            if module.padding_mode == "zeros":
                return original(module, input, weight, bias)
            sides, mode = module._reversed_padding_repeated_twice, module.padding_mode
            geometry = {
                "stride": module.stride,
                "padding": 0,
                "dilation": module.dilation,
                "groups": module.groups,
            }
            return self.record(
                kind,
                lambda x, w, b: original(module, x, w, b),
                input,
                weight,
                bias,
                pad=lambda x: F.pad(x, sides, mode=mode),
                **geometry,
            )

        return patched

    def conv_transpose(self, kind, original):
        def patched(
            input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
        ):
            geometry = {
                "stride": stride,
                "padding": padding,
                "dilation": dilation,
                "groups": groups,
            }
            return self.record(
                kind,
                lambda x, w, b: original(x, w, b, output_padding=output_padding, **geometry),
                input,
                weight,
                bias,
                **geometry,
            )

        return patched


def apply_product(letters, x, w, _):
    return torch.einsum(f"{letters[0]},{letters[1]}->{letters[2]}", x, w)


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Within: every measured call anybody makes is recorded."""
    recorder, names = Recorder(), {module: name for name, module in model.named_modules()}
    plain_call = nn.Module.__call__

    def named_call(module, *args, **kwargs):
        recorder.modules.append((names.get(module, ""), module))
        try:
            return plain_call(module, *args, **kwargs)
        finally:
            recorder.modules.pop()

    with ExitStack() as stack:

        def patch(owner, name, new):
            stack.enter_context(mock.patch.object(owner, name, new))

        patch(nn.Module, "__call__", named_call)
        patch(F, "linear", recorder.linear(F.linear))
        for (owner, name), new in patched_products(recorder).items():
            patch(owner, name, new)
        for (owner, name), new in patched_recurrent().items():
            stack.enter_context(mock.patch.object(owner, name, new, create=True))
        patch(torch, "addmm", recorder.addmm(torch.addmm))
        patch(F, "bilinear", bilinear(recorder, F.bilinear))
        for kind, module in CONVS.items():
            patched = recorder.conv(kind, getattr(F, kind))
            patch(F, kind, patched)
            patch(torch, kind, patched)
            patch(module, "_conv_forward", recorder.padded_conv(kind, module._conv_forward))
        for kind in TRANSPOSED:
            patched = recorder.conv_transpose(kind, getattr(F, kind))
            patch(F, kind, patched)
            patch(torch, kind, patched)
        yield recorder


# -- one sample ----------------------------------------------------------------


def original(model: nn.Module) -> nn.Module:
    """What torch.compile and DataParallel wrap."""
    while hasattr(model, "_orig_mod") or isinstance(model, nn.DataParallel):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def mapped(change: Callable[[Tensor], Tensor], x: Any) -> Any:
    """`change` of every tensor of a tensor, tuple or dict."""
    if isinstance(x, dict):
        return {key: mapped(change, value) for key, value in x.items()}
    if isinstance(x, tuple | list):
        return type(x)(mapped(change, value) for value in x)
    return change(x)


def tensors(x: Any) -> list[Tensor]:
    """The tensors of a tensor, tuple or dict, in order."""
    found: list[Tensor] = []
    mapped(lambda t: found.append(t) or t, x)
    return found


def forward(model: nn.Module, x: Any, output: Any) -> Tensor:
    """The selected output; a tuple is spread over the arguments, a dict over the keywords."""
    x = mapped(torch.clone, x)  # a model may change its input in place
    out = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
    if output == "*":
        leaves = [t for t in pytree.tree_leaves(out) if t is not None]
        return torch.cat([t.flatten(1) for t in leaves], 1)
    return out if output is None else output(out) if callable(output) else out[output]


def patches(kind: str, x: Tensor, kernel: torch.Size, geometry: dict[str, Any]) -> Tensor:
    """[batch, G, *positions, channels·k]: the convolution with one-hot kernels, group by group."""
    conv, groups = getattr(F, kind.replace("_transpose", "")), geometry["groups"]
    rest = {key: value for key, value in geometry.items() if key != "groups"}
    parts = x.chunk(groups, dim=1)
    size = parts[0].shape[1] * kernel.numel()
    one_hot = torch.eye(size, dtype=x.dtype).reshape(size, parts[0].shape[1], *kernel)
    return torch.stack([conv(part, one_hot, **rest).movedim(1, -1) for part in parts], dim=1)


def sharing_format(call: Call, gz: Tensor) -> tuple[Tensor, Tensor]:
    """u [G, T, d_in], J [N, G, T, d_out] from what entered the call and ∂f/∂z [N, *z.shape]."""
    if call.geometry.get("product"):
        return product_format(call, gz)
    x, N = call.values["x"], gz.shape[0]
    if call.kind == "linear":
        width = call.weight.shape[0 if call.geometry.get("turned") else -1]
        return x.reshape(1, -1, width), gz.reshape(N, 1, x.numel() // width, -1)
    groups, kernel, batch = call.geometry["groups"], call.weight.shape[2:], len(x)
    gz = gz.flatten(
        0, 1
    )  # [N·batch, C, *positions]; the batch is 1 unless positions are folded into it
    if "transpose" not in call.kind:
        u = patches(call.kind, call.pad(x), kernel, call.geometry)
        J = gz.unflatten(1, (groups, -1)).movedim(2, -1)
    else:
        u = x.unflatten(1, (groups, -1)).movedim(2, -1)
        J = patches(call.kind, gz, kernel, call.geometry)
        J = J[
            (slice(None), slice(None), *(slice(size) for size in x.shape[2:]))
        ]  # output_padding may reach further
    J = J.unflatten(0, (N, batch)).transpose(1, 2)
    return u.transpose(0, 1).flatten(1, -2), J.flatten(2, -2)


def kernel_matrices(call: Call) -> Tensor:
    """The weight as one matrix per group, [G, rows, columns]."""
    if call.geometry.get("product"):
        return product_matrices(call)
    groups = call.geometry.get("groups", 1)
    w = torch.atleast_2d(call.values["weight"])
    w = w.mT if call.geometry.get("turned") else w
    return w.reshape(groups, w.shape[0] // groups, -1)


def norms(call: Call) -> dict[str, float]:
    """Of the dense unrolled layer without bias, of the flattened kernel, of the weight."""
    w, zero = call.values["weight"], torch.zeros_like(call.values["x"])
    dense = torch.autograd.functional.jacobian(lambda x: call.run(x, w, None), zero)
    return {
        "operator": float(torch.linalg.svdvals(dense.reshape(-1, zero.numel()))[0]),
        "kernel": float(torch.linalg.svdvals(kernel_matrices(call)).max()),
        "frobenius": float(w.norm()),
    }


def full_jacobians(out: Tensor, targets: list[tuple[Any, torch.Size]]) -> list[Tensor | None]:
    """[N, *shape] for every (target, shape); None where the graph does not lead there."""
    inputs = [target for target, _ in targets]
    rows = [torch.autograd.grad(f, inputs, retain_graph=True, allow_unused=True) for f in out]
    found: list[Tensor | None] = []
    for column, (_, shape) in zip(zip(*rows, strict=True), targets, strict=True):
        zero = torch.zeros(shape, dtype=out.dtype)
        dense = [zero if row is None else row.to_dense() for row in column]
        found.append(None if all(row is None for row in column) else torch.stack(dense))
    return found


def sample_calls(model: nn.Module, x: Any, output: Any) -> tuple[dict[str, Any], list[Call]]:
    """One sample: output, full Jacobians, and the calls that the output depends on."""
    x = mapped(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), x)
    leaves = [t for t in tensors(x) if t.is_floating_point()]
    parameters = dict(model.named_parameters())
    with recording(model) as recorder, torch.compiler.set_stance("force_eager"):
        out = forward(model, x, output).flatten()
        calls = list(recorder.calls)  # now: activation checkpointing calls again in the backward
        targets = [(t, t.shape) for t in [*leaves, *parameters.values()]]
        for call in calls:
            targets += call.targets.values()
        jacobians = iter(full_jacobians(out, targets))

    every = [(leaf, next(jacobians)) for leaf in leaves]
    # What the output does not depend on is no input, unless it depends on none at all.
    inputs = [(leaf, a) for leaf, a in every if a is not None] or every
    seen: dict[str, Any] = {
        "output": out.detach(),
        "x": torch.cat([leaf.detach().flatten() for leaf, _ in inputs]),
        "A": torch.cat(
            [
                leaf.new_zeros(len(out), leaf.numel()) if a is None else a.flatten(1)
                for leaf, a in inputs
            ],
            1,
        ),
        "parameters": {name: next(jacobians) for name in parameters},
    }
    for call in calls:
        call.values |= {f"d{key}": next(jacobians) for key in call.targets}
    has_entries = [c for c in calls if c.x.numel() > 0 and c.weight.numel() > 0]
    return seen, [c for c in has_entries if c.values["dB"] is not None]


# -- all samples ---------------------------------------------------------------


def squares(jacobian: Tensor | None) -> float:
    """‖J‖_F²; 0 where there is none."""
    return 0.0 if jacobian is None else float((jacobian**2).sum())


def weighted_squares(jacobian: Tensor | None, value: Tensor) -> float:
    """Σ_j w_j² ‖∂f/∂w_j‖²."""
    return 0.0 if jacobian is None else float((jacobian**2 * value.detach() ** 2).sum())


def layer_sample(
    call: Call, gradients: dict[str, Tensor | None], names: dict[int, str]
) -> dict[str, Any]:
    """One call at one sample: every number that a layer reports."""
    values = call.values
    A, B = values["dA"].flatten(1), values["dB"].flatten(1)
    u, J = sharing_format(call, values["dz"])
    u2, J2 = (u**2).sum(-1), (J**2).sum((0, 3))
    weight, bias = names.get(id(call.weight)), names.get(id(call.bias))
    dw = values["dweight"] if weight is None else gradients[weight]
    db = values.get("dbias") if bias is None else gradients[bias]
    biased = call.bias is not None and "transpose" not in call.kind
    total, gap = float(A.norm()), A - B
    return {
        "x_norm": float(values["x"].norm()),
        "patch_min": float(u2.min()),
        "singular": torch.linalg.svdvals(A).numpy(),
        "singular_through": torch.linalg.svdvals(B).numpy(),
        "bypass": float(gap.norm()) / total if total > 0 else 0.0,
        "gap_norm": float(torch.linalg.svdvals(gap)[0]),
        "grad_weight": squares(dw),
        "grad_bias": 0.0 if call.bias is None else squares(db),
        "untied": float((J2 * u2).sum()),
        "untied_bias": float(J2.sum()) if biased else 0.0,
        "adaptive": weighted_squares(dw, values["weight"]),
    }


def layer_name(call: Call, weight: str | None) -> str | None:
    """The weight's name without its ending; for a computed weight the module that owns the call."""
    if weight is not None:
        for ending in (".weight", "_weight"):
            weight = weight.removesuffix(ending)
        return weight
    name, module = call.owner
    return name if isinstance(module, MEASURED_MODULES) else None


def layer_truth(
    calls: list[Call], samples: list[dict], names: dict[int, str], dtype: torch.dtype
) -> LayerTruth:
    """One call over all samples; `calls[i]` is the call at sample i."""
    call = calls[0]
    weight, bias = names.get(id(call.weight)), names.get(id(call.bias))
    rows = [
        layer_sample(c, sample["parameters"], names)
        for c, sample in zip(calls, samples, strict=True)
    ]
    arrays = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    u, J = sharing_format(call, call.values["dz"])
    size = max(J.shape[0], call.x.numel())
    return LayerTruth(
        name=layer_name(call, weight),
        kind=call.kind,
        weight=weight,
        bias=bias,
        has_bias=call.bias is not None,
        positions=u.shape[1],
        in_features=u.shape[2],
        out_features=J.shape[3],
        M=call.x.numel(),
        rank=rank_of(arrays["singular"], size, dtype),
        rank_through=rank_of(arrays["singular_through"], size, dtype),
        **norms(call),
        **arrays,
    )


def numbered(layers: list[LayerTruth]) -> list[LayerTruth]:
    """A second call of the same name becomes name#2."""
    seen: dict[str, int] = {}
    for layer in layers:
        if layer.name is not None:
            seen[layer.name] = count = seen.get(layer.name, 0) + 1
            layer.name += "" if count == 1 else f"#{count}"
    return layers


def oracle(
    model: nn.Module, x: Any, output: Any = None, dtype: torch.dtype = torch.float64
) -> Truth:
    """Everything about `model` at the samples `x`; ranks are judged at the eps of `dtype`."""
    model = copy.deepcopy(original(model)).double().eval()
    frozen = {name: not p.requires_grad for name, p in model.named_parameters()}
    model.requires_grad_(True)  # derivatives exist whether or not one trains by them
    names = {id(p): name for name, p in model.named_parameters()}
    x = mapped(lambda t: t.detach().double() if t.is_floating_point() else t, x)
    n = len(tensors(x)[0])
    each = [sample_calls(model, mapped(lambda t, i=i: t[i : i + 1], x), output) for i in range(n)]
    samples, calls = [seen for seen, _ in each], [called for _, called in each]

    A = [sample["A"] for sample in samples]
    N, M = A[0].shape
    singular = np.array([torch.linalg.svdvals(a).numpy() for a in A])
    one = InputTruth(
        singular=singular,
        rank=rank_of(singular, max(N, M), dtype),
        x_norm=np.array([float(sample["x"].norm()) for sample in samples]),
        invariant=np.array([weighted_squares(a, s["x"]) for a, s in zip(A, samples, strict=True)]),
    )

    parameters = []
    for name, p in model.named_parameters():
        jacobians = [sample["parameters"][name] for sample in samples]
        counts = 0.0 if frozen[name] else 1.0
        parameters.append(
            ParameterTruth(
                name=name,
                numel=p.numel(),
                frozen=frozen[name],
                used=any(j is not None for j in jacobians),
                grad=counts * np.array([squares(j) for j in jacobians]),
                adaptive=counts * np.array([weighted_squares(j, p) for j in jacobians]),
            )
        )

    layers = None
    paths = {tuple((c.index, c.x.shape, names.get(id(c.weight))) for c in made) for made in calls}
    if len(paths) == 1:
        same = [list(row) for row in zip(*calls, strict=True)]
        layers = numbered([layer_truth(row, samples, names, dtype) for row in same])
    output_values = torch.stack([sample["output"] for sample in samples]).numpy()
    return Truth(n, N, M, output_values, one, layers, parameters)
