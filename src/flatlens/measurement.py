"""All of it in one call: ``measure`` gives a Measurement, a record a person can read."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from flatlens.capture.inputs import Inputs, batches, kept
from flatlens.errors import FlatlensError
from flatlens.inequalities.table import Bounds, bounds, layer_bounds
from flatlens.losses import Custom, Loss, get_loss, targets
from flatlens.metrics import METRICS, Metric, layer_row
from flatlens.passes.distributed import gathered, needs_group
from flatlens.passes.probing import check_arguments
from flatlens.passes.request import Request, Root, SketchOptions
from flatlens.passes.run import look
from flatlens.probes import Array, Probe

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Measurement:
    """All quantities and inequalities by name: ``m["nmls"]`` a float, ``m["eq12"]`` both sides."""

    probe: Probe
    values: dict[str, float]
    bounds: Bounds
    loss_aware: Measurement | None = None  # of R^T f, where another loss than the paper's was given

    def __getitem__(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        for row in self.bounds:
            if row.name == name:
                return row
        for of_loss, metric in LOSS_AWARE.items():  # of the paper's loss they are the paper's own
            if self.loss_aware is None and name in (of_loss, f"{of_loss}_se"):
                return self[name.replace(of_loss, metric)]
        names = [*self.values, *(row.name for row in self.bounds)]
        raise KeyError(f"no quantity {name!r}; there are {', '.join(names)}")

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One dict per layer, in the order of the calls: its numbers and its own inequality.

        Rows of one parameter (a module that is called again) each have all of its sharpness. Those
        of a sketch have standard errors, ``..._se``.
        """
        p = self.probe
        errors = [{}] * len(p.layers) if p.sketch is None else p.sketch.layer_errors
        return [
            {**layer_row(p, q), **layer_bounds(p, q), **{f"{k}_se": v for k, v in e.items()}}
            for q, e in zip(p.layers, errors, strict=True)
        ]

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
        return {**found, "rank": self.probe.input.rank} if self.probe.layers else found

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
        if self.loss_aware is not None:
            record["loss_inequalities"] = [asdict(row) for row in self.loss_aware.bounds]
        return json.dumps(_plain(record), allow_nan=False, **options)

    def to_pandas(self) -> pd.DataFrame:
        """The record as a table of one row."""
        import pandas as pd

        return pd.DataFrame([self.to_dict()])

    def _shown(self) -> list[str]:
        return [name for name in self.values if not name.endswith("_se")]

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
        layers = [[_cell(row[k]) for k in shown] for row in self.rows]
        lines = [
            f"{p.n} samples, {p.M} inputs, {p.N} outputs, {str(p.dtype).removeprefix('torch.')}",
            "",
            *columns([[name, *_with_error(name, self.values)] for name in self._shown()]),
            "",
            *(
                columns([shown, *layers])
                if layers
                else ["sharpness alone: no layers, no inequalities"]
            ),
            "",
            *(columns(table) if layers else []),
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
    method: str = "auto",
    loss: str | Loss | Callable[..., Any] = "half_squared",
    output: Any = None,
    weight_norm: str = "operator",
    directions: int = 32,
    seed: int = 0,
    rtol: float | None = None,
    budget: float | None = None,
    chunk: int | None = None,
    memory: int | None = None,
    distributed: bool = False,
) -> Measurement:
    """Every quantity and inequality of a network, in one call.

    Args:
        model: any module; it is measured in evaluation mode and left exactly as found.
        x: as for ``probe``: a tensor, a tuple or dict of tensors, or an iterable of batches.
        y: targets (class indices or the values themselves): adds loss and, for classes (indices or
            one-hot rows), accuracy.
        quantities: "default" is all that one pass gives; "all" adds what takes passes of its own
            (hessian_trace, relative_flatness, ...; needs y); or the names wanted. "sharpness" alone
            takes a short pass, several times faster, without layers and inequalities; any without
            "adaptive_sharpness" save what it costs, and Eq. 44, where the pass is exact.
        method: "exact", "sketch" (random directions, with standard errors as ``..._se``), or
            "auto": exact unless that is far dearer; a note says which and why.
        loss: its Gauss-Newton form is measured beside the paper's: ``gauss_newton_trace``,
            ``loss_mls``, ``loss_nmls`` and ``m.loss_aware.bounds``. A function needs y.
        directions: of a sketch; ``seed`` and ``rtol`` (relative standard error) likewise. The
            last two also hold for what takes passes of its own.
        budget: seconds that an exact pass may take under "auto".
        distributed: x and y are this process's share of the samples; every process of the default
            group of torch.distributed gets the whole answer.
        output: what of the model's result is f(x), as for ``probe``; so are the other arguments.

    Example:
        >>> import torch, flatlens as fl
        >>> net = torch.nn.Linear(3, 2).double()
        >>> m = fl.measure(net, torch.ones(4, 3).double())
        >>> m["sharpness"], m.coverage
        (8.0, {'weight': 'layer', 'bias': 'rule'})
    """
    if method not in METHODS:
        raise FlatlensError(f"method={method!r} is unknown; use one of {', '.join(METHODS)}")
    check_arguments(model, x)
    if distributed:
        needs_group()
    one_pass, own = _wanted(quantities)
    if method == "exact" and rtol is not None and not own:
        raise FlatlensError('rtol is of estimates; leave it out, or use method="sketch" or "auto"')
    if budget is not None and method != "auto":
        raise FlatlensError(f'a budget chooses the method; leave it out with method="{method}"')
    if budget is not None and not budget > 0:
        raise FlatlensError(f"budget={budget} is no time to spend; give seconds above 0")
    of = get_loss(loss)
    plain = of.name == "half_squared"
    if own or not plain:  # more than one pass
        x = kept(x)
        y = _targets([target for _, target in batches(x)]) if y is None else y
    if isinstance(of, Custom) and y is None:
        raise FlatlensError("a function as loss needs targets; give y")
    if own and y is None:
        raise FlatlensError(f"{own[0]} is of the loss and needs targets; give y")
    if own and distributed:
        raise FlatlensError(f"{own[0]} takes passes of its own; leave it out where distributed")
    if distributed and budget is not None:
        raise FlatlensError("a budget may choose otherwise in each process; give method= instead")
    request = Request(
        method=method,  # type: ignore[arg-type]
        output=output, chunk=chunk, memory=memory, weight_norm=weight_norm,
        sharpness_alone=plain and method != "sketch" and one_pass == ["sharpness"] and not own,
        adaptive="adaptive_sharpness" in one_pass, budget=budget,
        sketch=SketchOptions(directions, seed, rtol, layer_top=1),
    )  # fmt: skip
    found: list[Any] = []

    def inputs() -> Iterator[Inputs]:
        found.clear()
        for batch, target in batches(x):
            found.append(target)
            yield batch

    def seen(root: Root | None) -> Probe:
        p = look(model, inputs(), replace(request, root=root))
        return gathered(p) if distributed else p

    p = seen(None)
    y = _targets(found) if y is None else y
    values = _values(p, one_pass)
    aware = None
    if not plain:
        q = seen(lambda f, rows: of.root(f, None if y is None else y[rows]).mT)
        aware = Measurement(q, _values(q, one_pass), bounds(q))
        for name, metric in LOSS_AWARE.items():
            values[name] = METRICS[metric](q)
            if q.sketch is not None and metric in q.sketch.errors:
                values[f"{name}_se"] = q.sketch.errors[metric]
    if y is not None:
        values |= loss_and_accuracy(p, gathered(torch.as_tensor(y)) if distributed else y, of)
    for name in own:
        values |= perturbed(
            name, model, x, y, loss=of, output=output, seed=seed, rtol=rtol, chunk=chunk
        )
    return Measurement(p, values, bounds(p) if p.layers else Bounds(), aware)


METHODS = ("auto", "exact", "sketch")
PERTURBED = (  # functions of flatlens.perturb
    *("hessian_trace", "adaptive_sharpness_hessian", "adaptive_sharpness_sampled"),
    *("normalized_sharpness", "relative_flatness", "lambda_max"),
)
ESTIMATED = (  # of these, with a standard error; 0 where the value happens to be exact
    *("hessian_trace", "adaptive_sharpness_hessian", "adaptive_sharpness_sampled"),
    "relative_flatness",
)
LOSS_AWARE = {"gauss_newton_trace": "sharpness", "loss_mls": "mls", "loss_nmls": "nmls"}


def _wanted(quantities: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """The names that one pass gives, and those that take passes of their own."""
    names = [quantities] if isinstance(quantities, str) else list(quantities)
    if names == ["default"]:
        return list(METRICS), []
    if names == ["all"]:
        return list(METRICS), list(PERTURBED)
    for name in names:
        if name not in METRICS and name not in PERTURBED:
            known = ", ".join([*METRICS, *PERTURBED])
            raise FlatlensError(f"quantity {name!r} is unknown; choose from {known}")
    return [q for q in names if q in METRICS], [q for q in names if q in PERTURBED]


def _values(p: Probe, names: list[str]) -> dict[str, float]:
    """Quantities with their standard errors; what a sketch cannot know is left out."""
    values: dict[str, float] = {}
    for name in names:
        value = METRICS[name](p)
        if p.sketch is not None and np.isnan(value):
            continue
        values[name] = value
        if p.sketch is not None and name in p.sketch.errors:
            values[f"{name}_se"] = p.sketch.errors[name]
    if p.sketch is not None:
        values["spectra_converged"] = float(p.sketch.converged)
    return values


def perturbed(name: str, model: nn.Module, x: Any, y: Any, **options: Any) -> dict[str, float]:
    """A quantity that takes passes of its own, with its standard error."""
    from flatlens import perturb

    function = getattr(perturb, name)
    known = inspect.signature(function).parameters
    given = {"y": y, **{k: v for k, v in options.items() if v is not None}}
    found = function(model, x, **{k: v for k, v in given.items() if k in known})
    values = {name: found.value}
    if name in ESTIMATED:
        values[f"{name}_se"] = found.se
    if not found.converged:
        values[f"{name}_converged"] = 0.0
    return values


def _targets(found: list[Any]) -> Tensor | None:
    """The targets that batches brought along, or None."""
    if not found or any(t is None for t in found):
        return None
    return torch.cat([torch.as_tensor(t) for t in found])


def loss_and_accuracy(p: Probe, y: Any, loss: Loss) -> dict[str, float]:
    """The mean loss and, where the targets are classes, the share of right ones in per cent."""
    f = torch.from_numpy(p.output)
    values = {"loss": float(loss(f, y).mean())}
    try:
        t = targets(y, p.N, f)
    except FlatlensError:  # a function may take targets of any shape
        return values
    if p.N > 1 and bool(((t == 0) | (t == 1)).all()) and bool((t.sum(1) == 1).all()):
        right = t.argmax(1) == f.argmax(1)
        values["accuracy"] = float(100 * right.double().mean())
    return values


def _with_error(name: str, values: dict[str, float]) -> list[str]:
    error = values.get(f"{name}_se")
    return [number(values[name]), "" if error is None else f"+- {error:.2g}"]


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
