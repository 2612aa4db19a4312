"""How often do the 95 % intervals of a sketch hold the exact value?

    python benchmarks/coverage_of_intervals.py                  # simulation: ten seconds
    python benchmarks/coverage_of_intervals.py --networks 500   # sketches of trained networks

Without options chi-square variables are drawn. A sum of squares over random directions is a
weighted sum of squared normal variables. `dimensions` is their effective number, which is 1 if all
outputs of one sample change together. The table compares the plain standard error with the one that
flatlens reports, each as estimate +- t(m - 1) error.

With ``--networks SEEDS`` three small networks are trained on the embedded digits. Each is sketched
with many seeds, and the intervals of five quantities are compared with the exact values.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flatlens as fl
from flatlens.algebra.student import log_scale_error, t_quantile
from flatlens.data import load
from flatlens.metrics import METRICS

DIMENSIONS = (1, 1.5, 2, 4, 10, 40)
DIRECTIONS = (2, 3, 4, 6, 8, 16, 32, 64)
NETWORK_DIRECTIONS = (2, 4, 8)
SAMPLES = (1, 10)
QUANTITIES = (
    *("sharpness", "sharpness_untied", "adaptive_sharpness", "input_invariant_mls"),
    "matrix_normalized_sharpness",
)


def coverage(directions: int, dimensions: float, repetitions: int, seed: int = 0) -> list[float]:
    """Return the share of intervals that hold the true value: plain, and on the log scale."""
    generator = np.random.default_rng([seed, directions, int(10 * dimensions)])
    draws = generator.chisquare(dimensions, (repetitions, directions)) / dimensions
    values, plain = draws.mean(1), draws.std(1, ddof=1) / np.sqrt(directions)
    pairs = zip(values.tolist(), plain.tolist(), strict=True)
    logs = np.array([log_scale_error(v, e, directions) for v, e in pairs])
    t = t_quantile(directions - 1)
    return [float((np.abs(values - 1) <= t * errors).mean()) for errors in (plain, logs)]


# -- real networks -------------------------------------------------------------------------------


class TokenMixer(nn.Module):
    """Attention over the eight rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(8, 16), nn.Linear(16, 10)
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(self.embed(x.flatten(1).unflatten(1, (8, 8)))).mean(1))


def trained_networks() -> tuple[dict[str, nn.Module], Tensor]:
    """Return three networks trained on digits for 300 steps, and the images, in float64."""
    torch.manual_seed(0)
    data = load("digits")
    x, y = data.x_train.double().reshape(-1, 1, 8, 8), data.y_train
    networks: dict[str, nn.Module] = {
        "MLP": nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        "convolutions": nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32, 10)),
        ),
        "transformer": TokenMixer(),
    }
    for network in networks.values():
        network.double()
        optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
        for _ in range(300):
            batch = torch.randint(len(x), (64,))
            optimizer.zero_grad()
            F.cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()
        network.eval()
    return networks, x


def network_coverage(
    network: nn.Module, x: Tensor, directions: int, seeds: int
) -> dict[str, float]:
    """Return the share of sketches whose interval holds the exact value, by quantity."""
    exact, t = fl.probe(network, x), t_quantile(directions - 1)
    wanted = {name: METRICS[name](exact) for name in QUANTITIES}
    hits = dict.fromkeys(QUANTITIES, 0)
    for seed in range(seeds):
        p = fl.sketch(network, x, directions=directions, seed=seed)
        assert p.sketch is not None
        for name, want in wanted.items():
            hits[name] += abs(METRICS[name](p) - want) <= t * p.sketch.errors[name]
    return {name: count / seeds for name, count in hits.items()}


def print_networks(seeds: int) -> None:
    """Print a row for each network, number of samples and of directions."""
    networks, x = trained_networks()
    print(f"| network | samples | directions | {' | '.join(QUANTITIES)} |")
    print("|" + "---|" * (3 + len(QUANTITIES)))
    for name, network in networks.items():
        for samples in SAMPLES:
            for directions in NETWORK_DIRECTIONS:
                shares = network_coverage(network, x[:samples], directions, seeds)
                cells = " | ".join(f"{100 * share:.1f} %" for share in shares.values())
                print(f"| {name} | {samples} | {directions} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=20_000)
    parser.add_argument("--networks", type=int, metavar="SEEDS", help="sketch trained networks")
    options = parser.parse_args()
    if options.networks:
        print_networks(options.networks)
        return
    print("| directions | dimensions | plain | flatlens |\n|---|---|---|---|")
    for directions in DIRECTIONS:
        for dimensions in DIMENSIONS:
            plain, logs = coverage(directions, dimensions, options.repetitions)
            print(f"| {directions} | {dimensions} | {100 * plain:.1f} % | {100 * logs:.1f} % |")


if __name__ == "__main__":
    main()
