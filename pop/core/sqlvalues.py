"""The values of an SQL expression: comparing, calculating and combining them.

Each function here returns a closure over a message's fields, or works on the values of such closures. A value that doesn't
exist, or can't be compared, is NULL (None). A condition on NULL is neither true nor false.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

Value = str | float | bool | None
Fields = Mapping[str, str]
"""The properties of a message by name, and its tag as `TAGS`."""
Condition = Callable[[Fields], Value]
"""A compiled condition or value: returns the value that it has for the fields of a message."""

COMPARE: dict[str, Callable[[Value, Value], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "!=": operator.ne,
    "<": operator.lt,  # type: ignore[dict-item]  # `compared` calls it only with two values of one type
    "<=": operator.le,  # type: ignore[dict-item]
    ">": operator.gt,  # type: ignore[dict-item]
    ">=": operator.ge,  # type: ignore[dict-item]
}


def number_of(value: Value) -> float | None:
    """Return a value as a number; None if it isn't one."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        try:
            found = float(value)
        except ValueError:
            return None
        return found if found == found and abs(found) != float("inf") else None
    return value


def compared(compare: Callable[[Value, Value], bool], left: Value, right: Value) -> bool | None:
    """Return what a comparison of two values yields; None if they can't be compared."""
    if left is None or right is None:
        return None
    if isinstance(left, bool) or isinstance(right, bool):
        left, right = truth_of(left), truth_of(right)
        equal = compare in (operator.eq, operator.ne)
        return compare(left, right) if equal and left is not None and right is not None else None
    if isinstance(left, str) and isinstance(right, str):
        return compare(left, right)
    left, right = number_of(left), number_of(right)
    return None if left is None or right is None else compare(left, right)


def truth_of(value: Value) -> bool | None:
    """Return whether a value is true or false; None if it is neither. The text of a property may be 'true' or 'false'."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower())
    return None


def constant(value: Value) -> Condition:
    """Return a condition that always has the same value."""
    return lambda _: value


def any_of(parts: list[Condition]) -> Condition:
    """Return the OR of conditions."""

    def found(fields: Fields) -> Value:
        unknown = False
        for part in parts:
            truth = truth_of(part(fields))
            if truth:
                return True
            unknown = unknown or truth is None
        return None if unknown else False

    return found


def all_of(parts: list[Condition]) -> Condition:
    """Return the AND of conditions."""

    def found(fields: Fields) -> Value:
        unknown = False
        for part in parts:
            truth = truth_of(part(fields))
            if truth is False:
                return False
            unknown = unknown or truth is None
        return None if unknown else True

    return found


_CALCULATE: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": operator.mod,
}


def calculated(sign: str, left: Condition, right: Condition) -> Condition:
    """Return the result of a calculation; NULL if an operand isn't a number, or the result isn't finite."""
    calculate = _CALCULATE[sign]

    def result(fields: Fields) -> Value:
        a, b = number_of(left(fields)), number_of(right(fields))
        if a is None or b is None:
            return None
        try:
            return calculate(a, b)
        except (ZeroDivisionError, OverflowError):
            return None

    return result
