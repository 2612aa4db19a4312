"""The cells of `peers.py`: their list, the file of finished cells, and ratios computed from it.

A cell is a case (a: exact S, b: estimates of S, c1 to c3: sets of quantities), a network, a number
of outputs N, of samples n and of threads. A finished cell is one line of JSON with the raw times,
values and errors of every side; every ratio, table and plot is computed from these lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

Record = dict[str, Any]

OURS = ("flatlens", "flatlens_within", "flatlens_sketch", "flatlens_hessian_trace")
BESIDE = ("floor", "lower_limit", "exact")  # measured, but not ranked
WRONG = 1e-3  # largest relative error of an exact value in float32 that is ranked
WITHIN = 0.01  # relative error that an estimate must reach


@dataclass(frozen=True)
class Cell:
    case: str
    model: str
    outputs: int
    samples: int
    threads: int = 1

    def __str__(self) -> str:
        n, N = self.samples, self.outputs
        return f"{self.case} {self.model} N={N} n={n} threads={self.threads}"


def _plan(*rows: tuple[str, str, list[tuple[int, ...]]]) -> list[Cell]:
    return [Cell(case, model, *sizes) for case, model, all_sizes in rows for sizes in all_sizes]


# (N, n) or (N, n, threads). n = 10,000 is n = 1,000 times ten: every side works batch by batch.
# c3 differs from c1 in the norms of convolutions alone, so networks without them have no c3.
DEFAULT = _plan(
    ("a", "mlp", [(10, 1), (10, 100), (10, 100, 2), (10, 1000), (1, 100), (100, 100), (1000, 10)]),
    ("a", "lenet", [(10, 100), (10, 1000)]),
    ("a", "vgg", [(10, 100), (10, 100, 2), (100, 20)]),
    ("a", "vgg11", [(10, 20)]),
    ("a", "resnet18", [(10, 10)]),
    ("a", "vit64", [(10, 20)]),
    ("a", "vit224", [(10, 2)]),
    ("b", "mlp", [(10, 100), (1000, 10)]),
    ("b", "vgg", [(10, 20)]),
    ("b", "vit64", [(100, 2)]),
    *(
        (case, model, sizes)
        for case in ("c1", "c2", "c3")
        for model, sizes in {
            "mlp": [(10, 100), (10, 100, 2)],
            "lenet": [(10, 100)],
            "vgg": [(10, 100)],
            "vgg11": [(10, 20)],
            "resnet18": [(10, 10)],
            "vit64": [(10, 20)],
            "vit224": [(10, 2)],
        }.items()
        if case != "c3" or model not in ("mlp", "vit64", "vit224")
    ),
)
GROWTH_AXES: dict[str, list[Cell]] = {
    "samples n": [Cell("a", "mlp-256x3", 10, n) for n in (10, 30, 100, 300, 1000)],
    "outputs N": [Cell("a", "mlp-256x3", N, 100) for N in (1, 3, 10, 30, 100)],
    "width": [Cell("a", f"mlp-{w}x3", 10, 100) for w in (64, 128, 256, 512, 1024)],
    "depth": [Cell("a", f"mlp-256x{d}", 10, 100) for d in (1, 3, 6, 12, 24)],
}
GROWTH_SIDES = ("floor", "flatlens", "jacrev", "backpack_ggn", "backpack_l2", "opacus")
GUARD = [Cell(case, model, 10, 100) for case in ("a", "c1") for model in ("mlp", "lenet", "vgg")]
PLANS = {
    "default": DEFAULT,
    "growth": list(dict.fromkeys(cell for axis in GROWTH_AXES.values() for cell in axis)),
    "guard": GUARD,
}

# ------------------------------------------------------------------ the file


def read(path: Path) -> dict[Cell, Record]:
    """Read finished cells; the last record of a cell counts, and an incomplete line is skipped."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[Cell(**record["cell"])] = record
    return found


def append(path: Path, record: Record) -> None:
    torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size
    with path.open("a") as stream:
        stream.write("\n" * bool(torn) + json.dumps(record) + "\n")


def as_json(cell: Cell) -> dict[str, Any]:
    return asdict(cell)


def ordered(cells: Sequence[Cell]) -> list[Cell]:
    """Sort by case, then by network in the order of the plan, then by N, n and threads."""
    names = list(dict.fromkeys(cell.model for cell in [*DEFAULT, *cells]))
    return sorted(cells, key=lambda c: (c.case, names.index(c.model), *astuple(c)[2:]))


# ------------------------------------------------------------------ what follows from a record


def sound(side: Record) -> bool:
    """Whether a side ran and its value, if it has one, is right."""
    return "error" not in side and (side.get("difference") or 0.0) <= WRONG


def per_sample(side: Record, clock: str = "wall") -> list[float | None]:
    """Return the seconds per sample of each repeat; a first call counts only if it is alone."""
    first, *later = (None if w is None else w / side["ran"] for w in side[clock])
    return [None, *later] if any(w is not None for w in later) else [first]


def ratio(above: Record, below: Record) -> float:
    """Return the median over repeats of the ratio within a repeat, per sample.

    If the sides have no repeat in common, it is the ratio of the medians.
    """
    a, b = per_sample(above), per_sample(below)
    both = [x / y for x, y in zip(a, b, strict=False) if x is not None and y is not None]
    return median(both) if both else middle(a) / middle(b)


def middle(times: Sequence[float | None]) -> float:
    return median(t for t in times if t is not None)


def seconds(record: Record, side: str, clock: str = "wall") -> float:
    """Return the median time for all samples of the cell, scaled up if fewer were run."""
    return middle(per_sample(record["sides"][side], clock)) * record["cell"]["samples"]


def first(record: Record, side: str) -> float:
    """Return the time of the first call for all samples of the cell."""
    found = record["sides"][side]
    return float(found["wall"][0] / found["ran"] * record["cell"]["samples"])


def unchecked(record: Record) -> bool:
    """Whether the value of flatlens was compared with no other side (new records only)."""
    found = record["sides"].get("flatlens", {})
    return "error" not in found and "against" in found and found["against"] is None


def peers(record: Record) -> dict[str, Record]:
    """Return the sides that are ranked: other packages with the right value."""
    sides = record["sides"].items()
    return {k: s for k, s in sides if k not in (*OURS, *BESIDE) and sound(s)}


def fastest(record: Record) -> str | None:
    return min(peers(record), key=lambda k: seconds(record, k), default=None)


def thriftiest(record: Record) -> str | None:
    return min(peers(record), key=lambda k: peers(record)[k]["peak_mib"], default=None)


def ratios(record: Record) -> dict[str, float]:
    """Return the ratios that the goals and the guard use; a ratio without its sides is missing."""
    if record["cell"]["case"] == "b":
        return estimate_ratios(record)
    sides, found = record["sides"], {}
    for ours in ("flatlens", "flatlens_within"):
        if not (ours in sides and sound(sides[ours])):
            continue
        if sound(sides["floor"]):
            found[f"{ours} / floor"] = ratio(sides[ours], sides["floor"])
        if best := fastest(record):
            found[f"{ours} / fastest peer"] = ratio(sides[ours], sides[best])
            peak = max(sides[best]["peak_mib"], 1.0)
            found[f"{ours} / fastest peer, memory"] = sides[ours]["peak_mib"] / peak
    return found


def curve(record: Record, side: str) -> list[tuple[int, float, float]]:
    """Return (products, rms relative error over the seeds, median seconds) of an estimator."""
    truth = record["truth"]
    return [
        (
            rung["products"],
            math.sqrt(sum((v / truth - 1) ** 2 for v in rung["values"]) / len(rung["values"])),
            median(rung["wall"]),
        )
        for rung in record["sides"][side].get("rungs", [])
    ]


def seconds_to(points: Sequence[tuple[int, float, float]], error: float = WITHIN) -> float:
    """Return the seconds to an rms error.

    Between two measured points the time is interpolated linearly in logarithms. Beyond the last
    point it grows as 1 / error^2, by the law of averages.
    """
    before = None
    for _, rms, spent in points:
        if rms <= error:
            if before is None or rms >= before[0] or rms == 0:
                return spent
            share = math.log(before[0] / error) / math.log(before[0] / rms)
            return math.exp(math.log(before[1]) + share * math.log(spent / before[1]))
        before = rms, spent
    return math.nan if before is None else before[1] * (before[0] / error) ** 2


def estimate_ratios(record: Record) -> dict[str, float]:
    reach = times_to(record)
    others = [t for name, t in reach.items() if name not in OURS]
    mine = [name for name in reach if name in OURS]
    return {f"{name} / fastest peer": reach[name] / min(others) for name in mine if others}


def times_to(record: Record) -> dict[str, float]:
    """Return the seconds to 1 % error of every estimator that ran."""
    sides = (k for k, s in record["sides"].items() if s.get("rungs") and "error" not in s)
    return {side: seconds_to(curve(record, side)) for side in sides}


def failures(records: Sequence[Record]) -> Iterator[tuple[str, str, str]]:
    """Yield (side, cell, reason) for every side that did not run or is wrong."""
    for record in records:
        cell = str(Cell(**record["cell"]))
        for name, side in record["sides"].items():
            if "error" in side:
                yield name, cell, side["error"]
            elif not sound(side):
                yield name, cell, f"wrong by {side['difference']:.2g} of the value, not ranked"
