"""The errors of POP: of a whole call, and of one message or handle of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar


class PopError(Exception):
    """Base of all errors of POP."""


# --- errors of a whole call: the node raises these, and the client raises them again --------------------------------


class GroupInvalid(PopError):
    """Raised when the name of a group is empty, too long, or has characters that no name may have."""


class RequestInvalid(PopError):
    """Raised when a request is not valid, for example because a number is negative or out of its bounds."""


class ExpressionInvalid(RequestInvalid):
    """Raised when a filter on delivery is not valid. The message says what is wrong, and at which character."""


class GroupUnknown(PopError):
    """Raised when a group doesn't exist, or was deleted while a call waited for its messages."""


class GroupExists(PopError):
    """Raised when a group that a call creates already exists with other settings."""


class GroupBusy(PopError):
    """Raised when a group can't be changed now, because it has messages in flight, or its queue is still being filled.

    The message says what to wait for.
    """


class ScheduleUnknown(PopError):
    """Raised when there is no schedule of a name."""


class ScheduleExists(PopError):
    """Raised when a schedule that a call creates already exists, and the call doesn't replace it."""


class NotAuthenticated(PopError):
    """Raised when the node knows neither the token nor the certificate of a call."""


class NotPermitted(PopError):
    """Raised when the caller may not do this with this group or topic."""


class Overloaded(PopError):
    """Raised when the node has reached a limit. The message names the option that sets the limit. Try again later."""


class NodeUnavailable(PopError):
    """Raised when the node did not respond in time. The node may or may not have done what the call asked for."""


class SendOutcomeUnknown(NodeUnavailable):
    """Raised when nobody can tell whether a message is stored: the node did not answer, and sending it again isn't safe.

    The message has no deduplication id, or the producer's time for further tries is over.
    """


class RequestTimedOut(PopError):
    """Raised when no reply to a request came in time. Whoever gets the request may or may not have handled it."""


class CallFailed(PopError):
    """Raised when a call ended with a gRPC status that says neither what is wrong nor whether a later call may succeed."""


class ClientClosed(PopError):
    """Raised when a closed client is called, or a closed consumer is iterated."""


class BatchFailed(PopError):
    """Raised when some items of a batch failed. The node has processed the other items, and doesn't undo that.

    Parameters:
        errors: the error of each item that failed, by its index in the batch.
        results: the result of each item in order; None for those that failed.
    """

    def __init__(self, errors: Mapping[int, PopError], results: Sequence[object]) -> None:
        self.errors = errors
        self.results = results
        place, first = next(iter(errors.items()))
        super().__init__(f"{len(errors)} of {len(results)} failed; number {place}: {first}")


# --- of one message or handle: a class per `Code` of pop.proto, which the attribute `code` names --------------------


class StatusError(PopError):
    """Base of the errors that the node reports for one message or handle of a call."""

    code: ClassVar[str] = ""


class InternalError(StatusError):
    """Raised when the node has a defect. Its log has the details."""

    code = "INTERNAL"


class InvalidTopic(StatusError):
    """Raised when nobody can publish to a topic of this name (MQTT 5.0, 4.7)."""

    code = "INVALID_TOPIC"


class InvalidDeliveryTime(StatusError):
    """Raised when the delivery time of a message is negative, or too far in the future."""

    code = "INVALID_DELIVERY_TIME"


class InvalidInvisibleTime(StatusError):
    """Raised when an invisible time is negative, or above the limit of the node."""

    code = "INVALID_INVISIBLE_TIME"


class InvalidHandle(StatusError):
    """Raised when a handle is not one that this node gave to this group."""

    code = "INVALID_HANDLE"


class HandleExpired(StatusError):
    """Raised when the invisible time is over: the message becomes, or became, visible again as a new attempt."""

    code = "HANDLE_EXPIRED"


class AlreadyAcked(StatusError):
    """Raised when the delivery was acknowledged before."""

    code = "ALREADY_ACKED"


class HandleReplaced(StatusError):
    """Raised when a change of invisible time (extend, nack, suspend) gave a newer handle."""

    code = "HANDLE_REPLACED"


class MessageTooLarge(StatusError):
    """Raised when topic, properties and body together exceed the limit of the node."""

    code = "MESSAGE_TOO_LARGE"


class InvalidProperty(StatusError):
    """Raised when a message has too many properties, or a property, the tag or the message group is too long."""

    code = "INVALID_PROPERTY"


class AlreadyFired(StatusError):
    """Raised when a recalled message was delivered before."""

    code = "ALREADY_FIRED"


class AlreadyRecalled(StatusError):
    """Raised when a recalled message was recalled before."""

    code = "ALREADY_RECALLED"


class UnknownMessage(StatusError):
    """Raised when the log holds no such delayed message."""

    code = "UNKNOWN_MESSAGE"


class TooManyTimers(StatusError):
    """Raised when the node has its maximum number of delayed messages. Send without a delay, or later."""

    code = "TOO_MANY_TIMERS"


class InvalidTransaction(StatusError):
    """Raised when a half message of a transaction has a delay."""

    code = "INVALID_TRANSACTION"


class TooManyTransactions(StatusError):
    """Raised when the node has its maximum number of pending transactions. End some, or try again later."""

    code = "TOO_MANY_TRANSACTIONS"


class AlreadyCommitted(StatusError):
    """Raised when the transaction was committed before."""

    code = "ALREADY_COMMITTED"


class AlreadyRolledBack(StatusError):
    """Raised when the transaction was rolled back before, by its producer or after the last check."""

    code = "ALREADY_ROLLED_BACK"


class UnknownTransaction(StatusError):
    """Raised when a transaction is neither pending nor among those that ended lately."""

    code = "UNKNOWN_TRANSACTION"


class DeduplicationIdReused(StatusError):
    """Raised when the topic got the deduplication id of a message with another body. The message is not stored."""

    code = "DEDUPLICATION_ID_REUSED"


class DeduplicationWindowPassed(StatusError):
    """Raised when a message is repeated too late: the node can't know any more whether it stored the first one.

    The node stores nothing now. Look for the first message among what its consumers did, or send it again with a new id.
    """

    code = "DEDUPLICATION_WINDOW_PASSED"


class TooManyQueues(StatusError):
    """Raised when the first level of a topic is new, and the node has its maximum number of light queues."""

    code = "TOO_MANY_QUEUES"
