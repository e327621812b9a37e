"""Conditions of SQL-92 on the properties of a message: tokens, values, LIKE, and the parser that compiles them into closures.

`pop.core.expression` has the grammar. Each compiled condition or value is a closure over the fields of a message. A value that
doesn't exist, or can't be compared, is NULL (None). A condition on NULL is neither true nor false.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from math import isfinite
from typing import NamedTuple

from penstock.pop.errors import ExpressionInvalid

DEPTH_MAX = 64
"""Maximum nesting of parentheses and NOTs. It bounds the recursion of the parser and of the closures."""

# --- tokens -----------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<string>'(?:[^']|'')*')
    |(?P<quoted>"(?:[^"]|"")+")
    |(?P<word>[^\W\d][\w.$]*)
    |(?P<sign><>|!=|<=|>=|[=<>()+\-*/%,])
    )""",
    re.VERBOSE,
)

_WORDS = frozenset(
    ("AND", "OR", "NOT", "BETWEEN", "IN", "IS", "NULL", "LIKE", "ESCAPE", "TRUE", "FALSE"),
)


class SqlToken(NamedTuple):
    """A token.

    Parameters:
        kind: number, string, name, sign, end, or a word of the language.
        text: the name, the sign, the word in upper case, or the value.
        at: index of its first character in the expression.
    """

    kind: str
    text: str
    at: int


def tokenize(text: str) -> list[SqlToken]:
    """Return the tokens of an expression; the last one is of the kind `end`.

    Raises:
        ExpressionInvalid: the message says which character can't be read.
    """
    tokens = []
    at = 0
    stop = len(text.rstrip())
    while at < stop:
        match = _TOKEN.match(text, at)
        if match is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            raise ExpressionInvalid(f"character {at + 1} of the expression, {text[at : at + 20]!r}, is not SQL")
        kind = match.lastgroup or ""
        value = match[kind]
        begins = match.start(kind)
        if kind == "string":
            value = value[1:-1].replace("''", "'")
        elif kind == "quoted":
            kind, value = "name", value[1:-1].replace('""', '"')
        elif kind == "word":
            upper = value.upper()
            kind, value = (upper, upper) if upper in _WORDS else ("name", value)
        tokens.append(SqlToken(kind, value, begins))
        at = match.end()
    tokens.append(SqlToken("end", "", len(text)))
    return tokens


# --- values -----------------------------------------------------------------------------------------------------------

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
            number = float(value)
        except ValueError:
            return None
        return number if isfinite(number) else None
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
    return _decided_by(True, parts)


def all_of(parts: list[Condition]) -> Condition:
    """Return the AND of conditions."""
    return _decided_by(False, parts)


def _decided_by(truth: bool, parts: list[Condition]) -> Condition:
    """Return a condition that has the value `truth` as soon as one of its parts has."""

    def combined(fields: Fields) -> Value:
        unknown = False
        for part in parts:
            value = truth_of(part(fields))
            if value is truth:
                return truth
            unknown = unknown or value is None
        return None if unknown else not truth

    return combined


def negated(condition: Condition) -> Condition:
    """Return the NOT of a condition."""

    def negation(fields: Fields) -> Value:
        truth = truth_of(condition(fields))
        return None if truth is None else not truth

    return negation


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


# --- LIKE -------------------------------------------------------------------------------------------------------------


def text_of(value: Value) -> str:
    """Return a value as text, as LIKE compares it."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else str(value)
    return str(value)


ANY_ONE = "\0"
"""Stands for any one character (`_`) in the parts of a pattern. No property contains U+0000 (MQTT 5.0, 1.5.4)."""


def like_parts(pattern: str, escape: str) -> list[str]:
    """Return the parts of a pattern between its `%`, with `ANY_ONE` for each `_`.

    Raises:
        ExpressionInvalid: the escape character is before a character that needs no escape.
    """
    parts = [""]
    characters = iter(pattern)
    for character in characters:
        if escape and character == escape:
            character = next(characters, "")
            if character not in ("%", "_", escape) or not character:
                raise ExpressionInvalid(f"in LIKE {pattern[:40]!r}, {escape!r} must be before '%', '_' or itself")
            parts[-1] += character
        elif character == "%":
            parts.append("")
        else:
            parts[-1] += ANY_ONE if character == "_" else character
    return parts


def is_like(value: str, parts: list[str]) -> bool:
    """Return whether a value matches the parts of a pattern.

    Each part is matched at the first place after the part before it. This takes at most O(n * m), unlike a regular expression.
    """
    if len(parts) == 1:
        return len(value) == len(parts[0]) and _fits(value, 0, parts[0])
    first, *middle, last = parts
    stop = len(value) - len(last)
    if not (_fits(value, 0, first) and len(first) <= stop and _fits(value, stop, last)):
        return False
    at = len(first)
    for part in middle:
        while at + len(part) <= stop and not _fits(value, at, part):
            at += 1
        if at + len(part) > stop:
            return False
        at += len(part)
    return True


def _fits(value: str, at: int, part: str) -> bool:
    if ANY_ONE not in part:
        return value.startswith(part, at)
    return at + len(part) <= len(value) and all(a in (ANY_ONE, b) for a, b in zip(part, value[at:], strict=False))


# --- the parser -------------------------------------------------------------------------------------------------------


class SqlParser:
    """Parses by recursive descent; see `pop.core.expression` for the grammar. Each method returns the closure of what it read.

    Parameters:
        text: the expression.
    """

    def __init__(self, text: str) -> None:
        self._tokens = tokenize(text)
        self._at = 0
        self._depth = 0

    def parse(self) -> Condition:
        """Return the compiled condition.

        Raises:
            ExpressionInvalid: the message says what is wrong, and at which character.
        """
        condition = self._or()
        if self._token.kind != "end":
            raise self._wrong("the end, AND or OR")
        return lambda fields: truth_of(condition(fields))

    # --- tokens

    @property
    def _token(self) -> SqlToken:
        return self._tokens[self._at]

    def _takes(self, *kinds: str) -> SqlToken | None:
        """Consume and return the next token if it has one of these kinds, or is one of these signs."""
        token = self._token
        if token.kind in kinds or (token.kind == "sign" and token.text in kinds):
            self._at += 1
            return token
        return None

    def _needs(self, kind: str) -> SqlToken:
        token = self._takes(kind)
        if token is None:
            raise self._wrong(kind)
        return token

    def _wrong(self, wanted: str) -> ExpressionInvalid:
        token = self._token
        text = repr(token.text[:20]) if token.kind != "end" else "its end"
        return ExpressionInvalid(f"at character {token.at + 1} of the expression is {text}, where {wanted} should be")

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise ExpressionInvalid(f"the expression is nested deeper than {DEPTH_MAX} levels")

    # --- conditions

    def _or(self) -> Condition:
        parts = [self._and()]
        while self._takes("OR"):
            parts.append(self._and())
        return parts[0] if len(parts) == 1 else any_of(parts)

    def _and(self) -> Condition:
        parts = [self._not()]
        while self._takes("AND"):
            parts.append(self._not())
        return parts[0] if len(parts) == 1 else all_of(parts)

    def _not(self) -> Condition:
        if not self._takes("NOT"):
            return self._predicate()
        self._deeper()
        inner = self._not()
        self._depth -= 1
        return negated(inner)

    def _predicate(self) -> Condition:
        left = self._sum()
        sign = self._takes(*COMPARE)
        if sign is not None:
            right, compare = self._sum(), COMPARE[sign.text]
            return lambda fields: compared(compare, left(fields), right(fields))
        if self._takes("IS"):
            wanted = self._takes("NOT") is None
            self._needs("NULL")
            return lambda fields: (left(fields) is None) is wanted
        is_negated = self._takes("NOT") is not None
        if self._takes("BETWEEN"):
            condition = self._between(left)
        elif self._takes("IN"):
            condition = self._in(left)
        elif self._takes("LIKE"):
            condition = self._like(left)
        elif is_negated:
            raise self._wrong("BETWEEN, IN or LIKE")
        else:
            return left
        return negated(condition) if is_negated else condition

    def _between(self, left: Condition) -> Condition:
        low = self._sum()
        self._needs("AND")
        high = self._sum()
        ends: list[Condition] = [
            lambda fields: compared(COMPARE[">="], left(fields), low(fields)),
            lambda fields: compared(COMPARE["<="], left(fields), high(fields)),
        ]
        return all_of(ends)

    def _in(self, left: Condition) -> Condition:
        self._needs("(")
        members = [self._sum()]
        while self._takes(","):
            members.append(self._sum())
        self._needs(")")

        def among(member: Condition) -> Condition:
            return lambda fields: compared(operator.eq, left(fields), member(fields))

        return any_of([among(member) for member in members])

    def _like(self, left: Condition) -> Condition:
        pattern = self._needs("string").text
        escape = ""
        if self._takes("ESCAPE"):
            escape = self._needs("string").text
            if len(escape) != 1:
                raise ExpressionInvalid(f"ESCAPE {escape!r} must be one character")
        parts = like_parts(pattern, escape)
        return lambda fields: None if (value := left(fields)) is None else is_like(text_of(value), parts)

    # --- values

    def _sum(self) -> Condition:
        left = self._product()
        while sign := self._takes("+", "-"):
            left = calculated(sign.text, left, self._product())
        return left

    def _product(self) -> Condition:
        left = self._value()
        while sign := self._takes("*", "/", "%"):
            left = calculated(sign.text, left, self._value())
        return left

    def _value(self) -> Condition:
        if self._takes("("):
            self._deeper()
            inner = self._or()
            self._needs(")")
            self._depth -= 1
            return inner
        if sign := self._takes("+", "-"):
            self._deeper()
            operand = self._value()
            self._depth -= 1
            return calculated(sign.text, constant(0.0), operand)
        if token := self._takes("name"):
            name = token.text
            return lambda fields: fields.get(name)
        if token := self._takes("string"):
            return constant(token.text)
        if token := self._takes("number"):
            return constant(float(token.text))
        if token := self._takes("TRUE", "FALSE"):
            return constant(token.text == "TRUE")
        if self._takes("NULL"):
            return constant(None)
        raise self._wrong("a name, a string, a number or '('")
