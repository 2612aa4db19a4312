"""Exact numbers against the paper's estimators on one pretrained vision transformer.

    python benchmarks/zoo_estimators.py --weights WEIGHTS --images PHOTOS --n 4

Prints tables for docs/zoo.md: the MLS by Lanczos and by the ascent of Eq. 47 after equally many
passes; the adaptive sharpness by Eqs. 38, 40 and 41; S exactly and from random directions. The
outputs are sigmoids of the logits, as in the paper.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flatlens as fl
from flatlens.algebra.lanczos import top_singular
from flatlens.perturb import (
    adaptive_sharpness_hessian,
    adaptive_sharpness_sampled,
    input_sensitivity_ascent,
)
from flatlens.training.timm_models import build, transform
from flatlens.zoo.pictures import choose, read_picture

STEPS = (2, 4, 8, 16, 30)
OUTPUT = torch.sigmoid


def seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a function, and the processor time that it took."""
    start = time.process_time()
    return work(), time.process_time() - start


def gram(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the product v -> A A^T v for every image."""
    x = x.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        f = OUTPUT(model(x))
    v0 = torch.zeros_like(f).requires_grad_()
    (back,) = torch.autograd.grad(f, x, v0, create_graph=True)

    def product(v: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(f, x, v, retain_graph=True)
        return torch.autograd.grad(back, v0, g, retain_graph=True)[0]

    return product


def ascent(model: nn.Module, x: Tensor) -> None:
    norms = x.flatten(1).double().norm(dim=1).numpy()
    found, climb = seconds(
        lambda: input_sensitivity_ascent(model, x, output=OUTPUT, steps=max(STEPS), chunk=len(x))
    )
    start = torch.randn(len(x), 1000, generator=torch.Generator().manual_seed(0))
    product, built = seconds(lambda: gram(model, x))
    print("| steps (two passes each) | Lanczos, MLS | ascent, MLS | Lanczos, normalised | ascent |")
    print("|---|---|---|---|---|")
    for steps in STEPS:
        top, spent = seconds(lambda k=steps: top_singular(product, start, 1, 0.0, k))
        mine, theirs = top.values[:, 0].numpy(), found.history[steps][1]
        normal = [float((norms**2 * v**2).mean()) for v in (mine, theirs)]
        print(f"| {steps} | {mine.mean():.5g} | {theirs.mean():.5g} | {normal[0]:.5g} | "
              f"{normal[1]:.5g} |")  # fmt: skip
    print(f"\n{max(STEPS)} steps took {spent + built:.0f} s by Lanczos, {climb:.0f} s by ascent.\n")


def adaptive(model: nn.Module, x: Tensor, y: Tensor, exact: fl.Probe, directions: int) -> None:
    print("| adaptive sharpness | value | standard error | seconds |")
    print("|---|---|---|---|")
    print(f"| Eq. 41, Gauss-Newton, exact | {fl.adaptive_sharpness(exact):.5g} | | |")
    options: dict[str, Any] = {"output": OUTPUT, "chunk": 1}
    found, spent = seconds(
        lambda: adaptive_sharpness_hessian(model, x, y, directions=directions, **options)
    )
    name = f"Eq. 40, true Hessian, {directions} products"
    print(f"| {name} | {found.value:.5g} | {found.se:.2g} | {spent:.0f} |")
    for rho in (0.01, 0.1):
        found, spent = seconds(
            lambda r=rho: adaptive_sharpness_sampled(
                model, x, y, rho=r, perturbations=directions, **options
            )
        )
        name = f"Eq. 38, rho = {rho}, {directions} pairs"
        print(f"| {name} | {found.value:.5g} | {found.se:.2g} | {spent:.0f} |", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--directions", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = build(arguments.model, arguments.weights)
    prepare, _ = transform(model)
    files, labels = choose(arguments.images, arguments.n)
    assert labels is not None
    x = torch.stack([prepare(read_picture(file)) for file in files])
    y = torch.tensor(labels)
    ascent(model, x)
    exact, spent = seconds(lambda: fl.probe(model, x, output=OUTPUT, chunk=1))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"Exact pass: {spent:.0f} s, {peak:.1f} GB at most.\n")
    print("| | S | standard error | adaptive sharpness | standard error | MLS | seconds |")
    print("|---|---|---|---|---|---|---|")
    numbers = f"{fl.sharpness(exact):.5g} | | {fl.adaptive_sharpness(exact):.5g} | "
    print(f"| exact | {numbers}| {fl.mls(exact):.5g} | {spent:.0f} |")
    for directions in (8, 32):
        p, spent = seconds(
            lambda k=directions: fl.sketch(
                model, x, output=OUTPUT, directions=k, layers=False, top=1, tolerance=1e-3
            )
        )
        e = p.sketch.errors
        print(
            f"| {directions} directions | {fl.sharpness(p):.5g} | {e['sharpness']:.2g} | "
            f"{fl.adaptive_sharpness(p):.5g} | {e['adaptive_sharpness']:.2g} | {fl.mls(p):.5g} | "
            f"{spent:.0f} |",
            flush=True,
        )
    print()
    adaptive(model, x, y, exact, arguments.directions)
    print("relative error of the MLS by Lanczos:",
          f"{np.abs(fl.mls.samples(p) / fl.mls.samples(exact) - 1).max():.1e}")  # fmt: skip


if __name__ == "__main__":
    main()
