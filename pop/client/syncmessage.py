"""A message that a client for threads received."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from penstock.pop.client import answers, requests
from penstock.pop.client.calls import SyncCalls
from penstock.pop.client.durations import Duration, milliseconds
from penstock.pop.client.received import ReceivedMessage
from penstock.pop.client.requests import nack_of
from penstock.pop.errors import AlreadyAcked, NodeUnavailable, PopError
from penstock.pop.proto import pop_pb2 as pb

if TYPE_CHECKING:
    from penstock.pop.client.tracing import Tracing
    from penstock.pop.proto.pop_pb2_grpc import PopServiceStub


class SyncSettlements:
    """Acknowledges deliveries of one group, makes dead letters of them, and moves their deadlines.

    Parameters:
        call: Performs a call.
        stub: The node.
        group: Name of the group.
        tracing: Makes the spans of what messages settle, if there is one.
    """

    __slots__ = ("_call", "_stub", "group", "tracing")

    def __init__(self, call: SyncCalls, stub: PopServiceStub, group: str, tracing: Tracing | None = None) -> None:
        self.tracing = tracing
        self._call = call
        self._stub = stub
        self.group = group

    def ack(self, handles: list[str]) -> list[PopError | None]:
        """Acknowledge deliveries, in up to two tries; return the error of each, or None."""
        request = requests.handles(self.group, handles)
        try:
            return answers.errors(self._call(self._stub.Ack, request).statuses)
        except NodeUnavailable:
            # In the second try, AlreadyAcked means that the first try succeeded and its answer was lost.
            errors = answers.errors(self._call(self._stub.Ack, request).statuses)
            return [None if isinstance(error, AlreadyAcked) else error for error in errors]

    def dead_letter(self, handles: list[str], reason: str) -> list[PopError | None]:
        """Make deliveries dead letters; return the error of each, or None."""
        return answers.errors(self._call(self._stub.DeadLetter, requests.handles(self.group, handles, reason)).statuses)

    def change(self, change: pb.InvisibleChange) -> str:
        """Move the deadline of a delivery; return its new handle."""
        answer = self._call(self._stub.ChangeInvisible, requests.change_invisible(self.group, [change]))
        return answers.only(answers.new_handles(answer))

    def give_back(self, handles: list[str]) -> None:
        """Return deliveries that the application has not seen, at once and without counting an attempt."""
        if handles:
            changes = [pb.InvisibleChange(handle=handle, suspend=True) for handle in handles]
            self._call(self._stub.ChangeInvisible, requests.change_invisible(self.group, changes))


class SyncMessage(ReceivedMessage):
    """A message from `SyncClient.consume` or `SyncClient.pop`. Its methods do what those of `Message` do, and block."""

    __slots__ = ("_settlements",)

    def __init__(self, received: pb.PoppedMessage, settlements: SyncSettlements) -> None:
        super().__init__(received)
        self._settlements = settlements

    @property
    def group(self) -> str:
        """Name of the group to which the message was delivered."""
        return self._settlements.group

    def ack(self) -> None:
        """Acknowledge the message; return when that is durable. Raises as `Message.ack`."""
        with self._settling("ack"):
            answers.only(self._settlements.ack([self.handle]))

    def nack(self, *, delay: Duration = 0.0, reason: str = "") -> None:
        """Return the message as a failed attempt, as `Message.nack`."""
        with self._settling("nack"):
            self._settlements.change(nack_of(self.handle, milliseconds(delay, "delay"), reason))

    def suspend(self, delay: Duration = 0.0) -> None:
        """Return the message without counting the attempt, as `Message.suspend`."""
        with self._settling("suspend"):
            change = pb.InvisibleChange(handle=self.handle, invisible_ms=milliseconds(delay, "delay"), suspend=True)
            self._settlements.change(change)

    def extend(self, invisible: Duration) -> None:
        """Move the deadline, as `Message.extend`."""
        invisible_ms = milliseconds(invisible, "invisible")
        self.handle = self._settlements.change(pb.InvisibleChange(handle=self.handle, invisible_ms=invisible_ms))

    def dead_letter(self, *, reason: str = "") -> None:
        """Make the message a dead letter of its group, as `Message.dead_letter`."""
        with self._settling("dead_letter"):
            answers.only(self._settlements.dead_letter([self.handle], reason))

    def _settling(self, operation: str) -> AbstractContextManager[None]:
        tracing = self._settlements.tracing
        return tracing.settling(operation, self.group, self) if tracing is not None else nullcontext()
