"""Build HTML: elements, tables and links. Text from records and files is always escaped."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from flatlens.report.glossary import explain

VERDICTS = {
    "supported": ("good", "✓"), "not supported": ("bad", "✗"), "inconclusive": ("open", "○"),
    "theorem": ("good", "✓"), "observation": ("open", "○"), "not applicable": ("open", "–"),
    "holds": ("good", "✓"), "broken": ("bad", "✗"),
}  # fmt: skip
LONG = 24  # Texts with more letters may take several lines in a table.
TALL = 14  # Tables with more rows scroll inside their frame.


class Html(str):
    """Markup; every other string is text and gets escaped."""


def text(value: Any) -> Html:
    """Return any value as markup: floats with four digits, strings escaped."""
    if isinstance(value, Html):
        return value
    if isinstance(value, float):
        value = "–" if math.isnan(value) else "∞" if value == math.inf else f"{value:.4g}"
    return Html(html.escape(str(value)))


def join(content: Iterable[Any], between: str = "\n") -> Html:
    """Join values as markup."""
    return Html(between.join(map(text, content)))


def tag(name: str, *content: Any, **attributes: Any) -> Html:
    """Return an element; `class_` and `data_x` stand for class and data-x.

    >>> tag("p", "a < b", class_="soft")
    '<p class="soft">a &lt; b</p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{join(content, '')}</{name}>")


def term(name: str, shown: str | None = None) -> Html:
    """Return a name with its explanation on hover, or plain text if it has none."""
    meaning = explain(name)
    return tag("abbr", shown or name, title=meaning) if meaning else text(shown or name)


def verdict(value: str) -> Html:
    """Return a verdict with sign and colour; "supported / inconclusive" is two verdicts."""
    words = []
    for word in value.split(" / "):
        colour, sign = VERDICTS.get(word, ("open", ""))
        words.append(tag("span", f"{sign} {word}", class_=colour))
    return join(words, " / ") if value else Html("")


def table(head: Sequence[Any], content: Iterable[Sequence[Any]], caption: str) -> Html:
    """Return a table in a frame that scrolls by itself, so that the page never scrolls sideways.

    Args:
        head: names of the columns.
        content: the cells, row by row.
        caption: what the table shows; also its name for a screen reader.
    """
    cells = [list(row) for row in content]
    kinds = [_kind(column[0]) for column in zip(*cells, strict=True)] or [None] * len(head)
    body = [tag("tr", *(tag("td", value, class_=_kind(value)) for value in row)) for row in cells]
    heads = [tag("th", h, scope="col", class_=k) for h, k in zip(head, kinds, strict=True)]
    inner = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *heads)),
        tag("tbody", *body),
    )
    kind = "scroll tall-table" if len(cells) > TALL else "scroll"
    return tag("div", inner, class_=kind, tabindex=0, role="region", aria_label=caption)


def _kind(value: Any) -> str | None:
    """Return the class of a cell: number, verdict or long text."""
    if isinstance(value, int | float) or (isinstance(value, str) and " ± " in value):
        return "n"
    if isinstance(value, Html):
        return None if value.startswith("<abbr") else "v"
    return "t" if len(str(value)) > LONG else None


def more(summary: str, *content: Any) -> Html:
    """Return content that opens on demand."""
    return tag("details", tag("summary", summary), *content)


def download(name: str, data: bytes) -> Html:
    """Return a link that contains its file."""
    kind = {"pdf": "application/pdf", "png": "image/png"}[name.rpartition(".")[2]]
    href = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return tag("a", f"{name} ({len(data) / 1000:,.0f} kB)", href=href, download=name)
