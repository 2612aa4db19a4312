"""One side of a comparison: the numbers of a measurement, or of a record in a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flatlens.measurement.result import Measurement
from flatlens.probes import Array


@dataclass(frozen=True)
class Side:
    """The values, verdicts and facts of one measurement in a comparison.

    Args:
        values: every quantity by its name, with ``NAME_se`` for its standard error.
        verdicts: the verdict on each inequality; empty if unknown.
        facts: facts that should agree between measurements, by a readable name. Unknown facts are
            left out.
        sample_norms: the norm of each sample, or None if unknown.
    """

    values: dict[str, float]
    verdicts: dict[str, str]
    facts: dict[str, Any]
    sample_norms: Array | None = None

    @classmethod
    def of_measurement(cls, m: Measurement) -> Side:
        """Return the side of a measurement."""
        p = m.probe
        facts = {
            "number of samples": p.n,
            "number of inputs": p.M,
            "number of outputs": p.N,
            "loss": m.loss_name,
            "dtype": str(p.dtype).removeprefix("torch."),
            "method": "exact" if p.sketch is None else "sketch",
        }
        verdicts = {b.name: b.verdict if b.holds else f"{b.verdict}, fails" for b in m.bounds}
        return cls(dict(m.values), verdicts, facts, p.input.x_norm)

    @classmethod
    def of_record(cls, record: Mapping[str, Any], config: Mapping[str, Any]) -> Side:
        """Return the side of one record of a run folder.

        A record does not say which inequalities are proven, so this side has no verdicts.

        Args:
            record: the record.
            config: the config of its run.

        >>> side = Side.of_record({"step": 5, "mls": 2.0, "eq12.lhs": 1.0, "eq12.rhs": 3.0}, {})
        >>> side.values, side.facts
        ({'mls': 2.0}, {'step': 5, 'precision': 'wide'})
        """
        numbers = {
            name: float(value)
            for name, value in record.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        step = numbers.pop("step", None)
        values = {name: value for name, value in numbers.items() if "." not in name}
        facts = {
            "step": None if step is None else int(step),
            "loss": config.get("measured_loss"),
            "precision": config.get("measured_precision", "wide"),
        }
        return cls(values, {}, {k: v for k, v in facts.items() if v is not None})
