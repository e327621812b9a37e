"""Each request of the protocol, built once for both clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from secrets import token_hex
from typing import Literal, TypedDict

from penstock.pop.client.durations import Duration, milliseconds
from penstock.pop.client.outgoing import OutgoingMessage
from penstock.pop.client.results import GroupSettings
from penstock.pop.proto import pop_pb2 as pb

End = Literal["earliest", "latest"]
"""An end of a queue: `earliest` is all that the log still has, `latest` is only what is stored from now on."""

Start = End | int
"""Where a new group starts: at an end of its queue, or with the messages stored at a time or later, in ms since 1970."""

REASON_BYTES_MAX = 2_000
"""Maximum length of the reason of a dead letter in bytes of UTF-8. The clients cut off the rest."""

ENDS = {"earliest": pb.EARLIEST, "latest": pb.LATEST}
"""The ends of a queue, as the protocol has them."""


class _StartFields(TypedDict, total=False):
    start: pb.Start.ValueType
    start_at_ms: int


def _start_fields(start: Start) -> _StartFields:
    check_start(start)
    return {"start_at_ms": start} if isinstance(start, int) else {"start": ENDS[start]}


def check_start(start: Start) -> None:
    """Raise ValueError if a group can't start there."""
    if not isinstance(start, int) and start not in ENDS:
        raise ValueError(f"start is {start!r}: give 'earliest', 'latest', or ms since 1970")


def handle_list(handles: Iterable[str]) -> list[str]:
    """Return handles as a list.

    Raises:
        TypeError: It is one handle and no list, or something in it is no handle.
    """
    if isinstance(handles, str):
        raise TypeError("the handles are one text: give a list of them, such as [message.handle]")
    found = list(handles)
    for each in found:
        if not isinstance(each, str):
            raise TypeError(f"one of the handles is {each!r}: give message.handle, which is text")
    return found


# --- sending --------------------------------------------------------------------------------------------------------


def send(messages: Iterable[OutgoingMessage]) -> pb.SendRequest:
    """Return the request that sends a batch."""
    found = list(messages)
    for each in found:
        if not isinstance(each, OutgoingMessage):
            raise TypeError(f"one of the messages is {each!r:.80}: give OutgoingMessage(topic=..., body=...)")
    return pb.SendRequest(messages=[message.encoded() for message in found])


def recall(recall_handle: str) -> pb.RecallRequest:
    """Return the request that cancels a delayed message."""
    return pb.RecallRequest(recall_handles=[recall_handle])


# --- consuming ------------------------------------------------------------------------------------------------------


def pop(
    topic_filter: str,
    group: str,
    messages_max: int,
    invisible: Duration,
    wait: Duration,
    start: Start,
    attempt_id: str = "",
    acks: Iterable[str] = (),
    in_order_max: int = 0,
) -> pb.PopRequest:
    """Return the request for the next messages of a group."""
    return pb.PopRequest(
        group=group,
        filter=topic_filter,
        messages_max=messages_max,
        invisible_ms=milliseconds(invisible, "invisible"),
        wait_ms=milliseconds(wait, "wait"),
        attempt_id=attempt_id,
        acks=handle_list(acks) if acks else (),
        in_order_max=in_order_max,
        **_start_fields(start),
    )


def consume(
    topic_filter: str, group: str, credits: int, batch: int, invisible: Duration, start: Start, give_back: bool
) -> pb.ConsumeOpen:
    """Return the first request of a stream."""
    return pb.ConsumeOpen(
        group=group,
        filter=topic_filter,
        credits=credits,
        batch_max=batch,
        invisible_ms=milliseconds(invisible, "invisible"),
        give_back=give_back,
        **_start_fields(start),
    )


def handles(group: str, delivered: Iterable[str], reason: str = "") -> pb.AckRequest:
    """Return the request that acknowledges deliveries, or makes dead letters of them for a reason."""
    return pb.AckRequest(group=group, handles=list(delivered), reason=_shortened(reason))


def _shortened(reason: str) -> str:
    """Return what fits into `REASON_BYTES_MAX`."""
    encoded = reason.encode(errors="replace")
    return encoded[:REASON_BYTES_MAX].decode(errors="ignore")


def nack_of(handle: str, delay_ms: int, reason: str) -> pb.InvisibleChange:
    """Return the change with which a consumer returns a message after a failed attempt."""
    return pb.InvisibleChange(handle=handle, invisible_ms=delay_ms, nack=True, reason=_shortened(reason) if reason else "")


def change_invisible(group: str, changes: list[pb.InvisibleChange]) -> pb.ChangeInvisibleRequest:
    """Return the request that moves the deadlines of deliveries."""
    return pb.ChangeInvisibleRequest(group=group, changes=changes)


# --- transactions ---------------------------------------------------------------------------------------------------


def end_transaction(handle: str, commit: bool) -> pb.EndTransactionsRequest:
    """Return the request that commits a transaction or rolls it back."""
    return pb.EndTransactionsRequest(ends=[pb.TransactionEnd(transaction_handle=handle, commit=commit)])


def poll_transactions(producer: str, wait: Duration) -> pb.PollTransactionsRequest:
    """Return the request for transactions whose outcome the node wants to know."""
    return pb.PollTransactionsRequest(producer=producer, wait_ms=milliseconds(wait, "wait"))


def list_transactions(producer: str, after: str, limit: int) -> pb.ListTransactionsRequest:
    """Return the request for a page of pending transactions."""
    return pb.ListTransactionsRequest(producer=producer, transactions_max=limit, after_message_id=after)


# --- groups and dead letters ----------------------------------------------------------------------------------------


def create_group(group: str, topic_filter: str, start: Start, settings: GroupSettings | None) -> pb.CreateGroupRequest:
    """Return the request that creates a group."""
    encoded = settings.encoded() if settings is not None else None
    return pb.CreateGroupRequest(group=group, filter=topic_filter, settings=encoded, **_start_fields(start))


def update_group(group: str, topic_filter: str, settings: GroupSettings) -> pb.UpdateGroupRequest:
    """Return the request that changes settings of a group."""
    return pb.UpdateGroupRequest(group=group, filter=topic_filter, settings=settings.encoded())


def name_group(group: str, topic_filter: str) -> pb.GroupRequest:
    """Return the request that describes or deletes a group."""
    return pb.GroupRequest(group=group, filter=topic_filter)


def reset_group(
    group: str, topic_filter: str, end: End | None, time_ms: int | None, message_id: str | None
) -> pb.ResetGroupRequest:
    """Return the request that moves a group to another place in its queue.

    Raises:
        ValueError: Not exactly one of `end`, `time_ms` and `message_id` is given, or `end` is no end.
    """
    if sum(value is not None for value in (end, time_ms, message_id)) != 1:
        raise ValueError("give exactly one of end, time_ms and message_id")
    if end is not None and end not in ENDS:
        raise ValueError(f"end is {end!r}: give 'earliest' or 'latest'")
    request = pb.ResetGroupRequest(group=group, filter=topic_filter)
    if end is not None:
        request.end = ENDS[end]
    elif time_ms is not None:
        request.time_ms = time_ms
    elif message_id is not None:
        request.message_id = message_id
    return request


def list_dead_letters(group: str, after: str, limit: int) -> pb.ListDeadLettersRequest:
    """Return the request for a page of a group's dead letters."""
    return pb.ListDeadLettersRequest(group=group, after_message_id=after, dead_letters_max=limit)


def dead_letter(group: str, message_id: str) -> pb.GetDeadLetterRequest:
    """Return the request for a dead letter with its message."""
    return pb.GetDeadLetterRequest(group=group, message_id=message_id)


def redrive(group: str, message_ids: Iterable[str] | None) -> pb.RedriveRequest:
    """Return the request that sends dead letters back to their group, or purges them; None for all of them.

    Raises:
        ValueError: `message_ids` is empty. On the wire, an empty list would mean all dead letters.
    """
    ids = list(message_ids) if message_ids is not None else []
    if message_ids is not None and not ids:
        raise ValueError("name the dead letters, or give None for all of them")
    return pb.RedriveRequest(group=group, message_ids=ids)


def attempt_ids() -> Iterator[str]:
    """Return ids for the polls of a consumer.

    A poll whose answer may have been lost is repeated with its id, and so gets at once what was in the answer.
    """
    return map((token_hex(4) + "-{:x}").format, count())
