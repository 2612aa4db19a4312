"""Count the words of a sentence in the README, the pages of the site and the module docstrings.

    python docs/words.py                 # the tree that this file belongs to
    python docs/words.py OTHER_TREE      # the same table for another checkout, to compare

Code, tables, headings, formulas and comments are left out. A sentence ends at a full stop, a
question mark or an exclamation mark, and at the end of a paragraph or list item.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SKIPPED = {"_build", "_notebooks", "jupyter_execute", "reproduction"}
GENERATED = {"api.md", "command-line.md"}  # written at build time
LIMIT = 110  # characters of a line of prose; about 100, with room for a long word or link

FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.S)
BLOCKS = re.compile(
    r"^(?P<fence>```+|:::+|~~~+).*?^(?P=fence)[ ]*$|<!--.*?-->|^\$\$.*?\$\$|^\$\$.*?^.*?\$\$",
    re.S | re.M,
)
LIST_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.|:)\s+")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*`\[]*[A-Z0-9‖`*])")
ABBREVIATIONS = re.compile(r"\b(Eqs?|Figs?|Defs?|Prop|Sec|Appendix|al|e\.g|i\.e|vs|cf|resp)\.")


def prose_lines(markdown: str) -> Iterator[str]:
    """Lines of running text; a blank line stands where a block that is no prose was."""
    text = BLOCKS.sub("\n\n", FRONT_MATTER.sub("", markdown))
    for line in text.splitlines():
        skipped = line.lstrip().startswith(("|", "#", "![")) or line.startswith("    ")
        yield "" if skipped and not LIST_ITEM.match(line) else line


def sentences(lines: Iterator[str]) -> Iterator[str]:
    """Sentences of running text, one paragraph or list item after another."""
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if paragraph and (not line.strip() or LIST_ITEM.match(line)):
            yield from split(" ".join(paragraph))
            paragraph = []
        if line.strip():
            paragraph.append(LIST_ITEM.sub("", line).strip())


def split(paragraph: str) -> Iterator[str]:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    text = ABBREVIATIONS.sub(r"\1", text)
    yield from (sentence for sentence in SENTENCE_END.split(text) if re.search(r"\w", sentence))


def long_lines(markdown: str) -> list[str]:
    """Lines of prose with more than LIMIT characters."""
    return [line for line in prose_lines(markdown) if len(line) > LIMIT]


def docstrings(package: Path) -> Iterator[str]:
    """The docstring of every module of a package."""
    for path in sorted(package.rglob("*.py")):
        yield ast.get_docstring(ast.parse(path.read_text())) or ""


def pages(root: Path) -> Iterator[Path]:
    """README and the hand-written pages of the site."""
    yield root / "README.md"
    for page in sorted((root / "docs").rglob("*.md")):
        if not SKIPPED & set(page.relative_to(root).parts) and page.name not in GENERATED:
            yield page


def table_row(name: str, texts: list[str]) -> str:
    lengths = [len(s.split()) for text in texts for s in sentences(prose_lines(text))]
    longest = sum(length > 30 for length in lengths)
    wide = sum(len(long_lines(text)) for text in texts)
    mean = sum(lengths) / max(len(lengths), 1)
    return f"| {name} | {len(lengths)} | {mean:.1f} | {longest} | {wide} |"


def main(root: Path) -> None:
    print(f"| text | sentences | mean words | above 30 words | lines above {LIMIT} characters |")
    print("|---|--:|--:|--:|--:|")
    texts = {str(page.relative_to(root)): page.read_text() for page in pages(root)}
    for name, text in texts.items():
        print(table_row(name, [text]))
    print(table_row("all pages", list(texts.values())))
    print(table_row("module docstrings", list(docstrings(root / "src" / "flatlens"))))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
