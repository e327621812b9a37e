"""The maps of ARCHITECTURE.md: who appends and applies each kind of record, and who owns each key space."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from penstock.node.config import Config
from penstock.node.parts import NodeParts
from penstock.store.index.rowformats import KeySpace
from penstock.store.record import Kind
from tests.clock import ManualClock
from tests.layout import ROOT, sources

APPENDING = re.compile("append|encode|settle$")
"""Names of the functions that get the kind of a record to append."""


def rows(heading: str) -> Iterator[list[list[str]]]:
    """Yield the words of each cell of a table of ARCHITECTURE.md, given its heading."""
    _, _, table = (ROOT / "ARCHITECTURE.md").read_text("utf-8").partition(heading)
    for line in table.strip().splitlines()[1:]:
        if not line.startswith("|"):
            return
        yield [re.findall(r"[\w/.]+", cell) for cell in line.strip("|").split("|")]


@cache
def trees(enum: str) -> dict[str, ast.Module]:
    """Return the source of each module of the node that names members of an enumeration, by its path."""
    paths = [path.relative_to(ROOT) for _, path in sources()]
    texts = {str(path): (ROOT / path).read_text("utf-8") for path in paths if path.parts[0] != "spark"}
    return {path: ast.parse(text) for path, text in texts.items() if f"{enum}." in text}


def members_in(tree: ast.AST, enum: str) -> set[str]:
    """Return the members of an enumeration that a source names, as `Kind.MESSAGE` does."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == enum
    }


def appended_in(tree: ast.AST) -> set[str]:
    """Return the kinds that a source passes to a function that appends."""
    kinds: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if APPENDING.search(called):
                kinds |= {kind for argument in node.args for kind in members_in(argument, "Kind")}
    return kinds


def test_the_map_of_records_names_who_appends_each_kind() -> None:
    stated = {name: set(appending) for (name,), appending, _ in rows("| kind | appended by | applied by |")}
    assert list(stated) == [kind.name for kind in Kind]
    missing = {(path, kind) for path, tree in trees("Kind").items() for kind in appended_in(tree) if path not in stated[kind]}
    assert missing == set()
    wrong = {
        (path, kind) for kind, paths in stated.items() for path in paths if kind not in members_in(trees("Kind")[path], "Kind")
    }
    assert wrong == set()


def test_the_map_of_records_names_who_applies_each_kind(tmp_path: Path) -> None:
    stated = {name: set(applying) for (name,), _, applying in rows("| kind | appended by | applied by |")}
    parts = NodeParts(replace(Config(), data_dir=tmp_path), ManualClock())
    applying: dict[str, set[str]] = defaultdict(set)
    for kind, functions in parts.store._applies.items():
        for function in functions:
            module = type(getattr(function, "__self__")).__module__  # noqa: B009
            applying[Kind(kind).name].add(module.removeprefix("penstock.").replace(".", "/") + ".py")
    parts.store.abandon()
    assert {kind: paths for kind, paths in stated.items() if paths} == applying


def test_the_map_of_key_spaces_names_who_owns_and_who_uses_each() -> None:
    using: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees("KeySpace").items():
        if not path.startswith("penstock/"):
            for space in members_in(tree, "KeySpace"):
                using[space].add(path)
    stated = list(rows("| key space | key | owner | also used by |"))
    assert [(name, key) for (name,), (key,), _, _ in stated] == [(space.name, space.value.decode()) for space in KeySpace]
    for (name,), _, (owner,), others in stated:
        assert owner not in others
        assert {owner, *others} - {"store/index/index.py"} == using[name] - {"store/index/index.py"}, name
