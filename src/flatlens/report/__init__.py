"""One offline HTML page of all that records hold."""

from flatlens.report.sections import report

__all__ = ["report"]
