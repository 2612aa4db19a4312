"""Finished cells of `peers.py` as tables in docs/benchmarks.md and plots in docs/figures.

    python benchmarks/tables.py                    # from benchmarks/committed.jsonl
    python benchmarks/tables.py peers.jsonl more.jsonl --docs try.md --figures try

What stands between the two marker lines of the page is replaced, and nothing else. Where the cells
of the growth plan are among those given, `peers-growth.png` is drawn.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import cells
from cells import OURS, Cell, Record

ROOT = Path(__file__).parents[1]
COMMITTED = Path(__file__).with_name("committed.jsonl")
START = "<!-- peers: written by benchmarks/tables.py -->"
END = "<!-- peers: end -->"
TITLES = {
    "loop": "loop",
    "jacrev": "vmap(jacrev)",
    "backpack_ggn": "BackPACK DiagGGNExact",
    "backpack_l2": "BackPACK BatchL2Grad",
    "backpack_squares": "BackPACK SumGradSquared",
    "opacus": "Opacus",
    "nngeometry": "NNGeometry",
    "asdl": "ASDL",
    "curvlinops_hutchinson": "curvlinops Hutchinson",
    "curvlinops_hutchpp": "curvlinops Hutch++",
    "eigenthings_hutchinson": "hessian-eigenthings Hutchinson",
    "eigenthings_hutchpp": "hessian-eigenthings Hutch++",
    "pyhessian": "PyHessian",
    "flatlens_sketch": "flatlens sketch",
    "flatlens_hessian_trace": "flatlens Tr H",
    "flatlens_within": "flatlens, held to the least of the peers",
    "lower_limit": "lower limit",
}
SETS = {
    "c1": (
        "The headline set",
        "S, MLS, NMLS, log volume, local dimension, normalised MLS and the right sides of Eqs. 11 "
        "and 12 with the norms of the kernels.",
    ),
    "c2": (
        "The headline set with adaptive sharpness",
        "Adaptive sharpness needs every entry of every gradient. A user takes both from the "
        "diagonal of BackPACK's DiagGGNExact, its SumGradSquared, or from explicit Jacobians.",
    ),
    "c3": (
        "The headline set with operator norms",
        "Convolutions have the norm of the map from image to image. The assemblies iterate until "
        "it changes by less than 0.1 %: a lower end. flatlens gives a proven upper end.",
    ),
}
WHOLE = {"break_long_words": False, "break_on_hyphens": False}  # how textwrap leaves words
COLOURS = ("#000000", "#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7")


def title(side: str) -> str:
    peer, plus, rest = side.partition("+")
    return TITLES.get(peer, peer) + (f" + {rest}" if plus else "")


# ------------------------------------------------------------------ tables


def page(records: Sequence[Record]) -> str:
    """Everything between the markers."""
    found = {Cell(**r["cell"]): r for r in records}
    drawn = {cell for axis in cells.GROWTH_AXES.values() for cell in axis}
    shown = [found[cell] for cell in cells.ordered([c for c in found if c not in drawn])]
    of_case = {case: [r for r in shown if r["cell"]["case"] == case] for case in ("a", "b", *SETS)}
    lines = ["## Beside other packages", "", *facts(records)]
    if rows := of_case["a"]:
        lines += ["### Exact S", "", *exact(rows), ""]
    if rows := of_case["b"]:
        lines += ["### S to 1 %", "", *estimates(rows)]
    for case, (heading, what) in SETS.items():
        if rows := of_case[case]:
            lines += [f"### {heading}", "", *whole(rows, what), ""]
    if any(cell in drawn for cell in found):
        lines += ["### Growth", "", *growth_text()]
    if why := list(cells.failures(shown)):
        lines += ["### What did not work", "", *reasons(why)]
    lines = [part for line in lines for part in wrapped_item(line)]
    return "\n".join(lines).rstrip() + "\n"


def facts(records: Sequence[Record]) -> Iterator[str]:
    found = [record["facts"] for record in records]
    libraries = dict.fromkeys(name for f in found for name in f["versions"])
    versions = [f"{n} {every(f['versions'].get(n, 'absent') for f in found)}" for n in libraries]
    commits = every(f["commit"] for f in found)
    yield from prose(
        f"Command: `python benchmarks/peers.py --plan default`, "
        f"commit{'s' * (', ' in commits)} {commits}, {every(f['date'] for f in found)}. "
        f"Machine: {every(f['processor'] for f in found)}, "
        f"{every(f['cores'] for f in found)} cores, Python {every(f['python'] for f in found)}. "
        f"Versions: {', '.join(versions)}. All networks are float32 with random weights."
    )
    yield from prose(
        "How to read the tables: the **floor** is one forward pass and N backward passes with "
        "weight gradients. The *lower limit* is the same onto activations only; for the whole set "
        "also onto the image. A number in brackets says that a side was too slow for its share of "
        "the time. It then ran that many samples, and its time is scaled up. A value that is wrong "
        "is struck out and not ranked. An x is an error. Both are explained at the end."
    )
    yield from prose(
        "How it was taken: every side has a fresh process and works at its fastest batch size of "
        "1, 5, 20 or 100 samples. flatlens works in its default chunks. Times are medians of "
        "interleaved repeats, without the first call."
    )
    yield from prose(
        "What counts as right: the value of the loop, to 0.001, over the samples that both took. "
        "In the whole set it is the value of `vmap(jacrev)` and autograd. Where a side took more "
        "samples than the loop could, its mean is compared with that of flatlens, whose own value "
        "is compared with the loop's."
    )
    if alone := [str(Cell(**r["cell"])) for r in records if cells.unchecked(r)]:
        cells_alone = "; ".join(alone)
        yield from prose(f"flatlens was its own reference, as none could run, in: {cells_alone}.")


def wrapped_item(line: str) -> list[str]:
    """A list item as lines of at most 100 characters; any other line as it is."""
    return textwrap.wrap(line, 100, subsequent_indent="  ", **WHOLE) if line[:2] == "- " else [line]


def prose(text: str) -> Iterator[str]:
    """A paragraph, wrapped, and the blank line after it."""
    yield from textwrap.wrap(text, 100, **WHOLE)
    yield ""


def every(values: Iterable[object]) -> str:
    """Each of them once, in their order."""
    return ", ".join(dict.fromkeys(map(str, values)))


def sizes(cell: Cell) -> str:
    return f"{cell.model} | {cell.outputs:,} | {cell.samples:,} | {cell.threads}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'--:|' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def entry(record: Record, side: str, number: Callable[[Record], str]) -> str:
    """One side's number; struck out if its value is wrong, x if it failed."""
    found = record["sides"].get(side)
    if found is None:
        return ""
    if "error" in found:
        return "x"
    text = number(found)
    return text if cells.sound(found) else f"~~{text}~~"


def over_floor(record: Record) -> Callable[[Record], str]:
    def number(side: Record) -> str:
        few = f" ({side['ran']})" if side["ran"] < record["cell"]["samples"] else ""
        return f"{cells.ratio(side, record['sides']['floor']):.2f}{few}"

    return number


def race_table(rows: Sequence[Record], others: Sequence[str]) -> Iterator[str]:
    """Ratios to the floor; flatlens also beside the fastest peer."""
    head = ["network", "N", "n", "threads", "floor", "lower limit", *map(title, others)]
    body = []
    for record in rows:
        times = over_floor(record)
        name = cells.fastest(record)
        against = cells.ratios(record).get("flatlens / fastest peer")
        body.append(
            [
                sizes(Cell(**record["cell"])),
                milliseconds(record, "floor"),
                *(entry(record, side, times) for side in ("lower_limit", *others)),
                f"**{entry(record, 'flatlens', times)}**",
                "" if against is None else f"{against:.2f} ({title(name or '')})",
                f"{milliseconds(record, 'flatlens')} / {milliseconds(record, 'flatlens', 'cpu')}",
            ]
        )
    yield from table([*head, "flatlens", "/ fastest peer", "flatlens, wall / CPU"], body)


def milliseconds(record: Record, side: str, clock: str = "wall") -> str:
    if "error" in record["sides"].get(side, {"error": ""}):
        return "x"
    return in_milliseconds(cells.seconds(record, side, clock))


def in_milliseconds(spent: float) -> str:
    return f"{spent:.2f} s" if spent >= 10 else f"{1000 * spent:,.0f} ms"


def first_table(rows: Sequence[Record]) -> Iterator[str]:
    """What a first call costs: caches are cold, and trials have not been made."""
    yield "The first call in a process (after one on a tiny network), and the median of later ones:"
    yield ""
    body = []
    for record in rows:
        best = cells.fastest(record)
        mine = first_and_later(record, "flatlens")
        theirs = [title(best), *first_and_later(record, best)] if best else [""] * 3
        body.append([sizes(Cell(**record["cell"])), *mine, *theirs])
    head = ["network", "N", "n", "threads", "flatlens, first", "later"]
    yield from table([*head, "fastest peer", "first", "later"], body)


def first_and_later(record: Record, side: str) -> list[str]:
    found = record["sides"].get(side, {"error": ""})
    if "error" in found:
        return ["x", "x"]
    later = any(wall is not None for wall in found["wall"][1:])
    return [
        in_milliseconds(cells.first(record, side)),
        milliseconds(record, side) if later else "none",
    ]


def memory_table(rows: Sequence[Record], others: Sequence[str]) -> Iterator[str]:
    head = [
        "network",
        "N",
        "n",
        "threads",
        *map(title, others),
        "flatlens",
        title("flatlens_within"),
    ]
    body = [
        [
            sizes(Cell(**record["cell"])),
            *(
                entry(record, side, lambda s: f"{s['peak_mib']:,.0f}")
                for side in (*others, "flatlens")
            ),
            held(record),
        ]
        for record in rows
    ]
    yield from table(head, body)


def held(record: Record) -> str:
    """Time and peak of flatlens with `memory=` set to the thriftiest peer's."""
    side = record["sides"].get("flatlens_within")
    if side is None or "error" in side:
        return "" if side is None else "x"
    found = cells.ratios(record).get("flatlens_within / fastest peer")
    against = "" if found is None else f", {found:.2f} x the fastest"
    return f"{side['peak_mib']:,.0f} of {side['memory_mib']:,.0f}{against}"


def names_in(rows: Sequence[Record]) -> list[str]:
    """Other people's sides, in the order of the first record that has them."""
    every = dict.fromkeys(name for record in rows for name in record["sides"])
    return [name for name in every if name not in (*OURS, *cells.BESIDE)]


def exact(rows: Sequence[Record]) -> Iterator[str]:
    yield from prose(
        "S = (1/n) sum ||grad f||_F^2 alone, in flatlens "
        '`flatlens.measure(..., quantities=["sharpness"])`. Times are multiples of the floor. '
        "The second column from the right is flatlens over the fastest peer that is right."
    )
    yield from race_table(rows, names_in(rows))
    yield from first_table(rows)
    yield "Every side works batch by batch, so n = 10,000 is n = 1,000 ten times:"
    yield ""
    large = [r for r in rows if r["cell"]["samples"] == 1000]
    columns = ["floor", *names_in(rows), "flatlens"]
    body = []
    for r in large:

        def scaled(k: str, r: Record = r) -> str:
            return entry(r, k, lambda _: f"{10 * cells.seconds(r, k):.1f} s")

        cell = r["cell"]
        row = [f"{cell['model']} | {cell['outputs']} | 10,000", *map(scaled, columns)]
        body.append(row)
    yield from table(["network", "N", "n", *map(title, columns)], body)
    yield "Peak extra memory in MiB:"
    yield ""
    yield from memory_table(rows, names_in(rows))
    yield from goal(rows, "flatlens / fastest peer", 1.0, "S alone in the fastest peer's time")
    yield from goal(rows, "flatlens / fastest peer, memory", 1.0, "in that peer's memory")
    yield from goal(
        rows, "flatlens_within / fastest peer", 1.3, "held to the thriftiest peer's memory"
    )


def goal(rows: Sequence[Record], name: str, most: float, what: str) -> Iterator[str]:
    """One sentence: how many cells meet a goal, the worst, and those where flatlens has no figure.

    A cell where nobody else is right has nothing to be compared with, and is named as such.
    """
    beside = [r for r in rows if "peer" not in name or cells.fastest(r)]
    found = {str(Cell(**r["cell"])): cells.ratios(r).get(name) for r in beside}
    if not found:
        return
    values = {cell: v for cell, v in found.items() if v is not None}
    worst = max(values, key=lambda cell: values[cell], default=None)
    met = sum(v <= most for v in values.values())
    missing = [cell for cell in found if cell not in values]
    alone = [str(Cell(**r["cell"])) for r in rows if r not in beside]
    yield (
        f"- Goal, {what} (at most {most:g}): {met} of {len(found)} cells"
        + (f"; the worst is {values[worst]:.2f} ({worst})" if worst else "")
        + (f"; not met, as flatlens failed, in {', '.join(missing)}" if missing else "")
        + (f"; no peer to compare with in {', '.join(alone)}" if alone else "")
        + "."
    )


def estimates(rows: Sequence[Record]) -> Iterator[str]:
    yield from prose(
        "Seconds until the root mean square error is 1 % of the exact S, over 20 seeds (at least 5 "
        "where time is short). The number of products stands in brackets. 3, 12, 48 and 192 "
        "products are measured. Times between them lie on a line of logarithms. Times beyond the "
        "last, marked ~, are extrapolated by 1/sqrt(products), which for Hutch++ is an upper "
        "limit. Targets are the outputs, so that Tr H = S. `sketch` also gives the MLS."
    )
    names = [n for n in dict.fromkeys(k for r in rows for k in r["sides"]) if n not in cells.BESIDE]
    body = []
    for record in rows:
        reach = cells.times_to(record)
        sketch = cells.ratios(record).get("flatlens_sketch / fastest peer")
        body.append(
            [
                sizes(Cell(**record["cell"])),
                milliseconds(record, "floor"),
                milliseconds(record, "exact"),
                *(reached(record, name, reach) for name in names),
                "" if sketch is None else f"{sketch:.2f}",
            ]
        )
    head = ["network", "N", "n", "threads", "floor", "flatlens exact", *map(title, names)]
    yield from table([*head, "sketch / fastest peer"], body)


def reached(record: Record, name: str, reach: dict[str, float]) -> str:
    if name not in reach:
        return "x"
    points = cells.curve(record, name)
    beyond = "~" if points[-1][1] > cells.WITHIN else ""
    products = points[-1][0] * max((points[-1][1] / cells.WITHIN) ** 2, 1) if beyond else 0
    count = f"{products:,.0f}" if beyond else f"at most {points[-1][0]}"
    return f"{beyond}{reach[name]:.3g} ({count})"


def whole(rows: Sequence[Record], what: str) -> Iterator[str]:
    yield from prose(what)
    yield from prose(
        "All sides give the same numbers: one `flatlens.measure` against S from a package and the "
        "rest by hand. By hand means N backward passes onto all layers' inputs, eigenvalues of the "
        "Gram matrices in float64, and norms of the weights once. BatchL2Grad and SumGradSquared "
        "work in these same passes. Times are multiples of the floor."
    )
    yield from race_table(rows, names_in(rows))
    yield from first_table(rows)
    yield "Peak extra memory in MiB:"
    yield ""
    yield from memory_table(rows, names_in(rows))
    yield from goal(rows, "flatlens / fastest peer", 1.0, "in the time of the fastest assembly")


def growth_text() -> Iterator[str]:
    yield "![Time and peak memory against n, N, width and depth](figures/peers-growth.png)"
    yield ""
    yield from prose(
        "Exact S of an MLP, 784-256-256-256-10 and n = 100 where they are not varied, one thread. "
        "Command: `python benchmarks/peers.py --plan growth`."
    )


def reasons(why: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """One line for a side and an error, with its cells."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for side, cell, text in why:
        grouped.setdefault((side, text), []).append(cell)
    for (side, text), where in grouped.items():
        yield f"- {title(side)}: {text.replace('|', '/')} ({'; '.join(where)})"
    yield ""


# ------------------------------------------------------------------ plots


def growth(records: Sequence[Record], path: Path) -> None:
    """Time above, memory below, one column for each axis."""
    from matplotlib.figure import Figure

    found = {Cell(**r["cell"]): r for r in records}
    figure = Figure(figsize=(15, 6.6), layout="constrained")
    axes = figure.subplots(2, len(cells.GROWTH_AXES), sharey="row")
    for column, (name, axis) in enumerate(cells.GROWTH_AXES.items()):
        for side, colour in zip(cells.GROWTH_SIDES, COLOURS, strict=True):
            have = [
                (size(name, cell), found[cell])
                for cell in axis
                if cell in found and cells.sound(found[cell]["sides"].get(side, {"error": ""}))
            ]
            where = [place for place, _ in have]
            times = [cells.seconds(record, side) for _, record in have]
            peaks = [max(record["sides"][side]["peak_mib"], 1.0) for _, record in have]
            style = {"color": colour, "lw": 2.5 if side == "flatlens" else 1.2}
            style |= {"ls": ":" if side == "floor" else "-", "marker": "o", "markersize": 3}
            axes[0, column].plot(where, times, label=title(side), **style)
            axes[1, column].plot(where, peaks, label=title(side), **style)
        for row in (0, 1):
            axes[row, column].set(xscale="log", yscale="log")
            axes[row, column].grid(alpha=0.25)
            axes[row, column].spines[["top", "right"]].set_visible(False)
        axes[1, column].set_xlabel(name)
    axes[0, 0].set_ylabel("seconds")
    axes[1, 0].set_ylabel("peak extra memory, MiB")
    axes[0, 0].legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def size(axis: str, cell: Cell) -> int:
    if axis == "samples n":
        return cell.samples
    if axis == "outputs N":
        return cell.outputs
    width, depth = map(int, cell.model.removeprefix("mlp-").split("x"))
    return width if axis == "width" else depth


# ------------------------------------------------------------------ files


def replaced(text: str, new: str) -> str:
    """The page with what stands between the markers replaced, or added at its end."""
    block = f"{START}\n{new}{END}\n"
    if START not in text:
        return f"{text.rstrip()}\n\n{block}"
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(f"{END}\n")
    return before + block + after


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tables and plots from finished cells.")
    parser.add_argument("files", nargs="*", type=Path, default=[COMMITTED])
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures")
    options = parser.parse_args(arguments)
    found: dict[Cell, Record] = {}
    for path in options.files:
        found |= cells.read(path)
    if not found:
        parser.error("there are no finished cells; run benchmarks/peers.py first")
    records = list(found.values())
    old = options.docs.read_text() if options.docs.exists() else ""
    options.docs.write_text(replaced(old, page(records)))
    if any(cell in found for axis in cells.GROWTH_AXES.values() for cell in axis):
        growth(records, options.figures / "peers-growth.png")


if __name__ == "__main__":
    main()
