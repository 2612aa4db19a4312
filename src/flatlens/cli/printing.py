"""Print results: tables with thousands separators, and JSON."""

from __future__ import annotations

import json
from typing import Any

COUNTS = ("step", "steps", "samples", "parameters")  # printed as whole numbers


def print_table(lines: list[list[str]]) -> None:
    """Print lines of cells in aligned columns."""
    from flatlens.measurement.printing import columns

    print("\n".join(columns(lines)))


def cell(name: str, value: float) -> str:
    """Format one value; counts are whole numbers with thousands separators.

    >>> cell("step", 10000.0), cell("nmls", 1.23456789)
    ('10,000', '1.2346')
    """
    from flatlens.measurement.printing import number

    return f"{value:,.0f}" if name in COUNTS and value == value else number(value)


def as_json_text(values: dict[Any, Any]) -> str:
    """Return strict JSON. It has no infinities, so these become strings."""
    plain = json.dumps(values)
    return json.dumps(json.loads(plain, parse_constant=lambda c: str(float(c))), allow_nan=False)
