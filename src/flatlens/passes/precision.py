"""Checks for derivatives that a precision cannot hold: they vanish, or cancel in rounding.

A confident softmax is an example. Its backward pass subtracts numbers that agree in all digits, so
part of a small derivative is lost. Samples of a float32 network are then measured in float64. For a
network that is measured in half precision on request, an error is raised. In float64 there is no
wider precision to turn to, so the result has a note.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flatlens.algebra.looks import unusual
from flatlens.algebra.sums import relative, side_by_side
from flatlens.algebra.wide_tensor import HALF
from flatlens.capture.no_trace import name_of
from flatlens.errors import FlatlensError
from flatlens.passes.columns import ChunkColumns
from flatlens.passes.forward import Forward
from flatlens.per_sample import LARGEST, norm_per_sample, used_by
from flatlens.probes import InputProbe, LayerProbe, Probe

SMALL = 1e-5  # a derivative below this may be the rounding error of larger numbers
LOST = 1e-2  # relative error of a derivative that has lost its digits
LOGITS = "measure outputs that lie before the rounding, such as logits instead of probabilities"
ROUNDED = f"some derivatives are mostly rounding, also in float64; {LOGITS}"


class NeedsFloat64Error(FlatlensError):
    """Raised if a derivative is lost in float32."""

    def __init__(self, sample: int) -> None:
        super().__init__(
            f"the derivative of sample {sample} is too small for float32, which loses its digits; "
            "measure the network in float64 (model.double(), x.double())"
        )


class LostInFloat64Error(FlatlensError):
    """Raised if products contradict one another because a derivative is lost in float64."""

    def __init__(self, sample: int) -> None:
        super().__init__(
            f"the derivative of sample {sample} is mostly rounding, also in float64; {LOGITS}"
        )


class ComputesInFloat32Error(FlatlensError):
    """Raised if a network of float64 parameters computes in float32 on the way to its output."""

    def __init__(self) -> None:
        super().__init__(
            "the network has float64 parameters, computes in float32 inside and has derivatives "
            "that are too small for float32; let it compute in float64"
        )


class LostInHalfPrecisionError(FlatlensError):
    """Raised if a derivative is lost in half precision."""

    def __init__(self, sample: int, precision: torch.dtype) -> None:
        super().__init__(
            f"the derivative of sample {sample} is too small for {name_of(precision)}, which loses "
            'its digits; use the default, precision="wide", which computes in float32'
        )


def check_not_vanishing(chunk: ChunkColumns, start: int, precision: torch.dtype) -> None:
    """Raise if derivatives are below the normal numbers of their precision.

    Args:
        chunk: the numbers of a network.
        start: the number of the first sample.
        precision: the precision of the network, float32 or half.

    Raises:
        NeedsFloat64Error: if the largest singular value of a sample has few digits for this reason.
        LostInHalfPrecisionError: the same, if the network is measured in half precision.
    """
    columns = [v[:, 0] for key, v in chunk.columns.items() if key[-1] == "singular"]
    if columns:
        tops = torch.stack([column.double() for column in columns], 1)
        vanishing = ((tops > 0) & (tops < torch.finfo(precision).tiny)).any(1)
        refuse_lost(vanishing, start, precision)


def small_derivatives(chunk: ChunkColumns, precision: torch.dtype) -> Bool[Tensor, " b"]:
    """Return which samples have derivatives so small that their digits may be lost.

    Args:
        chunk: the numbers of a network.
        precision: the precision of the network, float32 or half.
    """
    small = max(SMALL, torch.finfo(precision).eps) if precision in HALF else SMALL
    if ("input", "singular") in chunk.columns:
        top = chunk.columns["input", "singular"][:, 0]
        return (top > 0) & (top < small)
    grads = [v for key, v in chunk.columns.items() if key[0] == "parameter" and key[-1] == "grad"]
    if not grads:
        return torch.zeros(len(chunk.columns["output",]), dtype=torch.bool)
    total = torch.stack(grads).sum(0)
    return (total > 0) & (total < small**2)


def lost_digits(forward: Forward) -> Bool[Tensor, " b"]:
    """Return the samples whose derivative along v + w is not the sum of those along v and w.

    The outputs are split at random, so that outputs whose derivatives cancel are separated.
    """
    f, edges = forward.f, [e for e in forward.edges if e.node in forward.graph.nodes]
    if not edges or f.shape[1] == 1:
        return torch.zeros(len(f), dtype=torch.bool, device=f.device)
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(f.shape[1], generator=generator, dtype=torch.float64, device="cpu").to(f)
    chosen = (torch.rand(f.shape[1], generator=generator) < 0.5).to(f.device)

    def along(direction: Tensor) -> Float[Tensor, "b M"]:
        grads = torch.autograd.grad(f, edges, direction.expand_as(f), retain_graph=True)
        return side_by_side([g.to_dense().reshape(len(f), -1).double() for g in grads])

    together, apart = along(v), along(v * chosen) + along(v * ~chosen)
    limit = LOST if forward.half is None else max(LOST, 32 * torch.finfo(forward.half).eps)
    return relative(together - apart, apart) > limit


def check_squares(p: Probe) -> None:
    """Raise if squares of weights, activations or derivatives leave the range of float64.

    Raises:
        FlatlensError: if a size is above 1e140; the message names the sample.
    """
    sizes = [("the input", p.input.x_norm), ("the derivative", p.input.singular[:, 0])]
    for layer in p.layers:
        absent = ~used_by(layer)
        columns = (
            (f"the weight of {layer.name}", norm_per_sample(layer)),
            (f"the input of {layer.name}", layer.x_norm),
            (f"the derivative with respect to the input of {layer.name}", layer.singular[:, 0]),
        )
        sizes += [(what, np.where(absent, 0.0, values)) for what, values in columns]
    for what, values in sizes:
        if (values > LARGEST).any():
            sample = int(np.argmax(values > LARGEST))
            raise FlatlensError(
                f"{what} has size {values[sample]:.0e} for sample {sample}, and its square is too "
                "large for float64; scale the network or its input down"
            )


def rank_note(p: Probe) -> str:
    """Describe where the tolerance of the precision decides the rank, so that a volume is 0."""
    if p.dtype == torch.float64 or p.sketch is not None:
        return ""
    names = ["the input"] if _lacks_rank(p.input) else []
    names += [q.name for q in p.layers if _lacks_rank(q)]
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    half = p.dtype in HALF
    tolerance = "eps sqrt(min(N, M))" if half else "eps max(N, M)"
    advice = 'precision="wide"' if half else "model.double()"
    return (
        f"singular values below {tolerance} of the largest count as 0 in {name_of(p.dtype)}; this "
        f"decides the rank at {', '.join(names[:3])}{more}, and a volume there is 0; {advice} "
        "resolves smaller values"
    )


def _lacks_rank(part: InputProbe | LayerProbe) -> bool:
    """Whether some sample's derivative lacks full rank."""
    room = np.full(len(part.rank), part.singular.shape[1])
    if isinstance(part, LayerProbe):
        room = np.minimum(room, part.M if part.entries is None else part.entries)
        room = np.where(used_by(part), room, 0)
    # If all values are 0, the tolerance decides nothing.
    return bool(((part.rank >= 0) & (part.rank < room) & (part.singular[:, 0] > 0)).any())


def refuse_lost(lost: Bool[Tensor, " b"], start: int, precision: torch.dtype) -> None:
    """Refuse a network with samples whose derivatives are lost.

    Args:
        lost: the samples.
        start: the number of the first sample.
        precision: the precision that the network is measured in.

    Raises:
        NeedsFloat64Error: in float32.
        LostInHalfPrecisionError: in half precision.
        LostInFloat64Error: in float64.
    """
    if not unusual(lost.any()):
        return
    sample = start + int(lost.nonzero()[0])
    if precision in HALF:
        raise LostInHalfPrecisionError(sample, precision)
    raise LostInFloat64Error(sample) if precision == torch.float64 else NeedsFloat64Error(sample)
