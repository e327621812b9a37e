"""Compares the pending delayed messages of two indexes.

How they are divided into rows depends on when commits were made and on how far time has gone. So the messages are compared one
by one: those that have neither fired nor been recalled, day by day, with the memory of one day. Recalls are compared too, but
for those of messages that were due before the log begins: a running node forgets them.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.store.index.index import Index, KeySpace
from penstock.timer.storedtimers import Described, StoredTimers

PARTS = (KeySpace.TIMER + b"s", KeySpace.TIMER + b"r")
"""Keys of rows that must be the same."""


Found = tuple[str, str | None, str | None]
"""What differs, and how it is in the stored and in the expected index; None if it is missing there."""


def compare_timers(stored: Index, expected: Index, began_ms: int) -> Iterator[Found]:
    """Yield the differences.

    Args:
        stored: the stored index.
        expected: one that was built anew.
        began_ms: when the first record of the log was stored. Earlier recalls are not compared.

    Raises:
        ValueError, struct.error: a row can't be decoded.
    """
    one, other = StoredTimers(stored), StoredTimers(expected)
    for day in sorted(one.days() | other.days()):
        yield from _compare_pending(one.pending(day), other.pending(day))
    recalled = [set(timers.recalled(began_ms)) for timers in (one, other)]
    for minute, position in sorted(recalled[0] ^ recalled[1]):
        sides = ["recalled" if (minute, position) in side else None for side in recalled]
        yield f"recall of the message at position {position}", sides[0], sides[1]
    if one.cursors.encoded() != other.cursors.encoded():
        yield "cursors of the lanes", one.cursors.encoded().hex(), other.cursors.encoded().hex()
    for key in PARTS:
        row, should_be = stored.get(key), expected.get(key)
        if row != should_be:
            yield repr(key), row.hex() if row is not None else None, should_be.hex() if should_be is not None else None
    for (width, bucket), (found, stated) in one.counts().items():
        if found != stated:
            yield f"counts of bucket {bucket} of width {width}", str(stated), str(found)
    for minute, (recalled_n, stated_n) in one.recalled_counts().items():
        if recalled_n != stated_n:
            yield f"count of recalled messages of minute {minute}", str(stated_n), str(recalled_n)


def _compare_pending(one: list[Described], other: list[Described]) -> Iterator[Found]:
    for message in sorted({*one} ^ {*other}):
        position, due_ms, account, size, tag, topic = message
        text = f"account {account}, size {size}, tag {tag}, topic {topic.decode(errors='replace')!r}"
        sides = (text, None) if message in one else (None, text)
        yield f"due at {due_ms} ms, position {position}", *sides
    for position in {message[0] for message in one if one.count(message) > 1} if len({*one}) < len(one) else ():
        yield f"position {position}", "twice", "once"
