"""The oracle for products with a weight, bilinear layers and recurrent layers.

A product is `z = einsum(x, W)` with a letter for each dimension. Letters in x, W and z are groups,
letters in x and W are summed, letters in W and z are outputs, the others of x are positions. The
recurrent functions are written out step by step with `F.linear`, which the oracle already sees.
"""

from collections.abc import Callable
from math import prod
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# -- letters -------------------------------------------------------------------


def matmul_letters(a: Tensor, b: Tensor) -> tuple[str, str, str]:
    batch = "PQRSTUVW"
    x = batch[8 - max(a.dim() - 2, 0) :] if a.dim() > 2 else ""
    y = batch[8 - max(b.dim() - 2, 0) :] if b.dim() > 2 else ""
    left = x + ("mi" if a.dim() > 1 else "i")
    right = y + ("in" if b.dim() > 1 else "i")
    longer = x if len(x) >= len(y) else y
    return left, right, longer + ("m" if a.dim() > 1 else "") + ("n" if b.dim() > 1 else "")


def fitted(x: Tensor, w: Tensor, letters: tuple[str, str, str]) -> tuple[str, str, str]:
    """Give each broadcast dimension of size 1 a new letter."""
    left, right, result = letters
    fresh = [c for c in ascii_letters if c not in left + right + result]
    for c in [c for c in left if c in right and c in result]:
        if w.shape[right.index(c)] == 1:
            right = right.replace(c, fresh.pop())
        elif x.shape[left.index(c)] == 1:
            left = left.replace(c, fresh.pop())
    return left, right, result


def roles(letters: tuple[str, str, str]) -> tuple[str, str, str, str]:
    """Return the letters of groups, sums, outputs and positions."""
    x, w, z = letters
    groups = "".join(c for c in w if c in x and c in z)
    summed = "".join(c for c in x if c in w and c not in z)
    outputs = "".join(c for c in z if c in w and c not in x)
    return groups, summed, outputs, "".join(c for c in x if c not in w)


def product_format(call: Any, gz: Tensor) -> tuple[Tensor, Tensor]:
    """Return u [G, T, d_in] and J [N, G, T, d_out] of a product."""
    x, (left, _, result) = call.values["x"], call.geometry["letters"]
    groups, summed, outputs, free = roles(call.geometry["letters"])
    seen = "".join(c for c in free if c in result)
    G, d_out, d_in = call.geometry["sizes"]
    u = torch.einsum(f"{left}->{groups}{free}{summed}", x).reshape(G, -1, d_in)
    v = next(c for c in ascii_letters if c not in result)
    J = torch.einsum(f"{v}{result}->{v}{groups}{seen}{outputs}", gz)
    return u, J.reshape(len(gz), G, -1, d_out)


def product_matrices(call: Any, weight: Tensor | None = None) -> Tensor:
    """Return the weight, or a tensor of its shape, as one matrix per group, [G, d_out, d_in]."""
    groups, summed, outputs, _ = roles(call.geometry["letters"])
    w = call.geometry["view"](call.values["weight"] if weight is None else weight)
    matrices = torch.einsum(f"{call.geometry['letters'][1]}->{groups}{outputs}{summed}", w)
    return matrices.reshape(call.geometry["sizes"])


# -- seeing products -----------------------------------------------------------


def made_of_parameters(t: Tensor) -> bool:
    """Whether a tensor is computed from parameters alone."""
    if isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter):
        return True
    if t.grad_fn is None:
        return False
    queue, seen = [t.grad_fn], set()
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and not isinstance(node.variable, nn.Parameter):
            return False
        queue += [child for child, _ in node.next_functions if child is not None]
    return True


def behind(weight: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the parameter that a weight is a view of, and the view."""
    base = weight._base
    if isinstance(weight, nn.Parameter) or not isinstance(base, nn.Parameter):
        return weight, lambda w: w
    if base.numel() != weight.numel():
        return weight, lambda w: w
    shape, stride = weight.shape, weight.stride()
    return base, lambda w: w.contiguous().as_strided(shape, stride)


def multiply(recorder: Any, a: Tensor, b: Tensor, letters: Any, function: Callable) -> Tensor:
    """Return function(a, b), and record it if one operand is a weight and something is summed."""
    seen = torch.is_grad_enabled() and not recorder.inside
    if not seen or made_of_parameters(a) == made_of_parameters(b):
        return function(a, b)
    if made_of_parameters(a):
        left, right, result = letters
        swapped = (right, left, result)
        return multiply(recorder, b, a, swapped, lambda x, w: function(w, x))
    letters = fitted(a, b, letters)
    groups, summed, outputs, _ = roles(letters)
    if not summed:
        return function(a, b)
    size = dict(zip(letters[1], b.shape, strict=True))
    sizes = tuple(prod(size[c] for c in part) for part in (groups, outputs, summed))
    weight, view = behind(b)
    geometry = {"letters": letters, "view": view, "sizes": sizes}
    kind = "linear" if sizes[0] == 1 else "grouped linear"
    return recorder.record(
        kind, lambda x, w, _: function(x, view(w)), a, weight, None, product=True, **geometry
    )


def patched_products(recorder: Any) -> dict[tuple[Any, str], Callable]:
    """Return the replacement of each function by its owner and name."""
    matmul, einsum = torch.matmul, torch.einsum

    def product(a, b):
        return multiply(recorder, a, b, matmul_letters(a, b), matmul)

    def contracted(equation, *operands):
        spelt = equation.replace(" ", "")
        operands = operands[0] if isinstance(operands[0], (list, tuple)) else operands
        if len(operands) != 2 or "..." in spelt or "->" not in spelt:
            return einsum(equation, *operands)
        terms, result = spelt.split("->")
        left, right = terms.split(",")

        def run(x, w):
            return einsum(equation, x, w)

        return multiply(recorder, *operands, (left, right, result), run)

    def add(function):
        def patched(c, a, b):
            if made_of_parameters(a) == made_of_parameters(b):
                return function(c, a, b)
            return product(a, b) + c

        return patched

    patches = {(torch, name): product for name in ("matmul", "mm", "bmm", "mv")}
    patches |= {(Tensor, name): product for name in ("matmul", "mm", "bmm", "mv", "__matmul__")}
    patches |= {(torch, "einsum"): contracted, (torch, "baddbmm"): add(torch.baddbmm)}
    tensordot = torch.tensordot
    patches[torch, "tensordot"] = lambda a, b, dims: (
        product(a, b) if dims == 1 else tensordot(a, b, dims)
    )
    patches[Tensor, "__rmatmul__"] = lambda b, a: product(a, b)
    return patches


# -- bilinear ------------------------------------------------------------------


def bilinear(recorder: Any, original: Callable) -> Callable:
    """Record x1 W x2 twice, as W x1 and as W x2, each with a zero added to it."""

    def patched(x1, x2, weight, bias=None):
        if recorder.inside or not torch.is_grad_enabled():
            return original(x1, x2, weight, bias)
        added = {}

        def side(x, swapped):
            d_other = x2.shape[-1] if not swapped else x1.shape[-1]
            zero = torch.zeros(*x.shape[:-1], len(weight), d_other, dtype=x.dtype)
            added[swapped] = zero.requires_grad_()

        side(x1, False)
        side(x2, True)
        z = recorder.record_bilinear(original, x1, x2, weight, added)
        return z if bias is None else z + bias

    return patched


# -- recurrent layers ----------------------------------------------------------


def split(flat: list[Tensor], biases: bool, projected: bool) -> list[dict[str, Tensor]]:
    names = ["ih", "hh"] + (["bih", "bhh"] if biases else []) + (["hr"] if projected else [])
    chunks = [flat[k : k + len(names)] for k in range(0, len(flat), len(names))]
    return [dict(zip(names, chunk, strict=True)) for chunk in chunks]


def one_step(kind: str, x: Tensor, h: Tensor, c: Tensor | None, w: dict[str, Tensor]) -> Any:
    a, b = F.linear(x, w["ih"], w.get("bih")), F.linear(h, w["hh"], w.get("bhh"))
    size = w["hh"].shape[0]
    if kind.startswith("rnn"):
        return (torch.tanh if kind == "rnn_tanh" else torch.relu)(a + b), None
    if kind == "gru":
        k = size // 3
        r = torch.sigmoid(a[..., :k] + b[..., :k])
        z = torch.sigmoid(a[..., k : 2 * k] + b[..., k : 2 * k])
        n = torch.tanh(a[..., 2 * k :] + r * b[..., 2 * k :])
        return (1 - z) * n + z * h, None
    k, s = size // 4, a + b
    i, f, o = (torch.sigmoid(s[..., j * k : (j + 1) * k]) for j in (0, 1, 3))
    c = f * c + i * torch.tanh(s[..., 2 * k : 3 * k])
    h = o * torch.tanh(c)
    return (F.linear(h, w["hr"]) if "hr" in w else h), c


def sequence(kind: str, original: Callable) -> Callable:
    def patched(x, hx, *rest):
        if isinstance(hx, Tensor) and hx.dtype == torch.int64:
            return original(x, hx, *rest)  # a packed sequence
        flat, biases, layers, _, _, both_ways, batch_first = rest
        h0, c0 = hx if kind == "lstm" else (hx, None)
        steps = list(x.transpose(0, 1) if batch_first and x.dim() == 3 else x)
        weights = split(flat, biases, len(flat) // (layers * (1 + both_ways)) % 2 == 1)
        ends_h, ends_c = [], []
        for layer in range(layers):
            outputs = [[] for _ in steps]
            for way in range(1 + both_ways):
                number = layer * (1 + both_ways) + way
                h, c = h0[number], None if c0 is None else c0[number]
                places = range(len(steps)) if way == 0 else range(len(steps) - 1, -1, -1)
                for t in places:
                    h, c = one_step(kind, steps[t], h, c, weights[number])
                    outputs[t].append(h)
                ends_h.append(h)
                ends_c.append(c)
            steps = [torch.cat(pair, -1) if both_ways else pair[0] for pair in outputs]
        out = torch.stack(steps)
        out = out.transpose(0, 1) if batch_first and x.dim() == 3 else out
        ends = [torch.stack(ends_h)] + ([torch.stack(ends_c)] if kind == "lstm" else [])
        return (out, *ends)

    return patched


def cell(kind: str) -> Callable:
    def patched(x, hx, ih, hh, bih=None, bhh=None):
        weights = {"ih": ih, "hh": hh}
        weights |= {} if bih is None else {"bih": bih, "bhh": bhh}
        h, c = hx if kind == "lstm" else (hx, None)
        c = c.clone() if c is h and c is not None else c  # two states, if one tensor of zeros
        h, c = one_step(kind, x, h, c, weights)
        return (h, c) if kind == "lstm" else h

    return patched


RECURRENT = ("rnn_tanh", "rnn_relu", "lstm", "gru")


def patched_recurrent() -> dict[tuple[Any, str], Callable]:
    whole = {(torch._VF, kind): sequence(kind, getattr(torch._VF, kind)) for kind in RECURRENT}
    return whole | {(torch._VF, f"{kind}_cell"): cell(kind) for kind in RECURRENT}
