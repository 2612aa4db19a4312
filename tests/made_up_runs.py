"""Made-up tables of runs, for which the right answers are known."""

import numpy as np
import pandas as pd

CONFIGURATIONS = ((0.05, 20), (0.1, 20), (0.2, 20), (0.1, 8), (0.1, 32))
STEPS = np.arange(0, 10_001, 250)
LOSS = np.maximum(0.1 * 10.0 ** (-STEPS / 2_000), 1e-6)  # one percent at step 4,000


def table(
    model="mlp", seeds=8, configurations=CONFIGURATIONS, seed=0, steps=STEPS, **columns
) -> pd.DataFrame:
    """Return a table with one row per run and step, in the format of `read_runs`.

    Each column is a function of a run. It gets `lr`, `batch`, `t` (steps, 0 to 1) and `z`, a
    function from a name to a normal number. The number is the same for all columns of the run.
    """
    draw = np.random.default_rng(seed)
    rows = []
    for lr, batch in configurations:
        for k in range(seeds):
            numbers: dict[str, float] = {}

            def z(name, numbers=numbers):
                return numbers.setdefault(name, draw.normal())

            t = steps / steps[-1]
            run = {
                "run": f"{model}/{lr}-{batch}-{k}",
                "step": steps,
                "train_loss": LOSS[: len(steps)],
            }
            run |= {name: make(lr, batch, t, z) for name, make in columns.items()}
            run |= {"model": model, "data": "digits", "lr": lr, "batch_size": batch, "seed": k}
            run |= {"steps": int(steps[-1]), "classes": [[0, 1]] * len(steps)}
            rows.append(pd.DataFrame(run))
    return pd.concat(rows, ignore_index=True)
