"""Storing what services send: bounds first, then an ordinary record, a delayed one, or half of a transaction.

Both faces, the native API and the RocketMQ-compatible one, come through here; so a message is the same whichever way it came.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from penstock.pop.core.core import PopCore
from penstock.pop.core.transactions import Transactions
from penstock.pop.errors import PopError
from penstock.store.errors import LimitExceeded
from penstock.store.record import Flag, Properties, encode_properties, tag_hash
from penstock.timer.delayed import DelayedMessages
from penstock.timer.options import TimerOptions

PROPERTIES_MAX = 128
PROPERTY_BYTES_MAX = 65_535
"""Of a name, a value, a tag, a message group: MQTT 5.0, 1.5.4 allows no more, and messages go out over MQTT too."""


class Refusal(Enum):
    """Why a message is not stored. The names are those of the API's codes."""

    MESSAGE_TOO_LARGE = "message too large"
    INVALID_PROPERTY = "invalid property"
    INVALID_DELIVERY_TIME = "invalid delivery time"
    TOO_MANY_TIMERS = "too many timers"
    INVALID_TRANSACTION = "invalid transaction"
    TOO_MANY_TRANSACTIONS = "too many transactions"


class SendRefused(PopError):
    """Raised for one message that is sent and can't be stored; the others of its call go on."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        self.refusal = refusal
        super().__init__(detail)


class Stored(NamedTuple):
    """A message that was stored. It may be answered when it is durable (`Store.when_durable`)."""

    position: int
    recall_handle: str = ""
    transaction_handle: str = ""


class Sending:
    """Stores messages.

    Parameters:
        core: whose store, options and handles.
        delayed: delayed messages.
        transactions: half messages.
        timer: bounds of delays.
    """

    def __init__(self, core: PopCore, delayed: DelayedMessages, transactions: Transactions, timer: TimerOptions) -> None:
        self._core = core
        self._store = core.store
        self._delayed = delayed
        self._transactions = transactions
        self._timer = timer

    def store(self, topic: bytes, body: bytes, properties: Properties) -> Stored:
        """Store a message: at once, delayed where `deliver_at_ms` is ahead, half where there is a `producer`.

        Raises:
            SendRefused: says why.
            TopicInvalid, LimitExceeded, RecordTooLarge, DiskFull: as `Store.append_message`, and its route, raise them.
        """
        properties = self._checked(properties)
        due_ms = properties.deliver_at_ms
        route = self._store.queues.route(topic)
        encoded = encode_properties(properties)
        bytes_max = self._core.options.message_bytes_max
        if len(topic) + len(encoded) + len(body) > bytes_max:
            detail = f"topic, properties and body have more than {bytes_max} bytes together: see pop.message_bytes_max"
            raise SendRefused(Refusal.MESSAGE_TOO_LARGE, detail)
        if properties.producer:
            return self._store_half(topic, body, encoded, due_ms)
        if due_ms:
            return self._store_delayed(topic, body, encoded, due_ms)
        return Stored(self._store.append_message(route, body, encoded, 1, tag_hash(properties.tag)))

    def _store_delayed(self, topic: bytes, body: bytes, encoded: bytes, due_ms: int) -> Stored:
        try:
            self._delayed.check_room()
        except LimitExceeded as error:
            raise SendRefused(Refusal.TOO_MANY_TIMERS, str(error)) from error
        route = self._store.queues.route(topic)
        position = self._store.append_message(route, body, encoded, 1 | Flag.DELAYED)
        return Stored(position, recall_handle=self._core.handles.recall(position, due_ms))

    def _store_half(self, topic: bytes, body: bytes, encoded: bytes, due_ms: int) -> Stored:
        if due_ms:
            detail = "half of a transaction can't be delayed: its commit delivers it"
            raise SendRefused(Refusal.INVALID_TRANSACTION, detail)
        try:
            self._transactions.check_room()
        except LimitExceeded as error:
            raise SendRefused(Refusal.TOO_MANY_TRANSACTIONS, str(error)) from error
        route = self._store.queues.route(topic)
        position = self._store.append_message(route, body, encoded, 1 | Flag.HALF)
        return Stored(position, transaction_handle=self._core.handles.half(position, self._store.now_ms()))

    def _checked(self, properties: Properties) -> Properties:
        """Return the properties as they are stored: `deliver_at_ms` is 0 where that is now or past."""
        if len(properties.user) > PROPERTIES_MAX:
            detail = f"a message may have {PROPERTIES_MAX} properties, not {len(properties.user)}"
            raise SendRefused(Refusal.INVALID_PROPERTY, detail)
        texts = [text for pair in properties.user for text in pair]
        texts += [properties.tag, properties.message_group, properties.producer, *properties.keys]
        for text in texts:
            if len(text.encode()) > PROPERTY_BYTES_MAX:
                raise SendRefused(Refusal.INVALID_PROPERTY, f"{text[:40]!r}... has more than {PROPERTY_BYTES_MAX} bytes")
        due_ms, now_ms = properties.deliver_at_ms, self._store.now_ms()
        if due_ms < 0 or due_ms - now_ms > self._timer.delay_ms_max:
            raise SendRefused(
                Refusal.INVALID_DELIVERY_TIME,
                f"deliver_at_ms is {due_ms}: give ms since 1970, at most {self._timer.delay_ms_max} ms ahead of now "
                f"({now_ms}), or 0 for at once",
            )
        return properties if due_ms > now_ms else properties._replace(deliver_at_ms=0)
