"""Filters on delivery: which messages match, which expressions are refused, and how a group skips unwanted messages."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pop.core import selection
from penstock.pop.core.expression import compile_expression
from penstock.pop.core.selection import SCAN_READS_MAX
from penstock.pop.errors import ExpressionInvalid
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Kind, encode
from tests.pop.wiring import FILTER, GROUP, Node, Parts
from tests.waiting import WAIT_S_MAX

RESTARTS = [None, True, False]

FIELDS = {
    "age": "42",
    "name": "O'Brien",
    "unit": "degC",
    "price": "19.99",
    "empty": "",
    "flag": "true",
    "path.to": "x_y",
    "percent": "50%",
    "select": "1",
}

TRUE = [
    "age = 42",
    "age <> 41",
    "age != 41",
    "age > 41.5 AND age < 43",
    "age >= 42 and age <= 42",
    "age = '42'",
    "name = 'O''Brien'",
    "price * 2 > 39.9",
    "price + 1 - 1 = price",
    "-age = -42",
    "age % 5 = 2",
    "age / 2 = 21",
    "(age - 40) * (age - 40) = 4",
    "age BETWEEN 40 AND 42",
    "age NOT BETWEEN 43 AND 50",
    "unit IN ('K', 'degC')",
    "age IN (1, 42)",
    "unit NOT IN ('K', 'F')",
    "missing IS NULL",
    "age IS NOT NULL",
    "empty IS NOT NULL",
    "unit LIKE 'deg%'",
    "unit LIKE 'd_gC'",
    "unit LIKE '%'",
    "unit LIKE '%e%C'",
    "unit NOT LIKE 'K%'",
    "\"path.to\" LIKE 'x!_y' ESCAPE '!'",
    "percent LIKE '%!%' ESCAPE '!'",
    "age LIKE '4_'",
    "flag",
    "flag = TRUE",
    "NOT flag = FALSE",
    "TRUE",
    "NOT NOT TRUE",
    "missing = 1 OR age = 42",
    "TRUE OR missing = 1",
    "path.to = 'x_y'",
    "age = 42 OR age = 1 AND age = 2",
    "TAGS = 'paid'",
    "1e2 = 100",
    "unit > 'aaa'",
    "  age=42\n",
]

NOT_TRUE = [
    "age = 41",
    "missing = 1",
    "missing <> 1",
    "NOT missing = 1",
    "missing = missing",
    "missing NOT IN ('a')",
    "missing NOT LIKE 'a%'",
    "missing NOT BETWEEN 1 AND 2",
    "name > 3",
    "name <> 3",
    "age / 0 = 1",
    "age % 0 = 1",
    "NOT (age / 0 = 1)",
    "unit LIKE 'deg'",
    "unit LIKE 'degC_'",
    "unit LIKE '%x%'",
    "\"path.to\" LIKE 'x!_z' ESCAPE '!'",
    "FALSE",
    "NULL",
    "age",
    "name",
    "missing = 1 AND age = 42",
    "flag > TRUE",
    "unit IN ('K', missing)",
    "unit NOT IN ('K', missing)",
    "AGE = 42",
]

WRONG = [
    "",
    "   ",
    "age =",
    "age = = 1",
    "age 42",
    "(age = 42",
    "age = 42)",
    "age = 'open",
    "age BETWEEN 1",
    "age BETWEEN 1 OR 2",
    "age IN ()",
    "age IN 1",
    "age IN (1,)",
    "age IS 3",
    "age NOT 3",
    "age LIKE 3",
    "age LIKE 'a' ESCAPE 'ab'",
    "age LIKE 'a!' ESCAPE '!'",
    "age LIKE '!a' ESCAPE '!'",
    "age = 1; age = 2",
    "AND",
    "age = @x",
    "NOT",
    "1 +",
    '""',
    "(" * 200 + "1" + ")" * 200,
    "NOT " * 200 + "TRUE",
    "-" * 200 + "1",
]


def takes(text: str, kind: str = "sql", tag: str = "paid", fields: dict[str, str] | None = None) -> bool:
    expression = compile_expression(text, kind)  # type: ignore[arg-type]
    user = list((FIELDS if fields is None else fields).items())
    properties = encode_properties(Properties(user, tag))
    return expression is None or expression.matches(encode(Kind.MESSAGE, b"a/b", b"x", store_ms=1, properties=properties))


def test_a_condition_that_is_true_takes_the_message() -> None:
    for text in TRUE:
        assert takes(text), text


def test_a_condition_that_is_false_or_unknown_does_not() -> None:
    for text in NOT_TRUE:
        assert not takes(text), text


def test_what_is_not_sql_is_refused_with_the_place() -> None:
    for text in WRONG:
        with pytest.raises(ExpressionInvalid, match=r"character|nested|ESCAPE|must be before"):
            compile_expression(text, "sql")


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("*", {"", "a", "b"}),
        ("", {"", "a", "b"}),
        ("a", {"a"}),
        ("a || b", {"a", "b"}),
        (" a||b ", {"a", "b"}),
        ("c", set()),
    ],
)
def test_a_tag_expression_takes_its_tags(text: str, tags: set[str]) -> None:
    assert {tag for tag in ("", "a", "b") if takes(text, "tag", tag)} == tags


@pytest.mark.parametrize("text", ["a ||", "|| a", "a || || b", "a || *", "||".join(map(str, range(65)))])
def test_a_tag_expression_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ExpressionInvalid):
        compile_expression(text, "tag")


@given(st.text(alphabet="abA01 ='<>()%_.+-*/,\"NOTANDRILKE", max_size=60))
def test_any_text_compiles_or_is_refused_and_never_fails_on_a_message(text: str) -> None:
    try:
        compile_expression(text, "sql")
    except ExpressionInvalid:
        return
    assert takes(text) in (True, False)


@given(value=st.text(alphabet="ab%_", max_size=12), pattern=st.text(alphabet="ab%_", max_size=8))
def test_like_is_what_a_regular_expression_would_say(value: str, pattern: str) -> None:
    import re

    wanted = "".join({"%": ".*", "_": "."}.get(c, re.escape(c)) for c in pattern)
    expected = re.fullmatch(wanted, value, re.DOTALL) is not None
    assert takes(f"v LIKE '{pattern}'", fields={"v": value}) is expected


def test_like_does_not_backtrack_without_end() -> None:
    assert not takes("v LIKE '" + "%a" * 500 + "b'", fields={"v": "a" * 10_000})


# --- delivery ---------------------------------------------------------------------------------------------------------


def publish(parts: Parts, *tags: str) -> list[int]:
    return [parts.publish(b"%d" % n, properties=Properties([("n", str(n))], tag))[0] for n, tag in enumerate(tags)]


def bodies(parts: Parts, messages_max: int = 100) -> list[bytes]:
    return [message.body for message in parts.pop(messages_max)]


@pytest.mark.parametrize(
    "settings",
    [{"expression": "a || c"}, {"expression": "TAGS IN ('a', 'c')", "expression_type": "sql"}],
)
@pytest.mark.parametrize("keep_index", RESTARTS)
@pytest.mark.parametrize("fifo", [False, True])
def test_a_group_gets_what_it_wants_and_moves_over_the_rest(
    parts: Parts, settings: dict, keep_index: bool | None, fifo: bool
) -> None:
    parts.create(fifo=fifo, **settings)
    for number, tag in enumerate(("a", "b", "c", "", "b", "a", "b")):
        parts.publish(b"%d" % number, topic=f"plant/{number}", properties=Properties([], tag))
    (first,) = parts.pop(1)
    after = parts if keep_index is None else parts.after_crash("restarted", keep_index=keep_index)
    rest = after.pop()
    assert [first.body, *(message.body for message in rest)] == [b"0", b"2", b"5"]
    assert bodies(after) == []
    after.advance(10_000)
    returned = []
    while messages := after.pop():  # the rest were out together, so each of them returns alone
        returned += [message.body for message in messages]
        after.ack(*(message.handle for message in messages))
    assert sorted(returned) == [b"0", b"2", b"5"]
    after.close()


def test_a_hash_that_two_tags_share_gives_no_wrong_message(parts: Parts) -> None:
    from penstock.store.properties import tag_hash

    first, second = "plumless", "buckeroo"
    assert tag_hash(first) == tag_hash(second)
    parts.create(expression=first)
    publish(parts, second, first, second)
    assert bodies(parts) == [b"1"]


@pytest.mark.parametrize("keep_index", [True, False])
def test_the_number_of_messages_inspected_again_is_bounded(
    parts: Parts, keep_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "PASSED_MAX", 500)
    parts.create(expression="wanted")
    for _ in range(3):
        parts.publish(*([b"x"] * 500), properties=Properties([], "other"))
        assert parts.pop() == []
    parts.publish(b"x", properties=Properties([], "other"))
    assert parts.pop() == []
    after = parts.after_crash("restarted", keep_index=keep_index)
    group = after.group()
    assert group.queue.committed_offset - group.cursor <= 500
    after.publish(b"found", properties=Properties([], "wanted"))
    assert bodies(after) == [b"found"]
    after.close()


def test_a_new_expression_applies_to_messages_that_no_pop_has_inspected(parts: Parts) -> None:
    from dataclasses import replace

    parts.create(expression="a")
    publish(parts, "b", "b")
    assert bodies(parts) == []
    parts.groups.update(GROUP, FILTER, lambda old: replace(old, expression="*"))
    parts.store.commit()
    assert bodies(parts) == []
    publish(parts, "b")
    assert bodies(parts) == [b"0"]


async def test_a_sparse_match_wakes_a_poll_promptly(tmp_path: Path) -> None:
    async with Node(tmp_path / "data") as node:
        group = node.create(expression="n = 7", expression_type="sql")
        poll = asyncio.ensure_future(node.core.polls.poll((group,), 10, 60_000, 30_000))
        await asyncio.sleep(0)
        for _ in range(2):
            node.publish(*([b"x"] * SCAN_READS_MAX), properties=Properties([("n", "1")]))
        node.publish(b"found", properties=Properties([("n", "7")]))
        taken = await asyncio.wait_for(poll, WAIT_S_MAX)
        assert taken is not None
        assert [message.body for message in node.delivered(taken)] == [b"found"]


async def test_a_pop_that_does_not_wait_scans_to_the_end_of_its_queue(tmp_path: Path) -> None:
    async with Node(tmp_path / "data") as node:
        group = node.create(expression="n = 7", expression_type="sql")
        for _ in range(2):
            node.publish(*([b"x"] * SCAN_READS_MAX), properties=Properties([("n", "1")]))
        node.publish(b"found", properties=Properties([("n", "7")]))
        taken = await node.core.polls.poll((group,), 10, 60_000, 0)
        assert taken is not None
        assert [message.body for message in node.delivered(taken)] == [b"found"]
        assert await node.core.polls.poll((group,), 10, 60_000, 0) is None
