"""The layout of the code as a graph: folders and their arrows, and what a module imports. `make layout` prints it.

An arrow is an import at run time. Imports below `if TYPE_CHECKING:` only name types; `with_types` adds them.

A *room* is a folder of a package, such as `pop/core`. A package without folders, such as `store`, is one room. A module beside
the folders of its package, such as `gateway/gateway.py`, is a room of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

PACKAGES = ("store", "timer", "pop", "gateway", "spark")
"""Folders at the root of the checkout that are packages below `penstock`."""


@cache
def sources() -> tuple[tuple[str, Path], ...]:
    """Return the dotted name and the path of each module of `penstock`."""
    return tuple(_sources())


def _sources() -> Iterator[tuple[str, Path]]:
    for top in (*PACKAGES, "penstock"):
        for path in sorted((ROOT / top).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if top == "penstock" and len(relative.parts) > 1 and relative.parts[1] in PACKAGES:
                continue  # a link to a package at the root
            parts = relative.with_suffix("").parts
            name = ".".join(parts if top == "penstock" else ("penstock", *parts))
            yield name.removesuffix(".__init__"), path


@cache
def _nodes(source: str) -> tuple[tuple[ast.AST, bool], ...]:
    """Return all nodes that define or import something, or call a function, and whether each is there for types only."""
    nodes = list(ast.walk(ast.parse(source)))
    for_types = {id(node) for branch in nodes if _is_for_types(branch) for node in ast.walk(branch)}
    return tuple((node, id(node) in for_types) for node in nodes if isinstance(node, _SHOWN))


_SHOWN = (ast.Import, ast.ImportFrom, ast.Call, ast.ClassDef)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported_modules(
    source: str, module: str, *, is_package: bool = False, known: Iterable[str] = (), with_types: bool = True
) -> Iterator[str]:
    """Give the full name of each module that `module` imports anywhere: in functions, by name, and with types for types only.

    Of `from a import b` it gives `a.b` where that is among `known`, else `a`.
    """
    known = frozenset(known)
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node, is_for_types in _nodes(source):
        if is_for_types and not with_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in known else origin
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def room_of(module: str, modules: Mapping[str, Path]) -> str:
    """Return the room of a module of `penstock`."""
    parts = module.split(".")[1:]
    if not parts:
        return "penstock"
    top = parts[0]
    has_folders = any(name.startswith(f"penstock.{top}.") and path.name == "__init__.py" for name, path in modules.items())
    if not has_folders:
        return top
    return "/".join(parts[:2]) if has_folders else top


@cache
def module_graph(*, with_types: bool = False) -> dict[str, set[str]]:
    """Return each module of `penstock` with the modules of `penstock` that it imports."""
    modules = dict(sources())
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        is_package = path.name == "__init__.py"
        imported = imported_modules(path.read_text("utf-8"), name, is_package=is_package, known=modules, with_types=with_types)
        graph[name] = {other for other in imported if other in modules and other != name}
    return graph


@cache
def room_graph() -> dict[str, set[str]]:
    """Return each room with the rooms that its modules import from."""
    modules = dict(sources())
    rooms: dict[str, set[str]] = {}
    for name, imported in module_graph().items():
        room = room_of(name, modules)
        rooms.setdefault(room, set()).update(room_of(other, modules) for other in imported)
    return {room: others - {room} for room, others in rooms.items()}


def package_graph() -> dict[str, set[str]]:
    """Return each package at the root of the checkout with those that its modules import from, also for types only."""
    packages: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for name, imported in module_graph(with_types=True).items():
        package = _package_of(name)
        if package in packages:
            packages[package] |= {_package_of(other) for other in imported} & packages.keys() - {package}
    return packages


def _package_of(module: str) -> str:
    return ".".join(module.split(".")[1:2])


def class_names() -> dict[str, list[str]]:
    """Return the name of each class of `penstock`, but of generated code, with the modules that define it."""
    found: dict[str, list[str]] = {}
    for module, path in sources():
        if path.stem.endswith(("_pb2", "_pb2_grpc")):
            continue
        for node, _ in _nodes(path.read_text("utf-8")):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    return found


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node (Tarjan's algorithm), each sorted."""
    numbers: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        numbers[node] = low[node] = len(numbers)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in numbers:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], numbers[other])
        if low[node] == numbers[node]:
            at = stack.index(node)
            circle, stack[at:] = stack[at:], []
            if len(circle) > 1:
                found.append(sorted(circle))

    for node in sorted(graph):
        if node not in numbers:
            visit(node)
    return found


def main() -> None:
    """Print the rooms with their arrows, lowest first, and the circles among rooms and among modules."""
    rooms = room_graph()
    printed: set[str] = set()
    while len(printed) < len(rooms):
        ready = sorted(room for room in rooms if room not in printed and rooms[room] <= printed)
        for room in ready or sorted(rooms.keys() - printed):
            print(f"{room:<24} -> {', '.join(sorted(rooms[room])) or '-'}")
            printed.add(room)
    for title, found in (("folders", circles(rooms)), ("modules", circles(module_graph()))):
        print(f"circles of {title}: {len(found)}")
        for circle in found:
            print(f"  {' '.join(circle)}")


if __name__ == "__main__":
    main()
