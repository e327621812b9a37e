"""What clients were told, what they saw, and whether the two agree. Everything else in this folder only feeds the ledger.

A publication is known by its writer and its number. Writers tell the ledger what they send and what was acknowledged.
Subscribers, groups and audits tell it what they receive. A rule that one event can break is checked at once; `judge`
checks at the end, or after a recovery, that nothing is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple
from zlib import crc32

PROBLEMS_MAX = 50
"""The ledger keeps this many problems of a round. The first ones matter."""


class Key(NamedTuple):
    """Name of a publication."""

    writer: str
    number: int

    def __str__(self) -> str:
        return f"{self.writer}-{self.number}"


class Problem(NamedTuple):
    """A rule that the node has broken."""

    kind: str
    """lost, twice, returned, order, alien, early, unsettled, unanswered, unmarked, spark or broken."""
    what: str


@dataclass(slots=True)
class Publication:
    """A message that a writer has sent.

    `withheld` is True if the node has confirmed that nobody gets the message (rolled back, recalled), False if everybody
    does, and None while that is open: a transaction without an end, or a request without an answer.
    """

    topic: str
    qos: int
    copies_max: int = 1
    """How often it may be in the log: at QoS 1, how often it was sent."""
    is_acked: bool = False
    withheld: bool | None = False
    due_ms: int = 0

    @property
    def must_exist(self) -> bool:
        return self.is_acked and self.withheld is False

    @property
    def may_exist(self) -> bool:
        return self.withheld is not True


def body_of(key: Key, size: int) -> bytes:
    """Return a body that names the publication and that no damage leaves valid."""
    head = b"%s %d " % (key.writer.encode(), key.number)
    text = head + Random(f"{key}").randbytes(max(size - len(head) - 8, 0)).hex().encode()[: max(size - len(head) - 8, 0)]
    return b"%08x%s" % (crc32(text), text)


def key_of(body: bytes) -> Key | None:
    """Return the name of the publication that a body has, or None if no writer made the body."""
    text = body[8:]
    try:
        if int(body[:8], 16) != crc32(text):
            return None
        writer, number, _ = text.split(b" ", 2)
        return Key(writer.decode(), int(number))
    except ValueError:
        return None


@dataclass
class Received:
    """What one subscriber has received in its session."""

    name: str
    takes: Callable[[str], bool]
    """Whether the subscription matches a topic."""
    counts: Counter[Key] = field(default_factory=Counter)
    unmarked: Counter[Key] = field(default_factory=Counter)
    """Deliveries without DUP."""
    last: dict[tuple[str, int], int] = field(default_factory=dict)
    """The highest number so far, by writer and QoS."""
    is_ordered: bool = True
    is_judged: bool = True
    """False once damage may have taken the session itself."""


@dataclass
class Consumed:
    """What the consumers of one group have received and settled."""

    name: str
    takes: Callable[[str], bool]
    popped: Counter[Key] = field(default_factory=Counter)
    acked: dict[str, int] = field(default_factory=dict)
    """Attempt whose acknowledgement the node has confirmed, by message id."""
    taken: dict[str, set[int]] = field(default_factory=dict)
    """Attempts that consumers have received, by message id."""
    asked: dict[str, set[int]] = field(default_factory=dict)
    """Attempts whose acknowledgement was sent and not refused, by message id."""
    ids: dict[Key, set[str]] = field(default_factory=dict)
    is_fifo: bool = False
    is_judged: bool = True

    def may_be_settled(self, key: Key) -> bool:
        """Return whether an acknowledgement of the message was sent, and not refused."""
        return any(self.asked.get(message_id) for message_id in self.ids.get(key, ()))


class Ledger:
    """The publications of a round, and who has received them."""

    def __init__(self) -> None:
        self.publications: dict[Key, Publication] = {}
        self.received: dict[str, Received] = {}
        self.consumed: dict[str, Consumed] = {}
        self.copies: Counter[Key] = Counter()
        """How often the last audit found each publication in the log."""
        self.copies_ever: Counter[Key] = Counter()
        """The most that any audit found of each. Retention may have dropped some since."""
        self.problems: list[Problem] = []
        self.excused: set[Key] = set()
        """Publications that damage, which was injected and then reported, has destroyed."""
        self.may_lose_power = False
        """Whether messages may be delivered and then lost before they are durable, so that they come again as new ones."""
        self.has_retention = False
        """Whether the node deletes segments by their size."""
        self.log_start = 0
        """Where the log begins: retention may have dropped what was before."""
        self.positions: dict[Key, int] = {}
        """Where a publication is in the log, if somebody has seen its message id."""
        self.is_state_intact = True
        """False once reported damage may have destroyed what sessions and groups were."""
        self.may_repeat = False
        """True once the log was repaired: groups may then get again what they had acknowledged."""
        self.early_ms_max = 0
        """By how much a delayed message may be early: 0 unless a fault has set the node's time of day."""
        self._by_topic: dict[str, list[Key]] = {}

    def report(self, kind: str, what: str) -> None:
        """Note a broken rule."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(Problem(kind, what))

    # --- what writers say -------------------------------------------------------------------------------------------

    def sending(self, key: Key, topic: str, qos: int = 0, *, withheld: bool | None = False, due_ms: int = 0) -> None:
        """A writer is about to send a message for the first time."""
        assert key not in self.publications, key
        self.publications[key] = Publication(topic, qos, withheld=withheld, due_ms=due_ms)
        self._by_topic.setdefault(topic, []).append(key)

    def sending_again(self, key: Key) -> None:
        """A writer repeats a message. At QoS 1 each repetition may become a message of its own."""
        if self.publications[key].qos == 1:
            self.publications[key].copies_max += 1

    def acked(self, key: Key) -> None:
        """The node has acknowledged a message."""
        self.publications[key].is_acked = True

    # --- what readers say -------------------------------------------------------------------------------------------

    def subscriber(self, name: str, takes: Callable[[str], bool], *, is_ordered: bool = True) -> Received:
        self.received[name] = Received(name, takes, is_ordered=is_ordered)
        return self.received[name]

    def group(self, name: str, takes: Callable[[str], bool], *, is_fifo: bool = False) -> Consumed:
        self.consumed[name] = Consumed(name, takes, is_fifo=is_fifo)
        return self.consumed[name]

    def _known(self, who: str, topic: str, body: bytes, withheld: Container[Key] | None = None) -> Key | None:
        key = key_of(body)
        if key is None or key not in self.publications:
            self.report("alien", f"{who} got a message that nobody sent: {body[:60]!r}")
            return None
        publication = self.publications[key]
        if publication.topic != topic:
            self.report("alien", f"{who} got {key} on {topic}, and it was sent to {publication.topic}")
        if not publication.may_exist if withheld is None else key in withheld:
            self.report("returned", f"{who} got {key}, which the node has confirmed as withheld")
        return key

    def delivered(self, who: Received, topic: str, body: bytes, qos: int, *, dup: bool) -> None:
        """A subscriber has received a message; at QoS 2, a new one."""
        key = self._known(who.name, topic, body)
        if key is None:
            return
        who.counts[key] += 1
        who.unmarked[key] += not dup
        if qos == 2 and who.counts[key] > 1 and who.is_judged:
            self.report("twice", f"{who.name} got {key} of QoS 2 {who.counts[key]} times")
        last = who.last.get((key.writer, qos), -1)
        is_late = who.is_ordered and key.number < last and who.counts[key] == 1 and key not in self.excused
        if is_late and not self._may_be_a_later_copy(self.publications[key]):
            self.report("order", f"{who.name} got {key} for the first time after number {last}")
        who.last[key.writer, qos] = max(last, key.number)

    def popped(self, who: Consumed, topic: str, body: bytes, message_id: str, attempt: int, *, now_ms: int) -> None:
        """A consumer has received a delivery."""
        key = self._known(who.name, topic, body)
        if key is None:
            return
        who.popped[key] += 1
        self._seen(key, message_id)
        who.ids.setdefault(key, set()).add(message_id)
        who.taken.setdefault(message_id, set()).add(attempt)
        publication = self.publications[key]
        if not self.may_repeat and who.is_judged and attempt > who.acked.get(message_id, attempt):
            self.report("returned", f"{who.name} got {key} ({message_id}) as attempt {attempt} after its acknowledgement")
        if publication.due_ms > now_ms + self.early_ms_max:
            self.report("early", f"{who.name} got {key} {publication.due_ms - now_ms} ms before it was due")
        if who.is_fifo:
            self._check_order(who, key, topic)

    def _seen(self, key: Key, message_id: str) -> None:
        position = int(message_id, 16)
        self.positions[key] = min(position, self.positions.get(key, position))

    def _check_order(self, who: Consumed, key: Key, topic: str) -> None:
        """In FIFO order a message comes after the acknowledgements of all before it in its message group (here: its topic)."""
        if not who.is_judged or self.may_repeat:
            return
        keys = self._by_topic[topic]
        at = keys.index(key)
        before = keys[max(at - 1, 0)]
        if not at or not self.publications[before].must_exist or before in self.excused:
            return
        if self.has_retention and not who.popped[before]:
            return  # retention may have dropped it since the last audit; what a delivery refers to it keeps
        if not who.may_be_settled(before) and not self._may_be_dropped(before):
            self.report("order", f"{who.name} got {key} before anybody acknowledged {before}")

    def asking(self, who: Consumed, message_id: str, attempt: int) -> None:
        """A consumer is about to acknowledge a delivery."""
        who.asked.setdefault(message_id, set()).add(attempt)

    def refused(self, who: Consumed, message_id: str, attempt: int) -> None:
        """The node has refused an acknowledgement because the delivery's time was over. The message comes again."""
        who.asked[message_id].discard(attempt)

    def settled(self, who: Consumed, message_id: str, attempt: int) -> None:
        """The node has confirmed an acknowledgement."""
        who.acked[message_id] = max(who.acked.get(message_id, 0), attempt)

    def lose_state(self) -> None:
        """Expect nothing more of sessions, groups, transactions and timers: reported damage may have destroyed what they were.

        What the log holds of plain messages is still checked.
        """
        self.is_state_intact = False
        for subscriber in self.received.values():
            subscriber.is_judged = subscriber.is_ordered = False
        for group in self.consumed.values():
            group.is_judged = False
        for publication in self.publications.values():
            if publication.topic.startswith(("tx/", "delay/")):
                publication.withheld = None
            if publication.qos == 2:
                publication.copies_max += 1  # the session of its publisher no longer knows what it has received

    # --- judging ----------------------------------------------------------------------------------------------------

    def expected(self, takes: Callable[[str], bool], *, now_ms: int) -> list[Key]:
        """Return the publications that a reader of some topics must have received by now."""
        return [
            key
            for key, one in self.publications.items()
            if one.must_exist and one.due_ms <= now_ms and takes(one.topic) and key not in self.excused
        ]

    def withheld(self) -> set[Key]:
        """Return the publications that nobody gets, as the node has confirmed."""
        return {key for key, one in self.publications.items() if not one.may_exist}

    def audited(
        self, found: Iterable[tuple[str, str, bytes]], expected: Iterable[Key], withheld: Container[Key] | None = None
    ) -> None:
        """A new group has read the log from its beginning, and found messages.

        Args:
            found: id, topic and body of each.
            expected: what `expected` returned before the audit began.
            withheld: what `withheld` returned when the log was copied; None if the log is no copy.
        """
        self.copies = Counter()
        last: dict[str, int] = {}
        for message_id, topic, body in found:
            key = self._known("the audit", topic, body, withheld)
            if key is None:
                continue
            self._seen(key, message_id)
            self.copies[key] += 1
            publication = self.publications[key]
            if self.copies[key] > publication.copies_max:
                self.report("twice", f"the log has {key} {self.copies[key]} times; it was sent {publication.copies_max} times")
            if self.copies[key] == 1 and not publication.due_ms and publication.withheld is not None:
                if self._may_be_a_later_copy(publication):
                    continue
                if publication.qos and key.number < last.get(key.writer, -1) and key not in self.excused:
                    self.report("order", f"the log has {key} after number {last[key.writer]}")
                last[key.writer] = max(last.get(key.writer, -1), key.number)
        self.copies_ever |= self.copies
        self._missing("the log", [key for key in expected if not self.copies[key]])

    def judge(self, *, now_ms: int) -> None:
        """Compare what each reader has received with what it must have, after everything has come to rest."""
        for subscriber in self.received.values():
            if subscriber.is_judged:
                expected = self.expected(subscriber.takes, now_ms=now_ms)
                self._missing(subscriber.name, [key for key in expected if not subscriber.counts[key]])
        self._check_marks()
        for group in self.consumed.values():
            if group.is_judged:
                missing = self.unsettled(group, now_ms=now_ms)
                self._missing(f"group {group.name}", [key for key in missing if not group.popped[key]])
                left = [key for key in missing if group.popped[key] and not self._may_be_dropped(key)]
                if left:
                    self.report("unsettled", f"group {group.name} got {_some(left)}, and could not settle them")

    def _check_marks(self) -> None:
        """What comes again to a session has DUP. Members of a shared subscription get each other's messages as new ones."""
        if self.may_lose_power or self.has_retention or self.may_repeat:
            return
        for one in self.received.values():
            again = [key for key, count in one.unmarked.items() if count > max(self.copies_ever[key], 1)]
            if again and one.is_ordered:
                self.report("unmarked", f"{one.name} got {_some(again)} again without DUP")

    def check_messages(self, where: str, found: set[Key]) -> None:
        """Check that a list of the messages of the log has all that it must have."""
        self._missing(where, [key for key in self.expected(lambda topic: True, now_ms=2**62) if key not in found])

    def unsettled(self, group: Consumed, *, now_ms: int) -> list[Key]:
        """Return the publications that a group must still receive or settle."""
        expected = self.expected(group.takes, now_ms=now_ms)
        return [key for key in expected if not group.may_be_settled(key)]

    def missing_to(self, subscriber: Received, *, now_ms: int) -> list[Key]:
        """Return the publications that a subscriber must still receive, as far as the last audit knows."""
        expected = self.expected(subscriber.takes, now_ms=now_ms)
        return [key for key in expected if not subscriber.counts[key] and not self._may_be_dropped(key)]

    def waits_for(self, group: Consumed, *, now_ms: int) -> list[Key]:
        """Return what `unsettled` returns, without what retention may have dropped."""
        return [key for key in self.unsettled(group, now_ms=now_ms) if not self._may_be_dropped(key)]

    def _may_be_dropped(self, key: Key) -> bool:
        """Return whether the message may have been below the log's beginning, which retention has moved to `log_start`.

        A writer's messages are in the log in the order of their numbers, so a position that nobody has seen is below that of
        the next number.
        """
        if not self.log_start:
            return False
        position = self.positions.get(key)
        if position is None:
            kept = self._first_kept(key.writer)
            return kept is None or key.number < kept
        return position < self.log_start

    def _first_kept(self, writer: str) -> int | None:
        """Return the lowest number of a writer that is known to be in the log."""
        return min(
            (key.number for key, position in self.positions.items() if key.writer == writer and position >= self.log_start),
            default=None,
        )

    def _may_be_a_later_copy(self, publication: Publication) -> bool:
        """Return whether retention may have dropped the first copy of a message that was sent several times."""
        return self.has_retention and publication.copies_max > 1

    def _missing(self, where: str, missing: list[Key]) -> None:
        lost = [key for key in missing if not self._may_be_dropped(key)]
        if lost:
            self.report("lost", f"{len(lost)} acknowledged messages are missing in {where}: {_some(lost)}")

    def acked_count(self) -> int:
        """Return how many messages were acknowledged."""
        return sum(one.is_acked for one in self.publications.values())

    def repeats(self) -> int:
        """Return how many deliveries came again at QoS 1 although the log has their messages once."""
        return sum(
            max(count - max(self.copies_ever[key], 1), 0) for one in self.received.values() for key, count in one.counts.items()
        )

    def unmarked_repeats(self) -> int:
        """Return how many of the `repeats` came without DUP."""
        return sum(
            max(count - max(self.copies_ever[key], 1), 0)
            for one in self.received.values()
            for key, count in one.unmarked.items()
        )


def _some(keys: list[Key]) -> str:
    shown = ", ".join(map(str, sorted(keys)[:6]))
    return shown if len(keys) <= 6 else f"{shown} and {len(keys) - 6} more"
