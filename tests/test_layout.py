"""The layout is the architecture: imports point one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

OURS = {"store", "timer", "pop", "gateway", "spark", "millrace", "bench", "tests"}

ALLOWED: dict[str, set[str]] = {
    "store": set(),
    "timer": {"store"},
    "pop": {"store", "timer"},
    "gateway": {"store", "timer", "pop"},
    # The log's format and nothing else, so that a Spark worker needs no broker.
    "spark": {"store.record", "store.errors"},
    "millrace": {"store", "timer", "pop", "gateway", "spark", "bench"},
}
"""What each package may import, besides itself and what isn't ours. bench/ and tests/ may import anything."""


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Give the full name of each module that a module of `package` imports anywhere: in functions, for types only, by name.

    Of `from a import b` it gives `a.b` where that is a module of ours, else `a`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" if is_module(f"{module}.{alias.name}") else module for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def is_allowed(module: str, package: str) -> bool:
    top = module.partition(".")[0]
    if top not in OURS or top == package:
        return True
    return any(module == allowed or module.startswith(f"{allowed}.") for allowed in ALLOWED[package])


def violations(source: str, package: str) -> list[str]:
    return [module for module in imported_modules(source, package) if not is_allowed(module.lstrip("."), package.split(".")[0])]


def test_imports_point_one_way() -> None:
    found = []
    for package in ALLOWED:
        paths = sorted((ROOT / package).rglob("*.py"))
        assert ROOT / package / "__init__.py" in paths
        for path in paths:
            inside = ".".join(path.relative_to(ROOT).parent.parts)
            found += [f"{path.relative_to(ROOT)} imports {module}" for module in violations(path.read_text("utf-8"), inside)]
    assert found == []


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("store", "import timer"),
        ("store", "from pop.options import PopOptions"),
        ("store", "def later():\n    import gateway.codec"),
        ("store", "if TYPE_CHECKING:\n    from millrace import config"),
        ("store", "import_module('pop.core')"),
        ("store", "importlib.import_module('pop.core')"),
        ("store", "from ..timer import options"),
        ("timer", "from pop import options"),
        ("pop", "import store, gateway"),
        ("gateway", "import millrace"),
        ("gateway", "import tests.conftest"),
        ("spark", "import store"),
        ("spark", "from store import options"),
        ("spark", "from store import *"),
        ("spark", "from store.options import MIB"),
        ("spark", "from store.recorder import x"),
        ("millrace", "import tests"),
    ],
)
def test_an_import_against_the_order_is_found(package: str, source: str) -> None:
    assert len(violations(source, package)) == 1


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("store", "import numpy\nfrom store import record\nfrom .errors import StoreError\nfrom . import record"),
        ("pop", "import timer.wheel\nfrom store.record import Kind"),
        ("spark", "from store import record, errors\nfrom store.record import Kind\nimport pyspark"),
        ("millrace", "import store, timer, pop, gateway, spark"),
    ],
)
def test_an_import_with_the_order_is_left_alone(package: str, source: str) -> None:
    assert violations(source, package) == []
