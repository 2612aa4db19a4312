"""One forward pass of the network under measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from flatlens.algebra.wide_tensor import HALF
from flatlens.capture.graph import Graph
from flatlens.capture.injection import Injection, next_number
from flatlens.capture.inputs import Inputs, check_finite, outputs
from flatlens.capture.kinds.embedding import embedded_tokens
from flatlens.capture.recorder import Recorder
from flatlens.capture.recording import CapturePlan, Recording
from flatlens.errors import FlatlensError

Named = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class Forward:
    """The results of one forward pass.

    Attributes:
        fed: the tensors that stand for the network's input.
        edges: the edges where derivatives with respect to these tensors arrive.
        recording: the calls of layers.
        f: the outputs, [b, N]; those of a network in half precision are shown in float32.
        start: the index of its first sample among all samples.
        keys: the keys of the arguments that ``fed`` stands for.
        watched: edges of arguments that no output should depend on, by key.
        precision: the precision that the network computes in, which f may not show.
        first_node: the number of the first autograd node that the pass made.
    """

    fed: list[Tensor]
    edges: list[GradientEdge]
    recording: Recording
    f: Tensor
    start: int = 0
    keys: Sequence[Any] = ()
    watched: Sequence[tuple[Any, GradientEdge]] = ()
    precision: torch.dtype = torch.float64
    first_node: int = 0

    @property
    def half(self) -> torch.dtype | None:
        """The half precision that the network computes in, or None."""
        return self.precision if self.precision in HALF else None

    @property
    def samples(self) -> slice:
        """The slice of its samples among all samples."""
        return slice(self.start, self.start + len(self.f))

    @cached_property
    def graph(self) -> Graph:
        """The autograd graph behind f."""
        return Graph(self.f)


@dataclass(frozen=True)
class Subject:
    """The network under measurement.

    Attributes:
        model: the module.
        dtype: the coarsest precision that it computes in.
        output: which part of its result is f(x).
        named: all parameters by name, as they were before the measurement.
    """

    model: nn.Module
    dtype: torch.dtype
    output: Any
    named: Named

    @property
    def half(self) -> torch.dtype | None:
        """The half precision that it is measured in, or None."""
        return self.dtype if self.dtype in HALF else None

    @cached_property
    def known(self) -> set[int]:
        """The ids of these parameters."""
        return {id(p) for _, p in self.named}

    def run(
        self,
        inputs: Inputs,
        plan: CapturePlan,
        start: int = 0,
        injection: Injection | None = None,
    ) -> Forward:
        """Run the network once and record what it does.

        Args:
            inputs: the samples.
            plan: what earlier runs found out.
            start: the index of the first sample, for messages.
            injection: replaces tensors during the pass; None replaces nothing.
        """
        first_node = next_number()
        fed = _prepared(inputs)
        keys = [key for key, _ in fed.at(fed.differentiated, True)]
        values = [t.detach() for t in inputs.floating]
        edges = [get_gradient_edge(t) for t in fed.floating]
        watched = [(key, get_gradient_edge(t)) for key, t in fed.at(fed.watched, True)]
        by_tokens = len(keys) < len(inputs.differentiated) or not keys
        tokens = inputs.tokens if by_tokens else []
        if injection is not None:
            fed = injection.begin(first_node, fed)
        integers = [t for _, t in tokens]
        recording = Recording(self.model, inputs.n, plan, integers, injection)
        with Recorder(recording):
            f = outputs(fed, self.model, self.output)
        f = self._shown(f)
        if tokens or not keys:
            more, more_edges = _embedded(recording, inputs.n)
            values, edges = values + more, edges + more_edges
            keys += [tokens[i][0] for i in embedded_tokens(recording)]
        self._check(f, start)
        return Forward(
            values, edges, recording, f, start, keys, watched, self.dtype, first_node
        )  # fmt: skip

    def outputs_alone(self, inputs: Inputs) -> Tensor:
        """Return f without a recording.

        Run in grad mode but save nothing, so that torch picks the same kernels and rounds in the
        same way. A model that differentiates inside its forward pass needs the saved tensors and
        runs a second time with them.
        """
        try:
            with saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0, device="cpu")):
                return self._shown(outputs(_prepared(inputs), self.model, self.output)).detach()
        except FlatlensError:
            return self._shown(outputs(_prepared(inputs), self.model, self.output)).detach()

    def _shown(self, f: Tensor) -> Tensor:
        """Return half-precision outputs in float32, because their sums need the digits."""
        return f.float() if self.half is not None and f.dtype in HALF else f

    def _check(self, f: Tensor, start: int) -> None:
        late = [name for name, p in self.model.named_parameters() if id(p) not in self.known]
        if late:
            raise FlatlensError(
                f"{', '.join(late)} did not exist before the model was run; now they do: measure "
                "it again"
            )
        if not f.requires_grad:
            raise FlatlensError(
                "the output does not depend differentiably on the input; it may be detached, "
                "rounded or an argmax: select the raw output with output="
            )
        check_finite(f.detach(), start, "output")


def _embedded(recording: Recording, n: int) -> tuple[list[Tensor], list[GradientEdge]]:
    """Return what represents an integer input: the output of its embedding."""
    if not recording.embedded or any(len(t) != n for t, _ in recording.embedded):
        raise FlatlensError(
            "the input holds integers, which have no derivative, and no nn.Embedding reads it; "
            "give the network the floating-point tensor behind them"
        )
    return [t for t, _ in recording.embedded], [edge for _, edge in recording.embedded]


def _prepared(inputs: Inputs) -> Inputs:
    """Copy the inputs, because the model may overwrite them; some copies require gradients."""
    wanted = {*inputs.differentiated, *inputs.watched}

    def prepare(key: Any, t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        if key not in wanted:
            return t.detach().clone()
        leaf = (t.clone() if t.is_inference() else t.detach()).requires_grad_()
        return leaf.clone()

    return inputs.map_named(prepare)
