"""Refuse work that cannot fit into the memory of this machine, before it starts."""

from __future__ import annotations

import os

from flatlens.errors import FlatlensError

UNKNOWN = 64 << 30  # bytes assumed where the system does not say how much memory it has


def total_memory() -> int:
    """Return the bytes of memory that this machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return UNKNOWN


def refuse_beyond_memory(needed: int | float, what: str) -> None:
    """Raise if an estimate of needed memory exceeds what the machine has.

    Args:
        needed: estimated bytes.
        what: subject of the message, such as "The data synthetic:teacher".

    Raises:
        FlatlensError: if the estimate exceeds the memory.

    >>> refuse_beyond_memory(1_000, "A small array")
    """
    total = total_memory()
    if needed > total:
        raise FlatlensError(
            f"{what} would need about {min(needed, 10**24) / 1e9:.3g} GB of memory, but this "
            f"machine has {total / 1e9:.3g} GB; choose smaller numbers."
        )
