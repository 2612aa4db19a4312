"""The inequalities between flatness and compression, each with both sides and a verdict."""

from flatlens.inequalities.evaluate import bounds
from flatlens.inequalities.verdicts import Bounds, Inequality

__all__ = ["Bounds", "Inequality", "bounds"]
