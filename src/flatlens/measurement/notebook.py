"""Measurements and comparisons as HTML for notebooks: a summary, and tables that fold."""

from __future__ import annotations

from html import escape
from typing import Any

from flatlens.errors import counted
from flatlens.measurement import printing

STYLE = "border-collapse:collapse;font-size:90%;margin:4px 0"
CELL = "padding:1px 8px;text-align:right;font-variant-numeric:tabular-nums"
LEFT = "padding:1px 8px;text-align:left"


def html_table(titles: list[str], lines: list[list[str]]) -> str:
    """Return a table; the first column is aligned to the left.

    Args:
        titles: the titles of the columns.
        lines: the cells of each line, as texts; they are escaped here.

    Returns:
        HTML.
    """

    def line(cells: list[str], tag: str) -> str:
        return "".join(
            f'<{tag} style="{LEFT if k == 0 else CELL}">{escape(text)}</{tag}>'
            for k, text in enumerate(cells)
        )

    body = "".join(f"<tr>{line(cells, 'td')}</tr>" for cells in lines)
    return f'<table style="{STYLE}"><tr>{line(titles, "th")}</tr>{body}</table>'


def folded(title: str, content: str) -> str:
    """Return content that opens with a click on its title."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def paragraphs(texts: list[str]) -> str:
    """Return one paragraph per text."""
    return "".join(f'<p style="margin:4px 0">{escape(text)}</p>' for text in texts)


def measurement_html(m: Any) -> str:
    """Return a Measurement as HTML: what was measured, the headline, and folded tables."""
    headline = [
        [name, " ".join(printing.with_error(name, m.values)).strip(), meaning]
        for name, meaning in printing.MEANINGS.items()
        if name in m.values
    ]
    pieces = [
        paragraphs([printing.what_was_measured(m)]),
        html_table(["quantity", "value", "meaning"], headline),
        paragraphs([printing.what_is_proven(m), *printing.what_is_not_proven(m)]),
        folded(counted(len(m.values), "quantity"), _quantities(m)),
    ]
    if m.rows:
        cells = [[printing.cell(row[k]) for k in printing.LAYER_COLUMNS] for row in m.rows]
        table = html_table(list(printing.LAYER_COLUMNS), cells)
        pieces.append(folded(counted(len(m.rows), "layer"), table))
    if m.bounds:
        pieces.append(folded(counted(len(m.bounds), "inequality"), _inequalities(m)))
    parameters = html_table(["parameter", "measured as"], [list(p) for p in m.coverage.items()])
    pieces.append(folded(counted(len(m.coverage), "parameter"), parameters))
    if m.probe.notes:
        pieces.append(folded(counted(len(m.probe.notes), "note"), paragraphs(m.probe.notes)))
    return f"<div>{''.join(pieces)}</div>"


def _quantities(m: Any) -> str:
    names = [name for name in m.values if not name.endswith("_se")]
    lines = [[name, *printing.with_error(name, m.values)] for name in names]
    return html_table(["quantity", "value", "standard error"], lines)


def _inequalities(m: Any) -> str:
    titles = ["inequality", "equation", "lhs", "rhs", "slack", "verdict", "why"]
    lines = []
    for b in m.bounds:
        verdict = b.verdict if b.holds else f"{b.verdict}, fails"
        sides = [printing.number(value) for value in (b.lhs, b.rhs, b.slack)]
        lines.append([b.name, b.equation, *sides, verdict, b.why])
    return html_table(titles, lines)
