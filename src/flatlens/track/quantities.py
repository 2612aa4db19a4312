"""What a tracker measures: names that ``measure`` knows, and functions of a Probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from flatlens.arguments import short_repr
from flatlens.errors import FlatlensError, first_line
from flatlens.measurement import Measurement
from flatlens.measurement.quantities import EDGE, OWN_PASSES
from flatlens.metrics import HEADLINE, METRICS
from flatlens.probes import Probe

Function = Callable[[Probe], Any]
Own = dict[str, np.ndarray]  # values of the user's functions by their names
HEADLINE_METRICS = tuple(name for name in HEADLINE if name in METRICS)
SETS = {
    "default": tuple(METRICS),
    "all": (*METRICS, *OWN_PASSES),
    "headline": HEADLINE_METRICS,
}
TAKEN = {*SETS["all"], EDGE, "<lambda>", "loss", "accuracy", "samples", "step", "run"}


@dataclass(frozen=True)
class Quantities:
    """The quantities of a record.

    ``names`` are recorded. ``functions`` are the user's own quantities. Functions may use any
    column of the probe, so with functions the pass measures everything; ``unasked`` are the names
    that are measured for this reason alone. ``headline`` keeps only the headline inequalities.
    """

    names: tuple[str, ...]
    functions: tuple[Function, ...] = ()
    headline: bool = False

    @property
    def unasked(self) -> tuple[str, ...]:
        """Names that are measured for the functions but not recorded."""
        return tuple(set(METRICS) - set(self.names)) if self.functions else ()

    def for_measure(self) -> str | list[str]:
        """Return the argument ``quantities`` of ``measure``."""
        for name in ("default", "all"):
            if self.names == SETS[name]:
                return name
        names = ["lambda_max" if name == EDGE else name for name in self.names]
        return [*dict.fromkeys(names), *(name for name in METRICS if name in self.unasked)]

    def one_pass(self) -> Quantities:
        """Return the quantities that need no passes of their own, or all if none would be left."""
        names = tuple(name for name in self.names if name in METRICS)
        return replace(self, names=names) if names or self.functions else self

    def record(self, m: Measurement, own: Own | None = None) -> dict[str, float]:
        """Return the values of a record.

        Args:
            m: a measurement of ``for_measure()``.
            own: values of the functions, if they were computed before.

        Returns:
            Quantities by their names, both sides of inequalities, and the own quantities.

        Raises:
            FlatlensError: if a function fails, or returns neither a number nor one per sample.
        """
        unasked = {f"{name}{end}" for name in self.unasked for end in ("", "_se")}
        values = {name: value for name, value in m.to_dict().items() if name not in unasked}
        if self.headline:
            inequalities = [name for name in HEADLINE if name not in METRICS]
            sides = {f"{name}.{side}" for name in inequalities for side in ("lhs", "rhs")}
            values = {n: v for n, v in values.items() if "." not in n or n in sides}
        own = self.own(m) if own is None else own
        return {**values, **{name: float(np.mean(value)) for name, value in own.items()}}

    def own(self, m: Measurement) -> Own:
        """Return the value of each function: one number, or one number per sample."""
        return {function.__name__: own_value(function, m.probe) for function in self.functions}

    def errors(self, m: Measurement, n: int, own: Own | None = None) -> dict[str, float]:
        """Estimate standard errors of means over a part of n samples.

        Args:
            m: a measurement of some of the samples, without replacement.
            n: number of all samples.
            own: values of the functions, if they were computed before.

        Returns:
            ``NAME_se`` for every quantity that is a mean over samples.
        """
        own = self.own(m) if own is None else own
        record, scale = self.record(m, own), np.sqrt(1 / m.probe.n - 1 / n)
        samples = {name: values for name, values in m.samples.items() if name in record}
        samples |= {name: values for name, values in own.items() if values.ndim}
        with np.errstate(invalid="ignore"):  # a volume of 0 has no logarithm
            return {
                # A sketch has an error of its own.
                f"{name}_se": float(
                    np.hypot(scale * np.std(values, ddof=1), record.get(f"{name}_se", 0.0))
                )
                for name, values in samples.items()
            }


def edge_of_stability(values: dict[str, float], learning_rate: float | None) -> dict[str, float]:
    """Return lr lambda_max / 2, above 1 of which gradient descent is unstable (Cohen et al. 2021).

    Args:
        values: a record with ``lambda_max``.
        learning_rate: of the optimiser, or None where it is not known.

    Raises:
        FlatlensError: if the learning rate is not known.
    """
    if learning_rate is None:
        raise FlatlensError(
            "edge_of_stability needs the learning rate; call tracker.attach(optimizer), or pass "
            "lr=... with the step"
        )
    return {EDGE: learning_rate * values["lambda_max"] / 2}


def own_value(function: Function, probe: Probe) -> np.ndarray:
    """Compute an own quantity.

    Args:
        function: the user's function of a Probe.
        probe: the measured probe.

    Returns:
        An array of shape () or (n,) in float64.

    Raises:
        FlatlensError: if the function fails, or returns anything but a number or one per sample.
    """
    try:
        value = function(probe)
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
        array = np.asarray(value, dtype=np.float64)
    except Exception as error:  # any error of the user's code; a later one must not end a training
        raise FlatlensError(
            f"the quantity {function.__name__} fails: {first_line(error)}"
        ) from error
    if array.shape not in ((), (probe.n,)):
        raise FlatlensError(
            f"the quantity {function.__name__} has shape {array.shape}; return one number, or one "
            f"for each of the {probe.n} samples"
        )
    return array


def parse_quantities(quantities: Any) -> Quantities:
    """Read the argument ``quantities`` of a tracker.

    Args:
        quantities: "default", "all", "headline", a name, a function of a Probe, or a list of these.

    Returns:
        The names and functions, checked.

    Raises:
        FlatlensError: if a name is unknown, or a function has no name of its own.

    Example:
        >>> def rank(probe): return probe.input.rank
        >>> q = parse_quantities(["nmls", rank])
        >>> q.names, [f.__name__ for f in q.functions]
        (('nmls',), ['rank'])
    """
    is_list = isinstance(quantities, Sequence) and not isinstance(quantities, str)
    items = list(quantities) if is_list else [quantities]
    names: list[str] = []
    functions: list[Function] = []
    for item in items:
        if isinstance(item, str) and item in SETS:
            names += SETS[item]
        elif isinstance(item, str) and item in (*SETS["all"], EDGE):
            names.append(item)
        elif isinstance(item, str):
            known = ", ".join([*SETS, *SETS["all"], EDGE])
            raise FlatlensError(f"quantities has the unknown name {item!r}; choose from {known}")
        elif any(item is metric for metric in METRICS.values()):  # such as fl.nmls
            names += [name for name, metric in METRICS.items() if metric is item]
        elif callable(item):
            functions.append(_named(item, functions))
        else:
            raise FlatlensError(
                f"quantities={short_repr(quantities)} is neither a name nor a list of names and "
                "functions"
            )
    headline = "headline" in items and set(names) <= set(HEADLINE_METRICS)
    return Quantities(tuple(dict.fromkeys(names)), tuple(functions), headline)


def _named(function: Any, others: list[Function]) -> Function:
    name = getattr(function, "__name__", "<lambda>")
    if name in TAKEN or name in [other.__name__ for other in others]:
        raise FlatlensError(
            f"quantities has the function {name!r}, whose name is missing or taken; define it with "
            "def and a name of its own"
        )
    return function
