"""The inequalities between flatness and compression, each with both sides and a verdict."""

from flatlens.inequalities.table import Bounds, Inequality, bounds

__all__ = ["Bounds", "Inequality", "bounds"]
