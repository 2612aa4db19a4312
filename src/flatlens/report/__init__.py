"""Write one offline HTML page of everything that records hold."""

from flatlens.report.build import report

__all__ = ["report"]
