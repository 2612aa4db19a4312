"""One pass over a network: choose, arrange, measure chunk by chunk, assemble a Probe.

Samples go through in chunks, so memory does not grow with n.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flatlens.algebra.buffers import Buffers
from flatlens.algebra.looks import unusual
from flatlens.algebra.wide_tensor import HALF
from flatlens.capture.chain import UnreadChain, find_chain, join
from flatlens.capture.inputs import Inputs, check_alone, check_finite, outputs
from flatlens.capture.no_trace import original, untouched
from flatlens.capture.recording import CapturePlan
from flatlens.capture.weights import whole_weights
from flatlens.errors import FlatlensError
from flatlens.passes.arrangement import Arrangement, arrange
from flatlens.passes.assemble import assemble
from flatlens.passes.attempts import Attempts
from flatlens.passes.choice import Choice, choose
from flatlens.passes.columns import ChunkColumns, ColumnTable
from flatlens.passes.exact import Exact
from flatlens.passes.forward import Forward, Subject
from flatlens.passes.forward_products import ProductsDisagreeError
from flatlens.passes.gradient_norms import GradientNorms
from flatlens.passes.independence import Layouts, NeedsSinglesError, check_subset
from flatlens.passes.input_choice import InputChoice, choose_inputs
from flatlens.passes.needs import CHAIN
from flatlens.passes.plan import reaching_calls
from flatlens.passes.precision import (
    ROUNDED,
    ComputesInFloat32Error,
    check_not_vanishing,
    check_squares,
    lost_digits,
    rank_note,
    refuse_lost,
    small_derivatives,
)
from flatlens.passes.request import Request
from flatlens.passes.sketch import ExactIsCheaperError, SketchStrategy
from flatlens.passes.vanished import ZERO_IN_HALF_PRECISION, check_zeros, zero_samples
from flatlens.passes.widening import mark_late, measured
from flatlens.per_sample import without_squares
from flatlens.probes import Probe

NO_SAMPLES = "there are no samples (n = 0); give at least one"
GROUP = 8  # samples of one forward pass when each is measured alone


@runtime_checkable
class Strategy(Protocol):
    """A way to measure one chunk of samples after another."""

    def run(self, inputs: Inputs, plan: CapturePlan, start: int = 0) -> Forward:
        """Run the network once."""

    def measure(self, inputs: Inputs, forward: Forward, layouts: Layouts) -> ChunkColumns:
        """Measure the samples of one forward pass."""


MakeStrategy = Callable[[Subject, Request, Buffers, Choice], Strategy]


def look(
    model: nn.Module,
    batches: Iterable[Inputs],
    request: Request,
    make_strategy: MakeStrategy | None = None,
) -> Probe:
    """Measure a network on batches of inputs, which are read one after another.

    Args:
        model: any module; it is measured in evaluation mode and left exactly as it was.
        batches: inputs with samples first.
        request: the request of the caller.
        make_strategy: creates the strategy; None creates the one that the request chooses.

    Raises:
        FlatlensError: if the network cannot be measured, with the reason.
    """
    batches = iter(batches)
    first_batch = next(batches, None)
    model = original(model)
    with whole_weights(model, partial(_outputs_of_a_sample, first_batch, request)) as notes:
        lazy = [name for name, p in model.named_parameters() if is_lazy(p)]
        if lazy:
            raise FlatlensError(
                f"{', '.join(lazy)} have no values yet; run the model once on a sample before "
                "measuring"
            )

        def attempt(model: nn.Module, dtype: torch.dtype, notes: list[str]) -> Probe:
            return _look(model, dtype, first_batch, batches, request, notes, make_strategy)

        return measured(model, request.precision, attempt).with_notes(*notes)


def _outputs_of_a_sample(first_batch: Inputs | None, request: Request, model: nn.Module) -> Tensor:
    """Run a model on its first sample."""
    if first_batch is None:
        raise FlatlensError(NO_SAMPLES)
    return outputs(first_batch.take(slice(0, 1)), model, request.output)


def _look(
    model: nn.Module,
    dtype: torch.dtype,
    first_batch: Inputs | None,
    batches: Iterable[Inputs],
    request: Request,
    notes: list[str],
    make_strategy: MakeStrategy | None,
) -> Probe:
    """Measure a network in one precision; with ``notes`` its inputs are converted to it."""
    with untouched(model):
        named = list(model.named_parameters())
        if first_batch is None:
            raise FlatlensError(NO_SAMPLES)
        precision = dtype if named else first_batch.precision
        pass_ = _Pass(Subject(model, precision, request.output, named), request, make_strategy)
        own = {p.dtype for _, p in named} if dtype in HALF else ()
        pass_.take(first_batch.floats(dtype, own) if notes else first_batch)
        for batch in batches:
            try:
                pass_.take(batch.floats(dtype, own) if notes else batch)
            except Exception as error:
                mark_late(error)  # earlier batches cannot be read again
                raise
        return pass_.finish().with_notes(*notes)


class _Pass:
    """A pass in progress, which feeds batches to a strategy, chunk by chunk.

    Attributes:
        choice: how the network is measured; None before the first batch.
        inputs: the arguments to differentiate with respect to; None before the first batch.
        arrangement: where each tensor keeps its samples; None before the first batch.
        strategy: measures a chunk.
        table: the columns of all samples so far.
        attempts: decides when the checks of a chunk are read.
        unchecked: a batch whose values are not checked yet, or None.
        chains: for each chunk, the layers and Lipschitz maps from the input to the output.
        group: number of samples that run together, to check that they are independent, when each
            one is measured alone.
        notes: what the user should know.
    """

    def __init__(
        self, subject: Subject, request: Request, make_strategy: MakeStrategy | None = None
    ) -> None:
        self.subject, self.request, self.make_strategy = subject, request, make_strategy
        self.choice: Choice | None = None
        self.inputs: InputChoice | None = None
        self.arrangement: Arrangement | None = None
        self.strategy: Strategy | None = None
        self.table = ColumnTable(subject, request.asked_norms)
        self.buffers = Buffers()
        self.M = 0
        self.attempts = Attempts()
        self.unchecked: Inputs | None = None
        self.chains: list[UnreadChain] = []
        self.group = 1
        self.notes: list[str] = []

    def take(self, inputs: Inputs) -> None:
        """Measure one batch of inputs."""
        if inputs.n == 0:
            raise FlatlensError(NO_SAMPLES)
        if self.inputs is not None:
            inputs = self.inputs.apply(inputs)
        self.unchecked = inputs
        if self.choice is None:
            self._check_inputs()  # before a sample of it runs
            self.unchecked = None
        self.table.begin_batch(inputs.n)
        try:
            self._take(inputs)
        except ExactIsCheaperError as why:
            # The first chunk shows how many directions rtol takes; an exact pass takes no more.
            sketch = replace(self.request.sketch, directions=why.directions)
            self.request = replace(self.request, method="sketch", sketch=sketch)
            self.choice = None
            self._take(inputs)

    def _take(self, inputs: Inputs) -> None:
        if self.choice is None:
            self._begin(inputs)
        assert self.choice is not None
        assert self.inputs is not None
        inputs = self.inputs.apply(inputs)
        if isinstance(self.strategy, SketchStrategy):
            self.strategy.expect(inputs, self.table.n)
        size = self.choice.chunk
        for samples in _chunks(inputs.n, self.group if size == 1 else size):
            chunk = inputs.take(samples)
            if self.choice.chunk != 1:
                try:
                    self._add(self._measure(chunk))
                    continue
                except NeedsSinglesError as why:
                    self._one_at_a_time(str(why))
            for group in _groups(chunk, self.group):
                self._measure_each(group)

    def _add(self, chunk: ChunkColumns) -> None:
        numbers = self.table.add(chunk)
        if chunk.chain is not None:
            layers = tuple(numbers[i] for i in chunk.chain.layers)
            self.chains.append(replace(chunk.chain, layers=layers))
        if isinstance(self.strategy, SketchStrategy):
            self.strategy.commit(numbers)

    def _measure_each(self, group: Inputs) -> None:
        """Measure samples one at a time; their outputs must equal those of the whole group."""
        each = []
        for i in range(group.n):
            columns = self._measure(group.take(slice(i, i + 1)))
            each.append(columns.columns["output",])
            self._add(columns)
        if group.n > 1:
            together = self.subject.outputs_alone(group)
            again = partial(self._outputs_of_each, group)
            check_alone(together, torch.cat(each), again, self.subject.dtype)

    def _outputs_of_each(self, group: Inputs) -> Tensor:
        one_by_one = (group.take(slice(i, i + 1)) for i in range(group.n))
        return torch.cat([self.subject.outputs_alone(inputs) for inputs in one_by_one])

    def _begin(self, inputs: Inputs) -> None:
        """Run one sample, choose the strategy and the chunk, and arrange the samples."""
        self.inputs, solo = choose_inputs(
            self.subject.model,
            inputs.take(slice(0, 1)),
            self.request.inputs,
            lambda inputs: self.subject.run(inputs, CapturePlan()),
        )
        if self.subject.dtype == torch.float64 and solo.graph.computes_in(torch.float32):
            raise ComputesInFloat32Error
        inputs = self.inputs.apply(inputs)
        if self.inputs.note:
            self.notes.append(self.inputs.note)
        self.M = sum(t[0].numel() for t in solo.fed)
        self.choice = choose(self.subject, self.request, solo, inputs.n)
        self.notes += [why for why in (self.choice.why, self.choice.kernels.why) if why]
        if not any(edge.node in solo.graph.nodes for edge in solo.edges):
            self.notes.append(
                "no derivative with respect to the input (detached, or under no_grad): it is 0"
            )
        self.strategy = self._strategy(self.choice)
        if self.make_strategy is None:  # another caller's strategy may not measure a chunk twice
            self.attempts.begin(solo.f)
        # With chunk=1 from the user each sample is measured alone, even if samples change one
        # another. A group's forward pass stores no activations and no rows, so a few samples need
        # about as much memory as one sample that is measured.
        self.group = 1 if self.request.chunk == 1 else GROUP
        asked, chunk = self.request.chunk, self.choice.chunk
        self.arrangement = arrange(self.subject, self.strategy.run, inputs, solo, chunk, asked)
        if self.arrangement.alone is not None:
            self.choice = replace(self.choice, chunk=1)
        if self.arrangement.singles_because:
            self._one_at_a_time(self.arrangement.singles_because)

    def _strategy(self, choice: Choice) -> Strategy:
        if self.make_strategy is not None:
            return self.make_strategy(self.subject, self.request, self.buffers, choice)
        if choice.method == "sketch":
            return SketchStrategy(
                self.subject, self.request, self.buffers, choice.products, choice.kernels
            )
        if choice.method == "gradient_norms":
            at_once = choice.rows_at_once
            return GradientNorms(self.subject, self.request, self.buffers, at_once)
        return Exact(self.subject, self.request, self.buffers)

    def _one_at_a_time(self, why: str) -> None:
        assert self.choice is not None
        assert self.arrangement is not None
        self.notes.append(f"samples measured one at a time ({why})")
        self.choice = replace(self.choice, chunk=1)
        self.arrangement = self.arrangement.one_at_a_time(why)

    def _measure(self, inputs: Inputs) -> ChunkColumns:
        """Measure a chunk; on a device the host waits only once for all checks."""
        chunk = self.attempts.measure(partial(self._run_and_measure, inputs))
        self.unchecked = None
        return chunk

    def _check_inputs(self) -> None:
        """Raise if the batch has values that are not finite."""
        for t in [] if self.unchecked is None else self.unchecked.floating:
            check_finite(t, self.table.n, "input")

    def _run_and_measure(self, inputs: Inputs) -> ChunkColumns:
        """Run a chunk, check that its samples are independent, and measure it."""
        assert self.strategy is not None
        self._check_inputs()
        forward = self._forward(inputs)
        assert self.inputs is not None
        self.inputs.check(forward)
        arrangement = self.arrangement
        assert arrangement is not None
        check_subset(
            self.subject, self.strategy.run, inputs, forward, arrangement.plan, arrangement.layouts
        )
        if self.table.n == 0 and arrangement.alone is not None:
            again = partial(self.subject.outputs_alone, inputs)
            check_alone(forward.f, arrangement.alone, again, self.subject.dtype)
        single = (None,) * len(forward.recording.calls)
        layouts = arrangement.layouts if inputs.n > 1 else single
        chain = self._chain(forward, layouts)  # before the graph is freed
        try:
            chunk = self.strategy.measure(inputs, forward, layouts)
        except ProductsDisagreeError:
            self._refuse_rounding(inputs)
            raise
        if chunk.layers:
            chunk = replace(chunk, chain=chain)
        self._check_digits(inputs, chunk, layouts)
        self.table.check(chunk.columns)
        return chunk

    def _chain(self, forward: Forward, layouts: Layouts) -> UnreadChain | None:
        """Find the chain of layers and Lipschitz maps that the network is, if it is one."""
        if self.request.root is not None or CHAIN not in self.request.needs:
            return None  # the chain of R^T f is unknown
        calls, _ = reaching_calls(forward, layouts)
        return find_chain(forward.f, forward.graph, forward.edges, calls)

    def _refuse_rounding(self, inputs: Inputs) -> None:
        """Refuse a chunk whose derivatives are lost in rounding; return if they are not."""
        refuse_lost(lost_digits(self._forward(inputs)), self.table.n, self.subject.dtype)

    def _check_digits(self, inputs: Inputs, chunk: ChunkColumns, layouts: Layouts) -> None:
        """Check that small derivatives have their digits."""
        dtype, start = self.subject.dtype, self.table.n
        wide = dtype == torch.float64
        if not wide:
            check_not_vanishing(chunk, start, dtype)
        small = small_derivatives(chunk, dtype)
        if unusual(small.any()):
            lost = small & lost_digits(self._forward(inputs))
            if not wide:
                refuse_lost(lost, start, dtype)
            elif unusual(lost.any()):
                self._note_once(ROUNDED)
        if not wide:
            self._check_zeros(inputs, chunk, layouts)

    def _check_zeros(self, inputs: Inputs, chunk: ChunkColumns, layouts: Layouts) -> None:
        """Check derivatives and activations that are 0 against float64."""
        if not unusual(zero_samples(chunk).any()):
            return
        assert self.arrangement is not None
        if self.subject.half is None:
            plan = self.arrangement.plan
            self._note_once(check_zeros(self.subject, inputs, plan, layouts, self.table.n))
        else:  # half precision was asked for
            self._note_once(ZERO_IN_HALF_PRECISION)

    def _note_once(self, note: str) -> None:
        if note and note not in self.notes:
            self.notes.append(note)

    def _forward(self, inputs: Inputs) -> Forward:
        """Run a chunk; if it overwrites tensors that the trial did not, clone all tensors."""
        assert self.strategy is not None
        assert self.arrangement is not None
        plan = self.arrangement.plan
        forward = self.strategy.run(inputs, plan, self.table.n)
        if plan.clone is not None and forward.recording.overwritten() - plan.clone:
            self.arrangement = replace(self.arrangement, plan=replace(plan, clone=None))
            forward = self.strategy.run(inputs, self.arrangement.plan, self.table.n)
        return forward

    def finish(self) -> Probe:
        """Assemble the Probe of all samples."""
        if not self.table.n:
            raise FlatlensError(NO_SAMPLES)
        assert self.choice is not None
        self.buffers.leave()
        probe = assemble(self.table, self.request.weight_norm, self.M, self.choice.chunk)
        assert self.inputs is not None
        if missing := probe.why_not_every_layer:
            them = "it" if len(probe.unmeasured) == 1 else "them"
            self.notes.append(f"{missing}: NMLS and the sums over layers leave {them} out")
        asked = self.request.asked
        probe = replace(probe, inputs=self.inputs.names, chain=join(self.chains), asked=asked)
        check_squares(probe)
        if tiny := without_squares(probe):
            self.notes.append(f"{tiny}: such squares count as 0, and no inequality applies")
        probe = probe.with_notes(*self.notes)
        if isinstance(self.strategy, SketchStrategy):
            return self.strategy.with_errors(probe)
        note = rank_note(probe)
        return probe.with_notes(note) if note else probe


def _chunks(n: int, chunk: int) -> Iterator[slice]:
    """Split n samples into chunks of nearly equal size, as a small last chunk costs as much."""
    starts = range(0, n, -(-n // -(-n // chunk)))
    with _progress(len(starts)) as advance:
        for s in starts:
            yield slice(s, min(s + starts.step, n))
            advance()


def _groups(inputs: Inputs, size: int) -> Iterator[Inputs]:
    """Split a chunk into groups of at most ``size`` samples."""
    for start in range(0, inputs.n, size):
        yield inputs.take(slice(start, start + size))


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Show a progress bar on a terminal, for work of more than a few chunks."""
    if total < 4 or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("probing", total=total)
        yield lambda: progress.advance(task)
