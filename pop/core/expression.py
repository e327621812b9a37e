"""Filters on delivery: which messages of its filter a group gets, by their tags or by their properties.

A tag expression is `*` (all messages), or tags with `||` between them: `created || paid`. An SQL expression is a condition of
SQL-92 on the properties of a message, as in RocketMQ's message filter and in Jakarta Messaging 3.1, 3.8.1:

    condition   OR, AND, NOT, parentheses; TRUE, FALSE
    predicate   a = b, <>, !=, <, <=, >, >=;  a [NOT] BETWEEN b AND c;  a [NOT] IN ('x', 'y');  a IS [NOT] NULL;
                a [NOT] LIKE 'x%' [ESCAPE '!']
    value       a name, a string in single quotes ('' is a quote in it), a number, + - * / % and parentheses

A name stands for a property that the message may have; `TAGS` is its tag. Names that aren't words are in double quotes. The
values of properties are text. If such a value is compared or calculated with a number, it counts as the number that it reads
as. A value that doesn't exist, or can't be compared, is NULL. A condition on NULL is neither true nor false, and a message is
delivered only if the whole condition is true.

An expression is compiled once into closures. Its evaluation takes a bounded time: it has no loops, and LIKE is matched without
backtracking.
"""

from __future__ import annotations

from typing import Literal

from penstock.pop.core.sql import Condition, SqlParser
from penstock.pop.errors import ExpressionInvalid
from penstock.store.properties import decode_properties, tag_hash
from penstock.store.record import properties_of

EXPRESSION_BYTES_MAX = 8 * 1024
TAGS_MAX = 64

ExpressionType = Literal["tag", "sql"]

TAG_FIELD = "TAGS"


class Expression:
    """A compiled expression.

    Parameters:
        text: as it was written.
        hashes: hashes of its tags. A message whose queue entry has another hash needn't be read. None for an SQL expression.
        tags: its tags; None for an SQL expression.
        condition: the compiled condition; None for a tag expression.
    """

    __slots__ = ("_condition", "_tags", "hashes", "text")

    def __init__(
        self,
        text: str,
        hashes: frozenset[int] | None,
        tags: frozenset[str] | None = None,
        condition: Condition | None = None,
    ) -> None:
        self.text = text
        self.hashes = hashes
        self._tags = tags
        self._condition = condition

    def matches(self, data: bytes) -> bool:
        """Return whether a message matches; `data` is its record. This is exact, while two tags may have the same hash."""
        properties = decode_properties(properties_of(data))
        if self._tags is not None:
            return properties.tag in self._tags
        assert self._condition is not None
        fields = dict(properties.user)
        if properties.tag:
            fields[TAG_FIELD] = properties.tag
        return self._condition(fields) is True


def compile_expression(text: str, kind: ExpressionType) -> Expression | None:
    """Return a compiled expression; None for one that matches every message.

    Raises:
        ExpressionInvalid: the message says what is wrong, and at which character.
    """
    if kind == "sql":
        return Expression(text, None, condition=SqlParser(text).parse())
    if kind != "tag":
        raise ExpressionInvalid(f"the expression's type is {kind!r}: use 'tag' or 'sql'")
    if text.strip() in ("", "*"):
        return None
    tags = frozenset(tag.strip() for tag in text.split("||"))
    if "" in tags or "*" in tags:
        raise ExpressionInvalid(f"{text[:80]!r} has an empty tag, or '*' beside other tags: write 'a || b', or '*'")
    if len(tags) > TAGS_MAX:
        raise ExpressionInvalid(f"the tag expression has {len(tags)} tags, but {TAGS_MAX} are allowed")
    return Expression(text, frozenset(map(tag_hash, tags)), tags=tags)
