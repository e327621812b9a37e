"""Pending messages in columns, and the cursors, against plain tuples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.record import checksum
from penstock.timer.entries import LANES, PENDING_DTYPE, Cursors, Entries

Message = tuple[int, int, int, int, int, bytes]

topics = st.sampled_from([b"plant/%d" % number for number in range(200)] + ["gr\u00fcn".encode(), b""])
messages = st.lists(
    st.tuples(
        st.integers(0, 2**45),
        st.integers(0, 2**63),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
        topics,
    ),
    max_size=30,
)


def entries_of(found: list[Message]) -> Entries:
    names = list(dict.fromkeys(message[5] for message in found))
    rows = [(*message[:5], names.index(message[5])) for message in found]
    return Entries(np.array(rows, dtype=PENDING_DTYPE), names)


def messages_in(entries: Entries) -> list[Message]:
    return [(*row[:5], entries.topics[row[5]]) for row in entries.rows.tolist()]


@given(found=messages)
def test_a_row_of_the_index_says_what_was_put_into_it(found: list[Message]) -> None:
    assert messages_in(Entries.decoded(entries_of(found).encoded())) == found


@given(found=messages.filter(bool), data=st.data())
def test_a_changed_row_is_noticed(found: list[Message], data: st.DataObject) -> None:
    value = bytearray(entries_of(found).encoded())
    at = data.draw(st.integers(0, len(value) - 1))
    value[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match="checksum"):
        Entries.decoded(bytes(value))
    with pytest.raises(ValueError, match="checksum"):
        Entries.decoded(bytes(value[:at]))


@given(found=messages, mask=st.integers(0, 2**30 - 1))
def test_some_messages_have_their_topics_and_no_others(found: list[Message], mask: int) -> None:
    which = [bool(mask >> at & 1) for at in range(len(found))]
    taken = entries_of(found).taken(np.array(which, dtype=bool))
    expected = [message for message, is_wanted in zip(found, which, strict=True) if is_wanted]
    assert messages_in(taken) == expected
    assert sorted(taken.topics) == sorted({message[5] for message in expected})


@given(parts=st.lists(messages, max_size=4))
def test_parts_are_put_together_in_order(parts: list[list[Message]]) -> None:
    assert messages_in(Entries.together([entries_of(part) for part in parts])) == [
        message for part in parts for message in part
    ]


@given(found=messages, fired=messages)
def test_what_is_after_the_cursor_of_its_lane_is_ahead(found: list[Message], fired: list[Message]) -> None:
    cursors = Cursors()
    fired = sorted(fired, key=lambda message: message[:2])
    entries = entries_of(fired)
    cursors.advance(entries, entries.lanes)
    last: dict[int, tuple[int, int]] = {}
    for message in fired:
        last[checksum(message[5]) % LANES] = message[:2]
    expected = [message[:2] > last.get(checksum(message[5]) % LANES, (-1, 0)) for message in found]
    assert cursors.are_ahead(entries_of(found)).tolist() == expected
    assert [cursors.is_ahead(message[5], *message[:2]) for message in found] == expected
    again = Cursors()
    again.decode(cursors.encoded())
    assert again.are_ahead(entries_of(found)).tolist() == expected
