"""The choice: which messages a pop hands out.

Most groups simply take the next ones. A group with a filter on delivery, or one that is FIFO, looks at each message: an entry
whose tag has another hash is passed over unread; others are read, and wanted, not wanted, or parked behind their message group.
Nothing is looked at twice: `Group.scanned` is how far it has come, and what is parked has its turn by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, starmap
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from penstock.pop.backoff import backoff_ms
from penstock.pop.core.checkpoint import FROM_QUEUE, FROM_RETRY
from penstock.pop.core.group import Group
from penstock.pop.core.order import NO_KEY, PARKED_MAX, Order, Parked, order_key
from penstock.pop.core.state import PopState
from penstock.store.lightqueue import ENTRY, ENTRY_BYTES, entries_array
from penstock.store.record import CHECKPOINT_ENTRY, backoff_code
from penstock.store.store import Store

RESPONSE_BYTES = 3 * 1024 * 1024
"""A pop stops at this many bytes of records, after the first: gRPC clients refuse answers above 4 MiB by default."""

LOOK_READS_MAX = 1024
"""Records that one pop reads to find what its group wants: about 3 ms of the loop. The next look goes on from there."""

LOOK_ENTRIES_MAX = 65_536
"""Entries that one pop passes over by the hash of their tag alone."""

LOOK_ENTRIES = 2048
"""Entries that are read from the queue in one step."""

PASSED_MAX = 4096
"""Entries that a group may have passed over without a record that says so: bounds what is looked at again after a crash."""

READ_AHEAD = 256
"""Entries of its queue that a group reads at a time, where it takes fewer: a look into the index costs what 100 of them do."""

Entries: TypeAlias = list[tuple[int, int, int, int, int, int]]
"""As in `pop.core.checkpoint.Entry`: position, offset, size, attempt, source, back-off. Plain, since each pop makes some."""

Read = Callable[[int, int], bytes | None]


@dataclass(slots=True)
class Choice:
    """What was chosen."""

    entries: Entries
    """What the checkpoint will have; empty where nothing was found."""
    noted: dict[str, Any] = field(default_factory=dict)
    """Its properties."""
    must_note: bool = False
    """True where a record must be written even without entries."""
    scanned: int = 0
    """How far the group has looked."""
    records: dict[int, bytes | None] = field(default_factory=dict)
    """Records that were read on the way, by position."""

    def body(self) -> bytes:
        """Return the entries as a record has them."""
        return b"".join(starmap(CHECKPOINT_ENTRY.pack, self.entries))


class _Found(NamedTuple):
    """A message that a look has found."""

    position: int
    offset: int
    size: int
    key: int
    parked: bool
    """True where it was parked before."""


def choose(group: Group, room: int, state: PopState, store: Store, read: Read) -> Choice:
    """Return up to `room` messages for a group: new ones and retries in turn, so that neither waits for the other.

    `read` returns a message's record, or None where it can't be read.
    """
    new, retries = group.visible_new, group.visible_retries
    retries_first = group.retry_turn
    if new > 0 and retries > 0:
        share = room // 2 + (room % 2 if group.retry_turn else 0)
        retries = min(retries, max(share, room - new))
        group.retry_turn = not group.retry_turn
    retries = min(retries, room)
    back = _retries(group, retries)
    if group.looks:
        return _look(_Look(group, state, store, read), back, room - len(back), retries_first)
    return Choice(_fitting(group, back, _fresh(group, room - retries, store), retries_first))


def _fitting(group: Group, back: Entries, fresh: Entries, retries_first: bool) -> Entries:
    """Return what fits into an answer. Large messages fill it with what comes first: that, too, is in turn."""
    entries = back + fresh if retries_first else fresh + back
    if group.backoff:
        codes = {attempt: backoff_code(backoff_ms(group.backoff, attempt)) for _, _, _, attempt, _, _ in entries}
        entries = [(*entry[:5], codes[entry[3]]) for entry in entries]
    left = RESPONSE_BYTES
    for count, entry in enumerate(entries):
        left -= entry[2]
        if left < 0:
            return entries[: max(count, 1)]
    return entries


def _fresh(group: Group, count: int, store: Store) -> Entries:
    """Return up to `count` messages that were never handed out. What retention has given up is passed over for good.

    A backlog that expires is passed over by whole steps: about 0.3 s for ten million, and only until it is trimmed.
    """
    step = count
    while True:
        offset, found = _read(group, step)
        entries = [
            (position, at, size, 1, FROM_QUEUE, 0) for at, (position, size, _) in enumerate(ENTRY.iter_unpack(found), offset)
        ]
        expires_before = store.retention.expires_before
        if not entries or min(entries)[0] >= expires_before:
            return entries[:count]
        first, last = min(entries)[0], max(entries)[0]
        if last >= expires_before or store.copies.any_between(first, last):
            left = [entry for entry in entries if entry[0] >= expires_before or not store.is_expired(entry[0])]
            if left:
                return left[:count]
        group.cursor = group.scanned = entries[-1][1] + 1
        step = LOOK_ENTRIES


def _read(group: Group, count: int) -> tuple[int, bytes]:
    """As `LightQueue.read_from` from the group's cursor on. What it reads beyond `count` is kept until it is asked for."""
    first, ahead = group.ahead
    at = (group.cursor - first) * ENTRY_BYTES
    if not 0 <= at <= len(ahead) - count * ENTRY_BYTES:
        first, ahead = group.queue.read_from(group.cursor, max(count, READ_AHEAD) if count else 0)
        at = max(group.cursor - first, 0) * ENTRY_BYTES
    found = ahead[at : at + count * ENTRY_BYTES]
    group.ahead = (first, ahead) if at + len(found) < len(ahead) else (0, b"")
    return first + at // ENTRY_BYTES, found


def _retries(group: Group, count: int) -> Entries:
    """Return the next `count` messages that came back."""
    if count <= 0:
        return []
    offset, found = group.retry.read_from(group.retry_cursor, count)
    rows = enumerate(ENTRY.iter_unpack(found), offset)
    return [(position, at, size, attempts + 1, FROM_RETRY, 0) for at, (position, size, attempts) in rows]


# --- looking --------------------------------------------------------------------------------------------------------


def _look(look: _Look, back: Entries, room: int, retries_first: bool) -> Choice:
    group = look.group
    if room > 0:
        look.run(room)
    if not look.found and not back:
        # It was the turn of new messages, and none is wanted or free: perhaps they wait behind one that comes back.
        back = _retries(group, min(group.visible_retries, room))
    fresh: Entries = [(found.position, found.offset, found.size, 1, FROM_QUEUE, 0) for found in look.found]
    chosen = _fitting(group, back, fresh, retries_first)
    taken = {position for position, _, _, _, source, _ in chosen if source == FROM_QUEUE}
    left_over = [found for found in look.found if found.position not in taken and not found.parked]
    scanned = look.offset
    if left_over and group.order is None:
        scanned = left_over[0].offset  # it comes first the next time
    noted: dict[str, Any] = {"cursor": scanned}
    if look.state.mended:
        noted["mended"] = look.state.mended
    if group.order is not None:
        # What is taken here is named before what is parked is applied, so all of a key are in the order of the queue.
        look.parked.extend(Parked(found.offset, found.position, found.size, found.key) for found in left_over)
        keys = {found.position: found.key for found in look.found}
        noted["keys"] = [keys.get(entry[0], NO_KEY) for entry in chosen]
        if look.parked:
            noted["parked"] = [list(parked) for parked in sorted(look.parked)]
    must_note = bool(look.parked) or scanned - group.cursor >= PASSED_MAX
    return Choice(chosen, noted, must_note, scanned, look.records)


class _Look:
    """One look at a group's queue: from where the last one ended, until there is enough or it has cost enough."""

    def __init__(self, group: Group, state: PopState, store: Store, read: Read) -> None:
        self.group = group
        self.state = state
        self._store = store
        self._read = read
        self._taken: set[int] = set()
        """Keys of what was found: busy as soon as it is handed out."""
        self.found: list[_Found] = []
        self.parked: list[Parked] = []
        self.records: dict[int, bytes | None] = {}
        self.offset = group.scanned
        self._looked = 0

    def run(self, room: int) -> None:
        """Find up to `room` messages."""
        order = self.group.order
        if order is not None:
            for key in islice(order.ready, room):
                parked = order.first(key)
                self._taken.add(key)
                self.found.append(_Found(parked.position, parked.offset, parked.size, key, True))
        bytes_left = RESPONSE_BYTES - sum(found.size for found in self.found)
        for offset, position, size in self._candidates():
            if len(self.found) == room or bytes_left <= 0 or self._looked >= LOOK_READS_MAX:
                return
            if order is not None and order.parked + len(self.parked) >= PARKED_MAX:
                return
            self.offset = offset + 1
            self._looked += 1
            if self._is_wanted(position, size, offset) and self._is_free(order, position, size, offset):
                bytes_left -= size

    def _candidates(self) -> Iterator[tuple[int, int, int]]:
        """Yield offset, position and size of what the tags' hashes leave over. Moves `offset` over the rest."""
        queue, expression = self.group.queue, self.group.expression
        hashes = None if expression is None or expression.hashes is None else list(expression.hashes)
        passed = 0
        while self.offset < queue.committed_offset and passed < LOOK_ENTRIES_MAX:
            first, found = queue.read_from(self.offset, LOOK_ENTRIES)
            entries = entries_array(found)
            if not len(entries):
                return
            wanted = np.arange(len(entries)) if hashes is None else np.flatnonzero(np.isin(entries["aux"], hashes))
            positions, sizes = entries["position"][wanted].tolist(), entries["size"][wanted].tolist()
            for at, position, size in zip(wanted.tolist(), positions, sizes, strict=True):
                yield first + at, position, size
            self.offset = first + len(entries)
            passed += len(entries)

    def _is_wanted(self, position: int, size: int, offset: int) -> bool:
        group = self.group
        if group.dead_letters_of and self.state.dead_letters.of_message(group.queue.id, position, offset) is None:
            return False  # it was sent back
        if position < self._store.retention.expires_before and self._store.is_expired(position):
            return False  # retention has given it up
        data = self.records[position] = self._read(position, size)
        # What can't be read is handed out, and buried there.
        return data is None or group.expression is None or group.expression.takes(data)

    def _is_free(self, order: Order | None, position: int, size: int, offset: int) -> bool:
        """Take a message, or park it; return whether it was taken."""
        key = NO_KEY
        if order is not None:
            if order.knows(position):
                return False  # behind damage a queue is looked at again
            data = self.records[position]
            key = order_key(data) if data is not None else NO_KEY
            if key != NO_KEY and (key in self._taken or not order.is_free(key)):
                self.parked.append(Parked(offset, position, size, key))
                return False
            self._taken.add(key)
        self.found.append(_Found(position, offset, size, key, False))
        return True
