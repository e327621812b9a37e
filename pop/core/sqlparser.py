"""The parser of SQL expressions, which compiles a condition into closures."""

from __future__ import annotations

import operator

from penstock.pop.core.sqllike import is_like, like_parts, text_of
from penstock.pop.core.sqltokens import SqlToken, tokenize
from penstock.pop.core.sqlvalues import (
    COMPARE,
    Condition,
    Fields,
    Value,
    all_of,
    any_of,
    calculated,
    compared,
    constant,
    truth_of,
)
from penstock.pop.errors import ExpressionInvalid

DEPTH_MAX = 64
"""Maximum nesting of parentheses and NOTs. It bounds the recursion of the parser and of the closures."""


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
        found = repr(token.text[:20]) if token.kind != "end" else "its end"
        return ExpressionInvalid(f"at character {token.at + 1} of the expression is {found}, where {wanted} should be")

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

        def negated(fields: Fields) -> Value:
            is_true = truth_of(inner(fields))
            return None if is_true is None else not is_true

        return negated

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
            is_true = found(fields)
            return None if is_true is None else not is_true

        return otherwise

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
