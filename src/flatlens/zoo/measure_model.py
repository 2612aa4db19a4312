"""Measure one model of a zoo: both axes of Figure 3 and further quantities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatlens.capture.inputs import COUPLED
from flatlens.errors import FlatlensError
from flatlens.metrics import METRICS, Metric
from flatlens.passes.probing import sketch
from flatlens.perturb import adaptive_sharpness_sampled, input_sensitivity_ascent
from flatlens.probes import Probe
from flatlens.training.timm_models import build, family, transform
from flatlens.zoo.pictures import choose, read_picture
from flatlens.zoo.settings import OUTPUTS, Zoo

QUANTITIES = ("normalized_mls", "adaptive_sharpness", "sharpness", "mls", "input_invariant_mls")
TOLERANCE = 1e-3  # of Lanczos, relative to the squared singular value
PAPER = {"perturbations": 50, "antithetic": False}  # Eq. 46 as the authors ran it
# images at a time: any number first, fewer if memory is short or images influence each other
CHUNKS = (None, 2, 1)


def record(model: str, settings: Zoo, chunk: int | None, offline: bool = False) -> dict[str, Any]:
    """Measure one model.

    Args:
        model: name of the model.
        settings: how to measure it.
        chunk: images at a time; None lets the pass choose.
        offline: read weights from the hub's cache only.

    Returns:
        The record: step, class, sizes, and every quantity with its standard error over images.
    """
    torch.set_num_threads(settings.threads)
    network = build(model, settings.source, settings.seed, offline).to(settings.device)
    files, labels = choose(Path(settings.images), settings.n)
    prepare, pixels = transform(network)
    x = torch.stack([prepare(read_picture(f)) for f in files]).to(settings.device)
    p = sketch(
        network, x, directions=settings.directions, seed=settings.seed, top=1, layers=False,
        tolerance=TOLERANCE, chunk=chunk, output=OUTPUTS[settings.outputs],
    )  # fmt: skip
    facts = {
        "step": 0,
        "class": family(model),
        "parameters": sum(q.numel() for q in network.parameters()),
        "pixels": pixels,
    }
    return facts | quantities_of(network, x, labels, p, settings, chunk)


def quantities_of(
    network: nn.Module,
    x: Tensor,
    labels: Sequence[int] | None,
    p: Probe,
    settings: Zoo,
    chunk: int | None,
) -> dict[str, Any]:
    """Return the record of a network on some images, from its probe and further passes.

    Args:
        network: the network in evaluation mode.
        x: the images as the network reads them.
        labels: the classes of the images; without them neither top-1 nor Eq. 38 is recorded.
        p: a probe of the network on these images.
        settings: what to measure.
        chunk: images at a time; None lets the pass choose.
    """
    paths = [q.path for q in p.parameters]
    values: dict[str, Any] = {
        **{f"tensors_{path}": paths.count(path) for path in ("layer", "rule", "slow", "unused")},
        **_means(p),
        "spectra_converged": p.sketch is None or p.sketch.converged,
    }
    if labels is not None:
        y = torch.tensor(labels, device=x.device)
        values["top1"] = _top1(network, x, y, chunk or 4)
        values |= _sampled(network, x, y, settings)
    if settings.paper:
        values |= _sensitivity_by_ascent(network, x, p, settings, chunk)
    return values


def record_with_memory(
    model: str, settings: Zoo, chunk: int | None, offline: bool
) -> dict[str, Any]:
    """Measure one model, with fewer images at a time where memory is short.

    Raises:
        FlatlensError: if memory is too short for a single image.
    """
    chunks = CHUNKS if chunk is None else [c for c in CHUNKS if c is not None and c <= chunk]
    for images_at_once in chunks:
        try:
            return record(model, settings, images_at_once, offline)
        except (RuntimeError, MemoryError, FlatlensError) as error:
            if not out_of_memory(error) and str(error) != COUPLED:
                raise
    raise FlatlensError(f"Memory is too short for {model}, even for one image at a time.")


def out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, says that memory ran out."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if "not enough memory" in text or "out of memory" in text or "alloc_cpu" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def _means(p: Probe) -> dict[str, float]:
    """Average over the images; the standard errors contain those of the sketch."""
    values: dict[str, float] = {}
    for name in QUANTITIES:
        metric = METRICS[name]
        assert isinstance(metric, Metric)
        values |= _mean(name, metric.samples(p))
    return values


def _mean(name: str, values: Any) -> dict[str, float]:
    error = np.std(values, ddof=1) / len(values) ** 0.5
    return {name: float(np.mean(values)), f"{name}_se": float(error)}


@torch.no_grad()
def _top1(network: nn.Module, x: Tensor, y: Tensor, chunk: int) -> float:
    """Return the percentage of images whose class is right."""
    batches = zip(x.split(chunk), y.split(chunk), strict=True)
    right = [network(images).argmax(1) == classes for images, classes in batches]
    return float(100 * torch.cat(right).double().mean())


def _sampled(network: nn.Module, x: Tensor, y: Tensor, settings: Zoo) -> dict[str, float]:
    """Estimate Eq. 38 with new perturbations for each image, and also as the authors did."""
    ways: dict[str, dict[str, Any]] = {}
    if settings.perturbations:
        ways["adaptive_sharpness_sampled"] = {"perturbations": settings.perturbations}
    if settings.paper:
        ways["adaptive_sharpness_paper"] = PAPER
    estimates: dict[str, float] = {}
    for name, options in ways.items():
        values = [
            adaptive_sharpness_sampled(
                network, x[i : i + 1], y[i : i + 1], rho=settings.rho,
                output=OUTPUTS[settings.outputs], seed=_seed(settings.seed, i), **options,
            ).value
            for i in range(len(x))
        ]  # fmt: skip
        estimates |= _mean(name, values)
    return estimates


def _seed(seed: int, i: int) -> int:
    return int(np.random.SeedSequence([seed, i]).generate_state(1)[0])


def _sensitivity_by_ascent(
    network: nn.Module, x: Tensor, p: Probe, settings: Zoo, chunk: int | None
) -> dict[str, float]:
    """Estimate the normalised MLS by the gradient ascent of Eq. 47."""
    ascent = input_sensitivity_ascent(
        network, x, seed=settings.seed, output=OUTPUTS[settings.outputs], chunk=chunk
    )
    assert ascent.samples is not None
    return _mean("normalized_mls_paper", p.input.x_norm**2 * ascent.samples**2)
