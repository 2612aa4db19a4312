"""Write the reference pages that come from the package itself: the API and the command line."""

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import flatlens as fl

# The public names by what they are for. A name that stands in no group goes to the last one, so
# that a new public name can never be missing from the page.
GROUPS = {
    "Measure": [
        "measure",
        "Measurement",
        "bounds",
        "Bounds",
        "Inequality",
        "compare",
        "Comparison",
    ],
    "Look at a network once": [
        *("probe", "sketch", "Probe", "InputProbe", "LayerProbe", "ParameterProbe", "Sketch"),
    ],
    "Curvature and representations": ["spectrum", "Spectrum", "representations"],
    "Quantities of a probe": [
        *("sharpness", "sharpness_untied", "adaptive_sharpness", "matrix_normalized_sharpness"),
        *("mls", "nmls", "nmls_through", "weighted_nmls", "normalized_mls", "input_invariant_mls"),
        *("volume", "log_volume", "network_volume", "local_dimension", "max_sensitivity"),
    ],
    "Follow a training": ["Tracker", "every", "at", "log_spaced", "on_interpolation"],
    "Runs and sweeps": ["Run", "read_runs", "sweep"],
    "More": ["Estimate", "FlatlensError"],
}
MODULES = {
    "flatlens.perturb": "Quantities that need passes of their own.",
    "flatlens.geometry.plots": "Figures of tables of representations.",
    "flatlens.penalties": "Differentiable penalties to train with.",
    "flatlens.data": "Data by name.",
    "flatlens.figures": "Figures as functions of the table that `flatlens.read_runs` returns.",
    "flatlens.track.sinks": "Places that a Tracker writes its records to.",
    "flatlens.track.lightning": "Callback for Lightning.",
    "flatlens.track.transformers": "Callback for the Trainer of Transformers.",
}


def write(docs: Path) -> None:
    """Write reference/api.md and reference/command-line.md into the folder of the site."""
    save(docs / "reference" / "api.md", api())
    save(docs / "reference" / "command-line.md", command_line())


def save(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:  # an unchanged page is not built again
        path.write_text(text)


def api() -> str:
    """The page of the public names, each with its signature and docstring."""
    public = [name for name in fl.__all__ if not inspect.ismodule(getattr(fl, name))]
    placed = {name for names in GROUPS.values() for name in names}
    lines = ["# API", "", "`import flatlens as fl` is all that you need to import.", ""]
    for title, names in GROUPS.items():
        shown = [name for name in names if name in public]
        shown += [name for name in public if name not in placed] if title == "More" else []
        lines += [f"## {title}", "", *summary(shown), ""]
        for name in shown:
            lines += directive(f"flatlens.{name}", getattr(fl, name))
    for module, sentence in MODULES.items():
        lines += module_section(module, sentence)
    return "\n".join(lines) + "\n"


def summary(names: list[str]) -> list[str]:
    """A table of names and the first lines of their docstrings."""
    rows = [f"| [`{name}`](#flatlens.{name}) | {first_line(getattr(fl, name))} |" for name in names]
    return ["| name | what it does |", "|---|---|", *rows]


def first_line(value: Any) -> str:
    text = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
    return text.replace("``", "`").replace("|", "\\|").replace("*", "\\*")


def directive(name: str, value: Any) -> list[str]:
    kind = "autoclass" if inspect.isclass(value) else "autofunction"
    if not (inspect.isclass(value) or callable(value)):
        kind = "autodata"
    members = ["   :members:"] if kind == "autoclass" else []
    return ["```{eval-rst}", f".. {kind}:: {name}", *members, "```", ""]


def module_section(module: str, sentence: str) -> list[str]:
    """A section for the public functions and classes of a module, if the module exists."""
    try:
        loaded = import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            return []
        raise
    names = getattr(loaded, "__all__", None) or [
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module
    ]
    lines = [f"## {module}", "", sentence, ""]
    for name in names:
        value = getattr(loaded, name)
        shown_above = getattr(fl, name, None) is value
        if not inspect.ismodule(value) and not shown_above:
            lines += directive(f"{module}.{name}", value)
    return lines


def command_line() -> str:
    """The page of the command line, from the app."""
    from flatlens.cli.app import app

    text = app.generate_docs(output_format="markdown")
    text = re.sub(r"^# flatlens\n", "# Command line\n", text)
    text = text.replace(" -m sphinx", "")  # cyclopts names the program that builds this page
    text = re.sub(r"## Table of Contents\n.*?(?=\*\*Commands\*\*)", "", text, flags=re.S)
    text = re.sub(r"^(?:\* `|    ).*$", options_as_code, text, flags=re.M)
    for command in re.findall(r"^## flatlens ([a-z]+)$", text, flags=re.M):
        text = with_examples(text, command, app[command].help_epilogue)
    return text.rstrip() + "\n"


def options_as_code(line: re.Match[str]) -> str:
    """Mark the options that the help of another option names, so that no line breaks in them."""
    return re.sub(r"(?<=[\s(])(--[a-z]+(?:-[a-z]+)*)(?=[\s,.;)]|$)", r"`\1`", line[0])


def with_examples(text: str, command: str, epilogue: str | None) -> str:
    """Put what stands below the help of a command above its first table of options."""
    head, title, section = text.partition(f"## flatlens {command}\n")
    first_table = re.search(r"^\*\*(Arguments|Parameters|Commands)\*\*:", section, flags=re.M)
    if not epilogue or not first_table:
        return text
    at = first_table.start()
    return f"{head}{title}{section[:at]}```text\n{epilogue}\n```\n\n{section[at:]}"
