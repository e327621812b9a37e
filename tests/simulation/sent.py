"""What clients of the simulation have sent, and the error that ends a run."""

from __future__ import annotations

from enum import Enum


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
    """A message that a client, or a schedule of a client, has sent.

    Parameters:
        number: its number, which the body begins with if a client has sent it.
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
        "is_cancelled",
        "is_exempt",
        "is_recallable",
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
        self.is_recallable = False
        """Whether a client may cancel, replace or reschedule it."""
        self.is_cancelled = False
        """Whether the log says durably that it was cancelled or replaced before it fired."""

    @property
    def is_in_order(self) -> bool:
        """Whether it enters its queues when it is stored, so that its position gives its place among others."""
        return not self.due_ms and self.fate is Fate.PLAIN and len(self.positions) <= 1

    def __str__(self) -> str:
        return f"message {self.number} on {self.topic} (QoS {self.qos}, positions {sorted(self.positions)})"
