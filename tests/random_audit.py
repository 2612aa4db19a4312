"""Measure many random networks, count failed theorems and disagreements with the oracle.

    python tests/random_audit.py 10000                # networks of the seeds 0 to 9999
    python tests/random_audit.py 500 --start 10000    # other seeds

A refusal (a FlatlensError) is not a disagreement; it is counted and listed by its reason. A number
that differs is compared once more. If the oracle changes as much when every operation rounds in
another way (a saturated gate is 1 minus nearly 1), no program can do better, and the network counts
as ill-conditioned. The counts are printed to stderr every 500 networks.
"""

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from oracles import Truth, oracle
from random_families import grown_network
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from traps import Case

import flatlens as fl
from flatlens.metrics import METRICS

RTOL = 1e-8
TINIEST = 1e-140  # the square of a smaller derivative underflows in float64
ROUNDING = float(np.finfo(np.float64).eps)
COMPARED = (
    *("sharpness", "adaptive_sharpness", "mls", "nmls", "nmls_through", "sharpness_untied"),
    *("normalized_mls", "input_invariant_mls", "local_dimension"),
)

Values = dict[str, float | np.ndarray]


@dataclass
class Tally:
    """The counts of an audit."""

    networks: Counter = field(default_factory=Counter)
    theorems: int = 0
    comparisons: int = 0
    violations: list[str] = field(default_factory=list)
    disagreements: list[str] = field(default_factory=list)
    ill_conditioned: list[str] = field(default_factory=list)
    refusals: Counter = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """Return the counts in words."""
        return [
            f"{self.networks.total()} networks of {len(self.networks)} families",
            f"{self.theorems} theorems, {len(self.violations)} violations",
            f"{self.comparisons} comparisons, {len(self.disagreements)} disagreements",
            f"{len(self.ill_conditioned)} networks are ill-conditioned"
            + "".join(f" ({name})" for name in self.ill_conditioned),
        ]


def values_of(seen: fl.Probe | Truth) -> Values:
    """Return all compared values by name: metrics, and the squared gradient of each parameter."""
    if isinstance(seen, Truth):
        metrics = seen.metrics()
    else:
        metrics = {name: METRICS[name](seen) for name in COMPARED}
    values = {name: metrics[name] for name in COMPARED if name in metrics}
    return values | {f"gradient of {p.name}": p.grad for p in seen.parameters}


def disagreements(probe: fl.Probe, case: Case) -> tuple[int, list[str], bool]:
    """Compare a probe with the oracle.

    Returns:
        The number of compared values, the values that differ, and whether the network is
        ill-conditioned, so that larger differences were accepted.
    """
    truth = oracle(case.model, case.x)
    got, want = values_of(probe), values_of(truth)
    size = max((float(p.grad.max()) for p in truth.parameters), default=0.0)

    def wrong(room: Values) -> list[str]:
        lines = []
        for name, value in want.items():
            squares = "sharpness" in name or "gradient" in name
            # A value that should cancel exactly has rounding relative to the largest share.
            zero = max(1e-20 * size, TINIEST**2) if squares else TINIEST
            off = np.abs(got[name] - value)
            if not (off <= zero + RTOL * np.abs(value) + room.get(name, 0.0)).all():
                lines.append(f"{name}: {got[name]} is not {value}")
        return lines

    lines = wrong({})
    if not lines:
        return len(want), [], False
    changed = [shaken_truth(case, seed) for seed in range(4)]
    room = {name: 10 * _spread(name, want, changed) for name in want}
    return len(want), wrong(room), True


def _spread(name: str, want: Values, changed: list[Values]) -> float | np.ndarray:
    """Return how much one value changes when every operation rounds in another way."""
    return np.max([np.abs(values[name] - want[name]) for values in changed], axis=0)


class Shaken(TorchDispatchMode):
    """A mode that changes every result of torch by one unit in the last place."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(r.alias_info is not None for r in func._schema.returns):  # a view, or in place
            return result
        return pytree.tree_map(self.shake, result)

    def shake(self, value: Any) -> Any:
        """Move each number up or down by one unit in the last place."""
        if not (isinstance(value, Tensor) and value.dtype == torch.float64):
            return value
        signs = 2 * torch.randint(0, 2, value.shape, generator=self.generator).double() - 1
        return value * (1 + ROUNDING * signs)


def shaken_truth(case: Case, seed: int) -> Values:
    """Return the oracle's values when every operation rounds in another way."""
    with Shaken(seed):
        return values_of(oracle(case.model, case.x))


def audit_one(seed: int, tally: Tally) -> None:
    """Measure one network and add the outcome to the tally."""
    family, case = grown_network(seed, routing=True)
    tally.networks[family] += 1
    try:
        probe = fl.probe(case.model, case.x)
    except fl.FlatlensError as error:
        tally.refusals[f"{family}: {str(error)[:80]}"] += 1
        return
    compared, wrong, ill_conditioned = disagreements(probe, case)
    tally.comparisons += compared
    if ill_conditioned and not wrong:
        tally.ill_conditioned.append(f"seed {seed}, {family}")
    tally.disagreements += [f"seed {seed}, {family}: {text}" for text in wrong]
    for bound in fl.bounds(probe):
        tally.theorems += bound.verdict == "theorem"
        if bound.verdict == "theorem" and not bound.holds:
            what = f"{bound.name}: {bound.lhs} > {bound.rhs} ({bound.why})"
            tally.violations.append(f"seed {seed}, {family}: {what}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", type=int)
    parser.add_argument("--start", type=int, default=0)
    options = parser.parse_args()
    tally = Tally()
    for seed in range(options.start, options.start + options.networks):
        audit_one(seed, tally)
        if (seed + 1 - options.start) % 500 == 0:
            print("; ".join(tally.lines()), file=sys.stderr, flush=True)
    for line in (*tally.lines(), *tally.violations, *tally.disagreements):
        print(line)
    for reason, count in tally.refusals.most_common():
        print(f"refused {count} times: {reason}")
    return int(bool(tally.violations or tally.disagreements))


if __name__ == "__main__":
    sys.exit(main())
