"""The tokens of an SQL expression."""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.pop.errors import ExpressionInvalid

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
        tokens.append(SqlToken(kind, value, begins))
        at = found.end()
    tokens.append(SqlToken("end", "", len(text)))
    return tokens
