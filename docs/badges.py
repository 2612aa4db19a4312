"""Draw the badges of the README from the project's metadata, so that each of them is true.

python docs/badges.py
"""

import re
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures"


def badges() -> dict[str, str]:
    """Return the content of each badge file by its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    paper = project["urls"]["Paper"].removeprefix("https://arxiv.org/abs/")
    torch = next(need for need in project["dependencies"] if re.match(r"torch\b", need))
    shown = {
        "version": project["version"],
        "python": project["requires-python"],
        "torch": torch.removeprefix("torch"),
        "license": project["license"],
        "paper": f"arXiv:{paper}",
    }
    return {f"badge-{label}.svg": svg(label, value) for label, value in shown.items()}


def svg(label: str, value: str) -> str:
    """Draw one badge: a grey label and a blue value."""
    left, right = (7 * len(text) + 14 for text in (label, value))
    text = 'y="14" text-anchor="middle" font-family="Verdana,sans-serif" font-size="11" fill="#fff"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{label}: {escape(value)}">'
        f'<rect width="{left + right}" height="20" rx="3" fill="#555"/>'
        f'<rect x="{left}" width="{right}" height="20" rx="3" fill="#26547c"/>'
        f'<rect x="{left}" width="4" height="20" fill="#26547c"/>'
        f'<text x="{left / 2:g}" {text}>{label}</text>'
        f'<text x="{left + right / 2:g}" {text}>{escape(value)}</text></svg>\n'
    )


if __name__ == "__main__":
    for name, content in badges().items():
        (FOLDER / name).write_text(content)
