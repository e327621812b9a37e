"""Pending delayed messages: `Client.timers` and `SyncClient.timers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.pop.client import answers
from penstock.pop.client.calls import AsyncCalls, SyncCalls
from penstock.pop.client.results import Timer
from penstock.pop.proto import pop_pb2 as pb

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import TimerServiceAsyncStub, TimerServiceStub


def _name(recall_handle: str, topic: str, key: str) -> pb.TimerName:
    if bool(recall_handle) == bool(topic and key):
        raise ValueError("give a recall handle, or a topic and a key")
    return pb.TimerName(recall_handle=recall_handle, topic=topic, key=key)


def _change(recall_handle: str, topic: str, key: str, deliver_at_ms: int, delay_ms: int) -> pb.RescheduleTimerRequest:
    if deliver_at_ms and delay_ms:
        raise ValueError("give deliver_at_ms or delay_ms, not both")
    name = _name(recall_handle, topic, key)
    return pb.RescheduleTimerRequest(name=name, deliver_at_ms=deliver_at_ms, delay_ms=delay_ms)


def _found(timer: Timer) -> Timer:
    answers.only(answers.errors([timer.status]))
    return timer


class TimerCalls:
    """Finds, cancels and reschedules delayed messages that are pending.

    A message is named by its recall handle, or by its topic and the key that its sender gave it. The caller needs the right to
    send to the topic. All methods raise NodeUnavailable, NotAuthenticated and NotPermitted; UnknownMessage if no message of the
    key is pending; and for a handle AlreadyFired, AlreadyRecalled, UnknownMessage and InvalidHandle.
    """

    def __init__(self, call: AsyncCalls, stub: TimerServiceAsyncStub) -> None:
        self._call = call
        self._stub = stub

    async def find(self, recall_handle: str = "", *, topic: str = "", key: str = "") -> Timer:
        """Return a pending message: its handle, id, topic, key and delivery time."""
        return _found(await self._call(self._stub.FindTimer, _name(recall_handle, topic, key)))

    async def cancel(self, recall_handle: str = "", *, topic: str = "", key: str = "") -> None:
        """Cancel a pending message, which is then never delivered."""
        status = await self._call(self._stub.CancelTimer, _name(recall_handle, topic, key))
        answers.only(answers.errors([status]))

    async def reschedule(
        self, recall_handle: str = "", *, topic: str = "", key: str = "", deliver_at_ms: int = 0, delay_ms: int = 0
    ) -> Timer:
        """Let a pending message be delivered at another time, in one step; return it with its new handle and id.

        Args:
            recall_handle: Names the message, unless `topic` and `key` do.
            topic: See above.
            key: See above.
            deliver_at_ms: Delivery time in ms since 1970. A time in the past: deliver at once.
            delay_ms: Delay in ms from when the node gets the call, instead of `deliver_at_ms`.

        Raises:
            RequestInvalid: The time is negative or too far away, or the message would expire before.
        """
        request = _change(recall_handle, topic, key, deliver_at_ms, delay_ms)
        return _found(await self._call(self._stub.RescheduleTimer, request))


class SyncTimerCalls:
    """The methods of `TimerCalls`, for threads. Parameters, results and errors are the same."""

    def __init__(self, call: SyncCalls, stub: TimerServiceStub) -> None:
        self._call = call
        self._stub = stub

    def find(self, recall_handle: str = "", *, topic: str = "", key: str = "") -> Timer:
        """Return a pending message, as `TimerCalls.find`."""
        return _found(self._call(self._stub.FindTimer, _name(recall_handle, topic, key)))

    def cancel(self, recall_handle: str = "", *, topic: str = "", key: str = "") -> None:
        """Cancel a pending message, as `TimerCalls.cancel`."""
        answers.only(answers.errors([self._call(self._stub.CancelTimer, _name(recall_handle, topic, key))]))

    def reschedule(
        self, recall_handle: str = "", *, topic: str = "", key: str = "", deliver_at_ms: int = 0, delay_ms: int = 0
    ) -> Timer:
        """Let a pending message be delivered at another time, as `TimerCalls.reschedule`."""
        request = _change(recall_handle, topic, key, deliver_at_ms, delay_ms)
        return _found(self._call(self._stub.RescheduleTimer, request))
