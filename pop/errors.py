"""What can go wrong in POP: for a whole call, and, told by the client, for one message or handle of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar


class PopError(Exception):
    """Base of all errors of POP."""


# --- of a whole call: the node raises these, and the client raises them again ---------------------------------------


class GroupInvalid(PopError):
    """Raised for a group's name that is empty, too long, or has characters that no name may have."""


class RequestInvalid(PopError):
    """Raised for a number that is negative or out of bounds in a request. A client hears it of every call that is wrong."""


class ExpressionInvalid(RequestInvalid):
    """Raised for a filter on delivery that can't be read. The message tells what is wrong, and at which character."""


class GroupUnknown(PopError):
    """Raised when a group is named that doesn't exist, or was deleted while a call waited for its messages."""


class GroupExists(PopError):
    """Raised when a group is to be created that exists, with other settings."""


class GroupBusy(PopError):
    """Raised when a change needs a group at rest, or a queue that is filled. The message says what to wait for."""


class NotAuthenticated(PopError):
    """Raised when a call carries no token or certificate that the node knows."""


class NotPermitted(PopError):
    """Raised when whoever calls may not do that with this group or topic."""


class Overloaded(PopError):
    """Raised when a bound of the node is reached. The message names the option that holds it; try again later."""


class NodeUnavailable(PopError):
    """Raised when the node gave no answer in the time allowed. Whether it did what was asked is unknown."""


class CallFailed(PopError):
    """Raised when a call ended with a gRPC status that says neither what is wrong nor that it will pass."""


class ClientClosed(PopError):
    """Raised for a call on a client, or an iteration of a consumer, that was closed."""


class BatchFailed(PopError):
    """Raised when some of a batch failed. What isn't among `errors` was done, and is not undone.

    Parameters:
        errors: what went wrong, by the place in the batch.
        results: what came of each, None for those that failed.
    """

    def __init__(self, errors: Mapping[int, PopError], results: Sequence[object]) -> None:
        self.errors = errors
        self.results = results
        place, first = next(iter(errors.items()))
        super().__init__(f"{len(errors)} of {len(results)} failed; number {place}: {first}")


# --- of one message or handle: a class per `Code` of pop.proto, which the attribute `code` names --------------------


class StatusError(PopError):
    """Base of the errors that the node states for one message or handle of a call."""

    code: ClassVar[str] = ""


class InternalError(StatusError):
    """Raised for a defect of the node. Its log has the details."""

    code = "INTERNAL"


class InvalidTopic(StatusError):
    """Raised when a message is sent to what isn't a topic that can be published to (MQTT 5.0, 4.7)."""

    code = "INVALID_TOPIC"


class InvalidDeliveryTime(StatusError):
    """Raised when a message is to be delivered at a negative time, or too far ahead."""

    code = "INVALID_DELIVERY_TIME"


class InvalidInvisibleTime(StatusError):
    """Raised when an invisible time is negative, or above the node's limit."""

    code = "INVALID_INVISIBLE_TIME"


class InvalidHandle(StatusError):
    """Raised for what isn't a handle that this node gave to this group."""

    code = "INVALID_HANDLE"


class HandleExpired(StatusError):
    """Raised when the invisible time was over before: the message comes, or came, back as a new attempt."""

    code = "HANDLE_EXPIRED"


class AlreadyAcked(StatusError):
    """Raised when the delivery was acknowledged before."""

    code = "ALREADY_ACKED"


class HandleReplaced(StatusError):
    """Raised when a change of invisible time (extend, nack, suspend) made a newer handle."""

    code = "HANDLE_REPLACED"


class MessageTooLarge(StatusError):
    """Raised when topic, properties and body together are above the node's limit."""

    code = "MESSAGE_TOO_LARGE"


class InvalidProperty(StatusError):
    """Raised when a message has too many properties, or one of them, its tag or its message group is too long."""

    code = "INVALID_PROPERTY"


class AlreadyFired(StatusError):
    """Raised when a message that is recalled was delivered before."""

    code = "ALREADY_FIRED"


class AlreadyRecalled(StatusError):
    """Raised when a message that is recalled was recalled before."""

    code = "ALREADY_RECALLED"


class UnknownMessage(StatusError):
    """Raised when the log holds no such delayed message."""

    code = "UNKNOWN_MESSAGE"


class TooManyTimers(StatusError):
    """Raised when the node's limit of pending delayed messages is reached. Send without a delay, or later."""

    code = "TOO_MANY_TIMERS"


class InvalidTransaction(StatusError):
    """Raised when half of a transaction is sent with a delay."""

    code = "INVALID_TRANSACTION"


class TooManyTransactions(StatusError):
    """Raised when the node's limit of pending transactions is reached. End some, or try again later."""

    code = "TOO_MANY_TRANSACTIONS"


class AlreadyCommitted(StatusError):
    """Raised when a transaction that is ended was committed before."""

    code = "ALREADY_COMMITTED"


class AlreadyRolledBack(StatusError):
    """Raised when a transaction that is ended was rolled back before: by its producer, or because nobody told its outcome."""

    code = "ALREADY_ROLLED_BACK"


class UnknownTransaction(StatusError):
    """Raised when a transaction that is ended isn't open, and none that ended lately was this."""

    code = "UNKNOWN_TRANSACTION"


class TooManyQueues(StatusError):
    """Raised when the first level of a topic is new, and the node's limit of light queues is reached."""

    code = "TOO_MANY_QUEUES"
