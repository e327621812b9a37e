"""Text from outside as people see it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plant/1/Größe", "plant/1/Größe"),
        ("two words\u00a0and\u3000more", "two words\u00a0and\u3000more"),
        ("a\nforged line", "a\\u000aforged line"),
        ("\x1b[2J\x7f\x9b", "\\u001b[2J\\u007f\\u009b"),
        ("\u202etxt.exe\u2066\u200f\u200b\ufeff", "\\u202etxt.exe\\u2066\\u200f\\u200b\\ufeff"),
        ("\u2028\ud800", "\\u2028\\ud800"),
        ("\U000e0041", "\\udb40\\udc41"),
    ],
)
def test_what_people_can_not_see_becomes_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_characters_may_be_kept() -> None:
    assert printable("a\n\tb\r", keep="\n\t") == "a\n\tb\\u000d"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_json_stays_json_with_the_same_values(text: str) -> None:
    shown = printable(json.dumps({text: text}, ensure_ascii=False))
    assert json.loads(shown) == {text: text}
    assert not {"\n", "\x1b", "\u202e"} & set(shown)
