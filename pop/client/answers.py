"""Each answer of the protocol, converted once for both clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from penstock.pop.client.outgoing import SendReceipt
from penstock.pop.client.results import GroupDescription, PendingTransaction
from penstock.pop.client.statuses import error_of_status
from penstock.pop.errors import BatchFailed, PopError, StatusError
from penstock.pop.proto import pop_pb2 as pb

A = TypeVar("A")


def receipts(answer: pb.SendResponse) -> list[SendReceipt | PopError]:
    """Return the receipt or the error of each message of a batch."""
    return [
        error_of_status(result.status)
        or SendReceipt(result.message_id, result.recall_handle, result.transaction_handle, result.repeated)
        for result in answer.results
    ]


def refused_acks(request: pb.PopRequest, answer: pb.PopResponse) -> dict[str, StatusError]:
    """Return the handles that a pop did not acknowledge, each with the reason."""
    errors = zip(request.acks, map(error_of_status, answer.ack_statuses), strict=False)  # No statuses: all are acknowledged.
    return {handle: error for handle, error in errors if error is not None}


def must_pop_again(request: pb.PopRequest, answer: pb.PopResponse) -> bool:
    """Return whether a pop must be repeated without `acks`: the node never waits for messages in a call that acknowledges."""
    return bool(request.acks) and not answer.messages and request.wait_ms > 0


def errors(statuses: Iterable[pb.Status]) -> list[PopError | None]:
    """Return the error of each handle, or None where its status is OK."""
    return [error_of_status(status) for status in statuses]


def new_handles(answer: pb.ChangeInvisibleResponse) -> list[str | PopError]:
    """Return the new handle or the error of each delivery whose deadline was to be moved."""
    return [error_of_status(result.status) or result.handle for result in answer.results]


def groups(answer: pb.GroupsResponse) -> list[GroupDescription]:
    """Return the descriptions of groups."""
    return [GroupDescription(group) for group in answer.groups]


def transactions(answer: pb.TransactionsResponse) -> list[PendingTransaction]:
    """Return pending transactions."""
    return [PendingTransaction(transaction) for transaction in answer.transactions]


def only(answers: list[A | PopError]) -> A:
    """Return the answer for the only item of a call, or raise its error."""
    (answer,) = answers
    if isinstance(answer, PopError):
        raise answer
    return answer


def all_or_raise(answers: list[A | PopError]) -> list[A]:
    """Return the answers for a batch. Raises BatchFailed if any of them is an error."""
    failed = {place: answer for place, answer in enumerate(answers) if isinstance(answer, PopError)}
    if failed:
        raise BatchFailed(failed, [None if isinstance(answer, PopError) else answer for answer in answers])
    return [answer for answer in answers if not isinstance(answer, PopError)]
