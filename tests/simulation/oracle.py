"""The oracle: what was sent, what the node has acknowledged, and what must therefore hold.

It knows nothing of the node's inside but the records of the log, which it reads after each start and while the node runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from hashlib import blake2b

from penstock.store.errors import RecordCorrupt
from penstock.store.log.commitlog import CommitLog
from penstock.store.record import Flag, Kind, Record, decode
from penstock.store.store import Store
from penstock.store.topics import matches
from tests.simulation.sent import Fate, Sent, Violation
from tests.simulation.timermodel import OCCURRENCE, TimerModel

RECORD_BYTES_MAX = 600
"""No record of a message is larger."""


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
        self.dropped_before = 0
        """The greatest position at which the log has ever begun. A repair may put a segment with a mark before it."""
        self.scanned = 0
        self.was_repaired = False
        self._damaged: list[tuple[int, int]] = []
        """Begin and end of the damaged ranges of the log."""
        self.retained: dict[str, tuple[int, int]] = {}
        """By topic: position of the last retained message in the log, and its number."""
        self.dead_topics: dict[int, set[int]] = {}
        self.timers = TimerModel(self.named)
        self._occurrences: dict[bytes, Sent] = {}
        """The messages of schedules that were seen, by their bodies."""
        self._ends: list[tuple[int, int]] = []
        """Ends of the log, each with the event at which it was there. What is after it came later."""
        self._records = blake2b(digest_size=8)

    @property
    def hash(self) -> str:
        """Hash of all durable records, in their order."""
        return self._records.hexdigest()

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
        if body.startswith(OCCURRENCE):
            return self._occurrence(body)
        number, _, _ = body.partition(b":")
        message = self.sent.get(int(number)) if number.isdigit() else None
        if message is None or message.body != body:
            raise Violation(f"{body[:40]!r} was delivered or stored, but never sent")
        return message

    def _occurrence(self, body: bytes) -> Sent:
        message = self._occurrences.get(body)
        if message is None:
            number = len(self.sent) + 1
            message = self._occurrences[body] = self.sent[number] = self.timers.occurrence(body, number)
        return message

    # --- the log ------------------------------------------------------------------------------------------------------

    def scan(self, store: Store, until: int) -> None:
        """Look at the records up to `until` that were not seen before: they are durable."""
        self.expired_before = max(self.expired_before, store.retention.expires_before)
        self.dropped_before = max(self.dropped_before, store.log.start)
        start = max(self.scanned, store.log.start)
        if until > start:
            for record in store.log.scan(start, until):
                self._seen(record)
            self.timers.check(until)
        self.scanned = max(self.scanned, until)
        if self.timers.plans:
            self._ends.append((store.log.end, self.events))

    def _seen(self, record: Record) -> None:
        self._records.update(b"%d:%d:" % (record.position, record.kind) + record.topic + record.properties + record.body)
        self.timers.apply(record)
        if record.kind == Kind.COPIED:
            record = decode(record.body)
            if record.kind == Kind.MESSAGE:
                self.named(record.body)
            return
        if record.kind == Kind.MESSAGE and not record.topic.startswith(b"$"):
            message = self.named(record.body)
            message.positions.add(record.position)
            if record.flags & Flag.SCHEDULED and not message.acked_at:  # nobody waits for an answer
                message.at = max((event for end, event in self._ends if end <= record.position), default=0)
                self.acknowledged(message)
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
        self.dropped_before = max(self.dropped_before, start)
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
            missing = {position for position in message.positions if position >= self.dropped_before} - here
            if missing:
                raise Violation(f"{message} was durable and is gone from {sorted(missing)}")
            if message.acked_at and message.qos and not here and not message.positions:
                raise Violation(f"{message} was acknowledged and is not in the log")
            stored = here | message.positions
            stored -= here & {stop for _, stop in self._damaged} - message.positions  # left of a copy without its header
            if message.once and len(stored) > 1 and not self.was_repaired:
                raise Violation(f"{message} is stored more than once, at {sorted(stored)}")
        self.scanned = min(self.scanned, store.log.written)
        self.scan(store, store.log.written)
        self.timers.forget_expected()

    def begin_repair(self) -> None:
        """Note that the log is repaired: from here on, nobody knows what damaged records said."""
        self.was_repaired = True
        self.scanned = 0  # records end elsewhere
        self.timers.end_judging()

    def exempt(self, start: int, stop: int) -> None:
        """Note that the bytes of the log from `start` to `stop` are damaged."""
        self._damaged.append((start, stop))
        self.timers.end_judging()
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
        if message.is_cancelled and self.timers.is_judging:
            raise Violation(f"{message} came to {consumer.name}, but it was cancelled or replaced")
        if message.fate in (Fate.OPEN, Fate.ROLLING_BACK, Fate.ROLLED_BACK):
            raise Violation(f"{message} came to {consumer.name}, but its transaction is: {message.fate.value}")
        consumer.delivered[message.number] += 1
        return message

    def must_be_delivered(self, message: Sent) -> bool:
        """Return whether everybody who is entitled must have got a message by now."""
        if not message.acked_at or not message.qos or message.is_exempt:
            return False
        if message.fate not in (Fate.PLAIN, Fate.COMMITTED) or message.is_cancelled:
            return False
        if message.is_recallable and not self.timers.is_judging:
            return False  # it may have been cancelled
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
