"""``spectrum``: the eigenvalues of the Gauss-Newton matrix of a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from flatlens.algebra.block_lanczos import TopEigenvalues, spectral_density, top_eigenvalues
from flatlens.algebra.traces import VECTORS
from flatlens.arguments import (
    check_flag,
    check_integer,
    check_positive,
    no_type_check,
    typed_arguments,
)
from flatlens.capture.inputs import as_list, batches
from flatlens.capture.no_trace import original
from flatlens.errors import FlatlensError, counted
from flatlens.gauss_newton.gram_pass import Ledger, TooLargeError, strategy_for
from flatlens.gauss_newton.products import gauss_newton
from flatlens.gauss_newton.result import Array, Spectrum
from flatlens.losses import Custom, Loss, get_loss
from flatlens.measurement.measuring import checked_targets, joined_targets
from flatlens.measurement.sampling import draw
from flatlens.metrics import METRICS
from flatlens.passes.needs import GRADIENTS
from flatlens.passes.probing import check_arguments
from flatlens.passes.request import LossRoot, Request
from flatlens.passes.run import look

FACTOR_BYTES = 1 << 30  # memory for the factors of all gradients by default


@dataclass(frozen=True)
class _Job:
    """The checked arguments of ``spectrum``."""

    model: nn.Module
    x: Any
    y: Tensor | None
    loss: Loss
    samples: int
    max_size: int
    top: int
    per_layer: bool
    rtol: float
    max_products: int
    probes: int
    steps: int
    seed: int
    request: Request


@no_type_check
@typed_arguments
def spectrum(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    loss: str | Loss | Callable[..., Any] = "half_squared",
    top: int = 20,
    max_size: int = 4096,
    per_layer: bool = False,
    rtol: float = 1e-3,
    max_products: int = 300,
    probes: int = 6,
    steps: int = 20,
    seed: int = 0,
    output: Any = None,
    chunk: int | None = None,
    memory: int | None = None,
    n: int | None = None,
    inputs: Sequence[str | int] | None = None,
) -> Spectrum:
    """Compute the eigenvalues of the Gauss-Newton matrix G = (1/n) sum_i J_i^T H_i J_i.

    J_i = df(x_i)/dtheta over all trainable parameters, and H_i is the Hessian of the loss with
    respect to the outputs. Let H_i = R_i R_i^T. The nonzero eigenvalues of G are those of the Gram
    matrix of the n N gradients grad (R_i^T f_i)_a, divided by n. For the loss of the paper the Gram
    matrix is the empirical neural tangent kernel (Jacot et al. 2018). It is summed layer by layer,
    so the gradient of all parameters is never stored. Dangel et al. (2022, ViViT) use the same
    identity.

    The eigenvalues are exact up to rounding, and for the loss of the paper their sum is the
    sharpness of Eq. 3. The Hessian of the loss is G plus a term that vanishes as the error goes to
    zero. No inequality of the paper is about ``lambda_max``.

    If n N exceeds ``max_size``, block Lanczos finds the ``top`` values, each with a residual.
    Stochastic Lanczos quadrature then estimates the density of the others, with standard errors.

    Args:
        model: any module; it is measured in evaluation mode and left exactly as it was.
        x: as for ``measure``.
        y: targets, needed only if ``loss`` is a function.
        loss: a name or a function, as for ``measure``.
        top: number of eigenvalues that block Lanczos finds; the exact computation returns all of
            them.
        max_size: largest Gram matrix, in gradients n N, that is decomposed exactly.
        per_layer: also compute the eigenvalues of every layer's diagonal block
            (``Spectrum.layers``).
        rtol: largest residual of a Lanczos value, relative to ``lambda_max``.
        max_products: most products of block Lanczos.
        probes: number of random vectors for the density.
        steps: Lanczos steps for each random vector.
        seed: seed of the random vectors and of the draw of ``n`` samples.
        output: which part of the model's result is f(x), as for ``probe``.
        chunk: samples at a time.
        memory: bytes for the factors of all gradients, by default 1 GiB. With fewer bytes the
            samples are read more often; the numbers stay the same.
        n: use this many samples, drawn at random from x with ``seed``.
        inputs: names or positions of the arguments that are inputs, as for ``probe``.

    Returns:
        A Spectrum with ``values``, ``lambda_max``, ``trace``, ``effective_dimension(ridge)``,
        ``participation_ratio``, ``condition``, ``vectors(k)``, ``plot()``.

    Raises:
        FlatlensError: if an argument is wrong or the network cannot be measured.

    Example:
        >>> import torch, flatlens as fl
        >>> net = torch.nn.Linear(2, 1, bias=False).double()
        >>> s = fl.spectrum(net, torch.diag(torch.tensor([3.0, 1.0])).double())
        >>> [round(v, 9) for v in s.values.tolist()], round(s.trace, 9)  # x x^T / n
        ([4.5, 0.5], 5.0)
        >>> round(s.effective_dimension(0.5), 9)  # 4.5 / 5 + 0.5 / 1
        1.4
    """
    check_arguments(model, x)
    for name, value in {"top": top, "max_size": max_size, "chunk": chunk, "n": n}.items():
        check_integer(name, value, 1)
    for name, value in {"probes": probes, "steps": steps, "max_products": max_products}.items():
        check_integer(name, value, 2)
    check_integer("seed", seed, 0)
    check_integer("memory", memory, 1)
    check_flag("per_layer", per_layer)
    check_positive("rtol", rtol, "a relative residual")
    loss_function = get_loss(loss)
    if n is not None:
        x, y = draw(x, y, n, seed)
    x = as_list(x)
    y = joined_targets([t for _, t in batches(x)]) if y is None else y
    y = checked_targets(y)
    if isinstance(loss_function, Custom) and y is None:
        raise FlatlensError("a function as loss needs targets; give y")
    samples = sum(batch.n for batch, _ in batches(x))
    if y is not None and len(y) != samples:
        raise FlatlensError(
            f"y has {counted(len(y), 'entry')} for {counted(samples, 'sample')}; give one a sample"
        )

    request = Request(
        output=output, chunk=chunk, inputs=inputs,
        root=None if loss_function.name == "half_squared" else LossRoot(loss_function, y),
    )  # fmt: skip
    job = _Job(
        model, x, y, loss_function, samples, max_size, top, per_layer, rtol, max_products,
        probes, steps, seed, request,
    )  # fmt: skip
    try:
        return _exact(job, memory or FACTOR_BYTES)
    except TooLargeError as why:
        return _estimated(job, str(why))


# -- exact


def _exact(job: _Job, memory: int) -> Spectrum:
    """Decompose the Gram matrix of all gradients."""
    K, layers = torch.zeros(0, 0, dtype=torch.float64), _LayerSpectra(job.per_layer, job.samples)
    done: frozenset[str] = frozenset()
    while True:
        ledger = Ledger(memory, job.samples, job.max_size, done)
        p = look(job.model, (b for b, _ in batches(job.x)), job.request, strategy_for(ledger))
        if len(K) == 0:
            device = next((p.device for p in job.model.parameters()), torch.device("cpu"))
            K = torch.zeros(ledger.gradients, ledger.gradients, dtype=torch.float64, device=device)
        for name in sorted(ledger.names(), key=module_of):
            own = ledger.gram_of(name, K)
            layers.add(name, own, open_modules={module_of(other) for other in ledger.pending()})
            K += own
            done |= {name}
        if not ledger.waiting:
            break
    size = sum(q.numel for q in p.parameters if q.path != "frozen")
    values, vectors = torch.linalg.eigh(K)
    values = _positive(values.flip(0) / job.samples, torch.finfo(p.dtype).eps)[:size]
    vectors = vectors.flip(1)[:, : len(values)]
    return Spectrum(
        values=values.cpu().numpy(),
        trace=float(K.diagonal().sum()) / job.samples,
        trace_se=0.0,
        n=job.samples,
        parameters=size,
        loss=job.loss.name,
        exact=True,
        residuals=np.zeros(len(values)),
        layers=layers.spectra,
        notes=tuple(p.notes),
        find_vectors=_ExactVectors(job, vectors, values, p.chunk, _state(job.model)),
    )


class _LayerSpectra:
    """Sum the Gram matrices of each module's parameters, and compute their eigenvalues.

    A module's matrix is freed as soon as its last parameter is added.
    """

    def __init__(self, wanted: bool, samples: int) -> None:
        self.wanted, self.samples = wanted, samples
        self.grams: dict[str, Float[Tensor, "r r"]] = {}
        self.spectra: dict[str, Array] = {}

    def add(self, parameter: str, K: Float[Tensor, "r r"], open_modules: set[str]) -> None:
        """Add a parameter's Gram matrix to that of its module.

        Args:
            parameter: name of the parameter.
            K: the Gram matrix of its gradients.
            open_modules: modules with parameters that are not added yet.
        """
        if not self.wanted:
            return
        module = module_of(parameter)
        total = self.grams[module] + K if module in self.grams else K.clone()
        if module in open_modules:
            self.grams[module] = total
            return
        self.grams.pop(module, None)
        values = torch.linalg.eigvalsh(total).flip(0)
        self.spectra[module] = _positive(values / self.samples).cpu().numpy()


def module_of(parameter: str) -> str:
    """Return the module that owns a parameter; for a top-level parameter its own name."""
    return parameter.rpartition(".")[0] or parameter


def _positive(values: Float[Tensor, " r"], eps: float = 2.0**-52) -> Float[Tensor, " k"]:
    """Return the eigenvalues above rounding from values in descending order.

    Rounding errors of entries are independent, so the norm of their matrix is eps sqrt(r).
    """
    rounding = 4 * eps * len(values) ** 0.5 * float(values[0].clamp(min=0))
    return values[values > rounding]


def _state(model: nn.Module) -> list[float]:
    """Return numbers that change when parameters or buffers of a model change."""
    tensors = [*original(model).parameters(), *original(model).buffers()]
    return [
        float(t.detach().double().flatten() @ _mixture(t.numel(), t.device))
        for t in tensors
        if t.is_floating_point()
    ]


def _mixture(size: int, device: torch.device) -> Tensor:
    return torch.arange(1, size + 1, dtype=torch.float64, device=device).sin()


def _check_unchanged(model: nn.Module, state: list[float]) -> None:
    if _state(model) != state:
        raise FlatlensError(
            "the model has changed since its spectrum was computed; compute it anew"
        )


@dataclass(frozen=True)
class _ExactVectors:
    """The map from eigenvectors w of the Gram matrix to eigenvectors J^T w / ||J^T w|| of G."""

    job: _Job
    coefficients: Float[Tensor, "r k"]
    values: Float[Tensor, " k"]
    chunk: int
    state: list[float]

    def __call__(self, k: int) -> list[dict[str, Tensor]]:
        job = self.job
        _check_unchanged(job.model, self.state)
        scale = (job.samples * self.values[:k]).sqrt()
        weights = (self.coefficients[:, :k] / scale).mT
        with gauss_newton(
            job.model, job.x, job.y, job.loss, job.request.output, job.request.chunk or self.chunk
        ) as G:
            return [G.tensors(v) for v in G.mixture(weights)]


# -- estimated


def _estimated(job: _Job, why: str) -> Spectrum:
    """Find the top eigenvalues by block Lanczos, and estimate the density of the others."""
    request = job.request
    if job.per_layer:
        raise FlatlensError(f"per_layer needs the exact Gram matrix, but {why}; take fewer samples")
    with gauss_newton(job.model, job.x, job.y, job.loss, request.output, request.chunk) as G:
        room = max(2, VECTORS // (G.size * G.like.element_size()))
        known = top_eigenvalues(
            G.product, G.like, job.top, rtol=job.rtol, max_products=job.max_products,
            room=room, seed=job.seed,
        )  # fmt: skip
        density = spectral_density(
            G.product, G.like, known, vectors=job.probes, steps=job.steps, seed=job.seed + 1
        )
        tensors = [G.tensors(v) for v in known.vectors]
        size = G.size
    trace, error, notes = _trace(job)
    values = known.values.clamp(min=0).cpu().numpy()
    residuals = known.residuals.cpu().numpy()
    return Spectrum(
        values=values,
        trace=trace,
        trace_se=error,
        n=job.samples,
        parameters=size,
        loss=job.loss.name,
        exact=False,
        residuals=residuals,
        tolerance=job.rtol,
        density=density,
        notes=(f"estimated: {why}", *_unconverged(known, job), *notes),
        find_vectors=_KnownVectors(tensors),
    )


def _trace(job: _Job) -> tuple[float, float, list[str]]:
    """Return Tr G, exactly or with a standard error, as ``measure`` does."""
    request = Request(
        method="auto", output=job.request.output, chunk=job.request.chunk,
        inputs=job.request.inputs, root=job.request.root, needs=frozenset({GRADIENTS}),
    )  # fmt: skip
    p = look(job.model, (b for b, _ in batches(job.x)), request)
    error = 0.0 if p.sketch is None else p.sketch.errors["sharpness"]
    return METRICS["sharpness"](p), error, list(p.notes)


def _unconverged(known: TopEigenvalues, job: _Job) -> list[str]:
    missed = int((known.residuals > job.rtol * known.values[0]).sum())
    if not missed:
        return []
    return [
        f"{missed} of {len(known.values)} values have not converged in {known.products} products; "
        "raise max_products"
    ]


@dataclass(frozen=True)
class _KnownVectors:
    """The eigenvectors that block Lanczos found."""

    vectors: list[dict[str, Tensor]]

    def __call__(self, k: int) -> list[dict[str, Tensor]]:
        return self.vectors[:k]
