"""A synchronous client of `penstock.pop.v1`, for threads: the names of `pop.client`, on a channel of its own.

    with SyncClient("127.0.0.1:8081") as client:
        client.send("plant/1/a/temperature", b"21.5")
        for message in client.consume("plant/#", group="billing"):
            message.ack()

Each method is one call and returns when it is answered; nothing runs in the background. One client may be used by many threads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import grpc

from penstock.pop.client.calls import CHANNEL_OPTIONS, PLAIN, Backoff, Security, error_of_call, error_of_status
from penstock.pop.client.requests import (
    OutgoingMessage,
    Popped,
    Sent,
    all_or_raise,
    pop_request,
    redrive_request,
    refused_of,
    reset_request,
    sent_of,
    settings_of,
    start_fields,
)
from penstock.pop.errors import (
    AlreadyAcked,
    AlreadyCommitted,
    AlreadyRolledBack,
    ClientClosed,
    NodeUnavailable,
    Overloaded,
    PopError,
    StatusError,
)
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.pop_pb2_grpc import GroupServiceStub, PopServiceStub

if TYPE_CHECKING:
    from penstock.store.lightqueue import End, Start

__all__ = ["OutgoingMessage", "Popped", "Security", "Sent", "SyncClient", "SyncMessage", "SyncTransaction", "settings_of"]


class SyncMessage:
    """A message that was handed out. Its fields are those of `PoppedMessage` in pop.proto: `popped` has all of them."""

    __slots__ = ("_client", "group", "handle", "popped")

    def __init__(self, popped: pb.PoppedMessage, group: str, client: SyncClient) -> None:
        self.popped = popped
        self.group = group
        self.handle = popped.handle
        self._client = client

    @property
    def message_id(self) -> str:
        return self.popped.message_id

    @property
    def topic(self) -> str:
        return self.popped.topic

    @property
    def body(self) -> bytes:
        return self.popped.body

    @property
    def properties(self) -> Mapping[str, str]:
        return self.popped.properties

    @property
    def attempt(self) -> int:
        return self.popped.attempt

    def ack(self) -> None:
        """Acknowledge; return when that is durable. Raises StatusError where the node states why not."""
        self._client.ack([self.handle], group=self.group)

    def nack(self, *, delay_ms: int = 0) -> None:
        """Return it after `delay_ms` as a failed attempt. The group's retry back-off, if any, comes on top."""
        self._client.change(self.handle, delay_ms, group=self.group)

    def suspend(self, delay_ms: int = 0) -> None:
        """Return it after `delay_ms`, and don't count this delivery as an attempt."""
        self._client.change(self.handle, delay_ms, group=self.group, suspend=True)

    def extend(self, invisible_ms: int) -> None:
        """Keep it for `invisible_ms` from now. It gets a new handle."""
        self.handle = self._client.change(self.handle, invisible_ms, group=self.group)

    def give_up(self) -> None:
        """Put it among the group's dead letters."""
        self._client.give_up([self.handle], group=self.group)


class SyncTransaction(NamedTuple):
    """Half of a transaction; see `pop.client.Transaction`."""

    client: SyncClient
    message_id: str
    handle: str

    def commit(self) -> None:
        """Deliver the message. Once committed, doing it again is harmless."""
        with contextlib.suppress(AlreadyCommitted):
            self.client.end_transaction(self.handle, commit=True)

    def rollback(self) -> None:
        """Never deliver the message. Once rolled back, doing it again is harmless."""
        with contextlib.suppress(AlreadyRolledBack):
            self.client.end_transaction(self.handle, commit=False)

    def __enter__(self) -> SyncTransaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.commit()
        else:
            self.rollback()


class SyncClient:
    """A client of one node.

    Parameters:
        target: `HOST:PORT` of the node's gRPC listener.
        timeout_ms: how long a call may take, waiting for the node included. Afterwards it raises NodeUnavailable.
        security: TLS, and who calls.
    """

    def __init__(self, target: str, *, timeout_ms: int = 10_000, security: Security = PLAIN) -> None:
        self._timeout_s = timeout_ms / 1000
        self._metadata = security.metadata
        credentials = security.credentials
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
        self._stub = PopServiceStub(self._channel)
        self._groups = GroupServiceStub(self._channel)
        self._closed = False

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. More than one call is harmless."""
        self._closed = True
        self._channel.close()

    def _call(self, method: Any, request: Any, wait_ms: int = 0) -> Any:
        if self._closed:
            raise ClientClosed("this client was closed: make a new one")
        timeout_s = self._timeout_s + max(wait_ms, 0) / 1000
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata, wait_for_ready=True)
        except grpc.RpcError as error:
            # Every error of a call is one: grpc says so in its documentation, but not in its types.
            raise error_of_call(cast(grpc.Call, error)) from error

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        body: bytes = b"",
        *,
        properties: Mapping[str, str] | None = None,
        tag: str = "",
        message_group: str = "",
        deliver_at_ms: int = 0,
        delay_ms: int = 0,
    ) -> Sent:
        """Send a message; return when it is durable. See `OutgoingMessage` for the arguments.

        Raises:
            StatusError: one of its subclasses says why the node refused it.
            NodeUnavailable: no answer came. It may have been stored.
        """
        return self._one(
            OutgoingMessage(
                topic=topic,
                body=body,
                properties=properties or {},
                tag=tag,
                message_group=message_group,
                deliver_at_ms=deliver_at_ms,
                delay_ms=delay_ms,
            )
        )

    def _one(self, message: OutgoingMessage) -> Sent:
        answer = self._call(self._stub.Send, pb.SendRequest(messages=[message.encoded()]))
        error = error_of_status(answer.results[0].status)
        if error is not None:
            raise error
        return sent_of(answer.results[0])

    def send_batch(self, messages: Iterable[OutgoingMessage]) -> list[Sent]:
        """Send up to 10,000 messages, of up to 64 MiB, as one call; return when all are durable.

        Raises:
            BatchFailed: the node refused some of them; the others are durable, and in its `results`.
        """
        answer = self._call(self._stub.Send, pb.SendRequest(messages=[message.encoded() for message in messages]))
        return all_or_raise([error_of_status(result.status) or sent_of(result) for result in answer.results])

    def recall(self, recall_handle: str) -> None:
        """Cancel a delayed message that has not been delivered. Raises StatusError where the node states why it can't."""
        self._settle(self._call(self._stub.Recall, pb.RecallRequest(recall_handles=[recall_handle])).statuses)

    # --- consuming --------------------------------------------------------------------------------------------------

    def pop(
        self,
        topic_filter: str,
        *,
        group: str,
        messages_max: int = 0,
        invisible_ms: int = 0,
        wait_ms: int = 0,
        start: Start = "earliest",
        attempt_id: str = "",
        acks: Iterable[str] = (),
    ) -> Popped[SyncMessage]:
        """Take up to `messages_max` messages, and wait up to `wait_ms` for the first. See `pop.client.Client.pop`."""
        request = pop_request(topic_filter, group, messages_max, invisible_ms, wait_ms, start, attempt_id, acks)
        answer = self._call(self._stub.Pop, request, wait_ms)
        refused = refused_of(request, answer)
        if request.acks and not answer.messages and wait_ms > 0:  # the node doesn't wait before it says what is acknowledged
            del request.acks[:]
            answer = self._call(self._stub.Pop, request, wait_ms)
        return Popped((SyncMessage(popped, group, self) for popped in answer.messages), refused)

    def consume(
        self,
        topic_filter: str,
        *,
        group: str,
        batch: int = 64,
        invisible_ms: int = 0,
        wait_ms: int = 20_000,
        start: Start = "earliest",
    ) -> Iterator[SyncMessage]:
        """Yield messages, a pop at a time, without end. While the node is away it waits.

        The rest of a batch that is not iterated over comes back when its invisible time is over: let a batch be what is dealt
        with in that time.
        """
        backoff = Backoff()
        while True:
            try:
                messages = self.pop(
                    topic_filter,
                    group=group,
                    messages_max=batch,
                    invisible_ms=invisible_ms,
                    wait_ms=wait_ms,
                    start=start,
                )
            except (NodeUnavailable, Overloaded):
                time.sleep(backoff.next_s())
                continue
            backoff.reset()
            yield from messages

    def ack(self, handles: Iterable[str], *, group: str) -> None:
        """Acknowledge deliveries; return when that is durable.

        Raises:
            StatusError: of a single handle, why not.
            BatchFailed: of several, some could not be acknowledged; the others are.
        """
        request = pb.AckRequest(group=group, handles=list(handles))
        try:
            answer = self._call(self._stub.Ack, request)
            again = False
        except NodeUnavailable:
            answer = self._call(self._stub.Ack, request)
            again = True
        self._settle(answer.statuses, ignored=AlreadyAcked if again else None)

    def give_up(self, handles: Iterable[str], *, group: str) -> None:
        """Put deliveries among the dead letters. Raises as `ack` does."""
        self._settle(self._call(self._stub.GiveUp, pb.AckRequest(group=group, handles=list(handles))).statuses)

    def change(self, handle: str, invisible_ms: int, *, group: str, suspend: bool = False) -> str:
        """Move a delivery's deadline to `invisible_ms` from now; return its new handle. Raises StatusError."""
        change = pb.InvisibleChange(handle=handle, invisible_ms=invisible_ms, suspend=suspend)
        answer = self._call(self._stub.ChangeInvisible, pb.ChangeInvisibleRequest(group=group, changes=[change]))
        error = error_of_status(answer.results[0].status)
        if error is not None:
            raise error
        return str(answer.results[0].handle)

    def _settle(self, statuses: Iterable[pb.Status], ignored: type[StatusError] | None = None) -> None:
        found = [error_of_status(status) for status in statuses]
        errors: list[PopError | None] = [
            None if ignored is not None and isinstance(error, ignored) else error for error in found
        ]
        if len(errors) == 1 and errors[0] is not None:
            raise errors[0]
        all_or_raise(errors)

    # --- transactions -----------------------------------------------------------------------------------------------

    def begin(
        self,
        topic: str,
        body: bytes = b"",
        *,
        producer: str,
        properties: Mapping[str, str] | None = None,
        tag: str = "",
        message_group: str = "",
    ) -> SyncTransaction:
        """Store half of a transaction; it is delivered when it is committed. See `pop.client.Client.begin`."""
        sent = self._one(
            OutgoingMessage(
                topic=topic,
                body=body,
                properties=properties or {},
                tag=tag,
                message_group=message_group,
                producer=producer,
            )
        )
        return SyncTransaction(self, sent.message_id, sent.transaction_handle)

    def end_transaction(self, handle: str, *, commit: bool) -> None:
        """Commit or roll back by the handle of a half message. Raises StatusError."""
        request = pb.EndTransactionsRequest(ends=[pb.TransactionEnd(transaction_handle=handle, commit=commit)])
        self._settle(self._call(self._stub.EndTransactions, request).statuses)

    def poll_transactions(self, producer: str, *, wait_ms: int = 0) -> list[pb.Transaction]:
        """Return transactions whose outcome the node asks for; wait up to `wait_ms` for the first."""
        request = pb.PollTransactionsRequest(producer=producer, wait_ms=wait_ms)
        return list(self._call(self._stub.PollTransactions, request, wait_ms).transactions)

    def transactions(self, producer: str = "", *, after: str = "", limit: int = 1_000) -> list[pb.Transaction]:
        """Return transactions that are pending, oldest first, behind the message id `after`."""
        request = pb.ListTransactionsRequest(producer=producer, transactions_max=limit, after_message_id=after)
        return list(self._call(self._stub.ListTransactions, request).transactions)

    # --- groups: see `pop.client.Client` ----------------------------------------------------------------------------

    def create_group(
        self, group: str, topic_filter: str, *, start: Start = "earliest", settings: pb.GroupSettings | None = None
    ) -> pb.GroupDescription:
        """Create a group, with settings from `settings_of`."""
        request = pb.CreateGroupRequest(group=group, filter=topic_filter, settings=settings, **start_fields(start))
        found: pb.GroupDescription = self._call(self._groups.CreateGroup, request).groups[0]
        return found

    def update_group(self, group: str, settings: pb.GroupSettings, *, topic_filter: str = "") -> list[pb.GroupDescription]:
        """Change what `settings` gives."""
        request = pb.UpdateGroupRequest(group=group, filter=topic_filter, settings=settings)
        return list(self._call(self._groups.UpdateGroup, request).groups)

    def describe_groups(self, group: str = "", topic_filter: str = "") -> list[pb.GroupDescription]:
        """Return how groups stand."""
        return list(self._call(self._groups.DescribeGroups, pb.GroupRequest(group=group, filter=topic_filter)).groups)

    def delete_group(self, group: str, *, topic_filter: str = "") -> None:
        """Delete a group."""
        self._call(self._groups.DeleteGroup, pb.GroupRequest(group=group, filter=topic_filter))

    def reset_group(
        self,
        group: str,
        *,
        topic_filter: str = "",
        end: End | None = None,
        time_ms: int | None = None,
        message_id: str | None = None,
    ) -> list[pb.GroupDescription]:
        """Let a group begin anew elsewhere."""
        request = reset_request(group, topic_filter, end, time_ms, message_id)
        return list(self._call(self._groups.ResetGroup, request).groups)

    def dead_letters(self, group: str, *, after: str = "", limit: int = 1_000) -> list[pb.DeadLetter]:
        """Return the dead letters of a group that were not sent back."""
        request = pb.ListDeadLettersRequest(group=group, after_message_id=after, dead_letters_max=limit)
        return list(self._call(self._groups.ListDeadLetters, request).dead_letters)

    def redrive(self, group: str, message_ids: Iterable[str] | None = None) -> int:
        """Send dead letters back to their group; return how many. None is all, up to 10,000."""
        redriven: int = self._call(self._groups.Redrive, redrive_request(group, message_ids)).redriven
        return redriven
