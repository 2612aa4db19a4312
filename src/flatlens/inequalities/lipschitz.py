"""The Lipschitz sandwich: the largest sensitivity against a product of norms (theory.md 8).

max_i sigma_1(A_i) <= Lip(f) <= prod_l c_l ||C_l||. Szegedy et al. (2014) use the right-hand side.
The proof needs a chain of measured layers and maps of known Lipschitz constant. The autograd graph
of the pass shows whether there is one (``capture.chain``). If not, the row does not apply.
"""

from __future__ import annotations

import numpy as np

from flatlens.inequalities.network import Network
from flatlens.inequalities.verdicts import Row
from flatlens.metrics import max_sensitivity
from flatlens.passes.needs import CHAIN, INPUT_TOP, OPERATOR_NORMS
from flatlens.per_sample import upper_norm_per_sample

NOT_SEEN = "this pass did not look for a chain of layers"


def lhs_lipschitz(net: Network) -> float:
    """Return max_i sigma_1(A_i)."""
    return max_sensitivity(net.p)


def rhs_lipschitz(net: Network) -> float:
    """Return prod_l c_l ||C_l||, with the certified upper end of every norm."""
    assert net.p.chain is not None
    norms = [upper_norm_per_sample(net.p.layers[i], "operator").max() for i in net.p.chain.layers]
    return float(net.p.chain.constant * np.prod(norms))


def why_no_chain(net: Network) -> str | None:
    """Say why the network is not a chain of layers and maps of known Lipschitz constant."""
    return NOT_SEEN if net.p.chain is None else net.p.chain.why or None


LIPSCHITZ = Row(
    "lipschitz", "theory 8", lhs_lipschitz, rhs_lipschitz,
    "a chain of layers and maps of known Lipschitz constant", not_applicable=why_no_chain,
    sides=(INPUT_TOP, CHAIN, OPERATOR_NORMS),
)  # fmt: skip
