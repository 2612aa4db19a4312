"""The request of a caller: frozen, and checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from flatlens.errors import FlatlensError
from flatlens.losses import Loss, RootProducts
from flatlens.passes.needs import (
    EVERYTHING,
    JACOBIANS,
    OPERATOR_NORMS,
    WEIGHT_NORMS,
    WITHOUT_LAYERS,
    AskedNorms,
    with_implied,
)

Method = Literal["exact", "sketch", "auto"]
Precision = Literal["wide", "model"]
PRECISIONS = ("wide", "model")
NORMS = ("operator", "kernel", "frobenius")


@dataclass(frozen=True)
class SketchOptions:
    """The options of a sketch.

    Attributes:
        directions: random output directions per sample.
        seed: seed of the directions.
        rtol: relative standard error of the sharpness to reach; None takes ``directions`` only.
        top: singular values per sample, at the network's input.
        layer_top: singular values per sample and layer.
        tolerance: tolerance of Lanczos, relative to the squared singular value.
        layers: whether the layers' singular values are looked for.
    """

    directions: int = 32
    seed: int = 0
    rtol: float | None = None
    top: int = 3
    layer_top: int = 3
    tolerance: float = 1e-2
    layers: bool = True

    def __post_init__(self) -> None:
        if self.directions < 2:
            raise FlatlensError(
                f"directions={self.directions} give no standard error; use 2 or more"
            )
        if self.rtol is not None and not self.rtol > 0:
            raise FlatlensError(f"rtol={self.rtol} is not a relative error; give a positive number")
        if self.top < 1:
            raise FlatlensError(
                f"top={self.top} singular values cannot be found; ask for 1 or more"
            )


@runtime_checkable
class Root(Protocol):
    """A matrix per sample that multiplies the outputs before they are measured."""

    def transposed(self, f: Tensor, samples: slice) -> Tensor:
        """Return the transposed matrix of each sample, [b, k, N]."""

    def products(self, f: Tensor, samples: slice) -> RootProducts:
        """Return products with these matrices and their transposes."""


@dataclass(frozen=True)
class LossRoot:
    """A root R of the Hessian of a loss, for the samples of a chunk.

    Attributes:
        loss: the loss.
        y: targets of all samples, if the Hessian depends on them.
    """

    loss: Loss
    y: Any = None

    def transposed(self, f: Tensor, samples: slice) -> Tensor:
        """Return R^T of each sample, [b, k, N]."""
        return self.loss.root(f, self._targets(samples)).mT

    def products(self, f: Tensor, samples: slice) -> RootProducts:
        """Return products with R and R^T, which form neither matrix."""
        return self.loss.root_products(f, self._targets(samples))

    def _targets(self, samples: slice) -> Any:
        return None if self.y is None else self.y[samples]


@dataclass(frozen=True)
class Request:
    """A request: what to measure, by which method, and within which memory.

    Attributes:
        method: "exact", "sketch", or "auto" to choose by cost.
        inputs: names or positions of the arguments to differentiate with respect to; None chooses
            floating-point arguments that the output depends on.
        output: selects f(x) from the model's result: a key, an index, an attribute or a function.
        chunk: samples at a time, at most.
        memory: bytes that the pass may use beyond the model and its inputs.
        root: root R of the Hessian of a loss, if R^T f is measured instead of f.
        weight_norm: which norm is ``LayerProbe.norm``.
        needs: names of ``passes.needs`` that the pass computes; it computes nothing else.
        exact_untied: whether ||D^-1 C||_2 is asked for.
        budget: seconds that an exact pass may take under "auto".
        sketch: options of a sketch.
        precision: "wide" runs a half-precision network in float32, "model" in its own precision.
    """

    method: Method = "exact"
    output: Any = None
    chunk: int | None = None
    memory: int | None = None
    root: Root | None = None
    weight_norm: str = "operator"
    needs: frozenset[str] = EVERYTHING
    exact_untied: bool = False
    budget: float | None = None
    sketch: SketchOptions = field(default_factory=SketchOptions)
    inputs: Sequence[str | int] | None = None
    precision: Precision = "wide"

    def __post_init__(self) -> None:
        if self.weight_norm not in NORMS:
            raise FlatlensError(
                f"weight_norm={self.weight_norm!r} is unknown; use one of {', '.join(NORMS)}"
            )
        if self.chunk is not None and self.chunk < 1:
            raise FlatlensError(f"chunk={self.chunk} is not a number of samples; give 1 or more")
        if isinstance(self.inputs, str):
            raise FlatlensError(f"inputs={self.inputs!r} is one name; give a list of names")
        object.__setattr__(self, "needs", with_implied(self.needs))

    @property
    def needs_layers(self) -> bool:
        """Whether some need concerns single layers."""
        return not self.needs <= WITHOUT_LAYERS

    @property
    def norms_are_enough(self) -> bool:
        """Whether only norms of df/dz are needed, so that a dense layer need not store it."""
        return not self.needs & JACOBIANS and not self.exact_untied

    @property
    def asked_norms(self) -> AskedNorms:
        """The norms of weights that are asked for; an operator norm may take an iteration."""
        chosen = WEIGHT_NORMS in self.needs and self.weight_norm == "operator"
        if chosen or OPERATOR_NORMS in self.needs:
            return "all"
        return "matrices" if WEIGHT_NORMS in self.needs else "none"

    @property
    def asked(self) -> tuple[str, ...] | None:
        """The needs as ``Probe.asked`` holds them; None if everything is asked for."""
        return None if self.needs == EVERYTHING else tuple(sorted(self.needs))
