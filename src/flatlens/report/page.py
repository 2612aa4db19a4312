"""Parts of an HTML page, and the page itself: one file that needs nothing else.

What is not `Html` is text from records or files and is escaped. The page forbids itself every
script but its own two, by their hashes, and everything from a network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module, resources
from itertools import count
from typing import Any

from flatlens.errors import FlatlensError
from flatlens.figures import style
from flatlens.report.interactive import DASHES, Plot, Series

VERDICTS = {
    "supported": ("good", "✓"), "not supported": ("bad", "✗"), "inconclusive": ("open", "○"),
    "theorem": ("good", "✓"), "observation": ("open", "○"), "not applicable": ("open", "–"),
    "holds": ("good", "✓"), "broken": ("bad", "✗"),
}  # fmt: skip
LONG = 24  # letters of a text that may take several lines
SHAPES = "●■▲◆▼✚"
STROKES = dict(zip(DASHES, ("", "6 3", "2 3", "6 2 2 2", "10 3", "10 3 2 3"), strict=True))


class Html(str):
    """Markup; every other string is text."""


def text(value: Any) -> Html:
    """Anything as markup: floats in four digits, strings escaped."""
    if isinstance(value, Html):
        return value
    if isinstance(value, float):
        value = "–" if math.isnan(value) else "∞" if value == math.inf else f"{value:.4g}"
    return Html(html.escape(str(value)))


def join(parts: Iterable[Any], between: str = "\n") -> Html:
    return Html(between.join(map(text, parts)))


def tag(name: str, *content: Any, **attributes: Any) -> Html:
    """An element; `class_` and `data_x` stand for class and data-x.

    >>> tag("p", "a < b", class_="soft")
    '<p class="soft">a &lt; b</p>'
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{told}>{join(content, '')}</{name}>")


def verdict(value: str) -> Html:
    """A verdict by word, sign and colour; "supported / inconclusive" is two."""
    parts = []
    for word in value.split(" / "):
        colour, sign = VERDICTS.get(word, ("open", ""))
        parts.append(tag("span", f"{sign} {word}", class_=colour))
    return join(parts, " / ") if value else Html("")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], caption: str) -> Html:
    """Rows in a frame that scrolls by itself, so that the page never does sideways."""
    rows = [list(row) for row in rows]
    kinds = [_kind(column[0]) for column in zip(*rows, strict=True)] or [None] * len(head)
    body = [tag("tr", *(tag("td", value, class_=_kind(value)) for value in row)) for row in rows]
    heads = [tag("th", h, scope="col", class_=k) for h, k in zip(head, kinds, strict=True)]
    inner = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *heads)),
        tag("tbody", *body),
    )
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _kind(value: Any) -> str | None:
    if isinstance(value, int | float) or (isinstance(value, str) and " ± " in value):
        return "n"
    if isinstance(value, Html):
        return "v"
    return "t" if len(str(value)) > LONG else None


def more(summary: str, *content: Any) -> Html:
    """What opens on demand."""
    return tag("details", tag("summary", summary), *content)


class Page:
    """Sections, and the plots in them."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.plots: dict[str, Any] = {}
        self.sections: list[Html] = []
        self.names: list[tuple[str, str]] = []
        self._numbers = count()

    def section(self, title: str, *content: Any) -> None:
        """A part of the page with a place in its contents."""
        name = f"s{next(self._numbers)}"
        self.names.append((name, title))
        heading = tag("h2", title, id=f"{name}-title")
        self.sections.append(
            tag("section", heading, *content, id=name, aria_labelledby=f"{name}-title")
        )

    def group(self) -> str:
        """The name of plots that share a legend."""
        return f"g{next(self._numbers)}"

    def plot(self, plot: Plot, group: str) -> Html:
        """The place where a plot is drawn."""
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
        return tag("figure", tag("figcaption", plot.caption), *controls, box, class_=kind)

    def _axes(self, plot: Plot, name: str) -> Html:
        """Two lists of quantities to choose from."""
        found = []
        for axis in ("x", "y"):
            now = plot.layout[f"{axis}axis"]["title"]["text"]
            options = [
                tag("option", style.name(c), value=c,
                    **({"selected": "selected"} if style.name(c) == now else {}))
                for c in plot.columns
            ]  # fmt: skip
            choice = tag("select", *options, data_axis=axis, data_of=name)
            found.append(tag("label", f"{axis} ", choice))
        return tag("div", *found, class_="axes")

    def legend(
        self, series: Sequence[Series], group: str, only: Mapping[str, Sequence[str]] | None = None
    ) -> Html:
        """Buttons that show and hide the series of a group, and some that choose several."""
        buttons = [
            tag("button", tag("span", _mark(s), class_="mark", aria_hidden="true"), s.name,
                type="button", aria_pressed="true", data_group=group, data_series=s.name)
            for s in series
        ]  # fmt: skip
        choices = {"all": [s.name for s in series], **(only or {})} if len(series) > 2 else {}
        buttons += [
            tag("button", f"varying {name}" if name != "all" else "show all", type="button",
                data_group=group, data_only=json.dumps(list(keys)))
            for name, keys in choices.items()
        ]  # fmt: skip
        return tag("fieldset", tag("legend", "Show"), *buttons, class_="legend")

    def write(self, head: Html, foot: Html) -> str:
        """The whole file."""
        plotly, script = plotly_js(), _read("page.js")
        policy = "; ".join([
            "default-src 'none'", f"script-src {_hash(plotly)} {_hash(script)}",
            "style-src 'unsafe-inline'", "img-src data: blob:", "base-uri 'none'",
            "form-action 'none'",
        ])  # fmt: skip
        links = [tag("li", tag("a", title, href=f"#{name}")) for name, title in self.names]
        nav = tag("nav", tag("ul", *links), aria_label="Contents")
        parts = {
            "TITLE": text(self.title),
            "POLICY": policy,
            "BODY": join([
                tag("header", head, nav), tag("main", *self.sections, id="content"),
                tag("footer", foot),
            ]),
            "PLOTS": _embedded(self.plots),
            "PLOTLY": plotly,
            "SCRIPT": script,
        }  # fmt: skip
        # one pass: what is put in is not looked at again
        return re.sub(r"@([A-Z]+)@", lambda match: parts[match[1]], _read("page.html"))


def _mark(s: Series) -> Html:
    if s.points:
        return tag("span", SHAPES[s.symbol], style=f"color:{s.colour}")
    line = tag("line", x1=1, x2=27, y1=6, y2=6, stroke=s.colour, stroke_width=3,
               stroke_dasharray=STROKES[s.line["dash"]])  # fmt: skip
    return tag("svg", line, width=28, height=12)


def plotly_js() -> str:
    """The script of plotly, as its package brings it."""
    try:
        offline = import_module("plotly.offline")  # which has no types
    except ImportError as error:
        raise FlatlensError("A report needs plotly: pip install flatlens[report].") from error
    return str(offline.get_plotlyjs())


def _read(name: str) -> str:
    return (resources.files("flatlens.report") / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _embedded(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    found = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return found.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def download(name: str, data: bytes) -> Html:
    """A link that holds its file."""
    kind = {"pdf": "application/pdf", "png": "image/png"}[name.rpartition(".")[2]]
    href = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return tag("a", f"{name} ({len(data) / 1000:,.0f} kB)", href=href, download=name)
