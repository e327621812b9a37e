"""What a leader sends a follower, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.store.log.commitlog import CommitLog


class Stretch(NamedTuple):
    """Adjacent records of one segment."""

    position: int
    data: bytes
    begins_segment: bool


def stretches(log: CommitLog, position: int, records_max: int) -> Iterator[Stretch]:
    """Yield the records of a log from `position` on, up to `records_max` at a time."""
    found = [(each.position, each.size) for each in log.scan(position)]
    while found:
        segment = log.segment_at(found[0][0])
        together = [each for each in found[:records_max] if log.segment_at(each[0]) is segment]
        data = b"".join(log.read(*each) for each in together)
        yield Stretch(together[0][0], data, together[0][0] == segment.base)
        found = found[len(together) :]
