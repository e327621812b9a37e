"""Penstock: an MQTT broker and POP message queue on one durable log.

This package is the public API: the clients of a node, their messages and settings, and the errors that they raise.
`__all__` lists it. Every other module may change in any release. A name is loaded when it is first used, so the import of
`penstock` is quick, and the clients load no part of the node.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.pop.backoff import Backoff, Exponential
    from penstock.pop.client.client import Client
    from penstock.pop.client.consumer import Consumer
    from penstock.pop.client.deadletters import DeadLetterCalls, SyncDeadLetterCalls
    from penstock.pop.client.groups import GroupCalls, SyncGroupCalls
    from penstock.pop.client.groupsettings import group_settings
    from penstock.pop.client.message import Message
    from penstock.pop.client.outgoing import OutgoingMessage, SendReceipt
    from penstock.pop.client.received import PoppedMessages, ReceivedMessage
    from penstock.pop.client.results import (
        DeadLetter,
        DeadLetterReason,
        GroupDescription,
        GroupSettings,
        PendingTransaction,
    )
    from penstock.pop.client.security import Security
    from penstock.pop.client.stream import StreamConsumer, StreamMessage
    from penstock.pop.client.syncclient import SyncClient
    from penstock.pop.client.syncmessage import SyncMessage
    from penstock.pop.client.synctransactions import SyncTransaction, SyncTransactionCalls
    from penstock.pop.client.transactions import Transaction, TransactionCalls, TransactionChecker
    from penstock.pop.errors import (
        AlreadyAcked,
        AlreadyCommitted,
        AlreadyFired,
        AlreadyRecalled,
        AlreadyRolledBack,
        BatchFailed,
        CallFailed,
        ClientClosed,
        GroupBusy,
        GroupExists,
        GroupUnknown,
        HandleExpired,
        HandleReplaced,
        InternalError,
        InvalidDeliveryTime,
        InvalidHandle,
        InvalidInvisibleTime,
        InvalidProperty,
        InvalidTopic,
        InvalidTransaction,
        MessageTooLarge,
        NodeUnavailable,
        NotAuthenticated,
        NotPermitted,
        Overloaded,
        PopError,
        RequestInvalid,
        StatusError,
        TooManyQueues,
        TooManyTimers,
        TooManyTransactions,
        UnknownMessage,
        UnknownTransaction,
    )

__version__ = "0.1.0"

__all__ = [
    "AlreadyAcked",
    "AlreadyCommitted",
    "AlreadyFired",
    "AlreadyRecalled",
    "AlreadyRolledBack",
    "Backoff",
    "BatchFailed",
    "CallFailed",
    "Client",
    "ClientClosed",
    "Consumer",
    "DeadLetter",
    "DeadLetterCalls",
    "DeadLetterReason",
    "Exponential",
    "GroupBusy",
    "GroupCalls",
    "GroupDescription",
    "GroupExists",
    "GroupSettings",
    "GroupUnknown",
    "HandleExpired",
    "HandleReplaced",
    "InternalError",
    "InvalidDeliveryTime",
    "InvalidHandle",
    "InvalidInvisibleTime",
    "InvalidProperty",
    "InvalidTopic",
    "InvalidTransaction",
    "Message",
    "MessageTooLarge",
    "NodeUnavailable",
    "NotAuthenticated",
    "NotPermitted",
    "OutgoingMessage",
    "Overloaded",
    "PendingTransaction",
    "PopError",
    "PoppedMessages",
    "ReceivedMessage",
    "RequestInvalid",
    "Security",
    "SendReceipt",
    "StatusError",
    "StreamConsumer",
    "StreamMessage",
    "SyncClient",
    "SyncDeadLetterCalls",
    "SyncGroupCalls",
    "SyncMessage",
    "SyncTransaction",
    "SyncTransactionCalls",
    "TooManyQueues",
    "TooManyTimers",
    "TooManyTransactions",
    "Transaction",
    "TransactionCalls",
    "TransactionChecker",
    "UnknownMessage",
    "UnknownTransaction",
    "group_settings",
]

_HOMES = {
    "Backoff": "penstock.pop.backoff",
    "Client": "penstock.pop.client.client",
    "Consumer": "penstock.pop.client.consumer",
    "DeadLetter": "penstock.pop.client.results",
    "DeadLetterCalls": "penstock.pop.client.deadletters",
    "DeadLetterReason": "penstock.pop.client.results",
    "Exponential": "penstock.pop.backoff",
    "GroupCalls": "penstock.pop.client.groups",
    "GroupDescription": "penstock.pop.client.results",
    "GroupSettings": "penstock.pop.client.results",
    "Message": "penstock.pop.client.message",
    "OutgoingMessage": "penstock.pop.client.outgoing",
    "PendingTransaction": "penstock.pop.client.results",
    "PoppedMessages": "penstock.pop.client.received",
    "ReceivedMessage": "penstock.pop.client.received",
    "Security": "penstock.pop.client.security",
    "SendReceipt": "penstock.pop.client.outgoing",
    "StreamConsumer": "penstock.pop.client.stream",
    "StreamMessage": "penstock.pop.client.stream",
    "SyncClient": "penstock.pop.client.syncclient",
    "SyncDeadLetterCalls": "penstock.pop.client.deadletters",
    "SyncGroupCalls": "penstock.pop.client.groups",
    "SyncMessage": "penstock.pop.client.syncmessage",
    "SyncTransaction": "penstock.pop.client.synctransactions",
    "SyncTransactionCalls": "penstock.pop.client.synctransactions",
    "Transaction": "penstock.pop.client.transactions",
    "TransactionCalls": "penstock.pop.client.transactions",
    "TransactionChecker": "penstock.pop.client.transactions",
    "group_settings": "penstock.pop.client.groupsettings",
}
"""The module of each name of the API. The errors, which are not listed, are in `penstock.pop.errors`."""


if not TYPE_CHECKING:  # A type checker that saw this function would accept any name.

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(_HOMES.get(name, "penstock.pop.errors")), name)
        globals()[name] = found  # Later uses of the name do not call this function.
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
