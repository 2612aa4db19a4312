"""Every inequality on the paper's trained networks: tables, a figure, and the records behind them.

    FLATLENS_DATA=FOLDER python benchmarks/inequalities.py     # ten minutes on one core
    python benchmarks/inequalities.py --redraw                 # page and figure alone
    FLATLENS_DATA=FOLDER python benchmarks/inequalities.py --nets lenet --steps 200 --out try

Trains the MLP on FashionMNIST, LeNet and the narrow VGG on CIFAR-10 (airplanes and automobiles) as
the paper did, on the first 1,000 training images: squared error averaged over the batch and the
ten outputs, plain SGD, learning rate 0.2, batch 20. At steps spaced by logarithm the first 100
training images are measured. Writes `inequalities.md`, `inequalities.json` (three tables, each
as `pandas.DataFrame(**found["layers"])`) and `figures/bounds.png` and `.svg`.

Networks are trained in float32, and the same weights are measured in float64. Theorems are then
checked to 1e-9, and no singular value falls below the rank tolerance, which in float32 is 4e-4 of
the largest.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor, nn

import flatlens as fl
from flatlens.data.datasets import Data, load
from flatlens.files.replacing import replacing
from flatlens.training.networks import build

LR, BATCH, TRAIN, SAMPLES = 0.2, 20, 1_000, 100
COARSE, FINE = (1, 2, 5), (1, 1.5, 2, 3, 5, 7)  # measured below and from step 100, times 10^k
TOLERANCE = 1e-9  # of a comparison in float64


@dataclass(frozen=True)
class Setting:
    """A network of the paper and its data."""

    title: str
    data: str
    options: dict[str, Any]


SETTINGS = {
    "mlp": Setting("MLP 784-500-500-500-10, FashionMNIST", "fashion-mnist", {}),
    "lenet": Setting("LeNet, CIFAR-10 classes 0 and 1", "cifar10", {"classes": (0, 1)}),
    "vgg": Setting("VGG (narrow), CIFAR-10 classes 0 and 1", "cifar10", {"classes": (0, 1)}),
}
STEPS = ["net", "step", "train_loss", "train_accuracy", "test_accuracy", "sharpness", "nmls", "mls"]
STEPS += ["log_volume", "local_dimension", "rank"]
SIDES = ["net", "step", "name", "lhs", "rhs", "slack", "holds", "verdict", "log_lhs", "log_rhs"]
LAYERS = ["net", "step", "layer", "kind", "positions", "lhs", "rhs", "slack", "sharing_ratio"]
LAYERS += ["verdict", "fails", "slack_spectral", "slack_kernel", "fails_kernel"]
Tables = dict[str, pd.DataFrame]


# ------------------------------------------------------------------ training and measuring


def schedule(steps: int) -> list[int]:
    """0, 1, 2, 5, 10 ... 50, then 100, 150, 200, 300, 500, 700, 1000 ... and the last step."""
    spaced = {int(k * 10**e) for e in range(7) for k in (COARSE if e < 2 else FINE)}
    return sorted({0, steps, *(s for s in spaced if s < steps)})


def batches(n: int, seed: int) -> Iterator[Tensor]:
    """Yield the indices of one batch after another, each epoch in a new order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(n, generator=generator).split(BATCH)


def run(net: str, steps: int, seed: int) -> Iterator[tuple[int, nn.Module, Data]]:
    """Train, and yield the network at each step to measure."""
    setting = SETTINGS[net]
    data = load(setting.data, **setting.options)
    x, y = data.x_train[:TRAIN], F.one_hot(data.y_train[:TRAIN], data.classes).float()
    torch.manual_seed(seed)
    model = build(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    order, due = batches(TRAIN, seed), set(schedule(steps))
    yield 0, model, data
    for step in range(1, steps + 1):
        index = next(order)
        optimizer.zero_grad()
        F.mse_loss(model(x[index]), y[index]).backward()
        optimizer.step()
        if step in due:
            yield step, model, data


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor, classes: int) -> tuple[float, float]:
    """Return the squared error averaged over samples and outputs, and the accuracy in per cent."""
    f = torch.cat([model(part) for part in x.split(500)])
    loss = F.mse_loss(f, F.one_hot(y, classes).to(f))
    return loss.item(), 100 * (f.argmax(1) == y).double().mean().item()


def record(net: str, step: int, model: nn.Module, data: Data) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each table for one step."""
    loss, accuracy = evaluate(model, data.x_train[:TRAIN], data.y_train[:TRAIN], data.classes)
    _, test_accuracy = evaluate(model, data.x_test, data.y_test, data.classes)
    double, x = copy.deepcopy(model).double(), data.x_train[:SAMPLES].double()
    m = fl.measure(double, x, data.y_train[:SAMPLES])
    at = {"net": net, "step": step}
    summary = {name: m[name] for name in STEPS[5:-1]} | {"rank": int(m.probe.input.rank.min())}
    summary |= {"train_loss": loss, "train_accuracy": accuracy, "test_accuracy": test_accuracy}
    sides = [vars(row) | at for row in m.bounds]
    if any(layer.positions > 1 for layer in m.probe.layers):
        place = [row.name for row in m.bounds].index("eq12_tied_rank")
        sides[place:place] = [vars(row) | at for row in shared_weight_rows(m, double, x)]
    layers = [
        eq5(layer) | {"verdict": row["eq5_verdict"], "why": row["eq5_why"]} | at
        for layer, row in zip(m.probe.layers, m.rows, strict=True)
    ]
    return {"steps": [summary | at], "inequalities": sides, "layers": layers}


def shared_weight_rows(m: fl.Measurement, model: nn.Module, x: Tensor) -> list[fl.Inequality]:
    """Return Eq. 12 in two more forms for shared weights; for dense layers they are equal.

    `eq12_kernel` takes the norm of the flattened kernel for that of a convolution,
    `eq12_untied_exact` the exact ||D^-1 C||_2 in place of its cheap bound.
    """
    p = m.probe
    kernels = replace(p, layers=[replace(q, norm=q.norms.kernel) for q in p.layers])
    exact = fl.bounds(fl.probe(model, x, exact_untied=True), exact=True)["eq12_untied"]
    return [
        replace(fl.bounds(kernels)["eq12"], name="eq12_kernel"),
        replace(exact, name="eq12_untied_exact"),
    ]


def eq5(layer: fl.LayerProbe) -> dict[str, Any]:
    """Return Eq. 5 for one layer, averaged over samples, and the number of samples in which it
    fails.

    lhs ||A||_F (the paper's proof; `spectral`: ||A||_2, its statement), rhs ||W|| sqrt(w) / x with
    the operator norm (`kernel`: with the norm of the flattened kernel).
    """
    lhs = np.sqrt((layer.singular**2).sum(1))
    rhs = layer.norm * (1 + layer.norms.slack) * np.sqrt(layer.grad_weight) / layer.x_norm
    kernel = rhs * layer.norms.kernel / layer.norms.operator
    return {
        "layer": layer.name,
        "kind": layer.kind,
        "positions": layer.positions,
        "lhs": lhs.mean(),
        "rhs": rhs.mean(),
        "slack": rhs.mean() / lhs.mean(),
        "sharing_ratio": layer.grad_weight.mean() / layer.untied.mean(),
        "fails": int((lhs > rhs * (1 + TOLERANCE)).sum()),
        "slack_spectral": rhs.mean() / layer.singular[:, 0].mean(),
        "slack_kernel": kernel.mean() / lhs.mean(),
        "fails_kernel": int((lhs > kernel * (1 + TOLERANCE)).sum()),
    }


def experiment(nets: list[str], steps: int, seed: int) -> tuple[Tables, dict[str, Any]]:
    """Return all tables, and the reason of each verdict at the last step."""
    rows: dict[str, list[dict[str, Any]]] = {"steps": [], "inequalities": [], "layers": []}
    for net in nets:
        for step, model, data in run(net, steps, seed):
            for table, new in record(net, step, model, data).items():
                rows[table] += new
            last = rows["steps"][-1]
            print(f"{net} step {step}: training loss {last['train_loss']:.2e}", file=sys.stderr)
    tables = {name: pd.DataFrame(found) for name, found in rows.items()}
    why: dict[str, Any] = {
        net: {
            "inequalities": {r["name"]: r["why"] for r in rows["inequalities"] if r["net"] == net},
            "layers": {r["layer"]: r["why"] for r in rows["layers"] if r["net"] == net},
        }
        for net in nets
    }
    columns = {"steps": STEPS, "inequalities": SIDES, "layers": LAYERS}
    return {name: table[columns[name]] for name, table in tables.items()}, why


# ------------------------------------------------------------------ the records


def facts(options: argparse.Namespace) -> dict[str, Any]:
    changed = [f"--nets {' '.join(options.nets)}"] if options.nets != list(SETTINGS) else []
    changed += [f"--steps {options.steps}"] if options.steps != 10_000 else []
    changed += [f"--seed {options.seed}"] if options.seed else []
    return {
        "command": " ".join(["FLATLENS_DATA=FOLDER python benchmarks/inequalities.py", *changed]),
        "flatlens": fl.__version__,
        "torch": torch.__version__.partition("+")[0],
        "numpy": np.__version__,
        "python": platform.python_version(),
        "threads": 1,
        "seed": options.seed,
        "steps": options.steps,
        "training_images": TRAIN,
        "samples": SAMPLES,
        "lr": LR,
        "batch": BATCH,
    }


def to_json(tables: Tables, about: dict[str, Any], why: dict[str, Any]) -> str:
    """Write one line per row with seven digits; infinities and NaN are strings for `float`."""
    split = {
        name: {
            "columns": list(table),
            "data": [[plain(v) for v in row] for row in table.to_numpy()],
        }
        for name, table in tables.items()
    }
    text = json.dumps({"facts": about, "why": why} | split, separators=(",", ":"), allow_nan=False)
    return text.replace('],["', '],\n["').replace('"data":[[', '"data":[\n[') + "\n"


def plain(value: Any) -> Any:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, float) and np.isfinite(value):
        return float(f"{value:.7g}")
    return str(value) if isinstance(value, float) else value


def from_json(text: str) -> tuple[Tables, dict[str, Any], dict[str, Any]]:
    found = json.loads(text)
    tables = {name: pd.DataFrame(**found[name]) for name in ("steps", "inequalities", "layers")}
    for table in tables.values():
        for column in {"lhs", "rhs", "slack", "log_lhs", "log_rhs", "log_volume"} & set(table):
            table[column] = table[column].astype(float)
    return tables, found["facts"], found["why"]


def broken_theorems(tables: Tables) -> pd.DataFrame:
    """Return the theorems that fail; there should be none."""
    rows, layers = tables["inequalities"], tables["layers"]
    wrong = rows[(rows.verdict == "theorem") & ~rows.holds.astype(bool)]
    wrong_layers = layers[(layers.verdict == "theorem") & (layers.fails > 0)]
    return pd.concat([wrong, wrong_layers.rename(columns={"layer": "name"})])


# ------------------------------------------------------------------ the page


def page(tables: Tables, about: dict[str, Any], why: dict[str, Any]) -> Iterator[str]:
    yield "# The inequalities on the paper's trained networks"
    yield ""
    yield "This page answers one question: which inequalities hold on networks that were trained as"
    yield "in the paper, and how tight are they? The names are those of [theory.md](theory.md)."
    yield ""
    yield from summary(tables)
    yield ""
    yield "How to read the tables:"
    yield ""
    yield "| column | what |"
    yield "|---|---|"
    yield "| slack | rhs / lhs; below 1 the inequality fails |"
    yield "| least slack | the smallest slack of all measurements of the training, with its step |"
    yield "| fails | in how many samples lhs > rhs (Eq. 5) |"
    yield (
        "| flattened kernel | slack and fails with the spectral norm of the reshaped kernel in "
        "place of the operator norm |"
    )
    yield "| spectral | slack with ‖A‖₂ in place of ‖A‖_F on the left |"
    yield ""
    yield "`log_volume` has logarithms on both sides."
    yield ""
    yield "## How it was taken"
    yield ""
    yield "`benchmarks/inequalities.py` writes this page."
    yield ""
    yield f"    {about['command']}"
    yield ""
    yield "| setting | value |"
    yield "|---|---|"
    yield (
        f"| versions | flatlens {about['flatlens']}, torch {about['torch']}, "
        f"numpy {about['numpy']}, Python {about['python']} |"
    )
    yield f"| threads, seed | one thread, seed {about['seed']} |"
    yield f"| training images | the first {about['training_images']:,} |"
    yield f"| optimiser | plain SGD, learning rate {about['lr']}, batch {about['batch']} |"
    yield "| loss | squared error averaged over batch and outputs, float32 |"
    yield f"| measured | the first {about['samples']} training images, in float64 |"
    yield ""
    yield "| net | parameters | steps | training loss | training accuracy | test accuracy |"
    yield "|---|--:|--:|--:|--:|--:|"
    for net, rows in tables["steps"].groupby("net", sort=False):
        end = rows.iloc[-1]
        count = sum(p.numel() for p in build(str(net)).parameters())
        yield (
            f"| {SETTINGS[str(net)].title} | {count:,} | {end.step:,} | {end.train_loss:.2e} "
            f"| {end.train_accuracy:.1f} % | {end.test_accuracy:.1f} % |"
        )
    for net in tables["steps"].net.unique():
        yield ""
        yield f"## {SETTINGS[net].title}"
        yield ""
        yield from net_page(net, tables, why[net])
    yield ""
    yield "![bounds over training](figures/bounds.png)"


def summary(tables: Tables) -> Iterator[str]:
    """Say how many rows are theorems and whether all of them hold."""
    proven = tables["inequalities"].query("verdict == 'theorem'")
    dense = tables["layers"].query("verdict == 'theorem'")
    broken = broken_theorems(tables)
    if not broken.empty:
        yield f"**{len(broken)} rows with the verdict theorem fail: that is a bug.**"
        return
    names, steps = proven.name.nunique(), len(tables["steps"])
    yield f"All {len(proven)} rows with the verdict *theorem* hold. They come from {names}"
    yield f"inequalities and {steps} measurements. Eq. 5 holds"
    yield f"in each sample of the {len(dense)} measurements of a layer where it is a theorem."


def net_page(net: str, tables: Tables, why: dict[str, dict[str, str]]) -> Iterator[str]:
    rows, layers = (tables[t][tables[t].net == net] for t in ("inequalities", "layers"))
    end = rows.step.max()
    yield "| name | lhs | rhs | slack | least slack | holds | verdict | why |"
    yield "|---|--:|--:|--:|--:|---|---|---|"
    for row in rows[rows.step == end].itertuples():
        if row.verdict == "not applicable":
            yield f"| `{row.name}` | | | | | | not applicable | {why['inequalities'][row.name]} |"
            continue
        holds = "yes" if row.holds else "**no**"
        yield (
            f"| `{row.name}` | {row.lhs:.4g} | {row.rhs:.4g} | {row.slack:.4g} "
            f"| {least(rows[rows.name == row.name])} | {holds} | {row.verdict} "
            f"| {why['inequalities'][row.name]} |"
        )
    yield ""
    yield "Eq. 5 layer by layer:"
    yield ""
    yield (
        "| layer | kind | positions | sharing ratio | lhs | rhs | slack | least slack | fails "
        "| flattened kernel | spectral | verdict |"
    )
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|"
    for row in layers[layers.step == end].itertuples():
        yield (
            f"| {row.layer} | {row.kind} | {row.positions:,} | {row.sharing_ratio:.3g} "
            f"| {row.lhs:.4g} | {row.rhs:.4g} | {bold(row.slack)} "
            f"| {least(layers[layers.layer == row.layer])} | {row.fails} "
            f"| {bold(row.slack_kernel)}, {row.fails_kernel} | {bold(row.slack_spectral)} "
            f"| {row.verdict} |"
        )
    reasons = [why["layers"][name] for name in layers[layers.verdict == "observation"].layer]
    if reasons:
        yield ""
        yield "Why these layers are observations:"
        yield ""
        yield from (f"- {reason}" for reason in dict.fromkeys(reasons))


def least(rows: pd.DataFrame) -> str:
    found = rows.loc[rows.slack.idxmin()]
    return f"{bold(found.slack)} ({found.step})"


def bold(slack: float) -> str:
    """Format a slack; it is bold if the inequality fails."""
    return f"**{slack:.3g}**" if slack < 1 - TOLERANCE else f"{slack:.3g}"


# ------------------------------------------------------------------ the figure

BLACK, BLUE, VERMILION, GREEN, PURPLE = "#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7"
MARK: dict[str, Any] = {"ms": 4, "lw": 1.6}  # the colours are those of Okabe and Ito


def draw(tables: Tables, columns: list[str]) -> Figure:
    """Draw NMLS, log volume and Eq. 5 over the steps, one column per network."""
    figure = Figure(figsize=(5.2 * len(columns), 9.6), layout="constrained")
    axes = figure.subplots(3, len(columns), sharex="col", squeeze=False)
    for k, net in enumerate(columns):
        rows, layers = (tables[t][tables[t].net == net] for t in ("inequalities", "layers"))
        dense = (layers.positions == 1).all()
        axes[0, k].set_title(SETTINGS[net].title, fontsize="medium")
        draw_nmls(axes[0, k], rows, dense)
        draw_volume(axes[1, k], rows)
        draw_eq5(axes[2, k], layers)
        axes[2, k].set_xlabel("SGD steps")
    for ax in axes.flat:
        ax.set_xscale("symlog", linthresh=1)  # keeps step 0 on a log axis
        ax.set_xlim(0, 1.15 * tables["steps"].step.max())
        ax.xaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("NMLS and its bounds")
    axes[1, 0].set_ylabel("log volume and its bounds")
    axes[2, 0].set_ylabel("Eq. 5: rhs / lhs")
    return figure


def log_axis(ax: Axes, low: float, high: float, room: float) -> None:
    """Make a log axis with plain numbers, and room for a legend above the lines."""
    ax.set_yscale("log")
    ax.set_ylim(low, high * (high / low) ** room)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.legend(fontsize="small", frameon=False, loc="upper left", ncols=2 if room > 0.5 else 1)


def side(ax: Axes, rows: pd.DataFrame, name: str, column: str, label: str, **style: Any) -> None:
    """Draw one side of an inequality, dotted where it is only an observation."""
    found = rows[rows.name == name]
    if column.endswith("rhs"):
        verdict = found.verdict.iloc[-1]
        style["linestyle"] = "-" if verdict == "theorem" else (0, (2, 1.5))
        label = f"{label}: {verdict}"
    ax.plot(found.step, found[column], label=label, **style)


def draw_nmls(ax: Axes, rows: pd.DataFrame, dense: bool) -> None:
    if not dense:
        side(ax, rows, "eq12_untied", "rhs", "ours, untied", color=VERMILION, marker="^", **MARK)
        side(ax, rows, "eq12_untied_exact", "rhs", "ours, untied, exact ‖D⁻¹C‖₂", color=GREEN,
             marker="v", **MARK)  # fmt: skip
    side(ax, rows, "eq12", "rhs", "the paper's, Eq. 12", color=BLUE, marker="s", **MARK)
    if dense:
        side(ax, rows, "eq12_bias", "rhs", "ours, with biases", color=VERMILION, marker="^", **MARK)
    side(ax, rows, "eq12", "lhs", "NMLS, measured", color=BLACK, marker="o", **MARK)
    ax.set_yscale("log")
    log_axis(ax, *ax.get_ylim(), room=0.45)


def draw_volume(ax: Axes, rows: pd.DataFrame) -> None:
    side(ax, rows, "eq9", "log_rhs", "the paper's, log of Eq. 9", color=BLUE, marker="s", **MARK)
    side(ax, rows, "log_volume", "rhs", "ours", color=VERMILION, marker="^", **MARK)
    style = {"color": PURPLE, "marker": "D", **MARK}
    side(ax, rows, "eq9", "log_lhs", "log of the mean volume, measured", **style)
    side(
        ax, rows, "log_volume", "lhs", "mean log volume, measured", color=BLACK, marker="o", **MARK
    )
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.5 * (high - low))
    ax.legend(fontsize="small", frameon=False, loc="upper left")


def draw_eq5(ax: Axes, layers: pd.DataFrame) -> None:
    names = list(layers.layer.unique())
    colours = matplotlib.colormaps["cividis"](np.linspace(0, 0.9, len(names)))
    for name, colour, marker in zip(names, colours, "osD^v<>ph*"[: len(names)], strict=True):
        rows = layers[layers.layer == name]
        verdict = rows.verdict.iloc[-1]
        style = "-" if verdict == "theorem" else (0, (2, 1.5))
        places = f", {rows.positions.iloc[0]} positions" if verdict != "theorem" else ""
        ax.plot(rows.step, rows.slack, color=colour, linestyle=style, marker=marker, **MARK,
                label=f"{rows.kind.iloc[0]} {name}{places}")  # fmt: skip
    low = min(0.5, layers.slack.min()) / 1.5
    log_axis(ax, low, layers.slack.max(), room=0.6)
    ax.axhspan(low, 1, color=VERMILION, alpha=0.12, lw=0)
    ax.text(0.1, low * 1.08, "Eq. 5 fails", color=VERMILION, va="bottom")


# ------------------------------------------------------------------ files


def image(figure: Figure, kind: str) -> bytes:
    stream = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "flatlens", "svg.fonttype": "none"}):
        # no date inside: the same records give the same bytes
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(stream, format=kind, dpi=150, metadata=metadata)
    return stream.getvalue()


def write(path: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Inequalities on the paper's trained networks.")
    parser.add_argument("--nets", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    parser.add_argument("--redraw", action="store_true", help="page and figure from the records")
    return parser.parse_args()


def main() -> None:
    options = parse()
    records = options.out / "inequalities.json"
    if not options.redraw:
        torch.set_num_threads(1)
        tables, why = experiment(options.nets, options.steps, options.seed)
        write(records, to_json(tables, facts(options), why).encode())
    tables, about, why = from_json(records.read_text())  # draw the stored records
    write(options.out / "inequalities.md", "\n".join([*page(tables, about, why), ""]).encode())
    figure = draw(tables, [net for net in ("mlp", "vgg") if net in why] or list(why)[:1])
    for kind in ("png", "svg"):
        write(options.out / "figures" / f"bounds.{kind}", image(figure, kind))
    broken = broken_theorems(tables)
    if not broken.empty:
        sys.exit(f"A theorem fails, which is a bug:\n{broken.to_string()}")


if __name__ == "__main__":
    main()
