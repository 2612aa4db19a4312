"""The result of ``measure``: quantities, inequalities, layers and samples of one network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatlens.arguments import no_type_check
from flatlens.errors import FlatlensError
from flatlens.files.plain_json import dumps
from flatlens.inequalities import Bounds, Inequality, table
from flatlens.inequalities.layers import layer_bounds
from flatlens.measurement import notebook, plots, printing, saving
from flatlens.measurement.layer_rows import layer_row
from flatlens.metrics import METRICS, Metric
from flatlens.probes import Array, Probe

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# Each loss-aware quantity, and the quantity of the paper that it equals for the paper's loss.
LOSS_AWARE = {"gauss_newton_trace": "sharpness", "loss_mls": "mls", "loss_nmls": "nmls"}


def _hint(name: object) -> str:
    """Return a hint if a name of flatlens was not asked for; "" for any other name."""
    known = name in METRICS or name in table.NAMES or name in LOSS_AWARE
    return ": it was not asked for, add it to quantities" if known else ""


@dataclass(frozen=True, repr=False)
class Measurement:
    """All quantities and inequalities of one network on some samples.

    ``m["nmls"]`` is a float and ``m["eq12"]`` an Inequality; ``m.nmls`` and ``m.bound("eq12")`` are
    the same. ``print(m)`` shows one screen, ``print(m.table())`` everything.

    Example:
        >>> import torch, flatlens as fl
        >>> m = fl.measure(torch.nn.Linear(3, 2).double(), torch.ones(4, 3).double())
        >>> m["sharpness"] == m.sharpness, "nmls" in m, m.bound("eq12").verdict
        (True, True, 'theorem')
    """

    probe: Probe  # the numbers of the pass
    values: dict[str, float]  # every quantity by its name
    bounds: Bounds  # every inequality
    loss_aware: Measurement | None = None  # of R^T f, if the loss is not the paper's
    loss_name: str = "half_squared"
    own_samples: dict[str, Array] = field(default_factory=dict)  # of the user's quantities

    # -- by name

    def __getitem__(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        for inequality in self.bounds:
            if inequality.name == name:
                return inequality
        for of_loss, metric in LOSS_AWARE.items():  # for the paper's loss both are the same
            if self.loss_aware is None and name in (of_loss, f"{of_loss}_se"):
                return self[name.replace(of_loss, metric)]
        raise KeyError(f"no quantity {name!r}{_hint(name)}; there are {', '.join(self.keys())}")

    def __getattr__(self, name: str) -> float:
        values = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        hint = f'; use m.bound("{name}")' if name in self._inequality_names() else ""
        raise AttributeError(
            f"a Measurement has no attribute {name!r}{hint}; it has the quantities "
            f"{', '.join(values)}"
        )

    def _inequality_names(self) -> list[str]:
        return [inequality.name for inequality in self.__dict__.get("bounds", ())]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.values})

    def __contains__(self, name: object) -> bool:
        try:
            self[name]  # type: ignore[index]
        except (KeyError, TypeError, AttributeError):
            return False
        return True

    def keys(self) -> list[str]:
        """Return the names of all quantities and inequalities."""
        return list(dict.fromkeys([*self.values, *self._inequality_names()]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    @no_type_check
    def bound(self, name: str) -> Inequality:
        """Return one inequality.

        Args:
            name: as in docs/theory.md, for example "eq12" or "log_volume".

        Returns:
            Both sides, the slack, the verdict and its reason.

        Raises:
            FlatlensError: if there is no such inequality.
        """
        for inequality in self.bounds:
            if inequality.name == name:
                return inequality
        names = ", ".join(self._inequality_names()) or "none in this measurement"
        raise FlatlensError(f"there is no inequality {name!r}{_hint(name)}; there are {names}")

    # -- tables

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One dict per layer, in the order of the calls: its numbers and its inequality, Eq. 5.

        If several rows share a parameter (a module that is called again), each has the parameter's
        whole sharpness. Rows of a sketch have standard errors, ``..._se``.
        """
        p = self.probe
        errors = [{}] * len(p.layers) if p.sketch is None else p.sketch.layer_errors
        return [
            {**layer_row(p, q), **layer_bounds(p, q), **{f"{k}_se": v for k, v in e.items()}}
            for q, e in zip(p.layers, errors, strict=True)
        ]

    @cached_property
    def layers(self) -> pd.DataFrame:
        """A table with one row per layer: its numbers and its inequality, Eq. 5."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    @cached_property
    def samples(self) -> dict[str, Array]:
        """The values of single samples behind each mean."""
        arrays = {
            name: metric.samples(self.probe)
            for name, metric in METRICS.items()
            if name in self.values and isinstance(metric, Metric)
        }
        arrays |= {name: values for name, values in self.own_samples.items() if len(values)}
        return {**arrays, "rank": rank} if (rank := self.probe.input.rank).min() >= 0 else arrays

    @property
    def coverage(self) -> dict[str, str]:
        """The way each parameter entered the sharpness: layer, rule, slow, frozen or unused.

        ``unmeasured`` lists parameters whose linear map is missing from NMLS and from sums over
        layers.
        """
        return {q.name: q.path for q in self.probe.parameters}

    @property
    def unmeasured(self) -> list[str]:
        """The parameters that multiply a tensor without being the weight of a measured layer."""
        return list(self.probe.unmeasured)

    @property
    def inputs(self) -> list[str]:
        """The arguments of the model that derivatives are taken with respect to."""
        return list(self.probe.inputs)

    # -- other forms

    def to_dict(self) -> dict[str, float]:
        """Return a flat record: every quantity, and both sides of every inequality that applies.

        ``log_volume`` names a quantity and an inequality: the quantity is ``log_volume`` here, the
        sides of the inequality are ``log_volume.lhs`` and ``log_volume.rhs``.
        """
        sides = {
            f"{inequality.name}.{side}": value
            for inequality in self.bounds
            if inequality.verdict != "not applicable"
            for side, value in (("lhs", inequality.lhs), ("rhs", inequality.rhs))
        }
        return {**self.values, **sides}

    def to_pandas(self) -> pd.DataFrame:
        """Return the flat record as a table of one row."""
        import pandas as pd

        return pd.DataFrame([self.to_dict()])

    def record(self) -> dict[str, Any]:
        """Return quantities, inequalities, layers, coverage and notes as nested dicts."""
        record = {
            "n": self.probe.n,
            "N": self.probe.N,
            "M": self.probe.M,
            "dtype": str(self.probe.dtype).removeprefix("torch."),
            "loss": self.loss_name,
            "quantities": self.values,
            "inequalities": [asdict(inequality) for inequality in self.bounds],
            "layers": self.rows,
            "coverage": self.coverage,
            "unmeasured": self.unmeasured,
            "notes": self.probe.notes,
        }
        if self.loss_aware is not None:
            record["loss_inequalities"] = [asdict(row) for row in self.loss_aware.bounds]
        return record

    def to_json(self, **options: Any) -> str:
        """Return the record as strict JSON; infinities and NaN are strings.

        Args:
            options: as for ``json.dumps``, for example ``indent=2``.
        """
        return dumps(self.record(), **options)

    @no_type_check
    def save(self, path: str | Path) -> Path:
        """Write the measurement with all its arrays to one file.

        The file is JSON. It begins with the record of ``to_json``, so that other programs can read
        it; ``Measurement.load`` restores every number bit for bit.

        Args:
            path: the file, for example "m.json". An existing file is replaced.

        Returns:
            The path.

        Raises:
            FlatlensError: if the file cannot be written.
        """
        content = {
            **saving.HEADER,
            **self.record(),
            "own_samples": saving.encode(self.own_samples),
            "probe": saving.encode(self.probe),
            "loss_aware": None,
        }
        if self.loss_aware is not None:
            numbers = self.loss_aware.values
            probe = saving.encode(self.loss_aware.probe)
            content["loss_aware"] = {"quantities": numbers, "probe": probe}
        return saving.write(path, content)

    @classmethod
    @no_type_check
    def load(cls, path: str | Path) -> Measurement:
        """Read a measurement that ``save`` wrote.

        Args:
            path: the file.

        Returns:
            A measurement that equals the saved one in every number.

        Raises:
            FlatlensError: if the file is not a saved measurement, is damaged, or is newer than this
                version of flatlens.
        """
        with saving.opened(path) as content:
            loss, aware = str(content["loss"]), None
            if part := content["loss_aware"]:
                bounds = saving.decode_bounds(content["loss_inequalities"])
                numbers = saving.decode_numbers(part["quantities"])
                aware = cls(saving.decode(part["probe"], Probe), numbers, bounds, loss_name=loss)
            return cls(
                probe=saving.decode(content["probe"], Probe),
                values=saving.decode_numbers(content["quantities"]),
                bounds=saving.decode_bounds(content["inequalities"]),
                loss_aware=aware,
                loss_name=loss,
                own_samples=saving.decode(content["own_samples"], dict),
            )

    # -- for people

    def __repr__(self) -> str:
        return printing.one_line(self)

    def __str__(self) -> str:
        return printing.one_screen(self)

    def table(self) -> str:
        """Return all quantities, layers, inequalities and reasons as text tables."""
        return printing.full_tables(self)

    def _repr_html_(self) -> str:
        return notebook.measurement_html(self)

    @no_type_check
    def plot(self, what: str = "inequalities", *, ax: Axes | None = None) -> Axes:
        """Draw the layers or the inequalities.

        Args:
            what: "inequalities" draws the slack rhs / lhs of each inequality as a bar; "norm",
                "gradient_share" and "sensitivity" draw one number per layer.
            ax: axes to draw on; default: a new figure.

        Returns:
            The axes.

        Raises:
            FlatlensError: if ``what`` is unknown or there is nothing to draw.
        """
        return plots.measurement_plot(self, what, ax)
