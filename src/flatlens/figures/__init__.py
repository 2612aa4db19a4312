"""Draw figures from the table that `read_runs` returns: trends, tightness, correlations, zoo.

Each function returns a matplotlib Figure; `save` writes it as PDF and PNG.
"""

from flatlens.figures.correlations import correlations
from flatlens.figures.style import save
from flatlens.figures.tightness import tightness
from flatlens.figures.trends import trends
from flatlens.figures.zoo import zoo

__all__ = ["correlations", "save", "tightness", "trends", "zoo"]
