"""What holds for the package as a whole: light imports, one direction, clean pins."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import house
import pytest

import flatlens as fl

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "flatlens"
FILES = sorted(PACKAGE.rglob("*.py"))

# a file may import from its own group and from those before it; all that is not named is core
ORDER = (
    "core",
    "runs",
    "workers",
    "track",
    "data",
    "experiments",  # the old home of the data, for one release
    "training",
    "zoo",
    "analysis",
    "figures",
    "reproduction",
    "report",
    "cli",
    "experiments",  # the old home of the data: a warning and nothing else
)
PIN = re.compile(r"([A-Za-z0-9][\w.-]*)==(\d[\w.]*)")


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter holds after `statement`."""
    code = f"import sys; {statement}; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return set(done.stdout.split())


def test_importing_flatlens_is_light():
    assert not loaded_by("import flatlens") & {"pandas", "matplotlib", "scipy", "cyclopts", "rich"}


@pytest.mark.slow
def test_measuring_needs_no_matplotlib():
    loaded = loaded_by("import flatlens as fl; fl.probe, fl.measure, fl.sharpness")
    assert not loaded & {"pandas", "matplotlib"}


def test_command_line_answers_without_torch():
    loaded = loaded_by("import flatlens.cli")
    assert not loaded & {"torch", "numpy", "pandas", "matplotlib"}


def group(parts: tuple[str, ...]) -> int:
    if parts in (("__init__",), ("__main__",)):  # the doors lead everywhere
        return len(ORDER)
    name = parts[0] if parts else ""
    return ORDER.index(name) if name in ORDER else 0


def imported(file: Path) -> set[tuple[str, ...]]:
    """Names inside flatlens that `file` imports, anywhere in it, as paths below the package."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import in line {node.lineno}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {tuple(n.split(".")[1:]) for n in names if n.split(".")[0] == "flatlens"}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_go_one_way(file):
    own = group(file.relative_to(PACKAGE).with_suffix("").parts)
    late = {".".join(parts) for parts in imported(file) if group(parts) > own}
    assert not late


def test_the_check_of_imports_can_fail(tmp_path):
    (tmp_path / "core.py").write_text("def f():\n    from flatlens.data import load\n")
    (parts,) = imported(tmp_path / "core.py")
    assert group(parts) > group(("core",))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_package_never_imports_its_oracles(file):
    names = re.findall(
        r"^\s*(?:from|import)\s+(?:tests|oracles|traps|house)\b", file.read_text(), re.M
    )
    assert not names


@pytest.mark.parametrize("rule", house.RULES)
def test_the_house_keeps_its_promises(rule):
    broken = house.RULES[rule](PACKAGE)
    exceptions = set(tomllib.loads(house.EXCEPTIONS.read_text())[rule])
    assert not broken - exceptions, f"these break the rule {rule} of tests/house.py"
    assert not exceptions - broken, "no longer needed: take it out of tests/house_exceptions.toml"


BROKEN_HOUSE = {
    "long_files": {"a.py": "x = 1\n" * 451},
    "long_functions": {"a.py": "def f():\n" + "    x = 1\n" * 60},
    "wide_classes": {
        "a.py": "class A:\n    def __init__(self):\n"
        + "".join(f"        self.x{i} = 0\n" for i in range(16))
    },
    "late_attributes": {"a.py": "class A:\n    def f(self):\n        self.x, self.y = 1, 2\n"},
    "import_cycles": {
        "a.py": "def f():\n    from house_of_cards.b import g\n",
        "b.py": "from house_of_cards import c\n",
        "c.py": "from house_of_cards.a import f\n",
    },
    "empty_names": {"a.py": "def f(rows):\n    return rows\n"},
}


@pytest.mark.parametrize("rule", house.RULES)
def test_each_promise_can_be_broken(rule, tmp_path):
    package = tmp_path / "house_of_cards"
    package.mkdir()
    for name, text in BROKEN_HOUSE[rule].items():
        (package / name).write_text(text)
    assert {name for name in house.RULES if house.RULES[name](package)} == {rule}


@pytest.mark.parametrize(
    "line",
    [
        "for found in (): pass",
        "[told for told in ()]",
        "x.kept = 1",
        "def made(): pass",
        "class things: pass",
        "lambda one: 1",
        "def f(*, first=1): pass",
        "a, (b, *rows) = x",
        "import x as parts",
        "with x as found: pass",
        "if (found := 1): pass",
    ],
)
def test_a_name_that_says_nothing_is_seen_wherever_it_is_given(line, tmp_path):
    (tmp_path / "a.py").write_text(line)
    assert house.empty_names(tmp_path)


def test_names_that_hold_such_a_word_and_uses_of_others_names_are_fine(tmp_path):
    (tmp_path / "a.py").write_text("sample_rows = table.rows\nfirst_layer = f(first=1)\n")
    assert not house.empty_names(tmp_path)


def test_what_the_house_allows(tmp_path):
    package = tmp_path / "house_of_cards"
    package.mkdir()
    (package / "a.py").write_text(
        "class A:\n    y: int = 0\n    def __init__(self):\n        self.x = 1\n"
        "    def f(self):\n        self.x += 1\n        self.y = 2\n"
        "class B(A):\n    def g(self):\n        self.x = 3\n"
        "def h():\n    '''words" + "\n" * 70 + "'''\n"
    )
    assert not any(rule(package) for rule in house.RULES.values())


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    matches = {line: PIN.fullmatch(line) for line in lines if line and not line.startswith("#")}
    assert all(matches.values()), [line for line, match in matches.items() if not match]
    return {normal(m[1]): m[2] for m in matches.values() if m}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_are_plain_pins_without_host_or_local_tag():
    assert pins()["torch"] == "2.13.0"
    assert not re.search(r"https?:|file:|--|@|\+", (ROOT / "constraints.txt").read_text())


def test_constraints_pin_every_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = project["dependencies"] + [need for extra in extras.values() for need in extra]
    names = {normal(re.split(r"[\[<>=!~; ]", need)[0]) for need in declared} - {"flatlens"}
    assert names <= pins().keys()


def test_the_extra_of_the_zoo_brings_its_worker_processes():
    """``flatlens zoo`` measures in processes of loky, which the extra sweep installs."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert "flatlens[sweep]" in extras["zoo"]
    assert any(need.startswith("loky") for need in extras["sweep"])


def test_the_old_home_of_the_data_warns():
    with pytest.warns(DeprecationWarning, match=r"now flatlens\.data"):
        old = import_module("flatlens.experiments.data")
    assert old.load is import_module("flatlens.data").load


def test_lazy_names_are_what_the_type_checker_sees():
    tree = ast.parse((ROOT / "src/flatlens/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    for node in ast.walk(block):
        if isinstance(node, ast.ImportFrom) and node.module != "flatlens":
            for name in (alias.name for alias in node.names):
                assert getattr(fl, name) is getattr(import_module(node.module), name), name
