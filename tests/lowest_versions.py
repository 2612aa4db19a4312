"""Print the lowest declared version of every core dependency, as arguments of pip.

`make test-lowest` installs them: `python tests/lowest_versions.py pytest hypothesis` prints
`torch==2.6 numpy==2.0 ... pytest==8.3.2 hypothesis==6.110`.
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lowest(names: list[str]) -> list[str]:
    """Return `NAME==LOWEST` for the core dependencies and for the named ones of the test extra."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    test = project["optional-dependencies"]["test"]
    declared = [*project["dependencies"], *(need for need in test if _name(need) in names)]
    if missing := set(names) - {_name(need) for need in declared}:
        raise SystemExit(f"The test extra has no {min(missing)}.")
    return [need.replace(">=", "==") for need in declared if ">=" in need]


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0]


if __name__ == "__main__":
    print(" ".join(lowest(sys.argv[1:])))
