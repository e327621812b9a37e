"""Keys of delayed messages, and messages that take the place of others.

The sender of a delayed message may give it a key. One message of a topic and key is pending at a time, and the next one
replaces it. The properties of the new message name the one that it replaces, whose TIMER_CANCELLED record follows in the same
commit. A power cut can keep the first of the two records without the second. Then the next start cancels the replaced message
before anything fires, so that the change is one step: either the old message is pending or the new one.

Rows of the index: key b"K", position u64 big-endian; value whether it was replaced u8, digest of topic and key 16 bytes (zero
if it has none), account u64 (`store.space.ledger`). There is a row for each pending message with a key, and for one that was
replaced and is not cancelled yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from struct import Struct
from typing import Final, NamedTuple

from penstock.store.bodies import TIMER_ENTRY
from penstock.store.index.index import Batch, Index, KeySpace
from penstock.store.part import Apply
from penstock.store.properties import decode_properties
from penstock.store.queues.latedispatches import Routing
from penstock.store.record import Flag, Kind, Record
from penstock.store.space.accounts import NODE_ACCOUNT, Resource
from penstock.store.space.causer import NODE, Causer
from penstock.store.store import Store
from penstock.timer.options import TimerOptions

KEY_BYTES_MAX: Final = 255
"""Maximum length of a key."""

_DIGEST_BYTES: Final = 16
_NONE: Final = bytes(_DIGEST_BYTES)
_KEY = Struct(">cQ")
_ROW = Struct(f"<B{_DIGEST_BYTES}sQ")


class _KeyedMessage(NamedTuple):
    digest: bytes
    account: int
    """Id of the account that is charged for the key."""


_NOT_KEYED: Final = _KeyedMessage(_NONE, NODE_ACCOUNT)


class TimerKeys:
    """The keys of pending delayed messages. It is a part of the store.

    Parameters:
        store: its ledger is charged for keys.
        options: see `TimerOptions`.
    """

    def __init__(self, store: Store, options: TimerOptions) -> None:
        self._ledger = store.ledger
        self._ledger.limit(Resource.TIMER_KEYS, options.keys_max, "raise timer.pending_max")
        self._positions: dict[bytes, int] = {}
        self._keyed: dict[int, _KeyedMessage] = {}
        """Pending messages with a key, by position."""
        self._replaced: dict[int, None] = {}
        """Positions of the messages that others have replaced, and whose cancellation is not recorded yet."""
        self._changed: set[int] = set()

    def __len__(self) -> int:
        """Return how many pending messages have a key."""
        return len(self._positions)

    def find(self, topic: bytes, key: str) -> int | None:
        """Return the position of the pending message of a topic and key; None if there is none."""
        return self._positions.get(_digest(topic, key))

    def has(self, position: int) -> bool:
        """Return whether the message at a position is pending and has a key."""
        return position in self._keyed

    def admit(self, causer: Causer = NODE, topic: str = "", replaces: int | None = None) -> None:
        """Check that one more message may have a key. Callers call it before they store the message.

        Args:
            causer: is charged for the key until the message fires or is cancelled.
            topic: of the message.
            replaces: position of the message that it replaces, if any.

        Raises:
            LimitExceeded: a tenth of `timer.pending_max` messages have a key, or the causer may have no more.
        """
        replaced = self._keyed.get(replaces) if replaces is not None else None
        if replaced is None or replaced.account != causer.account:
            self._ledger.admit(causer, Resource.TIMER_KEYS, topic=topic, spare=0 if replaced is None else 1)

    @property
    def replaced(self) -> list[int]:
        """Positions of the messages that the node must cancel at its start, because others have replaced them."""
        return list(self._replaced)

    # --- the part of the store --------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return {
            Kind.MESSAGE: self._apply_message,
            Kind.TIMER_FIRED: self._apply_ended,
            Kind.TIMER_CANCELLED: self._apply_ended,
        }

    def _apply_message(self, record: Record) -> None:
        # Most delayed messages have no key. To look for the names of the properties is faster than to decode them.
        if not record.flags & Flag.DELAYED or not (b'"timer_key"' in record.properties or b'"replaces"' in record.properties):
            return
        about = decode_properties(record.properties)
        if about.replaces is not None:
            self._replaced[about.replaces] = None
            self._changed.add(about.replaces)
        if about.timer_key:
            digest = _digest(record.topic, about.timer_key)
            account = self._ledger.enter(about.by)
            self._ledger.charge(account, Resource.TIMER_KEYS)
            self._positions[digest] = record.position
            self._keyed[record.position] = _KeyedMessage(digest, account)
            self._changed.add(record.position)

    def _apply_ended(self, record: Record) -> None:
        if not self._keyed and not self._replaced:
            return
        if record.kind == Kind.TIMER_CANCELLED:
            positions = [position for position, _ in TIMER_ENTRY.iter_unpack(record.body)]
        else:
            positions = Routing.from_record(record).entries["position"].tolist()
        for position in positions:
            ended = self._keyed.pop(position, None)
            if ended is not None:
                self._changed.add(position)
                self._ledger.release(ended.account, Resource.TIMER_KEYS)
                if self._positions.get(ended.digest) == position:
                    del self._positions[ended.digest]
            if position in self._replaced:
                del self._replaced[position]
                self._changed.add(position)

    def load(self, index: Index) -> None:
        for key, value in index.rows(bytes(KeySpace.TIMER_KEY)):
            _, position = _KEY.unpack(key)
            is_replaced, digest, account = _ROW.unpack(value)
            if is_replaced:
                self._replaced[position] = None
            if digest != _NONE:
                self._keyed[position] = _KeyedMessage(digest, account)
                if not is_replaced:
                    self._positions[digest] = position

    def save(self, batch: Batch) -> None:
        for position in self._changed:
            key = _KEY.pack(KeySpace.TIMER_KEY, position)
            keyed, is_replaced = self._keyed.get(position), position in self._replaced
            if keyed is None and not is_replaced:
                batch.delete(key)
            else:
                batch.put(key, _ROW.pack(is_replaced, *(keyed or _NOT_KEYED)))
        self._changed.clear()

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        """Yield nothing: `DelayedMessages` keeps the records of pending messages."""
        yield from ()


def _digest(topic: bytes, key: str) -> bytes:
    return blake2b(len(topic).to_bytes(2, "big") + topic + key.encode(), digest_size=_DIGEST_BYTES).digest()
