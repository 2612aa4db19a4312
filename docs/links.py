"""Check that every link inside the built site leads to a file and an anchor that exist.

    python docs/links.py docs/_build/html

Links to other hosts are not followed, so the check needs no network. Any file that a page would
load from another host is an error, because the site has to work offline.
"""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src"}


class Page(HTMLParser):
    """The anchors and links of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])


def anchors_of(page: Page | None) -> set[str]:
    """Return the anchors of a page; a file that is no page has none."""
    return page.anchors if page else set()


def broken(site: Path) -> Iterator[str]:
    """Yield a sentence for each link that leads nowhere."""
    pages = {path.resolve(): Page(path.read_text()) for path in site.rglob("*.html")}
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for link in page.loaded:
            if urlsplit(link).netloc:
                yield f"{name} loads {link} from another host."
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                yield f"{name} links to {link}, and there is no such file."
            elif parts.fragment and unquote(parts.fragment) not in anchors_of(pages.get(target)):
                yield f"{name} links to {link}, and there is no such anchor."


def main(site: Path) -> int:
    sentences = list(dict.fromkeys(broken(site)))
    print("\n".join(sentences) or f"All links inside {site} lead somewhere.")
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
