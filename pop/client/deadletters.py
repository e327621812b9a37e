"""Administration of dead letters: `Client.dead_letters` and `SyncClient.dead_letters`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.pop.client import requests
from penstock.pop.client.calls import AsyncCalls, SyncCalls
from penstock.pop.client.received import ReceivedMessage
from penstock.pop.client.results import DeadLetter
from penstock.pop.proto import pop_pb2 as pb

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import GroupServiceAsyncStub, GroupServiceStub


class DeadLetterCalls:
    """Lists, redrives and purges dead letters. All methods raise NodeUnavailable, NotAuthenticated and NotPermitted."""

    def __init__(self, call: AsyncCalls, stub: GroupServiceAsyncStub) -> None:
        self._call = call
        self._stub = stub

    async def of_group(self, group: str, *, after: str = "", limit: int = 1_000) -> list[DeadLetter]:
        """Return the dead letters of a group that were not sent back, oldest message first.

        Args:
            group: Name of the group.
            after: Message id of the last dead letter of the page before.
            limit: Maximum number of dead letters, 1 to 10,000.

        Raises:
            RequestInvalid: `after` is not a message id.
        """
        answer = await self._call(self._stub.ListDeadLetters, requests.list_dead_letters(group, after, limit))
        return list(answer.dead_letters)

    async def get(self, group: str, message_id: str) -> ReceivedMessage | None:
        """Return a message that is a dead letter of a group; None if it is none.

        Its `origin` says why. It has no handle. If its record can't be read any more, nothing but its id is known.

        Raises:
            RequestInvalid: `message_id` is not a message id.
        """
        return _message_in(await self._call(self._stub.GetDeadLetter, requests.dead_letter(group, message_id)))

    async def purge(self, group: str, message_ids: Iterable[str] | None = None) -> int:
        """Remove dead letters that nobody needs any more; return how many. The messages stay in the log for its retention.

        Args:
            group: Name of the group.
            message_ids: Up to 10,000 message ids; None for all dead letters, up to 10,000 a call.

        Raises:
            RequestInvalid: A message id is not valid, or there are too many.
            ValueError: `message_ids` is empty.
        """
        return (await self._call(self._stub.PurgeDeadLetters, requests.redrive(group, message_ids))).purged

    async def redrive(self, group: str, message_ids: Iterable[str] | None = None) -> int:
        """Send dead letters back to their group as new messages, each once; return how many were sent.

        Args:
            group: Name of the group.
            message_ids: Up to 10,000 message ids; None for all dead letters, up to 10,000 a call.

        Raises:
            RequestInvalid: A message id is not valid, or there are too many.
            ValueError: `message_ids` is empty.
        """
        return (await self._call(self._stub.Redrive, requests.redrive(group, message_ids))).redriven


def _message_in(answer: pb.GetDeadLetterResponse) -> ReceivedMessage | None:
    return ReceivedMessage(answer.message) if answer.HasField("message") else None


class SyncDeadLetterCalls:
    """The methods of `DeadLetterCalls`, for threads. Parameters, results and errors are the same."""

    def __init__(self, call: SyncCalls, stub: GroupServiceStub) -> None:
        self._call = call
        self._stub = stub

    def of_group(self, group: str, *, after: str = "", limit: int = 1_000) -> list[DeadLetter]:
        """Return dead letters, as `DeadLetterCalls.of_group`."""
        answer = self._call(self._stub.ListDeadLetters, requests.list_dead_letters(group, after, limit))
        return list(answer.dead_letters)

    def get(self, group: str, message_id: str) -> ReceivedMessage | None:
        """Return a dead letter with its message, as `DeadLetterCalls.get`."""
        return _message_in(self._call(self._stub.GetDeadLetter, requests.dead_letter(group, message_id)))

    def purge(self, group: str, message_ids: Iterable[str] | None = None) -> int:
        """Remove dead letters, as `DeadLetterCalls.purge`."""
        return self._call(self._stub.PurgeDeadLetters, requests.redrive(group, message_ids)).purged

    def redrive(self, group: str, message_ids: Iterable[str] | None = None) -> int:
        """Send dead letters back, as `DeadLetterCalls.redrive`."""
        return self._call(self._stub.Redrive, requests.redrive(group, message_ids)).redriven
