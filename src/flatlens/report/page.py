"""Assemble the page: one HTML file that needs nothing else.

A content security policy allows only the two scripts of the page, by their hashes, and nothing from
a network. Arrays that several plots share are stored once.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib import import_module, resources
from itertools import count
from typing import Any

from flatlens.errors import FlatlensError
from flatlens.figures import style
from flatlens.report.elements import Html, join, tag, text
from flatlens.report.glossary import explain
from flatlens.report.plots import DASHES, Plot, Series

SHAPES = "●■▲◆▼✚"
STROKES = dict(zip(DASHES, ("", "6 3", "2 3", "6 2 2 2", "10 3", "10 3 2 3"), strict=True))
SHARED = 8  # Arrays with at least this many entries are stored once and referred to.


class Page:
    """Sections of the page, and the plots in them."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.plots: dict[str, Any] = {}
        self.sections: list[Html] = []
        self.names: list[tuple[str, str]] = []
        self._numbers = count()

    def section(self, title: str, *content: Any) -> None:
        """Add a section; a title that is taken gets a number, so that every link is unique."""
        taken = [name for _, name in self.names]
        numbered = (f"{title} ({k})" for k in count(2))
        title = title if title not in taken else next(n for n in numbered if n not in taken)
        name = f"s{next(self._numbers)}"
        self.names.append((name, title))
        heading = tag("h2", title, id=f"{name}-title")
        self.sections.append(
            tag("section", heading, *content, id=name, aria_labelledby=f"{name}-title")
        )

    def group(self) -> str:
        """Return a new name for plots that share a legend."""
        return f"g{next(self._numbers)}"

    def plot(self, plot: Plot, group: str) -> Html:
        """Return the place where a plot is drawn."""
        name = f"p{next(self._numbers)}"
        self.plots[name] = {"data": plot.data, "layout": plot.layout}
        box = tag(
            "div", class_="plot", data_plot=name, data_group=group, role="img",
            aria_label=plot.caption,
        )  # fmt: skip
        if plot.wide:
            box = tag("div", box, class_="scroll", tabindex=0, role="region",
                      aria_label=plot.caption)  # fmt: skip
        controls: list[Html] = []
        if plot.columns:
            self.plots[name]["columns"] = plot.columns
            controls = [self._axes(plot, name)]
        kind = "wide" if plot.wide else None
        meaning = explain(plot.column) if plot.column else None
        caption = tag("abbr", plot.caption, title=meaning) if meaning else plot.caption
        return tag("figure", tag("figcaption", caption), *controls, box, class_=kind)

    def _axes(self, plot: Plot, name: str) -> Html:
        """Return two lists of quantities to choose the axes from."""
        lists = []
        for axis in ("x", "y"):
            now = plot.layout[f"{axis}axis"]["title"]["text"]
            options = [
                tag("option", style.name(c), value=c,
                    **({"selected": "selected"} if style.name(c) == now else {}))
                for c in plot.columns
            ]  # fmt: skip
            choice = tag("select", *options, data_axis=axis, data_of=name)
            lists.append(tag("label", f"{axis} ", choice))
        return tag("div", *lists, class_="axes")

    def legend(
        self, series: Sequence[Series], group: str, only: Mapping[str, Sequence[str]] | None = None
    ) -> Html:
        """Return buttons that show and hide series of a group, singly or several at once."""
        buttons = [
            tag("button", tag("span", _mark(s), class_="mark", aria_hidden="true"), s.name,
                type="button", aria_pressed="true", data_group=group, data_series=s.name)
            for s in series
        ]  # fmt: skip
        choices: list[Html] = []
        if len(series) > 2:
            choices = [tag("button", "show all", type="button", data_group=group, data_all="")]
            choices += [
                tag("button", f"varying {name}", type="button", data_group=group,
                    data_only=json.dumps(list(keys)))
                for name, keys in (only or {}).items()
            ]  # fmt: skip
        return tag("fieldset", tag("legend", "Show"), *buttons, *choices, class_="legend")

    def write(self, head: Html, foot: Html) -> str:
        """Return the whole file."""
        plotly, script = plotly_js(), _read("page.js")
        policy = "; ".join([
            "default-src 'none'", f"script-src {_hash(plotly)} {_hash(script)}",
            "style-src 'unsafe-inline'", "img-src data: blob:", "base-uri 'none'",
            "form-action 'none'",
        ])  # fmt: skip
        links = [tag("li", tag("a", title, href=f"#{name}")) for name, title in self.names]
        nav = tag("nav", tag("ul", *links), aria_label="Contents")
        blanks = {
            "TITLE": text(self.title),
            "POLICY": policy,
            "BODY": join([
                tag("header", head, nav), tag("main", *self.sections, id="content"),
                tag("footer", foot),
            ]),
            "PLOTS": _embedded(stored_once(self.plots)),
            "PLOTLY": plotly,
            "SCRIPT": script,
        }  # fmt: skip
        # one pass: inserted text is not searched again
        return re.sub(r"@([A-Z]+)@", lambda match: blanks[match[1]], _read("page.html"))


def stored_once(plots: Mapping[str, Any]) -> dict[str, Any]:
    """Replace every long array of the plots by a reference, and return plots and arrays.

    >>> stored_once({"p": {"x": list(range(9)), "y": list(range(9))}})["plots"]
    {'p': {'x': {'array': 0}, 'y': {'array': 0}}}
    """
    places: dict[str, int] = {}
    arrays: list[Any] = []

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(v) for key, v in value.items()}
        if not isinstance(value, list) or len(value) < SHARED:
            return [replaced(v) for v in value] if isinstance(value, list) else value
        key = json.dumps(value, allow_nan=False)
        if key not in places:
            places[key] = len(arrays)
            arrays.append(value)
        return {"array": places[key]}

    return {"plots": replaced(dict(plots)), "arrays": arrays}


def _mark(s: Series) -> Html:
    if s.points:
        return tag("span", SHAPES[s.symbol], style=f"color:{s.colour}")
    line = tag("line", x1=1, x2=27, y1=6, y2=6, stroke=s.colour, stroke_width=3,
               stroke_dasharray=STROKES[s.line["dash"]])  # fmt: skip
    return tag("svg", line, width=28, height=12)


def plotly_js() -> str:
    """Return the script of plotly, which its package contains.

    Raises:
        FlatlensError: if plotly is not installed.
    """
    try:
        offline = import_module("plotly.offline")  # which has no types
    except ImportError as error:
        raise FlatlensError("A report needs plotly: pip install 'flatlens[report]'.") from error
    return str(offline.get_plotlyjs())


def _read(name: str) -> str:
    return (resources.files("flatlens.report") / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _embedded(value: Any) -> str:
    """Return JSON that cannot end the element it stands in."""
    written = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
