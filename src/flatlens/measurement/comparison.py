"""Comparisons of measurements: values, ratios, standard errors and differing verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from flatlens.arguments import check_instance, no_type_check
from flatlens.errors import FlatlensError, counted
from flatlens.measurement import notebook, plots, printing
from flatlens.measurement.compared import Side
from flatlens.measurement.result import Measurement
from flatlens.metrics import HEADLINE
from flatlens.probes import Array

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

LOGARITHMS = ("log_volume", "log_volume_top3")  # the ratio shown is that of the volumes


@no_type_check
def compare(measurements: Mapping[str, Measurement]) -> Comparison:
    """Compare measurements of several networks, or of one network at several times.

    Args:
        measurements: at least two measurements by the name to show. Ratios are relative to the
            first.

    Returns:
        A Comparison. Print it, or use ``to_pandas()`` and ``plot()``.

    Raises:
        FlatlensError: if fewer than two measurements are given, or a value is no measurement.

    Example:
        >>> import torch, flatlens as fl
        >>> x = torch.ones(4, 3).double()
        >>> net = torch.nn.Linear(3, 2).double()
        >>> wide = torch.nn.Linear(3, 4).double()
        >>> both = fl.compare({"two": fl.measure(net, x), "four": fl.measure(wide, x)})
        >>> both.ratios["four"]["sharpness"], both.warnings
        (2.0, ['The number of outputs differs: two 2, four 4.'])
    """
    check_instance(
        "measurements", measurements, Mapping, 'give a dict such as {"sgd": m1, "sam": m2}'
    )
    for label, m in measurements.items():
        check_instance("a label of measurements", label, str, "give a text as the key")
        check_instance(f"measurements[{label!r}]", m, Measurement, "give what fl.measure returns")
    if len(measurements) < 2:
        raise FlatlensError(
            f"measurements holds {len(measurements)}; give at least two measurements to compare"
        )
    return Comparison({label: Side.of_measurement(m) for label, m in measurements.items()})


@dataclass(frozen=True, repr=False)
class Comparison:
    """A comparison of several measurements, returned by ``compare``.

    Ratios are relative to the first measurement. For logarithms of volumes the ratio is that of the
    volumes.
    """

    sides: dict[str, Side]

    @property
    def labels(self) -> list[str]:
        """The names of the measurements."""
        return list(self.sides)

    @cached_property
    def quantities(self) -> list[str]:
        """The names of the quantities that all measurements have."""
        first_side, *others = self.sides.values()
        hidden = ("_se", "_converged")
        return [
            name
            for name in first_side.values
            if not name.endswith(hidden) and all(name in side.values for side in others)
        ]

    @cached_property
    def values(self) -> dict[str, dict[str, float]]:
        """The values of each measurement, by label and quantity."""
        return {
            label: {name: side.values[name] for name in self.quantities}
            for label, side in self.sides.items()
        }

    @cached_property
    def errors(self) -> dict[str, dict[str, float]]:
        """The standard errors of the values; 0 for exact values."""
        return {
            label: {name: side.values.get(f"{name}_se", 0.0) for name in self.quantities}
            for label, side in self.sides.items()
        }

    @cached_property
    def ratios(self) -> dict[str, dict[str, float]]:
        """The ratio of each value to that of the first measurement; NaN for 0 / 0."""
        base = self.values[self.labels[0]]
        return {
            label: {name: _ratio(name, value, base[name]) for name, value in values.items()}
            for label, values in self.values.items()
        }

    @cached_property
    def ratio_errors(self) -> dict[str, dict[str, float]]:
        """The standard errors of the ratios, to first order, for independent estimates."""
        base = self.labels[0]
        errors: dict[str, dict[str, float]] = {}
        for label in self.labels:
            errors[label] = {}
            for name in self.quantities:
                terms = [
                    _relative_error(name, self.values[of][name], self.errors[of][name])
                    for of in (base, label)
                ]
                size = 0.0 if label == base else math.hypot(*terms)
                errors[label][name] = size * abs(self.ratios[label][name]) if size else 0.0
        return errors

    @cached_property
    def differing_verdicts(self) -> dict[str, dict[str, str]]:
        """The verdicts of all measurements on each inequality on which they differ."""
        verdicts: dict[str, dict[str, str]] = {}
        for label, side in self.sides.items():
            for name, verdict in side.verdicts.items():
                verdicts.setdefault(name, {})[label] = verdict
        judged = sum(bool(side.verdicts) for side in self.sides.values())
        return {
            name: each
            for name, each in verdicts.items()
            if len(set(each.values())) > 1 or len(each) < judged
        }

    @cached_property
    def warnings(self) -> list[str]:
        """Sentences about facts that make the measurements hard to compare."""
        names = dict.fromkeys(name for side in self.sides.values() for name in side.facts)
        sentences = []
        for name in names:
            each = {label: side.facts.get(name) for label, side in self.sides.items()}
            if None not in each.values() and len(set(each.values())) > 1:
                listed = ", ".join(f"{label} {value}" for label, value in each.items())
                sentences.append(f"The {name} differs: {listed}.")
        return sentences + self._different_samples()

    def _different_samples(self) -> list[str]:
        """Name measurements of other samples; equal samples have equal norms, in any precision."""
        (base, first_side), *others = self.sides.items()
        return [
            f"The samples of {label} are not those of {base}."
            for label, side in others
            if not _equal_norms(side.sample_norms, first_side.sample_norms)
        ]

    def to_pandas(self) -> pd.DataFrame:
        """Return a table with a row per quantity.

        Returns:
            For each measurement its values (``LABEL``), their standard errors (``LABEL_se``) if
            there are any, and the ratios to the first measurement (``LABEL_ratio``).
        """
        import pandas as pd

        table: dict[str, dict[str, float]] = {}
        for label in self.labels:
            table[label] = self.values[label]
            if any(self.errors[label].values()):
                table[f"{label}_se"] = self.errors[label]
        for label in self.labels[1:]:
            table[f"{label}_ratio"] = self.ratios[label]
        return pd.DataFrame(table, index=pd.Index(self.quantities, name="quantity"))

    def _lines(self) -> list[list[str]]:
        """Return the table of values and ratios as texts, with a line of titles."""
        base, *others = self.labels
        lines = [["quantity", *self.labels, *(f"{label} / {base}" for label in others)]]
        for name in self.quantities:
            values = [
                " ".join(filter(None, printing.with_error(name, side.values)))
                for side in self.sides.values()
            ]
            ratios = [
                _with_error(self.ratios[label][name], self.ratio_errors[label][name])
                for label in others
            ]
            lines.append([name, *values, *ratios])
        return lines

    def _remarks(self) -> list[str]:
        remarks = [f"Warning: {sentence}" for sentence in self.warnings]
        judged = sum(bool(side.verdicts) for side in self.sides.values())
        sentences: dict[str, list[str]] = {}  # inequalities with the same verdicts share a line
        for name, each in self.differing_verdicts.items():
            listed = ", ".join(f"{label} {verdict}" for label, verdict in each.items())
            known = f"Verdicts differ on {{}}: {listed}."
            alone = f"Only {', '.join(each)} measured {{}}."
            sentences.setdefault(known if len(each) == judged else alone, []).append(name)
        remarks += [text.format(", ".join(names)) for text, names in sentences.items()]
        if judged > 1 and not self.differing_verdicts:
            remarks.append("All verdicts on inequalities agree.")
        return remarks

    def __str__(self) -> str:
        return "\n".join([*printing.columns(self._lines()), "", *self._remarks()])

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.labels)}: {counted(len(self.quantities), 'quantity')})"

    def _repr_html_(self) -> str:
        titles, *lines = self._lines()
        chosen = [line for line in lines if line[0] in HEADLINE] or lines
        everything = notebook.html_table(titles, lines)
        return (
            f"<div>{notebook.html_table(titles, chosen)}"
            f"{notebook.folded(counted(len(lines), 'quantity'), everything)}"
            f"{notebook.paragraphs(self._remarks())}</div>"
        )

    @no_type_check
    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draw the ratio of each headline quantity to that of the first measurement.

        Args:
            ax: axes to draw on; default: a new figure.

        Returns:
            The axes.

        Raises:
            FlatlensError: if no headline quantity has a positive finite ratio.
        """
        base, *others = self.labels
        names = [
            name
            for name in HEADLINE
            if name in self.quantities
            and all(0 < self.ratios[label][name] < math.inf for label in others)
        ]
        if not names:
            raise FlatlensError("there is no quantity with a positive finite ratio to draw")
        ratios = {label: [self.ratios[label][name] for name in names] for label in others}
        errors = {label: [self.ratio_errors[label][name] for name in names] for label in others}
        ax = plots.ratio_bars(names, ratios, errors, ax)
        ax.set_xlabel(f"log10 of the ratio to {base}")
        return ax


def _equal_norms(norms: Array | None, others: Array | None) -> bool:
    """Return whether norms agree; unknown norms and other sample counts count as equal."""
    if norms is None or others is None or norms.shape != others.shape:
        return True
    return np.allclose(norms, others, rtol=1e-3, atol=0, equal_nan=True)


def _ratio(name: str, value: float, base: float) -> float:
    with np.errstate(all="ignore"):
        if name in LOGARITHMS:
            return float(np.exp(np.float64(value) - base))
        return float(np.float64(value) / base)


def _relative_error(name: str, value: float, error: float) -> float:
    if name in LOGARITHMS:  # the error of a logarithm is the relative error of the volume
        return error
    return error / abs(value) if value and error else 0.0


def _with_error(value: float, error: float) -> str:
    return f"{value:.4g}" + (f" +- {error:.1g}" if error else "")
