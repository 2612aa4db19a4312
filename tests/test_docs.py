"""The site: every page is reachable, every link inside it leads somewhere, names exist."""

import re
import sys
from pathlib import Path

import pytest

import flatlens as fl

DOCS = Path(__file__).parents[1] / "docs"
GENERATED = {"reference/api.md", "reference/command-line.md"}  # written at build time
PAGES = sorted(
    page
    for page in DOCS.rglob("*.md")
    if not {"_build", "_notebooks", "reproduction"} & set(page.relative_to(DOCS).parts[:-1])
    and str(page.relative_to(DOCS)) not in GENERATED
)
sys.path.insert(0, str(DOCS))
import badges  # noqa: E402
import generated_pages  # noqa: E402
import links  # noqa: E402
import words  # noqa: E402

LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")
TOCTREE = re.compile(r"```\{toctree\}\n(.*?)```", re.S)


def page_id(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files(page):
    for target in LINK.findall(page.read_text()):
        path = (page.parent / target).resolve()
        assert path.exists() or str(path.relative_to(DOCS)) in GENERATED, target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_lines_of_prose_fit_an_editor(page):
    assert not words.long_lines(page.read_text())


def test_every_page_is_in_a_table_of_contents():
    listed = {"index.md"}
    for page in PAGES:
        for block in TOCTREE.findall(page.read_text()):
            entries = [line for line in block.splitlines() if line and not line.startswith(":")]
            names = [re.sub(r".*<(.*)>$", r"\1", entry) for entry in entries]
            listed |= {
                str((page.parent / f"{name}.md").resolve().relative_to(DOCS)) for name in names
            }
    assert {page_id(page) for page in PAGES} <= listed


def test_there_are_thirteen_tutorials_or_more_to_download():
    tutorials = sorted(DOCS.glob("tutorials/[0-9]*.md"))
    assert len(tutorials) >= 13
    for page in tutorials:
        text = page.read_text()
        assert text.startswith("---\nfile_format: mystnb")
        assert f"_notebooks/{page.stem}.ipynb" in text


def test_names_in_the_index_of_equations_exist():
    text = (DOCS / "reference" / "equations.md").read_text()
    for name in re.findall(r"`fl\.([\w.]+)`", text):
        value = fl
        for part in name.split("."):
            value = getattr(value, part)
    for file, test in re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", text):
        code = (DOCS.parent / "tests" / file).read_text()
        assert f"def {test}(" in code or not test, f"{file}::{test}"


def test_every_row_of_the_index_has_a_test_and_a_page():
    text = (DOCS / "reference" / "equations.md").read_text()
    text, _, beside = text.partition("## Beside the paper")
    entries = [line for line in text.splitlines() if re.match(r"\| (?!in the paper|---)", line)]
    assert all(".py" in line for line in beside.splitlines() if line.startswith(("| `", "| m")))
    assert len(entries) > 50
    for line in entries:
        *_, test, page, _ = (cell.strip() for cell in re.split(r"(?<!\\)\|", line))
        assert ".py" in test, line
        assert page.startswith("["), line


def test_the_index_has_every_numbered_equation():
    text = (DOCS / "reference" / "equations.md").read_text()
    numbers = {int(n) for n in re.findall(r"(?:Eqs?\.|,|and) (\d+)(?=[ ,|])", text)}
    for first, last in re.findall(r"(\d+) to (\d+)", text):
        numbers |= set(range(int(first), int(last) + 1))
    assert numbers >= set(range(1, 49))
    for name in (
        *("Def. 3.1", "Lemma 3.2", "Def. 3.3", "Prop. 3.4", "Def. 3.5", "Prop. 3.6", "Def. 3.7"),
        *("Prop. 3.8", "Def. 3.9", "Prop. 3.10", "Lemma B.1", "Lemma C.1", "Def. E.1", "Lemma E.2"),
        *("Def. E.3", "Prop. E.4", "Def. F.1"),
    ):
        assert f"| {name}" in text, name


def test_badges_say_what_the_metadata_says():
    readme = (DOCS.parent / "README.md").read_text()
    for name, content in badges.badges().items():
        assert (DOCS / "figures" / name).read_text() == content, "run python docs/badges.py"
        assert f"docs/figures/{name}" in readme


def test_the_readme_is_short():
    assert len((DOCS.parent / "README.md").read_text().splitlines()) <= 150


def test_the_link_check_finds_missing_files_anchors_and_other_hosts(tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="here"></p><a href="#here"></a><a href="b.html#there"></a><a href="c.html"></a>'
        '<img src="https://example.org/x.png"><a href="https://example.org"></a>'
    )
    (tmp_path / "b.html").write_text("<p></p>")
    assert list(links.broken(tmp_path)) == [
        "a.html loads https://example.org/x.png from another host.",
        "a.html links to b.html#there, and there is no such anchor.",
        "a.html links to c.html, and there is no such file.",
    ]


def test_the_command_line_page_has_every_command_and_no_other_program():
    text = generated_pages.command_line()
    for command in ("demo", "measure", "train", "sweep", "reproduce", "zoo", "report", "data"):
        assert f"## flatlens {command}\n" in text
    assert "sphinx" not in text


def test_the_command_line_page_has_the_examples_of_each_command():
    from flatlens.cli import compare, demo, measure, report, reproduce, sweep, train, zoo

    text = generated_pages.command_line()
    for command in (demo, measure, compare, train, sweep, reproduce, zoo, report):
        assert text.count(command.EXAMPLES) == 1


def test_the_api_page_has_every_public_name():
    text = generated_pages.api()
    for name in fl.__all__:
        assert f":: flatlens.{name}\n" in text or f"## flatlens.{name}\n" in text, name
