"""``measure``: check the request, run the pass, compute quantities and inequalities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from flatlens.algebra.wide_tensor import HALF
from flatlens.arguments import (
    check_choice,
    check_flag,
    check_integer,
    check_positive,
    no_type_check,
)
from flatlens.capture.inputs import Inputs, as_list, batches
from flatlens.errors import FlatlensError, first_line
from flatlens.inequalities import Bounds
from flatlens.inequalities.evaluate import bounds_named, computable
from flatlens.losses import Custom, Loss, get_loss, targets
from flatlens.measurement.quantities import (
    OwnFunction,
    Quantities,
    Request,
    function_name,
    own_pass_values,
    own_value,
    read_request,
)
from flatlens.measurement.result import LOSS_AWARE, Measurement
from flatlens.measurement.sampling import draw
from flatlens.metrics import METRICS
from flatlens.passes.distributed import gathered, needs_group
from flatlens.passes.needs import INPUT_TOP, missing
from flatlens.passes.probing import check_arguments, check_inputs
from flatlens.passes.request import NORMS, PRECISIONS, LossRoot, Precision, SketchOptions
from flatlens.passes.request import Request as PassRequest
from flatlens.passes.run import look
from flatlens.probes import Array, Probe

Method = Literal["auto", "exact", "sketch"]
METHODS = ("auto", "exact", "sketch")


@dataclass(frozen=True)
class Settings:
    """The arguments of ``measure`` that say how to measure."""

    method: Method
    output: Any
    weight_norm: str
    directions: int
    seed: int
    rtol: float | None
    budget: float | None
    chunk: int | None
    memory: int | None
    distributed: bool
    inputs: Sequence[str | int] | None = None
    precision: Precision = "wide"


@no_type_check
def measure(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    quantities: Quantities = "default",
    method: Method = "auto",
    loss: str | Loss | Callable[..., Any] = "half_squared",
    output: Any = None,
    weight_norm: str = "operator",
    directions: int = 32,
    seed: int = 0,
    rtol: float | None = None,
    budget: float | None = None,
    chunk: int | None = None,
    memory: int | None = None,
    distributed: bool = False,
    n: int | None = None,
    inputs: Sequence[str | int] | None = None,
    precision: Precision = "wide",
) -> Measurement:
    """Measure the flatness and the compression of a network in one call.

    Args:
        model: any module; it is measured in evaluation mode and left exactly as it was.
        x: as for ``probe``: a tensor, a tuple or dict of tensors, or an iterable of batches.
        y: targets (class indices or values). They add the loss and, for class indices or one-hot
            rows, the accuracy.
        quantities: "default" is everything that one pass gives. "all" adds quantities that take
            passes of their own (hessian_trace, relative_flatness, ...) and needs y. "headline" is a
            small set that costs much less. Or a list of names of quantities and inequalities, and
            of functions that take a Probe and return a number or one number per sample. Only the
            requested quantities are computed, and each has the same value whatever else is
            requested. A list without inequalities gives the inequalities that follow from the
            computed quantities.
        method: "exact", "sketch" (random directions, with standard errors as ``..._se``), or
            "auto". "auto" is exact unless that costs far more; a note gives the choice and its
            reason.
        loss: a name or a function of (f, y). Its Gauss-Newton form is measured in addition:
            ``gauss_newton_trace``, ``loss_mls``, ``loss_nmls`` (if ``sharpness``, ``mls``, ``nmls``
            are requested) and ``m.loss_aware.bounds``. A function needs y.
        output: which part of the model's result is f(x), as for ``probe``.
        weight_norm: "operator", "kernel" or "frobenius", as for ``probe``.
        directions: number of random directions of a sketch.
        seed: seed of the random directions, of estimates with passes of their own, and of ``n``.
        rtol: relative standard error at which estimates stop.
        budget: seconds that an exact pass may take under "auto".
        chunk: samples at a time, as for ``probe``.
        memory: bytes that a pass may use, as for ``probe``.
        distributed: x and y are this process's share of the samples. Every process of the default
            group of torch.distributed returns the whole result.
        n: measure this many samples, drawn at random from x with ``seed``.
        inputs: names or positions of the arguments to differentiate with respect to, as for
            ``probe``. ``m.inputs`` lists them.
        precision: "wide" or "model", as for ``probe``. "model" measures a half-precision network in
            its own precision. Quantities with passes of their own are measured in float32 under
            both.

    Returns:
        The Measurement m. Use ``m["sharpness"]``, ``m["eq12"]``, ``m.layers``, ``print(m)``.

    Raises:
        FlatlensError: if an argument is wrong or the network cannot be measured.

    Example:
        >>> import torch, flatlens as fl
        >>> net = torch.nn.Linear(3, 2).double()
        >>> m = fl.measure(net, torch.ones(4, 3).double())
        >>> m["sharpness"], m.coverage
        (8.0, {'weight': 'layer', 'bias': 'rule'})
    """
    check_arguments(model, x)
    settings = _settings(
        method, output, weight_norm, directions, seed, rtol, budget, chunk, memory, distributed
    )
    check_inputs(inputs)
    check_choice("precision", precision, PRECISIONS)
    settings = replace(settings, inputs=inputs, precision=precision)
    request, of = read_request(quantities), get_loss(loss)
    check_request(request, settings)
    if n is not None:
        check_integer("n", n, 1)
        x, y = draw(x, y, n, seed)
    several_passes = bool(request.own_passes) or of.name != "half_squared"
    if several_passes:
        x = as_list(x)
        y = joined_targets([target for _, target in batches(x)]) if y is None else y
    y = checked_targets(y)
    _check_that_targets_are_there(request, of, y)

    p, seen = _look(model, x, request, settings)
    if y is None:
        y = joined_targets(seen)
    values = metric_values(p, request.metrics)
    own_samples = _add_own_values(values, request.functions, p)
    aware = None
    if of.name != "half_squared":
        aware = _loss_aware(model, x, y, of, request, settings)
        values |= _named_by_loss(aware.probe)
    if y is not None:
        everyone = gathered(y) if distributed else y
        values |= loss_and_accuracy(p, everyone, of)
    for name in request.own_passes:
        values |= own_pass_values(
            name, model, x, y, loss=of, output=output, seed=seed, rtol=rtol, chunk=chunk
        )
    return Measurement(p, values, _bounds(p, request), aware, of.name, own_samples)


# -- choose


def _settings(
    method: Any, output: Any, weight_norm: Any, directions: Any, seed: Any, rtol: Any,
    budget: Any, chunk: Any, memory: Any, distributed: Any,
) -> Settings:  # fmt: skip
    """Check the arguments that say how to measure; each message names its argument."""
    check_choice("method", method, METHODS)
    check_choice("weight_norm", weight_norm, NORMS)
    check_integer("directions", directions, 1, optional=False)
    check_integer("seed", seed, optional=False)
    check_positive("rtol", rtol, "a relative standard error")
    check_positive("budget", budget, "a number of seconds")
    check_integer("chunk", chunk, 1)
    check_integer("memory", memory, 1)
    check_flag("distributed", distributed)
    return Settings(
        method, output, weight_norm, directions, seed, rtol, budget, chunk, memory, distributed
    )


def check_request(request: Request, settings: Settings) -> None:
    """Raise if arguments contradict each other."""
    if settings.distributed:
        needs_group()
    if settings.method == "exact" and settings.rtol is not None and not request.own_passes:
        raise FlatlensError(
            'rtol is for estimates; leave it out, or use method="sketch" or method="auto"'
        )
    if settings.budget is not None and settings.method != "auto":
        raise FlatlensError(
            f'budget chooses the method; leave it out with method="{settings.method}"'
        )
    if request.own_passes and settings.distributed:
        raise FlatlensError(
            f"{request.own_passes[0]} takes passes of its own; leave it out with distributed=True"
        )
    if settings.distributed and settings.budget is not None:
        raise FlatlensError(
            "with a budget each process may choose another method; give method= instead"
        )


def _check_that_targets_are_there(request: Request, loss: Loss, y: Any) -> None:
    if isinstance(loss, Custom) and y is None:
        raise FlatlensError("a function as loss needs targets; give y")
    if request.own_passes and y is None:
        raise FlatlensError(f"{request.own_passes[0]} is about the loss and needs targets; give y")


def checked_targets(y: Any) -> Tensor | None:
    """Return targets as a tensor, or None if there are none.

    Raises:
        FlatlensError: if they are not numbers, or are complex, NaN or infinite.
    """
    if y is None:
        return None
    try:
        t = y.detach() if isinstance(y, Tensor) else torch.as_tensor(y, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise FlatlensError(
            f"y is not a tensor of targets ({first_line(error)}); give class indices or values, "
            "one entry per sample"
        ) from error
    if t.is_complex():
        raise FlatlensError("y is complex; give real targets")
    if t.layout != torch.strided:
        raise FlatlensError("y is a sparse tensor; give y.to_dense()")
    bad = ~torch.isfinite(t)
    if bool(bad.any()):
        sample = int(bad.reshape(len(t), -1).any(1).nonzero()[0]) if t.dim() else 0
        raise FlatlensError(f"y of sample {sample} is not finite; repair it or drop the sample")
    if t.dim() == 0:
        raise FlatlensError("y is a single number; give one target per sample")
    return t


def joined_targets(targets_of_batches: list[Any]) -> Tensor | None:
    """Return the targets that came with the batches as one tensor, or None."""
    tensors = [checked_targets(t) for t in targets_of_batches]
    present = [t for t in tensors if t is not None]
    return torch.cat(present) if present and len(present) == len(tensors) else None


# -- look


def _look(
    model: nn.Module,
    x: Any,
    request: Request,
    settings: Settings,
    root: LossRoot | None = None,
) -> tuple[Probe, list[Any]]:
    """Run one pass over the network.

    Args:
        model: the network.
        x: the samples.
        request: what the pass computes; it computes nothing else.
        settings: how to measure.
        root: root of the Hessian of another loss, which multiplies the outputs.

    Returns:
        The probe of all samples, and the targets that came with the batches.
    """
    look_for = PassRequest(
        method=settings.method, output=settings.output, chunk=settings.chunk,
        memory=settings.memory, inputs=settings.inputs, root=root,
        weight_norm=settings.weight_norm, needs=request.needs, budget=settings.budget,
        sketch=SketchOptions(settings.directions, settings.seed, settings.rtol, layer_top=1),
        precision=settings.precision,
    )  # fmt: skip
    seen: list[Any] = []

    def inputs() -> Iterator[Inputs]:
        for batch, target in batches(x):
            seen.append(target)
            yield batch

    p = look(model, inputs(), look_for)
    if request.own_passes and p.dtype in HALF:
        names = ", ".join(request.own_passes)
        p = p.with_notes(f"measured in float32, with passes of their own: {names}")
    return gathered(p) if settings.distributed else p, seen


def _loss_aware(
    model: nn.Module, x: Any, y: Any, loss: Loss, request: Request, settings: Settings
) -> Measurement:
    """Measure R^T f, where R R^T is the Hessian of the loss with respect to the outputs."""
    p, _ = _look(model, x, request, settings, LossRoot(loss, y))
    values = metric_values(p, request.metrics)
    return Measurement(p, values, _bounds(p, request), loss_name=loss.name)


# -- metrics and inequalities


def metric_values(p: Probe, names: tuple[str, ...]) -> dict[str, float]:
    """Compute quantities with their standard errors; those unknown to a sketch are left out."""
    values: dict[str, float] = {}
    for name in names:
        value = METRICS[name](p)
        if p.sketch is not None and np.isnan(value):
            continue
        values[name] = value
        if p.sketch is not None and name in p.sketch.errors:
            values[f"{name}_se"] = p.sketch.errors[name]
    if p.sketch is not None and not missing([INPUT_TOP], p.asked):
        values["spectra_converged"] = float(p.sketch.converged)
    return values


def _add_own_values(
    values: dict[str, float], functions: tuple[OwnFunction, ...], p: Probe
) -> dict[str, Array]:
    """Add the user's own quantities to the values and return the values of single samples."""
    samples: dict[str, Array] = {}
    for function in functions:
        name = function_name(function)
        values[name], samples[name] = own_value(function, p)
    return samples


def _named_by_loss(p: Probe) -> dict[str, float]:
    """Return the quantities of R^T f under their loss-aware names."""
    values: dict[str, float] = {}
    for name, metric in LOSS_AWARE.items():
        if missing(METRICS[metric].needs, p.asked):
            continue
        values[name] = METRICS[metric](p)
        if p.sketch is not None and metric in p.sketch.errors:
            values[f"{name}_se"] = p.sketch.errors[metric]
    return values


def _bounds(p: Probe, request: Request) -> Bounds:
    """Compute the named inequalities, or those that follow from the computed quantities."""
    names = computable(p) if request.inequalities is None else request.inequalities
    return bounds_named(p, names) if names else Bounds()


def loss_and_accuracy(p: Probe, y: Any, loss: Loss) -> dict[str, float]:
    """Return the mean loss and, where the targets are classes, the accuracy in per cent.

    Args:
        p: the probe; its outputs are used.
        y: one target per sample.
        loss: any loss.

    Returns:
        ``loss`` and, for class indices and one-hot rows, ``accuracy``.
    """
    f = torch.from_numpy(p.output)
    values = {"loss": float(loss(f, y).mean())}
    try:
        t = targets(y, p.N, f)
    except FlatlensError:  # a custom loss may take targets of any shape
        return values
    if p.N > 1 and bool(((t == 0) | (t == 1)).all()) and bool((t.sum(1) == 1).all()):
        right = t.argmax(1) == f.argmax(1)
        values["accuracy"] = float(100 * right.double().mean())
    return values
