"""Selecting the messages that a pop hands out.

Most groups take the next messages of their queue. A group with a filter on delivery, or a FIFO group, is selective: it inspects
each message; see `pop.core.scan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, TypeAlias

from penstock.pop.backoff import backoff_ms
from penstock.pop.core.checkpoint import FROM_QUEUE, FROM_RETRY
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.order import NO_KEY, Parked
from penstock.pop.core.scan import RESPONSE_BYTES, SCAN_ENTRIES, Scan
from penstock.pop.core.state import PopState
from penstock.pop.core.suspicion import ALONE, attempts_and_level, lowest, together_max
from penstock.store.bodies import CHECKPOINT_ENTRY, backoff_code
from penstock.store.queues.lightqueue import ENTRY, ENTRY_BYTES
from penstock.store.store import Store

PASSED_MAX = 4096
"""Entries that a group may skip before a record must say so. It bounds what the group inspects again after a crash."""

READ_AHEAD = 256
"""Entries of its queue that a group reads at a time, even if it takes fewer: finding the first entry costs most of a read."""

Entries: TypeAlias = list[tuple[int, int, int, int, int, int]]
"""Position, offset, size, attempt, source and back-off, as in `pop.core.checkpoint.Entry`. Plain tuples, because each pop makes
some."""

Read = Callable[[int, int], bytes | None]


@dataclass(slots=True)
class Selection:
    """The messages that a pop selected.

    Parameters:
        entries: of the checkpoint; empty if nothing was found.
        noted: properties of the checkpoint record.
        must_note: a record must be written even without entries.
        scanned: offset up to which the group has inspected its queue.
        records: records that were read on the way, by position.
        level: the lowest level of the messages (`pop.core.suspicion`).
    """

    entries: Entries
    noted: dict[str, Any] = field(default_factory=dict)
    must_note: bool = False
    scanned: int = 0
    records: dict[int, bytes | None] = field(default_factory=dict)
    level: int = 0

    def body(self) -> bytes:
        """Return the entries as the body of a checkpoint record."""
        return b"".join(starmap(CHECKPOINT_ENTRY.pack, self.entries))


def select(group: ConsumerGroup, room: int, state: PopState, store: Store, read: Read, in_order_max: int = 1) -> Selection:
    """Select up to `room` messages for a group: new messages and retries in turn, so that neither waits for the other.

    `read` returns the record of a message, or None if it can't be read. `in_order_max` is how many messages of one message
    group a FIFO group may select.
    """
    new, retries = group.visible_new, group.visible_retries
    retries_first = group.retry_turn
    if new > 0 and retries > 0:
        share = room // 2 + (room % 2 if group.retry_turn else 0)
        retries = min(retries, max(share, room - new))
        group.retry_turn = not group.retry_turn
    retries = min(retries, room)
    back, level = _retries(group, retries)
    if level and new > 0 and not retries_first:
        back, level = [], 0  # It is the turn of new messages, and only few may be out with these.
    if group.is_selective:
        scan = Scan(group, state.dead_letters, store, read, in_order_max)
        return _select_by_scan(group, scan, state.mended, back, level, 0 if level else room - len(back), retries_first)
    fresh = [] if level else _new(group, room - len(back), store)
    if not level and len(back) < min(group.visible_retries, room - len(fresh)):  # there are fewer new messages than was thought
        more, level_of_more = _retries(group, min(group.visible_retries, room - len(fresh)))
        if not (fresh and level_of_more):
            back, level = more, level_of_more
    entries = _fitting(group, back, fresh, retries_first)
    if not state.mended:
        return Selection(entries, level=level)
    # The group may have passed messages that retention has dropped. Without a cursor the gap would pass for a lost checkpoint.
    passed = max((offset + 1 for _, offset, _, _, source, _ in entries if source == FROM_QUEUE), default=group.scanned)
    return Selection(entries, {"cursor": passed, "mended": state.mended}, level=level)


def _fitting(group: ConsumerGroup, back: Entries, new: Entries, retries_first: bool) -> Entries:
    """Return the entries that fit into one response. If large messages fill it, new messages and retries are first in turn."""
    entries = back + new if retries_first else new + back
    if group.backoff:
        attempts = {attempt for _, _, _, attempt, _, _ in entries}
        codes = {attempt: backoff_code(backoff_ms(group.backoff, attempt)) for attempt in attempts}
        entries = [(*entry[:5], codes[entry[3]]) for entry in entries]
    left = RESPONSE_BYTES
    for count, entry in enumerate(entries):
        left -= entry[2]
        if left < 0:
            return entries[: max(count, 1)]
    return entries


def _new(group: ConsumerGroup, count: int, store: Store) -> Entries:
    """Return up to `count` messages that were never handed out. The group skips messages that retention has dropped.

    The group skips a backlog of dropped messages in steps of `SCAN_ENTRIES`, and only until retention has trimmed the queue.
    """
    entries: Entries = []
    end, offset, step = group.queue.committed_offset, group.scanned, count
    while len(entries) < count and offset < end:
        first, found = _read(group, offset, step)
        read = [
            (position, at, size, 1, FROM_QUEUE, 0) for at, (position, size, _) in enumerate(ENTRY.iter_unpack(found), first)
        ]
        expires_before = store.retention.expires_before
        if not read:
            offset = end  # all that is left was trimmed
        else:
            offset = read[-1][1] + 1
            if min(read)[0] < expires_before:
                step = SCAN_ENTRIES
                if max(read)[0] < expires_before and not store.copies.any_between(min(read)[0], max(read)[0]):
                    read = []
                read = [entry for entry in read if entry[0] >= expires_before or not store.is_expired(entry[0])]
            entries += read[: count - len(entries)]
        if not entries:
            group.scanned = offset
    return entries


def _read(group: ConsumerGroup, offset: int, count: int) -> tuple[int, bytes]:
    """Read `count` entries of a group's queue from `offset` on, as `LightQueue.read_from` does. It keeps what follows."""
    first, ahead = group.ahead
    at = (offset - first) * ENTRY_BYTES
    if not 0 <= at <= len(ahead) - count * ENTRY_BYTES:
        first, ahead = group.queue.read_from(offset, max(count, READ_AHEAD))
        at = max(offset - first, 0) * ENTRY_BYTES
    found = ahead[at : at + count * ENTRY_BYTES]
    group.ahead = (first, ahead) if at + len(found) < len(ahead) else (0, b"")
    return first + at // ENTRY_BYTES, found


def _retries(group: ConsumerGroup, count: int) -> tuple[Entries, int]:
    """Return the next messages of the retry queue, up to `count` or as many as may be out together, and their lowest level."""
    entries: Entries = []
    lowest_level = 0
    offset = max(group.retry_cursor, group.retry_scanned)
    while len(entries) < count:
        first, found = group.retry.read_from(offset, count - len(entries))
        if not found:
            if not entries:
                # What is left was trimmed, because it can't be read. The cursor stays, since it is what the log says.
                group.retry_scanned = max(offset, first)
            break
        for at, (position, size, aux) in enumerate(ENTRY.iter_unpack(found), first):
            attempts, level = attempts_and_level(aux)
            if level:
                count = 0 if level == ALONE and group.alone else min(count, together_max(level))
            if len(entries) >= count:
                return entries, lowest_level
            lowest_level = lowest(lowest_level, level)
            entries.append((position, at, size, attempts + 1, FROM_RETRY, 0))
        offset = entries[-1][1] + 1
    return entries, lowest_level


def _select_by_scan(
    group: ConsumerGroup, scan: Scan, mended: int, back: Entries, level: int, room: int, retries_first: bool
) -> Selection:
    """Select the messages that a scan finds, and the retries `back`, whose lowest level is `level`."""
    if room > 0:
        scan.run(room)
    if scan.level:
        back = []  # Only few may be out with what was found.
    if not scan.found and not back:
        # It was the turn of new messages, but none is wanted or free. Perhaps they wait for a message in the retry queue.
        back, level = _retries(group, min(group.visible_retries, room))
    new: Entries = [(each.position, each.offset, each.size, each.attempts + 1, FROM_QUEUE, 0) for each in scan.found]
    selected = _fitting(group, back, new, retries_first)
    positions = {position for position, _, _, _, source, _ in selected if source == FROM_QUEUE}
    left_over = [found for found in scan.found if found.position not in positions and not found.was_parked]
    scanned = scan.offset
    if left_over and group.order is None:
        scanned = left_over[0].offset  # the next scan begins with it
    noted: dict[str, Any] = {"cursor": scanned}
    if mended:
        noted["mended"] = mended
    if group.order is not None:
        # The record names the selected messages before the parked ones, so all messages of a key keep the order of the queue.
        scan.parked.extend(Parked(found.offset, found.position, found.size, found.key) for found in left_over)
        keys = {found.position: found.key for found in scan.found}
        noted["keys"] = [keys.get(entry[0], NO_KEY) for entry in selected]
        if scan.parked:
            noted["parked"] = [list(parked[:4]) for parked in sorted(scan.parked)]  # none of them had an attempt
    must_note = bool(scan.parked) or scanned - group.cursor >= PASSED_MAX
    return Selection(selected, noted, must_note, scanned, scan.records, lowest(level, scan.level))
