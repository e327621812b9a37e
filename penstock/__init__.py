"""Penstock: an MQTT broker and POP message queue on one durable log.

This package is the public API: the clients of a node, the worker, their messages and settings, and the errors that they raise.
`__all__` lists it. Every other module may change in any release. A name is loaded when it is first used, so the import of
`penstock` is quick, and the clients load no part of the node.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.pop.client.backoff import Backoff, Exponential
    from penstock.pop.client.client import Client
    from penstock.pop.client.consumer import Consumer
    from penstock.pop.client.deadletters import DeadLetterCalls, SyncDeadLetterCalls
    from penstock.pop.client.durations import Duration
    from penstock.pop.client.groups import GroupCalls, SyncGroupCalls
    from penstock.pop.client.groupsettings import group_settings
    from penstock.pop.client.message import Message
    from penstock.pop.client.outgoing import OutgoingMessage, SendReceipt
    from penstock.pop.client.producer import Producer
    from penstock.pop.client.received import PoppedMessages, ReceivedMessage
    from penstock.pop.client.results import (
        DeadLetter,
        DeadLetterReason,
        GroupDescription,
        GroupSettings,
        MissedPolicy,
        PendingTransaction,
        ScheduleDescription,
        ScheduleSettings,
        Timer,
        TimerCounts,
        TimersPage,
    )
    from penstock.pop.client.schedules import ScheduleCalls, SyncScheduleCalls
    from penstock.pop.client.security import Security
    from penstock.pop.client.stream import StreamConsumer, StreamMessage
    from penstock.pop.client.syncclient import SyncClient
    from penstock.pop.client.syncmessage import SyncMessage
    from penstock.pop.client.syncproducer import SyncProducer
    from penstock.pop.client.synctransactions import SyncTransaction, SyncTransactionCalls
    from penstock.pop.client.timers import SyncTimerCalls, TimerCalls
    from penstock.pop.client.tracing import Tracing
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
        DeduplicationIdReused,
        DeduplicationWindowPassed,
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
        RequestTimedOut,
        ScheduleExists,
        ScheduleUnknown,
        SendOutcomeUnknown,
        StatusError,
        TooManyQueues,
        TooManyTimers,
        TooManyTransactions,
        UnknownMessage,
        UnknownTransaction,
    )
    from penstock.worker.context import CallNext, HandlerCall, Middleware
    from penstock.worker.counts import WorkerCounts
    from penstock.worker.errors import HandlerInvalid, Reject, RetryLater, WorkerError
    from penstock.worker.middleware.deduplication import Deduplicate
    from penstock.worker.middleware.logging import LogCalls
    from penstock.worker.middleware.metrics import MeasureCalls
    from penstock.worker.middleware.ratelimit import LimitRate
    from penstock.worker.middleware.retrying import RetryCalls
    from penstock.worker.middleware.tracing import TraceCalls
    from penstock.worker.worker import Worker

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
    "CallNext",
    "Client",
    "ClientClosed",
    "Consumer",
    "DeadLetter",
    "DeadLetterCalls",
    "DeadLetterReason",
    "Deduplicate",
    "DeduplicationIdReused",
    "DeduplicationWindowPassed",
    "Duration",
    "Exponential",
    "GroupBusy",
    "GroupCalls",
    "GroupDescription",
    "GroupExists",
    "GroupSettings",
    "GroupUnknown",
    "HandleExpired",
    "HandleReplaced",
    "HandlerCall",
    "HandlerInvalid",
    "InternalError",
    "InvalidDeliveryTime",
    "InvalidHandle",
    "InvalidInvisibleTime",
    "InvalidProperty",
    "InvalidTopic",
    "InvalidTransaction",
    "LimitRate",
    "LogCalls",
    "MeasureCalls",
    "Message",
    "MessageTooLarge",
    "Middleware",
    "MissedPolicy",
    "NodeUnavailable",
    "NotAuthenticated",
    "NotPermitted",
    "OutgoingMessage",
    "Overloaded",
    "PendingTransaction",
    "PopError",
    "PoppedMessages",
    "Producer",
    "ReceivedMessage",
    "Reject",
    "RequestInvalid",
    "RequestTimedOut",
    "RetryCalls",
    "RetryLater",
    "ScheduleCalls",
    "ScheduleDescription",
    "ScheduleExists",
    "ScheduleSettings",
    "ScheduleUnknown",
    "Security",
    "SendOutcomeUnknown",
    "SendReceipt",
    "StatusError",
    "StreamConsumer",
    "StreamMessage",
    "SyncClient",
    "SyncDeadLetterCalls",
    "SyncGroupCalls",
    "SyncMessage",
    "SyncProducer",
    "SyncScheduleCalls",
    "SyncTimerCalls",
    "SyncTransaction",
    "SyncTransactionCalls",
    "Timer",
    "TimerCalls",
    "TimerCounts",
    "TimersPage",
    "TooManyQueues",
    "TooManyTimers",
    "TooManyTransactions",
    "TraceCalls",
    "Tracing",
    "Transaction",
    "TransactionCalls",
    "TransactionChecker",
    "UnknownMessage",
    "UnknownTransaction",
    "Worker",
    "WorkerCounts",
    "WorkerError",
    "group_settings",
]

_HOMES = {
    "Backoff": "penstock.pop.client.backoff",
    "CallNext": "penstock.worker.context",
    "Client": "penstock.pop.client.client",
    "Consumer": "penstock.pop.client.consumer",
    "DeadLetter": "penstock.pop.client.results",
    "DeadLetterCalls": "penstock.pop.client.deadletters",
    "DeadLetterReason": "penstock.pop.client.results",
    "Deduplicate": "penstock.worker.middleware.deduplication",
    "Duration": "penstock.pop.client.durations",
    "Exponential": "penstock.pop.client.backoff",
    "GroupCalls": "penstock.pop.client.groups",
    "GroupDescription": "penstock.pop.client.results",
    "GroupSettings": "penstock.pop.client.results",
    "HandlerCall": "penstock.worker.context",
    "HandlerInvalid": "penstock.worker.errors",
    "LimitRate": "penstock.worker.middleware.ratelimit",
    "LogCalls": "penstock.worker.middleware.logging",
    "MeasureCalls": "penstock.worker.middleware.metrics",
    "Message": "penstock.pop.client.message",
    "Middleware": "penstock.worker.context",
    "MissedPolicy": "penstock.pop.client.results",
    "OutgoingMessage": "penstock.pop.client.outgoing",
    "PendingTransaction": "penstock.pop.client.results",
    "Producer": "penstock.pop.client.producer",
    "SyncProducer": "penstock.pop.client.syncproducer",
    "PoppedMessages": "penstock.pop.client.received",
    "ReceivedMessage": "penstock.pop.client.received",
    "Reject": "penstock.worker.errors",
    "RetryCalls": "penstock.worker.middleware.retrying",
    "RetryLater": "penstock.worker.errors",
    "ScheduleCalls": "penstock.pop.client.schedules",
    "ScheduleDescription": "penstock.pop.client.results",
    "ScheduleSettings": "penstock.pop.client.results",
    "Security": "penstock.pop.client.security",
    "SendReceipt": "penstock.pop.client.outgoing",
    "StreamConsumer": "penstock.pop.client.stream",
    "StreamMessage": "penstock.pop.client.stream",
    "SyncClient": "penstock.pop.client.syncclient",
    "SyncDeadLetterCalls": "penstock.pop.client.deadletters",
    "SyncGroupCalls": "penstock.pop.client.groups",
    "SyncMessage": "penstock.pop.client.syncmessage",
    "SyncScheduleCalls": "penstock.pop.client.schedules",
    "SyncTimerCalls": "penstock.pop.client.timers",
    "SyncTransaction": "penstock.pop.client.synctransactions",
    "SyncTransactionCalls": "penstock.pop.client.synctransactions",
    "Timer": "penstock.pop.client.results",
    "TimerCalls": "penstock.pop.client.timers",
    "TimerCounts": "penstock.pop.client.results",
    "TimersPage": "penstock.pop.client.results",
    "TraceCalls": "penstock.worker.middleware.tracing",
    "Tracing": "penstock.pop.client.tracing",
    "Transaction": "penstock.pop.client.transactions",
    "TransactionCalls": "penstock.pop.client.transactions",
    "TransactionChecker": "penstock.pop.client.transactions",
    "Worker": "penstock.worker.worker",
    "WorkerCounts": "penstock.worker.counts",
    "WorkerError": "penstock.worker.errors",
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
