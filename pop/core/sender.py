"""Storing the messages that services send: as ordinary records, as delayed messages, or as half messages of transactions.

The native API and the RocketMQ-compatible one both use this module, so a message is the same whichever way it came.
"""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from penstock.pop.core.handle import Handles
from penstock.pop.core.poptraces import PopTraces
from penstock.pop.core.sentids import ID_BYTES_MAX, SentIds, digest_of
from penstock.pop.core.transactions import Transactions
from penstock.pop.errors import PopError
from penstock.pop.options import PopOptions
from penstock.store.durations import format_duration
from penstock.store.errors import DiskFull, LimitExceeded, StoreError, TopicInvalid
from penstock.store.properties import (
    Properties,
    decode_properties,
    encode_deduplication_id,
    encode_properties,
    tag_hash,
)
from penstock.store.queues.router import Route
from penstock.store.record import Flag, decode, record_bytes
from penstock.store.space.causer import NODE, Causer
from penstock.store.space.space import Space
from penstock.store.store import Store
from penstock.store.topics import check_topic
from penstock.timer.delayed import DelayedMessages
from penstock.timer.keys import KEY_BYTES_MAX, TimerKeys
from penstock.tracing.traces import NOT_STORED

PROPERTIES_MAX = 128
"""Maximum number of properties of a message."""

PROPERTY_BYTES_MAX = 65_535
"""Maximum size of a name, a value, a tag or a message group. Messages also go out over MQTT, which allows no more (MQTT 5.0,
1.5.4)."""

_IDENTIFIED = 1 | int(Flag.IDENTIFIED)


def message_id(position: int) -> str:
    """Return the id of the message at a position: 16 hexadecimal digits. All APIs give a message the same id."""
    return f"{position:016x}"


class Refusal(Enum):
    """Why a message is not stored. The names are those of the API's codes."""

    MESSAGE_TOO_LARGE = "message too large"
    INVALID_PROPERTY = "invalid property"
    INVALID_DELIVERY_TIME = "invalid delivery time"
    TOO_MANY_TIMERS = "too many timers"
    INVALID_TRANSACTION = "invalid transaction"
    TOO_MANY_TRANSACTIONS = "too many transactions"
    DEDUPLICATION_ID_REUSED = "deduplication id reused"
    DEDUPLICATION_WINDOW_PASSED = "deduplication window passed"


class SendRefused(PopError):
    """Raised for a message that can't be stored. The other messages of its call are stored."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        self.refusal = refusal
        super().__init__(detail)


class StoredMessage(NamedTuple):
    """A message that was stored. The caller must not respond before it is durable (`Store.when_durable`).

    Parameters:
        position: of its record.
        recall_handle: recalls a delayed message; empty for other messages.
        transaction_handle: commits or rolls back a half message; empty for other messages.
        is_repeated: this is the first message with the deduplication id, and nothing was stored now.
    """

    position: int
    recall_handle: str = ""
    transaction_handle: str = ""
    is_repeated: bool = False


class Sender:
    """Stores messages.

    Parameters:
        store: where to.
        handles: makes the handles of delayed and half messages.
        delayed: counts delayed messages, and knows the longest delay.
        keys: knows the pending message of each key.
        transactions: counts half messages.
        sent_ids: knows the messages that are repeated.
        options: maximum size of a body.
        traces: makes spans of what is stored or refused; None without tracing.
    """

    def __init__(
        self,
        store: Store,
        handles: Handles,
        delayed: DelayedMessages,
        keys: TimerKeys,
        transactions: Transactions,
        sent_ids: SentIds,
        options: PopOptions,
        traces: PopTraces | None = None,
    ) -> None:
        self._store = store
        self._handles = handles
        self._delayed = delayed
        self._keys = keys
        self._transactions = transactions
        self._sent_ids = sent_ids
        self._bytes_max = options.message_bytes_max
        self._traces = traces
        self.sent = 0
        """Messages that were stored since the node started, with those that `pop.grpc.sends` stores by itself."""

    def store(
        self, topic: bytes, body: bytes, properties: Properties, causer: Causer = NODE, *, age_ms: int = 0
    ) -> StoredMessage:
        """Store a message: as a half message if it has a `producer`, as a delayed one if `deliver_at_ms` is in the future.

        Args:
            topic, body, properties: of the message.
            causer: is charged for a delayed or half message, and for a new first level of the topic.
            age_ms: how long ago the message was sent first, if it has a deduplication id; 0 if it was never sent before.

        Raises:
            SendRefused: the message breaks a bound, or the causer may have no more delayed or half messages; or the message is
                repeated, with another body or too late.
            TopicInvalid, LimitExceeded, RecordTooLarge, DiskFull: as `Router.route` and `Store.append_message` raise them.
        """
        stored = self._store_traced(topic, body, properties, causer, age_ms)
        self.sent += not stored.is_repeated
        return stored

    def _store_traced(self, topic: bytes, body: bytes, properties: Properties, causer: Causer, age_ms: int) -> StoredMessage:
        traces = self._traces
        if traces is None or not properties.user:
            return self._store_checked(topic, body, properties, causer, age_ms)
        began_ns = traces.now_ns()
        try:
            stored = self._store_checked(topic, body, properties, causer, age_ms)
        except (SendRefused, StoreError) as error:
            traces.sent(properties.user, topic, body, began_ns, NOT_STORED, str(error))
            raise
        traces.sent(properties.user, topic, body, began_ns, stored.position)
        return stored

    def store_identified(
        self, topic: bytes, body: bytes, sent_id: str, causer: Causer = NODE, *, age_ms: int = 0
    ) -> StoredMessage:
        """Store a message that has a deduplication id and no other property, as `store` does. This is on the hot path."""
        if not sent_id.isascii() or len(sent_id) > ID_BYTES_MAX or len(body) > self._bytes_max:  # `store` says what is wrong
            return self.store(topic, body, Properties(deduplication_id=sent_id), causer, age_ms=age_ms)
        route = self._store.router.route(topic, causer)
        repeated = self._repeated(topic, body, sent_id, age_ms)
        if repeated is not None:
            return repeated
        self.sent += 1
        return StoredMessage(self._store.append_message(route, body, encode_deduplication_id(sent_id), _IDENTIFIED))

    def _store_checked(self, topic: bytes, body: bytes, properties: Properties, causer: Causer, age_ms: int) -> StoredMessage:
        """Check and store a message: see `store`."""
        properties = self._checked(properties)
        due_ms = properties.deliver_at_ms
        route = self._store.router.route(topic, causer)
        encoded = encode_properties(properties)
        if len(body) > self._bytes_max:
            detail = f"the body has {len(body)} bytes, and {self._bytes_max} are allowed: see pop.message_bytes_max"
            raise SendRefused(Refusal.MESSAGE_TOO_LARGE, detail)
        if len(encoded) > self._bytes_max:
            detail = f"the properties have {len(encoded)} bytes, and {self._bytes_max} are allowed: see pop.message_bytes_max"
            raise SendRefused(Refusal.INVALID_PROPERTY, detail)
        flags = 1
        if properties.deduplication_id:
            repeated = self._repeated(topic, body, properties.deduplication_id, age_ms)
            if repeated is not None:
                return repeated
            flags |= Flag.IDENTIFIED
        if properties.producer:
            return self._store_half(route, body, properties, causer, flags)
        if due_ms:
            return self._store_delayed(route, body, properties, causer, flags)
        return StoredMessage(self._store.append_message(route, body, encoded, flags, tag_hash(properties.tag)))

    def _repeated(self, topic: bytes, body: bytes, sent_id: str, age_ms: int) -> StoredMessage | None:
        """Return the first message with a deduplication id; None if this is the first."""
        first = self._sent_ids.find(topic, sent_id)
        if first is None:
            if age_ms and not self._sent_ids.remembers(topic, age_ms):
                detail = (
                    f"the message was sent first {age_ms} ms ago, and ids of that time are forgotten (pop.deduplication is "
                    f"{format_duration(self._sent_ids.window_ms)}), so the node can't know whether it stored the message then; "
                    "it stores nothing now"
                )
                raise SendRefused(Refusal.DEDUPLICATION_WINDOW_PASSED, detail)
            return None
        if first.digest != digest_of(body):
            detail = (
                f"the topic got the deduplication id {sent_id!r} before, with another body, as message "
                f"{message_id(first.position)}; give each message an id of its own"
            )
            raise SendRefused(Refusal.DEDUPLICATION_ID_REUSED, detail)
        self._sent_ids.repeated += 1
        recall_handle = transaction_handle = ""
        if first.flags & Flag.HALF:
            transaction_handle = self._handles.half(first.position, self._store.now_ms())
        elif first.flags & Flag.DELAYED:
            # A message that is not pending any more has fired or was recalled, and a recall says so for any past time.
            recall_handle = self._handles.recall(first.position, self._delayed.due_ms(first.position) or 1)
        return StoredMessage(first.position, recall_handle, transaction_handle, is_repeated=True)

    def _store_delayed(self, route: Route, body: bytes, properties: Properties, causer: Causer, flags: int) -> StoredMessage:
        causer, replaces = self._store.ledger.with_tenant(causer, route.name), properties.replaces
        if properties.timer_key and replaces is None:
            replaces = self._keys.find(route.topic, properties.timer_key)
        encoded = encode_properties(properties._replace(by=causer.row(), replaces=replaces))
        try:
            if properties.timer_key:
                self._keys.admit(causer, route.name, replaces)
            self._delayed.admit(causer, record_bytes(route.topic, body, encoded), route.name)
        except LimitExceeded as error:
            raise SendRefused(Refusal.TOO_MANY_TIMERS, str(error)) from error
        position = self._store.append_message(route, body, encoded, flags | Flag.DELAYED)
        if replaces is not None:
            self._delayed.recall(replaces, self._delayed.due_ms(replaces) or 0)
        return StoredMessage(position, recall_handle=self._handles.recall(position, properties.deliver_at_ms))

    def reschedule(self, position: int, deliver_at_ms: int, causer: Causer = NODE) -> StoredMessage | None:
        """Let a pending message be delivered at another time: a new message with a new handle replaces it, in one step.

        Return None if no message is pending at `position`.

        Raises:
            SendRefused, LimitExceeded, RecordTooLarge, DiskFull: as `store`. The pending message stays as it is.
        """
        self._store.commit()  # the message may have been stored in this turn
        size = self._delayed.size(position)
        data = self._store.read_intact(position, size) if size is not None else None
        if data is None:
            return None
        record = decode(data, position=position, verify=False)
        now_ms, properties = self._store.now_ms(), decode_properties(record.properties)
        due_ms, delay_ms_max = max(deliver_at_ms, now_ms + 1), self._delayed.delay_ms_max
        if deliver_at_ms < 0 or due_ms - now_ms > delay_ms_max or 0 < properties.expires_at_ms <= due_ms:
            raise SendRefused(
                Refusal.INVALID_DELIVERY_TIME,
                f"deliver_at_ms is {deliver_at_ms}: give ms since 1970, at most {delay_ms_max} ms after the present time "
                f"({now_ms}), and before the message expires",
            )
        properties = properties._replace(deliver_at_ms=due_ms, replaces=position, session="", packet_id=0)
        flags = record.flags & ~int(Flag.SESSION | Flag.DELAYED)
        route = self._store.router.route(record.topic, causer)
        return self._store_delayed(route, record.body, properties, Causer.from_row(properties.by), flags)

    def _store_half(self, route: Route, body: bytes, properties: Properties, causer: Causer, flags: int) -> StoredMessage:
        if properties.deliver_at_ms:
            detail = "a half message of a transaction can't be delayed: its commit delivers it"
            raise SendRefused(Refusal.INVALID_TRANSACTION, detail)
        try:
            by = self._transactions.admit(causer, route.name)
        except LimitExceeded as error:
            raise SendRefused(Refusal.TOO_MANY_TRANSACTIONS, str(error)) from error
        encoded = encode_properties(properties._replace(by=by))
        position = self._store.append_message(route, body, encoded, flags | Flag.HALF)
        return StoredMessage(position, transaction_handle=self._handles.half(position, self._store.now_ms()))

    def _checked(self, properties: Properties) -> Properties:
        """Return the properties as they are stored: `deliver_at_ms` is 0 if it is not in the future."""
        check_properties(properties)
        due_ms, now_ms = properties.deliver_at_ms, self._store.now_ms()
        delay_ms_max = self._delayed.delay_ms_max
        if due_ms < 0 or due_ms - now_ms > delay_ms_max:
            raise SendRefused(
                Refusal.INVALID_DELIVERY_TIME,
                f"deliver_at_ms is {due_ms}: give ms since 1970, at most {delay_ms_max} ms after the present time "
                f"({now_ms}), or 0 for at once",
            )
        if properties.timer_key:
            if len(properties.timer_key.encode()) > KEY_BYTES_MAX:
                detail = f"the key {properties.timer_key[:40]!r}... of the delayed message has more than {KEY_BYTES_MAX} bytes"
                raise SendRefused(Refusal.INVALID_PROPERTY, detail)
            # Also a message that is due replaces the pending one of its key, so it goes out by the timer.
            return properties._replace(deliver_at_ms=max(due_ms, now_ms + 1))
        return properties._replace(deliver_at_ms=0) if 0 < due_ms <= now_ms else properties


def check_properties(properties: Properties) -> None:
    """Check the bounds of a message's properties.

    Raises:
        SendRefused: INVALID_PROPERTY.
    """
    if len(properties.user) > PROPERTIES_MAX:
        detail = f"a message may have {PROPERTIES_MAX} properties, not {len(properties.user)}"
        raise SendRefused(Refusal.INVALID_PROPERTY, detail)
    texts = [text for pair in properties.user for text in pair]
    texts += [properties.tag, properties.message_group, properties.producer, properties.sender_id, *properties.keys]
    texts.append(properties.content_type or "")
    for text in texts:
        if len(text.encode()) > PROPERTY_BYTES_MAX:
            raise SendRefused(Refusal.INVALID_PROPERTY, f"{text[:40]!r}... has more than {PROPERTY_BYTES_MAX} bytes")
    if len(properties.correlation_data or b"") > PROPERTY_BYTES_MAX:
        raise SendRefused(Refusal.INVALID_PROPERTY, f"the correlation data has more than {PROPERTY_BYTES_MAX} bytes")
    if len(properties.deduplication_id.encode()) > ID_BYTES_MAX:
        detail = f"the deduplication id {properties.deduplication_id[:40]!r}... has more than {ID_BYTES_MAX} bytes"
        raise SendRefused(Refusal.INVALID_PROPERTY, detail)
    if properties.response_topic is not None:
        try:
            check_topic(properties.response_topic.encode())
        except TopicInvalid as error:
            raise SendRefused(Refusal.INVALID_PROPERTY, f"the response topic can't be used: {error}") from error


def cancel_replaced(keys: TimerKeys, delayed: DelayedMessages, space: Space) -> None:
    """Cancel the messages that others have replaced. The node calls it at its start, before anything fires (`timer.keys`).

    Where the disk has no room for it, nothing fires either, and the messages are cancelled when it has room again.
    """

    def cancel() -> None:
        # Without room, the next relief tries again.
        with suppress(DiskFull):
            for position in keys.replaced:
                delayed.recall(position, delayed.due_ms(position) or 0)

    space.on_relief.append(cancel)
    cancel()
