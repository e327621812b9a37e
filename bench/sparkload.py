"""A log with known outcomes of any size, for the benchmark of the reconciliation and for its test."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from penstock.store import record
from penstock.store.bodies import CHANGE_ENTRY, CHECKPOINT_ENTRY, REFERENCE
from penstock.store.record import CONSUMED, EXPIRED, POP_FIXED, Flag, Kind

BATCH = 32
"""Messages of a pop."""
GROUPS = 8
TOPICS = 10_000
INVISIBLE_MS = 30_000
DAY_MS = 86_400_000
START_MS = 1_700_006_400_000
"""When the log begins: midnight in UTC."""

_BODY = b"x" * 120

Reference = tuple[int, int]


@dataclass(slots=True)
class Expected:
    """What a reconciliation has to find in a log."""

    outcomes: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    extensions: int = 0
    end: int = 0
    last_ms: int = 0


class _Log:
    """Appends records to segment files."""

    def __init__(self, data_dir: Path, segment_bytes: int) -> None:
        self._directory = data_dir / "commitlog"
        self._directory.mkdir(parents=True)
        self._segment_bytes = segment_bytes
        self._parts: list[bytes] = []
        self._base = self.end = 0
        self.now_ms = START_MS

    def add(self, kind: Kind, topic: bytes, body: bytes, fixed: bytes, flags: int = 0, properties: bytes = b"") -> int:
        data = record.encode(kind, topic, body, store_ms=self.now_ms, fixed=fixed, properties=properties, flags=flags)
        return self.put(data)

    def put(self, data: bytes) -> int:
        if self.end + len(data) - self._base > self._segment_bytes:
            self.save()
        position = self.end
        self._parts.append(data)
        self.end += len(data)
        return position

    def save(self) -> None:
        """Write the segment, and begin another."""
        (self._directory / f"{self._base:020d}.log").write_bytes(b"".join(self._parts))
        self._parts, self._base = [], self.end


def write_log(data_dir: Path, deliveries: int, *, days: float = 1.0, segment_bytes: int = 64 << 20, seed: int = 1) -> Expected:
    """Write a log of about so many deliveries, evenly over some days, in which all outcomes occur; return what is in it.

    A pop hands out `BATCH` messages of 120 bytes to one of `GROUPS` groups. Nearly all are acknowledged after 20 ms to 2 s. In
    one batch of 20, a message is revived, nacked, suspended, extended, returned, dead-lettered, expired, lost, voided, ended
    twice, or acknowledged late. What came back waits for the end of the log in one case of ten, else it is acknowledged at its
    second delivery. The times of a batch overlap with those of the next ones.
    """
    rng = random.Random(seed)
    log, expected = _Log(data_dir, segment_bytes), Expected()
    for group_id in range(1, VOIDED_GROUP + 1):
        described = orjson.dumps({"group": f"group-{group_id}", "filter": f"topic/{group_id}/#"})
        log.add(Kind.GROUP_CREATED, b"group-%d" % group_id, b"", POP_FIXED.pack(group_id, 1, 0), properties=described)
    batches = max(deliveries // BATCH, 1)
    step_ms = days * DAY_MS / batches
    again: deque[tuple[int, int]] = deque()
    """Groups and messages that came back and are to be delivered again."""
    for number in range(batches):
        log.now_ms = START_MS + int(number * step_ms)
        group_id = number % GROUPS + 1
        special = _SPECIALS[number // 20 % len(_SPECIALS)] if number % 20 == 7 else ""
        if special == "voided":
            group_id = VOIDED_GROUP
        _batch(log, expected, rng, group_id, special, again)
        if number % 200 == 150:
            _deliver_again(log, expected, again)
    expected.messages["waiting"] += len(again)
    last = log.add(Kind.POP_CHECKPOINT, b"group-1", _entries([_message(log, rng)]), _fixed(1, log.now_ms + INVISIBLE_MS))
    assert last < log.end
    expected.outcomes["in_flight"] += 1
    expected.messages["in_flight"] += 1
    log.save()
    log.put(record.encode(Kind.MESSAGE, b"topic/0", b"", store_ms=log.now_ms, flags=1))  # the open segment
    log.save()
    expected.end, expected.last_ms = log.end, log.now_ms
    return expected


_SPECIALS = (
    "revived",
    "nacked",
    "suspended",
    "extended",
    "returned",
    "dead_lettered",
    "expired",
    "lost",
    "acked_late",
    "voided",
    "conflicting",
)

VOIDED_GROUP = GROUPS + 1
"""A group that is deleted again and again, though it goes on. It has few messages, as groups have that are deleted."""


def _fixed(group_id: int, deadline_ms: int = 0) -> bytes:
    return POP_FIXED.pack(group_id, 1, deadline_ms)


def _entries(messages: list[int], attempt: int = 1) -> bytes:
    return b"".join(CHECKPOINT_ENTRY.pack(message, 0, 180, attempt, attempt > 1, 0) for message in messages)


def _message(log: _Log, rng: random.Random) -> int:
    topic = b"topic/%d/%d" % (rng.randrange(GROUPS) + 1, rng.randrange(TOPICS))
    return log.put(record.encode(Kind.MESSAGE, topic, _BODY, store_ms=log.now_ms, flags=1))


def _batch(
    log: _Log, expected: Expected, rng: random.Random, group_id: int, special: str, again: deque[tuple[int, int]]
) -> None:
    """Publish and deliver a batch, of which the first message has the fate `special`, if any."""
    topic = b"topic/%d/%d" % (group_id, rng.randrange(TOPICS))
    data = record.encode(Kind.MESSAGE, topic, _BODY, store_ms=log.now_ms, flags=1)
    messages = [log.put(data) for _ in range(BATCH)]
    name, popped_ms = b"group-%d" % group_id, log.now_ms
    checkpoint = log.add(Kind.POP_CHECKPOINT, name, _entries(messages), _fixed(group_id, popped_ms + INVISIBLE_MS))

    def settle(kind: Kind, reference: Reference, after_ms: int, flags: int = 0) -> None:
        log.now_ms = popped_ms + after_ms
        log.add(kind, name, REFERENCE.pack(*reference), _fixed(group_id), flags)

    def change(after_ms: int, flags: int = 0) -> Reference:
        log.now_ms = popped_ms + after_ms
        body = CHANGE_ENTRY.pack(checkpoint, 0, messages[0], 0, 180, 1, 0, 0)
        return log.add(Kind.POP_INVISIBLE_CHANGED, name, body, _fixed(group_id, log.now_ms + 1_000), flags), 0

    acked = range(BATCH)
    if special:
        acked = range(1, BATCH)
    latency_ms = 20 + rng.randrange(2_000)
    log.now_ms = popped_ms + latency_ms
    log.add(Kind.POP_ACK, name, b"".join(REFERENCE.pack(checkpoint, index) for index in acked), _fixed(group_id), CONSUMED)
    expected.outcomes["acked"] += len(acked)
    expected.messages["acked"] += len(acked)
    first = (checkpoint, 0)
    if special:
        outcome = "acked" if special == "extended" else special
        expected.outcomes[outcome] += 1
        if special in ("revived", "nacked", "suspended", "returned"):
            again.append((group_id, messages[0]))
        else:
            expected.messages[outcome] += 1
    match special:
        case "revived":
            settle(Kind.POP_REVIVED, first, INVISIBLE_MS + 5)
        case "returned":
            settle(Kind.POP_REVIVED, first, 3_000, Flag.SUSPENDED)
        case "nacked" | "suspended":
            flags = Flag.RETURNED | (Flag.SUSPENDED if special == "suspended" else 0)
            settle(Kind.POP_REVIVED, change(3_000, flags), 4_001)
        case "extended":
            settle(Kind.POP_ACK, change(3_000), 3_500, CONSUMED)
            expected.extensions += 1
        case "dead_lettered":
            settle(Kind.POP_DEAD_LETTER, first, INVISIBLE_MS + 5)
        case "expired":
            settle(Kind.POP_ACK, first, 3_000, EXPIRED)
        case "acked_late":
            settle(Kind.POP_ACK, first, INVISIBLE_MS + 5, CONSUMED)
        case "conflicting":
            settle(Kind.POP_ACK, first, 3_000, CONSUMED)
            settle(Kind.POP_REVIVED, first, INVISIBLE_MS + 5)
        case "voided":
            settle(Kind.GROUP_DELETED, first, 3_000)
            forgotten = [each for each in again if each[0] == group_id]
            for each in forgotten:
                again.remove(each)
            expected.messages["voided"] += len(forgotten)
        case _:
            pass  # nothing ends what is lost


def _deliver_again(log: _Log, expected: Expected, again: deque[tuple[int, int]]) -> None:
    """Deliver and acknowledge what came back, but for one of ten, which waits until the end."""
    for _ in range(len(again)):
        group_id, message = again.popleft()
        if message % 10 == 0:
            again.append((group_id, message))
            continue
        name = b"group-%d" % group_id
        checkpoint = log.add(
            Kind.POP_CHECKPOINT, name, _entries([message], attempt=2), _fixed(group_id, log.now_ms + INVISIBLE_MS)
        )
        log.add(Kind.POP_ACK, name, REFERENCE.pack(checkpoint, 0), _fixed(group_id), CONSUMED)
        expected.outcomes["acked"] += 1
        expected.messages["acked"] += 1
