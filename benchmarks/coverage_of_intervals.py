"""How often do the 95 % intervals of a sketch hold the exact value?

    python benchmarks/coverage_of_intervals.py                # 20,000 repetitions, ten seconds

A sum of squares over random directions is a weighted sum of squared normal variables; `dimensions`
is their effective number, 1 where all outputs of one sample move together. The table compares the
plain standard error with the one that flatlens reports, each as estimate +- t(m - 1) error.
"""

import argparse

import numpy as np

from flatlens.algebra.student import log_scale_error, t_quantile

DIMENSIONS = (1, 1.5, 2, 4, 10, 40)
DIRECTIONS = (2, 3, 4, 6, 8, 16, 32, 64)


def coverage(directions: int, dimensions: float, repetitions: int, seed: int = 0) -> list[float]:
    """The share of intervals that hold the truth: plain, and on the log scale."""
    generator = np.random.default_rng([seed, directions, int(10 * dimensions)])
    draws = generator.chisquare(dimensions, (repetitions, directions)) / dimensions
    values, plain = draws.mean(1), draws.std(1, ddof=1) / np.sqrt(directions)
    pairs = zip(values.tolist(), plain.tolist(), strict=True)
    logs = np.array([log_scale_error(v, e, directions) for v, e in pairs])
    t = t_quantile(directions - 1)
    return [float((np.abs(values - 1) <= t * errors).mean()) for errors in (plain, logs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=20_000)
    options = parser.parse_args()
    print("| directions | dimensions | plain | flatlens |\n|---|---|---|---|")
    for directions in DIRECTIONS:
        for dimensions in DIMENSIONS:
            plain, logs = coverage(directions, dimensions, options.repetitions)
            print(f"| {directions} | {dimensions} | {100 * plain:.1f} % | {100 * logs:.1f} % |")


if __name__ == "__main__":
    main()
