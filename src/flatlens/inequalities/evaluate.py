"""Evaluate the table of inequalities for one network."""

from __future__ import annotations

from collections.abc import Sequence

from flatlens.arguments import check_flag, check_instance, no_type_check
from flatlens.inequalities import table
from flatlens.inequalities.network import Network
from flatlens.inequalities.verdicts import Bounds, judge
from flatlens.metrics import A_PROBE
from flatlens.passes.needs import missing
from flatlens.probes import Probe


@no_type_check
def bounds(p: Probe, *, exact: bool = False) -> Bounds:
    """Compute every inequality between compression and sharpness for one network.

    Args:
        p: a probe, from ``probe``, ``sketch`` or ``measure(...).probe``.
        exact: use ||D^-1 C||_2 itself in ``eq12_untied`` instead of its cheap bound. The probe must
            come from ``probe(..., exact_untied=True)``.

    Returns:
        All rows of the table in docs/theory.md, section 2, by name or by index. Each row has both
        sides, the slack, the verdict and its reason.

    Raises:
        FlatlensError: if an argument is wrong, or if ``exact`` is set and the probe does not have
            the exact norms.

    Example:
        >>> import torch, flatlens as fl
        >>> net = torch.nn.Linear(3, 2, bias=False).double()
        >>> inequality = fl.bounds(fl.probe(net, torch.ones(1, 3).double()))["eq11"]
        >>> inequality.verdict, inequality.holds
        ('theorem', True)
    """
    check_instance("p", p, Probe, f"bounds takes {A_PROBE}")
    check_flag("exact", exact)
    return bounds_named(p, None, exact)


def bounds_named(p: Probe, names: Sequence[str] | None, exact: bool = False) -> Bounds:
    """Compute the inequalities with these names, or all if ``names`` is None."""
    network = Network.of(p, exact)
    return Bounds(judge(row, network) for row in table.TABLE if names is None or row.name in names)


def computable(p: Probe) -> list[str]:
    """Return the names of the inequalities whose needs the pass was asked for."""
    return [row.name for row in table.TABLE if not missing(row.needs, p.asked)]
