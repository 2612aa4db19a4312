"""Configuration of the site: `make docs` builds it, offline, and runs every code cell.

The site uses Sphinx with furo and myst-nb: pages stay Markdown that reads well in an editor, every
code cell runs at build time, and the API comes from the docstrings.
"""

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from docutils.utils.math import latex2mathml
from myst_nb.core.read import read_myst_markdown_notebook
from myst_parser.config.main import MdParserConfig

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "src"), str(HERE)]

# The cells run in a process of their own, which has to find the package and the records.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two pages are built at a time
os.environ["FLATLENS_DOCS"] = str(HERE)

project = "flatlens"
author = "The flatlens contributors"
project_copyright = author
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "_notebooks", "jupyter_execute", "reproduction/**.md"]
html_theme = "furo"
html_title = f"flatlens {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
smartquotes = False  # "--lr" is an option and "exact" a Python string: both are copied as they are
html_math_renderer = "mathml"  # browsers draw MathML themselves; MathJax would need the network

# Every cell runs at every build; a cell that raises fails the build, and so does a warning (-W).
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_execution_in_temp = True
nb_merge_streams = True
nb_mime_priority_overrides = [("html", "text/html", 5)]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 4
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository: see linked_files
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "undoc-members": False}
autosummary_generate = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

BACKTICKS = re.compile(r"(?<![`:\w])`([^`\n]+)`(?!`)")


def plain_markup(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make reStructuredText of a docstring written as plain text.

    `name` becomes literal, bars and stars lose their meaning, and an indented formula after a
    blank line becomes a literal block.
    """
    if lines and what in (
        "property",
        "attribute",
    ):  # napoleon would take words before a colon for a type
        lines[0] = lines[0].replace(": ", " – ", 1)
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            pieces = re.split(r"(``[^`]*``)", BACKTICKS.sub(r"``\1``", line))
            pieces[::2] = [re.sub(r"(?<!\\)([|*])", r"\\\1", piece) for piece in pieces[::2]]
            lines[i] = "".join(pieces)
    for i in range(len(lines) - 1, 1, -1):
        begins = lines[i].startswith("    ") and not lines[i - 1].strip()
        text = lines[i - 2]
        if begins and text and not text.startswith(" ") and not text.endswith((":", "::")):
            lines[i - 1 : i - 1] = ["", "::"]


def write_mathml(translator: Any, node: Any) -> None:
    """Write a formula as MathML."""
    block = node.tagname == "math_block"
    formula = latex2mathml.tex2mathml(node.astext(), as_block=block)
    translator.body.append(f'<div class="math">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def write_notebooks() -> None:
    """Write each tutorial as a Jupyter notebook for download."""
    folder = HERE / "_notebooks"
    folder.mkdir(exist_ok=True)
    for page in sorted(HERE.glob("tutorials/*.md")):
        text = page.read_text()
        if "file_format: mystnb" in text:
            notebook = read_myst_markdown_notebook(text, MdParserConfig())
            notebook.cells = [cell for cell in notebook.cells if "remove-cell" not in tags(cell)]
            notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
            nbformat.write(notebook, folder / f"{page.stem}.ipynb")


def tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def setup(app: Any) -> None:
    import generated_pages

    write_notebooks()
    generated_pages.write(HERE)
    app.add_html_math_renderer("mathml", (write_mathml, None), (write_mathml, None))
    app.connect("autodoc-process-docstring", plain_markup, priority=100)
