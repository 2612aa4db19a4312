"""What does `flatlens.measure` cost? Ratios to the floor, taken in one run.

    python benchmarks/core.py                          # all six networks, one thread
    python benchmarks/core.py --models mlp lenet --repeats 5 --threads 2 --json cost.json
    python benchmarks/core.py --models vgg --profile   # where the time goes
    python benchmarks/core.py --device cpu --launches  # operator calls and waits, nothing is timed

**The floor** is what N plain training steps cost: one forward pass and N backward passes with
weight gradients over the same n samples, at the batch size that is fastest for it. **The lower
limit** asks the same N backward passes for the layers' activations only; no exact method that
backpropagates each output can beat it. The columns S, "S and MLS", headline and everything are the
cost of `measure` for these quantities, in floors. Every repeat times all sides one after the other
on the same network. A ratio is the median over repeats of the ratios within one repeat, so a
temporary slowdown of the machine affects both sides. Before each call every parameter changes a
little, as in training, so that no cache can return results for the weights of the last call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from launches import Counter
from torch import Tensor, nn

import flatlens as fl
from flatlens.training.networks import MODELS, build

BATCHES = (10, 20, 25, 50, 100)
SLOW = 2.0  # seconds; longer calls vary less and are repeated a third as often
ORACLE_SAMPLES = 10  # jacrev is slow and linear in n: time a tenth
Work = Callable[[], object]


# ------------------------------------------------------------------ the sides


def inputs(name: str, n: int) -> Tensor:
    """Return random pixels in [0, 1], the range of the paper's data."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand(n, *((784,) if name == "mlp" else (3, 32, 32)), generator=generator)


def floor(model: nn.Module, x: Tensor, batch: int) -> None:
    """Run one forward pass and N backward passes with weight gradients, summed as in training.

    Discarding gradients at once would be slower, because their memory would go back to the system
    every time.
    """
    for chunk in x.split(batch):
        out = model(chunk)
        for v in range(out.shape[1]):  # the backward of `unbind` would touch all outputs each time
            out[:, v].sum().backward(retain_graph=v + 1 < out.shape[1])
    model.zero_grad()


def lower_limit(model: nn.Module, x: Tensor, batch: int, image: bool = True) -> None:
    """Run one forward pass and N backward passes to the layers' outputs and to the input."""
    captured: list[Tensor] = []
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    hooks = [m.register_forward_hook(lambda _m, _x, z: captured.append(z)) for m in layers]
    try:
        for chunk in x.split(batch):
            captured.clear()
            leaf = chunk.clone().requires_grad_(image)
            out = model(leaf)
            backward_each_output(out, [leaf, *captured] if image else captured)
    finally:
        for hook in hooks:
            hook.remove()


def backward_each_output(out: Tensor, targets: Sequence[Tensor]) -> None:
    for v in range(out.shape[1]):
        torch.autograd.grad(out[:, v].sum(), targets, retain_graph=v + 1 < out.shape[1])


def jacrev_oracle(model: nn.Module, x: Tensor) -> None:
    """Compute sharpness and MLS in the obvious way, one sample at a time."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def f(parameters: dict[str, Tensor], x_i: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, parameters, (x_i[None],))
        return out[0]

    for x_i in x:
        j_theta, j_x = torch.func.jacrev(f, argnums=(0, 1))(parameters, x_i)
        sum(j.square().sum() for j in j_theta.values())
        torch.linalg.svdvals(j_x.flatten(1).double())


# ------------------------------------------------------------------ timing


def seconds(work: Work) -> float:
    """Return the seconds of a call, including the work of the device."""
    wait_for_device()
    start = time.perf_counter()
    work()
    wait_for_device()
    return time.perf_counter() - start


def wait_for_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def nudge(model: nn.Module, generator: torch.Generator) -> None:
    """Change every parameter by about a millionth."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator).to(p), alpha=1e-6)


def interleaved(model: nn.Module, sides: dict[str, Work], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each side in each repeat; the order rotates."""
    generator = torch.Generator().manual_seed(2)
    times: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(repeats):
        for name in order:
            nudge(model, generator)
            times[name].append(seconds(sides[name]))
        order = order[1:] + order[:1]
    return times


def fastest(model: nn.Module, side: Callable[[int], object], n: int) -> int:
    """Return the batch size of `BATCHES` at which `side` is fastest, and warm it up."""
    works: dict[str, Work] = {str(b): partial(side, b) for b in BATCHES if b <= n}
    times = interleaved(model, works, 1)
    if min(map(median, times.values())) < SLOW:  # otherwise the first timing is precise enough
        times = interleaved(model, works, 5)
    return int(min(times, key=lambda b: median(times[b])))


def ratio(times: dict[str, list[float]], above: str, below: str) -> list[float]:
    """Return the quartiles (first, median, third) of above / below within the repeats."""
    ratios = sorted(a / b for a, b in zip(times[above], times[below], strict=True))
    return [ratios[len(ratios) // 4], median(ratios), ratios[(3 * len(ratios)) // 4]]


def cost(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return one row of the table: times in seconds, ratios as quartiles."""
    torch.manual_seed(0)
    n, device = options.n, options.device
    model, x = build(name).eval().to(device), inputs(name, n).to(device)
    batch = fastest(model, lambda b: floor(model, x, b), n)
    chunk = fastest(model, lambda b: fl.measure(model, x, chunk=b), n)
    limit = fastest(model, lambda b: lower_limit(model, x, b), n)
    sides: dict[str, Work] = {
        "floor": lambda: floor(model, x, batch),
        "measure": lambda: fl.measure(model, x),
        "sharpness": lambda: fl.measure(model, x, quantities=["sharpness"]),
        "sharpness_and_mls": lambda: fl.measure(model, x, quantities=["sharpness", "mls"]),
        "headline": lambda: fl.measure(model, x, quantities="headline"),
        "measure_best_chunk": lambda: fl.measure(model, x, chunk=chunk),
        "lower_limit": lambda: lower_limit(model, x, limit),
    }
    slow = seconds(sides["floor"]) > SLOW
    times = interleaved(model, sides, max(3, options.repeats // 3) if slow else options.repeats)
    row: dict[str, Any] = {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "floor_batch": batch,
        "best_chunk": chunk,
        "lower_limit_batch": limit,
        "times": times,
        "ratios": {side: ratio(times, side, "floor") for side in sides if side != "floor"},
    }
    if name == "mlp" and options.oracle:
        few = x[:ORACLE_SAMPLES]
        oracle = median(seconds(lambda: jacrev_oracle(model, few)) for _ in range(3))
        row["jacrev_over_measure"] = oracle * n / len(few) / median(times["measure"])
    return row


# ------------------------------------------------------------------ memory


def resident_kib(field: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of this process.

    `ru_maxrss` is the fallback: Linux hands the parent's peak down to a child that it starts,
    so that there it would hide everything smaller than the parent.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak // 1024 if sys.platform == "darwin" else peak


def peak_extra_here(name: str, n: int) -> int:
    """Return the peak KiB of one `measure` of n samples beyond model and data."""
    torch.manual_seed(0)
    model, x = build(name).eval(), inputs(name, n)
    with torch.no_grad():
        model(x[:2])  # torch's own start-up is not the measurement's
    before = resident_kib("VmRSS")
    fl.measure(model, x)
    return resident_kib("VmHWM") - before


def peak_extra(name: str, n: int, threads: int) -> float:
    """Return the peak MiB of one `measure` in a fresh process."""
    command = [sys.executable, __file__, "--peak", name, str(n), "--threads", str(threads)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024


def memory(name: str, options: argparse.Namespace) -> dict[str, Any]:
    small, large = (peak_extra(name, n, options.threads) for n in (100, 10_000))
    return {"model": name, "mib_100": small, "mib_10000": large, "ratio": large / small}


# ------------------------------------------------------------------ output


def cost_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        "| model | parameters | floor | S | S and MLS | headline | everything | at best chunk "
        "| lower limit |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        ms = 1000 * median(row["times"]["floor"])
        low, mid, high = row["ratios"]["measure"]
        others = ("sharpness", "sharpness_and_mls", "headline", "measure_best_chunk", "lower_limit")
        S, both, headline, best, limit = (row["ratios"][side][1] for side in others)
        yield (
            f"| {row['model']} | {row['parameters']:,} | {ms:.0f} ms (batch {row['floor_batch']}) "
            f"| {S:.2f} | {both:.2f} | **{headline:.2f}** "
            f"| **{mid:.2f}** ({low:.2f} to {high:.2f}) | {best:.2f} (chunk {row['best_chunk']}) "
            f"| {limit:.2f} (batch {row['lower_limit_batch']}) |"
        )
    for row in rows:
        if "jacrev_over_measure" in row:
            yield ""
            yield (
                f"`jacrev`, sample by sample, sharpness and MLS alone, on the {row['model']}: "
                f"{row['jacrev_over_measure']:.0f} times the cost of `measure`."
            )


def memory_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| model | peak extra at n = 100 | at n = 10,000 | ratio |"
    yield "|---|--:|--:|--:|"
    for r in rows:
        yield (
            f"| {r['model']} | {r['mib_100']:.0f} MiB | {r['mib_10000']:.0f} MiB "
            f"| {r['ratio']:.2f} |"
        )


def launches(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Count operator calls, factorisations and waits of one `measure` and of S alone."""
    torch.manual_seed(0)
    model = build(name).eval().to(options.device)
    x = inputs(name, options.n).to(options.device)
    row: dict[str, Any] = {"model": name}
    for side, asked in (("all", "default"), ("S", "sharpness")):
        with Counter() as counter:
            fl.measure(model, x, quantities=asked)
        counts = (counter.launches, counter.factorisations, counter.synchronisations)
        row[side] = dict(zip(("launches", "factorisations", "waits"), counts, strict=True))
    return row


def launch_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| model | asked for | launches | factorisations | waits of the host |"
    yield "|---|---|--:|--:|--:|"
    for row in rows:
        for side, what in (("all", "everything"), ("S", "S alone")):
            counts = " | ".join(f"{count:,}" for count in row[side].values())
            yield f"| {row['model']} | {what} | {counts} |"


def profile(name: str, n: int) -> None:
    """Print the operators of one `measure`, sorted by their own time."""
    torch.manual_seed(0)
    model, x = build(name).eval(), inputs(name, n)
    fl.measure(model, x)
    nudge(model, torch.Generator().manual_seed(2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as record:
        fl.measure(model, x)
    print(f"\n{name}\n{record.key_averages().table(sort_by='self_cpu_time_total', row_limit=25)}")


def facts(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "n": options.n,
        "repeats": options.repeats,
        "threads": options.threads,
        "device": options.device,
        "dtype": "float32",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of flatlens.measure against the floor.")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--n", type=int, default=100, help="samples (default 100)")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times here too")
    parser.add_argument("--device", default="cpu", help="where model and samples are")
    parser.add_argument("--launches", action="store_true", help="count launches, time nothing")
    parser.add_argument("--profile", action="store_true", help="operators of one measure call")
    parser.add_argument("--memory-models", nargs="*", default=["mlp", "lenet"], choices=MODELS)
    parser.add_argument("--no-oracle", dest="oracle", action="store_false", help="skip jacrev")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)  # one fresh process of memory
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    if options.peak:
        print(peak_extra_here(options.peak[0], int(options.peak[1])))
        return
    if options.profile:
        for name in options.models:
            profile(name, options.n)
        return
    result: dict[str, Any] = {"facts": facts(options), "cost": [], "memory": []}
    print(", ".join(f"{key} {value}" for key, value in result["facts"].items()), end="\n\n")
    result["launches"] = [launches(name, options) for name in options.models]
    print("\n".join(launch_table(result["launches"])), end="\n\n")
    if options.launches:
        return
    for name in options.models:
        print(f"timing {name}", file=sys.stderr)
        result["cost"].append(cost(name, options))
    print("\n".join(cost_table(result["cost"])), end="\n\n")
    for name in options.memory_models:
        result["memory"].append(memory(name, options))
    if result["memory"]:
        print("\n".join(memory_table(result["memory"])))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
