"""Compare every number of many networks between two versions of the package.

    PYTHONPATH=OLD/src:tests python benchmarks/same_numbers.py write before.json
    PYTHONPATH=src:tests python benchmarks/same_numbers.py write after.json
    python benchmarks/same_numbers.py compare before.json after.json

Measures the trap networks of the tests exactly, by sharpness alone, sketched, without adaptive
sharpness and with cross-entropy, all in float64, and the paper's networks, ResNet-18 and a ViT in
float64 and float32. The comparison lists the largest relative differences, and every difference of
a verdict, a coverage or a name.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHOWN = 15
NETWORKS = {
    "mlp": (20, 784),
    "lenet": (10, 3, 32, 32),
    "vgg": (6, 3, 32, 32),
    "resnet18": (2, 3, 32, 32),
    "vit": (2, 3, 32, 32),
}


def numbers(measure: Callable[[], Any]) -> dict[str, Any]:
    """Return all numbers and verdicts of one measurement, or the type of its error."""
    import flatlens as fl

    try:
        m = measure()
    except fl.FlatlensError as error:
        return {"refused": type(error).__name__}
    values: dict[str, Any] = dict(m.to_dict())
    values["verdicts"] = [[row.name, row.verdict, row.holds] for row in m.bounds]
    values["coverage"] = m.coverage
    for i, layer in enumerate(m.rows):
        values |= {f"layer {i}: {name}": value for name, value in layer.items()}
    return values


def measured() -> dict[str, dict[str, Any]]:
    """Return the numbers of all networks by name."""
    import torch
    from traps import ZOO

    import flatlens as fl

    try:
        from flatlens.training.networks import build
    except ImportError:  # version 0.1.0
        from flatlens.experiments.models import build  # type: ignore[import-not-found, no-redef]

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ways: dict[str, dict[str, Any]] = {
        "exact": {},
        "sharpness alone": {"quantities": ["sharpness"]},
        "sketched": {"method": "sketch", "directions": 2},
        "without adaptive": {"quantities": ["sharpness", "mls", "nmls"]},
    }
    results = {}
    for name, make in ZOO.items():
        for way, options in ways.items():
            case = make()
            results[f"{name}, {way}"] = numbers(
                lambda c=case, o=options: fl.measure(c.model, c.x, output=c.output, **o)
            )
    for name, shape in NETWORKS.items():
        for dtype in (torch.float64, torch.float32):
            torch.manual_seed(0)
            net, x = build(name).to(dtype), torch.randn(shape, dtype=dtype)
            results[f"{name}, {dtype}"] = numbers(lambda n=net, x=x: fl.measure(n, x))
    return results


def compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Print the differences."""
    differences = []
    for name in before.keys() & after.keys():
        for key in before[name].keys() & after[name].keys():
            a, b = before[name][key], after[name][key]
            if isinstance(a, float) and isinstance(b, float):
                if a != b and not (math.isnan(a) and math.isnan(b)):
                    differences.append((abs(a - b) / max(abs(a), abs(b)), name, key, a, b))
            elif a != b:
                print(f"{name}: {key} is {b}, was {a}")
    print(f"{len(before.keys() & after.keys())} measurements, {len(differences)} numbers differ")
    for size, name, key, a, b in sorted(differences, reverse=True)[:SHOWN]:
        print(f"{size:.1e}  {name}: {key} is {b!r}, was {a!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    if options.what == "write":
        options.files[0].write_text(json.dumps(measured(), default=str))
    else:
        compare(*(json.loads(file.read_text()) for file in options.files))


if __name__ == "__main__":
    main()
