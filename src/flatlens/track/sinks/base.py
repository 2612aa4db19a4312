"""The base of all sinks: the protocol, the choice of values, the import of a library."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from flatlens.arguments import no_type_check
from flatlens.errors import FlatlensError
from flatlens.metrics import HEADLINE, METRICS

PREFIX = "flatlens/"
SIDES = (".lhs", ".rhs")


@runtime_checkable
class Sink(Protocol):
    """A receiver of records: anything with these two methods."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record, a flat mapping with the key ``step``."""

    def close(self) -> None:
        """Write out what is left and free resources."""


class Selection:
    """Choose the values of a record that a logger receives, and prefix their names.

    Args:
        names: "headline" keeps the headline quantities, both sides of the headline inequalities,
            and everything that the default measurement does not contain (the user's scalars, the
            user's own quantities, the loss). "all" keeps everything. A list keeps these names.
        prefix: put in front of every name.

    Raises:
        FlatlensError: if ``names`` or ``prefix`` has the wrong type.

    Example:
        >>> record = {"step": 5, "mls": 2.0, "volume": 1.0, "eq12.lhs": 3.0, "eq8.lhs": 4.0}
        >>> Selection()({**record, "train_loss": 0.1})
        {'flatlens/mls': 2.0, 'flatlens/eq12.lhs': 3.0, 'flatlens/train_loss': 0.1}
        >>> Selection(["volume"], prefix="")(record)
        {'volume': 1.0}
    """

    @no_type_check
    def __init__(self, names: str | Sequence[str] = "headline", prefix: str = PREFIX) -> None:
        known = names in ("headline", "all") if isinstance(names, str) else _are_names(names)
        if not known:
            raise FlatlensError(f'names={names!r} is unknown; give "headline", "all" or a list')
        if not isinstance(prefix, str):
            raise FlatlensError(f"prefix={prefix!r} is not a string")
        self.names, self.prefix = names, prefix

    def __call__(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the chosen values by their prefixed names, without the step."""
        return {
            f"{self.prefix}{name}": value
            for name, value in record.items()
            if name != "step" and self._includes(name)
        }

    def _includes(self, name: str) -> bool:
        if self.names == "all":
            return True
        if self.names == "headline":
            return is_headline(name)
        return name in self.names


def is_headline(name: str) -> bool:
    """Return whether a name of a record is in the headline set or not measured by default.

    >>> names = ("nmls", "volume_se", "eq12.rhs", "eq12_bias.rhs", "train_loss")
    >>> [name for name in names if is_headline(name)]
    ['nmls', 'eq12.rhs', 'train_loss']
    """
    if name.endswith(SIDES):
        inequality = name[:-4]
        return inequality in HEADLINE and inequality not in METRICS
    quantity = name.removesuffix("_se")
    return quantity in HEADLINE or quantity not in METRICS


def _are_names(names: Any) -> bool:
    return isinstance(names, Sequence) and all(isinstance(name, str) for name in names)


def need(module: str, extra: str) -> Any:
    """Import the library of a sink.

    Args:
        module: name of the library.
        extra: the extra of flatlens that installs it.

    Returns:
        The imported module.

    Raises:
        FlatlensError: if the library is not installed.

    Example:
        >>> need("json", "none").dumps([1])
        '[1]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise FlatlensError(
            f"{module} is not installed; it comes with pip install 'flatlens[{extra}]'"
        ) from error
