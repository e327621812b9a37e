"""Logs with known outcomes."""

from __future__ import annotations

import random
from collections import defaultdict

from penstock.store.record import Flag, Kind
from tests.spark.log_writer import LogWriter


def every_outcome() -> LogWriter:
    """A log in three segments with each outcome, in group 1 of "pumps"; group 2 has one delivery, and it is in flight.

    Times in ms: pops at 10,000 with a deadline of 40,000 and the log's last record at 200,000.
    """
    log = LogWriter(start=5_000, now_ms=1_000)
    log.group(1, "pumps", "a/#")
    log.group(2, "pumps", "b/#")
    messages = [log.message(f"a/{number}") for number in range(13)]
    log.now_ms = 10_000
    first = log.checkpoint(1, "pumps", messages, deadline_ms=40_000)
    log.now_ms = 10_100
    log.ack(1, "pumps", [(first, 0)])
    log.now_ms = 10_300
    log.ack(1, "pumps", [(first, 1), (first, 0)])  # the second is a duplicate
    log.roll()
    log.now_ms = 20_000
    changed = log.change(1, "pumps", [((first, 2), messages[2])], deadline_ms=90_000)
    log.now_ms = 21_000
    log.ack(1, "pumps", [(changed, 0)])
    nacked = log.change(1, "pumps", [((first, 11), messages[11])], deadline_ms=30_000, flags=Flag.RETURNED)
    returned = log.change(1, "pumps", [((first, 12), messages[12])], deadline_ms=30_000, flags=Flag.RETURNED | Flag.SUSPENDED)
    log.now_ms = 30_000
    log.settle(Kind.POP_REVIVED, 1, "pumps", [(nacked, 0), (returned, 0)])
    log.now_ms = 40_005
    log.settle(Kind.POP_REVIVED, 1, "pumps", [(first, 3), (first, 4)])
    log.settle(Kind.POP_DEAD_LETTER, 1, "pumps", [(first, 5)])
    log.settle(Kind.GROUP_OFFSET_RESET, 1, "pumps", [(first, 9)])
    log.settle(Kind.GROUP_DELETED, 1, "pumps", [(first, 10)])
    log.now_ms = 40_100
    log.ack(1, "pumps", [(first, 6)])  # late
    log.settle(Kind.POP_REVIVED, 1, "pumps", [(first, 1)])  # conflicts with its ack; `first, 7` is lost
    log.ack(1, "pumps", [(first, 8), (first + 9_000_000, 0), (17, 0)])  # late, an orphan, and one from before the log
    log.roll()
    log.now_ms = 50_000
    retried = log.checkpoint(1, "pumps", [messages[3], messages[4]], deadline_ms=160_000, attempt=2)
    log.now_ms = 50_040
    log.ack(1, "pumps", [(retried, 0)])
    log.now_ms = 199_000
    log.checkpoint(2, "pumps", [messages[0]], deadline_ms=229_000)
    log.now_ms = 200_000
    log.message("a/last")
    return log


def random_log(seed: int, deliveries: int) -> LogWriter:
    """Return a log in which anything may follow a delivery, even what a node never writes."""
    rng = random.Random(seed)
    log = LogWriter()
    open_: list[tuple[int, tuple[int, int], int]] = []
    back: defaultdict[int, list[int]] = defaultdict(list)
    handed = 0
    while handed < deliveries:
        log.now_ms += rng.randrange(max(10_000_000 // deliveries, 200))
        if len(log.segments[-1]) > 100_000:
            log.roll()
        group_id = rng.randrange(1, 5)
        attempt = rng.choice((1, 1, 1, 2, 3))
        if attempt == 1 or not back[group_id]:
            messages = [log.message(f"s/{rng.randrange(50)}") for _ in range(rng.randrange(1, 33))]
        else:
            messages, back[group_id] = back[group_id][:20], back[group_id][20:]
        deadline_ms = log.now_ms + rng.choice((1_000, 30_000))
        checkpoint = log.checkpoint(group_id, f"g{group_id}", messages, deadline_ms=deadline_ms, attempt=attempt)
        open_ += [(group_id, (checkpoint, index), message) for index, message in enumerate(messages)]
        handed += len(messages)
        rng.shuffle(open_)
        for _ in range(rng.randrange(3)):
            count = min(len(open_), rng.randrange(1, 30))
            settling, open_ = open_[:count], open_[count:]
            open_ += [each for each in settling if rng.random() < 0.02]  # settled twice
            of_group = [each for each in settling if each[0] == group_id]
            references = [reference for _, reference, _ in of_group]
            if rng.random() < 0.01:
                references.append((rng.randrange(log.end), 12_345_678))
            kind = rng.choice((Kind.POP_ACK, *SETTLING))
            if kind == Kind.GROUP_OFFSET_RESET and group_id > 2:
                kind = Kind.POP_REVIVED  # most groups are never reset
            if kind == Kind.POP_INVISIBLE_CHANGED:
                entries = [(reference, message) for _, reference, message in of_group]
                flags = rng.choice((0, 0, Flag.RETURNED, Flag.RETURNED | Flag.SUSPENDED))
                changed = log.change(group_id, f"g{group_id}", entries, deadline_ms=log.now_ms + 5_000, flags=flags)
                open_ += [(group_id, (changed, index), each[2]) for index, each in enumerate(of_group)]
                handed += len(of_group)
            else:
                log.settle(kind, group_id, f"g{group_id}", references)
                if kind == Kind.POP_REVIVED:
                    back[group_id] += [message for _, _, message in of_group]
    return log


SETTLING = (
    Kind.POP_ACK,
    Kind.POP_REVIVED,
    Kind.POP_DEAD_LETTER,
    Kind.GROUP_OFFSET_RESET,
    Kind.POP_INVISIBLE_CHANGED,
)
