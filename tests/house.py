"""Check the rules of the house in the source: sizes, attributes, import cycles, names.

Each rule is a function of a package folder that returns the names that break it. The present
exceptions are in house_exceptions.toml; `python tests/house.py` prints that file anew.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "flatlens"
EXCEPTIONS = Path(__file__).with_name("house_exceptions.toml")

FILE_LINES = 450
FUNCTION_LINES = 60
ATTRIBUTES = 15
# Names that do not say what a thing is, but for a field of saved probes and a public property.
EMPTY_NAMES = {"found", "first", "kept", "made", "one", "parts", "rows", "things", "told"}
PUBLIC_NAMES = {"probes.py:first", "measurement/result.py:rows"}
SETTERS = {"__init__", "__post_init__", "__new__", "__set_name__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources(package: Path) -> dict[str, ast.Module]:
    """Return the parsed files of a package by their path below it."""
    files = sorted(package.rglob("*.py"))
    return {str(file.relative_to(package)): ast.parse(file.read_text()) for file in files}


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Yield functions and classes below a node, at any depth, with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}{child.name}"
            yield name, child
            yield from definitions(child, f"{name}.")
        else:
            yield from definitions(child, prefix)


def long_files(package: Path) -> set[str]:
    """Return the files with more than FILE_LINES lines."""
    files = package.rglob("*.py")
    return {
        str(file.relative_to(package))
        for file in files
        if len(file.read_text().splitlines()) > FILE_LINES
    }


def long_functions(package: Path) -> set[str]:
    """Return the functions with more than FUNCTION_LINES lines; docstrings do not count."""
    return {
        f"{file}:{name}"
        for file, tree in sources(package).items()
        for name, node in definitions(tree)
        if isinstance(node, Function) and length(node) > FUNCTION_LINES
    }


def length(node: Function) -> int:
    """Count the lines of a function from `def` to its end, without the docstring."""
    return spanned(node) - (spanned(node.body[0]) if ast.get_docstring(node) else 0)


def spanned(node: Function | ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def fields(node: ast.ClassDef) -> set[str]:
    """Return the names that a class body annotates or assigns, without class variables."""
    names = set()
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if "ClassVar" not in ast.unparse(statement.annotation):
                names.add(statement.target.id)
        elif isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return names


def assigned(method: Function) -> set[str]:
    """Return the attributes of its first argument that a method assigns."""
    arguments = method.args.posonlyargs + method.args.args
    if not arguments or any(ast.unparse(d) == "staticmethod" for d in method.decorator_list):
        return set()
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == arguments[0].arg
    }


def methods(node: ast.ClassDef) -> list[Function]:
    return [statement for statement in node.body if isinstance(statement, Function)]


def wide_classes(package: Path) -> set[str]:
    """Return the classes whose methods assign more than ATTRIBUTES attributes.

    A dataclass declares its fields in a list that reads from top to bottom, so it may have more.
    """
    wide = set()
    for file, tree in sources(package).items():
        for name, node in definitions(tree):
            if isinstance(node, ast.ClassDef):
                attributes = set().union(*map(assigned, methods(node)))
                if len(attributes) > ATTRIBUTES and not is_dataclass(node):
                    wide.add(f"{file}:{name}")
    return wide


def late_attributes(package: Path) -> set[str]:
    """Return the attributes that a method other than __init__ adds to an object.

    Assigning an attribute again is allowed. A class may also declare it in its body, or inherit it
    from a class of the package.
    """
    classes = {
        node.name: node
        for tree in sources(package).values()
        for _, node in definitions(tree)
        if isinstance(node, ast.ClassDef)
    }
    late = set()
    for file, tree in sources(package).items():
        for name, node in definitions(tree):
            if isinstance(node, ast.ClassDef):
                early = declared(node, classes)
                for method in methods(node):
                    late |= {f"{file}:{name}.{attribute}" for attribute in assigned(method) - early}
    return late


def declared(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return attributes that a class or a base class sets in __init__ or declares in its body."""
    names = fields(node) | {m.name for m in methods(node)}  # a method: property with a setter
    for method in methods(node):
        if method.name in SETTERS:
            names |= assigned(method)
    for base in node.bases:
        parent = classes.get(ast.unparse(base).split("[")[0].split(".")[-1])
        if parent is not None and parent is not node:
            names |= declared(parent, classes)
    return names


def imports(package: Path) -> dict[str, set[str]]:
    """Return for each module the modules of the package that it imports, anywhere in it.

    The __init__ of a package counts if names are imported from it. The root package does not count,
    because it exports everything.
    """
    root = package.name
    modules = {module_name(file, root): tree for file, tree in sources(package).items()}
    graph: dict[str, set[str]] = {}
    for module, tree in modules.items():
        names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in modules else node.module for name in whole}
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                names |= {str(a.value) for a in node.args if isinstance(a, ast.Constant)}
        graph[module] = names & modules.keys() - {module}
    graph[root] = set()
    return graph


def module_name(file: str, root: str) -> str:
    parts = [root, *Path(file).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for module in graph[waiting.pop()] - seen:
            seen.add(module)
            waiting.append(module)
    return seen


def import_cycles(package: Path) -> set[str]:
    """Return the imports that lie on a cycle, including imports inside functions."""
    graph = imports(package)
    closure = {module: reachable(graph, module) for module in graph}
    return {
        f"{module} -> {target}"
        for module, targets in graph.items()
        for target in targets
        if module in closure[target]
    }


def empty_names(package: Path) -> set[str]:
    """Return variables, arguments, attributes, functions and files with a name in EMPTY_NAMES."""
    empty = {
        f"{file}:{name}"
        for file, tree in sources(package).items()
        for node in ast.walk(tree)
        for name in defined_names(node) & EMPTY_NAMES
    }
    files = {str(file.relative_to(package)) for file in package.rglob("*.py")}
    return (empty - PUBLIC_NAMES) | {file for file in files if Path(file).stem in EMPTY_NAMES}


def defined_names(node: ast.AST) -> set[str]:
    """Return the names that one node of a syntax tree defines."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return {name}
        case ast.arg(arg=name):
            return {name}
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.alias(name=name, asname=other):
            return {other or name}
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
            return {name}
        case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            return {name}
    return set()


RULES = {
    rule.__name__: rule
    for rule in (
        long_files,
        long_functions,
        wide_classes,
        late_attributes,
        import_cycles,
        empty_names,
    )
}


def as_toml() -> str:
    """Return the text of house_exceptions.toml for the present tree."""
    lines = [
        "# Today's exceptions to the rules of house.py. The list may only get shorter:",
        "# `python tests/house.py > tests/house_exceptions.toml` after an exception is gone.",
    ]
    for name, rule in RULES.items():
        broken = sorted(rule(PACKAGE))
        lines += ["", f"{name} = [", *(f'    "{entry}",' for entry in broken), "]"]
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_toml())
