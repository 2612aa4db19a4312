"""The request of a measurement: names of quantities and inequalities, and user functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from flatlens.errors import FlatlensError, counted, first_line
from flatlens.inequalities import table
from flatlens.metrics import HEADLINE, METRICS, Metric, Total
from flatlens.passes.needs import EVERYTHING
from flatlens.probes import Array, Probe

OwnFunction = Callable[[Probe], Any]
Quantities = str | OwnFunction | Sequence[str | OwnFunction]

# Functions of flatlens.perturb, which take passes of their own. True: the value has a standard
# error, which is 0 if the value happens to be exact.
OWN_PASSES = {
    "hessian_trace": True,
    "adaptive_sharpness_hessian": True,
    "adaptive_sharpness_sampled": True,
    "normalized_sharpness": False,
    "relative_flatness": True,
    "lambda_max": False,
    "fisher_trace": True,
    "gradient_noise_scale": False,
    "batch_sharpness": True,
}
# This quantity needs the learning rate, which only a Tracker knows.
EDGE = "edge_of_stability"
PRODUCT, HESSIAN = "one more product", "Hessian products"
COSTS = {
    **dict.fromkeys(METRICS, "free"),  # one pass computes all of them
    **dict.fromkeys((*OWN_PASSES, EDGE), HESSIAN),
    **dict.fromkeys(("fisher_trace", "gradient_noise_scale"), PRODUCT),
    "normalized_sharpness": PRODUCT,
}
SETS = {
    "default": tuple(METRICS),
    "all": (*METRICS, *OWN_PASSES),
    "headline": HEADLINE,
}
WHOLE = ("default", "all")  # sets that contain everything one pass gives
RECORDED = ("loss", "accuracy", "samples", "step", "run")  # other names in a record


@dataclass(frozen=True)
class Request:
    """The quantities that a measurement computes, by how they are computed."""

    metrics: tuple[str, ...]  # functions of the probe
    own_passes: tuple[str, ...]  # these run the network again
    inequalities: tuple[str, ...] | None  # None: all that follow from the computed quantities
    functions: tuple[OwnFunction, ...]  # given by the user
    edge: bool = False  # whether the learning rate times lambda_max is recorded
    whole: bool = False  # whether everything that one pass gives is asked for

    @property
    def listed(self) -> list[str | OwnFunction]:
        """The argument ``quantities`` that gives this request."""
        metrics = ["default"] if self.whole else self.metrics
        return [*metrics, *self.own_passes, *(self.inequalities or ()), *self.functions]

    @property
    def needs(self) -> frozenset[str]:
        """Names of ``passes.needs`` that the pass must compute."""
        if self.whole:
            return EVERYTHING
        needs = [METRICS[name].needs for name in self.metrics]
        needs += [row.needs for row in table.TABLE if row.name in (self.inequalities or ())]
        needs += [getattr(function, "needs", EVERYTHING) for function in self.functions]
        return frozenset().union(*needs)


def read_request(quantities: Any, edge: bool = False) -> Request:
    """Sort the argument ``quantities`` of ``measure`` by how each entry is computed.

    Args:
        quantities: "default", "all", "headline", a name, a function of a Probe, or a list of these.
        edge: whether the caller knows the learning rate, which ``edge_of_stability`` needs.

    Returns:
        The request. Inequalities are restricted to those that are named, if any is.

    Raises:
        FlatlensError: if an entry is not a known name and not a function.

    Example:
        >>> request = read_request(["sharpness", "eq12"])
        >>> request.metrics, request.inequalities
        (('sharpness',), ('eq12',))
    """
    entries = _entries(quantities)
    names, functions = _names_and_functions(entries)
    asked_edge = edge and EDGE in names
    if asked_edge:
        names = list(dict.fromkeys("lambda_max" if name == EDGE else name for name in names))
    for name in names:
        if name == EDGE:
            raise FlatlensError(
                f"{EDGE} needs the learning rate: use a Tracker with attach(optimizer), or "
                "perturb.edge_of_stability(lr, model, x, y)"
            )
        if name not in METRICS and name not in OWN_PASSES and name not in table.NAMES:
            raise FlatlensError(
                f"quantities has the unknown name {name!r}; choose from "
                f"{', '.join([*SETS, *METRICS])}, an inequality (eq12), or what "
                "fl.perturb offers"
            )
    metrics = tuple(name for name in names if name in METRICS)
    inequalities = tuple(n for n in names if n in table.NAMES and n not in METRICS)
    return Request(
        metrics=metrics,
        own_passes=tuple(name for name in names if name in OWN_PASSES),
        inequalities=inequalities or None,
        functions=functions,
        edge=asked_edge,
        whole=any(isinstance(entry, str) and entry in WHOLE for entry in entries),
    )


def _entries(quantities: Any) -> list[Any]:
    """Return the entries of the argument; one name or function is a list of one."""
    if isinstance(quantities, str) or callable(quantities):
        return [quantities]
    return _as_list(quantities)


def _names_and_functions(quantities: list[Any]) -> tuple[list[str], tuple[OwnFunction, ...]]:
    """Flatten the entries: sets become names, metrics given as functions become their names."""
    names: list[str] = []
    functions: dict[str, OwnFunction] = {}
    for entry in quantities:
        if isinstance(entry, str):
            names += SETS.get(entry, (entry,))
        elif isinstance(entry, (Metric, Total)) and METRICS.get(entry.__name__) is entry:
            names.append(entry.__name__)
        elif callable(entry):
            name = function_name(entry)
            if functions.setdefault(name, entry) is not entry:
                raise FlatlensError(
                    f"quantities has two functions with the name {name}; rename one of them"
                )
        else:
            raise FlatlensError(
                f"quantities holds a value of type {type(entry).__name__}; give names or functions "
                "of a Probe"
            )
    if not names and not functions:
        raise FlatlensError('quantities is empty; name at least one, or give "default"')
    return list(dict.fromkeys(names)), tuple(functions.values())


def _as_list(quantities: Any) -> list[Any]:
    try:
        return list(quantities)
    except TypeError:
        raise FlatlensError(
            f"quantities is a value of type {type(quantities).__name__}; give a name, a function "
            "of a Probe, or a list of these"
        ) from None


def function_name(function: OwnFunction) -> str:
    """Return the name under which a function's value is reported.

    Raises:
        FlatlensError: if the function has no name of its own, or the name of a known quantity.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if not name.isidentifier():
        raise FlatlensError(
            f"quantities has the function {name}, which has no name to report it by; use def, or "
            "set its __name__"
        )
    if name in {*METRICS, *OWN_PASSES, *table.NAMES, *SETS, *RECORDED}:
        raise FlatlensError(
            f"quantities has the function {name}, which is the name of a quantity of flatlens; "
            "rename it"
        )
    return name


def own_value(function: OwnFunction, p: Probe) -> tuple[float, Array]:
    """Compute a user's quantity.

    Args:
        function: a function that takes the probe and returns a number, or one number per sample.
        p: the probe.

    Returns:
        The value (the mean over samples), and the samples' values (none for a single number).

    Raises:
        FlatlensError: if the function fails or returns something else.
    """
    name = function_name(function)
    try:
        result = function(p)
    except FlatlensError:
        raise
    except Exception as error:
        raise FlatlensError(f"the quantity {name} fails: {first_line(error)}") from error
    try:
        plain = result.detach().cpu() if isinstance(result, torch.Tensor) else result
        values = np.asarray(plain, dtype=float)
    except (TypeError, ValueError):
        values = np.empty((0, 0))
    if values.ndim == 0:
        return float(values), np.empty(0)
    if values.shape == (p.n,):
        return float(values.mean()), values
    returned = getattr(result, "shape", None)
    given = f"shape {tuple(returned)}" if returned is not None else type(result).__name__
    raise FlatlensError(
        f"the quantity {name} returns {given}; return a number, or one number for each of the "
        f"{counted(p.n, 'sample')}"
    )


def own_pass_values(
    name: str, model: nn.Module, x: Any, y: Any, **options: Any
) -> dict[str, float]:
    """Compute a quantity that takes passes of its own, with its standard error.

    Args:
        name: one of ``OWN_PASSES``.
        model: the network.
        x: the samples.
        y: their targets.
        options: arguments of ``measure``; those that the function does not take are ignored.

    Returns:
        The value by its name; ``NAME_se`` if it is an estimate, and ``NAME_converged`` = 0 if an
        iteration did not converge.
    """
    from flatlens import perturb

    function = getattr(perturb, name)
    parameters = inspect.signature(function).parameters
    given = {"y": y, **{k: v for k, v in options.items() if v is not None}}
    estimate = function(model, x, **{k: v for k, v in given.items() if k in parameters})
    values = {name: estimate.value}
    if OWN_PASSES[name]:
        values[f"{name}_se"] = estimate.se
    if not estimate.converged:
        values[f"{name}_converged"] = 0.0
    return values
