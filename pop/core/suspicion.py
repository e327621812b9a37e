"""Suspicion: finding the message that ends the processes of its consumers.

When the invisible time of several deliveries of one pop is over, nothing says which of them was at fault: the process of their
consumer may have ended before it began with most of them. None of them loses an attempt then. They return with a *level*, which
bounds how many messages a pop hands out together: half as many as were out. So each such return halves the number of suspects,
and what consumers acknowledge meanwhile narrows it further. At the lowest level a message is handed out alone, and its group
hands out no other message of that level at the same time, until it is settled, or its consumer has lived long enough to extend
it. If the time of that delivery is over, too, the attempt counts.

A consumer that extends one message of several keeps it out by itself, beside the others. So such a message keeps the level of
its pop, or gets that of the number of messages in it, and returns with the next lower one.

Members of a shared subscription are consumers, too. When one is lost, all that it had returns in this way at once, and what it
had alone has failed.

A message has at most log2(n) + 1 uncounted returns, where n is the number of messages that were handed out with it.

A level is 0, or 1 plus the binary logarithm of the number of messages that may be out together. It is in the flags of the
records of deliveries (`LEVEL_MASK`), and beside the attempts in the retry queue of a group.
"""

from __future__ import annotations

from penstock.store.index.rowformats import ATTEMPT_BITS
from penstock.store.record import LEVEL_MASK

ALONE = 1
"""The level of a message that is handed out alone."""


def together_max(level: int) -> int:
    """Return how many messages may be handed out together at a level that is not 0."""
    return 1 << level - 1


def level_of(count: int) -> int:
    """Return the lowest level at which `count` messages may be out together; 0 for one message."""
    return (count - 1).bit_length() + 1 if count > 1 else 0


def narrowed(level: int, count: int) -> int:
    """Return the level with which `count` messages return that were handed out at a level and are still open."""
    together = min(count, together_max(level)) if level else count
    return min(max((together - 1).bit_length(), ALONE), LEVEL_MASK)


def lowest(level: int, other: int) -> int:
    """Return the lower of two levels, of which 0 is the highest."""
    return min(level, other) if level and other else level or other


def returned(attempts: int, level: int) -> int:
    """Return what an entry of a retry queue says of its message: the attempts it had, and its level."""
    return attempts | level << ATTEMPT_BITS


def attempts_and_level(aux: int) -> tuple[int, int]:
    """Return the attempts and the level that an entry of a retry queue says."""
    return aux & (1 << ATTEMPT_BITS) - 1, aux >> ATTEMPT_BITS
