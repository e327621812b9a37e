"""Where delayed messages wait: in buckets of the index, and in memory from a few seconds before their minute begins.

A message is first in *fresh* rows, one for each commit. When there are `FRESH_MAX` of them, they are sorted into buckets.
Buckets have four widths: 32 days, a day, an hour, a minute. A message goes to the widest bucket that is not *open* yet. When a
bucket is about to begin, it is opened: its messages are moved to narrower ones. The messages of a minute are loaded into the
window (`timer.window`), from where they fire. After a leap of the clock, or an outage, wider buckets are over when they are
opened. Then their messages are moved to the widest buckets that are over too and have few messages, and these are loaded whole.

Firing deletes nothing here. The cursors say how far each lane has fired, and what a row holds from before them does not count.
A row is deleted when its bucket has fired, or when it is sorted. A recalled message stays in its row too: its position is noted
by the minute in which it was due, and whoever loads the row leaves it out. So neither firing nor a recall has to find a row.

Rows of the index. Numbers in keys are big-endian, those in values little-endian:

    key b"Tf", position u64                             value: fresh messages (`timer.entries`); the position of the first one
    key b"Tb", width u8, bucket u32, position u64       value: messages of a bucket; the position of the first one
    key b"Td", width u8, bucket u32                     value: the numbers of messages in the rows of the bucket, u32 each
                                                        (`counts_of`)
    key b"Tx", minute u32, position u64                 no value: the message at the position was recalled
    key b"Tn", minute u32                               value: how many of the messages in rows that are due in the minute were
                                                        recalled, u32
    key b"Tc"                                           value: the cursors (`timer.entries.Cursors`)

`width` is an index of `WIDTHS_MS`, and a bucket's number is the time at which it begins, divided by its width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from struct import Struct
from typing import Final

import numpy as np

from penstock.store.index.index import Batch, Index, IndexView, KeySpace, after
from penstock.store.options import MINUTE_MS
from penstock.timer.entries import PENDING, PENDING_DTYPE, Column, Cursors, Entries
from penstock.timer.window import DueWindow

WIDTHS_MS: Final = (MINUTE_MS, 60 * MINUTE_MS, 24 * 60 * MINUTE_MS, 32 * 24 * 60 * MINUTE_MS)
"""Widths of buckets in ms. Each is a multiple of the one before."""

EDGES_MS: Final = np.array([*range(0, 60 * MINUTE_MS, MINUTE_MS), *range(60 * MINUTE_MS, 25 * 60 * MINUTE_MS, 60 * MINUTE_MS)])
"""The minutes of the first hour of a bucket, then the hours of its first day, in ms after its begin. The messages between two
of them are counted, for `TimerBuckets.count_before`. Nobody asks for later ones as long as the bucket has not begun."""

FRESH_MAX: Final = 16_384
"""Number of fresh messages that are sorted into buckets at once, which takes some ms. It is also the most that are sorted of a
bucket, or loaded of a minute, in one step; and the most of a wider bucket that is loaded whole."""

LEAD_MS: Final = 5_000
"""Ms before a minute begins at which its messages are loaded."""

WINDOW_MAX: Final = 4_000_000
"""Number of messages in the window from which on no further minute is loaded. When more than that is due at one time, later
messages wait for those before them, whatever their topics."""

MINUTES_REMEMBERED: Final = 65_536
"""Minutes whose number of recalled messages is in memory. All are forgotten at this number."""

DUE_MS_MAX: Final = (2**32 - 2) * MINUTE_MS
"""The latest due time for which keys have room, in ms since 1970."""

FRESH = KeySpace.TIMER + b"f"
CHUNK = KeySpace.TIMER + b"b"
COUNTS = KeySpace.TIMER + b"d"
RECALLED = KeySpace.TIMER + b"x"
RECALLED_COUNTS = KeySpace.TIMER + b"n"
CURSORS = KeySpace.TIMER + b"c"

FRESH_KEY = Struct(">2sQ")
CHUNK_KEY = Struct(">2sBIQ")
BUCKET_KEY = Struct(">2sBI")
RECALLED_KEY = Struct(">2sIQ")
MINUTE_KEY = Struct(">2sI")
COUNT_VALUE = Struct("<I")


class TimerBuckets:
    """The pending delayed messages.

    The way of one, from left to right. Times before `_open_ms` of a width are open: buckets of that width take no more there.

        add ─▶ fresh ─(save)─▶ rows of a bucket ─(_sort)─▶ rows of a narrower one ─(_load)─▶ window ─(take_due)─▶ fires
                 └─(due before _open_ms of minutes)──────────────────────────────────────────▲

    `_sort` moves a row when the time of its bucket comes near, a row a step. `_load` puts a minute into the window when it is
    near, again in steps; until the last one nothing of that minute fires (`_loading_ms`). A step of the clock may move rows
    between two steps, so each step looks for its row by the key that it has now (`_key_now`).
    """

    def __init__(self) -> None:
        self.window = DueWindow()
        self.cursors = Cursors()
        self._index: Index
        self._fresh = bytearray()
        self._fresh_topics: dict[bytes, int] = {}
        self._fresh_names: list[bytes] = []
        self._fresh_saved = 0
        """Bytes of `_fresh` that the index has."""
        self._is_fresh_changed = False
        """Whether the rows of fresh messages must be written anew."""
        self._open_ms = [0] * len(WIDTHS_MS)
        """By width: the buckets before this time are open. For minutes: they are loaded."""
        self._counts: list[dict[int, Column]] = [{} for _ in WIDTHS_MS]
        """By width: the numbers of messages in the rows of each bucket (`counts_of`), with those that were recalled."""
        self._loaded: dict[int, int] = {}
        """Number of pending messages of each minute that is loaded."""
        self._recalled_counts: dict[int, int] = {}
        """By minute: how many of the messages in rows are recalled ones, as of the last save."""
        self._are_counts_known = False
        """Whether those are all minutes with such messages. Otherwise they are some."""
        self._recalled_changes: dict[int, int] = {}
        """By minute: how many more of the messages in rows are recalled ones, since the last save."""
        self._recalled: dict[int, int] = {}
        """Position and due time of recalled messages that may be in memory still."""
        self._recalled_fresh = 0
        """Number of those that are not in the window."""
        self._unsaved: list[bytes] = []
        """Keys of recalls that the index does not have yet."""
        self._are_cursors_changed = False
        self._changed: dict[bytes, bytes | None] = {}
        """Rows of buckets that have changed, until they are saved; None for a deleted one."""
        self._fired_minute = 0
        """Everything that was due before this minute has fired, as of the last save."""
        self._opening: Iterator[int] | None = None
        self._new_keys: dict[bytes, bytes] = {}
        """New keys of rows that a step of the clock has changed while buckets are opened, by their old keys."""
        self._loading_ms = 0
        """When the minute begins that is being loaded; 0 if none is."""
        self._firing_ms: int | None = None
        """When the first one of the messages was due that `take_due` has returned and that have not fired yet."""
        self.moves = 0
        """How often messages of a bucket have been moved to others."""
        self._forget_ms = 0
        """Recalls of messages that were due before this time are not needed any more; 0 if all are."""

    # --- what changes by records ------------------------------------------------------------------------------------

    def add(self, due_ms: int, position: int, account: int, size: int, tag: int, topic: bytes) -> None:
        """Add a message that is pending from now on. See `PENDING_DTYPE`."""
        topics = self._fresh_topics
        number = topics.get(topic)
        if number is None:
            number = topics[topic] = len(topics)
            self._fresh_names.append(topic)
        self._fresh += PENDING.pack(due_ms, position, account, size, tag, number)
        if due_ms < self._open_ms[0]:
            self.window.add(due_ms, position, account, size, tag, topic)
            self._count_loaded(due_ms // MINUTE_MS, 1)

    def fired(self, entries: Entries) -> None:
        """Note that messages have fired, which are in order of due times and then of positions."""
        self.cursors.advance(entries, entries.lanes)
        self._are_cursors_changed = True
        self._firing_ms = None
        self._count_all_loaded(entries, -1)

    def recall(self, position: int, due_ms: int) -> None:
        """Note that a pending message was recalled."""
        self._recalled[position] = due_ms
        self._recalled_fresh += due_ms >= self._open_ms[0]
        self._unsaved.append(_recalled_key(due_ms, position))
        if due_ms < self._open_ms[0]:
            self._count_loaded(due_ms // MINUTE_MS, -1)

    def is_recalled(self, position: int, due_ms: int) -> bool:
        """Return whether a message that was due at a time has been recalled. The answer is right as long as the log has the
        message."""
        return position in self._recalled or self._index.get(_recalled_key(due_ms, position)) is not None

    def find(self, position: int, dues: Sequence[int] | None = None) -> tuple[int, int, int] | None:
        """Return due time in ms since 1970, size and account of a message, or None if it is not pending.

        It reads all rows that may have the message, so it is only for one whose record is damaged.

        Args:
            position: of the message.
            dues: when it may be due, if that is known.
        """
        keys = [
            key
            for width, counts in enumerate(self._counts)
            for bucket in (counts if dues is None else {due_ms // WIDTHS_MS[width] for due_ms in dues} & counts.keys())
            for key in self._chunk_keys(width, bucket)
            if CHUNK_KEY.unpack(key)[3] <= position  # the first position of a row is its lowest one
        ]
        chunks = (self._decoded(key, value) for key in keys if (value := self._value(key)) is not None)
        for entries in chain([self._fresh_entries()], chunks):
            named = entries.taken(entries.rows["position"] == position)
            for due_ms, size, account in named.rows[self.cursors.are_ahead(named)][["due", "size", "account"]].tolist():
                return None if self.is_recalled(position, due_ms) else (due_ms, size, account)
        return None

    def forget_recalled(self, before_ms: int) -> None:
        """Let the next save forget the recalls of messages that were due before a time, because the log has none of them."""
        self._forget_ms = max(self._forget_ms, before_ms)

    def delay(self, due_after_ms: int, due_before_ms: int, position_from: int, by_ms: int) -> None:
        """Let pending messages be due later, because the clock is stepped.

        Args:
            due_after_ms, due_before_ms: between these times, both excluded, they were due.
            position_from: they were stored there or later.
            by_ms: by how much later they are due.
        """
        self.moves += 1
        loaded = self.window.take_where(due_after_ms + 1, due_before_ms, position_from)
        self._count_all_loaded(self._unrecalled(loaded), -1)
        fresh = self._fresh_entries()
        are_moved = self._are_between(fresh, due_after_ms, due_before_ms, position_from)
        moved = [fresh.taken(are_moved)]
        if are_moved.any():
            self._set_fresh(fresh.taken(~are_moved))
        for width, counts in enumerate(self._counts):
            first, last = (due_after_ms + 1) // WIDTHS_MS[width], (due_before_ms - 1) // WIDTHS_MS[width]
            for bucket in [number for number in counts if first <= number <= last]:
                for key in self._chunk_keys(width, bucket):
                    value = self._value(key)
                    if value is None:
                        continue
                    chunk = self._decoded(key, value)
                    are_moved = self._are_between(chunk, due_after_ms, due_before_ms, position_from)
                    if are_moved.any():
                        moved.append(chunk.taken(are_moved))
                        self._changed[key] = None
                        self._count(width, bucket, chunk, -1)
                        left = self._put_into_row(width, bucket, chunk.taken(~are_moved))
                        if self._opening is not None and left is not None and left != key:
                            self._new_keys[key] = left
        unsaved = {*self._unsaved}
        for number, chunk in enumerate(moved):
            for due_ms, position, account, size, tag, topic in chunk.taken(self.cursors.are_ahead(chunk)).rows.tolist():
                if not self.is_recalled(position, due_ms):
                    self.add(due_ms + by_ms, position, account, size, tag, chunk.topics[topic])
                elif number or _recalled_key(due_ms, position) in unsaved:  # in a row, or the next save would think so
                    self._count_recalled(due_ms // MINUTE_MS, -1)

    def _are_between(self, entries: Entries, due_after_ms: int, due_before_ms: int, position_from: int) -> Column:
        rows = entries.rows
        is_delayed: Column = (rows["due"] > due_after_ms) & (rows["due"] < due_before_ms) & (rows["position"] >= position_from)
        return is_delayed

    # --- what is pending --------------------------------------------------------------------------------------------

    def is_pending(self, topic: bytes, due_ms: int, position: int) -> bool:
        """Return whether a message has neither fired nor been recalled. The answer is as right as that of `is_recalled`."""
        return self.cursors.is_ahead(topic, due_ms, position) and not self.is_recalled(position, due_ms)

    def fresh(self) -> Entries:
        """Return the messages that are in no bucket, and some that have fired or were recalled."""
        return self._fresh_entries()

    def between(self, begin_ms: int, end_ms: int) -> list[tuple[int, int, int]]:
        """Return begin, width and number of the buckets that have a part of the time between two, by their begins."""
        return sorted(
            (bucket * width_ms, width, bucket)
            for width, width_ms in enumerate(WIDTHS_MS)
            for bucket in self._counts[width]
            if bucket * width_ms < end_ms and (bucket + 1) * width_ms > begin_ms
        )

    def row_from(self, width: int, bucket: int, position: int) -> tuple[int, Entries] | None:
        """Return the next row of a bucket whose first position is at or after one: that position and the messages of the row,
        also some that have fired or were recalled. `is_saved` must be true."""
        start = CHUNK_KEY.pack(CHUNK, width, bucket, position)
        row = self._index.first_at_or_after(start, BUCKET_KEY.pack(CHUNK, width, bucket))
        return (CHUNK_KEY.unpack(row[0])[3], self._decoded(*row)) if row is not None else None

    def count_before(self, end_ms: int) -> int:
        """Return how many messages are pending that are due before a time, with those that are late.

        It reads no messages, and knows of committed recalls only. Right after a start, and while buckets that have many
        messages are opened, it does not know all of them.

        Args:
            end_ms: a whole minute in ms since 1970, up to an hour from the next one, or a whole hour, up to a day from the next
                one.
        """
        loaded_ms = self._open_ms[0]
        fresh = self._fresh_entries()
        dues = fresh.rows["due"]
        count = len(self._pending_fresh(fresh.taken((dues >= loaded_ms) & (dues < end_ms))))
        count += sum(number for minute, number in self._loaded.items() if minute * MINUTE_MS < end_ms)
        for width_ms, of_buckets in zip(WIDTHS_MS, self._counts, strict=True):
            for bucket, counts in of_buckets.items():
                begin_ms = bucket * width_ms
                if begin_ms + width_ms <= end_ms:
                    count += int(counts[0]) if begin_ms >= loaded_ms else 0
                elif begin_ms < end_ms:
                    count += int(counts[1:][EDGES_MS[:-1] < end_ms - begin_ms].sum())
        count -= sum(number for _, number in self._recalled_counts_between(loaded_ms, end_ms))
        return max(count, 0)

    # --- firing -----------------------------------------------------------------------------------------------------

    def is_opening_due(self, now_ms: int) -> bool:
        """Return whether `open_next` has work to do."""
        return self._opening is not None or (now_ms + LEAD_MS >= self._open_ms[0] and len(self.window) < WINDOW_MAX)

    @property
    def is_saved(self) -> bool:
        """Whether the index knows what has fired, was recalled, or was moved by a step of the clock."""
        return not (self._unsaved or self._changed or self._are_cursors_changed)

    @property
    def in_memory(self) -> int:
        """Number of messages in memory, with recalled ones. Those that are fresh and due soon count twice."""
        return len(self.window) + len(self._fresh) // PENDING.size + len(self._recalled)

    def open_next(self, now_ms: int) -> int:
        """Do one step of opening the buckets and loading the minutes whose time has come. Return how many messages it took up.

        `is_saved` must be true, because what has fired is left out for ever. The caller saves what the step has changed.
        """
        assert self.is_saved
        if self._opening is None:
            minute = (now_ms + LEAD_MS) // MINUTE_MS
            self._opening = self._open((minute + 1) * MINUTE_MS)
        count = next(self._opening, None)
        if count is None:
            self._opening = None
            self._new_keys.clear()
        return count or 0

    def take_due(self, now_ms: int, limit: int) -> Entries:
        """Remove and return up to `limit` messages that are due, in order. The caller fires them, or puts them back."""
        if self._loading_ms:
            now_ms = min(now_ms, self._loading_ms - 1)
        taken = self.window.take(now_ms, limit)
        if self._recalled and len(taken):
            taken = taken.taken(np.array([position not in self._recalled for position in taken.rows["position"].tolist()]))
        if len(taken):
            self._firing_ms = int(taken.rows["due"][0])
        return taken

    def put_back(self, taken: Entries) -> None:
        """Take back messages that `take_due` has just returned."""
        self.window.put_back(taken)
        self._firing_ms = None

    def next_due_ms(self) -> int | None:
        """Return a time before which `take_due` returns nothing, in ms since 1970; None if nothing is pending.

        `open_next` must be called before that time too, when `is_opening_due` says so.
        """
        is_more = (self._fresh or any(self._counts)) and len(self.window) < WINDOW_MAX
        times_ms = [self._open_ms[0] - LEAD_MS if self._opening is None else 0] if is_more or self._opening is not None else []
        due_ms = self.window.next_due_ms()
        if due_ms is not None:
            times_ms.append(max(due_ms, self._loading_ms))
        return min(times_ms, default=None)

    def _open(self, until_ms: int) -> Iterator[int]:
        """Open buckets step by step. Yield the number of messages of each step."""
        for width in range(len(WIDTHS_MS) - 1, 0, -1):
            width_ms = WIDTHS_MS[width]
            self._open_ms[width] = max(self._open_ms[width], -(-until_ms // width_ms) * width_ms)
        for width in range(len(WIDTHS_MS) - 1, 0, -1):
            width_ms = WIDTHS_MS[width]
            for bucket in sorted(number for number in self._counts[width] if number * width_ms < until_ms):
                counts = self._counts[width].get(bucket)  # a step of the clock may have moved all of its messages
                if counts is not None and ((bucket + 1) * width_ms > until_ms or counts[0] > FRESH_MAX):
                    for key in self._chunk_keys(width, bucket):
                        yield self._sort(width, bucket, key, until_ms)
        while self._open_ms[0] < until_ms:
            yield from self._load(until_ms)
            if len(self.window) >= WINDOW_MAX:
                return

    def _sort(self, width: int, bucket: int, key: bytes, until_ms: int) -> int:
        """Move the messages of one row to narrower buckets, which are open before a time. Return their number."""
        key = self._key_now(key)
        value = self._index.get(key)
        if value is None:
            return 0  # a step of the clock has moved all of them
        chunk = self._decoded(key, value)
        self.moves += 1
        self._changed[key] = None
        self._count(width, bucket, chunk, -1)
        # What was recalled is left out when it is loaded: to look for it in a bucket of days would take long.
        self._put_into_buckets(chunk.taken(self.cursors.are_ahead(chunk)), width, until_ms)
        return len(chunk)

    def _load(self, until_ms: int) -> Iterator[int]:
        """Load the next buckets before a time that have messages: several at once if they have few.

        They are minutes, and wider buckets that are over and have few messages. Buckets of a time that they have in common are
        loaded at once.
        """
        fresh = self._fresh_entries()
        dues = fresh.rows["due"]
        is_next = (dues >= self._open_ms[0]) & (dues < until_ms)
        minutes = [int(dues[is_next].min()) // MINUTE_MS] if is_next.any() else []
        begin_ms, stop_ms, buckets = self._next_buckets(until_ms, minutes)
        if not buckets:
            self._open_ms[0] = until_ms
            return
        is_wide = any(width for width, _ in buckets)
        recalled = self._recalled_in(begin_ms, stop_ms) if not is_wide else np.empty(0, dtype=np.uint64)
        self._loading_ms = max(begin_ms, 1)
        self._open_ms[0] = stop_ms
        self._add_to_window(self._pending_fresh(fresh.taken(is_next & (dues < stop_ms))))
        self._recalled_fresh = sum(due_ms >= stop_ms for due_ms in self._recalled.values())
        loaded: list[Entries] = []
        keys = [key for width, bucket in buckets for key in self._chunk_keys(width, bucket)]
        for key in keys:
            value = self._index.get(self._key_now(key))
            if value is not None:
                chunk = self._decoded(key, value)
                is_pending = self.cursors.are_ahead(chunk) & ~np.isin(chunk.rows["position"], recalled)
                loaded.append(chunk.taken(is_pending))
            if key == keys[-1] or (not is_wide and sum(map(len, loaded)) >= FRESH_MAX):
                pending = Entries.together(loaded)
                self._add_to_window(self._never_recalled(pending, begin_ms, stop_ms) if is_wide else pending)
                yield len(pending)
                loaded.clear()
        self._loading_ms = 0

    def _next_buckets(self, until_ms: int, fresh_minutes: Iterable[int]) -> tuple[int, int, list[tuple[int, int]]]:
        """Return the buckets that `_load` loads at once, as width and number, and the time from and to which they reach.

        `fresh_minutes` are minutes of messages that are in no bucket yet.
        """
        ahead = {*self.between(self._open_ms[0], until_ms), *((minute * MINUTE_MS, 0, minute) for minute in fresh_minutes)}
        buckets: list[tuple[int, int]] = []
        stop_ms = count = 0
        for begin_ms, width, bucket in sorted(ahead):
            count += int(self._counts[width][bucket][0]) if bucket in self._counts[width] else 0
            if buckets and begin_ms >= stop_ms and count > FRESH_MAX:
                break
            buckets.append((width, bucket))
            stop_ms = max(stop_ms, begin_ms + WIDTHS_MS[width])
        return min(ahead)[0] if ahead else 0, stop_ms, buckets

    def _add_to_window(self, pending: Entries) -> None:
        self.window.add_all(pending)
        self._count_all_loaded(pending, 1)

    def _fired_until_ms(self) -> int:
        """Return a time so that everything that was due before it has fired or was recalled, as far as that is applied."""
        times_ms = [self._open_ms[0], self.window.next_due_ms(), self._loading_ms or None, self._firing_ms]
        return min(time_ms for time_ms in times_ms if time_ms is not None)

    def _pending_fresh(self, fresh: Entries) -> Entries:
        """Return those of fresh messages that have neither fired nor been recalled."""
        return self._unrecalled(fresh.taken(self.cursors.are_ahead(fresh)))

    def _unrecalled(self, entries: Entries) -> Entries:
        """Return those of some messages that have not been recalled since they came into memory."""
        if not self._recalled:
            return entries
        recalled = np.fromiter(self._recalled, np.uint64, len(self._recalled))
        return entries.taken(~np.isin(entries.rows["position"], recalled))

    def _recalled_in(self, begin_ms: int, end_ms: int) -> Column:
        """Return the positions of the recalled messages that were due in some minutes, as far as the index knows."""
        positions = []
        for key, _ in self._index.rows(RECALLED, MINUTE_KEY.pack(RECALLED, begin_ms // MINUTE_MS)[len(RECALLED) :]):
            _, minute, position = RECALLED_KEY.unpack(key)
            if minute * MINUTE_MS >= end_ms:
                break
            positions.append(position)
        return np.array(positions, dtype=np.uint64)

    def _never_recalled(self, entries: Entries, begin_ms: int, end_ms: int) -> Entries:
        """Return those of some messages of rows that were not recalled, as far as the index knows.

        The minutes between two times may be those of a month, with many recalls of messages that are in no row. So each message
        is looked up that is due in a minute in which a message of a row was recalled.
        """
        minutes = [minute for minute, _ in self._recalled_counts_between(begin_ms, end_ms)]
        if not minutes:
            return entries
        rows = entries.rows
        is_pending = np.ones(len(entries), dtype=bool)
        for at in np.flatnonzero(np.isin(rows["due"] // MINUTE_MS, np.array(minutes))).tolist():
            is_pending[at] = self._index.get(_recalled_key(int(rows["due"][at]), int(rows["position"][at]))) is None
        return entries.taken(is_pending)

    def _recalled_counts_between(self, begin_ms: int, end_ms: int) -> Iterator[tuple[int, int]]:
        """Yield minutes, and how many of the messages in rows that are due in each were recalled, as far as the index knows."""
        start = MINUTE_KEY.pack(RECALLED_COUNTS, begin_ms // MINUTE_MS)
        for key, value in self._index.rows(RECALLED_COUNTS, start[len(RECALLED_COUNTS) :]):
            minute: int = MINUTE_KEY.unpack(key)[1]
            if minute * MINUTE_MS >= end_ms:
                return
            yield minute, COUNT_VALUE.unpack(value)[0]

    # --- rows -------------------------------------------------------------------------------------------------------

    def _decoded(self, key: bytes, value: bytes) -> Entries:
        """Return the messages of a row. Raises IndexDamaged if it has others than were put into it."""
        try:
            return Entries.decoded(value)
        except ValueError as error:
            raise self._index.wrong(key, error) from error

    def _fresh_entries(self) -> Entries:
        return Entries(np.frombuffer(bytes(self._fresh), dtype=PENDING_DTYPE), self._fresh_names)

    def _set_fresh(self, entries: Entries) -> None:
        self._fresh = bytearray(entries.rows.tobytes())
        self._fresh_names = list(entries.topics)
        self._fresh_topics = {topic: number for number, topic in enumerate(self._fresh_names)}
        self._is_fresh_changed = True

    def _chunk_keys(self, width: int, bucket: int) -> list[bytes]:
        """Return the keys of the rows of a bucket, also of those that are not saved yet."""
        prefix = BUCKET_KEY.pack(CHUNK, width, bucket)
        saved = [key for key, _ in self._index.rows(prefix) if key not in self._changed]
        return saved + [key for key, value in self._changed.items() if value is not None and key.startswith(prefix)]

    def _value(self, key: bytes) -> bytes | None:
        """Return the value of a row of a bucket, also if it is not saved yet; None if there is no such row."""
        return self._changed[key] if key in self._changed else self._index.get(key)

    def _key_now(self, key: bytes) -> bytes:
        """Return the present key of a row that had a key when its bucket began to be opened."""
        while key in self._new_keys:
            key = self._new_keys[key]
        return key

    def _put_into_buckets(self, entries: Entries, below: int = len(WIDTHS_MS), until_ms: int = 0) -> None:
        """Sort messages into the buckets where they wait.

        Args:
            entries: the messages.
            below: they go to narrower buckets than this width.
            until_ms: all buckets that are over before this time are loaded next, or sorted again if they have many messages.
        """
        if not len(entries):
            return
        dues = entries.rows["due"]
        widths = np.zeros(len(entries), dtype=np.intp)
        for width in range(1, below):
            is_over = (dues // WIDTHS_MS[width] + 1) * WIDTHS_MS[width] <= until_ms
            widths[(dues >= self._open_ms[width]) | is_over] = width
        buckets = dues // np.array(WIDTHS_MS)[widths]
        order = np.lexsort((entries.rows["position"], buckets, widths))
        widths, buckets = widths[order], buckets[order]
        begins = np.flatnonzero((np.diff(widths, prepend=-1) != 0) | (np.diff(buckets, prepend=-1) != 0)).tolist()
        for start, stop in zip(begins, [*begins[1:], len(order)], strict=True):
            self._put_into_row(int(widths[start]), int(buckets[start]), entries.taken(order[start:stop]))

    def _put_into_row(self, width: int, bucket: int, chunk: Entries) -> bytes | None:
        """Put messages in order of position into a row of a bucket; return its key, or None if there are no messages.

        The key has the first position, so no other row has it.
        """
        if not len(chunk):
            return None
        key = CHUNK_KEY.pack(CHUNK, width, bucket, int(chunk.rows["position"][0]))
        self._changed[key] = chunk.encoded()
        self._count(width, bucket, chunk, 1)
        return key

    def _count(self, width: int, bucket: int, chunk: Entries, sign: int) -> None:
        """Note that a bucket has some messages more (1) or fewer (-1) now."""
        of_buckets, counts = self._counts[width], sign * counts_of(chunk, width, bucket)
        if bucket in of_buckets:
            counts += of_buckets[bucket]
        if counts[0]:
            of_buckets[bucket] = counts
        else:
            del of_buckets[bucket]
        self._changed[BUCKET_KEY.pack(COUNTS, width, bucket)] = counts.astype("<u4").tobytes() if counts[0] else None

    def load(self, index: Index) -> None:
        """Read what is in memory from the index."""
        self._index = index
        row = index.get(CURSORS)
        if row is not None:
            self.cursors.decode(row)
        for key, value in index.rows(COUNTS):
            _, width, bucket = BUCKET_KEY.unpack(key)
            self._counts[width][bucket] = np.frombuffer(value, "<u4").astype(np.int64)
        self._recalled_counts = dict(islice(self._recalled_counts_between(0, DUE_MS_MAX), MINUTES_REMEMBERED))
        self._are_counts_known = len(self._recalled_counts) < MINUTES_REMEMBERED
        fresh = Entries.together([self._decoded(key, value) for key, value in index.rows(FRESH)])
        fresh = fresh.taken(self.cursors.are_ahead(fresh))
        is_pending = [not self.is_recalled(position, due_ms) for due_ms, position in fresh.rows[["due", "position"]].tolist()]
        self._set_fresh(fresh.taken(np.array(is_pending, dtype=bool)))
        self._fresh_saved = len(self._fresh)
        self._is_fresh_changed = False  # what was left out may stay in the rows

    def save(self, batch: Batch) -> None:
        """Put all rows that have changed since the last call into `batch`."""
        has_ended = self._are_cursors_changed or bool(self._unsaved)
        if self._unsaved:
            self._save_recalled(batch)
        for minute, more in self._recalled_changes.items():
            self._save_recalled_count(batch, minute, more)
        self._recalled_changes.clear()
        if self._forget_ms:
            self._forget_recalled(batch)
        if self._is_fresh_changed:
            batch.delete_range(FRESH, after(FRESH))
            self._fresh_saved, self._is_fresh_changed = 0, False
        fresh_n = len(self._fresh) // PENDING.size
        if fresh_n >= FRESH_MAX or self._recalled_fresh >= FRESH_MAX:
            self._sort_fresh(batch)
        elif len(self._fresh) > self._fresh_saved:
            rows = np.frombuffer(bytes(self._fresh[self._fresh_saved :]), dtype=PENDING_DTYPE)
            added = Entries(rows, self._fresh_names).taken(slice(None))
            batch.put(FRESH_KEY.pack(FRESH, int(rows["position"][0])), added.encoded())
            self._fresh_saved = len(self._fresh)
        if self._are_cursors_changed:
            self._are_cursors_changed = False
            batch.put(CURSORS, self.cursors.encoded())
        if has_ended and self._fired_until_ms() // MINUTE_MS != self._fired_minute:
            self._delete_fired(batch)
        for key, value in self._changed.items():
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        self._changed.clear()

    def _save_recalled(self, batch: Batch) -> None:
        keys, self._unsaved = self._unsaved, []
        for key in keys:
            batch.put(key, b"")
        recalled = [RECALLED_KEY.unpack(key)[1:] for key in keys]
        positions = np.array([position for _, position in recalled], dtype=np.uint64)
        fresh = np.sort(np.frombuffer(self._fresh, PENDING_DTYPE)["position"], kind="stable")  # fast, because it is in order
        are_fresh = fresh.searchsorted(positions) < fresh.searchsorted(positions, "right")
        for (minute, _), is_fresh in zip(recalled, are_fresh.tolist(), strict=True):
            if not is_fresh:  # a fresh one is left out when it is sorted
                self._count_recalled(minute, 1)

    def _save_recalled_count(self, batch: Batch, minute: int, more: int) -> None:
        key, counts = MINUTE_KEY.pack(RECALLED_COUNTS, minute), self._recalled_counts
        count = counts.get(minute)
        if count is None:
            row = self._index.get(key) if not self._are_counts_known else None
            count = COUNT_VALUE.unpack(row)[0] if row is not None else 0
            if len(counts) >= MINUTES_REMEMBERED:
                counts.clear()
                self._are_counts_known = False
        counts[minute] = count + more
        if counts[minute]:
            batch.put(key, COUNT_VALUE.pack(counts[minute]))
        else:
            batch.delete(key)

    def _sort_fresh(self, batch: Batch) -> None:
        """Sort the fresh messages into buckets."""
        fresh = self._pending_fresh(self._fresh_entries())
        batch.delete_range(FRESH, after(FRESH))
        self._put_into_buckets(fresh)
        self._fresh, self._fresh_topics, self._fresh_saved = bytearray(), {}, 0
        self._fresh_names = []
        loaded_ms = self._open_ms[0]
        self._recalled = {position: due_ms for position, due_ms in self._recalled.items() if due_ms < loaded_ms}
        self._recalled_fresh = 0

    def _forget_recalled(self, batch: Batch) -> None:
        """Forget recalls that are not needed any more, and their messages.

        The rows that have these messages must go too: the cursor of their lane may be before them, so nothing else says that
        they are not pending.
        """
        fired_ms, self._forget_ms = min(self._forget_ms, self._fired_until_ms()), 0
        if fired_ms < MINUTE_MS:
            return
        self._delete_fired(batch)
        minute = self._done_before_ms(fired_ms) // MINUTE_MS
        fresh = self._fresh_entries()
        self._set_fresh(fresh.taken(fresh.rows["due"] >= minute * MINUTE_MS))
        batch.delete_range(RECALLED, MINUTE_KEY.pack(RECALLED, minute))

    def _delete_fired(self, batch: Batch) -> None:
        """Delete the rows of buckets all of whose messages have fired or were recalled."""
        fired_ms = self._fired_until_ms()
        self._fired_minute = fired_ms // MINUTE_MS
        is_any = False
        for width, counts in enumerate(self._counts):
            number = fired_ms // WIDTHS_MS[width]
            done = [bucket for bucket in counts if bucket < number]
            if not done:
                continue
            is_any = True
            start, stop = BUCKET_KEY.pack(CHUNK, width, min(done)), BUCKET_KEY.pack(CHUNK, width, number)
            for key in [key for key in self._changed if start <= key < stop]:
                self._changed[key] = None
            batch.delete_range(start, stop)
            for bucket in done:
                del counts[bucket]
                self._changed[BUCKET_KEY.pack(COUNTS, width, bucket)] = None
        if is_any:
            minute = self._done_before_ms(fired_ms) // MINUTE_MS
            batch.delete_range(RECALLED_COUNTS, MINUTE_KEY.pack(RECALLED_COUNTS, minute))
            self._recalled_counts = {number: count for number, count in self._recalled_counts.items() if number >= minute}
        self._recalled = {position: due_ms for position, due_ms in self._recalled.items() if due_ms >= fired_ms}

    def _done_before_ms(self, fired_ms: int) -> int:
        """Return a time up to a given one before which no message of a row was due, fired ones and recalled ones included."""
        begins = (bucket * WIDTHS_MS[width] for width, counts in enumerate(self._counts) for bucket in counts)
        return min(fired_ms, min(begins, default=fired_ms))

    def _count_loaded(self, minute: int, more: int) -> None:
        """Note that more or fewer messages of a loaded minute are pending."""
        count = self._loaded[minute] = self._loaded.get(minute, 0) + more
        if not count:
            del self._loaded[minute]

    def _count_all_loaded(self, entries: Entries, sign: int) -> None:
        dues = entries.rows["due"]
        minutes, counts = np.unique(dues[dues < self._open_ms[0]] // MINUTE_MS, return_counts=True)
        for minute, count in zip(minutes.tolist(), counts.tolist(), strict=True):
            self._count_loaded(minute, sign * count)

    def _count_recalled(self, minute: int, more: int) -> None:
        """Note that more or fewer of the messages in rows that are due in a minute are recalled ones."""
        self._recalled_changes[minute] = self._recalled_changes.get(minute, 0) + more

    # --- all of them ------------------------------------------------------------------------------------------------

    def before(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield position and size of each pending message before a position, as of now. Other work may run in between."""
        view = self._index.view()
        buckets = [(width, bucket) for width, counts in enumerate(self._counts) for bucket in counts]
        for entries in self._parts(view, buckets, position):
            pending = entries.taken((entries.rows["position"] < position) & self.cursors.are_ahead(entries))
            for at, due_ms, size in pending.rows[["position", "due", "size"]].tolist():
                if not self.is_recalled(at, due_ms):
                    yield at, size

    def _parts(self, view: IndexView, buckets: list[tuple[int, int]], position: int) -> Iterator[Entries]:
        yield self._fresh_entries()
        for width, bucket in buckets:
            for key, value in view.rows_of(BUCKET_KEY.pack(CHUNK, width, bucket)):
                if CHUNK_KEY.unpack(key)[3] >= position:
                    break  # the first position of a row is its lowest one
                yield self._decoded(key, value)


def counts_of(entries: Entries, width: int, bucket: int) -> Column:
    """Return the number of messages of a bucket, and if it is wider than a minute how many are due between `EDGES_MS`."""
    counts = np.array([len(entries)], dtype=np.int64)
    if width:
        parts = EDGES_MS.searchsorted(entries.rows["due"] - bucket * WIDTHS_MS[width], "right") - 1
        counts = np.concatenate([counts, np.bincount(parts, minlength=len(EDGES_MS))[: len(EDGES_MS) - 1]])
    return counts


def _recalled_key(due_ms: int, position: int) -> bytes:
    return RECALLED_KEY.pack(RECALLED, due_ms // MINUTE_MS, position)
