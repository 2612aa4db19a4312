"""Measure many random networks, count failed theorems and disagreements with the oracle.

    python tests/random_audit.py 500                # networks of the seeds 0 to 499
    python tests/random_audit.py 500 --start 10000  # other seeds
    python tests/random_audit.py 500 --routing      # also samples that use different weights

A refusal (a FlatlensError) is counted and listed by its reason; it is no disagreement.
"""

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from oracles import Truth, oracle
from random_families import grown_network

import flatlens as fl
from flatlens.metrics import METRICS

RTOL = 1e-8
TINIEST = 1e-140  # the square of a derivative below this is no number of float64
COMPARED = (
    *("sharpness", "adaptive_sharpness", "mls", "nmls", "nmls_through", "sharpness_untied"),
    *("normalized_mls", "input_invariant_mls", "local_dimension"),
)


@dataclass
class Tally:
    """What an audit saw."""

    networks: Counter = field(default_factory=Counter)
    theorems: int = 0
    comparisons: int = 0
    violations: list[str] = field(default_factory=list)
    disagreements: list[str] = field(default_factory=list)
    refusals: Counter = field(default_factory=Counter)


def disagreements(probe: fl.Probe, truth: Truth) -> tuple[int, list[str]]:
    """The number of compared values, and those that differ."""
    wrong, wanted = [], truth.metrics()
    names = [name for name in COMPARED if name in wanted]
    top = truth.input.singular[:, 0]
    if ((top > 0) & (top < TINIEST)).any():
        names.remove("local_dimension")
    for name in names:
        got, want = METRICS[name](probe), wanted[name]
        # What cancels exactly is rounding of the largest share.
        size = max((float(p.grad.max()) for p in truth.parameters), default=0.0)
        zero = 1e-20 * size if "sharpness" in name else TINIEST
        if not np.isclose(got, want, rtol=RTOL, atol=zero):
            wrong.append(f"{name}: {got} is not {want}")
    for got, want in zip(probe.parameters, truth.parameters, strict=True):
        size = max(float(p.grad.max()) for p in truth.parameters)
        if not np.allclose(got.grad, want.grad, rtol=RTOL, atol=1e-20 * size):
            wrong.append(f"gradient of {want.name}: {got.grad} is not {want.grad}")
    return len(names) + len(truth.parameters), wrong


def audit_one(seed: int, tally: Tally, routing: bool = False) -> None:
    """Measure one network and add what it showed."""
    family, case = grown_network(seed, routing)
    tally.networks[family] += 1
    try:
        probe = fl.probe(case.model, case.x)
    except fl.FlatlensError as error:
        tally.refusals[f"{family}: {str(error)[:80]}"] += 1
        return
    compared, wrong = disagreements(probe, oracle(case.model, case.x))
    tally.comparisons += compared
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
    parser.add_argument("--routing", action="store_true")
    options = parser.parse_args()
    tally = Tally()
    for seed in range(options.start, options.start + options.networks):
        audit_one(seed, tally, options.routing)
    print(f"{options.networks} networks of {len(tally.networks)} families")
    print(f"{tally.theorems} theorems, {len(tally.violations)} violations")
    print(f"{tally.comparisons} comparisons, {len(tally.disagreements)} disagreements")
    for line in (*tally.violations, *tally.disagreements):
        print(line)
    for reason, count in tally.refusals.most_common():
        print(f"refused {count} times: {reason}")
    return int(bool(tally.violations or tally.disagreements))


if __name__ == "__main__":
    sys.exit(main())
