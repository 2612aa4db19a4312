"""Measurements as text: one line, one screen, and full tables.

The functions take a Measurement; they read its probe, values, bounds and rows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np

from flatlens.errors import counted
from flatlens.inequalities import Inequality
from flatlens.metrics import METRICS

WIDTH = 100
MOST_NOTES = 4

# The headline quantities, each with its meaning.
MEANINGS = {
    "sharpness": "mean squared gradient of outputs by weights, Eq. 3",
    "mls": "maximum local sensitivity (MLS): output per input change",
    "nmls": "network MLS (NMLS): MLS summed over all layers",
    "log_volume": "log of the factor by which volumes are scaled, Eq. 7",
    "local_dimension": "directions in which the outputs vary, Eq. 15",
    "normalized_mls": "squared MLS times squared input size, Def. F.1",
    "adaptive_sharpness": "sharpness scaled by the size of each weight, Eq. 41",
    "hessian_trace": "trace of the Hessian of the loss",
    "gauss_newton_trace": "sharpness for the given loss",
    "loss": "mean loss",
    "accuracy": "samples classified correctly, in per cent",
}
# The statement of each inequality in words, strongest kind of statement first.
CLAIMS = {
    "eq12_bias": "sharpness alone proves NMLS",
    "eq12": "sharpness alone proves NMLS",
    "eq11_bias": "sharpness alone proves MLS",
    "eq11": "sharpness alone proves MLS",
    "eq12_tied_rank": "sharpness alone proves NMLS through each layer",
    "eq17": "sharpness alone proves NMLS less what bypasses the layers",
    "eq12_untied": "sharpness with untied weights proves NMLS through each layer",
}
REST = "See the rest: print(m.table()), m.layers, m.bounds, m.samples, m.plot()."
LAYER_COLUMNS = (
    *("name", "kind", "positions", "norm", "x_norm", "mls", "sharpness", "sharing_ratio"),
)


def number(value: float) -> str:
    """Format a number with five digits, in the shortest form.

    >>> number(1234567.0), number(0.1)
    ('1.2346e+06', '0.1')
    """
    return f"{value:.5g}"


def columns(table: list[list[str]]) -> list[str]:
    """Align the columns of a table: the first to the left, the others to the right.

    >>> columns([["name", "value"], ["mls", "0.5"]])
    ['name  value', 'mls     0.5']
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if k == 0 else cell.rjust(w)
            for k, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]


def one_line(m: Any) -> str:
    """Return the ``repr`` of a measurement: its size and its headline values."""
    shown = [f"{name}={number(m.values[name])}" for name in MEANINGS if name in m.values][:4]
    theorems = sum(inequality.verdict == "theorem" for inequality in m.bounds)
    bounds = f"{counted(len(m.bounds), 'inequality')} ({theorems} proven)"
    listed = ", ".join([*shown, counted(len(m.values), "quantity"), bounds])
    return f"Measurement(n={m.probe.n}, N={m.probe.N}, {listed})"


def one_screen(m: Any, rest: str = REST) -> str:
    """Return what ``print(m)`` shows: at most 40 lines of 100 columns.

    Args:
        m: the measurement.
        rest: the last line, which says where the other numbers are.
    """
    lines = [*_wrapped(what_was_measured(m)), "", *_headline(m), ""]
    lines += _wrapped(what_is_proven(m))
    lines += [line for text in what_is_not_proven(m) for line in _wrapped(text)]
    notes = m.probe.notes
    for note in notes[:MOST_NOTES]:
        lines += _wrapped(f"Note: {note}", most=2)
    if len(notes) > MOST_NOTES:
        lines.append(f"See m.probe.notes for {counted(len(notes) - MOST_NOTES, 'further note')}.")
    return "\n".join([*lines, "", rest])


def what_was_measured(m: Any) -> str:
    """Describe what was measured: samples, outputs, layers, precision and method."""
    p = m.probe
    how = "exact" if p.sketch is None else f"sketch of {p.sketch.directions} random directions"
    dtype = str(p.dtype).removeprefix("torch.")
    layers = f", {counted(len(p.layers), 'layer')}" if p.layers else ""
    return (
        f"{counted(p.n, 'sample')}, {counted(p.M, 'input')}, {counted(p.N, 'output')}{layers}, "
        f"{dtype}. Method: {how}. Loss: {m.loss_name}."
    )


def _headline(m: Any) -> list[str]:
    """Return the headline values with their meaning, and the user's own quantities."""
    names = [name for name in MEANINGS if name in m.values] + list(m.own_samples)
    meanings = {**dict.fromkeys(m.own_samples, "your own quantity"), **MEANINGS}
    lines = [[name, *with_error(name, m.values), meanings[name]] for name in names[:16]]
    if not lines:
        return []
    widths = [max(len(line[k]) for line in lines) for k in range(3)]
    return [
        f"{a.ljust(widths[0])}  {b.rjust(widths[1])} {c.ljust(widths[2])}  {d}".rstrip()[:WIDTH]
        for a, b, c, d in lines
    ]


def with_error(name: str, values: dict[str, float]) -> list[str]:
    """Return a value and its standard error as two texts; the second is "" if there is none."""
    error = values.get(f"{name}_se")
    return [number(values[name]), "" if error is None else f"+- {error:.2g}"]


def strongest_theorem(m: Any) -> Inequality | None:
    """Return the proven inequality with the least slack among those that bound a sensitivity."""
    proven = [
        b
        for b in m.bounds
        if b.verdict == "theorem" and b.name in CLAIMS and np.isfinite(b.rhs) and b.holds
    ]
    return min(proven, key=lambda b: b.slack, default=None)


def nothing_to_compare(m: Any) -> str:
    """Say what was measured if no inequality was asked for."""
    names = " and ".join(name for name in m.values if name in METRICS) or "nothing of the pass"
    layers = "" if m.probe.layers else "no layers, "
    return f"Only {names} was measured: {layers}no inequalities."


def what_is_proven(m: Any) -> str:
    """Say the strongest proven inequality in words."""
    if not m.bounds:
        return nothing_to_compare(m)
    b = strongest_theorem(m)
    if b is None:
        return "Proven: no finite bound on a sensitivity for this network and these samples."
    return (
        f"Proven: {CLAIMS[b.name]} <= {b.rhs:.3g}; measured {b.lhs:.3g} ({b.name}, {b.equation})."
    )


def what_is_not_proven(m: Any) -> Iterator[str]:
    """Say which inequalities are not proven and the most frequent reason."""
    broken = [b for b in m.bounds if b.verdict == "theorem" and not b.holds]
    if broken:
        yield f"{', '.join(b.name for b in broken)} should hold and does not: please report it."
    observed = [b for b in m.bounds if b.verdict == "observation"]
    if not observed:
        if m.bounds:
            yield "Every inequality that applies to this network is proven for it."
        return
    reasons = [b.why for b in observed]
    reason = max(dict.fromkeys(reasons), key=reasons.count)
    failing = [b.name for b in observed if not b.holds]
    outcome = f"fail here: {', '.join(failing)}" if failing else "all hold here"
    yield (
        f"Not proven: {len(observed)} of {len(m.bounds)} inequalities, because {reason} "
        f"({outcome})."
    )


def full_tables(m: Any) -> str:
    """Return all quantities, layers, inequalities, reasons, parameters and notes as text."""
    quantities = [name for name in m.values if not name.endswith("_se")]
    lines = [what_was_measured(m), ""]
    if quantities:
        lines += columns([[name, *with_error(name, m.values)] for name in quantities])
    lines.append("")
    if m.rows:
        cells = [[cell(row[k]) for k in LAYER_COLUMNS] for row in m.rows]
        lines += [*columns([list(LAYER_COLUMNS), *cells]), ""]
    if m.bounds:
        lines += [*columns(inequality_table(m)), *_reasons(m), ""]
    else:
        lines += [nothing_to_compare(m), ""]
    paths = list(m.coverage.values())
    counts = ", ".join(f"{paths.count(k)} {k}" for k in dict.fromkeys(paths))
    lines += [f"parameters: {counts}", *(f"note: {note}" for note in m.probe.notes)]
    return "\n".join(lines)


def inequality_table(m: Any) -> list[list[str]]:
    """Return the inequalities that apply as lines of texts, with a line of titles."""
    lines = [["inequality", "lhs", "rhs", "slack", "verdict"]]
    for b in m.bounds:
        if b.verdict != "not applicable":
            verdict = b.verdict if b.holds else f"{b.verdict}, fails"
            lines.append([b.name, number(b.lhs), number(b.rhs), number(b.slack), verdict])
    return lines


def _reasons(m: Any) -> list[str]:
    """Return each reason against a proof once, with the inequalities that it concerns."""
    names: dict[str, list[str]] = {}
    for b in m.bounds:
        if b.verdict != "theorem":
            names.setdefault(f"{b.verdict}: {b.why}", []).append(b.name)
    return [f"{reason} ({', '.join(about)})" for reason, about in names.items()]


def cell(value: Any) -> str:
    """Write one cell of a table."""
    return number(value) if isinstance(value, float) else str(value)


def _wrapped(text: str, most: int = 3) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", max_lines=most, placeholder=" ...")
