"""The section of the report on kinds of compression: curvature, local and global quantities."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from flatlens.figures.panel import CURVATURE, GLOBAL, LOCAL, has_panel
from flatlens.report.elements import Html, tag
from flatlens.report.page import Page
from flatlens.report.plots import OVER_STEPS, TOGETHER, Plot, Series, axes, rounded, spaced
from flatlens.training.snapshot_panel import SEPARATOR

__all__ = ["has_panel", "panel_section"]


def panel_section(page: Page, df: pd.DataFrame) -> Iterator[Html]:
    """Yield the content of the section: one plot for each kind of quantity, means over the runs."""
    yield tag(
        "p",
        "Lines are means over the runs. Sharpness bounds MLS and NMLS (Eqs. 11 and 12). Nothing "
        "that is proven bounds the quantities of the second group, which describe the cloud of "
        "samples at each place of the network.",
    )
    group = page.group()
    columns = {**CURVATURE, **LOCAL}
    series = {column: Series(title, k) for k, (column, title) in enumerate(columns.items())}
    yield page.legend(list(series.values()), group)
    drawn = {"curvature": list(CURVATURE), "local compression": list(LOCAL)}
    plots = [_plot(df, title, {c: series[c] for c in names}) for title, names in drawn.items()]
    yield tag("div", *(page.plot(plot, group) for plot in plots), class_="plots")
    places = _places(df)
    of_place = {place: Series(place, k) for k, place in enumerate(places)}
    group = page.group()
    yield page.legend(list(of_place.values()), group)
    plots = [
        _plot(df, title, {f"{name}{SEPARATOR}{place}": of_place[place] for place in places})
        for name, title in GLOBAL.items()
    ]
    yield tag("div", *(page.plot(plot, group) for plot in plots), class_="plots")


def _places(df: pd.DataFrame) -> list[str]:
    """Return the places of the network at which the geometry was measured, in their order."""
    pairs = (str(column).split(SEPARATOR, 1) for column in df if SEPARATOR in str(column))
    return list(dict.fromkeys(place for name, place in pairs if name in GLOBAL))


def _plot(df: pd.DataFrame, title: str, series: dict[str, Series]) -> Plot:
    """Plot the means over runs of some columns against the steps."""
    data, positive = [], True
    for column, s in series.items():
        if column not in df:
            continue
        means = df.groupby("step")[column].mean()
        positive = positive and bool((means.dropna() > 0).all())
        data.append(s.trace(means.index, rounded(means)))
    log = {"yaxis_type": "log"} if positive else {}
    return spaced(Plot(title, data, axes(**OVER_STEPS, **log) | TOGETHER))
