"""What an asyncio client tells the node about deliveries of one group, gathered into few calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.pop.client import answers, requests
from penstock.pop.client.batcher import Batcher
from penstock.pop.client.calls import call
from penstock.pop.client.retrydelays import RetryDelays
from penstock.pop.errors import AlreadyAcked, NodeUnavailable, Overloaded, PopError
from penstock.pop.proto import pop_pb2 as pb

if TYPE_CHECKING:
    from penstock.pop.client.tracing import Tracing
    from penstock.pop.proto.pop_pb2_grpc import PopServiceAsyncStub

# The standard library's logger, unlike the node's: the application decides where its messages go.
logger = logging.getLogger("penstock.client")

HANDLES_PER_CALL_MAX = 4096
"""A quarter of what a node accepts in one call, so that a call never occupies its loop for long."""


AckItem = str | list[str]
"""Handles to acknowledge: one, or those of several messages. The future of one raises its error. That of several has a list
with an error, or None, for each."""


def handles_of(acks: Iterable[AckItem]) -> list[str]:
    """Return the handles that items name, in order."""
    handles: list[str] = []
    for each in acks:
        if isinstance(each, str):
            handles.append(each)
        else:
            handles += each
    return handles


def by_item(acks: Iterable[AckItem], errors: Sequence[PopError | None]) -> list[Any]:
    """Return the answer for each item. `errors` has one for each handle."""
    found: list[Any] = []
    at = 0
    for each in acks:
        if isinstance(each, str):
            found.append(errors[at])
            at += 1
        else:
            found.append(errors[at : at + len(each)])
            at += len(each)
    return found


def _count_of(ack: AckItem) -> int:
    return 1 if isinstance(ack, str) else len(ack)


class Settlements:
    """Acknowledges deliveries of one group, makes dead letters of them, and moves their deadlines.

    Parameters:
        stub: The node.
        group: Name of the group.
        timeout_s: Time for one acknowledgement in seconds, all tries together.
        tracing: Makes the spans of what messages settle, if there is one.
    """

    def __init__(self, stub: PopServiceAsyncStub, group: str, timeout_s: float, tracing: Tracing | None = None) -> None:
        self.group = group
        self.tracing = tracing
        self._stub = stub
        self._timeout_s = timeout_s
        self.acks: Batcher[AckItem, Any] = Batcher(
            self._ack, count_max=HANDLES_PER_CALL_MAX, size_max=HANDLES_PER_CALL_MAX, size_of=_count_of
        )
        self.changes: Batcher[pb.InvisibleChange, str] = Batcher(self._change, count_max=HANDLES_PER_CALL_MAX)
        self._perhaps_acked: set[str] = set()
        """Handles from pops that got no answer. The node may have acknowledged them."""

    async def _ack(self, acks: list[AckItem]) -> list[Any]:
        handles = handles_of(acks)
        request = requests.handles(self.group, handles)
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self._timeout_s
        delays = RetryDelays()
        is_repeated = False
        while True:
            try:
                answer = await call(self._stub.Ack, request, max(ends_s - loop.time(), 0.001))
                break
            except (NodeUnavailable, Overloaded):
                if loop.time() >= ends_s:
                    raise
            is_repeated = True
            await asyncio.sleep(delays.next_s())
        # After a repetition, AlreadyAcked means that an earlier try succeeded and its answer was lost.
        perhaps_acked = self._perhaps_acked
        errors: list[PopError | None] = [
            None if isinstance(error, AlreadyAcked) and (is_repeated or handle in perhaps_acked) else error
            for handle, error in zip(handles, answers.errors(answer.statuses), strict=True)
        ]
        perhaps_acked.difference_update(handles)
        return by_item(acks, errors)

    def put_back(self, acks: list[tuple[AckItem, asyncio.Future[Any]]]) -> None:
        """Acknowledge in a call of their own the handles (from `acks.take`) of a pop that got no answer."""
        self._perhaps_acked.update(handles_of(ack for ack, _ in acks))
        self.acks.put_back(acks)

    async def _change(self, changes: list[pb.InvisibleChange]) -> list[str | PopError]:
        # There is no second try. It would find the handle that the first try made and whose answer was lost.
        request = requests.change_invisible(self.group, changes)
        return answers.new_handles(await call(self._stub.ChangeInvisible, request, self._timeout_s))

    async def dead_letter(self, handle: str, reason: str) -> None:
        """Make a delivery a dead letter of its group. Raises StatusError or NodeUnavailable."""
        answer = await call(self._stub.DeadLetter, requests.handles(self.group, [handle], reason), self._timeout_s)
        answers.only(answers.errors(answer.statuses))

    def return_unseen(self, handles: Iterable[str]) -> None:
        """Return deliveries that the application has not seen, without waiting for the answer."""
        for handle in handles:
            self.changes.submit(pb.InvisibleChange(handle=handle, suspend=True)).add_done_callback(_log_failure)

    async def give_back(self, handles: Iterable[str], within_s: float) -> None:
        """Return deliveries that the application has not seen, at once and without counting an attempt."""
        returned = [self.changes.submit(pb.InvisibleChange(handle=handle, suspend=True)) for handle in handles]
        await self.changes.flush(within_s)
        # Errors need no handling: a delivery that can't be returned comes back at its deadline.
        await asyncio.gather(*returned, return_exceptions=True)


def _log_failure(returned: asyncio.Future[str]) -> None:
    if not returned.cancelled() and returned.exception() is not None:
        logger.warning("a message that the application has not seen could not be returned: %s", returned.exception())
