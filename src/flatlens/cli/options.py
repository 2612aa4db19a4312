"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from cyclopts import Parameter
from cyclopts.validators import Number

from flatlens.training.options import options, whole_number

LARGEST = 2**63 - 1  # largest integer of torch
Positive = Annotated[int, Parameter(converter=whole_number, validator=Number(gte=1, lte=LARGEST))]
Natural = Annotated[int, Parameter(converter=whole_number, validator=Number(gte=0, lte=LARGEST))]


def _finite(_: Any, value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        raise ValueError("Must be a finite number.")


AboveZero = Annotated[float, Parameter(validator=(Number(gt=0), _finite))]
Json = Annotated[bool, Parameter("--json", negative="")]
Quiet = Annotated[bool, Parameter(("--quiet", "-q"), negative="")]
Trust = Annotated[bool, Parameter(negative="")]
Words: TypeAlias = Annotated[list[str] | None, Parameter(consume_multiple=True, negative="")]
EngineName = Literal["local", "dask"]

if TYPE_CHECKING:
    TrainOptions: TypeAlias = Any
    SweepOptions: TypeAlias = Any
    NO_OPTIONS: Any
else:
    TrainOptions = options("TrainOptions")
    SweepOptions = options("SweepOptions", many=True)
    # not None: cyclopts validates with pydantic where that is installed, which refuses None
    NO_OPTIONS = TrainOptions(), SweepOptions()


def show_progress(quiet: bool) -> bool | None:
    """Return what ``progress`` means: off with --quiet, else on if a terminal is there."""
    return False if quiet else None


def words_of(values: Sequence[str] | None) -> list[str]:
    """Return the words of an option, none if it was not given."""
    return list(values or ())
