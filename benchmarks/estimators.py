"""What do the estimators for large networks cost, compared with those they replace?

    FLATLENS_DATA=FOLDER python benchmarks/estimators.py              # both, some ten minutes
    FLATLENS_DATA=FOLDER python benchmarks/estimators.py --only norm --steps 100 --out try
    python benchmarks/estimators.py --only norm --steps 0             # untrained, on noise
    python benchmarks/estimators.py --only sharpness

**norm** (`figures/lanczos-vs-ascent`): ||df/dx||_2 of each sample by the paper's Eq. 47 (gradient
ascent on ||f(x + d) - f(x)|| / ||d||, 30 steps of Adam) and by Lanczos, as relative error over the
forward and backward passes taken. The truth is an SVD of the whole Jacobian. The networks are the
paper's VGG and a small vision transformer, trained for some steps on two classes of CIFAR-10 with
the mean squared error, and are measured in float64 on training images.

**sharpness** (`figures/sketch-vs-hutchinson`): S from random output directions (`flatlens.sketch`;
its spectra are left out here) and by Hutchinson's estimator in parameter space, mean_i ||J_i v||^2
with one v of +-1 for each parameter, as relative error over seconds. Networks of 1,000 outputs with
random weights, float32; the truth is the exact pass. The numbers behind both are printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from inequalities import image, write
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flatlens as fl
from flatlens.algebra.buffers import Buffers
from flatlens.algebra.lanczos import top_singular
from flatlens.capture.inputs import Inputs
from flatlens.capture.no_trace import untouched
from flatlens.capture.recording import CapturePlan
from flatlens.data.datasets import load
from flatlens.passes.arrangement import arrange
from flatlens.passes.forward import Subject
from flatlens.passes.request import Request, SketchOptions
from flatlens.passes.sketch import SketchStrategy
from flatlens.perturb import input_sensitivity_ascent
from flatlens.training.networks import build

BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#777777"
BATCH, TRAIN = 20, 1_000
LR = {"vgg": 0.2, "vit": 0.05}
TITLES = {
    "vgg": "the paper's VGG",
    "vit": "small vision transformer",
    "mlp": "MLP 784-500-500-1000",
}
WITHIN = 0.01


# ------------------------------------------------------------------ ||df/dx||_2


def trained(name: str, steps: int, n: int, seed: int) -> tuple[nn.Module, Tensor]:
    """Return the network after some steps of SGD, and n samples, in float64."""
    torch.manual_seed(seed)
    model = build(name)
    if steps == 0:
        return model.double().eval(), torch.rand(n, 3, 32, 32, dtype=torch.float64)
    data = load("cifar10", classes=(0, 1))
    x, y = data.x_train[:TRAIN], F.one_hot(data.y_train[:TRAIN], data.classes).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR[name])
    for _ in range(steps):
        index = torch.randint(len(x), (BATCH,))
        optimizer.zero_grad()
        F.mse_loss(model(x[index]), y[index]).backward()
        optimizer.step()
    return model.double().eval(), x[:n].double()


def jacobian_norms(model: nn.Module, x: Tensor) -> Tensor:
    """Compute the exact norms by one backward pass per output and SVDs."""
    x = x.clone().requires_grad_()
    f = model(x)
    each = range(f.shape[1])
    rows = [torch.autograd.grad(f[:, v].sum(), x, retain_graph=True)[0] for v in each]
    return torch.linalg.svdvals(torch.stack(rows, 1).flatten(2))[:, 0]


def lanczos_history(model: nn.Module, x: Tensor, steps: int) -> list[tuple[int, Tensor]]:
    """Return (passes, values) after each step.

    A forward pass and a backward pass that can be differentiated come first; a step is one
    backward pass (A^T v) and one through that (A times the result).
    """
    x = x.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        f = model(x)
    signs = torch.randint(0, 2, f.shape, generator=torch.Generator().manual_seed(0)).to(f) * 2 - 1
    v0 = torch.ones_like(f, requires_grad=True)
    (back,) = torch.autograd.grad(f, x, v0, create_graph=True)

    def gram(v: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(f, x, v, retain_graph=True)
        return torch.autograd.grad(back, v0, g, retain_graph=True)[0]

    history = []
    for step in range(1, min(steps, f.shape[1]) + 1):
        found = top_singular(gram, signs, 1, tolerance=0.0, max_steps=step)
        history.append((2 + 2 * step, found.values[:, 0]))
    return history


def norm_errors(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return relative errors over passes, as quantiles over samples."""
    model, x = trained(name, options.steps, options.n, options.seed)
    truth = jacobian_norms(model, x).numpy()
    e = input_sensitivity_ascent(model, x, seed=options.seed)
    histories = {
        "ascent": [(passes, np.asarray(values)) for passes, values in e.history],
        "lanczos": [(p, v.numpy()) for p, v in lanczos_history(model, x, 12)],
    }
    found: dict[str, Any] = {"network": name, "outputs": model(x[:1]).shape[1], "n": len(x)}
    found["mls"] = float(truth.mean())
    for method, history in histories.items():
        errors = np.array([np.abs(values / truth - 1) for _, values in history])
        low, mid, high = np.quantile(errors, [0.1, 0.5, 0.9], axis=1)
        passes = [p for p, _ in history]
        reached = [p for p, m in zip(passes, mid, strict=True) if m <= WITHIN]
        found[method] = {
            "passes": passes,
            "low": low.tolist(),
            "median": mid.tolist(),
            "high": high.tolist(),
            "passes_to_1_percent": reached[0] if reached else None,
            "mean_ratio_at_the_end": float((history[-1][1] / truth).mean()),
        }
    return found


def draw_norms(results: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(5.2 * len(results), 4.2), layout="constrained")
    axes = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for ax, found in zip(axes, results, strict=True):
        for method, colour, marker, label in (
            ("ascent", VERMILION, "s", "Eq. 47: ascent, 30 steps of Adam"),
            ("lanczos", BLUE, "o", "Lanczos"),
        ):
            got = found[method]
            floor = {k: np.maximum(got[k], 1e-12) for k in ("low", "median", "high")}
            style = {"color": colour, "marker": marker, "markersize": 4}
            ax.plot(got["passes"], floor["median"], label=label, **style)
            ax.fill_between(got["passes"], floor["low"], floor["high"], color=colour, alpha=0.15)
        ax.axhline(WITHIN, color=GREY, lw=1, ls=(0, (4, 3)))
        ax.text(63, WITHIN, "1 %", color=GREY, va="bottom", ha="right")
        ax.set_yscale("log")
        ax.set_ylim(5e-9, 30)
        exact = {
            "color": GREY,
            "lw": 1,
            "ls": ":",
            "label": "exact: one pass an output, and an SVD",
        }
        ax.axvline(1 + found["outputs"], **exact)
        ax.set_title(f"{TITLES[found['network']]}, {found['outputs']} outputs", fontsize="medium")
        ax.set_xlabel("forward and backward passes")
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("relative error of ‖∂f/∂x‖₂\n(median over samples, 10 to 90 %)")
    axes[0].legend(frameon=False, fontsize="small", loc="center right")
    return figure


# ------------------------------------------------------------------ sharpness


def sketched(model: nn.Module, x: Tensor, directions: int, seed: int) -> np.ndarray:
    """Estimate S from each output direction, without the singular values of a whole sketch."""
    inputs = Inputs(x)
    options = SketchOptions(directions, seed, top=1, tolerance=1.0)
    request = Request(method="sketch", chunk=len(x), sketch=options)
    with untouched(model):
        subject = Subject(model, x.dtype, None, list(model.named_parameters()))
        solo = subject.run(inputs.take(slice(0, 1)), CapturePlan())
        strategy = SketchStrategy(subject, request, Buffers(), solo.f.shape[1])
        arrangement = arrange(subject, strategy.run, inputs, solo, len(x), len(x))
        forward = strategy.run(inputs, arrangement.plan)
        strategy.expect(inputs, 0)
        _, estimate = strategy.means(*strategy.set_up(forward, arrangement.layouts))
    return (estimate.replicates.sharpness() / len(x)).double().numpy()


def hutchinson(model: nn.Module, x: Tensor, directions: int, seed: int) -> np.ndarray:
    """Return mean_i ||J_i v||^2 for each of several v of +-1 in parameter space."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(seed)

    def f(parameters: dict[str, Tensor]) -> Tensor:
        found: Tensor = torch.func.functional_call(model, parameters, (x,))
        return found

    values = []
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():  # the other kernels lack forward mode
        for _ in range(directions):
            v = {
                name: torch.randint(0, 2, p.shape, generator=generator).to(p) * 2 - 1
                for name, p in parameters.items()
            }
            _, Jv = torch.func.jvp(f, (parameters,), (v,))
            values.append(float(Jv.double().square().sum(1).mean()))
    return np.array(values)


def sharpness_errors(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return relative errors over seconds, from blocks of one long run of each method."""
    torch.manual_seed(options.seed)
    if name == "mlp":
        model, x = build("mlp", widths=(784, 500, 500, 1000)).eval(), torch.rand(20, 784)
    else:
        model, x = build("vit", classes=1000).eval(), torch.rand(4, 3, 32, 32)
    start = time.perf_counter()
    truth = fl.sharpness(fl.probe(model, x))
    found: dict[str, Any] = {
        "network": name,
        "outputs": 1000,
        "n": len(x),
        "sharpness": truth,
        "exact_seconds": time.perf_counter() - start,
    }
    methods: dict[str, tuple[Callable[..., np.ndarray], int]] = {
        "sketch": (sketched, options.directions),
        "hutchinson": (hutchinson, 2 * options.directions),
    }
    for method, (estimate, count) in methods.items():
        estimate(model, x, 2, 99)  # warm
        start = time.perf_counter()
        values = estimate(model, x, count, options.seed)
        seconds = (time.perf_counter() - start) / count
        spread = float(values.std(ddof=1)) / truth
        sizes = [2**k for k in range(12) if 2**k <= count // 4]
        rms = [float(np.sqrt(np.mean((blocks(values, k).mean(1) / truth - 1) ** 2))) for k in sizes]
        found[method] = {
            "directions": count,
            "seconds_per_direction": seconds,
            "relative_spread": spread,
            "sizes": sizes,
            "error": rms,
            "seconds_to_1_percent": seconds * max(2.0, (spread / WITHIN) ** 2),
        }
    found["times_faster"] = (
        found["hutchinson"]["seconds_to_1_percent"] / found["sketch"]["seconds_to_1_percent"]
    )
    return found


def blocks(values: np.ndarray, size: int) -> np.ndarray:
    return values[: len(values) // size * size].reshape(-1, size)


def draw_sharpness(results: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(5.2 * len(results), 4.2), layout="constrained")
    axes = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for ax, found in zip(axes, results, strict=True):
        for method, colour, marker, label in (
            ("hutchinson", VERMILION, "s", "Hutchinson, parameter space"),
            ("sketch", BLUE, "o", "output directions (flatlens.sketch)"),
        ):
            got = found[method]
            seconds = np.array(got["sizes"]) * got["seconds_per_direction"]
            ax.plot(seconds, got["error"], marker, color=colour, markersize=5, label=label)
            last = max(got["seconds_to_1_percent"], seconds[-1])
            line = np.geomspace(got["seconds_per_direction"], last, 50)
            ax.plot(line, got["relative_spread"] * (line / line[0]) ** -0.5, color=colour, lw=1)
        ax.axvline(found["exact_seconds"], color=GREY, lw=1, ls=":")
        ax.text(found["exact_seconds"], 0.9, " exact pass", color=GREY, va="top",
                transform=ax.get_xaxis_transform(), rotation=90, ha="right")  # fmt: skip
        ax.axhline(WITHIN, color=GREY, lw=1, ls=(0, (4, 3)))
        ax.set_xscale("log")
        ax.set_yscale("log")
        title = f"{TITLES[found['network']]}, 1,000 outputs, n = {found['n']}"
        ax.set_title(title, fontsize="medium")
        ax.set_xlabel("seconds, one thread")
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(
        "relative error of the sharpness\n(points: measured, lines: spread/√directions)"
    )
    axes[-1].legend(frameon=False, fontsize="small", loc="lower left")
    return figure


def facts(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "training_steps": options.steps,
        "seed": options.seed,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Estimators against those they replace.")
    parser.add_argument("--only", choices=["norm", "sharpness"], help="one of the two figures")
    parser.add_argument("--steps", type=int, default=300, help="of training (norm); 0: none")
    parser.add_argument("--n", type=int, default=20, help="samples (norm)")
    parser.add_argument("--directions", type=int, default=64, help="output directions (sharpness)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "figures")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"facts": facts(options)}
    figures: dict[str, Figure] = {}
    if options.only != "sharpness":
        result["norm"] = [norm_errors(name, options) for name in ("vgg", "vit")]
        figures["lanczos-vs-ascent"] = draw_norms(result["norm"])
    if options.only != "norm":
        result["sharpness"] = [sharpness_errors(name, options) for name in ("mlp", "vit")]
        figures["sketch-vs-hutchinson"] = draw_sharpness(result["sharpness"])
    for name, figure in figures.items():
        for kind in ("png", "svg"):
            write(options.out / f"{name}.{kind}", image(figure, kind))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
