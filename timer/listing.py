"""Lists the pending delayed messages in order of due time, a page at a time.

The messages of a bucket are in no order of due time. So a listing *selects* the first `SELECTED_MAX` messages after its place:
it scans the fresh messages and then the buckets, in the order in which they begin, until no bucket can have an earlier message.
Its pages come from that selection until it is used up. The node remembers the selections of the latest listings; a page token
names one, and the place of the listing, so that a forgotten one is made again.

All work is done in slices, between which other work runs. A page ends after so many messages, bytes, or scanned messages, also
in the middle of a selection. Such a page may have no messages, and the next one goes on.
"""

from __future__ import annotations

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterator
from secrets import randbits
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

import numpy as np

from penstock.store.properties import decode_properties
from penstock.store.recent import RecentIds
from penstock.store.record import decode
from penstock.store.space.causer import Causer
from penstock.store.space.ledger import Ledger
from penstock.store.store import Store
from penstock.store.topics import check_filter, matches
from penstock.timer.buckets import DUE_MS_MAX, TimerBuckets
from penstock.timer.entries import Entries
from penstock.timer.errors import ListingInvalid
from penstock.timer.keys import TimerKeys

SELECTED_MAX: Final = 16_384
"""Messages of one selection. To make it takes a scan of all messages that are in buckets which begin before its last one."""

LISTINGS_MAX: Final = 16
"""Listings whose selections are remembered, with 44 bytes for each message."""

ROWS_DEFAULT: Final = 1_000
ROWS_MAX: Final = 10_000
"""Messages of one page."""

PAGE_BYTES: Final = 1024 * 1024
"""Bytes after which a page ends, so that a small request does not make the node hold a large response."""

ROW_BYTES: Final = 256
"""Bytes that a message takes in a response besides its topic and key, about."""

READ_BYTES: Final = 4 * PAGE_BYTES
"""Bytes of records after which a page ends. Only the records of messages with a key are read."""

SCANNED_MAX: Final = 262_144
"""Messages that one page looks at, about, before other listings have their turn."""

LOOKS: Final = 256
"""Messages of a selection that are looked at in one slice."""

TOPICS_AT_ONCE: Final = 2_048
"""Topics that are compared with a filter in one slice."""

TOPIC_BYTES_MAX: Final = 8 * PAGE_BYTES
"""Bytes of the topics of a selection, which has fewer messages if they have longer topics."""

_TOKEN = Struct(">qQQ")
_ALL: Final = 2**64 - 1
_NONE: Final = 2**64 - 2
"""No messages have these positions."""


class TimerQuery(NamedTuple):
    """Which pending messages to list."""

    filter: str = "#"
    """Their topics match this MQTT topic filter."""
    key: str = ""
    """They have this key. Empty: with any key or none."""
    from_ms: int = 0
    """They are due at this time or later, in ms since 1970."""
    before_ms: int = 0
    """They are due before this time; 0 for no bound."""
    user: str = ""
    """This user has sent them. Empty: anybody has."""
    client: str = ""
    """The client with this id has sent them. Empty: anybody has."""

    def is_of(self, causer: Causer) -> bool:
        """Return whether the query asks for the messages of a causer."""
        return self.user in ("", causer.user) and self.client in ("", causer.client)


class ListedTimer(NamedTuple):
    """A pending message of a listing."""

    topic: str
    due_ms: int
    position: int
    size: int
    """Size of its record in bytes."""
    key: str
    """Its key; empty if it has none, or its record is damaged."""
    causer: Causer
    """Who is charged for it."""


class TimerPage(NamedTuple):
    """A page of a listing."""

    timers: list[ListedTimer]
    next_token: str
    """Asks for the page after this one; empty if there is none."""


class _Place(NamedTuple):
    """A message in the order of listings; pages begin after it."""

    due_ms: int
    position: int


class TimerListing:
    """Lists the pending messages.

    Parameters:
        store: has the messages.
        buckets: the pending messages.
        keys: knows which of them have keys.
    """

    def __init__(self, store: Store, buckets: TimerBuckets, keys: TimerKeys) -> None:
        self._store = store
        self._buckets = buckets
        self._keys = keys
        self._selections: RecentIds[int, _Selection] = RecentIds(LISTINGS_MAX)
        self._turn = asyncio.Lock()

    async def page(
        self,
        query: TimerQuery,
        token: str = "",
        rows_max: int = ROWS_DEFAULT,
        is_visible: Callable[[str], bool] = lambda _: True,
    ) -> TimerPage:
        """Return a page of a listing.

        All pages of a listing together have every message once that is pending from the call for the first page to that for
        the last, and none twice. A step of the node's clock while it lasts may show those again that it has moved.

        Args:
            query: which messages. It must be the same for all pages.
            token: of the page before; empty for the first page.
            rows_max: maximum number of messages, 1 to `ROWS_MAX`.
            is_visible: says for a topic whether the caller may see its messages.

        Raises:
            TopicInvalid: the filter breaks the rules.
            ListingInvalid: the token is not valid, or a number is out of its bounds.
        """
        check_filter(query.filter)
        if query.from_ms < 0 or query.before_ms < 0:
            raise ListingInvalid(f"from_ms is {query.from_ms} and before_ms is {query.before_ms}: they can't be negative")
        if not 1 <= rows_max <= ROWS_MAX:
            raise ListingInvalid(f"a page of {rows_max} messages was asked for: it can have 1 to {ROWS_MAX}")
        listing, place = _read_token(token) if token else (randbits(64), _Place(query.from_ms - 1, _ALL))
        page = _Filling(rows_max)
        async with self._turn:  # one page at a time, so that many listings together take no more of the node
            selection = self._selections.take(listing)
            while not page.is_full:
                if selection is None or not selection.covers(place, query):
                    selection = _Selection(self._buckets, self._keys, self._store.ledger, query, is_visible, place)
                if not selection.is_complete:
                    if not self._buckets.is_saved:
                        self._store.commit()
                    page.scanned += selection.step()
                elif len(piece := selection.after(place, LOOKS)):
                    place = self._fill(page, piece, query, is_visible)
                elif selection.is_last:
                    return TimerPage(page.timers, "")
                else:
                    selection = None  # the next one begins at the place
                await asyncio.sleep(0)
            if selection is not None:
                self._selections.add(listing, selection)
        return TimerPage(page.timers, _token(listing, place))

    async def next_due_ms(self) -> int | None:
        """Return when the next pending message is due, in ms since 1970; None if none is pending."""
        page = await self.page(TimerQuery(), rows_max=1)
        while not page.timers and page.next_token:
            page = await self.page(TimerQuery(), page.next_token, 1)
        if page.next_token:
            self._selections.take(_read_token(page.next_token)[0])  # nobody asks for more
        return page.timers[0].due_ms if page.timers else None

    def _fill(self, page: _Filling, piece: Entries, query: TimerQuery, is_visible: Callable[[str], bool]) -> _Place:
        """Add those of some messages to a page that are still pending, until it is full. Return the place of the last one."""
        place = _Place(-1, 0)
        names = [topic.decode() for topic in piece.topics]
        are_visible = [is_visible(name) for name in names]  # the selection may be older than the rights of the caller
        for due_ms, position, account, size, _, topic in piece.rows.tolist():
            if page.is_full:
                break
            place = _Place(due_ms, position)
            page.scanned += 1
            if not are_visible[topic] or not self._buckets.is_pending(piece.topics[topic], due_ms, position):
                continue
            key = query.key
            if not key and self._keys.has(position):
                page.read_bytes += size
                key = self._key_of(position, size)
            page.add(ListedTimer(names[topic], due_ms, position, size, key, self._store.ledger.causer_of(account)))
        return place

    def _key_of(self, position: int, size: int) -> str:
        if position >= self._store.log.written:
            self._store.commit()
        data = self._store.read_intact(position, size)
        if data is None:
            return ""
        return decode_properties(decode(data, position=position, verify=False).properties).timer_key


class _Filling:
    """A page that is being filled.

    Parameters:
        rows_max: maximum number of messages.
    """

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        self._bytes = 0
        self.timers: list[ListedTimer] = []
        self.scanned = 0
        self.read_bytes = 0

    @property
    def is_full(self) -> bool:
        return (
            len(self.timers) >= self._rows_max
            or self._bytes >= PAGE_BYTES
            or self.read_bytes >= READ_BYTES
            or self.scanned >= SCANNED_MAX
        )

    def add(self, timer: ListedTimer) -> None:
        self.timers.append(timer)
        self._bytes += ROW_BYTES + len(timer.topic) + len(timer.key)


class _Selection:
    """The first messages of a query after a place, as they were when it was made.

    Parameters:
        buckets, keys: of the pending messages.
        ledger: knows who has sent them.
        query: says which messages it selects.
        is_visible: says for a topic whether the caller may see its messages.
        after: the place.
    """

    def __init__(
        self,
        buckets: TimerBuckets,
        keys: TimerKeys,
        ledger: Ledger,
        query: TimerQuery,
        is_visible: Callable[[str], bool],
        after: _Place,
    ) -> None:
        self._buckets = buckets
        self._keys = keys
        self._ledger = ledger
        self._query = query
        self._is_visible = is_visible
        self._after = after
        self._before_ms = query.before_ms or DUE_MS_MAX + 1
        self._moves = buckets.moves
        self._slices: Iterator[int] | None = self._scan()
        self._found = Entries.together([])
        self.is_last = True
        """Whether no messages follow those of the selection."""

    @property
    def is_complete(self) -> bool:
        return self._slices is None

    def covers(self, place: _Place, query: TimerQuery) -> bool:
        """Return whether it has the next messages of a query after a place.

        A complete selection has not if messages were moved since: they may be due later than it says.
        """
        return query == self._query and place >= self._after and not (self.is_complete and self._moves != self._buckets.moves)

    def after(self, place: _Place, count: int) -> Entries:
        """Return its next messages after a place, in order."""
        rows = self._found.rows
        start = int(rows["due"].searchsorted(place.due_ms))
        stop = int(rows["due"].searchsorted(place.due_ms, "right"))
        start += int((rows["position"][start:stop] <= place.position).sum())
        return self._found.taken(slice(start, start + count))

    def step(self) -> int:
        """Do a slice of the scan. Return the number of messages that it has scanned."""
        assert self._slices is not None
        if self._moves != self._buckets.moves:  # from where it has not been to where it has been, perhaps
            self._moves, self._slices = self._buckets.moves, self._scan()
        scanned = next(self._slices, None)
        if scanned is None:
            self._slices = None
        return scanned or 0

    def _scan(self) -> Iterator[int]:
        """Select messages in slices. Yield the number of messages that each has scanned."""
        self._found, self.is_last = Entries.together([]), True
        yield from self._add(self._buckets.fresh())
        for begin_ms, width, bucket in self._buckets.between(self._after.due_ms, self._before_ms):
            if not self.is_last and begin_ms > self._found.rows["due"][-1]:
                return
            position = 0
            while (row := self._buckets.row_from(width, bucket, position)) is not None:
                position, entries = row
                yield from self._add(entries)
                position += 1

    def _add(self, entries: Entries) -> Iterator[int]:
        """Add those of some messages that the query asks for, and keep the first ones of all. Yield as `_scan`."""
        rows, after = entries.rows, self._after
        is_after = (rows["due"] > after.due_ms) | ((rows["due"] == after.due_ms) & (rows["position"] > after.position))
        is_wanted = is_after & (rows["due"] < self._before_ms)
        if self._query.user or self._query.client:
            accounts, of_rows = np.unique(rows["account"], return_inverse=True)
            is_of = [self._query.is_of(self._ledger.causer_of(account)) for account in accounts.tolist()]
            is_wanted &= np.array(is_of, dtype=bool)[of_rows]
        if not self.is_last:
            is_wanted &= rows["due"] <= self._found.rows["due"][-1]
        scanned, entries = len(entries), entries.taken(is_wanted)
        yield scanned
        chosen: list[int] = []
        for begin in range(0, len(entries.topics), TOPICS_AT_ONCE):
            chosen += [self._chosen(topic) for topic in entries.topics[begin : begin + TOPICS_AT_ONCE]]
            yield 0
        positions = np.array(chosen, dtype=np.uint64)[entries.rows["topic"]]
        entries = entries.taken((positions == _ALL) | (positions == entries.rows["position"]))
        self._keep_first(entries.taken(self._buckets.cursors.are_ahead(entries)))
        yield 0

    def _chosen(self, topic: bytes) -> int:
        """Return which messages of a topic the query asks for: the position of one, `_ALL` or `_NONE`."""
        query, name = self._query, topic.decode()
        if not matches(query.filter, name) or not self._is_visible(name):
            return _NONE
        if not query.key:
            return _ALL
        position = self._keys.find(topic, query.key)
        return _NONE if position is None else position

    def _keep_first(self, more: Entries) -> None:
        found = Entries.together([self._found, more])
        # A message that was fresh at first may have been sorted into a bucket since.
        _, once = np.unique(found.rows["position"], return_index=True)
        rows = found.rows[once]
        order = once[np.lexsort((rows["position"], rows["due"]))]
        kept = found.taken(order[:SELECTED_MAX])
        while sum(map(len, kept.topics)) > TOPIC_BYTES_MAX:
            kept = kept.taken(slice(len(kept) // 2))
        self.is_last = self.is_last and len(kept) == len(order)
        self._found = kept


def _token(listing: int, place: _Place) -> str:
    return urlsafe_b64encode(_TOKEN.pack(*place, listing)).decode()


def _read_token(token: str) -> tuple[int, _Place]:
    """Return the listing and the place that a token names. Raises ListingInvalid."""
    try:
        due_ms, position, listing = _TOKEN.unpack(urlsafe_b64decode(token.encode("ascii", "replace")))
    except (Base64Error, StructError) as error:
        raise ListingInvalid(f"the page token {token[:80]!r} is not one that a listing gave: begin anew without one") from error
    return listing, _Place(due_ms, position)
