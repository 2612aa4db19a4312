"""The result of one pass: a handful of float64 numbers per sample, layer and parameter.

Everything the paper defines is arithmetic on these numbers (``metrics``). Symbols are those of
``docs/theory.md``: A = df/dx^l in total, B = df/dx^l through the layer alone, J = df/dz^l, u_p the
patches of x^l, n samples, N outputs.

Each measured column is declared here, once. Its name and shape are those of the field.
:func:`column` says how it is combined over random directions and over shards of the samples. It
also gives the value of a column that a pass did not measure.
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
OverShards = Literal["concatenate", "mean", "all", "slowest", "largest", "smallest", "same"]
REQUIRED = "required"
UNKNOWN_VALUES, UNKNOWN_RANK = "one NaN per sample", -1.0  # of an unrequested spectrum
# norms of a weight that a layer has for each sample, as ``NAME_i``
NORM_COLUMNS = ("operator", "kernel", "frobenius", "slack", "kernel_slack")
PATHS = ("unused", "frozen", "layer", "rule", "slow")  # when merged, the later path wins


@dataclass(frozen=True)
class Column:
    """The rules by which one field is filled.

    Attributes:
        directions: how a sketch combines the values of its random directions. "mean" and "largest"
            are taken over directions, "spectrum" is replaced by what Lanczos finds, "same" does not
            depend on the direction.
        shards: how the values of several shards of the samples are combined.
        missing: the value if a pass did not measure the column: a number for every sample, the name
            of another column of the same owner, None, UNKNOWN_VALUES or REQUIRED.
        samples: whether there is one value per sample.
        absent: the value of samples that do not have the layer. It adds nothing to a sum: 0 for
            sums of squares and singular values, inf for divisors.
    """

    directions: OverDirections = "same"
    shards: OverShards = "concatenate"
    missing: float | str | None = REQUIRED
    samples: bool = True
    absent: float = 0.0


def declared(owner: Any) -> dict[str, Column]:
    """Return the declared columns of a dataclass, by the name of their field."""
    return {f.name: f.metadata["column"] for f in fields(owner) if "column" in f.metadata}


def column(
    directions: OverDirections = "same",
    missing: float | str | None = REQUIRED,
    absent: float = 0.0,
) -> dict[str, Column]:
    """Declare a column with one value per sample."""
    return {"column": Column(directions, missing=missing, absent=absent)}


def over_shards(how: OverShards) -> dict[str, Column]:
    """Declare a field with one value for all samples, and how shards of the samples combine it."""
    return {"column": Column(shards=how, samples=False)}


@dataclass(frozen=True)
class InputProbe:
    """Derivatives with respect to the network's input."""

    # of A = df/dx, descending
    singular: Float[Array, "n r"] = field(metadata=column("spectrum", UNKNOWN_VALUES))
    rank: Int[Array, " n"] = field(metadata=column("spectrum", UNKNOWN_RANK))
    x_norm: Float[Array, " n"] = field(metadata=column(missing=np.nan))
    invariant: Float[Array, " n"] = field(
        metadata=column("mean", np.nan)
    )  # sum_p x_p^2 ||A[:, p]||^2, Eq. 43
    # participation ratio, where it is estimated
    dimension: Float[Array, " n"] | None = field(default=None, metadata=column("spectrum", None))


@dataclass(frozen=True)
class LayerProbe:
    """One slot: a linear map, and the k-th use of its weight by a sample.

    Some samples may not use the layer, and its weight may differ from sample to sample
    (``docs/theory.md`` section 11). Samples that do not use it have neutral values: 0, and inf in
    columns that are divisors (``x_norm``, ``patch_min``, ``patch_rank``).
    """

    name: str
    kind: str
    weight: str | None  # the parameter that is the weight; None if the weight is computed
    bias: str | None
    has_bias: bool
    # the bias is a trainable parameter used once, so that grad_b f = sum_p J_p
    bias_counts: bool = field(metadata=over_shards("all"))
    positions: int = field(metadata=over_shards("largest"))  # largest number of a sample
    groups: int
    in_features: int
    out_features: int
    M: int = field(metadata=over_shards("largest"))  # most entries of x^l of a sample
    reads_input: bool = field(
        metadata=over_shards("all")
    )  # x^l is the network's input, up to a reshape
    norms: WeightNorms  # the largest of each if samples use different weights
    norm: float  # the one chosen by weight_norm
    # largest number of patches with one input entry
    kappa: int = field(metadata=over_shards("largest"))
    fewest: int = field(metadata=over_shards("smallest"))  # smallest such number
    is_output: bool = field(metadata=over_shards("all"))  # the layer's output is f, up to a reshape
    x_norm: Float[Array, " n"] = field(metadata=column(absent=np.inf))
    # min_p ||u_p||^2
    patch_min: Float[Array, " n"] = field(metadata=column(missing=np.nan, absent=np.inf))
    singular: Float[Array, "n r"] = field(metadata=column("spectrum", UNKNOWN_VALUES))  # of A
    rank: Int[Array, " n"] = field(metadata=column("spectrum", UNKNOWN_RANK))
    singular_through: Float[Array, "n r"] = field(metadata=column("spectrum", "singular"))  # of B
    rank_through: Int[Array, " n"] = field(metadata=column("spectrum", "rank"))
    bypass: Float[Array, " n"] = field(metadata=column("largest", 0.0))  # ||A - B||_F / ||A||_F
    gap_norm: Float[Array, " n"] = field(metadata=column("spectrum", 0.0))  # ||A - B||_2
    # ||grad_W f||_F^2, all uses of the parameter
    grad_weight: Float[Array, " n"] = field(metadata=column("mean", np.nan))
    grad_bias: Float[Array, " n"] = field(metadata=column("mean", np.nan))
    # sum_p ||J_p||_F^2 ||u_p||^2 and sum_p ||J_p||_F^2
    untied: Float[Array, " n"] = field(metadata=column("mean", np.nan))
    untied_bias: Float[Array, " n"] = field(metadata=column("mean", np.nan))
    adaptive: Float[Array, " n"] = field(metadata=column("mean", np.nan))  # sum W^2 (df/dW)^2
    # if x^l is the network's input: the part of df/dx that is not A, relative
    beside: Float[Array, " n"] = field(metadata=column("largest", 0.0))
    # ||A - B - A of the next layer||_F, relative; inf where the shapes differ
    chain: Float[Array, " n"] = field(metadata=column("largest", np.inf, absent=np.inf))
    # smallest singular value of [U, 1], or 0
    patch_rank: Float[Array, " n"] = field(metadata=column(missing=np.nan, absent=np.inf))
    untied_norm: Float[Array, " n"] | None = field(
        default=None, metadata=column("same", None)
    )  # ||D^-1 C||_2
    energy: Float[Array, " n"] | None = field(
        default=None, metadata=column("mean", None)
    )  # estimate of ||A||_F^2
    dimension: Float[Array, " n"] | None = field(default=None, metadata=column("spectrum", None))
    # 1 for the samples that use the layer, 0 for the others; None: all use it
    used: Float[Array, " n"] | None = field(default=None, metadata=column(missing=1.0))
    # norms of the weight that each sample used; None where all samples used the same weight
    norm_i: Float[Array, " n"] | None = field(default=None, metadata=column(missing=None))
    operator_i: Float[Array, " n"] | None = field(default=None, metadata=column(missing=None))
    kernel_i: Float[Array, " n"] | None = field(default=None, metadata=column(missing=None))
    frobenius_i: Float[Array, " n"] | None = field(default=None, metadata=column(missing=None))
    slack_i: Float[Array, " n"] | None = field(default=None, metadata=column(missing=None))
    kernel_slack_i: Float[Array, " n"] | None = field(default=None, metadata=column(missing=None))
    # entries of x^l of each sample; None where all samples have M
    entries: Int[Array, " n"] | None = field(default=None, metadata=column(missing=None))
    weight_norm: str = "operator"  # which norm ``norm`` is


@dataclass(frozen=True)
class FirstLayerProbe:
    """Sums of the layer that reads the network's input (Eqs. 36, 37, 44)."""

    weight: Float[Array, "g o i"] | None  # None if samples have different first layers
    # sum_j ||sum_p u_pj (J_p W)_j||^2
    invariant: Float[Array, " n"] = field(metadata=column("mean", np.nan))
    # mean_i ||df/dW_kj||^2, of a dense layer
    curvature: Float[Array, "o i"] | None = field(default=None, metadata=over_shards("mean"))
    # mean_i ||A_i[:, j]||^2 x_ik^2, of a dense layer
    crossed: Float[Array, "M M"] | None = field(default=None, metadata=over_shards("mean"))
    # index of each sample's first layer in ``Probe.layers``, or -1
    slot: Int[Array, " n"] | None = field(default=None, metadata=column(missing=None, absent=-1.0))


@dataclass(frozen=True)
class ParameterProbe:
    """One parameter's share of the sharpness, and how it was computed.

    ``path``: "layer" (weight of a measured layer), "rule" (one copy per sample), "slow" (samples
    one at a time), "frozen" (no part of S) or "unused" (the output does not depend on it).
    """

    name: str
    numel: int
    path: str = field(metadata=over_shards("slowest"))
    grad: Float[Array, " n"] = field(metadata=column("mean", np.nan))  # ||df/dp||_F^2
    # sum_j p_j^2 ||df/dp_j||^2
    adaptive: Float[Array, " n"] = field(metadata=column("mean", np.nan))


@dataclass(frozen=True)
class Sketch:
    """The estimates of a sketch: sums of squares from random directions, spectra by Lanczos.

    Singular values beyond the top few are NaN, and so are quantities that need them; ranks are -1.
    """

    directions: int  # smallest number per sample
    seed: int
    errors: dict[str, float]  # standard error of each quantity that is a mean over directions
    layer_errors: list[dict[str, float]]  # standard errors of each layer's columns
    converged: bool  # whether every largest singular value met the tolerance


@dataclass(frozen=True)
class Probe:
    """The numbers of one pass over n samples."""

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
    inputs: list[str] = field(default_factory=list)  # arguments that derivatives are about
    # parameters that multiply a tensor without being the weight of a measured layer
    unmeasured: list[str] = field(default_factory=list)
    chain: Chain | None = None  # layers and Lipschitz maps from input to output; None: unknown
    asked: tuple[str, ...] | None = None  # names of ``passes.needs``; None: everything

    def merge(self, *others: Probe) -> Probe:
        """Return one probe of all samples from probes of several shards, in their order."""
        return merge(self, *others)

    def with_notes(self, *notes: str) -> Probe:
        """Return the same probe with more notes on how it came to be."""
        return replace(self, notes=[*self.notes, *notes])

    @property
    def why_not_every_layer(self) -> str | None:
        """A sentence on the linear maps that are missing from a sum over all layers, or None."""
        if not self.unmeasured:
            return None
        alone = len(self.unmeasured) == 1
        how = "is not measured as a layer" if alone else "are not measured as layers"
        return f"{', '.join(self.unmeasured)} {how}"


# -- merging -------------------------------------------------------------------------------------


def merge(*probes: Probe) -> Probe:
    """Join probes of several shards of the samples into one probe of all samples.

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
    names = list(dict.fromkeys(q.name for p in probes for q in p.layers))
    parameters = zip(*(p.parameters for p in probes), strict=True)
    return replace(
        start,
        n=int(n.sum()),
        output=np.concatenate([p.output for p in probes]),
        input=_joined([p.input for p in probes], n),
        layers=[_joined_layer([_named(p, name) for p in probes], n) for name in names],
        parameters=[_joined(list(shards), n) for shards in parameters],
        first=_joined_first(probes, names, n),
        chunk=max(p.chunk for p in probes),
        notes=list(dict.fromkeys(note for p in probes for note in p.notes)),
        unmeasured=list(dict.fromkeys(name for p in probes for name in p.unmeasured)),
        sketch=_joined_sketch(probes, names, n),
        chain=_joined_chain([p.chain for p in probes]),
    )


def _joined_chain(chains: list[Chain | None]) -> Chain | None:
    """Return the chain of all samples; None if the chain of some shard is unknown."""
    total = chains[0]
    for chain in chains[1:]:
        total = None if total is None or chain is None else total.joined(chain)
    return total


def _alike(left: Probe, right: Probe) -> bool:
    """Whether two probes are of one network: the same shapes, and parameters of the same norms.

    Samples of one network may take different layers. Layers of the same name must be alike.
    """

    def shape(p: Probe) -> Any:
        return p.N, p.M, p.dtype, bool(p.layers), p.asked, [(q.name, q.numel) for q in p.parameters]

    if shape(left) != shape(right):
        return False
    pairs = [(q, _named(right, q.name)) for q in left.layers]
    return all(theirs is None or _alike_layers(mine, theirs) for mine, theirs in pairs)


def _alike_layers(mine: LayerProbe, theirs: LayerProbe) -> bool:
    def shape(q: LayerProbe) -> Any:
        return q.kind, q.weight, q.bias, q.has_bias, q.groups, q.in_features, q.out_features

    if shape(mine) != shape(theirs):
        return False
    if mine.weight is None or mine.M != theirs.M:  # a norm may differ from sample to sample
        return True
    return bool(np.isclose(mine.norm, theirs.norm, 1e-4, 0, equal_nan=True))  # an iteration's end


def _named(p: Probe, name: str) -> LayerProbe | None:
    return next((q for q in p.layers if q.name == name), None)


def _joined_layer(shards: list[LayerProbe | None], n: np.ndarray) -> LayerProbe:
    """Join one layer; some shards may not have it."""
    having = [q for q in shards if q is not None]
    start = having[0]
    largest = WeightNorms.largest(q.norms for q in having)
    differ = start.weight is None and any(q.norms != start.norms for q in having)
    differ = differ or any(q.norm_i is not None for q in having)
    spread = [_spread(q, differ, any(q.M != start.M for q in having)) for q in having]
    present = iter(spread)
    whole = [_without(spread[0], int(k)) if q is None else next(present)
             for q, k in zip(shards, n, strict=True)]  # fmt: skip
    width = max(q.singular.shape[1] for q in whole)
    joined = _joined([_widened(q, width) for q in whole], n)
    if not differ:
        return joined
    return replace(joined, norms=largest, norm=max(q.norm for q in having))


def _spread(q: LayerProbe, norms: bool, entries: bool) -> LayerProbe:
    """Expand numbers for all samples to one value per sample."""
    k = len(q.x_norm)
    changes: dict[str, Any] = {} if q.used is not None else {"used": np.ones(k)}
    if norms and q.norm_i is None:
        changes["norm_i"] = np.full(k, q.norm)
        for name in NORM_COLUMNS:
            changes[f"{name}_i"] = np.full(k, getattr(q.norms, name))
    if entries and q.entries is None:
        changes["entries"] = np.full(k, q.M)
    return replace(q, **changes)


def _without(q: LayerProbe, samples: int) -> LayerProbe:
    """Return the layer with neutral values for samples that do not use it."""
    changes: dict[str, Any] = {}
    for name, how in declared(q).items():
        values = getattr(q, name)
        if how.samples and values is not None:
            neutral = np.full((samples, *values.shape[1:]), how.absent)
            changes[name] = neutral.astype(values.dtype)
    return replace(q, **changes)


def _widened(q: LayerProbe, width: int) -> LayerProbe:
    """Return the layer padded to ``width`` singular values with zeros."""
    padding = ((0, 0), (0, width - q.singular.shape[1]))
    total, through = (np.pad(values, padding) for values in (q.singular, q.singular_through))
    return replace(q, singular=total, singular_through=through)


def _joined_first(
    probes: tuple[Probe, ...], names: list[str], n: np.ndarray
) -> FirstLayerProbe | None:
    """Join the sums of the first layers; they need one weight for all samples."""
    if all(p.first is None for p in probes):
        return None
    shards = []
    for p in probes:
        no_first_layer = FirstLayerProbe(None, np.zeros(p.n), slot=np.full(p.n, -1))
        shard = no_first_layer if p.first is None else p.first
        if shard.slot is not None:
            numbers = np.array([*(names.index(q.name) for q in p.layers), -1])
            shard = replace(shard, slot=numbers[shard.slot])
        shards.append(shard)
    start = shards[0]
    slots = {tuple(sorted(set([] if q.slot is None else q.slot.tolist()))) for q in shards}
    one_weight = len(slots) == 1 and all(
        q.weight is not None and start.weight is not None and np.array_equal(q.weight, start.weight)
        for q in shards
    )
    if not one_weight:
        shards = [replace(q, weight=None, curvature=None, crossed=None) for q in shards]
    return _joined(shards, n)


def _joined(shards: list[T], n: np.ndarray) -> T:
    """Join one component of a probe from all shards."""
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
        elif how.shards in ("largest", "smallest"):
            changes[name] = max(values) if how.shards == "largest" else min(values)
        elif how.shards == "slowest":
            changes[name] = max(values, key=PATHS.index)
    return replace(shards[0], **changes)  # type: ignore[type-var]


def _joined_sketch(probes: tuple[Probe, ...], names: list[str], n: np.ndarray) -> Sketch | None:
    """Join sketches. Errors of independent shares add in squares."""
    sketches = [p.sketch for p in probes if p.sketch is not None]
    if not sketches:
        return None

    def joined(errors: list[dict[str, float]], samples: list[float]) -> dict[str, float]:
        total = sum(samples)
        terms = list(zip(samples, errors, strict=True))
        return {
            name: float(np.sqrt(sum((k / total * e.get(name, 0.0)) ** 2 for k, e in terms)))
            for name in dict.fromkeys(name for e in errors for name in e)  # shards may differ
        }

    by_layer: dict[str, list[tuple[dict[str, float], float]]] = {name: [] for name in names}
    for p, sketch in zip(probes, sketches, strict=True):
        for q, errors in zip(p.layers, sketch.layer_errors, strict=True):
            users = float(p.n if q.used is None else q.used.sum())
            by_layer[q.name].append((errors, users))
    return Sketch(
        directions=min(s.directions for s in sketches),
        seed=sketches[0].seed,
        errors=joined([s.errors for s in sketches], [float(k) for k in n]),
        layer_errors=[
            joined([e for e, _ in shards], [k for _, k in shards]) for shards in by_layer.values()
        ],
        converged=all(s.converged for s in sketches),
    )
