"""Durations of the public API are seconds or timedeltas, and no name has a unit of time but those of points in time."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
from google.protobuf.message import Message as ProtobufMessage

MODULES = (
    "penstock",
    "penstock.testing",
    "penstock.contrib.faststream",
    "penstock.contrib.taskiq",
    "penstock.contrib.sqlalchemy",
)

POINTS_IN_TIME = {
    "before_ms", "began_ns", "deliver_at_ms", "end_ms", "failed_ms", "from_ms", "last_ms", "next_check_ms", "next_ms",
    "start_ms", "stored_ms", "time_ms", "upcoming_ms", "visible_at_ms",
}  # fmt: skip
"""They are numbers since 1970, and say in which unit."""

DURATIONS = {
    "ack_hold", "close_timeout", "deduplication_age", "delay", "duration", "every", "expire_after", "grace", "graceful_timeout",
    "handling", "invisible", "linger", "max", "min", "poll_interval", "retry_timeout", "timeout", "wait", "window", "within",
}  # fmt: skip

OTHER_FLOATS = {"deadline", "factor", "per_second"}
"""Parameters that are no durations: a time of the loop's clock, a factor and a rate."""

UNIT = re.compile(r"(^|_)(ns|us|ms|s|secs?|seconds|millis|milliseconds|minutes|hours|days)(_|$)")


def public_names(module: Any) -> dict[str, Any]:
    """Return what a module exports; without a list of that, what it defines."""
    if hasattr(module, "__all__"):
        return {name: getattr(module, name) for name in module.__all__}
    return {
        name: member
        for name, member in vars(module).items()
        if not name.startswith("_") and getattr(member, "__module__", "") == module.__name__
    }


def bases_of(kind: type) -> list[type]:
    """Return a class and its bases, without those of other projects."""
    return [base for base in kind.__mro__ if base.__module__.startswith("penstock.")]


def functions_of(member: Any) -> Iterator[tuple[str, Any]]:
    """Yield a public function, or the constructor and the public methods of a class, by name."""
    if inspect.isfunction(member):
        yield "", member
    for kind in bases_of(member) if isinstance(member, type) else ():
        for name, method in vars(kind).items():
            method = inspect.unwrap(getattr(method, "__func__", method))
            if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
                yield name, method


def attributes_of(kind: type) -> Iterator[str]:
    """Yield the public names of a class: of methods, properties and fields, and of what its methods assign."""
    if issubclass(kind, ProtobufMessage):
        yield from (field.name for field in kind.DESCRIPTOR.fields)
        return
    for base in bases_of(kind):
        yield from (name for name in {**vars(base), **inspect.get_annotations(base)} if not name.startswith("_"))
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store) or node.attr.startswith("_"):
                continue
            if ast.unparse(node.value) == "self":
                yield node.attr


@pytest.mark.parametrize("name", MODULES)
def test_each_duration_is_a_number_of_seconds_or_a_timedelta_under_a_name_without_a_unit(name: str) -> None:
    module = pytest.importorskip(name) if name.startswith("penstock.contrib") else import_module(name)
    wrong: set[str] = set()
    for public, member in public_names(module).items():
        member = get_args(member)[0] if hasattr(member, "__metadata__") else member
        if isinstance(member, type):
            wrong |= {f"{public}.{each} has a unit" for each in attributes_of(member) if is_unit(each)}
        for method, function in functions_of(member):
            for parameter in inspect.signature(function).parameters.values():
                at = f"{public}.{method}({parameter.name})"
                if is_unit(parameter.name):
                    wrong.add(f"{at} has a unit")
                annotated = str(parameter.annotation)
                is_duration = parameter.name in DURATIONS and annotated != "tuple[Duration, ...]"
                if is_duration and not {float, timedelta} <= set(get_args(evaluated(annotated, function))):
                    wrong.add(f"{at} is {annotated}")
                if annotated.startswith("float") and parameter.name not in OTHER_FLOATS:
                    wrong.add(f"{at} is a number and not named among the durations")
    assert wrong == set()


def is_unit(name: str) -> bool:
    return UNIT.search(name) is not None and name not in POINTS_IN_TIME


def evaluated(annotation: str, function: Any) -> Any:
    """Return the type that an annotation names in the module of its function."""
    return eval(annotation, vars(import_module(function.__module__)))


def test_the_types_of_the_javascript_client_have_no_unit_but_in_points_in_time() -> None:
    types = Path(__file__).parents[2] / "clients" / "javascript" / "src" / "index.d.ts"
    assert set(re.findall(r"\b[a-z]\w*(?:Ms|Seconds|Millis)\b", types.read_text("utf-8"))) == {"deliverAtMs", "storedMs"}
