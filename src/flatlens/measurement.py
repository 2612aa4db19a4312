"""All of it in one call: ``measure`` gives a Measurement, a record a person can read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from flatlens.errors import FlatlensError
from flatlens.inequalities import Bounds, bounds, layer_bounds
from flatlens.inputs import Inputs, batches
from flatlens.metrics import METRICS, Metric, layer_row
from flatlens.passes import probe_batches
from flatlens.probes import Array, Probe

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Measurement:
    """All quantities and inequalities by name: ``m["nmls"]`` a float, ``m["eq12"]`` both sides."""

    probe: Probe
    values: dict[str, float]
    bounds: Bounds

    def __getitem__(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        for row in self.bounds:
            if row.name == name:
                return row
        names = [*self.values, *(row.name for row in self.bounds)]
        raise KeyError(f"no quantity {name!r}; there are {', '.join(names)}")

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One dict per layer, in the order of the calls: its numbers and its own inequality."""
        p = self.probe
        return [{**layer_row(layer), **layer_bounds(p, layer)} for layer in p.layers]

    @cached_property
    def layers(self) -> pd.DataFrame:
        """The same as a table, one row per layer."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    @cached_property
    def samples(self) -> dict[str, Array]:
        """The per-sample values behind each mean."""
        found = {
            name: metric.samples(self.probe)
            for name, metric in METRICS.items()
            if name in self.values and isinstance(metric, Metric)
        }
        return {**found, "rank": self.probe.input.rank}

    @property
    def coverage(self) -> dict[str, str]:
        """How each parameter entered S: layer, rule, slow, frozen or unused."""
        return {q.name: q.path for q in self.probe.parameters}

    def to_dict(self) -> dict[str, float]:
        """A flat record: every quantity by its name, both sides of every inequality that applies.

        ``log_volume`` names a quantity and an inequality: the first is ``log_volume`` here, the
        sides of the other are ``log_volume.lhs`` and ``log_volume.rhs``.
        """
        sides = {
            f"{row.name}.{side}": value
            for row in self.bounds
            if row.verdict != "not applicable"
            for side, value in (("lhs", row.lhs), ("rhs", row.rhs))
        }
        return {**self.values, **sides}

    def to_json(self, **options: Any) -> str:
        """Quantities, layers, coverage and notes; infinities and NaN as strings, so that any
        reader of JSON takes it."""
        record = {
            "n": self.probe.n,
            "N": self.probe.N,
            "M": self.probe.M,
            "dtype": str(self.probe.dtype).removeprefix("torch."),
            "quantities": self.values,
            "inequalities": [asdict(row) for row in self.bounds],
            "layers": self.rows,
            "coverage": self.coverage,
            "notes": self.probe.notes,
        }
        return json.dumps(_plain(record), allow_nan=False, **options)

    def to_pandas(self) -> pd.DataFrame:
        """The record as a table of one row."""
        import pandas as pd

        return pd.DataFrame([self.to_dict()])

    def __str__(self) -> str:
        p = self.probe
        paths = list(self.coverage.values())
        counts = ", ".join(f"{paths.count(k)} {k}" for k in dict.fromkeys(paths))
        shown = ["name", "kind", "positions", "norm", "x_norm", "mls", "sharpness", "sharing_ratio"]
        table = [["inequality", "lhs", "rhs", "slack", "verdict"]]
        reasons: dict[str, list[str]] = {}
        for b in self.bounds:
            if b.verdict != "not applicable":
                told = b.verdict if b.holds else f"{b.verdict}, fails"
                table.append([b.name, number(b.lhs), number(b.rhs), number(b.slack), told])
            if b.verdict != "theorem":
                reasons.setdefault(f"{b.verdict}: {b.why}", []).append(b.name)
        lines = [
            f"{p.n} samples, {p.M} inputs, {p.N} outputs, {str(p.dtype).removeprefix('torch.')}",
            "",
            *columns([[name, number(value)] for name, value in self.values.items()]),
            "",
            *columns([shown, *[[_cell(row[k]) for k in shown] for row in self.rows]]),
            "",
            *columns(table),
            *(f"{why} ({', '.join(names)})" for why, names in reasons.items()),
            "",
            f"parameters: {counts}",
            *(f"note: {note}" for note in p.notes),
        ]
        return "\n".join(lines)


def measure(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    quantities: str | Sequence[str] = "default",
    output: Any = None,
    weight_norm: str = "operator",
    chunk: int | None = None,
    memory: int | None = None,
) -> Measurement:
    """Every quantity that one exact pass gives, in one call.

    With targets ``y`` (class indices or the values themselves) also the loss, half the squared
    error summed over outputs, and for classes the accuracy in per cent. ``quantities`` names those
    wanted; the other arguments are those of ``probe``.

    Example:
        >>> import torch, flatlens as fl
        >>> net = torch.nn.Linear(3, 2).double()
        >>> m = fl.measure(net, torch.ones(4, 3).double())
        >>> m["sharpness"], m.coverage
        (8.0, {'weight': 'layer', 'bias': 'rule'})
    """
    wanted = list(METRICS) if quantities == "default" else quantities
    if isinstance(wanted, str) or (unknown := [q for q in wanted if q not in METRICS]):
        name = wanted if isinstance(wanted, str) else unknown[0]
        raise FlatlensError(f"quantity {name!r} is unknown; choose from {', '.join(METRICS)}")
    targets: list[Any] = []

    def inputs() -> Iterator[Inputs]:
        for batch, target in batches(x):
            targets.append(target)
            yield batch

    p = probe_batches(
        model,
        inputs(),
        chunk=chunk,
        memory=memory,
        output=output,
        weight_norm=weight_norm,
        exact_untied=False,
    )
    values = {name: METRICS[name](p) for name in wanted}
    if y is None and targets and all(t is not None for t in targets):
        y = torch.cat([torch.as_tensor(t) for t in targets])
    if y is not None:
        values |= loss_and_accuracy(p, y)
    return Measurement(p, values, bounds(p))


def loss_and_accuracy(p: Probe, y: Any) -> dict[str, float]:
    """Half the squared error per sample, and the share of right classes in per cent."""
    y = (y.detach().cpu() if isinstance(y, Tensor) else torch.as_tensor(y)).numpy()
    if len(y) != p.n:
        raise FlatlensError(f"y has {len(y)} entries for {p.n} samples; give one target a sample")
    classes = np.issubdtype(y.dtype, np.integer) and y.size == p.n and p.N > 1
    if classes:
        labels = y.reshape(p.n)
        if labels.min() < 0 or labels.max() >= p.N:
            raise FlatlensError(
                f"y has the class {labels.max() if labels.min() >= 0 else labels.min()}, "
                f"but the network has the outputs 0 to {p.N - 1}"
            )
        y = np.eye(p.N)[labels]
    if y.size != p.n * p.N:
        raise FlatlensError(
            f"y has shape {y.shape} for {p.n} samples of {p.N} outputs; give class indices or one "
            "value per output"
        )
    y = y.reshape(p.n, p.N).astype(float)
    values = {"loss": float(0.5 * ((p.output - y) ** 2).sum(1).mean())}
    if p.N > 1:
        values["accuracy"] = float(100 * (p.output.argmax(1) == y.argmax(1)).mean())
    return values


def number(value: float) -> str:
    """A number with five digits, as short as it can be read."""
    return f"{value:.5g}"


def columns(rows: list[list[str]]) -> list[str]:
    """Rows as lines with aligned columns; the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if k == 0 else cell.rjust(w)
            for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cell(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value
