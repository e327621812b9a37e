"""A message that an asyncio client received."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from penstock.pop.client.durations import Duration, milliseconds
from penstock.pop.client.received import ReceivedMessage
from penstock.pop.client.requests import nack_of
from penstock.pop.client.settlements import Settlements
from penstock.pop.proto import pop_pb2 as pb


class Message(ReceivedMessage):
    """A message from `Client.consume` or `Client.pop`. It comes back as a new attempt unless it is acknowledged in time."""

    __slots__ = ("_settlements", "deadline", "is_settled", "went_back")

    def __init__(self, received: pb.PoppedMessage, settlements: Settlements, deadline: float = 0.0) -> None:
        self._received = received  # as the base class does, without the call
        self.handle = received.handle
        self._settlements = settlements
        self.deadline = deadline
        """Deadline by the clock of the event loop, in seconds; 0 for messages of `Client.pop`. The node's deadline is a little
        earlier, by the time that the message took to arrive."""
        self.is_settled = False
        """True after `ack`, `nack`, `suspend` or `dead_letter` was called."""
        self.went_back = False
        """True after `nack` or `suspend` was called: the message comes again."""

    @property
    def group(self) -> str:
        """Name of the group to which the message was delivered."""
        return self._settlements.group

    def ack(self) -> asyncio.Future[None]:
        """Acknowledge the message. The returned future is done when that is durable.

        The acknowledgement is sent whether the future is awaited or not, so a loop that ignores the result need not wait a
        round trip for each message. Acknowledgements that arrive during a call share the next call.

        Raises:
            HandleExpired, AlreadyAcked, HandleReplaced, InvalidHandle: The node refused the acknowledgement.
            NodeUnavailable: The node did not answer, in several tries.
        """
        self.is_settled = True
        acked: asyncio.Future[None] = self._settlements.acks.submit(self.handle)
        if self._settlements.tracing is not None:
            self._settlements.tracing.settling_until(acked, "ack", self.group, self)
        return acked

    async def nack(self, *, delay: Duration = 0.0, reason: str = "") -> None:
        """Return the message as a failed attempt after `delay`, in seconds or as a timedelta, and the group's back-off.

        After its last attempt the message becomes a dead letter at once.

        Args:
            delay: How long the message waits besides the back-off.
            reason: Why the attempt failed. It is stored with the dead letter, up to 2,000 bytes.

        Raises:
            TypeError, ValueError: The delay is no duration.
            InvalidInvisibleTime: The delay is longer than 12 hours.
            StatusError, NodeUnavailable: As for `ack`.
        """
        change = nack_of(self.handle, milliseconds(delay, "delay"), reason)
        self.is_settled = self.went_back = True
        await self._give_back("nack", change)

    async def suspend(self, delay: Duration = 0.0) -> None:
        """Return the message after `delay`, as `nack`, without counting this delivery as an attempt. Raises as `nack`."""
        change = pb.InvisibleChange(handle=self.handle, invisible_ms=milliseconds(delay, "delay"), suspend=True)
        self.is_settled = self.went_back = True
        await self._give_back("suspend", change)

    async def _give_back(self, operation: str, change: pb.InvisibleChange) -> None:
        changed = self._settlements.changes.submit(change)
        if self._settlements.tracing is not None:
            self._settlements.tracing.settling_until(changed, operation, self.group, self)
        await changed

    async def extend(self, invisible: Duration) -> None:
        """Move the deadline to `invisible` from now, in seconds or as a timedelta, earlier or later than before.

        The message gets a new handle.

        Raises:
            StatusError, NodeUnavailable: As for `nack`.
        """
        invisible_ms = milliseconds(invisible, "invisible")
        change = pb.InvisibleChange(handle=self.handle, invisible_ms=invisible_ms)
        self.handle = await self._settlements.changes.submit(change)
        self.deadline = asyncio.get_running_loop().time() + invisible_ms / 1000

    async def dead_letter(self, *, reason: str = "") -> None:
        """Make the message a dead letter of its group, because no attempt will ever succeed.

        Args:
            reason: Why. It is stored with the dead letter, up to 2,000 bytes.

        Raises:
            StatusError, NodeUnavailable: As for `ack`.
        """
        self.is_settled = True
        tracing = self._settlements.tracing
        with tracing.settling("dead_letter", self.group, self) if tracing is not None else nullcontext():
            await self._settlements.dead_letter(self.handle, reason)


def ack_together(messages: Sequence[Message]) -> asyncio.Future[Any]:
    """Acknowledge messages of one consumer. The future has a list with an error, or None, for each, when all are durable.

    This costs a message less than `Message.ack`. The future raises NodeUnavailable if the node did not answer.
    """
    settlements = messages[0]._settlements
    for message in messages:
        message.is_settled = True
    acked: asyncio.Future[Any] = settlements.acks.submit([message.handle for message in messages])
    if settlements.tracing is not None:
        settlements.tracing.settling_until(acked, "ack", settlements.group, *messages)
    return acked
