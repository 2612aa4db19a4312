"""What do `spectrum`, `representations` and the free gauges cost?

    python benchmarks/panel.py                              # the paper's three networks, one thread
    python benchmarks/panel.py --models mlp --repeats 9 --json panel.json

All sides of a ratio are timed in one run, one after the other, on the same samples (n = 100,
N = 10). The table has medians and quartiles of each side and the ratio of medians:

- spectrum: all eigenvalues by `fl.spectrum`, against the top 20 by the Lanczos iteration of
  curvlinops (scipy's eigsh on its Gauss-Newton operator) and of hessian-eigenthings;
- representations: `fl.representations` without standard errors, against one forward pass over the
  same samples; the time of TwoNN and of the eigenvalues is part of it and shown by itself;
- gauges: `measure` with `max_sensitivity` and `lipschitz` against `measure` without them.

A peer that is not installed is left out, and said so. ViViT (vivit-for-pytorch 1.0.0) is no side:
it calls torch.symeig, which torch has removed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

import flatlens as fl
from flatlens.geometry.clouds import Cloud, effective_rank, intrinsic_dimension
from flatlens.metrics import METRICS
from flatlens.training.networks import build

MODELS = ("mlp", "lenet", "vgg")
TOP = 20
Side = Callable[[], Any]


def data(name: str, n: int) -> Tensor:
    """Pixels in [0, 1]."""
    generator = torch.Generator().manual_seed(1)
    shape = (784,) if name == "mlp" else (3, 32, 32)
    return torch.rand(n, *shape, generator=generator)


def timed(side: Side, repeats: int, budget: float) -> list[float]:
    """Return the seconds of each call after a first one; slow calls are repeated less often."""
    times: list[float] = []
    began = time.perf_counter()
    side()
    while len(times) < repeats and (len(times) < 2 or time.perf_counter() - began < budget):
        start = time.perf_counter()
        side()
        times.append(time.perf_counter() - start)
    return times


def spectrum_sides(model: nn.Module, x: Tensor) -> dict[str, Side]:
    """Return the sides: all eigenvalues by flatlens, and the top 20 by each installed peer."""
    sides: dict[str, Side] = {"flatlens.spectrum": lambda: fl.spectrum(model, x)}
    y = torch.zeros(len(x), 10)
    try:
        import curvlinops
        from scipy.sparse.linalg import eigsh

        operator = curvlinops.GGNLinearOperator(
            model, nn.MSELoss(reduction="sum"), list(model.parameters()), [(x, y)],
            check_deterministic=False,
        )  # fmt: skip
        sides["curvlinops + eigsh"] = lambda: eigsh(operator.to_scipy(), k=TOP, which="LA")
    except ImportError as error:
        print(f"curvlinops is left out: {error}")
    try:
        import hessian_eigenthings as eigenthings

        ggn = eigenthings.GGNOperator(
            model, [(x, y)], lambda network, batch: network(batch[0]),
            lambda f, batch: 0.5 * (f - batch[1]).square().sum(1).mean(),
        )  # fmt: skip
        sides["hessian-eigenthings"] = lambda: eigenthings.lanczos(ggn, k=TOP, max_iter=100, seed=0)
    except ImportError as error:
        print(f"hessian-eigenthings is left out: {error}")
    return sides


def representation_sides(model: nn.Module, x: Tensor) -> dict[str, Side]:
    """Return the sides: the table, one forward pass, and the statistics of the table alone."""
    table = fl.representations(model, x, errors=False)
    clouds = [Cloud.of(torch.rand(len(x), int(d))) for d in table["features"]]

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def statistics() -> None:
        for cloud in clouds:
            intrinsic_dimension(cloud)
            effective_rank(cloud)

    return {
        "flatlens.representations": lambda: fl.representations(model, x, errors=False),
        "one forward pass": forward,
        "TwoNN and eigenvalues alone": statistics,
    }


def gauge_sides(model: nn.Module, x: Tensor) -> dict[str, Side]:
    """Return the sides: a measurement with the free gauges and one without them."""
    rest = [*(name for name in METRICS if name != "max_sensitivity"), "eq11", "eq12"]
    gauges = ["max_sensitivity", "lipschitz"]
    return {
        "measure with max_sensitivity and lipschitz": lambda: fl.measure(
            model, x, quantities=[*rest, *gauges]
        ),
        "measure without": lambda: fl.measure(model, x, quantities=rest),
    }


FAMILIES = {
    "spectrum": spectrum_sides,
    "representations": representation_sides,
    "gauges": gauge_sides,
}


def rows_of(name: str, n: int, repeats: int, budget: float) -> list[dict[str, Any]]:
    """Time all sides of one network."""
    torch.manual_seed(0)
    model, x = build(name).eval(), data(name, n)
    lines = []
    for family, sides in FAMILIES.items():
        times = {side: timed(call, repeats, budget) for side, call in sides(model, x).items()}
        own = median(next(iter(times.values())))
        for side, seconds in times.items():
            low, _, high = quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
            lines.append(
                {
                    "model": name, "family": family, "side": side, "median": median(seconds),
                    "low": low, "high": high, "ratio": median(seconds) / own, "calls": len(seconds),
                }
            )  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each side")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, "
          f"{options.threads} of {os.cpu_count()} threads, n = {options.samples}")  # fmt: skip
    lines = []
    for name in options.models:
        for line in rows_of(name, options.samples, options.repeats, options.budget):
            lines.append(line)
            print(
                f"{line['model']:6} {line['family']:16} {line['side']:44} {line['median']:9.4f} s "
                f"({line['low']:.4f} to {line['high']:.4f}), {line['ratio']:.2f} x"
            )
    if options.json:
        options.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
