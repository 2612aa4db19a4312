"""Judge the paper's claims on Figure 3: normalised MLS against adaptive sharpness over models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from flatlens.analysis.claim_results import ClaimVerdict, judge
from flatlens.analysis.model_trend import AXES, points, rank_correlation, trend
from flatlens.figures.correlations import number


def claims(df: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Judge claims V1 and V2 on a table of models.

    V1: Spearman's coefficient is above 0, by its interval over classes. V2: the class of MobileViT
    lies to the upper left and two of FastViT to the lower right. *Upper* means above the trend of
    all models, *left* means below their median sharpness.

    Returns:
        For each claim its text, the observation (key "found") and the verdict.
    """
    _, a, b, classes = points(df, *AXES)
    e = rank_correlation(a, b, classes)
    slope, start = trend(a, b)
    upper, left = b > slope * a + start, a < np.median(a)
    mobile, fast = (
        np.array([c.startswith(name) for c in classes]) for name in ("mobilevit", "fastvit")
    )
    at_left, at_right = (mobile & upper & left).sum(), (fast & ~upper & ~left).sum()
    verdict: ClaimVerdict = "inconclusive"
    if mobile.any() and fast.sum() > 1:
        there = at_left == mobile.sum() and at_right > 1
        verdict = "supported" if there else "not supported"
    seen = f"{at_left} of {mobile.sum()} MobileViT upper left, "
    seen += f"{at_right} of {fast.sum()} FastViT lower right"
    rho = f"Spearman's rho {number(e.value)} [{number(e.low)}, {number(e.high)}] over classes"
    return {
        "V1": {
            "says": "normalised MLS rises with adaptive sharpness over models",
            "found": rho,
            "verdict": judge(e),
        },
        "V2": {
            "says": "MobileViT cluster at the upper left, two FastViT at the lower right",
            "found": seen,
            "verdict": verdict,
        },
    }
