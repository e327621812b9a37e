"""The oracle: what was sent, what the node has acknowledged, and what must therefore hold.

It knows nothing of the node's inside but the records of the log, which it reads after each start and while the node runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum

from penstock.store.commitlog import CommitLog
from penstock.store.errors import RecordCorrupt
from penstock.store.record import Flag, Kind, Record, decode
from penstock.store.store import Store
from penstock.store.topics import matches

RECORD_BYTES_MAX = 600
"""No record of a message is larger."""


class Violation(AssertionError):
    """Raised when something does not hold that the node has promised."""


class Fate(Enum):
    """What a half message is to become, as far as its producer knows."""

    PLAIN = "no half message"
    OPEN = "undecided"
    COMMITTING = "a commit was asked for"
    COMMITTED = "a commit was acknowledged"
    ROLLING_BACK = "a roll back was asked for"
    ROLLED_BACK = "a roll back was acknowledged"


class Sent:
    """A message that a client has sent.

    Parameters:
        number: its number, which its body begins with.
        body: bytes that no other message has.
        topic: its topic.
        qos: at which it was published; 1 for POP.
        at: number of the event at which it was sent first.
    """

    __slots__ = (
        "acked_at",
        "at",
        "body",
        "due_ms",
        "fate",
        "is_exempt",
        "is_retained",
        "key",
        "not_before_s",
        "number",
        "once",
        "positions",
        "qos",
        "topic",
    )

    def __init__(self, number: int, body: bytes, topic: str, qos: int, at: int) -> None:
        self.number = number
        self.body = body
        self.topic = topic
        self.qos = qos
        self.at = at
        self.acked_at = 0
        """Number of the event at which the client got its acknowledgement; 0 before."""
        self.once = qos == 2
        """Whether it may be stored only once."""
        self.is_retained = False
        self.key = ""
        """Message group, in which FIFO groups keep the order."""
        self.due_ms = 0
        """When it is due by the node's time, for a delayed message."""
        self.not_before_s = 0.0
        """Virtual time before which it must not come."""
        self.fate = Fate.PLAIN
        self.positions: set[int] = set()
        """Where it was found in the log when that was durable."""
        self.is_exempt = False
        """Whether it may be missing, because its record was damaged."""

    @property
    def is_in_order(self) -> bool:
        """Whether it enters its queues when it is stored, so that its position gives its place among others."""
        return not self.due_ms and self.fate is Fate.PLAIN and len(self.positions) <= 1

    def __str__(self) -> str:
        return f"message {self.number} on {self.topic} (QoS {self.qos}, positions {sorted(self.positions)})"


class Consumer:
    """Who is to get messages: an MQTT session or a POP group.

    Parameters:
        name: for reports.
        topic_filters: the filters, with the event at which each was acknowledged.
        earliest: whether it gets what the log had before.
    """

    __slots__ = ("dead", "delivered", "earliest", "ended", "exact", "maybe_ended", "name", "since", "was_set_back")

    def __init__(self, name: str, *, earliest: bool = False) -> None:
        self.name = name
        self.earliest = earliest
        self.since: dict[str, int] = {}
        self.delivered: Counter[int] = Counter()
        """How often each message was delivered, by its number."""
        self.exact: Counter[int] = Counter()
        """How often each message was delivered at QoS 2, not counting what the client knows as repeated."""
        self.ended: set[tuple[int, int]] = set()
        """Number and position of each message whose delivery the node has acknowledged as ended."""
        self.maybe_ended: set[tuple[int, int]] = set()
        """The same, where an answer is missing."""
        self.dead: set[int] = set()
        """Numbers of the messages that were found in its dead letters."""
        self.was_set_back = False
        """Whether the node has let it begin again at damaged messages, so that it gets what follows a second time."""

    def wants(self, message: Sent) -> bool:
        """Return whether the consumer must get a message that was acknowledged."""
        return any(
            matches(topic_filter, message.topic) and (self.earliest or message.at > since)
            for topic_filter, since in self.since.items()
        )


class Oracle:
    """Keeps what was sent and acknowledged, and checks it.

    Parameters:
        now_s: returns the virtual time.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.is_time_known = True
        """Whether the node can know how much time has passed, although the time of day may be wrong."""
        self.events = 0
        self.sent: dict[int, Sent] = {}
        self.expired_before = 0
        """The greatest position before which records have expired."""
        self.scanned = 0
        self.was_repaired = False
        self._damaged: list[tuple[int, int]] = []
        """Begin and end of the damaged ranges of the log."""
        self.retained: dict[str, tuple[int, int]] = {}
        """By topic: position of the last retained message in the log, and its number."""
        self.dead_topics: dict[int, set[int]] = {}

    def tick(self) -> int:
        """Return the number of a new event."""
        self.events += 1
        return self.events

    def new(self, topic: str, qos: int, size: int) -> Sent:
        """Return a message that is to be sent now."""
        number = len(self.sent) + 1
        message = Sent(number, (b"%d:" % number).ljust(size, b"."), topic, qos, self.tick())
        self.sent[number] = message
        return message

    def acknowledged(self, message: Sent) -> None:
        """Note that the node has acknowledged a message."""
        if not message.acked_at:
            message.acked_at = self.tick()

    def named(self, body: bytes) -> Sent:
        """Return the message that has this body."""
        number, _, _ = body.partition(b":")
        message = self.sent.get(int(number)) if number.isdigit() else None
        if message is None or message.body != body:
            raise Violation(f"{body[:40]!r} was delivered or stored, but never sent")
        return message

    # --- the log ------------------------------------------------------------------------------------------------------

    def scan(self, store: Store, until: int) -> None:
        """Look at the records up to `until` that were not seen before: they are durable."""
        self.expired_before = max(self.expired_before, store.retention.expires_before)
        start = max(self.scanned, store.log.start)
        if until > start:
            for record in store.log.scan(start, until):
                self._seen(record)
        self.scanned = max(self.scanned, until)

    def _seen(self, record: Record) -> None:
        if record.kind == Kind.COPIED:
            record = decode(record.body)
            if record.kind == Kind.MESSAGE:
                self.named(record.body)
            return
        if record.kind == Kind.MESSAGE and not record.topic.startswith(b"$"):
            message = self.named(record.body)
            message.positions.add(record.position)
            if self._damaged:
                self._exempt(message)
            if record.flags & Flag.RETAIN:
                self.retained[record.topic.decode()] = (record.position, message.number)

    def found_in(self, log: CommitLog) -> dict[int, set[int]]:
        """Return the positions of all messages in a log, by the numbers of the messages."""
        found: dict[int, set[int]] = {}
        for record in log.scan(log.start):
            if record.kind == Kind.MESSAGE and not record.topic.startswith(b"$"):
                found.setdefault(self.named(record.body).number, set()).add(record.position)
        return found

    def check_recovered(self, store: Store) -> None:
        """Check the whole log after a start."""
        start = store.log.start
        self.expired_before = max(self.expired_before, start)
        if store.log.written < self.scanned and not self._damaged:
            raise Violation(f"the log was durable up to {self.scanned} and ends at {store.log.written}")
        try:
            found = self.found_in(store.log)
        except RecordCorrupt as error:
            raise Violation(f"the node has started on a damaged log: {error}") from error
        for message in self.sent.values():
            if message.is_exempt:
                continue
            here = found.get(message.number, set())
            missing = {position for position in message.positions if position >= start} - here
            if missing:
                raise Violation(f"{message} was durable and is gone from {sorted(missing)}")
            if message.acked_at and message.qos and not here and not message.positions:
                raise Violation(f"{message} was acknowledged and is not in the log")
            if message.once and len(here | message.positions) > 1 and not self.was_repaired:
                raise Violation(f"{message} is stored more than once, at {sorted(here | message.positions)}")
        self.scanned = min(self.scanned, store.log.written)
        self.scan(store, store.log.written)

    def exempt(self, start: int, stop: int) -> None:
        """Note that the bytes of the log from `start` to `stop` are damaged."""
        self._damaged.append((start, stop))
        for message in self.sent.values():
            self._exempt(message)

    def _exempt(self, message: Sent) -> None:
        if message.is_exempt:
            return
        if not message.positions:
            message.once = False  # its publisher sends it again, and it may have been delivered
            message.is_exempt = bool(message.acked_at)  # nobody has seen where it was
            return
        for start, stop in self._damaged:
            for position in message.positions:
                if start - RECORD_BYTES_MAX < position < stop:
                    message.is_exempt, message.once = True, False
                    return

    # --- deliveries ---------------------------------------------------------------------------------------------------

    def delivered(self, consumer: Consumer, body: bytes, topic: str, now_ms: int) -> Sent:
        """Note that a consumer got a message; check that it may."""
        message = self.named(body)
        if message.topic != topic:
            raise Violation(f"{message} came to {consumer.name} as a message on {topic}")
        if message.due_ms > now_ms:
            raise Violation(f"{message} is due at {message.due_ms} and came to {consumer.name} at {now_ms}")
        if self.is_time_known and self._now_s() < message.not_before_s:
            raise Violation(f"{message} came to {consumer.name} at {self._now_s()}, which is before {message.not_before_s}")
        if message.fate in (Fate.OPEN, Fate.ROLLING_BACK, Fate.ROLLED_BACK):
            raise Violation(f"{message} came to {consumer.name}, but its transaction is: {message.fate.value}")
        consumer.delivered[message.number] += 1
        return message

    def must_be_delivered(self, message: Sent) -> bool:
        """Return whether everybody who is entitled must have got a message by now."""
        if not message.acked_at or not message.qos or message.is_exempt:
            return False
        if message.fate not in (Fate.PLAIN, Fate.COMMITTED):
            return False
        return min(message.positions, default=0) >= self.expired_before

    def missing(self, consumer: Consumer) -> Sent | None:
        """Return a message that a consumer must get and has not got; None if there is none.

        After a repair nobody knows what was lost: records of sessions, groups and acknowledgements may be among it.
        """
        if self.was_repaired:
            return None
        for message in self.sent.values():
            if message.number in consumer.delivered or message.number in consumer.dead:
                continue
            if self.must_be_delivered(message) and consumer.wants(message):
                return message
        return None

    def check_all_delivered(self, consumer: Consumer) -> None:
        """Check at the end that a consumer got everything that it must get."""
        message = self.missing(consumer)
        if message is not None:
            raise Violation(f"{message} never came to {consumer.name}, whose filters are {sorted(consumer.since)}")
