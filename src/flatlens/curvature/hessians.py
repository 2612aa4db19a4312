"""The loss as a function of the trainable parameters, and products with its Hessian.

A product H v is a double backward pass. Samples are processed in chunks, so only one chunk is in
memory. The graph of its first backward pass is built once for all vectors of a block. Vectors are
rows: a block is [k, P] with P the number of trainable parameters.

Attention runs its math kernel, because the others have no second derivative. Batch norm and weight
norm run as formulas, because the second derivative of their kernels can be wrong (``formulas``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatlens.algebra.traces import VECTORS
from flatlens.capture.inputs import Inputs, batches, check_alone, check_finite, outputs
from flatlens.capture.no_trace import in_float, original, untouched
from flatlens.capture.recorder import Recorder
from flatlens.capture.recording import CapturePlan, Recording
from flatlens.capture.weights import whole_weights
from flatlens.curvature.formulas import RightFormulas
from flatlens.errors import FlatlensError, counted, first_line
from flatlens.losses import Loss, as_tensor, get_loss

WORKING_SET = 256 << 20  # bytes that one chunk may keep for its backward passes
BATCHED = 1 << 12  # networks with fewer parameters take TOGETHER vectors in one batched pass
TOGETHER = 32  # vectors of a batched pass; larger networks are as fast without batching
# Largest relative asymmetry of a Hessian. Rounding causes less than 1e-4 in float32 and 1e-12 in
# float64, but 1e-7 in models that compute in float32 inside (Llama's norm layers).
ASYMMETRY = {torch.float32: 1e-2, torch.float64: 1e-5}


class Network:
    """A model and its samples, to be run in chunks."""

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        output: Any,
        chunk: int | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.output = model, output
        pairs = [(inputs, y) for inputs, y in batches(x) if inputs.n > 0]
        self.batches = [i.floats(dtype) if dtype else i for i, _ in pairs]
        self.targets = [y for _, y in pairs]
        self.n = sum(inputs.n for inputs in self.batches)
        if self.n == 0:
            raise FlatlensError("there are no samples (n = 0); give at least one")
        if chunk is not None and chunk < 1:
            raise FlatlensError(f"chunk={chunk} is not a number of samples; give 1 or more")
        start = 0
        for inputs in self.batches:
            for t in inputs.floating:
                check_finite(t, start, "input")
            start += inputs.n
        self.chunk = self._trial(chunk)

    def chunks(self) -> Iterator[tuple[Inputs, slice]]:
        """Yield chunks of samples, each with its slice."""
        start = 0
        for inputs in self.batches:
            for s in range(0, inputs.n, self.chunk):
                part = inputs.take(slice(s, min(s + self.chunk, inputs.n)))
                yield part, slice(start + s, start + s + part.n)
            start += inputs.n

    def outputs(self, inputs: Inputs, call: Callable[..., Any] | None = None) -> Tensor:
        """Return f as [batch, N], of the model or of ``call``, which replaces it."""
        own = inputs.map(lambda t: t.clone())  # the model may overwrite its inputs
        with RightFormulas(ignore_hooks=True):
            return outputs(own, call or self.model, self.output)

    def _trial(self, chunk: int | None) -> int:
        """Choose the samples at a time from the memory of one sample's backward pass."""
        stored_bytes = [0]
        owned = {p.untyped_storage().data_ptr() for p in self.model.parameters()}

        def count(t: Tensor) -> Tensor:
            if t.layout is torch.strided and t.untyped_storage().data_ptr() not in owned:
                stored_bytes[0] += t.numel() * t.element_size()
            return t

        inputs = self.batches[0]
        sample = inputs.take(slice(0, 1))
        alone = 1 in (inputs.n, chunk)
        if alone:  # there is nothing to compare with; batch statistics raise by themselves
            with Recorder(Recording(self.model, 1, CapturePlan())):
                in_a_batch = self.outputs(sample)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            solo = self.outputs(sample)
        check_finite(solo.detach(), 0, "output")
        if not alone:
            with torch.no_grad():
                in_a_batch = self.outputs(inputs.take(slice(0, 2)))[:1]
        check_alone(in_a_batch, solo, lambda: self.outputs(sample))
        # A second derivative takes about four times the memory of a first derivative.
        return chunk or max(1, WORKING_SET // max(1, 4 * stored_bytes[0]))


class Surface:
    """The mean loss over samples as a function of some parameters.

    Args:
        net: the model and its samples.
        loss: the loss.
        y: one target per sample.
        parameters: the parameters that vary, by name.

    Attributes:
        sizes: number of entries of each parameter.
        P: number of entries of all parameters.
        like: a vector of the right type and device.
        at_once: vectors that fit the memory.
        batched: whether several vectors take one batched pass.
    """

    def __init__(
        self, net: Network, loss: Loss, y: Tensor, parameters: dict[str, nn.Parameter]
    ) -> None:
        self.net, self.loss, self.y, self.parameters = net, loss, y, parameters
        self.sizes = {name: p.numel() for name, p in parameters.items()}
        self.P = sum(self.sizes.values())
        self.like = next(iter(parameters.values())).detach().flatten()
        self.batched = self.P <= BATCHED
        self.at_once = max(1, min(TOGETHER, VECTORS // (4 * self.P * self.like.element_size())))
        self._graph: list[Tensor | None] = []  # the gradient with its graph, if it is built
        self._symmetric = False  # not checked yet

    def restricted(self, name: str) -> Surface:
        """Return the same surface over one parameter alone."""
        return Surface(self.net, self.loss, self.y, {name: self.parameters[name]})

    def tensors(self, v: Float[Tensor, "*k P"]) -> list[Tensor]:
        """Split rows into one tensor per parameter; the rows are the first dimension."""
        columns = v.split(list(self.sizes.values()), -1)
        named = zip(columns, self.parameters.values(), strict=True)
        return [part.reshape(v.shape[:-1] + p.shape).to(p) for part, p in named]

    @property
    def theta(self) -> Float[Tensor, " P"]:
        """The parameters as one vector."""
        flat = [p.detach().reshape(-1).to(self.like) for p in self.parameters.values()]
        return torch.cat(flat)

    def values(self, thetas: Float[Tensor, "k P"]) -> list[float]:
        """Return the mean loss at other parameters, one value per row; the model is not changed."""
        with torch.no_grad():
            if self.batched:
                try:
                    return torch.func.vmap(self._mean, chunk_size=TOGETHER)(thetas).tolist()
                except (RuntimeError, FlatlensError):  # an operation that cannot be batched
                    self.batched = False
            return [float(self._mean(theta)) for theta in thetas]

    def _mean(self, theta: Float[Tensor, " P"]) -> Float[Tensor, ""]:
        changed = dict(zip(self.parameters, self.tensors(theta), strict=True))

        def call(*args: Any, **named: Any) -> Any:
            return torch.func.functional_call(self.net.model, changed, args, named)

        losses = [
            self.loss(self.net.outputs(inputs, call), self.y[samples]).sum(dtype=torch.float64)
            for inputs, samples in self.net.chunks()
        ]
        return torch.stack(losses).sum() / self.net.n

    def products(self, V: Float[Tensor, "k P"]) -> Float[Tensor, "k P"]:
        """Return H v for each row v of V, with the Hessian H of the mean loss.

        The first block also checks that H is symmetric; for this a single row gets a random second
        row.
        """
        if self._symmetric:
            return self._products(V)
        vectors = V
        if len(V) == 1:
            u = _normal(V.shape, V)
            vectors = torch.cat([V, u * (V.norm() / u.norm())])
        HV = self._products(vectors)
        self._check_symmetric(vectors, HV)
        self._symmetric = True
        return HV[: len(V)]

    def _check_symmetric(self, V: Float[Tensor, "k P"], HV: Float[Tensor, "k P"]) -> None:
        """Raise if u^T H v differs from v^T H u by more than rounding.

        Rounding is relative to H, or to the Gauss-Newton matrix if that is much larger. This is so
        for a cross-entropy near 0, where H is only rounding. An H that is wrong but symmetric is
        not detected.
        """
        B, unit = V @ HV.mT, float(V.norm()) / self.P**0.5
        off, size = float((B - B.mT).norm()), unit * float(HV.norm())
        dtypes = {p.dtype for p in self.parameters.values()}
        if off <= max(ASYMMETRY[d] for d in dtypes) * size:
            return
        eps = max(torch.finfo(d).eps for d in dtypes)
        if off > 100 * eps * unit**2 * self._gauss_newton():
            raise FlatlensError(
                f"the Hessian of the loss is not symmetric (by {off / size:.1g} of its size): the "
                "second derivative of an operation is wrong (a bug of torch, a custom backward "
                "pass, a detach); replace that operation, or use sharpness (Eq. 3), which needs "
                "first derivatives only"
            )

    def _gauss_newton(self) -> float:
        """Estimate mean_i ||df/dtheta||^2 from one random direction of the outputs."""
        total = 0.0
        for inputs, _ in self.net.chunks():
            f = self.net.outputs(inputs)
            grads = self._gradients((f * _normal(f.shape, f)).sum())
            total += sum(float(g.double().square().sum()) for g in grads if g is not None)
        return total / self.net.n

    def _products(self, V: Float[Tensor, "k P"]) -> Float[Tensor, "k P"]:
        HV = torch.zeros_like(V)
        for inputs, samples in self.net.chunks():
            mean = self._share(inputs, samples)
            try:
                gradient = self._graph or self._gradients(mean, create_graph=True)
                HV += self._second(gradient, V)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise FlatlensError(
                    "the model has no second derivative with respect to its parameters "
                    f"({first_line(error)}); replace that operation, or use sharpness (Eq. 3), "
                    "which needs first derivatives only"
                ) from error
            if inputs.n == self.net.n:  # the only chunk: keep its graph for the next block
                self._graph = gradient
        if not bool(torch.isfinite(HV.sum(dtype=torch.float64))):  # one check for all entries
            raise FlatlensError("a product with the Hessian is not finite; rescale the loss")
        return HV

    def _share(self, inputs: Inputs, samples: slice) -> Tensor | None:
        """Return a chunk's part of the mean loss, with its graph; None if the graph is kept."""
        if self._graph:
            return None
        with sdpa_kernel(SDPBackend.MATH):  # a new one each time, as such a context works once
            f = self.net.outputs(inputs)
        return self.loss(f, self.y[samples]).sum() / self.net.n

    def _gradients(self, of: Any, **options: Any) -> list[Tensor | None]:
        """Return the gradient for each parameter; None if nothing depends on it."""
        if isinstance(of, Tensor) and not of.requires_grad:
            return [None] * len(self.parameters)
        gradients = torch.autograd.grad(
            of, list(self.parameters.values()), allow_unused=True, **options
        )
        return [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]

    def _second(
        self, gradient: list[Tensor | None], V: Float[Tensor, "k P"]
    ) -> Float[Tensor, "k P"]:
        """Return d/dtheta of <gradient, v> for each row v."""
        alive = [i for i, g in enumerate(gradient) if g is not None and g.requires_grad]
        if not alive:  # the gradient does not change with the parameters
            return torch.zeros_like(V)

        def back(v: Tensor, batched: bool) -> Tensor:
            directions = self.tensors(v)
            products = self._gradients(
                [gradient[i] for i in alive], grad_outputs=[directions[i] for i in alive],
                retain_graph=True, is_grads_batched=batched,
            )  # fmt: skip
            by_parameter = [
                torch.zeros_like(q) if g is None else g
                for g, q in zip(products, directions, strict=True)
            ]
            return torch.cat([g.reshape(*v.shape[:-1], -1).to(v) for g in by_parameter], -1)

        if self.batched:
            try:
                return torch.cat([back(part, True) for part in V.split(TOGETHER)])
            except RuntimeError:  # an operation that cannot be batched
                self.batched = False
        return torch.stack([back(v, False) for v in V])


def _targets(net: Network, y: Any, like: Tensor) -> Tensor:
    """Return one target per sample, from ``y`` or from the batches."""
    if y is None:
        if any(t is None for t in net.targets):
            raise FlatlensError("a loss needs targets; give y, or batches of (inputs, targets)")
        return torch.cat([as_tensor(t, like.device) for t in net.targets])
    y = as_tensor(y, like.device).clone()  # an inference tensor cannot be used in autograd
    if y.dim() == 0 or len(y) != net.n:
        entries = 1 if y.dim() == 0 else len(y)
        raise FlatlensError(
            f"y has {counted(entries, 'entry')} for {counted(net.n, 'sample')}; "
            "give one target a sample"
        )
    return y


def _normal(shape: torch.Size, like: Tensor) -> Tensor:
    """Draw normal numbers, the same on every device, from another seed than any estimate."""
    generator = torch.Generator().manual_seed(0x5EED)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(like)


@contextlib.contextmanager
def opened(model: nn.Module) -> Iterator[tuple[nn.Module, torch.dtype | None]]:
    """Yield the model to run, and the precision for its inputs if they must be converted.

    The model is in evaluation mode, without fast paths around autograd. Everything is restored at
    the end.
    """
    model = original(model)
    fast = torch.backends.mha.get_fastpath_enabled()
    with whole_weights(model):
        model, dtype, notes = in_float(model)
        with untouched(model):
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                yield model, dtype if notes else None
            finally:
                torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def network(model: nn.Module, x: Any, output: Any, chunk: int | None) -> Iterator[Network]:
    """Yield a model with its samples; the model is left as found."""
    with opened(model) as (inner, dtype):
        yield Network(inner, x, output, chunk, dtype)


@contextlib.contextmanager
def surface(
    model: nn.Module,
    x: Any,
    y: Any,
    loss: Any,
    output: Any,
    chunk: int | None,
) -> Iterator[Surface]:
    """Yield the mean loss over samples as a function of the trainable parameters."""
    with opened(model) as (inner, dtype):
        net = Network(inner, x, output, chunk, dtype)
        trained = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        if not trained:
            raise FlatlensError("the model has no trainable parameters: its loss has no Hessian")
        like = next(iter(trained.values())).detach().flatten()
        of, given = get_loss(loss), _targets(net, y, like)
        with torch.no_grad():
            sample = net.outputs(net.batches[0].take(slice(0, 1)))
        of.check_second_derivative(sample, given[:1])
        yield Surface(net, of, given, trained)
