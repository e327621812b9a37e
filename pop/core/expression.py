"""Filters on delivery: which messages of its filter a group gets, by tag or by properties.

A tag expression is `*` (all), or tags with `||` between them: `created || paid`. An SQL expression is a condition of SQL-92 on
the properties of a message, as in RocketMQ's message filter and the Java Message Service (Jakarta Messaging 3.1, 3.8.1):

    condition   OR, AND, NOT, parentheses; TRUE, FALSE
    predicate   a = b, <>, !=, <, <=, >, >=;  a [NOT] BETWEEN b AND c;  a [NOT] IN ('x', 'y');  a IS [NOT] NULL;
                a [NOT] LIKE 'x%' [ESCAPE '!']
    value       a name, a string in single quotes ('' is a quote in it), a number, + - * / % and parentheses

A name is a property that the message may have; `TAGS` is its tag. Names that aren't words stand in double quotes. Property
values are text; compared or calculated with a number they are one, if they can be read as one. What isn't there, and what
can't be compared, is NULL: a condition on it is neither true nor false, and a message is delivered only where the whole is
true.

An expression is compiled once into closures: about 1 us a message and predicate. It can't run for long: it has no loops, and
LIKE is matched without backtracking.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from penstock.pop.errors import ExpressionInvalid
from penstock.store.record import decode_properties, properties_of, tag_hash

EXPRESSION_BYTES_MAX = 8 * 1024
TAGS_MAX = 64
DEPTH_MAX = 64
"""Parentheses and NOTs within each other: bounds the recursion of parser and closures."""

ExpressionType = Literal["tag", "sql"]

Value = str | float | bool | None
Fields = Mapping[str, str]
Evaluate = Callable[[Fields], Value]

TAG_FIELD = "TAGS"


class Expression:
    """A compiled expression.

    Parameters:
        text: as it was written.
        hashes: of the tags that it takes: a queue entry with another one needn't be read. None for any.
        tags: that it takes, if it is a tag expression.
        condition: tells whether a message's fields fulfil it, if it is an SQL expression.
    """

    __slots__ = ("_condition", "_tags", "hashes", "text")

    def __init__(
        self,
        text: str,
        hashes: frozenset[int] | None,
        tags: frozenset[str] | None = None,
        condition: Evaluate | None = None,
    ) -> None:
        self.text = text
        self.hashes = hashes
        self._tags = tags
        self._condition = condition

    def matches(self, data: bytes) -> bool:
        """Return whether a message is wanted; `data` is its record. The hash of a tag may be another tag's: this is exact."""
        properties = decode_properties(properties_of(data))
        if self._tags is not None:
            return properties.tag in self._tags
        assert self._condition is not None
        fields = dict(properties.user)
        if properties.tag:
            fields[TAG_FIELD] = properties.tag
        return self._condition(fields) is True


def compile_expression(text: str, kind: ExpressionType) -> Expression | None:
    """Return an expression, compiled; None for the one that takes every message.

    Raises:
        ExpressionInvalid: says what is wrong, and at which character.
    """
    if kind == "sql":
        return Expression(text, None, condition=_Parser(text).parse())
    if kind != "tag":
        raise ExpressionInvalid(f"the expression's type is {kind!r}: use 'tag' or 'sql'")
    if text.strip() in ("", "*"):
        return None
    tags = frozenset(tag.strip() for tag in text.split("||"))
    if "" in tags or "*" in tags:
        raise ExpressionInvalid(f"{text[:80]!r} has an empty tag, or '*' among others: write 'a || b', or '*'")
    if len(tags) > TAGS_MAX:
        raise ExpressionInvalid(f"the tag expression has {len(tags)} tags, {TAGS_MAX} are allowed")
    return Expression(text, frozenset(map(tag_hash, tags)), tags=tags)


# --- SQL ------------------------------------------------------------------------------------------------------------

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


class _Token(NamedTuple):
    kind: str
    """number, string, name, sign, a word of the language, or end."""
    text: str
    at: int


def _tokens(text: str) -> list[_Token]:
    tokens = []
    at = 0
    stop = len(text.rstrip())
    while at < stop:
        found = _TOKEN.match(text, at)
        if found is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            raise ExpressionInvalid(f"character {at + 1} of the expression, {text[at : at + 20]!r}, is not SQL")
        kind = found.lastgroup or ""
        value = found[kind]
        begins = found.start(kind)
        if kind == "string":
            value = value[1:-1].replace("''", "'")
        elif kind == "quoted":
            kind, value = "name", value[1:-1].replace('""', '"')
        elif kind == "word":
            upper = value.upper()
            kind, value = (upper, upper) if upper in _WORDS else ("name", value)
        tokens.append(_Token(kind, value, begins))
        at = found.end()
    tokens.append(_Token("end", "", len(text)))
    return tokens


_COMPARE: dict[str, Callable[[Value, Value], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "!=": operator.ne,
    "<": operator.lt,  # type: ignore[dict-item]  # only ever called with two of one type
    "<=": operator.le,  # type: ignore[dict-item]
    ">": operator.gt,  # type: ignore[dict-item]
    ">=": operator.ge,  # type: ignore[dict-item]
}


def _number(value: Value) -> float | None:
    """Return a value as a number; None where it isn't one."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        try:
            found = float(value)
        except ValueError:
            return None
        return found if found == found and abs(found) != float("inf") else None
    return value


def _compared(compare: Callable[[Value, Value], bool], left: Value, right: Value) -> bool | None:
    if left is None or right is None:
        return None
    if isinstance(left, bool) or isinstance(right, bool):
        left, right = _truth(left), _truth(right)
        equal = compare in (operator.eq, operator.ne)
        return compare(left, right) if equal and left is not None and right is not None else None
    if isinstance(left, str) and isinstance(right, str):
        return compare(left, right)
    left, right = _number(left), _number(right)
    return None if left is None or right is None else compare(left, right)


def _truth(value: Value) -> bool | None:
    """Return a value as a condition: the text of a property may be one."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower())
    return None


class _Parser:
    """Recursive descent over the grammar above; each method returns the closure of what it has read."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._at = 0
        self._depth = 0

    def parse(self) -> Evaluate:
        condition = self._or()
        if self._token.kind != "end":
            raise self._wrong("the end, AND or OR")
        return lambda fields: _truth(condition(fields))

    # --- tokens

    @property
    def _token(self) -> _Token:
        return self._tokens[self._at]

    def _takes(self, *kinds: str) -> _Token | None:
        """Go behind the next token if it is of one of these kinds, or one of these signs."""
        token = self._token
        if token.kind in kinds or (token.kind == "sign" and token.text in kinds):
            self._at += 1
            return token
        return None

    def _needs(self, kind: str) -> _Token:
        token = self._takes(kind)
        if token is None:
            raise self._wrong(kind)
        return token

    def _wrong(self, wanted: str) -> ExpressionInvalid:
        token = self._token
        found = repr(token.text[:20]) if token.kind != "end" else "its end"
        return ExpressionInvalid(f"at character {token.at + 1} of the expression stands {found}, where {wanted} should be")

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise ExpressionInvalid(f"the expression is nested deeper than {DEPTH_MAX} levels")

    # --- conditions

    def _or(self) -> Evaluate:
        parts = [self._and()]
        while self._takes("OR"):
            parts.append(self._and())
        return parts[0] if len(parts) == 1 else _any_of(parts)

    def _and(self) -> Evaluate:
        parts = [self._not()]
        while self._takes("AND"):
            parts.append(self._not())
        return parts[0] if len(parts) == 1 else _all_of(parts)

    def _not(self) -> Evaluate:
        if not self._takes("NOT"):
            return self._predicate()
        self._deeper()
        inner = self._not()
        self._depth -= 1

        def negated(fields: Fields) -> Value:
            truth = _truth(inner(fields))
            return None if truth is None else not truth

        return negated

    def _predicate(self) -> Evaluate:
        left = self._sum()
        sign = self._takes(*_COMPARE)
        if sign is not None:
            right, compare = self._sum(), _COMPARE[sign.text]
            return lambda fields: _compared(compare, left(fields), right(fields))
        if self._takes("IS"):
            wanted = self._takes("NOT") is None
            self._needs("NULL")
            return lambda fields: (left(fields) is None) is wanted
        negated = self._takes("NOT") is not None
        if self._takes("BETWEEN"):
            found = self._between(left)
        elif self._takes("IN"):
            found = self._in(left)
        elif self._takes("LIKE"):
            found = self._like(left)
        elif negated:
            raise self._wrong("BETWEEN, IN or LIKE")
        else:
            return left
        if not negated:
            return found

        def otherwise(fields: Fields) -> Value:
            truth = found(fields)
            return None if truth is None else not truth

        return otherwise

    def _between(self, left: Evaluate) -> Evaluate:
        low = self._sum()
        self._needs("AND")
        high = self._sum()
        ends: list[Evaluate] = [
            lambda fields: _compared(_COMPARE[">="], left(fields), low(fields)),
            lambda fields: _compared(_COMPARE["<="], left(fields), high(fields)),
        ]
        return _all_of(ends)

    def _in(self, left: Evaluate) -> Evaluate:
        self._needs("(")
        members = [self._sum()]
        while self._takes(","):
            members.append(self._sum())
        self._needs(")")

        def among(member: Evaluate) -> Evaluate:
            return lambda fields: _compared(operator.eq, left(fields), member(fields))

        return _any_of([among(member) for member in members])

    def _like(self, left: Evaluate) -> Evaluate:
        pattern = self._needs("string").text
        escape = ""
        if self._takes("ESCAPE"):
            escape = self._needs("string").text
            if len(escape) != 1:
                raise ExpressionInvalid(f"ESCAPE {escape!r} must be one character")
        parts = _like_parts(pattern, escape)
        return lambda fields: None if (value := left(fields)) is None else _is_like(_text(value), parts)

    # --- values

    def _sum(self) -> Evaluate:
        left = self._product()
        while sign := self._takes("+", "-"):
            left = _calculated(sign.text, left, self._product())
        return left

    def _product(self) -> Evaluate:
        left = self._value()
        while sign := self._takes("*", "/", "%"):
            left = _calculated(sign.text, left, self._value())
        return left

    def _value(self) -> Evaluate:
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
            return _calculated(sign.text, _constant(0.0), operand)
        if token := self._takes("name"):
            name = token.text
            return lambda fields: fields.get(name)
        if token := self._takes("string"):
            return _constant(token.text)
        if token := self._takes("number"):
            return _constant(float(token.text))
        if token := self._takes("TRUE", "FALSE"):
            return _constant(token.text == "TRUE")
        if self._takes("NULL"):
            return _constant(None)
        raise self._wrong("a name, a string, a number or '('")


def _constant(value: Value) -> Evaluate:
    return lambda _: value


def _any_of(parts: list[Evaluate]) -> Evaluate:
    def found(fields: Fields) -> Value:
        unknown = False
        for part in parts:
            truth = _truth(part(fields))
            if truth:
                return True
            unknown = unknown or truth is None
        return None if unknown else False

    return found


def _all_of(parts: list[Evaluate]) -> Evaluate:
    def found(fields: Fields) -> Value:
        unknown = False
        for part in parts:
            truth = _truth(part(fields))
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


def _calculated(sign: str, left: Evaluate, right: Evaluate) -> Evaluate:
    calculate = _CALCULATE[sign]

    def result(fields: Fields) -> Value:
        a, b = _number(left(fields)), _number(right(fields))
        if a is None or b is None:
            return None
        try:
            return calculate(a, b)
        except (ZeroDivisionError, OverflowError):
            return None

    return result


def _text(value: Value) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else str(value)
    return str(value)


ANY_ONE = "\0"
"""In the parts of a pattern: one character, whichever (`_`). No property has U+0000 in it: MQTT 5.0, 1.5.4."""


def _like_parts(pattern: str, escape: str) -> list[str]:
    """Return what stands between the `%` of a pattern, with `ANY_ONE` for `_`.

    Raises:
        ExpressionInvalid: the escape character stands before something that needs none.
    """
    parts = [""]
    characters = iter(pattern)
    for character in characters:
        if escape and character == escape:
            character = next(characters, "")
            if character not in ("%", "_", escape) or not character:
                raise ExpressionInvalid(f"in LIKE {pattern[:40]!r}, {escape!r} must stand before '%', '_' or itself")
            parts[-1] += character
        elif character == "%":
            parts.append("")
        else:
            parts[-1] += ANY_ONE if character == "_" else character
    return parts


def _is_like(value: str, parts: list[str]) -> bool:
    """Match without a regular expression: each part at its first place behind the one before, so never worse than O(n * m)."""
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
