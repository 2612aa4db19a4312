"""What one pass saw: a handful of float64 numbers per sample, layer and parameter.

Everything the paper defines is arithmetic on these numbers (``metrics``). Symbols are those of
``docs/theory.md``: A = df/dx^l in total, B = df/dx^l through the layer alone, J = df/dz^l, u_p the
patches of x^l, n samples, N outputs.

Each measured column is declared here, once: its name and shape are those of the field, and
:func:`column` says how it is combined over random directions and over shards of the samples, and
what stands in its place where a pass did not measure it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int

from flatlens.algebra.operator_norms import WeightNorms
from flatlens.capture.chain import Chain
from flatlens.errors import FlatlensError

Array = np.ndarray
T = TypeVar("T")
OverDirections = Literal["mean", "largest", "spectrum", "same"]
OverShards = Literal["concatenate", "mean", "all", "slowest", "same"]
REQUIRED = "required"
PATHS = ("unused", "frozen", "layer", "rule", "slow")  # a later one overrides an earlier one


@dataclass(frozen=True)
class Column:
    """How one field is filled.

    Attributes:
        directions: how a sketch combines the values of its random directions. "mean" and "largest"
            are taken over directions, "spectrum" is replaced by what Lanczos finds, "same" does not
            depend on the direction.
        shards: how probes of shares of the samples are put together.
        missing: the value where a pass did not measure the column: a number for every sample, the
            name of another column of the same owner, None, or REQUIRED.
        samples: whether there is one value per sample.
    """

    directions: OverDirections = "same"
    shards: OverShards = "concatenate"
    missing: float | str | None = REQUIRED
    samples: bool = True


def declared(owner: Any) -> dict[str, Column]:
    """The declared columns of a dataclass, by the name of their field."""
    return {f.name: f.metadata["column"] for f in fields(owner) if "column" in f.metadata}


def column(
    directions: OverDirections = "same", missing: float | str | None = REQUIRED
) -> dict[str, Column]:
    """Declare a column with one value per sample."""
    return {"column": Column(directions, missing=missing)}


def over_shards(how: OverShards) -> dict[str, Column]:
    """Declare a field with one value for all samples, and how shards of the samples combine it."""
    return {"column": Column(shards=how, samples=False)}


@dataclass(frozen=True)
class InputProbe:
    """The network as seen from its input."""

    singular: Float[Array, "n r"] = field(metadata=column("spectrum"))  # of A = df/dx, descending
    rank: Int[Array, " n"] = field(metadata=column("spectrum"))
    x_norm: Float[Array, " n"] = field(metadata=column(missing=np.nan))
    invariant: Float[Array, " n"] = field(
        metadata=column("mean", np.nan)
    )  # sum_p x_p^2 ||A[:, p]||^2, Eq. 43
    # participation ratio, where it is estimated
    dimension: Float[Array, " n"] | None = field(default=None, metadata=column("spectrum", None))


@dataclass(frozen=True)
class LayerProbe:
    """One call of a linear map."""

    name: str
    kind: str
    weight: str | None  # the parameter that is the weight; None where the weight is computed
    bias: str | None
    has_bias: bool
    # the bias is a trainable parameter used once, so that grad_b f = sum_p J_p
    bias_counts: bool = field(metadata=over_shards("all"))
    positions: int
    groups: int
    in_features: int
    out_features: int
    M: int
    reads_input: bool = field(
        metadata=over_shards("all")
    )  # x^l is the network's input, up to a reshape
    norms: WeightNorms
    norm: float  # the one chosen by weight_norm
    kappa: int  # how often one input entry occurs over all patches, at most
    fewest: int  # the same, at least
    is_output: bool = field(metadata=over_shards("all"))  # the layer's output is f, up to a reshape
    x_norm: Float[Array, " n"] = field(metadata=column())
    patch_min: Float[Array, " n"] = field(metadata=column())  # min_p ||u_p||^2
    singular: Float[Array, "n r"] = field(metadata=column("spectrum"))  # of A
    rank: Int[Array, " n"] = field(metadata=column("spectrum"))
    singular_through: Float[Array, "n r"] = field(metadata=column("spectrum", "singular"))  # of B
    rank_through: Int[Array, " n"] = field(metadata=column("spectrum", "rank"))
    bypass: Float[Array, " n"] = field(metadata=column("largest", 0.0))  # ||A - B||_F / ||A||_F
    gap_norm: Float[Array, " n"] = field(metadata=column("spectrum", 0.0))  # ||A - B||_2
    grad_weight: Float[Array, " n"] = field(
        metadata=column("mean")
    )  # ||grad_W f||_F^2, all uses of the parameter
    grad_bias: Float[Array, " n"] = field(metadata=column("mean"))
    untied: Float[Array, " n"] = field(metadata=column("mean"))  # sum_p ||J_p||_F^2 ||u_p||^2
    untied_bias: Float[Array, " n"] = field(metadata=column("mean"))  # sum_p ||J_p||_F^2
    adaptive: Float[Array, " n"] = field(metadata=column("mean", np.nan))  # sum W^2 (df/dW)^2
    # if x^l is the network's input: the part of df/dx that is not A, relative
    beside: Float[Array, " n"] = field(metadata=column("largest", 0.0))
    # ||A - B - A of the next layer||_F, relative; inf where the shapes differ
    chain: Float[Array, " n"] = field(metadata=column("largest", np.inf))
    patch_rank: Float[Array, " n"] = field(
        metadata=column()
    )  # smallest singular value of [U, 1], or 0
    untied_norm: Float[Array, " n"] | None = field(
        default=None, metadata=column("same", None)
    )  # ||D^-1 C||_2
    energy: Float[Array, " n"] | None = field(
        default=None, metadata=column("mean", None)
    )  # estimate of ||A||_F^2
    dimension: Float[Array, " n"] | None = field(default=None, metadata=column("spectrum", None))


@dataclass(frozen=True)
class FirstLayerProbe:
    """What only the layer that reads the network's input is asked for (Eqs. 36, 37, 44)."""

    weight: Float[Array, "g o i"]
    # sum_j ||sum_p u_pj (J_p W)_j||^2
    invariant: Float[Array, " n"] = field(metadata=column("mean"))
    # mean_i ||df/dW_kj||^2, of a dense layer
    curvature: Float[Array, "o i"] | None = field(default=None, metadata=over_shards("mean"))
    # mean_i ||A_i[:, j]||^2 x_ik^2, of a dense layer
    crossed: Float[Array, "M M"] | None = field(default=None, metadata=over_shards("mean"))


@dataclass(frozen=True)
class ParameterProbe:
    """One parameter's share of the sharpness, and how it was found.

    ``path``: "layer" (weight of a measured layer), "rule" (one copy per sample), "slow" (samples
    one at a time), "frozen" (no part of S) or "unused" (the output does not depend on it).
    """

    name: str
    numel: int
    path: str = field(metadata=over_shards("slowest"))
    grad: Float[Array, " n"] = field(metadata=column("mean"))  # ||df/dp||_F^2
    adaptive: Float[Array, " n"] = field(
        metadata=column("mean", np.nan)
    )  # sum_j p_j^2 ||df/dp_j||^2


@dataclass(frozen=True)
class Sketch:
    """What was estimated: sums of squares from random output directions, spectra by Lanczos.

    Singular values beyond the top few are NaN, and so is what needs them; ranks are -1.
    """

    directions: int  # per sample, at least
    seed: int
    errors: dict[str, float]  # standard error of each quantity that is a mean over directions
    layer_errors: list[dict[str, float]]  # the same, of each layer's columns
    converged: bool  # whether every largest singular value met the tolerance


@dataclass(frozen=True)
class Probe:
    """What one pass over n samples saw."""

    n: int
    N: int
    M: int
    dtype: torch.dtype
    output: Float[Array, "n N"]
    input: InputProbe
    layers: list[LayerProbe]
    parameters: list[ParameterProbe]
    first: FirstLayerProbe | None
    chunk: int
    notes: list[str] = field(default_factory=list)
    sketch: Sketch | None = None
    inputs: list[str] = field(default_factory=list)  # arguments that a derivative was taken by
    chain: Chain | None = None  # layers and Lipschitz maps from input to output; None: not looked

    def merge(self, *others: Probe) -> Probe:
        """Return one probe of all samples, from probes of shares of them, in their order."""
        return merge(self, *others)

    def with_notes(self, *notes: str) -> Probe:
        """Return the same probe with more notes on how it came to be."""
        return replace(self, notes=[*self.notes, *notes])


# -- merging -------------------------------------------------------------------------------------


def merge(*probes: Probe) -> Probe:
    """Put probes of shares of the samples together: what one probe of all samples would be.

    Args:
        probes: probes of one network, by one method.

    Returns:
        A probe of all samples, in the order of the probes.

    Raises:
        FlatlensError: if the probes are of different networks, or exact and sketched ones mix.
    """
    start = probes[0]
    if not all(_alike(start, p) for p in probes):
        raise FlatlensError("the probes are of different networks or outputs; merge like with like")
    if len({p.sketch is None for p in probes}) > 1:
        raise FlatlensError("some probes are exact and some sketched; use one method for all")
    n = np.array([p.n for p in probes])
    layers = zip(*(p.layers for p in probes), strict=True)
    parameters = zip(*(p.parameters for p in probes), strict=True)
    return replace(
        start,
        n=int(n.sum()),
        output=np.concatenate([p.output for p in probes]),
        input=_joined([p.input for p in probes], n),
        layers=[_joined(list(shards), n) for shards in layers],
        parameters=[_joined(list(shards), n) for shards in parameters],
        first=None if start.first is None else _joined([p.first for p in probes], n),
        chunk=max(p.chunk for p in probes),
        notes=list(dict.fromkeys(note for p in probes for note in p.notes)),
        sketch=_joined_sketch([p.sketch for p in probes], n),
        chain=_joined_chain([p.chain for p in probes]),
    )


def _joined_chain(chains: list[Chain | None]) -> Chain | None:
    """Return the chain of all samples; None where some share was not looked at."""
    total = chains[0]
    for chain in chains[1:]:
        total = None if total is None or chain is None else total.joined(chain)
    return total


def _alike(one: Probe, other: Probe) -> bool:
    """Whether two probes are of one network: the same shapes, and weights of the same norms."""

    def shape(p: Probe) -> Any:
        layers = [(q.name, q.positions, q.singular.shape[1]) for q in p.layers]
        return p.N, p.M, p.dtype, layers, [(q.name, q.numel) for q in p.parameters]

    if shape(one) != shape(other):
        return False
    mine, theirs = ([q.norm for q in p.layers] for p in (one, other))
    return bool(np.allclose(mine, theirs, rtol=1e-4, atol=0))  # an iteration may end elsewhere


def _joined(shards: list[T], n: np.ndarray) -> T:
    """Join one part of a probe from the same part of each shard."""
    changes: dict[str, Any] = {}
    for name, how in declared(shards[0]).items():
        values = [getattr(shard, name) for shard in shards]
        if any(v is None for v in values):
            changes[name] = None
        elif how.shards == "mean":
            changes[name] = sum(k * v for k, v in zip(n, values, strict=True)) / n.sum()
        elif how.shards == "concatenate":
            changes[name] = np.concatenate(values)
        elif how.shards == "all":
            changes[name] = all(values)
        elif how.shards == "slowest":
            changes[name] = max(values, key=PATHS.index)
    return replace(shards[0], **changes)  # type: ignore[type-var]


def _joined_sketch(shards: list[Sketch | None], n: np.ndarray) -> Sketch | None:
    """Join sketches. Errors of independent shares add in squares."""
    sketches = [s for s in shards if s is not None]
    if not sketches:
        return None
    share = n / n.sum()

    def joined(errors: list[dict[str, float]]) -> dict[str, float]:
        return {
            name: float(
                np.sqrt(sum((w * e[name]) ** 2 for w, e in zip(share, errors, strict=True)))
            )
            for name in errors[0]
        }

    layers = zip(*(s.layer_errors for s in sketches), strict=True)
    return Sketch(
        directions=min(s.directions for s in sketches),
        seed=sketches[0].seed,
        errors=joined([s.errors for s in sketches]),
        layer_errors=[joined(list(errors)) for errors in layers],
        converged=all(s.converged for s in sketches),
    )
