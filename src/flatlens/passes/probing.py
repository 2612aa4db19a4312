"""``probe`` and ``sketch``: one pass over a network, exact or by random directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from flatlens.arguments import no_type_check, short_repr, typed_arguments
from flatlens.capture.inputs import batches
from flatlens.errors import FlatlensError
from flatlens.passes.request import Precision, Request, SketchOptions
from flatlens.passes.run import look
from flatlens.probes import Probe


@no_type_check
@typed_arguments
def probe(
    model: nn.Module,
    x: Any,
    *,
    chunk: int | None = None,
    memory: int | None = None,
    output: Any = None,
    weight_norm: str = "operator",
    exact_untied: bool = False,
    inputs: Sequence[str | int] | None = None,
    precision: Precision = "wide",
) -> Probe:
    """Measure a network exactly: one forward and N vector-Jacobian products per sample.

    Args:
        model: any module; it is measured in evaluation mode and left exactly as it was.
        x: a tensor with samples first, a tuple (positional) or dict (by name) of tensors, or an
            iterable of batches; a pair from an iterable is read as (inputs, targets).
        chunk: samples at a time, at most. By default chosen from the model. With 1 each sample runs
            alone, which also measures networks in which the samples of a batch affect one another.
        memory: bytes that the pass may use beyond the model and its inputs, instead of ``chunk``.
        output: key, index, attribute or function that selects f(x) from what the model returns.
        weight_norm: which norm is ``LayerProbe.norm``: "operator", "kernel" or "frobenius".
        exact_untied: also find ||D^-1 C||_2 of each convolution and sample (an iteration each) for
            the tightest form of the untied bound, ``bounds(p, exact=True)``.
        inputs: names or positions of the arguments to differentiate with respect to
            (``Probe.inputs``). By default these are the floating-point tensors that the output
            depends on. If there are none, they are the embeddings of integer tensors. Masks are
            left out unless they are named here: a tensor of 0 and -inf, or an ``attention_mask`` of
            two values.
        precision: "wide" runs a half-precision network in float32. "model" runs it in its own
            precision, as in training, and a note says so: outputs and derivatives are rounded, but
            norms, spectra and sums of them are not. Inequalities whose proof needs more than that
            are observations. A network of float32 or float64 is the same under both.

    Returns:
        What the pass saw. Every metric and inequality is a function of it.

    Raises:
        FlatlensError: if the network cannot be measured, with the reason.

    Example:
        >>> import torch, flatlens as fl
        >>> net = torch.nn.Linear(3, 2, bias=False).double()
        >>> _ = torch.nn.init.ones_(net.weight)
        >>> p = fl.probe(net, torch.ones(1, 3).double())
        >>> round(float(p.layers[0].grad_weight[0]), 9)  # N ||x||^2
        6.0
    """
    check_arguments(model, x)
    request = Request(
        chunk=chunk, memory=memory, output=output, weight_norm=weight_norm,
        exact_untied=exact_untied, inputs=inputs, precision=precision,
    )  # fmt: skip
    return look(model, (batch for batch, _ in batches(x)), request)


@no_type_check
@typed_arguments
def sketch(
    model: nn.Module,
    x: Any,
    *,
    directions: int = 32,
    seed: int = 0,
    rtol: float | None = None,
    top: int = 3,
    tolerance: float = 1e-2,
    layers: bool = True,
    chunk: int | None = None,
    memory: int | None = None,
    output: Any = None,
    weight_norm: str = "operator",
    inputs: Sequence[str | int] | None = None,
    precision: Precision = "wide",
) -> Probe:
    """Estimate what ``probe`` measures, from a few random output directions.

    If a narrow head makes the exact pass as cheap, the exact pass is run instead.

    Args:
        model: as in ``probe``; the same holds for x, chunk, memory, output, weight_norm, inputs and
            precision.
        directions: random output directions per sample.
        seed: seed of the directions. A sample has its own directions, the same in any chunk, order
            or shard.
        rtol: add directions until the relative standard error of the sharpness is at most this. If
            that takes no fewer products than the exact pass, the exact pass is run.
        top: singular values per sample and layer.
        tolerance: tolerance of Lanczos, relative to the squared singular value.
        layers: False computes singular values only at the network's input, which is many times
            cheaper. Those of the layers, and therefore ``nmls``, and the local dimension are NaN.

    Returns:
        A probe with estimates and their standard errors (``Probe.sketch``).

    Raises:
        FlatlensError: if the network cannot be measured, with the reason.

    Example:
        >>> import torch, flatlens as fl
        >>> net = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU(),
        ...                           torch.nn.Linear(300, 200)).double()
        >>> x = torch.randn(4, 300, dtype=torch.float64)
        >>> p, q = fl.sketch(net, x), fl.probe(net, x)
        >>> abs(fl.sharpness(p) / fl.sharpness(q) - 1) < 0.1
        True
        >>> abs(fl.mls(p) / fl.mls(q) - 1) < 0.001
        True
    """
    check_arguments(model, x)
    options = SketchOptions(
        directions=directions, seed=seed, rtol=rtol, top=top, layer_top=top,
        tolerance=tolerance, layers=layers,
    )  # fmt: skip
    request = Request(
        method="sketch", chunk=chunk, memory=memory, output=output, weight_norm=weight_norm,
        sketch=options, inputs=inputs, precision=precision,
    )  # fmt: skip
    return look(model, (batch for batch, _ in batches(x)), request)


def check_inputs(inputs: Any) -> None:
    """Raise if ``inputs`` is not a list of names and positions."""
    listed = isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes)
    fine = listed and all(isinstance(i, str | int) and not isinstance(i, bool) for i in inputs)
    if inputs is not None and not fine:
        raise FlatlensError(
            f"inputs={short_repr(inputs)} is not a list; give names or positions of arguments"
        )


def check_arguments(model: Any, x: Any) -> None:
    """Raise if ``model`` is not a module or ``x`` holds no samples."""
    if not isinstance(model, nn.Module):
        raise FlatlensError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
    for p in model.parameters():
        refuse_without_float64(p.device)
    if not (hasattr(x, "__iter__") or hasattr(x, "__getitem__")):
        raise FlatlensError(
            f"x is {'None' if x is None else f'a {type(x).__name__}'}; give a tensor with samples "
            "first, a tuple or dict of tensors, or an iterable of batches"
        )


def refuse_without_float64(device: torch.device) -> None:
    """Raise if a device has no float64, which spectra and sums need.

    Raises:
        FlatlensError: if the device is mps, the GPU of Apple computers.

    >>> refuse_without_float64(torch.device("cuda"))
    """
    if device.type == "mps":
        raise FlatlensError(
            "the device mps has no float64, in which flatlens computes spectra; move model and "
            'samples to the CPU, model.to("cpu")'
        )
